"""Fetching a vLLM release as Python sources, and keeping it in a cache folder.

The core that kvproof drives is pure Python, so of a wheel of some 340 MB only the ``*.py`` files and the metadata are
kept (about 57 MB). The wheel is downloaded by pip, which means that whatever is configured for pip (an index of one's
own, a folder of wheels, a proxy) holds here too.

A release lies in ``<cache>/vllm-<version>``, with a manifest of every file. It is unpacked beside that place and
renamed, under a lock, so that two runs at once, a full disk or Ctrl-C never leave half a release behind; a tree that no
longer matches its manifest is fetched again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvproof.impl.vllm.download import download_wheel
from kvproof.impl.vllm.fetch_error import FetchError
from kvproof.impl.vllm.wheel import BadWheel, manifest_problem, unpack_sources
from kvproof.spec import cache_folder as kept

__all__ = ["FetchError", "cache_folder", "release_tree"]

Progress = Callable[[str], None]
_VERSION = re.compile(r"[0-9][0-9A-Za-z.!+-]*")
_ATTEMPTS = 2


def cache_folder() -> Path:
    """Where releases are kept, see :func:`kvproof.spec.cache_folder.cache_folder`."""
    try:
        return kept.cache_folder()
    except RuntimeError as error:
        raise FetchError(str(error)) from error


def release_tree(version: str, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder that, put on ``sys.path``, makes ``vllm`` of release ``version`` importable.

    Fetches it on first use; afterwards only the manifest is checked (every file's hash, a fraction of a second).
    ``progress`` is told what is going on, a line at a time. Raises :class:`FetchError` with one clear line when there
    is no such release, no network, a damaged wheel, or a cache folder that is read-only or full.
    """
    if not _VERSION.fullmatch(version):
        raise FetchError(f"{version!r} is not a vLLM release number: write it as in vllm==0.33.0")
    say = progress or (lambda line: None)
    root = cache if cache is not None else cache_folder()
    home = root / f"vllm-{version}"
    try:
        # The check needs no lock, so a cache that was filled beforehand may be read-only.
        if home.is_dir() and manifest_problem(home) is None:
            return home / "tree"
        return _fetch_locked(version, root, home, say)
    except OSError as error:
        raise FetchError(_folder_problem(root, error)) from error


def _fetch_locked(version: str, root: Path, home: Path, say: Progress) -> Path:
    from filelock import FileLock, Timeout

    root.mkdir(parents=True, exist_ok=True)
    place = root / f"vllm-{version}.lock"
    lock = FileLock(place)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another run is fetching vLLM {version}: waiting for it")
        lock.acquire()
    try:
        if home.is_dir():
            problem = manifest_problem(home)  # another run may have finished it while this one waited
            if problem is None:
                return home / "tree"
            say(f"the cached vLLM {version} is damaged ({problem}): fetching it again")
        # Holding the lock, whatever lies beside the release was left by a run that was killed.
        for leftover in root.glob(f"vllm-{version}.part-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        return _fetch(version, root, home, say)
    finally:
        # While it is held: who waits for it notices and makes another.
        with contextlib.suppress(OSError):
            place.unlink()
        lock.release()


def _fetch(version: str, root: Path, home: Path, say: Progress) -> Path:
    problem = ""
    for attempt in range(_ATTEMPTS):
        staging = Path(tempfile.mkdtemp(prefix=f"vllm-{version}.part-", dir=root))
        try:
            if attempt:
                say(f"{problem}: starting again")
            wheel = download_wheel(version, staging, say)
            say(f"unpacking the Python sources of vLLM {version}")
            unpack_sources(wheel, staging / "release")
            if home.exists():
                home.rename(staging / "damaged")
            (staging / "release").rename(home)
            say(f"vLLM {version} is ready")
            return home / "tree"
        except BadWheel as error:
            problem = f"the downloaded wheel of vLLM {version} is damaged ({error})"
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    raise FetchError(
        f"{problem}, and so was a second download: check the index or folder that pip is configured to use"
    )


def _folder_problem(root: Path, error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no room in the cache folder {root} ({reason}): "
            "a release takes about 500 MB while it is fetched; free some, or set KVPROOF_CACHE"
        )
    file = next((place for place in (root, *root.parents) if os.path.lexists(place) and not place.is_dir()), None)
    if file is not None:
        reason = f"{file} is no folder"
    return f"can't write to the cache folder {root} ({reason}): set KVPROOF_CACHE to a folder that can be written"
