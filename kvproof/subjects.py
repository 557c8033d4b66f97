"""Names of subjects on the command line: what they mean, and how to get hold of one."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kvproof import engines
from kvproof.errors import UsageError, stop
from kvproof.findings import REFERENCE, SPECIFICATION
from kvproof.spec.subject import Subject

OLDEST: Final = "0.20.0"
NEWEST: Final = "0.33.0"
"""The releases that kvproof is tested with. ``verify`` drives the newest."""

_FORMS = "spec, reference, vllm, vllm==0.33.0 or vllm@PATH"


@dataclass(frozen=True)
class Target:
    """A subject that was named but not loaded yet.

    ``release`` is what findings are recorded for: its vLLM version (empty where it can't be told), ``spec`` or
    ``reference``.
    """

    text: str
    kind: Literal["spec", "reference", "installed", "release", "checkout"]
    release: str
    path: Path | None = None


def parse(text: str) -> Target:
    """What ``text`` names. Raises :class:`UsageError` for anything that can't be driven."""
    if text == SPECIFICATION:
        return Target(text, "spec", SPECIFICATION)
    if text == REFERENCE:
        return Target(text, "reference", REFERENCE)
    if text == "vllm":
        return Target(text, "installed", _installed_release())
    if text.startswith("vllm=="):
        release = text.removeprefix("vllm==").strip()
        if not re.fullmatch(r"[0-9][0-9A-Za-z.!+-]{0,60}", release):
            raise UsageError(f"{text!r} names no release: write it as in vllm=={NEWEST}")
        if _numbers(release) < _numbers(OLDEST):
            raise UsageError(f"vLLM {release} is too old to be driven: use {OLDEST} or newer")
        return Target(text, "release", release)
    if text.startswith("vllm@"):
        try:
            path = Path(text.removeprefix("vllm@")).expanduser()
        except RuntimeError as error:
            raise UsageError(f"{text!r} names no folder: {error}") from error
        if not (path / "vllm" / "__init__.py").is_file():
            raise UsageError(f"no vLLM checkout at {path}: name the folder that contains vllm/__init__.py")
        return Target(text, "checkout", _checkout_release(path), path.resolve())
    raise UsageError(f"unknown subject {text!r}: use {_FORMS}")


def open_subject(target: Target, progress: engines.Progress) -> Subject:
    """The subject itself. Fetches a release where needed and imports it into this process (some seconds).

    Raises :class:`UsageError` for a vLLM that can't be imported, and ``ImportError`` where a dependency is missing.
    """
    if target.kind == "spec":
        return engines.specification_subject()
    if target.kind == "reference":
        return engines.reference_subject()
    # Nothing here needs a model hub or the release's own log.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    tree = target.path
    if target.kind == "release":
        from kvproof.impl.vllm.fetch import release_tree

        tree = release_tree(target.release, progress=progress)
    elif target.kind == "installed" and importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    progress(f"importing {target.text} (about 15 s)")
    with _importing(target, tree):
        subject = engines.vllm_subject(tree, target.text)
    stop.check()
    return subject


@contextlib.contextmanager
def _importing(target: Target, tree: Path | None) -> Iterator[None]:
    """What a vLLM raises while it is imported is its own doing, an end of the process included, and no checker's."""
    try:
        yield
    except ImportError:  # explained by what is missing
        raise
    except (Exception, SystemExit) as error:
        stop.check()
        place = _raised_at(error, tree)
        if not place and not isinstance(error, (SyntaxError, SystemExit)):
            raise
        what = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"this vLLM can't be imported: {place or tree or target.text}: {what} (KVPROOF_DEBUG=1 shows where)"
        ) from error


def _raised_at(error: BaseException, tree: Path | None) -> str:
    """The last place in vLLM's files that ``error`` came through; empty if it came through none."""
    spec = None if tree else importlib.util.find_spec("vllm")
    folder = tree / "vllm" if tree else Path(spec.origin).parent if spec and spec.origin else None
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    inside = [place for place in places if folder and folder.resolve() in Path(place[0]).resolve().parents]
    return f"{inside[-1][0]}, line {inside[-1][1]}" if inside else ""


def _installed_release() -> str:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _checkout_release(path: Path) -> str:
    """A release that lies in ``path`` names itself in its metadata; a built checkout, in a generated module."""
    for folder in sorted(path.glob("vllm-*.dist-info")):
        return folder.name.removeprefix("vllm-").removesuffix(".dist-info")
    try:
        text = (path / "vllm" / "_version.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    found = re.search(r"""^(?:__version__|version)\b.*?['"]([0-9][^'"]*)['"]""", text, re.MULTILINE)
    return found.group(1) if found else ""


def _numbers(release: str) -> tuple[int, ...]:
    found = re.match(r"[0-9]+(?:\.[0-9]+)*", release)
    numbers = tuple(map(int, found.group().split("."))) if found else ()
    return numbers + (0,) * (3 - len(numbers))
