"""Recorded scenarios, run again: after a campaign, and by ``kvproof replay``. A toy engine stands for the release."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvproof import cli, engines, fuzzing, recorded, scenario_file, subjects
from kvproof.invariants.monitor import RunSpoiled
from kvproof.models.stateful.replay import replay
from kvproof.spec.config import Config, ConfigError, Group
from kvproof.spec.events import Forward, Observation, StepEnd
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.scenario import Action, Scenario
from kvproof.spec.subject import Observer

sys.path.insert(0, str(Path(__file__).parent))
from toysubject import Toy, ToySubject

sys.path.pop(0)

CONFIG = Config(groups=(Group("full", 4), Group("mamba", 4)), num_blocks=33, hash_unit=4, step_tokens=32)
LEAK = Scenario(
    CONFIG,
    (
        Action("submit", "r1", length=9, max_tokens=4),
        Action("step"),
        Action("abort", "r1"),
        Action("submit", "r2", length=5, max_tokens=2),
        Action("step", times=3),
        Action("step"),
    ),
)
LEAKED = ("REF.references", "count-exceeds-holders")


class Subject(ToySubject):
    def lacking(self) -> Mapping[str, str]:
        return {"REF.null": "a toy"}


class Shy(Subject):
    """Has its fault under the configuration of the scenario only, which no campaign draws."""

    def start(self, config: Config, observer: Observer | None) -> Toy:
        return Toy(config.check(), observer, self.fault if config == CONFIG else "")


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Chooses the fault of the engine that the commands drive."""

    def choose(made: ToySubject) -> None:
        monkeypatch.setattr(subjects, "open_subject", lambda *_: made)

    monkeypatch.chdir(tmp_path)
    choose(Subject("leak"))
    return choose


def record(identity: tuple[str, str], scenario: Scenario | None, folder: str = "known") -> None:
    Path(folder).mkdir(exist_ok=True)
    data = {
        "invariant": identity[0],
        "cause": identity[1],
        "releases": "0.33.0",
        "status": "confirmed",
        "reference": "",
        "reasoning": "Seen. Read.",
        "scenario": scenario and scenario.to_dict(),
    }
    (Path(folder) / f"{identity[1]}.json").write_text(json.dumps(data))


def fuzzed(steps: int = 1, seconds: float | None = None) -> fuzzing.FuzzRecord:
    Path("known").mkdir(exist_ok=True)
    target = subjects.Target("vllm==0.33.0", "release", "0.33.0")
    return fuzzing.fuzz(target, fuzzing.Options(1, steps, seconds, 1, Path("out"), Path("known")), print)


# -- after a campaign -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["leak", ""])
def test_what_a_campaign_did_not_see_is_looked_for_by_its_scenario(subject: Any, fault: str) -> None:
    subject(Shy(fault))
    record(LEAKED, LEAK)
    (known,) = fuzzed().known
    assert known.seen is None
    assert known.shown == bool(fault)
    assert known.gone == (not fault)
    assert known.file == "known/count-exceeds-holders.json"


