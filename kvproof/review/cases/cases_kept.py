"""Rules about checkpoints that are kept, external loads and events. Each on a sound case, and its mutants."""

from __future__ import annotations

from typing import Any

from kvproof.review.cases.calls import STEP, Mutant, Rule, Spoil, drop, seen
from kvproof.review.cases.fakeview import MAMBA, STATES, FakeView, busy, key
from kvproof.spec.events import Loaded, Observation, Zeroing
from kvproof.spec.tracer import show
from kvproof.spec.view import Holder


def _tail(**changes: Any) -> FakeView:
    """The busy cache, whose request can be resumed at its running state after 20 tokens, in block 9."""
    view = busy()
    view.newest = {("r1", MAMBA): (20, 9)}
    view.others = [Holder("hold r1/2", 9, "r1", MAMBA)]
    view.counts[9] += 1
    for name, value in changes.items():
        setattr(view, name, value)
    return view


def _let_go() -> Observation:
    view = _tail(newest={("r1", MAMBA): (8, 11)})
    return Observation(STEP, view)


def _unkeyed() -> Observation:
    view = _tail()
    view.keyed[9] = [key(MAMBA, STATES[16])]
    return Observation(STEP, view)


def _two_holds() -> Observation:
    view = _tail()
    view.others.append(Holder("hold r1/2", 8, "r1", MAMBA))
    view.counts[8] += 1
    return Observation(STEP, view)


LOADED = Loaded("r1", start=8, claimed=16, received=16, counted=16)


def _loading(block: int) -> Observation:
    return Observation(STEP, _loads(busy(), block))


def _wiped(block: int) -> Observation:
    return Observation(Zeroing((block,)), _loads(busy(), 5))


def _loads(view: FakeView, block: int) -> FakeView:
    view.loading = {"r2": {4, block}}
    return view


def _heard(spoil: Spoil | None = None) -> Observation:
    """Somebody follows the cache's events, and has heard of every key."""
    view = busy()
    view.told = {block: {(k.group, k.state) for k in keys} for block, keys in view.keyed.items()}
    if spoil is not None:
        spoil(view)
    return Observation(STEP, view)


KEPT = (
    Rule(
        "TAIL.newest-held",
        lambda: Observation(STEP, _tail()),
        (
            Mutant(_let_go, "newest-state-evictable", {"block": 11, "group": MAMBA, "request": "r1"}, ("8 tokens",)),
            Mutant(_unkeyed, "newest-state-not-keyed", {"block": 9, "request": "r1"}, (show(STATES[20]),)),
        ),
        right="The newest state of r1 is in a block with a reference (in the sound case block 9, by its table and by a "
        "hold), so that nobody is given it.",
    ),
    Rule(
        "TAIL.one-hold",
        lambda: Observation(STEP, _tail()),
        (Mutant(_two_holds, "older-checkpoint-kept", {"group": MAMBA, "request": "r1"}, ("2 checkpoints",)),),
        right="r1 has one hold in group 2, on block 9, its newest state; that on block 8 was released.",
    ),
    Rule(
        "EXT.counts-what-came",
        lambda: seen(LOADED),
        (
            Mutant(lambda: seen(LOADED, received=12), "counts-what-never-came", {"request": "r1"}, ("12 of 16",)),
            Mutant(lambda: seen(LOADED, counted=20), "counts-beyond-claim", {"request": "r1"}, ("20 tokens",)),
        ),
        right="Only 12 of 16 tokens came, without the state at 16: 8 tokens count as computed, as before the load.",
    ),
    Rule(
        "EXT.in-flight-held",
        lambda: _loading(5),
        (Mutant(lambda: _loading(13), "block-of-load-in-flight-free", {"block": 13, "request": "r2"}),),
        right="The load writes to blocks that have a reference, such as 4 and 5; block 13 would be held until it is "
        "over.",
    ),
    Rule(
        "EXT.zero-spares-load",
        lambda: _wiped(12),
        (Mutant(lambda: _wiped(5), "block-of-load-wiped", {"block": 5, "request": "r2"}),),
        right="The step wipes block 12, which no load writes to, and leaves block 5 alone.",
    ),
    Rule(
        "EXT.rest-wiped",
        lambda: seen(LOADED, partly=(4,)),
        (
            Mutant(
                lambda: seen(LOADED, partly=(4,), unwiped=(4,)),
                "rest-of-loaded-block-dirty",
                {"block": 4, "request": "r1"},
            ),
        ),
        right="Block 4 was wiped before the load, so nothing is listed as unwiped.",
    ),
    Rule(
        "EVENT.replays",
        _heard,
        (
            Mutant(
                lambda: _heard(drop("told", 11)), "key-not-announced", {"block": 11, "group": MAMBA}, (show(STATES[8]),)
            ),
            Mutant(lambda: _heard(drop("keyed", 11)), "removal-not-announced", {"block": 11, "group": MAMBA}),
        ),
        right="Block 11 was announced as state@8#dbae when it was keyed.",
    ),
)
