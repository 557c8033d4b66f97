"""The reference engine at its edges: no room for drafts, no progress, calls that make no sense, a record that is full,
an engine that raises. Whatever it records is a scenario that can be read and happens again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvproof import scenario_file
from kvproof.impl.reference import record as record_module
from kvproof.impl.reference import report as report_module
from kvproof.impl.reference.engine import Engine
from kvproof.impl.reference.live import AssertingEngine, EngineStopped, Mode
from kvproof.impl.reference.mutants import MUTANTS
from kvproof.impl.reference.null_model import NullModel
from kvproof.impl.reference.planting import wrap
from kvproof.impl.reference.request import Request
from kvproof.impl.reference.scheduler import Drafter
from kvproof.impl.reference.subject import Driver, NullTeacher, ReferenceSubject
from kvproof.invariants.monitor import InvariantBroken, Monitor
from kvproof.models.mutants.checkers import live
from kvproof.models.stateful.replay import replay
from kvproof.spec.config import Config, ConfigError, Group
from kvproof.spec.events import Event, Lookup, Observation, Stall, StepEnd
from kvproof.spec.scenario import MOST_LETTERS, Action, Scenario

FULL, RECURRENT = Group("full", 4), Group("mamba", 8)
HYBRID = Config((FULL, RECURRENT), 60, 4, 16)
DRAFTS = replace(HYBRID, speculative=3, num_blocks=200)
TEACHER = NullTeacher()


def drafting(right: int, most: int = 1_000) -> Drafter:
    """Offers up to ``most`` drafts, of which ``right`` are."""
    return lambda request, count: TEACHER.drafts(request, min(right, most, count), min(most, count))


def engine(config: Config = HYBRID, mode: Mode = "touched") -> AssertingEngine:
    return AssertingEngine(config, NullModel(), mode)


def drive(served: Engine, drafter: Drafter = lambda request, count: (), most: int = 100) -> list[StepEnd]:
    ends: list[StepEnd] = []
    while served.scheduler.requests and len(ends) < most:
        ends.append(served.step(drafter))
    return ends


def reread(scenario: Scenario) -> Scenario:
    """As if it had been written to a file."""
    return scenario_file.parse(json.loads(json.dumps(scenario.to_dict()))).scenario


def happens_again(scenario: Scenario) -> list[StepEnd]:
    driver = Driver(engine(scenario.config), TEACHER)
    ends: list[StepEnd] = []

    def step(original: Callable[..., StepEnd], *given: Any, **named: Any) -> StepEnd:
        ends.append(original(*given, **named))
        return ends[-1]

    wrap(driver.engine, "step", step)
    for action in reread(scenario).actions:
        assert driver.apply(action), action
    return ends


# -- room for drafts --------------------------------------------------------------------------------------------------

NARROW = Config((FULL,), 4, 4, 64, speculative=2, long_prefill_threshold=2)


def test_a_request_that_fits_only_without_drafts_runs_without_them() -> None:
    served = engine(NARROW, "full")
    request = served.submit("a", range(10), 2)
    served.submit("b", range(100, 102), 1)
    assert len(drive(served, drafting(2))) == 6
    assert request.outputs == 2


def test_nobody_loses_blocks_for_drafts() -> None:
    """The older one's drafts want one more block, and the newer one holds the last."""
    served = engine(replace(NARROW, num_blocks=6, long_prefill_threshold=0, full_sequence_must_fit=False))
    served.submit("old", range(10), 2)
    served.submit("new", range(100, 106), 2)
    ends = drive(served, drafting(2))
    assert [end.running for end in ends] == [("old", "new"), ()]
    assert len(ends[1].scheduled) == 2


# -- no progress ------------------------------------------------------------------------------------------------------


def watched(config: Config) -> tuple[Engine, Monitor, list[Event]]:
    monitor, events = Monitor(stop=False), list[Event]()

    def observe(observation: Observation) -> None:
        events.append(observation.event)
        monitor(observation)

    return Engine(config, NullModel(), observe), monitor, events


def never_past(position: int) -> Callable[[Engine], None]:
    """A fault: whoever wants to get there finds no room, loses everything and starts over."""

    def plant(planted: Engine) -> None:
        def allocate(original: Any, request: Request, target: Any, step: Any, reserved: int = 0) -> bool:
            return target.end < position and bool(original(request, target, step, reserved))

        wrap(planted.scheduler, "_allocate", allocate)

    return plant


