"""Every rule of the catalogue on a sound cache, where it is judged and silent, and on its mutants, which it kills."""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvproof.invariants.catalogue import CATALOGUE, FAMILIES, by_id
from kvproof.invariants.content import relation
from kvproof.invariants.monitor import Monitor
from kvproof.spec.config import Config
from kvproof.spec.events import (
    Allocate,
    Crash,
    Drained,
    Estimate,
    Event,
    Forward,
    GroupEstimate,
    Lookup,
    Observation,
    Read,
    Resume,
    Split,
    Stall,
    StepEnd,
    Truncate,
    Write,
)
from kvproof.spec.tracer import EMPTY, State, show
from kvproof.spec.view import Holder, Key, MambaContent

sys.path.insert(0, str(Path(__file__).parent))
from fakeview import CONFIG, FULL, MAMBA, OTHER, STATES, WINDOW, FakeView, busy, idle, key, running, state

sys.path.pop(0)

STEP = StepEnd(index=7, scheduled=("r1",), running=("r1",), waiting=())
Spoil = Callable[[FakeView], None]


def seen(event: Event, view: FakeView | None = None, **changes: Any) -> Observation:
    """The event, changed, on a busy cache."""
    return Observation(replace(event, **changes), view if view is not None else busy())


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
        reads[read] = replace(reads[read], **changes)
    if write >= 0:
        writes[write] = replace(writes[write], **changes)
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
    alone=True,
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
CRASH = Crash(
    location="vllm.v1.core.kv_cache_manager:truncate_computed_blocks",
    error="AssertionError",
    line="assert num_blocks <= len(group)",
)


# -- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One thing wrong, the cause it is named by, where it is seen, and what the witness must say."""

    spoil: Callable[[], Observation]
    cause: str
    where: dict[str, str | int]
    says: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    id: str
    sound: Callable[[], Observation]
    mutants: tuple[Mutant, ...]


def step() -> Observation:
    return seen(STEP)


def _twice(view: FakeView) -> None:
    view.queue.append(14)


def _shared_slot(view: FakeView) -> None:
    view.slots["r1", MAMBA] = [8, 0, 9, 10]


def _wrong_group(view: FakeView) -> None:
    view.slots["r1", WINDOW] = [0, 0, 0, 4, 7]


