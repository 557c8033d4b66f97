"""Rules about blocks that leave the cache and come back. Each on a sound case, and its mutants."""

from __future__ import annotations

from kvproof.review.cases.calls import Mutant, Rule, seen
from kvproof.review.cases.fakeview import FULL, MAMBA, STATES, WINDOW
from kvproof.spec.events import Observation, Offer, Offloaded
from kvproof.spec.view import NULL

STATE = Offloaded(group=MAMBA, block=8, state=STATES[16], moment="chosen")
ATTENTION = Offloaded(group=FULL, block=1, state=STATES[4], moment="offered")
HELD = frozenset(
    (group, STATES[n]) for group, size in ((FULL, 4), (WINDOW, 4), (MAMBA, 8)) for n in range(size, 17, size)
)
OFFER = Offer(request="r2", states=tuple(STATES[:23]), local=0, offered=16, held=HELD)


def _without(group: int, tokens: int, offered: int) -> Observation:
    return seen(OFFER, held=HELD - {(group, STATES[tokens])}, offered=offered)


OFFLOAD = (
    Rule(
        "EXT.offload-content",
        lambda: seen(STATE),
        (
            Mutant(
                lambda: seen(STATE, state=STATES[8]),
                "chosen-full-key-overrun",
                {"block": 8, "group": MAMBA},
                ("is chosen as state@8", "holds state@16"),
            ),
            Mutant(lambda: seen(STATE, block=11), "chosen-full-key-stale", {"block": 11}),
            Mutant(lambda: seen(STATE, block=NULL), "chosen-null", {"block": NULL}, ("the null block",)),
            Mutant(lambda: seen(ATTENTION, block=2), "offered-attention-key-position", {"block": 2, "group": FULL}),
            Mutant(
                lambda: seen(STATE, state=STATES[8], moment="copied"), "state-overwritten-before-copy", {"block": 8}
            ),
            Mutant(
                lambda: seen(ATTENTION, block=2, moment="copied"), "attention-overwritten-before-copy", {"block": 2}
            ),
        ),
        right="Block 8 is chosen as state@16#a7d4, which is what it holds.",
    ),
    Rule(
        "EXT.offload-offers",
        lambda: seen(OFFER),
        (
            Mutant(lambda: seen(OFFER, offered=22), "leaves-nothing-to-compute", {"request": "r2"}, ("0 of 22",)),
            Mutant(lambda: seen(OFFER, offered=12), "offers-boundary-without-state", {"group": MAMBA}, ("at 12",)),
            Mutant(lambda: _without(MAMBA, 16, 16), "offers-boundary-without-state", {"request": "r2"}),
            Mutant(lambda: _without(FULL, 8, 16), "offers-attention-it-lacks", {"group": FULL}, ("ends at 8",)),
        ),
        right="The store offers 16 tokens: up to there it holds all blocks and the state, and a token is left to "
        "compute.",
    ),
    Rule(
        "EXT.offload-serves",
        lambda: seen(OFFER),
        (
            Mutant(lambda: seen(OFFER, offered=8), "holds-more-than-it-offers", {"request": "r2"}, ("resume at 16",)),
            Mutant(lambda: seen(OFFER, offered=0), "holds-but-offers-nothing", {"request": "r2"}),
            Mutant(lambda: _without(MAMBA, 16, 0), "holds-but-offers-nothing", {"request": "r2"}, ("resume at 8",)),
        ),
        right="The store offers 16 tokens: it holds all blocks up to there, and the state at 16.",
    ),
)
