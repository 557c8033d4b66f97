"""How bad it is for whoever is served that an invariant breaks: the order in which findings are told, worst first."""

from __future__ import annotations

from typing import Final

HARMS: Final = (
    "wrong text",
    "the engine dies",
    "requests stand still",
    "work is done again",
    "others are told wrong",
)
"""What somebody notices, or worse, does not. A wrong answer comes first, since nothing says that it is one."""

_OF_FAMILY: Final = {
    "SLOT": 0, "HIT": 0, "EXT": 0, "REF": 0, "FLOW": 1, "ADMIT": 2, "REUSE": 3, "TAIL": 3, "EVENT": 4,
}  # fmt: skip
_UNLIKE_ITS_FAMILY: Final = {
    "ADMIT.deferred": 0,
    "HIT.only-recurrent-short": 1,
    "EVENT.counters": 1,
    "REF.queue-shape": 2,
    "REF.drained": 2,
    "EXT.offload-serves": 3,
    "REF.null-count": 4,
}


def severity(invariant: str) -> int:
    """The place of the invariant's harm in :data:`HARMS`: the smaller, the worse. Any other name than
    those of the catalogue comes last."""
    return _UNLIKE_ITS_FAMILY.get(invariant, _OF_FAMILY.get(invariant.partition(".")[0], len(HARMS)))


def harm(invariant: str) -> str:
    """That harm in words; empty for a name that is not in the catalogue."""
    return dict(enumerate(HARMS)).get(severity(invariant), "")