def test_running_over_and_over_without_getting_further_is_a_stall() -> None:
    served, monitor, events = watched(NARROW)
    never_past(11)(served)
    served.submit("a", range(10), 2)
    for _ in range(60):
        served.step()
    (stall,) = [event for event in events if isinstance(event, Stall)]
    assert 11 <= stall.schedules < 40
    assert stall.peak == stall.pool == 3  # drafts would take one more: it does not need them
    assert [v.identity for v in monitor.violations] == [("ADMIT.stall", "running-request-starves-in-idle-pool")]
    assert [event for event in events if isinstance(event, StepEnd) and event.scheduled][-1].index > 50


def test_a_drain_tells_a_stall_instead_of_hiding_it() -> None:
    class Faulty(ReferenceSubject):
        def start(self, config: Config, observer: Any) -> Driver:
            driver = super().start(config, observer)
            never_past(220)(driver.engine)
            return driver

    config = Config((FULL,), 400, 4, 64, long_prefill_threshold=1)
    found = replay(Faulty(), Scenario(config, (Action("submit", "a", length=219, max_tokens=2),)))
    assert [v.identity for v in found.violations] == [("ADMIT.stall", "running-request-starves-in-idle-pool")]
    assert found.steps > 400
    healthy = replay(ReferenceSubject(), Scenario(config, (Action("submit", "a", length=219, max_tokens=2),)))
    assert (healthy.violations, healthy.error) == ((), "")


def test_computing_again_what_was_lost_is_no_stall() -> None:
    served, monitor, events = watched(replace(HYBRID, long_prefill_threshold=1, max_model_len=200, num_blocks=40))
    served.submit("a", range(60), 20)
    lost = 0
    while served.scheduler.requests:
        served.step()
        if served.scheduler.requests and served.scheduler.steps in (61, 101):
            lost += served.preempt("a")
            served.evict(0)
    assert lost == 2
    assert not any(isinstance(event, Stall) for event in events)
    assert monitor.violations == []


# -- what was recorded happens again ----------------------------------------------------------------------------------


def test_a_drafter_that_offers_little_or_nothing_is_recorded_as_such() -> None:
    for offered in ((0,), (3, 0, 1), (2, 3)):
        served = engine(replace(DRAFTS, step_tokens=64))
        calls = 0

        def drafter(request: Request, count: int, offered: Sequence[int] = offered) -> Sequence[int]:
            nonlocal calls
            calls += 1
            most = offered[calls % len(offered)]
            return TEACHER.drafts(request, min(most, calls % 3), min(most, count))

        ends: list[StepEnd] = []
        for number in range(4):
            served.submit(f"r{number}", range(100 * number, 100 * number + 9 + number), 15)
            ends += [served.step(drafter) for _ in range(3)]
        ends += drive(served, drafter)
        assert calls > 20
        assert happens_again(served.scenario()) == ends, offered


def test_loads_go_on_while_nobody_waits_for_them() -> None:
    served = engine(replace(HYBRID, connector="async", load_steps=3))
    served.submit("a", range(30), 2, claimed=30)
    ends = [served.step()]
    served.abort("a")
    ends += [served.step() for _ in range(2)]
    assert served.scheduler.store.flying == {}
    served.submit("b", range(100, 130), 2)
    ends += drive(served)
    assert happens_again(served.scenario()) == ends


@pytest.mark.parametrize(("where", "accepted"), [("forward", 3), ("complete", 1)])
def test_an_engine_that_raises_stops_with_a_finding(where: str, accepted: int) -> None:
    """With the drafts that the step accepted, as far as it is known: before the forward, those offered."""
    served = engine(DRAFTS)
    served.submit("a", range(9), 15)
    while served.scheduler.requests["a"].outputs < 2:
        served.step(drafting(2))
    original = KeyError("block 7")

    def fail(*arguments: object) -> Any:
        raise original

    if where == "forward":
        wrap(served.device.model, "forward", fail)
    else:
        wrap(served.scheduler.report, "learn", fail)
    with pytest.raises(EngineStopped, match=r"FLOW.no-crash .*KeyError: 'block 7'") as stopped:
        served.step(drafting(1))
    assert stopped.value.__cause__ is original
    finding = stopped.value.finding
    assert finding.scenario.actions[-1] == Action("step", accept=(accepted,))
    assert finding.action == len(finding.scenario.actions) - 1
    assert served.monitor.violations == [finding.violation]
    assert reread(finding.scenario) == finding.scenario


