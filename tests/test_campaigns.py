"""A campaign in a folder: what one run found and kept, the next goes on from, however the first one ended."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis.database import DirectoryBasedExampleDatabase

from kvproof import campaigns, cli, fuzzing, scenario_file, subjects
from kvproof.campaign_files import RunNote, code_of, finding_name
from kvproof.errors import UsageError
from kvproof.models.stateful import campaign as fuzzer
from kvproof.models.stateful.corpus import AGAIN, VARIED, Corpus, variation
from kvproof.models.stateful.notes import Kept
from kvproof.options import MOST_SEED
from kvproof.spec.config import Config, ConfigError, Group
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.scenario import Action, Scenario

sys.path.insert(0, str(Path(__file__).parent))
from toysubject import ToySubject, toy_command

sys.path.pop(0)

TARGET = subjects.parse("spec")
LEAK = ("REF.references", "count-exceeds-holders")
PROGRAM = toy_command(0.1)


class Toy(ToySubject):
    def lacking(self) -> dict[str, str]:
        return {}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fuzz(monkeypatch: pytest.MonkeyPatch, fault: str, *, steps: int = 500, workers: int = 1) -> fuzzing.FuzzRecord:
    """One run on ``c`` in the current folder."""
    monkeypatch.setattr(subjects, "open_subject", lambda *_: Toy(fault))
    options = fuzzing.Options(1, steps, None, workers, Path("unused"), None, campaign=Path("c"))
    return fuzzing.fuzz(TARGET, options, print)


def verdicts(record: fuzzing.FuzzRecord) -> dict[str, str]:
    return {row.id: row.verdict for row in fuzzing.rows(record) if row.kind == "finding"}


def kept() -> list[dict]:
    return [json.loads(value) for value in DirectoryBasedExampleDatabase("c/corpus").fetch(campaigns.KEY)]


def notes() -> list[RunNote]:
    read = [json.loads(file.read_text()) for file in Path("c/runs").glob("*.json")]
    return sorted((RunNote(**note) for note in read), key=lambda note: note.began)


@contextmanager
def running(fault: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-c", PROGRAM, fault, "fuzz", "spec", "--campaign", "c", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# -- going on -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_run_goes_on_from_the_first(place: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    first = fuzz(monkeypatch, "leak", workers=workers, steps=500 * workers)
    assert [(f.invariant, f.finding["cause"]) for f in first.findings] == [LEAK]
    assert first.earlier == []
    (file,) = Path("c/findings").glob("*.json")
    assert first.findings[0].file == str(file)
    assert scenario_file.load(file).finding.identity == LEAK  # type: ignore[union-attr]
    many = len(kept())
    assert many > 3

    second = fuzz(monkeypatch, "leak", workers=workers)
    assert second.findings == []
    assert [known.identity for known in second.earlier] == [LEAK]
    assert "earlier: found by run 1 of this campaign" in verdicts(second)[" ".join(LEAK)]
    assert second.seed == first.seed + 1
    assert second.coverage[VARIED] > 0
    assert second.coverage.get(AGAIN, 0) == 0, "the same code says the same again"
    totals = second.totals
    assert totals is not None
    assert (totals.run, totals.steps) == (2, first.steps + second.steps)
    assert totals.examples == first.examples + second.examples
    assert totals.findings == 1
    assert totals.kept == len(kept()) == many + totals.new_kept
    assert second.facts()["earlier"] == 1
    assert [note.findings for note in notes()] == [[list(LEAK)], []]


def test_the_command_fails_for_what_an_earlier_run_found(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subjects, "open_subject", lambda *_: Toy("leak"))
    command = ["fuzz", "spec", "--campaign", "c", "--steps", "500", "--workers", "1", "--seed", "1", "--report", "r"]
    assert cli.run(command) == 1
    assert "1 new" in capsys.readouterr().out
    assert cli.run(command) == 1
    out = capsys.readouterr().out
    assert "new=0 known=0 earlier=1" in out
    assert "run=2" in out
    assert "and still there" in out
    assert "kvproof replay c/findings/" in out
    assert "all runs together:" in out
    results = json.loads(Path("r/fuzz.sarif").read_text())["runs"][0]["results"]
    assert {r["baselineState"] for r in results if r["ruleId"] == LEAK[0]} == {"unchanged"}
    assert not Path("kvproof-findings").exists()


def test_what_is_mended_is_gone_and_what_comes_back_is_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz(monkeypatch, "leak")
    healthy = fuzz(monkeypatch, "")
    assert verdicts(healthy)[" ".join(LEAK)].startswith("gone: found by run 1")
    assert healthy.facts()["gone"] == 1
    assert not any(row.outcome == "fail" for row in fuzzing.rows(healthy))
    back = fuzz(monkeypatch, "leak")
    assert verdicts(back)[" ".join(LEAK)].endswith("and still there")


def test_a_finding_whose_scenario_is_outdated_is_found_anew(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fuzz(monkeypatch, "leak")
    file = Path(first.findings[0].file)
    data = json.loads(file.read_text())
    data["actions"] = data["actions"][:1]  # shows nothing
    data["finding"]["action"] = 0
    file.write_text(json.dumps(data))
    second = fuzz(monkeypatch, "leak", steps=1500)
    assert [f.invariant for f in second.findings] == [LEAK[0]]
    assert verdicts(second)[" ".join(LEAK)] == "new"
    assert len(scenario_file.load(file).scenario.actions) > 1


def test_other_code_runs_what_was_kept_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz(monkeypatch, "")
    many = len(kept())
    monkeypatch.setattr(fuzzing, "code_of", lambda _: "other")
    second = fuzz(monkeypatch, "", steps=5000)
    assert second.coverage[AGAIN] == many
    assert second.seed == 1, "on other code the seed has not been used"
    third = fuzz(monkeypatch, "")
    assert third.coverage.get(AGAIN, 0) == 0


def test_what_is_kept_reached_something_new_and_can_be_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz(monkeypatch, "leak", workers=2, steps=1000)
    seen: set[str] = set()
    for entry in kept():
        assert entry["reached"]
        assert not seen & set(entry["reached"])
        seen |= set(entry["reached"])
        scenario_file.parse(entry["scenario"])
    assert f"any: broken {' '.join(LEAK)}" in seen


def test_a_search_without_a_folder_keeps_nothing(place: Path) -> None:
    class Journal:
        corpus = Corpus()

        def __init__(self) -> None:
            self.scenarios: list[Kept] = []
            self.steps = 0

        def kept(self, one: Kept) -> None:
            self.scenarios.append(one)

        def found(self, finding: Finding, small: bool) -> None: ...

        def went(self, steps: int, examples: int) -> None:
            self.steps = steps

    journal = Journal()
    with_one = fuzzer.run(ToySubject("leak"), seed=4, steps=700, journal=journal)
    without = fuzzer.run(ToySubject("leak"), seed=4, steps=700)
    assert journal.scenarios
    assert journal.steps == with_one.steps
    assert without.steps == with_one.steps, "an empty corpus changes nothing of the search"
    assert [f.scenario for f in without.findings] == [f.scenario for f in with_one.findings]
    assert list(place.iterdir()) == []


def test_variations_can_be_read_and_mostly_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz(monkeypatch, "")
    scenarios = [Scenario.from_dict(entry["scenario"]) for entry in kept()]
    dice, possible, different = random.Random(7), 0, 0
    for _ in range(400):
        made = variation(dice, scenarios)
        try:
            made.config.check()
        except ConfigError:
            continue
        possible += 1
        different += made not in scenarios
        assert scenario_file.parse(made.to_dict()).scenario == made
    assert possible > 300
    assert different > 300


SMALL = Scenario(
    Config(groups=(Group("full", 4),), num_blocks=8, hash_unit=4, step_tokens=8),
    (Action("submit", "r1", length=5, max_tokens=1), Action("abort", "r1")),
)
LARGER = replace(SMALL, actions=(*SMALL.actions, Action("step", times=3)))


def test_a_variation_of_next_to_nothing_still_does_something() -> None:
    assert all(variation(random.Random(seed), [SMALL]).actions for seed in range(300))


# -- however a run ends -----------------------------------------------------------------------------------------------


def test_what_a_killed_run_had_found_is_made_small_by_the_next(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running("unaligned", "--seed", "3", "--workers", "2", "--steps", "100000000") as process:
        assert process.stderr is not None
        assert any("found SLOT.key-content" in line for line in process.stderr)
        process.send_signal(signal.SIGKILL)
        process.wait()
    (note,) = notes()
    assert note.ended == ""
    (file,) = Path("c/findings").glob("*.json")
    before = scenario_file.load(file).scenario
    assert before.note == campaigns.NOT_SMALL
    record = fuzz(monkeypatch, "unaligned")
    assert [known.invariant for known in record.earlier] == ["SLOT.key-content"]
    assert record.findings == []
    after = scenario_file.load(file).scenario
    assert after.note == ""
    assert len(after.actions) < len(before.actions)
    assert [note.ended for note in notes()] == ["", "ended by steps=500"]


def test_an_interrupted_run_is_written_down(place: Path) -> None:
    with running("", "--seed", "3", "--workers", "2", "--steps", "100000000") as process:
        assert process.stderr is not None
        assert any("steps in" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        process.communicate()
        assert process.returncode == 130
    (note,) = notes()
    assert note.ended == "ended by an interrupt"
    assert note.examples > 0
    assert kept()


def test_two_at_once_share_the_folder(place: Path) -> None:
    arguments = ("--seed", "5", "--workers", "1", "--steps", "700")
    with running("leak", *arguments) as one, running("leak", *arguments) as other:
        (out, err), (out2, err2) = one.communicate(), other.communicate()
        assert (one.returncode, other.returncode) == (1, 1), err + err2
    assert {note.seed for note in notes()} == {5, 6}
    assert all(note.ended == "ended by steps=700" for note in notes())
    assert len(list(Path("c/findings").glob("*.json"))) == 1
    assert "problem" not in out + out2
    for entry in kept():
        scenario_file.parse(entry["scenario"])


def open_folder() -> campaigns.Folder:
    return campaigns.Folder(Path("c"), TARGET, "code", print)


def found(scenario: Scenario) -> Finding:
    return Finding(Violation(*LEAK, "block 1"), "toy", scenario, 1, "1")


def test_of_two_at_once_the_smaller_scenario_stays(place: Path) -> None:
    one, other = open_folder(), open_folder()
    file = Path(one.keep(found(SMALL)))
    for small in (False, True):
        assert other.keep(found(LARGER), small) == str(file)
        assert scenario_file.load(file).scenario == SMALL
    assert other.end(None, "").findings == 1


def test_what_was_taken_away_meanwhile_is_kept_again(place: Path) -> None:
    folder = open_folder()
    file = Path(folder.keep(found(SMALL)))
    shutil.rmtree("c")
    assert folder.keep(found(LARGER)) == str(file)
    assert scenario_file.load(file).scenario == LARGER


def test_a_file_that_can_not_be_read_stays_beside_what_takes_its_place(place: Path) -> None:
    file = Path(open_folder().keep(found(SMALL)))
    file.write_text(torn := file.read_text()[:100])
    assert open_folder().keep(found(LARGER)) == str(file)
    assert scenario_file.load(file).scenario == LARGER
    assert file.with_name(f"{file.name}.unread").read_text() == torn


def test_the_largest_seed_is_read_back(place: Path) -> None:
    assert open_folder().claim(MOST_SEED) == MOST_SEED
    folder = open_folder()
    with pytest.raises(UsageError, match="give another --seed"):
        folder.claim(MOST_SEED)
    assert folder.end(None, "").run == 1


# -- what is wrong with a folder --------------------------------------------------------------------------------------


def test_files_that_can_not_be_read_cost_a_line_each(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = fuzz(monkeypatch, "leak")
    broken = {
        Path("c/runs/torn.json"): '{"kvproof_run": 1, "sub',
        Path("c/runs/newer.json"): '{"kvproof_run": 2}',
        Path("c/findings/spec-REF.other-abc.json"): "nothing of the kind",
    }
    for file, text in broken.items():
        file.write_text(text)
    database = DirectoryBasedExampleDatabase("c/corpus")
    database.save(campaigns.KEY, b"garbage")
    database.save(campaigns.KEY, b'{"kvproof_kept": 1, "code": "", "reached": [], "scenario": {}}')
    capsys.readouterr()
    second = fuzz(monkeypatch, "leak")
    said = capsys.readouterr().out
    for file, text in broken.items():
        assert str(file) in said
        assert file.read_text() == text
    assert "newer kvproof" in said
    assert "2 kept scenarios in c/corpus can't be read" in said
    assert [known.identity for known in second.earlier] == [LEAK]
    assert second.totals is not None
    assert second.totals.steps == first.steps + second.steps
    assert second.unsaved == ""


def test_a_folder_of_something_else_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    Path("mine/letter.txt").write_text("dear")
    Path("file").write_text("")
    Path("half/runs").mkdir(parents=True)
    Path("half/findings").write_text("")
    for arguments, words in (
        (["--campaign", "mine"], "holds something else than a campaign"),
        (["--campaign", "file"], "is a file where a folder is wanted"),
        (["--campaign", "half"], "is a file where a folder is wanted"),
        (["--campaign", "new", "--out", "there"], "leave out --out"),
    ):
        assert cli.run(["fuzz", "spec", *arguments]) == 2
        err = capsys.readouterr().err.splitlines()
        assert len(err) == 1
        assert words in err[0]
    assert [file.name for file in Path("mine").iterdir()] == ["letter.txt"]
    assert not Path("new").exists()


def test_what_can_not_be_written_is_said_and_the_finding_still_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began = campaigns.Folder.claim

    def claim(folder: campaigns.Folder, seed: int) -> int:
        """Somebody puts a file where the findings go, once the run has begun."""
        claimed = began(folder, seed)
        shutil.rmtree("c/findings", ignore_errors=True)
        Path("c/findings").write_text("")
        return claimed

    monkeypatch.setattr(campaigns.Folder, "claim", claim)
    monkeypatch.setattr(subjects, "open_subject", lambda *_: Toy("leak"))
    assert cli.run(["fuzz", "spec", "--campaign", "c", "--steps", "500", "--workers", "1", "--seed", "1"]) == 1
    told = capsys.readouterr()
    assert "not kept" in told.out
    assert " ".join(LEAK) in told.out
    assert told.err.count("kvproof: error: can't keep c/findings/") == 1


def test_findings_of_another_release_are_another_matter(place: Path) -> None:
    names = {
        finding_name(subjects.Target("vllm@x", "checkout", release), LEAK)
        for release in ("0.33.0", "0.33.1.dev5+gabc", "0.33.1.dev6+gdef", "0.33.1", "")
    }
    assert len(names) == 3
    assert code_of(TARGET) == code_of(TARGET)
    assert code_of(TARGET) != code_of(subjects.parse("reference"))


def test_an_editor_s_lock_in_a_checkout_is_no_code(place: Path) -> None:
    Path("vllm/v1").mkdir(parents=True)
    Path("vllm/v1/a.py").write_text("a = 1")
    target = subjects.Target("vllm@.", "checkout", "", place)
    before = code_of(target)
    Path("vllm/v1/.#a.py").symlink_to("somebody@somewhere")
    assert code_of(target) == before