RULES = (
    Rule(
        "FLOW.no-crash",
        step,
        (
            Mutant(
                lambda: seen(CRASH),
                "kv_cache_manager.truncate_computed_blocks-AssertionError-assert-num_blocks-len-group",
                {},
                ("AssertionError", "kv_cache_manager"),
            ),
            Mutant(
                lambda: seen(CRASH, error="ValueError: no block 17 for request r12"),
                "kv_cache_manager.truncate_computed_blocks-ValueError-no-block-for-request",
                {},
            ),
        ),
    ),
    Rule(
        "HIT.limit",
        lambda: seen(LOOKUP),
        (
            Mutant(lambda: seen(LOOKUP, tokens=22, depth=()), "nothing-left-to-compute-at-lookup", {"request": "r2"}),
            Mutant(lambda: seen(LOOKUP, limit=16), "hit-beyond-limit-at-lookup", {"request": "r2"}, ("20", "16")),
            Mutant(lambda: seen(LOOKUP, depth=(20, 20, 16)), "hit-deeper-than-a-group-at-lookup", {"request": "r2"}),
            Mutant(lambda: resume(external=2), "nothing-left-to-compute-at-resume", {"request": "r2"}),
        ),
    ),
    Rule(
        "HIT.covers",
        lambda: seen(LOOKUP),
        (
            Mutant(
                lambda: seen(LOOKUP, blocks=((1, 2, 3, 4), (0, 0, 0, 6, 7), (0, 0, 9))),
                "full-short-at-lookup",
                {"group": FULL, "slot": 4, "request": "r2"},
            ),
            Mutant(
                lambda: seen(LOOKUP, blocks=((1, 2, 3, 4, 5), (0, 0, 0, 0, 7), (0, 0, 9))),
                "window-null-at-lookup",
                {"group": WINDOW, "slot": 3},
            ),
            Mutant(
                lambda: resume(blocks=((1, 2, 3, 4, 5), (0, 0, 0, 6, 7), (0, 8))),
                "mamba-short-at-resume",
                {"group": MAMBA, "slot": 2},
            ),
        ),
    ),
    Rule(
        "HIT.promises",
        lambda: seen(LOOKUP),
        (
            Mutant(
                lambda: spoiled(put("keyed", 9, [key(MAMBA, OTHER[20])]), LOOKUP),
                "mamba-hit-of-other-key-at-lookup",
                {"block": 9, "slot": 2, "group": MAMBA, "request": "r2"},
                (show(OTHER[20]),),
            ),
            Mutant(
                lambda: spoiled(drop("keyed", 3), LOOKUP), "full-hit-without-key-at-lookup", {"block": 3, "slot": 2}
            ),
            Mutant(
                lambda: resume(blocks=((1, 2, 3, 4, 4), (0, 0, 0, 6, 7), (0, 0, 9))),
                "full-hit-of-other-key-at-resume",
                {"block": 4, "slot": 4},
            ),
        ),
    ),
    Rule(
        "HIT.only-recurrent-short",
        lambda: seen(CUT),
        (
            Mutant(
                lambda: seen(CUT, after=None, error="AssertionError"),
                "recurrent-short-refused",
                {"request": "r2"},
                ("AssertionError", "16"),
            ),
            Mutant(
                lambda: seen(CUT, before=(*CUT.before[:2], (0, 8)), after=None, error="ValueError"),
                "cut-refused",
                {"request": "r2"},
            ),
            Mutant(
                lambda: seen(CUT, before=((1, 2, 3), *CUT.before[1:]), after=((1, 2, 3), (0, 0, 0, 6), (11,))),
                "full-short-accepted",
                {"group": FULL},
                ("3 of 4",),
            ),
            Mutant(
                lambda: seen(CUT, before=((1, 2, 3), *CUT.before[1:]), after=None, error="AssertionError"),
                "full-short-refused",
                {"group": FULL},
            ),
            Mutant(
                lambda: seen(CUT, after=((1, 2, 3), (0, 0, 0, 6), (11,))),
                "full-cut-wrong",
                {"group": FULL},
            ),
        ),
    ),
    Rule(
        "HIT.pure-view",
        lambda: seen(CUT),
        (
            Mutant(lambda: seen(CUT, references_changed=True), "cut-changes-references", {"request": "r2"}),
            Mutant(lambda: seen(CUT, input_changed=True), "cut-changes-input", {"request": "r2"}),
            Mutant(
                lambda: seen(CUT, after=((1, 2, 3, 9), (0, 0, 0, 6), (11,))), "cut-invents-blocks", {"request": "r2"}
            ),
        ),
    ),
    Rule(
        "HIT.resume-boundary",
        resume,
        (
            Mutant(
                lambda: resume(blocks=((1, 2, 3, 4, 5), (0, 0, 0, 6, 7), (0, 8)), diverged=True),
                "diverged-resume-without-state",
                {"request": "r2", "group": MAMBA, "slot": 2},
                (show(STATES[20]),),
            ),
            Mutant(
                lambda: resume(blocks=((1, 2, 3, 4, 5), (0, 0, 0, 6, 7), (0, 0, 8))),
                "resume-with-other-state",
                {"block": 8, "slot": 2},
                (show(STATES[20]), show(STATES[16])),
            ),
        ),
    ),
    Rule(
        "HIT.same-step",
        resume,
        (
            Mutant(
                lambda: resume(lambda view: view.unwritten.add(9)), "state-of-this-step-hit", {"block": 9, "slot": 2}
            ),
        ),
    ),
    Rule(
        "ADMIT.dry-pure",
        lambda: seen(DRY),
        (
            Mutant(
                lambda: seen(DRY, changed=("recorded checkpoints",)),
                "dry-run-changed-recorded-checkpoints",
                {"request": "r3"},
            ),
        ),
    ),
    Rule(
        "ADMIT.mamba-bound",
        lambda: seen(REAL),
        (
            # 1 + K on the first allocation; without a cap the whole table is charged (PR 57050).
            Mutant(
                lambda: seen(charged(MAMBA, total=9)),
                "estimate-beyond-bound",
                {"group": MAMBA, "request": "r3"},
                ("8 new blocks", "than 2"),
            ),
            Mutant(lambda: seen(charged(MAMBA, total=4)), "estimate-beyond-bound-by-drafts", {"group": MAMBA}),
            # A number above the pool is no deferral where there is no hit to wait for.
            Mutant(
                lambda: seen(charged(MAMBA, total=900, hits=0, evictable=0, deferred=True)),
                "estimate-beyond-bound",
                {"group": MAMBA},
            ),
        ),
    ),
    Rule(
        "ADMIT.deferred",
        lambda: allocate(LATER, replace(LATER, dry=True), REFUSED),
        (
            Mutant(
                lambda: allocate(LATER),
                "deferred-granted",
                {"group": MAMBA, "request": "r3"},
            ),
        ),
    ),
    Rule(
        "ADMIT.exact",
        allocate,
        (
            Mutant(
                lambda: allocate(charged(MAMBA, total=8)),
                "mamba-estimate-exceeds-taken",
                {"group": MAMBA, "request": "r3"},
                ("7", "2"),
            ),
            Mutant(
                lambda: allocate(charged(MAMBA, total=8, checkpoint=True)),
                "mamba-estimate-exceeds-taken-with-checkpoint",
                {"group": MAMBA},
            ),
            Mutant(lambda: allocate(charged(FULL, total=10)), "full-estimate-below-taken", {"group": FULL}),
            Mutant(
                lambda: allocate(charged(MAMBA, evictable=0, total=2)),
                "mamba-hit-estimate-below-taken",
                {"group": MAMBA},
            ),
            Mutant(lambda: allocate(taken=30), "estimate-exceeds-taken", {"request": "r3"}, ("31", "30")),
            Mutant(lambda: allocate(taken=32, new_blocks=()), "estimate-below-taken", {"request": "r3"}),
        ),
    ),
    Rule(
        "ADMIT.dry-real",
        allocate,
        (
            Mutant(lambda: allocate(charged(MAMBA, total=2)), "mamba-dry-exceeds-real", {"group": MAMBA}, ("3", "2")),
            Mutant(lambda: allocate(charged(FULL, total=15)), "full-dry-below-real", {"group": FULL}),
            Mutant(lambda: allocate(charged(WINDOW, total=13)), "window-dry-exceeds-real", {"group": WINDOW}),
        ),
    ),
    Rule(
        "ADMIT.refused-though-fits",
        lambda: seen(REFUSED),
        (
            Mutant(
                lambda: allocate(charged(MAMBA, total=20), event=REFUSED, free_before=31),
                "step-refuses-what-fits-mamba",
                {"request": "r3"},
                ("31", "48"),
            ),
            Mutant(
                lambda: seen(
                    REFUSED, estimates=(replace(DRY, groups=charged(MAMBA, total=20).groups),), free_before=31
                ),
                "whole-sequence-gate-refuses-what-fits-mamba",
                {"request": "r3"},
            ),
        ),
    ),
    Rule(
        "ADMIT.stall",
        step,
        (Mutant(lambda: seen(STALL), "waiting-request-starves-in-idle-pool", {"request": "r3"}, ("23", "3 steps")),),
    ),
    Rule(
        "REF.references",
        step,
        (
            Mutant(
                lambda: spoiled(put("counts", 3, 2)), "count-exceeds-holders", {"block": 3}, ("2 references", "r1/0")
            ),
            Mutant(lambda: spoiled(put("counts", 13, 1)), "count-exceeds-holders", {"block": 13}, ("nobody",)),
            Mutant(lambda: spoiled(put("counts", 3, 0)), "count-below-holders-table", {"block": 3}),
            Mutant(
                lambda: spoiled(let("others", [Holder("copy source", 9)])),
                "count-below-holders-copy-source-and-table",
                {"block": 9},
            ),
            Mutant(lambda: spoiled(put("counts", 14, -1)), "count-below-zero", {"block": 14}),
        ),
    ),
    Rule(
        "REF.queue",
        step,
        (
            Mutant(lambda: spoiled(drop("queue", 14)), "free-but-not-queued", {"block": 14}),
            Mutant(lambda: spoiled(lambda view: view.queue.append(3)), "queued-while-referenced", {"block": 3}),
        ),
    ),
    Rule(
        "REF.queue-shape",
        step,
        (
            Mutant(lambda: spoiled(let("said_free", 14)), "count-exceeds-queue", {}, ("14", "13")),
            Mutant(lambda: spoiled(let("said_free", 12)), "count-below-queue", {}),
            Mutant(lambda: spoiled(let("links", "the queue runs in a circle")), "links-broken", {}, ("circle",)),
        ),
    ),
    Rule("REF.double-free", step, (Mutant(lambda: spoiled(_twice), "block-queued-twice", {"block": 14}),)),
    Rule(
        "REF.null",
        step,
        (
            Mutant(lambda: spoiled(lambda view: view.queue.append(0)), "null-queued", {"block": 0}),
            Mutant(
                lambda: spoiled(put("keyed", 0, [key(MAMBA, STATES[8])])),
                "null-keyed",
                {"block": 0},
                (show(STATES[8]),),
            ),
        ),
    ),
    Rule(
        "REF.null-count",
        step,
        (
            Mutant(lambda: spoiled(put("counts", 0, -4)), "null-count-negative", {"block": 0}, ("-4",)),
            Mutant(lambda: spoiled(put("counts", 0, 1)), "null-count-positive", {"block": 0}),
        ),
    ),
    Rule(
        "REF.keys-map",
        step,
        (
            Mutant(
                lambda: spoiled(lambda view: view.unmapped.add(8)),
                "key-not-in-map",
                {"block": 8, "group": MAMBA},
                (show(STATES[16]),),
            ),
            Mutant(
                lambda: spoiled(put("strays", (MAMBA, STATES[16]), {12})),
                "map-without-key",
                {"block": 12, "group": MAMBA},
                (show(STATES[16]),),
            ),
        ),
    ),
    Rule(
        "REF.drained",
        lambda: Observation(Drained(), idle()),
        (
            Mutant(lambda: spoiled(put("counts", 9, 1), Drained(), idle), "references-left", {"block": 9}),
            Mutant(lambda: spoiled(drop("queue", 9), Drained(), idle), "pool-not-full", {}, ("22 of 23",)),
            Mutant(
                lambda: spoiled(let("records", ["num_cached_block of group 2: r1"]), Drained(), idle),
                "record-left-num-cached-block",
                {},
                ("r1",),
            ),
        ),
    ),
    Rule(
        "SLOT.chunk-end",
        lambda: seen(SPLIT),
        (
            Mutant(
                lambda: seen(SPLIT, start=0, granted=6),
                "chunk-ends-off-boundary",
                {"request": "r1", "slot": 0},
                ("[0, 6)", "block 8"),
            ),
            Mutant(
                lambda: seen(SPLIT, start=6, granted=14, prefill_end=20),
                "chunk-crosses-boundary",
                {"request": "r1", "slot": 2},
                ("[6, 20)",),
            ),
            # An export excuses the last chunk only, and only where one is possible.
            Mutant(
                lambda: cut_config(
                    seen(SPLIT, start=6, granted=14, prefill_end=20),
                    replace(CONFIG, checkpoint_blocks=1, checkpoint_alignment=4),
                ),
                "chunk-crosses-boundary",
                {"request": "r1"},
            ),
        ),
    ),
    Rule(
        "SLOT.running-state",
        forward,
        (
            Mutant(
                lambda: forward(read=0, found=STATES[16]),
                "running-state-stale",
                {"block": 9, "slot": 2, "group": MAMBA, "request": "r1"},
                (show(STATES[20]), show(STATES[16])),
            ),
            Mutant(lambda: forward(read=0, found=STATES[22]), "running-state-overrun", {"block": 9}),
            Mutant(lambda: forward(read=0, found=OTHER[20]), "running-state-foreign", {"block": 9}),
            Mutant(lambda: forward(read=0, found=None), "running-state-missing", {"block": 9}, ("nothing",)),
            Mutant(lambda: forward(read=0, found=None, block=-1), "running-state-without-block", {"slot": 2}),
            Mutant(lambda: forward(read=0, window=STATES[19]), "running-window-wrong", {"block": 9}, ("window",)),
        ),
    ),
    Rule(
        "SLOT.attention-read",
        forward,
        (
            Mutant(
                lambda: forward(read=1, ok=False, expected=STATES[6], found=OTHER[6], slot=1, block=2, position=5),
                "attention-foreign",
                {"block": 2, "slot": 1, "group": FULL, "request": "r1"},
                ("position 5", show(STATES[6]), show(OTHER[6])),
            ),
            Mutant(
                lambda: forward(read=1, ok=False, expected=STATES[6], found=STATES[2], slot=1, block=2, position=5),
                "attention-position",
                {"block": 2},
            ),
            Mutant(lambda: forward(read=1, ok=False, found=None, slot=1, block=2), "attention-missing", {"block": 2}),
            Mutant(lambda: forward(read=1, ok=False, found=None), "attention-without-block", {"group": FULL}),
        ),
    ),
    Rule(
        "SLOT.exclusive-write",
        forward,
        (
            Mutant(
                lambda: forward(write=0, owned=False, references=2),
                "attention-write-shared",
                {"block": 12, "slot": 5, "group": FULL, "request": "r1"},
                ("2 requests",),
            ),
            Mutant(
                lambda: forward(write=1, foreign_keys=(STATES[16],)),
                "state-write-over-key",
                {"block": 10, "slot": 3, "group": MAMBA},
                (show(STATES[16]), show(STATES[22])),
            ),
            Mutant(lambda: forward(write=1, references=0), "state-write-unheld", {"block": 10}),
            Mutant(lambda: forward(write=0, block=-1, references=0), "attention-write-past-table", {"slot": 5}),
        ),
    ),
    Rule(
        "SLOT.null-write",
        forward,
        (Mutant(lambda: forward(write=1, block=0), "state-write-to-null", {"slot": 3, "group": MAMBA}),),
    ),
    Rule(
        "SLOT.key-content",
        step,
        (
            # Slot 1 is keyed as the state after 16 tokens and holds the one after 12 (issue 43559).
            Mutant(
                lambda: spoiled(put("recurrent", 8, state(STATES[12]))),
                "full-key-stale",
                {"block": 8, "group": MAMBA},
                (show(STATES[16]), show(STATES[12])),
            ),
            Mutant(lambda: spoiled(put("recurrent", 9, state(STATES[22]))), "partial-key-overrun", {"block": 9}),
            Mutant(lambda: spoiled(put("recurrent", 11, state(OTHER[8]))), "full-key-foreign", {"block": 11}),
            Mutant(lambda: spoiled(drop("recurrent", 8)), "full-key-missing", {"block": 8}, ("nothing",)),
            Mutant(
                lambda: spoiled(put("recurrent", 8, MambaContent(STATES[16], (STATES[15],)))),
                "key-window-wrong",
                {"block": 8},
                ("window", show(STATES[15])),
            ),
            Mutant(
                lambda: spoiled(put("attention", 2, [*STATES[5:8], None])),
                "attention-key-missing",
                {"block": 2, "group": FULL},
                ("position 7",),
            ),
            Mutant(lambda: spoiled(put("attention", 2, list(STATES[1:5]))), "attention-key-position", {"block": 2}),
            Mutant(lambda: spoiled(put("attention", 2, list(OTHER[5:9]))), "attention-key-foreign", {"block": 2}),
            Mutant(
                lambda: spoiled(put("keyed", 2, [key(FULL, State(STATES[8] + (1 << 30)))])),
                "attention-key-of-no-request",
                {"block": 2},
            ),
        ),
    ),
    Rule(
        "SLOT.key-length",
        step,
        (
            Mutant(
                lambda: spoiled(put("keyed", 8, [Key(MAMBA, STATES[16], 15)])),
                "noted-length-differs",
                {"block": 8, "group": MAMBA},
                ("15 tokens", show(STATES[16])),
            ),
            Mutant(lambda: spoiled(put("keyed", 9, [key(MAMBA, STATES[18])])), "key-off-unit", {"block": 9}),
            Mutant(lambda: spoiled(put("keyed", 9, [key(MAMBA, EMPTY)])), "key-off-unit", {"block": 9}),
            Mutant(lambda: spoiled(put("keyed", 9, [key(7, STATES[20])])), "key-of-no-group", {"block": 9}),
        ),
    ),
    Rule(
        "SLOT.key-slot",
        step,
        (
            Mutant(
                lambda: spoiled(_shared_slot),
                "key-in-other-slot",
                {"block": 8, "slot": 0, "group": MAMBA, "request": "r1"},
                ("slot 0", "slot 1"),
            ),
            Mutant(lambda: spoiled(_wrong_group), "key-of-other-group", {"block": 4, "group": WINDOW}),
        ),
    ),
)

