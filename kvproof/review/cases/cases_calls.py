"""Rules about calls: lookups, cuts, resumes, estimates, allocations. Each on a sound call, and its mutants."""

from __future__ import annotations

from dataclasses import replace

from kvproof.review.cases.calls import (
    CRASH,
    CUT,
    DRY,
    LATER,
    LOOKUP,
    PREEMPTED,
    REAL,
    REFUSED,
    STALL,
    STARVED,
    Mutant,
    Rule,
    allocate,
    charged,
    drop,
    put,
    resume,
    seen,
    spoiled,
    step,
)
from kvproof.review.cases.fakeview import FULL, MAMBA, OTHER, STATES, WINDOW, key
from kvproof.spec.tracer import show

CALLS = (
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
            Mutant(
                lambda: seen(CRASH, call="reset"),
                "kv_cache_manager.truncate_computed_blocks-AssertionError-assert-num_blocks-len-group",
                {"call": "reset"},
                ("operator's reset", "goes on"),
            ),
        ),
        right="The step ends, and nothing is raised.",
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
        right="The lookup answers 21 of the 22 tokens at most: one is left to compute, to sample from. The sound one "
        "answers 20.",
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
        right="A hit of 20 tokens comes with 5 blocks of 4 in group 0; with 4 blocks it is one of 16 tokens.",
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
        right="Block 9 is keyed as state@20#93c0, the prefix that r2 has; what is keyed for another prefix is no hit.",
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
        right="Full attention and the window reach 16 tokens, so the cut is made: 4 blocks, 4 blocks, and the one that "
        "the recurrent group has.",
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
        right="The cut gives a shorter list and leaves every block's reference count as it was.",
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
        right="r2 goes on at 20 tokens with block 9 in slot 2 of group 2, which holds state@20#93c0; with block 8 "
        "alone it goes on at 16, which is what block 8 holds.",
    ),
    Rule(
        "HIT.same-step",
        resume,
        (
            Mutant(
                lambda: resume(lambda view: view.unwritten.add(9)), "state-of-this-step-hit", {"block": 9, "slot": 2}
            ),
        ),
        right="Block 9 was written in an earlier step; if this one writes it, r2 waits for the next.",
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
        right="Asking changes nothing, so there is nothing to list.",
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
        right="Group 2 is charged 3: 2 new blocks (the running state and one for drafts) and the evictable hit.",
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
        right='With an answer of "not in this step" r3 is refused and takes nothing.',
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
        right="The real question is answered 3 in group 2: the 2 new blocks and 1 evictable hit that are then taken.",
    ),
    Rule(
        "ADMIT.dry-real",
        allocate,
        (
            Mutant(lambda: allocate(charged(MAMBA, total=2)), "mamba-dry-exceeds-real", {"group": MAMBA}, ("3", "2")),
            Mutant(lambda: allocate(charged(FULL, total=15)), "full-dry-below-real", {"group": FULL}),
            Mutant(lambda: allocate(charged(WINDOW, total=13)), "window-dry-exceeds-real", {"group": WINDOW}),
        ),
        right="The dry run and the real question get one answer in group 2: 3 both times.",
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
        right="31 blocks are charged, 31 are free, and r3 is let in.",
    ),
    Rule(
        "ADMIT.stall",
        step,
        (
            Mutant(lambda: seen(STALL), "waiting-request-starves-in-idle-pool", {"request": "r3"}, ("23", "3 steps")),
            Mutant(
                lambda: seen(STALL, blocked=True),
                "waiting-request-starves-behind-idle-holders",
                {"request": "r3"},
                ("none of them runs",),
            ),
        ),
        right="r3, first in line and small enough for the idle pool, gets on; then there is no such event.",
    ),
    Rule(
        "ADMIT.preemption-frees",
        lambda: seen(PREEMPTED),
        (Mutant(lambda: seen(PREEMPTED, freed=0), "preempted-for-nothing", {"request": "r3"}, ("4 of which nobody",)),),
        right="The 4 blocks that nobody else held are free after the preemption.",
    ),
    Rule(
        "ADMIT.starved",
        step,
        (
            Mutant(lambda: seen(STARVED), "waiting-request-passed-over", {"request": "r3"}, ("48 steps", "left 5")),
            Mutant(lambda: seen(STARVED, why="running"), "running-request-passed-over", {"request": "r3"}),
        ),
        right="With tokens left over and blocks to spare, r3 gets some of them; then there is no such event.",
    ),
)
