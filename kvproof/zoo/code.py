"""What results depend on besides the faults: the code that searches and judges, and seeds that the commit decides."""

from __future__ import annotations

import functools
import hashlib

from kvproof.errors import UsageError
from kvproof.revision import folder_of

ROOMS = ("spec", "invariants", "models", "impl")
"""The rooms in which there is what searches and judges."""


@functools.cache
def code_hash() -> str:
    """A hash of all sources of :data:`ROOMS`."""
    digest = hashlib.sha256()
    for room in ROOMS:
        folder = folder_of(room)
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{room}/{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def seed_of(commit: str, index: int) -> int:
    """The ``index``-th seed that a commit decides. Raises :class:`UsageError` where there is no commit."""
    if not commit:
        raise UsageError("seeds are derived from the commit, and this is no git checkout: name one with --commit")
    return int.from_bytes(hashlib.sha256(f"{commit}/{index}".encode()).digest()[:4], "big")