MUTANTS = [pytest.param(rule.id, mutant, id=f"{rule.id}: {mutant.cause}") for rule in RULES for mutant in rule.mutants]


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.id)
def test_every_rule_has_a_sound_case_and_a_mutant_it_kills(entry: Any) -> None:
    rules = [rule for rule in RULES if rule.id == entry.id]
    assert len(rules) == 1
    assert rules[0].mutants


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_sound_cache_is_judged_and_nothing_is_said(rule: Rule) -> None:
    verdict = by_id(rule.id).predicate(rule.sound())
    assert verdict is not None, "vacuous"
    assert list(verdict) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_no_other_rule_complains_about_a_sound_case(rule: Rule) -> None:
    monitor = Monitor(stop=False)
    monitor(rule.sound())
    assert monitor.violations == []
    assert monitor.evaluations[rule.id] == 1


@pytest.mark.parametrize(("name", "mutant"), MUTANTS)
def test_a_mutant_is_killed_by_its_rule_with_the_right_witness(name: str, mutant: Mutant) -> None:
    verdict = by_id(name).predicate(mutant.spoil())
    assert verdict, "survived"
    killed = [v for v in verdict if v.cause == mutant.cause and mutant.where.items() <= dict(v.where).items()]
    assert killed, f"found instead: {list(verdict)}"
    assert killed[0].invariant == name
    for text in mutant.says:
        assert text in killed[0].witness
    # One thing is wrong: the rule does not name a second kind of fault.
    assert {v.cause for v in verdict} == {mutant.cause}


