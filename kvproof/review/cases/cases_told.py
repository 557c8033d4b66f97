"""Rules about what a cache announces and counts, and about a request that has the engine to itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvproof.review.cases.calls import Mutant, Rule, seen
from kvproof.review.cases.fakeview import FULL, MAMBA, OTHER, STATES, FakeView, busy
from kvproof.spec.events import Counted, Lone, Observation, Removed, Stored
from kvproof.spec.tracer import EMPTY

# Two full blocks of 4 after 8 tokens: those of the tokens 8 … 15.
STORED = Stored(
    group=FULL,
    keys=(STATES[12], STATES[16]),
    parent=STATES[8],
    tokens=8,
    block_size=4,
    reached=(STATES[12], STATES[16]),
)
# A state inside a recurrent block of 8, keyed by the unit of 4 tokens that ends there.
INSIDE = Stored(MAMBA, keys=(STATES[4],), parent=EMPTY, tokens=4, block_size=4, reached=(STATES[4],))
REMOVED = Removed(MAMBA, STATES[16])
PROMPT = Counted("prompt", (("prompt", 20), ("computed", 4), ("local", 12), ("external", 4)), "r1", found=16)
LOOKUPS = Counted("lookups in the cache", (("queries", 20), ("hits", 12)))
LONE = Lone("r1", tokens=20, longest=24, blocks=9, finished=True)
STUCK = {"finished": False, "preempted": 3}


def _prompt(**counts: int) -> Observation:
    return seen(PROMPT, counts=tuple({**dict(PROMPT.counts), **counts}.items()))


def _without_drafts() -> FakeView:
    view = busy()
    view.config = replace(view.config, speculative=0)
    return view


def _event(**changes: Any) -> Observation:
    return seen(STORED, **changes)


TOLD = (
    Rule(
        "EVENT.stored-well-formed",
        lambda: seen(STORED),
        (
            # What a sparse group announces of a range of which it keeps the last block only.
            Mutant(
                lambda: _event(group=MAMBA, keys=(STATES[24],), parent=EMPTY, tokens=24, block_size=8),
                "mamba-tokens-of-other-blocks",
                {"group": MAMBA},
                ("24 tokens", "1 hashes"),
            ),
            Mutant(lambda: _event(keys=(), reached=()), "full-tokens-of-other-blocks", {"group": FULL}),
            Mutant(
                lambda: _event(block_size=8, keys=(STATES[16],)), "full-block-size-of-another-group", {"group": FULL}
            ),
            Mutant(lambda: _event(parent=EMPTY), "parent-of-another-block", {"group": FULL}),
            Mutant(lambda: _event(parent=None), "parent-of-another-block", {"group": FULL}),
            Mutant(lambda: _event(reached=(OTHER[12], OTHER[16])), "tokens-of-another-prefix", {"group": FULL}),
            Mutant(lambda: _event(gone=(STATES[16],)), "stored-nowhere", {"group": FULL}),
            # Host memory, which speaks of a block of 8 as of its two units.
            Mutant(
                lambda: _event(group=MAMBA, offloaded=True),
                "offloaded-mamba-block-size-of-another-group",
                {"group": MAMBA},
                ("hold 4 tokens", "hold 8"),
            ),
        ),
        right="An announcement of one block of 8 lists its 8 tokens, 17 to 24, and names the prefix of 16 tokens as "
        "its parent.",
    ),
    Rule(
        "EVENT.removed-is-gone",
        lambda: seen(REMOVED),
        (Mutant(lambda: seen(REMOVED, carriers=(8,)), "removed-while-carried", {"block": 8, "group": MAMBA}),),
        right="The removal is announced when block 8 carries the key no more: then there is no carrier to list.",
    ),
    Rule(
        "EVENT.counters",
        lambda: seen(PROMPT),
        (
            Mutant(lambda: _prompt(local=-4, external=20), "prompt-local-negative", {"request": "r1"}, ("local -4",)),
            Mutant(lambda: _prompt(local=20, computed=-4), "prompt-computed-negative", {"request": "r1"}),
            Mutant(lambda: _prompt(local=20, computed=0), "prompt-cached-beyond-prompt", {"request": "r1"}),
            Mutant(lambda: _prompt(computed=8), "prompt-does-not-add-up", {"request": "r1"}),
            # What it had computed itself before it was preempted.
            Mutant(
                lambda: seen(PROMPT, found=12),
                "prompt-cached-beyond-first-hit",
                {"request": "r1"},
                ("12 were in a cache",),
            ),
        ),
        right="Of 20 tokens 4 were computed, 12 came from the cache and 4 from the store: no part is negative, and "
        "they add up.",
    ),
    Rule(
        "ADMIT.startup",
        lambda: seen(LONE),
        (
            Mutant(
                lambda: seen(LONE, _without_drafts(), **STUCK),
                "lone-request-preempts-itself",
                {"request": "r1"},
                ("9 blocks",),
            ),
            Mutant(
                lambda: seen(LONE, _without_drafts(), finished=False),
                "lone-request-starves",
                {"request": "r1"},
                ("24 tokens",),
            ),
            Mutant(
                lambda: seen(LONE, finished=False, partial=True),
                "lone-request-starves-with-partial-hit",
                {"request": "r1"},
            ),
            # What a window holds was counted without the drafts that a step needs room for.
            Mutant(
                lambda: seen(LONE, finished=False),
                "lone-request-starves-with-drafts-beyond-window",
                {"request": "r1"},
            ),
        ),
        right="A pool that the start-up check accepts for 24 tokens lets a request of 20 that is alone run to its end.",
    ),
)
