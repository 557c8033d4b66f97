"""The monitor: what it asks, what it counts, and when it stops a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvproof.invariants.catalogue import CATALOGUE, by_id
from kvproof.invariants.invariant import Invariant, Verdict, violation
from kvproof.invariants.monitor import MOST_RECORDED, InvariantBroken, Monitor, RunSpoiled
from kvproof.review.cases.fakeview import OTHER, STATES, FakeView, busy, idle, state
from kvproof.spec.events import Crash, Drained, Event, Observation, StepEnd
from kvproof.spec.finding import Violation

STEP = StepEnd(1, ("r1",), ("r1",), ())
SAD = violation("X.sad", "sad", "an estimate is off")
BAD = violation("X.bad", "bad", "a content is wrong")
WORSE = violation("X.bad", "worse", "another content is wrong")


def entry(
    name: str, verdict: Verdict, contaminates: bool = False, events: tuple[type[Any], ...] = (StepEnd,)
) -> Invariant:
    return Invariant(name, "It holds.", "Nothing.", ("PR 1",), "state", events, lambda _: verdict, contaminates)


def run(
    catalogue: Sequence[Invariant], event: Event = STEP, known: Sequence[Violation] = (), **options: Any
) -> tuple[Monitor, Exception | None]:
    monitor = Monitor(catalogue, known=frozenset(v.identity for v in known), **options)
    try:
        monitor(Observation(event, busy()))
    except (InvariantBroken, RunSpoiled) as stop:
        return monitor, stop
    return monitor, None


def test_rules_are_asked_about_their_events_only() -> None:
    catalogue = (entry("X.step", ()), entry("X.end", (), events=(Drained,)))
    monitor, _ = run(catalogue)
    assert monitor.evaluations == {"X.step": 1}
    monitor(Observation(Drained(), idle()))
    monitor(Observation(Crash("a:b", "E", ""), idle()))
    assert monitor.evaluations == {"X.step": 1, "X.end": 1}


def test_a_vacuous_judgement_does_not_count() -> None:
    monitor, stop = run((entry("X.vacuous", None), entry("X.held", ())))
    assert stop is None
    assert monitor.evaluations == {"X.held": 1}


def test_a_new_violation_stops_the_run_and_is_recorded_with_the_others() -> None:
    monitor, stop = run((entry("X.sad", (SAD,)), entry("X.bad", (BAD,), True), entry("X.held", ())))
    assert isinstance(stop, InvariantBroken)
    assert stop.violation == SAD
    assert monitor.violations == [SAD, BAD]
    assert monitor.evaluations == {"X.sad": 1, "X.bad": 1, "X.held": 1}
    assert "X.sad (sad): an estimate is off" in str(stop)


def test_a_known_violation_that_leaves_the_cache_sound_is_passed_over() -> None:
    monitor, stop = run((entry("X.sad", (SAD,)),), known=[SAD])
    assert stop is None
    assert monitor.violations == [SAD]


def test_a_known_violation_that_contaminates_ends_the_run_quietly() -> None:
    monitor, stop = run((entry("X.bad", (BAD,), True),), known=[BAD])
    assert isinstance(stop, RunSpoiled)
    assert stop.violation == BAD
    assert monitor.violations == [BAD]


def test_a_call_that_fails_leaves_an_engine_that_is_judged_on() -> None:
    failed = Crash("a:b", "ValueError", "x()", call="reset")
    monitor, seen = Monitor(stop=False), Observation(failed, busy())
    monitor(seen)
    assert [dict(violation.where) for violation in monitor.violations] == [{"call": "reset"}]
    with pytest.raises(RunSpoiled):
        monitor(Observation(replace(failed, call=""), busy()))


def test_behind_a_known_contamination_nothing_new_is_reported() -> None:
    _, stop = run((entry("X.bad", (BAD,), True), entry("X.sad", (SAD,))), known=[BAD])
    assert isinstance(stop, RunSpoiled)


def test_a_new_violation_of_the_same_rule_comes_before_a_known_one() -> None:
    _, stop = run((entry("X.bad", (BAD, WORSE), True),), known=[BAD])
    assert isinstance(stop, InvariantBroken)
    assert stop.violation == WORSE


def test_a_policy_says_what_stops_a_run() -> None:
    catalogue = (entry("X.sad", (SAD,)), entry("X.bad", (BAD,), True))
    _, stop = run(catalogue, stop=lambda violation: violation.invariant == "X.bad")
    assert isinstance(stop, InvariantBroken)
    assert stop.violation == BAD
    _, stop = run(catalogue, stop=False)
    assert isinstance(stop, RunSpoiled)
    _, stop = run(catalogue[:1], stop=False)
    assert stop is None


def test_what_shows_in_every_step_does_not_fill_the_memory() -> None:
    monitor = Monitor((entry("X.sad", (SAD,)), entry("X.worse", (WORSE,))), stop=False)
    for _ in range(MOST_RECORDED + 9):
        monitor(Observation(STEP, busy()))
    assert monitor.violations.count(SAD) == monitor.violations.count(WORSE) == MOST_RECORDED
    assert monitor.evaluations["X.sad"] == MOST_RECORDED + 9


def test_an_audit_looks_at_untouched_blocks_too() -> None:
    view = busy()
    view.changed = set()
    assert view.recurrent is not None
    view.recurrent[8] = state(OTHER[16])
    monitor = Monitor()
    monitor(Observation(STEP, view))
    assert monitor.violations == []
    found = monitor.audit(view)
    assert [(v.invariant, v.cause) for v in found] == [("SLOT.key-content", "full-key-foreign")]
    assert monitor.violations == []
    assert Monitor().audit(busy()) == []


def test_everything_is_judged_when_all_has_ended() -> None:
    view = idle()
    view.changed = set()
    assert view.recurrent is not None
    view.recurrent[11] = state(STATES[4])
    with pytest.raises(InvariantBroken, match=r"SLOT\.key-content \(full-key-stale\)"):
        Monitor()(Observation(Drained(), view))


def test_a_large_pool_is_judged_where_it_was_touched() -> None:
    def large(changed: set[int]) -> FakeView:
        view = busy()
        view.num_blocks = 5000
        view.queue += range(24, 5000)
        view.counts[4321] = 1
        view.changed = changed
        return view

    references = by_id("REF.references").predicate
    assert references(Observation(STEP, large({3}))) == []
    for seen in (Observation(STEP, large({4321})), Observation(Drained(), large(set()))):
        found = references(seen)
        assert found
        assert [dict(v.where)["block"] for v in found] == [4321]


def test_a_sound_run_is_silent_and_counts() -> None:
    monitor = Monitor()
    for _ in range(3):
        monitor(Observation(STEP, busy()))
    monitor(Observation(Drained(), idle()))
    assert monitor.violations == []
    # Nothing is held there, and nobody listens to events.
    asked = {e.id for e in CATALOGUE if StepEnd in e.events and Drained in e.events}
    assert all(monitor.evaluations[name] == 4 for name in asked - {"SLOT.key-slot", "TAIL.one-hold", "EVENT.replays"})