@pytest.mark.parametrize(("name", "mutant"), MUTANTS)
def test_causes_are_slugs_that_name_no_run(name: str, mutant: Mutant) -> None:
    assert re.fullmatch(r"[A-Za-z_.-]+", mutant.cause)
    for value in mutant.where.values():
        assert not isinstance(value, str) or value not in mutant.cause


def test_the_catalogue_is_well_formed() -> None:
    ids = [entry.id for entry in CATALOGUE]
    assert len(set(ids)) == len(ids)
    assert set(FAMILIES) == {"SLOT", "ADMIT", "REF", "HIT", "FLOW"}
    kinds = set(typing.get_args(Event))
    for entry in CATALOGUE:
        assert entry.events
        assert set(entry.events) <= kinds
        assert entry.statement.endswith(".")
        assert entry.statement.count(". ") == 0, "one sentence"
        assert entry.why
        assert entry.provenance
    with pytest.raises(KeyError, match=r"no invariant SLOT\.nothing"):
        by_id("SLOT.nothing")


# -- what is not judged -----------------------------------------------------------------------------------------------


def blank(view: FakeView) -> None:
    view.keyed = {}


VACUOUS = {
    "SLOT.key-content": (lambda: spoiled(blank), lambda: spoiled(let("unwritten", set(range(24))))),
    "SLOT.key-length": (lambda: spoiled(blank),),
    "SLOT.key-slot": (lambda: spoiled(blank), lambda: Observation(STEP, idle())),
    "SLOT.chunk-end": (
        lambda: seen(SPLIT, granted=0),
        lambda: seen(SPLIT, start=22),
        lambda: cut_config(seen(SPLIT), replace(CONFIG, groups=CONFIG.groups[:1])),
    ),
    "SLOT.running-state": (lambda: seen(FORWARD, start=0), lambda: seen(FORWARD, reads=READS[1:])),
    "SLOT.attention-read": (lambda: seen(FORWARD, start=0), lambda: seen(FORWARD, reads=READS[:1])),
    "SLOT.exclusive-write": (lambda: seen(FORWARD, writes=()),),
    "SLOT.null-write": (lambda: seen(FORWARD, writes=()),),
    "ADMIT.dry-pure": (lambda: seen(REAL),),
    "ADMIT.mamba-bound": (
        lambda: seen(REAL, groups=ANSWERS[:2]),
        lambda: seen(LATER),
    ),
    "ADMIT.deferred": (allocate,),
    "ADMIT.exact": (
        lambda: seen(REFUSED),
        lambda: seen(GRANTED, estimates=()),
        lambda: allocate(LATER),
    ),
    "ADMIT.dry-real": (lambda: seen(GRANTED, estimates=(REAL,)), lambda: allocate(dry=replace(DRY, tokens=60))),
    "ADMIT.refused-though-fits": (
        lambda: seen(REFUSED, estimates=()),
        lambda: allocate(LATER, event=REFUSED, free_before=99),
    ),
    "ADMIT.stall": (
        lambda: seen(STALL, blocked=True),
        lambda: seen(STALL, peak=24),
        lambda: seen(STEP, scheduled=()),
    ),
    "HIT.covers": (lambda: seen(LOOKUP, tokens=0), lambda: seen(LOOKUP, joint=False), lambda: resume(local=0)),
    "HIT.limit": (lambda: seen(LOOKUP, tokens=0), lambda: seen(RESUME)),
    "HIT.promises": (lambda: seen(LOOKUP, tokens=0, blocks=((), (), ())),),
    "HIT.resume-boundary": (lambda: resume(external=2), lambda: resume(local=0)),
    "HIT.same-step": (lambda: resume(blocks=((1,), (), ())),),
    "HIT.pure-view": (lambda: seen(CUT, after=None, error="AssertionError"),),
    "REF.double-free": (lambda: spoiled(let("queue", [])),),
    "REF.keys-map": (lambda: spoiled(blank),),
}


