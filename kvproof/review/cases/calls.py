"""What the tables of rules are made of: events on a small sound cache, and ways to spoil one thing of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvproof.review.cases.fakeview import FULL, MAMBA, STATES, WINDOW, FakeView, busy, running
from kvproof.spec.config import Config
from kvproof.spec.events import (
    Allocate,
    Crash,
    Estimate,
    Event,
    Forward,
    GroupEstimate,
    Lookup,
    Observation,
    Preempted,
    Read,
    Resume,
    Split,
    Stall,
    Starved,
    StepEnd,
    Truncate,
    Write,
)

STEP = StepEnd(index=7, scheduled=("r1",), running=("r1",), waiting=())
Spoil = Callable[[FakeView], None]


def seen(event: Event, view: FakeView | None = None, **changes: Any) -> Observation:
    """The event, changed, on a busy cache."""
    # Events that come by the dozen in every step are named tuples, the others dataclasses.
    changed = event._replace(**changes) if isinstance(event, Forward) else replace(event, **changes)
    return Observation(changed, view if view is not None else busy())


def spoiled(spoil: Spoil, event: Event = STEP, start: Callable[[], FakeView] = busy) -> Observation:
    """A whole state with one thing wrong in it."""
    view = start()
    spoil(view)
    return Observation(event, view)


def put(where: str, at: Any, value: Any) -> Spoil:
    """Overwrite one entry of one field of the view."""

    def spoil(view: FakeView) -> None:
        getattr(view, where)[at] = value

    return spoil


def let(where: str, value: Any) -> Spoil:
    """Overwrite one field of the view."""
    return lambda view: setattr(view, where, value)


def drop(where: str, at: Any) -> Spoil:
    """Remove one entry of one field of the view."""
    return lambda view: getattr(view, where).remove(at) if where == "queue" else getattr(view, where).pop(at)


# -- calls on a sound cache -------------------------------------------------------------------------------------------

SPLIT = Split(request="r1", start=8, offered=12, granted=8, prefill_end=22, limit=16, stops=(20,))

READS = (
    Read("r1", MAMBA, True, 20, STATES[20], STATES[20], STATES[20], slot=2, block=9, ok=True),
    Read("r1", FULL, False, 20, STATES[20], STATES[20], None, slot=-1, block=-1, ok=True),
)
WRITES = (
    Write("r1", FULL, block=12, slot=5, state=STATES[22], references=1, owned=True, foreign_keys=()),
    Write("r1", MAMBA, block=10, slot=3, state=STATES[22], references=1, owned=True, foreign_keys=()),
)
FORWARD = Forward(request="r1", start=20, tokens=2, drafts=1, prefill_end=20, reads=READS, writes=WRITES)


def forward(read: int = -1, write: int = -1, **changes: Any) -> Observation:
    """The forward with one of its reads or writes changed."""
    reads, writes = list(READS), list(WRITES)
    if read >= 0:
        reads[read] = reads[read]._replace(**changes)
    if write >= 0:
        writes[write] = writes[write]._replace(**changes)
    return seen(FORWARD, reads=tuple(reads), writes=tuple(writes))


LOOKUP = Lookup(
    request="r2",
    states=tuple(STATES[:23]),
    tokens=20,
    limit=21,
    blocks=((1, 2, 3, 4, 5), (0, 0, 0, 6, 7), (0, 0, 9)),
    depth=(20, 20, 20),
)
RESUME = Resume("r2", 20, 0, LOOKUP.blocks, hit=20, offered=0, diverged=False, asynchronous=False)
CUT = Truncate(
    request="r2",
    endpoint=16,
    before=((1, 2, 3, 4, 5), (0, 0, 0, 6, 7), (11,)),
    after=((1, 2, 3, 4), (0, 0, 0, 6), (11,)),
)


def second() -> FakeView:
    """The busy cache with a second request of 22 tokens, which are those of the first."""
    view = busy()
    view.running["r2"] = running("r2", STATES[:23], 0)
    return view


def resume(spoil: Spoil | None = None, **changes: Any) -> Observation:
    view = second()
    if spoil is not None:
        spoil(view)
    return seen(RESUME, view, **changes)


def cut_config(observation: Observation, config: Config) -> Observation:
    assert isinstance(observation.view, FakeView)
    observation.view.config = config
    return observation


def answer(group: int, total: int, evictable: int = 0, hits: int = 0, held: int = 0, **changes: Any) -> GroupEstimate:
    flags = {"deferred": False, "partial": False, "checkpoint": False, "first": True, **changes}
    return GroupEstimate(group, total, evictable, held=held, hits=hits, **flags)


# r3 brings 64 tokens and hits 8: 2 blocks of the full group, the window's second, and the free state block 11.
ANSWERS = (answer(FULL, 14, hits=2), answer(WINDOW, 14, hits=2), answer(MAMBA, 3, evictable=1, hits=1))
REAL = Estimate("r3", dry=False, tokens=64, computed=8, groups=ANSWERS, free=13)
DRY = replace(REAL, dry=True)
GRANTED = Allocate(
    request="r3",
    granted=True,
    taken=31,
    free_before=40,
    estimates=(DRY, REAL),
    new_blocks=(14, 14, 2),
    evictable_hits=(0, 0, 1),
)
REFUSED = replace(GRANTED, granted=False, taken=0, free_before=30, new_blocks=(), evictable_hits=())


def charged(group: int, **changes: Any) -> Estimate:
    """The real question with another answer in one group."""
    answers = list(ANSWERS)
    answers[group] = replace(answers[group], **changes)
    return replace(REAL, groups=tuple(answers))


LATER = charged(MAMBA, total=25, deferred=True)


def allocate(real: Estimate = REAL, dry: Estimate = DRY, event: Allocate = GRANTED, **changes: Any) -> Observation:
    return seen(event, estimates=(dry, real), **changes)


STALL = Stall(request="r3", schedules=3, peak=23, pool=23, blocked=False, why="waiting")
PREEMPTED = Preempted(request="r3", alone=4, freed=4)
STARVED = Starved(request="r3", steps=48, left=5, why="waiting")
CRASH = Crash(
    location="vllm.v1.core.kv_cache_manager:truncate_computed_blocks",
    error="AssertionError",
    line="assert num_blocks <= len(group)",
)


@dataclass(frozen=True)
class Mutant:
    """One thing wrong, the cause it is named by, where it is seen, and what the witness must say."""

    spoil: Callable[[], Observation]
    cause: str
    where: dict[str, str | int]
    says: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A sound case, ways to spoil it, and what would be ``right`` instead of the first of these, in a sentence."""

    id: str
    sound: Callable[[], Observation]
    mutants: tuple[Mutant, ...]
    right: str


def step() -> Observation:
    return seen(STEP)
