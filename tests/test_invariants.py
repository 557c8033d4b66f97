"""Every rule of the catalogue on a sound cache, where it is judged and silent, and on its mutants, which it kills."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvproof.invariants.catalogue import CATALOGUE, FAMILIES, by_id
from kvproof.invariants.content import relation
from kvproof.invariants.monitor import Monitor
from kvproof.review.cases import CASES
from kvproof.review.cases.calls import (
    ANSWERS,
    CUT,
    DRY,
    FORWARD,
    GRANTED,
    LATER,
    LOOKUP,
    READS,
    REAL,
    REFUSED,
    RESUME,
    SPLIT,
    STALL,
    STEP,
    Mutant,
    Rule,
    allocate,
    charged,
    cut_config,
    let,
    put,
    resume,
    seen,
    spoiled,
)
from kvproof.review.cases.fakeview import CONFIG, MAMBA, OTHER, STATES, WINDOW, FakeView, busy, idle
from kvproof.spec.events import (
    Event,
    Observation,
)
from kvproof.spec.tracer import EMPTY, State

RULES = CASES
MUTANTS = [pytest.param(rule.id, mutant, id=f"{rule.id}: {mutant.cause}") for rule in RULES for mutant in rule.mutants]


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.id)
def test_every_rule_has_a_sound_case_and_a_mutant_it_kills(entry: Any) -> None:
    rules = [rule for rule in RULES if rule.id == entry.id]
    assert rules, f"{entry.id} has no Rule in kvproof/review/cases"
    assert len(rules) == 1, f"{entry.id} has {len(rules)} Rules in kvproof/review/cases"
    assert rules[0].mutants, f"{entry.id}: its Rule has no Mutant"


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
    assert set(FAMILIES) == {"SLOT", "ADMIT", "REF", "HIT", "TAIL", "EXT", "EVENT", "FLOW", "REUSE"}
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


def test_what_a_step_in_flight_writes_is_there_for_the_next_one() -> None:
    def in_flight(view: FakeView) -> None:
        view.unwritten, view.in_flight = {9}, {9}

    assert by_id("HIT.same-step").predicate(resume(in_flight)) == []


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
        lambda: seen(STALL, peak=24),
        lambda: seen(STALL, peak=24, blocked=True),
        lambda: seen(STEP, scheduled=()),
    ),
    "HIT.covers": (lambda: seen(LOOKUP, tokens=0), lambda: seen(LOOKUP, joint=False), lambda: resume(local=0)),
    "HIT.limit": (lambda: seen(LOOKUP, tokens=0), lambda: seen(RESUME), lambda: resume(asynchronous=True)),
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
