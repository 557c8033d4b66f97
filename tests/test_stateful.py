"""The fuzzer finds planted faults in a toy engine, makes them small, and repeats itself exactly."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from kvproof import scenario_file
from kvproof.models.stateful import campaign
from kvproof.models.stateful.campaign import Campaign
from kvproof.models.stateful.drive import standard_watchers
from kvproof.models.stateful.replay import replay
from kvproof.models.stateful.shrink import Reducer, renamed, size
from kvproof.models.stateful.strategies import Menu, Setup, setups
from kvproof.spec.config import Config, ConfigError, Group
from kvproof.spec.scenario import Action, Scenario
from kvproof.spec.subject import Observer

sys.path.insert(0, str(Path(__file__).parent))
from toysubject import Toy, ToySubject

sys.path.pop(0)

IDENTITIES = {
    "leak": {("REF.references", "count-exceeds-holders")},
    "unaligned": {("SLOT.key-content", "")},
    "crash": {("FLOW.no-crash", "")},
}
CONFIG = Config(groups=(Group("full", 4), Group("mamba", 4)), num_blocks=33, hash_unit=4, step_tokens=32)


def fuzz(fault: str, seed: int = 1, steps: int = 7000, workers: int = 1) -> Campaign:
    return campaign.run(ToySubject(fault), seed=seed, steps=steps, workers=workers)


def without_clock(found: Campaign) -> Campaign:
    return replace(found, seconds=0.0, searched=0.0, first_seen=dict.fromkeys(found.first_seen, 0.0))


@pytest.mark.parametrize("fault", sorted(IDENTITIES))
def test_a_planted_fault_is_found_made_small_and_replayed(fault: str) -> None:
    found = fuzz(fault)
    assert found.errors == ()
    names = {(f.violation.invariant, f.violation.cause) for f in found.findings}
    for invariant, cause in IDENTITIES[fault]:
        assert any(i == invariant and (not cause or c == cause) for i, c in names), names
    for finding in found.findings:
        assert len(finding.scenario.actions) <= 10, finding.scenario.text()
        again = replay(ToySubject(fault), finding.scenario)
        assert again.at(finding.violation.identity) == finding.action
        assert again == replay(ToySubject(fault), finding.scenario)
        assert found.first_seen[finding.violation.identity] >= 0
        assert finding.violation.invariant in again.text
        assert replay(ToySubject(), finding.scenario).violations == ()


def test_a_healthy_engine_gives_no_finding() -> None:
    found = fuzz("", steps=12_000)
    assert found.findings == ()
    assert found.errors == ()
    assert found.steps >= 12_000
    assert found.first_seen == {}
    assert {"REF.references", "SLOT.key-content", "FLOW.no-crash"} <= {
        name for name, n in found.evaluations.items() if n
    }
    for kind in ("submit", "step", "finish", "abort", "preempt", "evict", "reset"):
        assert found.coverage[f"action {kind}"] > 0


@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_seed_gives_the_same_campaign(workers: int) -> None:
    first, second = (fuzz("unaligned", steps=7000 * workers, workers=workers) for _ in range(2))
    assert first.findings
    assert without_clock(first) == without_clock(second)


def test_the_same_violation_in_another_setting_is_handed_over_too() -> None:
    """Two faults may break the same in the same way: one is not to stand for the other where it can't be it."""

    class Twofold(ToySubject):
        def start(self, config: Config, observer: Observer | None) -> Toy:
            self.fault = "leak" if config.speculative or config.connector == "async" else ""
            return super().start(config, observer)

    found = campaign.run(Twofold(), seed=2, steps=4000)
    (first,) = found.findings
    both = (first, *first.others)
    assert {(bool(one.scenario.config.speculative), one.scenario.config.connector) for one in both} >= {
        (True, "none"),
        (False, "async"),
    }
    for one in both:
        assert len(one.scenario.actions) <= 10
        assert replay(Twofold(), one.scenario).at(first.violation.identity) == one.action
    assert first.to_dict().get("others") is None  # each is a file of its own


def test_another_seed_goes_another_way() -> None:
    assert fuzz("").coverage != fuzz("", seed=2).coverage


def test_workers_merge_what_they_find() -> None:
    found = fuzz("leak", steps=14_001, workers=2)
    assert found.steps >= 14_001
    assert found.errors == ()
    identities = [f.violation.identity for f in found.findings]
    assert sorted(set(identities)) == identities
    assert ("REF.references", "count-exceeds-holders") in identities


