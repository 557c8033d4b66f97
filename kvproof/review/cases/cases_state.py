"""Rules about what a cache holds, reads and writes. Each on a sound cache, and its mutants."""

from __future__ import annotations

from dataclasses import replace

from kvproof.review.cases.calls import (
    SPLIT,
    Mutant,
    Rule,
    cut_config,
    drop,
    forward,
    let,
    put,
    seen,
    spoiled,
    step,
)
from kvproof.review.cases.fakeview import CONFIG, FULL, MAMBA, OTHER, STATES, WINDOW, FakeView, idle, key, state
from kvproof.spec.events import (
    Drained,
    Observation,
)
from kvproof.spec.tracer import EMPTY, State, show
from kvproof.spec.view import Holder, Key, MambaContent


def _twice(view: FakeView) -> None:
    view.queue.append(14)


def _shared_slot(view: FakeView) -> None:
    view.slots["r1", MAMBA] = [8, 0, 9, 10]


def _wrong_group(view: FakeView) -> None:
    view.slots["r1", WINDOW] = [0, 0, 0, 4, 7]


STATE = (
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
        right="Block 3 counts 1 reference: one slot of r1's table is all that holds it.",
    ),
    Rule(
        "REF.queue",
        step,
        (
            Mutant(lambda: spoiled(drop("queue", 14)), "free-but-not-queued", {"block": 14}),
            Mutant(lambda: spoiled(lambda view: view.queue.append(3)), "queued-while-referenced", {"block": 3}),
        ),
        right="Block 14 has no references, so it is in the free queue, behind block 13.",
    ),
    Rule(
        "REF.queue-shape",
        step,
        (
            Mutant(lambda: spoiled(let("said_free", 14)), "count-exceeds-queue", {}, ("14", "13")),
            Mutant(lambda: spoiled(let("said_free", 12)), "count-below-queue", {}),
            Mutant(lambda: spoiled(let("links", "the queue runs in a circle")), "links-broken", {}, ("circle",)),
        ),
        right="The cache counts 13 free blocks, as many as its queue has.",
    ),
    Rule(
        "REF.double-free",
        step,
        (Mutant(lambda: spoiled(_twice), "block-queued-twice", {"block": 14}),),
        right="Block 14 is in the free queue once.",
    ),
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
        right="The free queue ends with block 23; the null block is not in it.",
    ),
    Rule(
        "REF.null-count",
        step,
        (
            Mutant(lambda: spoiled(put("counts", 0, -4)), "null-count-negative", {"block": 0}, ("-4",)),
            Mutant(lambda: spoiled(put("counts", 0, 1)), "null-count-positive", {"block": 0}),
        ),
        right="The null block counts 0 references, however many tables it stands in.",
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
        right="A lookup of state@16#a7d4 finds block 8, which carries that key.",
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
        right="When nothing runs, block 9 has 0 references like all others.",
    ),
    Rule(
        "SLOT.chunk-end",
        lambda: seen(SPLIT),
        (
            Mutant(
                lambda: seen(SPLIT, granted=6),
                "chunk-ends-off-boundary",
                {"request": "r1", "slot": 1},
                ("[8, 14)", "blocks of 8"),
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
        right="8 tokens are granted: the chunk [8, 16) ends where a block of 8 does.",
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
        right="The forward finds state@20#93c0 in block 9, the state after the 20 tokens that were computed.",
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
        right="Position 5 in block 2 holds r1's own sixth token: state@6#f531.",
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
        right="Block 12 has one reference, r1's: what others hold is copied before it is written.",
    ),
    Rule(
        "SLOT.null-write",
        forward,
        (Mutant(lambda: forward(write=1, block=0), "state-write-to-null", {"slot": 3, "group": MAMBA}),),
        right="The state goes to block 10, which r1 has in slot 3.",
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
        right="Block 8 holds what its key says: state@16#a7d4, the state after 16 tokens.",
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
        right="The key of block 8 is noted as 16 tokens, which is the length of its prefix.",
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
        right="Block 8, keyed after 16 tokens, lies in slot 1, the slot that ends at 16.",
    ),
)
