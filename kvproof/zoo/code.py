"""What results depend on besides the faults: the code that searches and judges, and seeds that the commit decides."""

from __future__ import annotations

import functools
import hashlib

from kvproof.errors import UsageError
from kvproof.models.sources import hash_of

RUN = (
    "kvproof.models.stateful.campaign",
    "kvproof.models.stateful.replay",
    "kvproof.impl.vllm.subject",
    "kvproof.models.mutants.checkers",
    "kvproof.models.mutants.matrix",
    "kvproof.models.mutants.workload",
    "kvproof.impl.reference.live",
    "kvproof.impl.reference.mutants",
    "kvproof.impl.reference.null_model",
    "kvproof.impl.reference.subject",
)
"""What is run for a result: a search, a replay, the releases that they drive; and for mutants the checkers, and the
engine that faults are planted in. The catalogue of invariants comes with these, and so does what they use of the
specification; solvers' claims, exploration and live use do not."""


@functools.cache
def code_hash() -> str:
    """A hash of the sources of :data:`RUN` and all that they import of kvproof, wherever in a file they do. Not in it:
    data files, releases, and what hands results on (``kvproof/``), which decides nothing in a search."""
    return hash_of(*RUN)[:16]


def seed_of(commit: str, index: int) -> int:
    """The ``index``-th seed that a commit decides. Raises :class:`UsageError` where there is no commit."""
    if not commit:
        raise UsageError("seeds are derived from the commit, and this is no git checkout: name one with --commit")
    return int.from_bytes(hashlib.sha256(f"{commit}/{index}".encode()).digest()[:4], "big")