@pytest.mark.parametrize(
    ("name", "make"), [pytest.param(n, m, id=f"{n}-{i}") for n, ms in VACUOUS.items() for i, m in enumerate(ms)]
)
def test_where_there_is_nothing_to_judge_nothing_counts(name: str, make: Callable[[], Observation]) -> None:
    assert by_id(name).predicate(make()) is None


def test_a_subject_that_cannot_tell_contents_is_not_judged_by_them() -> None:
    view = busy()
    view.recurrent = view.attention = None
    assert by_id("SLOT.key-content").predicate(Observation(STEP, view)) is None


# -- what is allowed --------------------------------------------------------------------------------------------------

ALLOWED = {
    # The last chunk may end anywhere, a declared stop and a block wider than any chunk may be stopped in.
    "SLOT.chunk-end": (
        lambda: seen(SPLIT, start=16, granted=6),
        lambda: seen(SPLIT, start=16, granted=4),
        lambda: seen(SPLIT, start=0, granted=6, limit=7),
        # A last chunk that exports a checkpoint may run through from inside a block.
        lambda: cut_config(
            seen(SPLIT, start=4, granted=18), replace(CONFIG, checkpoint_blocks=1, checkpoint_alignment=4)
        ),
    ),
    # A load brings the state at the boundary.
    "HIT.covers": (lambda: resume(external=1, blocks=((1, 2, 3, 4, 5), (0, 0, 0, 6, 7), ())),),
    # A lookup that drops EAGLE's unit returns blocks keyed further than it goes.
    "HIT.promises": (lambda: seen(LOOKUP, tokens=18, blocks=((1, 2, 3, 4, 5), (0, 0, 0, 6, 7), ())),),
    # The gate may cap a window group.
    "ADMIT.dry-real": (lambda: allocate(dry=replace(DRY, groups=charged(WINDOW, total=5).groups)),),
    # An exported checkpoint lies one slot before its own.
    "SLOT.key-slot": (
        lambda: cut_config(
            spoiled(let("slots", {("r1", MAMBA): [11, 9]})),
            replace(CONFIG, checkpoint_blocks=1, checkpoint_alignment=4),
        ),
    ),
    # What lies beyond a partial key is free.
    "SLOT.key-content": (lambda: spoiled(put("attention", 5, [*STATES[17:21], OTHER[3]])),),
}


@pytest.mark.parametrize(
    ("name", "make"), [pytest.param(n, m, id=f"{n}-{i}") for n, ms in ALLOWED.items() for i, m in enumerate(ms)]
)
def test_what_the_rules_allow_is_not_reported(name: str, make: Callable[[], Observation]) -> None:
    verdict = by_id(name).predicate(make())
    assert verdict is not None
    assert list(verdict) == []


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (None, "missing"),
        (EMPTY, "stale"),
        (STATES[3], "stale"),
        (STATES[12], "overrun"),
        (OTHER[3], "foreign"),
        (OTHER[8], "foreign"),
        (OTHER[12], "foreign"),
        (State(STATES[12] + (1 << 30)), "foreign"),
    ],
)
def test_a_wrong_state_is_told_by_how_it_relates_to_the_promised_one(found: State | None, word: str) -> None:
    assert relation(busy(), STATES[8], found) == word


def test_blocks_reserved_for_others_may_be_refused() -> None:
    judge = by_id("ADMIT.refused-though-fits").predicate
    wrong = allocate(charged(MAMBA, total=20), event=REFUSED, free_before=31)
    assert judge(wrong)
    assert judge(allocate(charged(MAMBA, total=20), event=REFUSED, free_before=31, reserved=31)) == ()