def test_known_findings_are_passed_over_but_seen() -> None:
    identities = frozenset(f.violation.identity for f in fuzz("unaligned").findings)
    found = campaign.run(ToySubject("unaligned"), seed=1, steps=7000, known=identities)
    assert not identities & {f.violation.identity for f in found.findings}
    assert identities & set(found.first_seen)
    assert found.coverage["run ended by a known violation"] > 0


class Interrupting(ToySubject):
    """Somebody presses Ctrl-C when the n-th engine is started."""

    def __init__(self, fault: str, at: int) -> None:
        super().__init__(fault)
        self.left = at

    def start(self, config: Config, observer: Observer | None) -> Toy:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().start(config, observer)


@pytest.mark.parametrize("at", [3, 60, 90, 200, 400])
def test_an_interrupt_keeps_what_was_found(at: int) -> None:
    found = campaign.run(Interrupting("unaligned", at), seed=1, steps=100_000)
    assert found.interrupted
    if at >= 60:  # the first runs find it; where reducing is cut short the scenario is just longer
        assert found.findings
    for finding in found.findings:
        again = replay(ToySubject("unaligned"), finding.scenario)
        assert again.at(finding.violation.identity) == finding.action


def test_an_interrupt_reaches_the_workers() -> None:
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    found = fuzz("unaligned", steps=10_000_000, workers=2)
    assert found.interrupted
    assert found.findings
    assert found.steps > 0


class Dying(ToySubject):
    def start(self, config: Config, observer: Observer | None) -> Toy:
        os._exit(5)


def test_a_lost_worker_is_an_error() -> None:
    found = campaign.run(Dying(), seed=1, steps=100, workers=2)
    assert len(found.errors) == 2
    assert "exit code 5" in found.errors[0]


class Refusing(ToySubject):
    def start(self, config: Config, observer: Observer | None) -> Toy:
        raise ConfigError("never")


def test_a_subject_that_refuses_everything_is_an_error() -> None:
    found = campaign.run(Refusing(), seed=1, steps=100)
    assert found.steps == 0
    assert "refused every configuration" in found.errors[0]


class Confused(ToySubject):
    """Not the engine's fault but the checker's: nothing that an engine raises."""

    def start(self, config: Config, observer: Observer | None) -> Toy:
        toy = super().start(config, observer)
        toy.holders = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        return toy


def test_a_mistake_in_a_checker_is_an_error_and_no_finding() -> None:
    found = campaign.run(Confused(), seed=1, steps=200)
    assert found.findings == ()
    assert found.errors
    assert "ZeroDivisionError" in found.errors[0]


def test_seconds_end_a_campaign() -> None:
    found = campaign.run(ToySubject(), seed=1, steps=100_000_000, seconds=0.5)
    assert 0 < found.steps < 100_000_000
    assert not found.interrupted


def test_progress_names_what_is_found() -> None:
    said: list[str] = []
    campaign.run(ToySubject("leak"), seed=1, steps=7000, progress=said.append)
    assert any("REF.references (count-exceeds-holders)" in line for line in said)


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_tells_new_from_known(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "SECONDS_BETWEEN_REPORTS", 0.0)
    said: list[str] = []
    identities = frozenset(f.violation.identity for f in fuzz("leak").findings)
    campaign.run(
        ToySubject("leak"), seed=1, steps=7000 * workers, workers=workers, known=identities, progress=said.append
    )
    assert said[-1].endswith("0 new, 1 known")


def test_nothing_is_written_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fuzz("", steps=200)
    assert list(tmp_path.iterdir()) == []


def test_bad_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        campaign.run(ToySubject(), seed=1, steps=0)


@settings(max_examples=300, deadline=None, database=None)
@given(setup=setups())
def test_drawn_configurations_are_possible_and_small(setup: Setup) -> None:
    config = setup.resolved(lambda eagle: None if eagle else 0).config
    assert config.problem() is None
    menu = Menu(setup)
    assert menu.lengths
    assert menu.lengths[-1] <= menu.longest <= 12 * 32
    assert menu.longest < config.max_model_len
    # Only where the longest request is as long as the model allows may an output be cut short by that.
    assert setup.pool == "exact" or menu.longest + max(menu.outputs) < config.max_model_len
    if config.eagle and len(config.groups) > 1:
        assert not any(g.drafter for g in config.groups if g.kind == "mamba")