def test_what_a_campaign_saw_is_not_asked_again(subject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record(LEAKED, LEAK)
    monkeypatch.setattr(engines, "replay", lambda *_: pytest.fail("asked again"))
    (known,) = fuzzed(steps=7000).known
    assert known.verdict == f"known: seen in this run after {known.seen:.1f} s"


def test_a_scenario_that_shows_what_nobody_recorded_is_a_new_finding(subject: Any) -> None:
    subject(Shy("leak"))
    record(("SLOT.key-content", "full-key-stale"), LEAK)
    made = fuzzed()
    (known,) = made.known
    assert [(invariant, cause) for invariant, cause, _ in known.besides] == [LEAKED]
    assert known.shown is None, "the leak ended the scenario first"
    assert "ended at another violation first" in known.verdict
    assert made.facts()["new"] == 1


class Refusing(Subject):
    def start(self, config: Config, observer: Observer | None) -> Toy:
        if config == CONFIG:
            raise ConfigError("not this one")
        return super().start(config, observer)


class Failing(Refusing):
    def start(self, config: Config, observer: Observer | None) -> Toy:
        try:
            return super().start(config, observer)
        except ConfigError as error:
            raise ZeroDivisionError("a mistake") from error


class Interrupted(Refusing):
    def start(self, config: Config, observer: Observer | None) -> Toy:
        try:
            return super().start(config, observer)
        except ConfigError as error:
            raise KeyboardInterrupt from error


@pytest.mark.parametrize(
    ("made", "scenario", "why"),
    [
        (Subject(), None, "no scenario is recorded"),
        (Refusing(), LEAK, "its recorded scenario can't run here: not this one"),
        (Failing(), LEAK, "the checker failed on its scenario"),
        (Interrupted(), LEAK, "the run was interrupted"),
    ],
)
def test_what_can_not_be_asked_is_neither_gone_nor_lost(
    subject: Any, made: Subject, scenario: Scenario | None, why: str
) -> None:
    subject(made)
    record(LEAKED, scenario)
    told = fuzzed()
    (known,) = told.known
    assert known.verdict == f"known: not seen in this run; {why}"
    assert [error for error in told.errors if "ZeroDivisionError: a mistake" in error] == told.errors
    assert bool(told.errors) == isinstance(made, Failing)
    assert told.interrupted == isinstance(made, Interrupted)


def test_what_ended_a_campaign_is_said(subject: Any) -> None:
    subject(Subject())
    made = fuzzed(200)
    assert made.ended == "ended by steps=200"
    assert made.lacking == {"REF.null": "a toy"}
    assert fuzzed(10**9, 1.5).ended == "ended by seconds=1.5: a repeat may go further or less far"


def test_files_of_records_elsewhere_are_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record(LEAKED, LEAK)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    (known,) = recorded.records_for(tmp_path / "known", "0.33.0")
    assert known.file == str(tmp_path / "known" / "count-exceeds-holders.json")
    assert recorded.records_for(tmp_path / "known", "0.32.0") == []


# -- replay -----------------------------------------------------------------------------------------------------------


def replayed(capsys: pytest.CaptureFixture[str], file: str = "s.json") -> tuple[int, str]:
    Path("known").mkdir(exist_ok=True)
    code = cli.run(["replay", file, "--on", "vllm==0.33.0", "--findings", "known"])
    return code, capsys.readouterr().out


def test_what_a_plain_scenario_shows_is_known_or_new(subject: Any, capsys: pytest.CaptureFixture[str]) -> None:
    scenario_file.save(Path("s.json"), LEAK)
    code, out = replayed(capsys)
    assert code == 1
    assert "REF.references count-exceeds-holders\n    new: not recorded for this release\n" in out
    assert "violations=1 new=1 known=0 verdict=found exit=1" in out
    record(LEAKED, LEAK)
    code, out = replayed(capsys)
    assert code == 0
    assert "REF.references count-exceeds-holders\n    known: recorded as confirmed\n" in out
    assert "violations=1 new=0 known=1 verdict=known exit=0" in out
    subject(Subject())
    code, out = replayed(capsys)
    assert code == 0
    assert "violations=0 verdict=met exit=0" in out


def test_a_finding_that_another_violation_hides_is_not_gone(subject: Any, capsys: pytest.CaptureFixture[str]) -> None:
    record(LEAKED, LEAK)
    violation = Violation("SLOT.key-content", "full-key-stale", "")
    scenario_file.save(Path("s.json"), LEAK, Finding(violation, "vllm==0.33.0", LEAK, 1))
    code, out = replayed(capsys)
    assert code == 3
    assert "another violation ended the run before it could show" in out
    subject(Subject())
    code, out = replayed(capsys)
    assert code == 0
    assert "gone" in out


class Judge:
    """Finds fault with every step. ``spoils``: with the second one, and nothing can be judged after it."""

    def __init__(self, *broken: Violation, spoils: bool) -> None:
        self.evaluations: Counter[str] = Counter(steps=1)
        self.violations: list[Violation] = []
        self.broken, self.spoils, self.seen = broken, spoils, 0

    def __call__(self, observation: Observation) -> None:
        if isinstance(observation.event, StepEnd):
            self.seen += 1
            if self.seen > 1 or not self.spoils:
                self.violations += self.broken
            if self.seen > 1 and self.spoils:
                raise RunSpoiled(self.broken[0])


CAUSE = Violation("SLOT.key-content", "full-key-stale", "block 3 holds state@4")
SAME_RULE = Violation("SLOT.key-content", "full-key-foreign", "block 4 holds state@8")
EFFECT = Violation("REF.queue", "queued-in-use", "block 3 is queued")


def test_a_timeline_starts_with_the_configuration_and_says_a_violation_once() -> None:
    seen = replay(ToySubject(), LEAK, watchers=lambda *_: Judge(EFFECT, spoils=False))
    assert len(seen.violations) > 2
    assert seen.text.count("! REF.queue (queued-in-use)") == 1
    assert seen.text.startswith("groups: full 4, mamba 4; hash unit 4; 33 blocks; 32 tokens a step\n  1. submit r1")
    assert "the run ends here" not in seen.text
    assert not seen.spoiled


class AtForward(Judge):
    """Sees something at every forward, which is in the middle of a step."""

    def __call__(self, observation: Observation) -> None:
        if isinstance(observation.event, Forward):
            self.violations += self.broken


@pytest.mark.parametrize("judge", [Judge, AtForward])
def test_a_violation_is_told_below_the_step_in_which_it_was_seen(judge: type[Judge]) -> None:
    actions = (Action("submit", "r1", length=10, max_tokens=2), Action("step", times=3))
    scenario = Scenario(LEAK.config, actions)
    lines = replay(ToySubject(), scenario, watchers=lambda *_: judge(EFFECT, spoils=False)).text.splitlines()
    (at,) = [index for index, line in enumerate(lines) if "! REF.queue" in line]
    assert lines[at - 1].lstrip().startswith("step 1: ")
    assert lines[at + 1].lstrip().startswith("step 2: ")


def test_a_timeline_says_where_the_run_stopped_and_what_only_follows() -> None:
    seen = replay(ToySubject(), LEAK, watchers=lambda *_: Judge(CAUSE, SAME_RULE, EFFECT, spoils=True))
    assert "the run ends here: after this violation nothing more can be judged (1 action left out)" in seen.text
    assert seen.spoiled
    assert seen.follows == {EFFECT.identity}


def test_a_consequence_is_listed_and_not_failed_on(
    subject: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = lambda *_: Judge(CAUSE, EFFECT, spoils=True)  # noqa: E731
    monkeypatch.setattr(engines, "replay", lambda made, scenario: replay(made, scenario, watchers=judge))
    scenario_file.save(Path("s.json"), LEAK)
    record(CAUSE.identity, LEAK)
    code, out = replayed(capsys)
    assert code == 0
    assert "REF.queue queued-in-use\n    consequence: it came with the violation that ended the run\n" in out
    assert "new=0 known=1 verdict=known" in out
    subject(Subject())
    assert all(known.besides == [] for known in fuzzed().known)
