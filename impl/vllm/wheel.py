"""Unpacking the Python sources of a wheel, checked against the wheel's own RECORD, and checking them again later.

RECORD is part of the wheel format: one line per file with its SHA-256 and size. A kept file that is missing there, or
that RECORD names and the archive lacks, makes the wheel damaged.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import zipfile
import zlib
from pathlib import Path, PurePosixPath

MANIFEST = "manifest.json"
_FORMAT = 1


class BadWheel(Exception):
    """The archive is not what its RECORD says. The message names the first thing that is wrong."""


def unpack_sources(wheel: Path, release: Path) -> None:
    """Write the ``*.py`` files and the metadata of ``wheel`` to ``release/tree``, and their manifest beside it.

    Raises :class:`BadWheel`, or ``OSError`` from writing. The wheel is deleted.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            entries = _unpack(archive, release / "tree")
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, RuntimeError) as error:
        # ValueError: impossible offsets or names; RuntimeError: encrypted, or packed by a method unknown here.
        raise BadWheel(str(error) or type(error).__name__) from error
    manifest = {"format": _FORMAT, "wheel": wheel.name, "files": entries, "digest": _digest(entries)}
    (release / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    wheel.unlink()


def _unpack(archive: zipfile.ZipFile, tree: Path) -> dict[str, list[int | str]]:
    names = [name for name in archive.namelist() if not name.endswith("/")]
    records = [name for name in names if name.endswith(".dist-info/RECORD") and name.count("/") == 1]
    if len(records) != 1:
        raise BadWheel("it has no RECORD")
    promised = _record(archive.read(records[0]))
    missing = sorted(name for name in promised if _kept(name) and name not in set(names))
    if missing:
        raise BadWheel(f"{missing[0]} is missing")
    entries: dict[str, list[int | str]] = {}
    for name in filter(_kept, names):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise BadWheel(f"{name} points outside the wheel")
        content = archive.read(name)
        if name != records[0] and promised.get(name) != hashlib.sha256(content).digest():
            raise BadWheel(f"{name} does not match its RECORD")
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        entries[name] = [len(content), hashlib.sha256(content).hexdigest()]
    if not any(name.endswith(".py") for name in entries):
        raise BadWheel("it holds no Python sources")
    return entries


def _record(content: bytes) -> dict[str, bytes]:
    """File name to SHA-256, as RECORD has them (URL-safe base64 without padding)."""
    promised: dict[str, bytes] = {}
    try:
        for row in csv.reader(io.StringIO(content.decode("utf-8"))):
            if len(row) == 3 and row[1].startswith("sha256="):
                text = row[1].removeprefix("sha256=")
                promised[row[0]] = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError as error:  # not UTF-8, or not base64
        raise BadWheel("its RECORD is unreadable") from error
    return promised


def _kept(name: str) -> bool:
    return name.endswith(".py") or ".dist-info/" in name


def _digest(entries: dict[str, list[int | str]]) -> str:
    lines = "".join(f"{name} {size} {digest}\n" for name, (size, digest) in sorted(entries.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def manifest_problem(release: Path) -> str | None:
    """What is wrong with an unpacked release, or ``None``. Compiled caches that Python left in it don't count."""
    try:
        manifest = json.loads((release / MANIFEST).read_text(encoding="utf-8"))
        entries: dict[str, list[int | str]] = manifest["files"]
        if manifest["format"] != _FORMAT or manifest["digest"] != _digest(entries):
            return "its manifest is damaged"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "its manifest can't be read"
    tree = release / "tree"
    found: set[str] = set()
    for folder, folders, names in os.walk(tree):
        folders[:] = [name for name in folders if name != "__pycache__"]
        inside = Path(folder).relative_to(tree)
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]  # not walked into
        found.update((inside / name).as_posix() for name in (*names, *links))
    if found != entries.keys():
        odd = min(found ^ entries.keys())
        return f"{odd} is {'not part of the release' if odd in found else 'missing'}"
    for name, (size, digest) in entries.items():
        try:
            content = (tree / name).read_bytes()
        except OSError as error:
            return f"{name} can't be read ({error.strerror})"
        if len(content) != size or hashlib.sha256(content).hexdigest() != digest:
            return f"{name} has changed"
    return None