def test_a_scenario_is_reduced_to_what_matters() -> None:
    noise = [Action("submit", f"x{i}", length=20 + i, max_tokens=9) for i in range(4)]
    actions = (
        *noise[:2],
        Action("step", times=3),
        Action("evict", times=2),
        Action("submit", "wanted", base="x0", shared=8, length=41, max_tokens=5, external=8),
        Action("step", times=4, accept=(1,)),
        *noise[2:],
        Action("step", times=2),
        Action("abort", "wanted"),
        Action("step", times=7),
    )
    scenario = Scenario(replace(CONFIG, speculative=2, connector="sync", retention=8), actions)

    def reproduces(candidate: Scenario, drains: bool) -> int | None:
        """Somebody submits at least 13 tokens, three steps pass, and it is aborted."""
        waited = {}
        for index, action in enumerate(candidate.actions):
            if action.kind == "submit" and action.length >= 13:
                waited[action.request] = 0
            elif action.kind == "step":
                waited = {name: n + action.times for name, n in waited.items()}
            elif action.kind == "abort" and waited.get(action.request, 0) >= 3:
                return index
        return None

    reducer = Reducer(scenario, reproduces, attempts=500)
    small = reducer.reduce()
    assert small.actions == (
        Action("submit", "r1", length=13, max_tokens=1),
        Action("step", times=3),
        Action("abort", "r1"),
    )
    assert reducer.action == 2
    assert reducer.used <= 500
    assert small.config.speculative == 0
    assert small.config.connector == "none"
    assert size(small) < size(scenario)


def test_reducing_stops_when_told_and_tells_what_does_not_reproduce() -> None:
    scenario = Scenario(CONFIG, (Action("submit", "r1", length=9, max_tokens=2), Action("step", times=5)))
    few = Reducer(scenario, lambda candidate, drains: len(candidate.actions) - 1, attempts=1)
    assert few.reduce() == scenario
    never = Reducer(scenario, lambda candidate, drains: None, attempts=50)
    assert never.reduce() == scenario
    assert never.reproduced is False
    assert never.used == 1


@pytest.mark.parametrize("attempts", range(2, 20))
def test_a_scenario_can_be_read_wherever_reducing_it_ended(attempts: int) -> None:
    actions = (
        Action("submit", "r1", length=9, max_tokens=2),
        Action("submit", "r2", base="r1", shared=9, length=12, max_tokens=2),
        Action("finish", "r1"),
        Action("submit", "r3", base="r2", shared=7, length=8, max_tokens=2),
        Action("abort", "r2"),
        Action("step", times=3),
    )

    def reproduces(candidate: Scenario, drains: bool) -> int | None:
        last = candidate.actions[-1] if candidate.actions else None
        third = any(action.kind == "submit" and action.request == "r3" for action in candidate.actions)
        return len(candidate.actions) - 1 if third and last is not None and last.kind == "step" else None

    small = Reducer(Scenario(CONFIG, actions), reproduces, attempts).reduce()
    assert scenario_file.parse(scenario_file.to_data(small)).scenario == small
    assert attempts < 5 or len(small.actions) < len(actions)


def test_requests_are_renamed_with_their_bases() -> None:
    actions = (
        Action("submit", "b", length=5, max_tokens=1),
        Action("submit", "a", base="b", shared=4, length=6, max_tokens=1),
        Action("abort", "a"),
    )
    names = [(a.request, a.base) for a in renamed(Scenario(CONFIG, actions)).actions]
    assert names == [("r1", ""), ("r2", "r1"), ("r2", "")]


def test_a_replay_tells_what_happened() -> None:
    actions = (
        Action("submit", "r1", length=10, max_tokens=2),
        Action("step", times=6),
        Action("submit", "r2", base="r1", shared=10, length=10, max_tokens=1),
        Action("step", times=2),
        Action("abort", "gone"),
    )
    seen = replay(ToySubject(), Scenario(CONFIG, actions), watchers=standard_watchers(ToySubject()))
    assert seen.violations == ()
    assert seen.steps == 5
    assert "r2 resumes at 8 local tokens" in seen.text
    assert "step 1: r1 [0, 4)" in seen.text
    assert "did not apply" in seen.text
    assert seen.evaluations["REF.drained"] == 1