def test_what_a_step_of_a_live_engine_raises_counts_as_noticed() -> None:
    class Served(Driver):
        steps = 0

    def serve(config: Config) -> Served:
        served = engine(config, "full")
        wrap(served.scheduler, "schedule", lambda original, drafter: 1 // 0)
        return Served(served, TEACHER)

    trial = live(serve, [Scenario(HYBRID, (Action("submit", "a", length=9, max_tokens=2), Action("step")))])
    assert trial.violation is not None
    assert trial.violation.invariant == "FLOW.no-crash"
    assert "ZeroDivisionError" in trial.violation.witness


def test_what_an_audit_finds_is_what_a_driver_tells() -> None:
    served = engine(replace(HYBRID, num_blocks=2_000), "full")  # above what every step judges whole
    driver = Driver(served, TEACHER)
    driver.apply(Action("submit", "a", length=9, max_tokens=3))
    served.scheduler.pool.references[list(served.scheduler.pool.free)[-1]] += 1
    with pytest.raises(InvariantBroken, match=r"^REF\."):
        driver.apply(Action("step"))


def test_what_a_drafter_raises_is_the_callers() -> None:
    def fail(request: Request, count: int) -> Sequence[int]:
        raise ZeroDivisionError

    for drafter, error in (
        (fail, ZeroDivisionError),
        (lambda request, count: ["x"], ValueError),
        (lambda request, count: [-1], ValueError),
    ):
        served = engine(DRAFTS)
        served.submit("a", range(9), 15)
        with pytest.raises(error):
            drive(served, drafter)  # type: ignore[arg-type]
        assert served.monitor.violations == []
    served = engine(DRAFTS)
    request = served.submit("a", range(9), 5)
    drive(served, lambda request, count: torch.arange(50, 50 + 2 * count))  # type: ignore[arg-type,return-value]
    assert request.outputs == 5


# -- calls that make no sense -----------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[AssertingEngine], object], str]] = {
    "a name again": (lambda e: e.submit("a", range(9), 1), "there is a request a already: choose another name"),
    "a name of before": (lambda e: e.submit("gone", range(9), 1), "there was a request gone before: choose another"),
    "no name": (lambda e: e.submit("", range(9), 1), "'' is no name of a request"),
    "a long name": (lambda e: e.submit("x" * (MOST_LETTERS + 1), range(9), 1), "use 1 to 100 printable characters"),
    "a name of two lines": (lambda e: e.submit("a\nb", range(9), 1), "is no name of a request"),
    "a name that is a number": (lambda e: e.submit(7, range(9), 1), "'7' is no name of a request"),  # type: ignore[arg-type]
    "no tokens": (lambda e: e.submit("b", [], 1), "b has 0 tokens"),
    "text": (lambda e: e.submit("b", "hello", 1), "a token of b is not a whole number"),  # type: ignore[arg-type]
    "fractions": (lambda e: e.submit("b", [1.5], 1), "a token of b is not a whole number"),  # type: ignore[list-item]
    "negative tokens": (lambda e: e.submit("b", [3, -1], 1), "a token of b is -1: give numbers from 0 on"),
    "half an output": (lambda e: e.submit("b", [3], 2.5), "max_tokens, claimed or missing of b is not a whole"),  # type: ignore[arg-type]
    "finish nobody": (lambda e: e.finish("zz"), "there is no request zz, or not any more"),
    "abort nobody": (lambda e: e.abort("gone"), "there is no request gone, or not any more"),
    "evict less than none": (lambda e: e.evict(-1), "-1 blocks can't be evicted"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused_and_not_recorded(name: str) -> None:
    call, message = REFUSED[name]
    served = engine()
    served.submit("gone", range(5), 1)
    drive(served)
    served.submit("a", range(50, 59), 3)
    before = served.scenario()
    with pytest.raises(ValueError, match=message):
        call(served)
    assert not served.preempt("zz")
    assert served.scenario() == before
    ends = drive(served)
    assert happens_again(served.scenario())[-len(ends) :] == ends


def test_numbers_beyond_what_is_possible_are_cut() -> None:
    served = engine(replace(HYBRID, connector="async"))
    for name, claimed, missing in (("a", 10**9, 0), ("b", -1, -1), ("c", 16, 10**9)):
        served.submit(name, range(20), 10**9 if name == "a" else -5, claimed, missing)
    served.step()
    assert served.scenario().actions == (
        Action("submit", "a", length=20, max_tokens=HYBRID.max_model_len, external=20),
        Action("submit", "b", "a", 20, 20, 1),
        Action("submit", "c", "a", 20, 20, 1, 16, 20),
        Action("step"),
    )
    assert reread(served.scenario()) == served.scenario()


def test_a_mode_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no mode 'bogus': use one of off, touched, full"):
        engine(mode="bogus")  # type: ignore[arg-type]


def test_a_pool_that_would_fill_the_memory_is_refused() -> None:
    huge = Config((Group("full", 65_536),), 4_096, 4, 64)
    for start in (lambda: ReferenceSubject().start(huge, None), lambda: engine(huge)):
        with pytest.raises(ConfigError, match="set num_blocks to at most 2048 or use smaller blocks"):
            start()
    engine(replace(huge, num_blocks=100))


def test_a_prompt_may_be_any_sequence_of_whole_numbers() -> None:
    served, _, events = watched(HYBRID)
    for name, prompt in (("tensor", torch.arange(17)), ("list", list(range(17)))):
        served.submit(name, prompt, 2)  # type: ignore[arg-type]
        drive(served)
    assert [event.tokens for event in events if isinstance(event, Lookup)] == [0, 16]


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_a_record_keeps_within_what_a_scenario_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "MOST_STEPS", 10)
    served = engine()
    served.submit("a", range(9), 25)
    drive(served)
    assert [action.times for action in served.actions] == [1, 10, 10, 6]
    ends = {"MOST_ACTIONS": 4, "MOST_PROMPT_TOKENS": 40, "MOST_PREFIXES": 20, "MOST_ENTRIES": 0, "MOST_ACCEPTED": 0}
    for bound, most in ends.items():
        with monkeypatch.context() as patched:
            patched.setattr(record_module, bound, most)
            served = engine(DRAFTS)
            for number in range(5):
                served.submit(f"r{number}", range(100 * number, 100 * number + 9), 3)
                drive(served)
            assert served.record is not None
            assert served.record.ended, bound
            beginning = served.scenario()
            assert beginning.note == "recorded by a live engine: the beginning"
            assert len(beginning.actions) <= 8
            served.submit("last", range(9), 3)
            assert served.scenario() == beginning
            wrap(served.scheduler, "schedule", lambda original, drafter: 1 // 0)
            with pytest.raises(EngineStopped) as stopped:
                served.step()
            assert (stopped.value.finding.scenario, stopped.value.finding.action) == (beginning, -1)


def test_an_eviction_that_no_scenario_can_tell_ends_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "MOST_STEPS", 10)
    served = engine()
    for count in (10, 10**6, 59):
        served.evict(count)
    assert served.actions == [Action("evict", times=10), Action("evict", times=0), Action("evict", times=0)]
    served.evict(11)
    assert served.scenario().note == "recorded by a live engine: the beginning"


def test_what_is_remembered_does_not_grow_with_what_has_been(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "FEWEST_SWEPT", 100)
    monkeypatch.setattr(record_module, "MOST_PREFIXES", 100)
    served = engine(HYBRID, "full")
    for number in range(60):
        served.submit(f"r{number}", range(1_000 * number, 1_000 * number + 30), 3)
        drive(served)
        served.step()
    report, pool = served.scheduler.report, served.scheduler.pool
    assert len(report._known) <= 100 + 2 * (len(pool.index) + 34)
    assert {state for _, state in pool.index} <= set(report._known)
    assert report.offered == report._looked_up == {}
    assert served.record is not None
    assert served.record._owners == {}


# -- what the gate charges --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["touched", "full"])
def test_every_dry_run_of_the_same_question_is_compared_with_the_real_one(mode: Mode) -> None:
    """The gate asks, and a dry run at the real question's own arguments may follow: neither hides the other."""
    served = engine(replace(HYBRID, groups=(FULL,)), mode)
    next(mutant for mutant in MUTANTS if mutant.id == "gate-charges-twice").plant(served)
    served.submit("a", range(9), 2)
    with pytest.raises(EngineStopped, match=r"ADMIT.dry-real \(full-dry-exceeds-real\)"):
        drive(served)


def test_a_hit_is_among_the_blocks_that_a_window_holds_at_most() -> None:
    """Charged on top of these, it would keep a request out for ever that an idle pool holds just so."""
    config = Config((Group("window", 2, window=4),), num_blocks=5, hash_unit=2, step_tokens=2)
    actions = (
        Action("submit", "r1", length=2, max_tokens=1),
        Action("submit", "r2", "r1", shared=2, length=9, max_tokens=1),
        Action("step", times=4),
    )
    found = replay(ReferenceSubject(), Scenario(config, actions))
    assert found.violations == (), found.text


def test_what_was_loaded_is_among_the_blocks_that_a_window_holds_at_most() -> None:
    """Who waited for a load holds some of them already. Charged anew, they would keep it out for ever."""
    config = Config((Group("window", 4, window=6),), num_blocks=4, hash_unit=4, step_tokens=1, connector="async")
    actions = (Action("submit", "r1", length=13, max_tokens=1, external=4), Action("step", times=4))
    found = replay(ReferenceSubject(), Scenario(config, actions))
    assert found.violations == (), found.text
