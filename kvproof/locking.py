"""One writer at a time for a file that several runs add to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Nobody else adds to the file meanwhile. Makes its folder. Raises ``OSError``."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    place = path.with_name(f".{path.name}.lock")
    with FileLock(place):
        try:
            yield
        finally:
            # While it is held: who waits for it notices and makes another.
            with contextlib.suppress(OSError):
                place.unlink()
