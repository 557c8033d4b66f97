"""The zoo: its data files, what replays and searches make of them, and that a search knows nothing of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvproof import cli, fuzzing, scenario_file
from kvproof.report import Report
from kvproof.spec.scenario import Scenario
from kvproof.zoo import blind, code, matrix, running
from kvproof.zoo.fault import Fault, Sign, chosen, load, ordered
from kvproof.zoo.replays import Shown, replay_all
from kvproof.zoo.results import Blind, Replayed, Results

ROOT = Path(__file__).resolve().parent.parent
SCENARIO = {
    "kvproof_scenario": 1,
    "config": {
        "groups": [{"kind": "full", "block_size": 4}, {"kind": "mamba", "block_size": 4}],
        "num_blocks": 9,
        "hash_unit": 4,
        "step_tokens": 8,
    },
    "actions": [{"kind": "submit", "request": "r1", "length": 5, "max_tokens": 1}, {"kind": "step"}],
}
PAIR: dict[str, Any] = {
    "kvproof_fault": 1,
    "id": "Z01",
    "title": "it breaks",
    "class": "pair",
    "references": ["PR 1"],
    "where": "a.py",
    "explanation": "why",
    "wrong": ["0.26.0", "0.27.0"],
    "right": ["0.25.1", "0.28.0", "0.29.0"],
    "signs": [{"invariant": "SLOT.chunk-end", "cause": "off"}],
    "scenario": SCENARIO,
}
OPEN = {**PAIR, "id": "Z02", "class": "open", "wrong": ["0.33.0"], "right": []}
LEFT = {key: value for key, value in PAIR.items() if key not in ("wrong", "right", "signs", "scenario")}


def fault(**changes: Any) -> Fault:
    import msgspec

    return msgspec.convert({**PAIR, **changes}, Fault)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "zoo").mkdir()
    return tmp_path / "zoo"


def put(folder: Path, data: Mapping[str, Any]) -> Path:
    file = folder / f"{data['id'].lower()}.json"
    file.write_text(json.dumps(data))
    return file


# -- data files --------------------------------------------------------------------------------------------------------


def test_every_fault_of_ours_can_be_read_and_says_why_it_has_no_scenario() -> None:
    faults = load()
    assert len({one.id for one in faults}) == len(faults) >= 43
    for one in faults:
        assert one.reached or one.not_reached or one.mutants
        assert one.explanation
        assert one.where


def test_mutants_that_faults_name_are_there() -> None:
    from kvproof.impl.reference.mutants import MUTANTS
    from kvproof.models.smt import CLAIMS

    there = {mutant.id for mutant in MUTANTS} | {claim.id for claim in CLAIMS if claim.mutant_of}
    assert {name for one in load() for name in one.mutants} <= there


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"wrong": ["0.26"], "right": ["0.26", "0.27"]}, "0.26 is both wrong and right"),
        ({"wrong": ["next"]}, "'next' is no release"),
        ({"right": ["0.25.1"]}, "a pair without a release that is right after the wrong ones"),
        ({"class": "open"}, "open although 0.28.0 is right: make it a pair"),
        ({"class": "open", "right": [], "signs": [{"invariant": "SLOT.chunk-end"}]}, "name the cause"),
        ({"class": "zebra"}, "Invalid enum value 'zebra'"),
        ({"signs": []}, "a scenario without a sign"),
        ({"signs": [{"invariant": "SLOT.no-such"}]}, "there is no invariant 'SLOT.no-such'"),
        ({"wrong": [], "right": []}, "a scenario that shows nothing on any release"),
        ({"not_reached": "why"}, "not_reached although there is a scenario"),
        ({"scenario": None}, "releases or signs without a scenario"),
        ({"scenario": {**SCENARIO, "kvproof_scenario": 99}}, "written by a newer kvproof"),
        ({"kvproof_fault": 2}, "kvproof_fault is 2"),
        ({"id": "z 1"}, "id is 'z 1'"),
        ({"hint": "look here"}, "unknown field `hint`"),
    ],
)
def test_a_damaged_file_is_one_line_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], problem: str
) -> None:
    put(folder, {**PAIR, **changes})
    assert cli.run(["zoo", "--faults", str(folder)]) == 2
    err = capsys.readouterr().err
    assert problem.replace("`", "") in err
    assert err.count("\n") == 1


def test_a_fault_without_scenario_must_say_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder, LEFT)
    assert cli.run(["zoo", "--faults", str(folder)]) == 2
    assert "say it in not_reached" in capsys.readouterr().err
    put(folder, {**LEFT, "not_reached": "a worker's"})
    assert cli.run(["zoo", "--faults", str(folder)]) == 0


def test_a_file_that_is_named_otherwise_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder, PAIR).rename(folder / "z09.json")
    assert cli.run(["zoo", "--faults", str(folder)]) == 2
    assert "name the file z01.json" in capsys.readouterr().err


def test_unknown_ids_and_releases_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder, PAIR)
    for arguments, problem in (
        (["run", "Z99"], "no fault 'Z99'"),
        (["run", "--releases", "newest"], "names no release"),
        (["run", "--releases", ","], "--releases names none"),
        (["blind", "--seconds", "nan"], "--seconds"),
        (["run", "--faults", "/nowhere"], "no folder of faults"),
    ):
        command = ["zoo", *arguments, "--results", str(folder / "r.json")]
        assert cli.run(command if "--faults" in command else [*command, "--faults", str(folder)]) == 2
        assert problem in capsys.readouterr().err


def test_a_fault_replays_and_exports_like_any_scenario(folder: Path) -> None:
    loaded = scenario_file.load(put(folder, PAIR))
    assert loaded.scenario == scenario_file.parse(SCENARIO).scenario
    assert loaded.finding is not None
    assert loaded.finding.identity == ("SLOT.chunk-end", "off")
    assert scenario_file.load(put(folder, {**PAIR, "signs": [{"invariant": "SLOT.chunk-end"}]})).finding is None


def test_releases_around_a_change() -> None:
    assert fault().around == ("0.25.1", "0.27.0", "0.28.0")
    assert fault(right=["0.28.0"]).around == ("0.27.0", "0.28.0")
    assert (fault().blind_release, fault().fixed_release) == ("0.27.0", "0.28.0")
    assert fault(wrong=["0.9.0", "0.10.0"], right=["0.11.0"]).blind_release == "0.10.0"
    assert fault(wrong=["0.33.0"], right=[]).fixed_release == ""


# -- replays -----------------------------------------------------------------------------------------------------------


@dataclass
class Releases:
    """Stands for the processes that replay: what a scenario shows on a release, and which were asked."""

    shows: dict[str, Shown] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def replay_all(self, release: str, scenarios: Mapping[str, Scenario], _: Any) -> Iterator[tuple[str, Shown]]:
        if scenarios:
            self.asked.append(release)
        for name in scenarios:
            if release == "interrupt":
                raise KeyboardInterrupt
            yield name, self.shows.get(release, Shown())


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> Releases:
    made = Releases()
    monkeypatch.setattr(running, "replay_all", made.replay_all)
    monkeypatch.setattr(blind, "replay_all", made.replay_all)
    return made


OFF = Shown(seen=[("SLOT.chunk-end", "off", "ends at 5")])


def ran(tmp_path: Path, *faults: Fault, again: bool = False) -> tuple[dict[str, str], int, Results]:
    report, results = Report("zoo-run"), Results(tmp_path / "r.json")
    running.run(report, faults, results, None, again, lambda line: None)
    return {row.id: row.verdict for row in report.rows}, report.exit_code, Results(tmp_path / "r.json")


def test_a_fault_is_replayed_around_its_change_once_for_each_code(tmp_path: Path, releases: Releases) -> None:
    releases.shows["0.27.0"] = OFF
    verdicts, exit_code, results = ran(tmp_path, fault())
    assert verdicts == {"Z01 0.25.1": "not shown", "Z01 0.27.0": "found by replay", "Z01 0.28.0": "not shown"}
    assert exit_code == 0
    assert results.replayed["Z01", "0.27.0"].detail == "ends at 5"
    assert releases.asked == ["0.25.1", "0.27.0", "0.28.0"]
    assert ran(tmp_path, fault())[0] == verdicts
    assert len(releases.asked) == 3, "nothing has changed, so nothing is done again"
    ran(tmp_path, fault(), again=True)
    assert len(releases.asked) == 6
    ran(tmp_path, fault(signs=[{"invariant": "SLOT.chunk-end"}]))
    assert len(releases.asked) == 9, "another fault"


def test_other_code_makes_results_stale(tmp_path: Path, releases: Releases, monkeypatch: pytest.MonkeyPatch) -> None:
    ran(tmp_path, fault())
    monkeypatch.setattr("kvproof.zoo.results.code_hash", lambda: "another")
    ran(tmp_path, fault())
    assert len(releases.asked) == 6


@pytest.mark.parametrize(
    ("shown", "verdict", "exit_code"),
    [
        (Shown(), "not shown", 1),
        (Shown(seen=[("SLOT.chunk-end", "crosses", "w")]), "not shown", 1),
        (Shown(seen=OFF.seen, follows=[("SLOT.chunk-end", "off")], spoiled=True), "undetermined", 3),
        (Shown(refused="no windows here"), "can't be configured", 1),
        (Shown(error="ZeroDivisionError"), "error", 3),
        (Shown(seen=OFF.seen, error="later"), "found by replay", 0),
    ],
)
def test_what_comes_out_otherwise_than_recorded(
    tmp_path: Path, releases: Releases, shown: Shown, verdict: str, exit_code: int
) -> None:
    releases.shows["0.27.0"] = shown
    verdicts, code_, _ = ran(tmp_path, fault())
    assert (verdicts["Z01 0.27.0"], code_) == (verdict, exit_code)


def test_a_release_that_can_not_be_driven_is_an_error_of_each_scenario() -> None:
    scenarios = dict.fromkeys(("Z01", "Z02"), scenario_file.parse(SCENARIO).scenario)
    told = dict(replay_all("0.1.0", scenarios, lambda line: None))
    assert [shown.error.split(":")[0] for shown in told.values()] == ["vLLM 0.1.0 is too old to be driven"] * 2
    assert dict(replay_all("0.1.0", {}, lambda line: None)) == {}


def test_a_process_that_breaks_down_is_an_error_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    scenarios = dict.fromkeys(("Z01", "Z02"), scenario_file.parse(SCENARIO).scenario)
    told = dict(replay_all("0.33.0", scenarios, lambda line: None))
    assert {shown.error for shown in told.values()} == {"the process that replays on vllm==0.33.0 ended with code 1"}


def test_what_a_replay_says_of_a_fault() -> None:
    signs = [Sign("SLOT.chunk-end", "off"), Sign("REF.queue")]
    assert OFF.witness(signs) == "ends at 5"
    assert Shown(seen=[("REF.queue", "any", "w")]).witness(signs) == "w"
    assert Shown(seen=[("SLOT.chunk-end", "crosses", "w")]).witness(signs) is None
    assert Shown(seen=OFF.seen, follows=[("SLOT.chunk-end", "off")]).witness(signs) is None
    assert Shown(seen=OFF.seen).lacks("REF.queue", 5)
    assert not OFF.lacks("SLOT.chunk-end", 0)
    assert Shown(spoiled=True, ended=3).lacks("REF.queue", 3), "it got as far as the violation had come up"
    assert not Shown(spoiled=True, ended=3).lacks("REF.queue", 4)


def test_an_interrupt_keeps_what_was_replayed(tmp_path: Path, releases: Releases, monkeypatch: Any) -> None:
    whole = releases.replay_all

    def until(release: str, *more: Any) -> Iterator[tuple[str, Shown]]:
        return whole("interrupt" if release == "0.28.0" else release, *more)

    monkeypatch.setattr(running, "replay_all", until)
    releases.shows["0.27.0"] = OFF
    verdicts, exit_code, results = ran(tmp_path, fault())
    assert exit_code == 130
    assert list(verdicts) == ["Z01 0.25.1", "Z01 0.27.0"]
    assert set(results.replayed) == {("Z01", "0.25.1"), ("Z01", "0.27.0")}


# -- blind searches ----------------------------------------------------------------------------------------------------


def record(*findings: tuple[str, str, float], seconds: float = 60) -> fuzzing.FuzzRecord:
    found = [
        fuzzing.NewFinding({"invariant": i, "cause": c, "scenario": SCENARIO, "witness": "w", "action": 1}, "", seen)
        for i, c, seen in findings
    ]
    return fuzzing.FuzzRecord("vllm==0.27.0", "0.27.0", 1, 10, 1, seconds, False, [], {}, {}, found, [], [])


@dataclass
class Searches:
    finds: dict[float, fuzzing.FuzzRecord] = field(default_factory=dict)
    made: list[tuple[str, float]] = field(default_factory=list)

    def search(self, release: str, seed: int, seconds: float, workers: int, _: Any) -> fuzzing.FuzzRecord:
        self.made.append((release, seconds))
        return self.finds.get(seconds, record())


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Searches:
    made = Searches()
    monkeypatch.setattr(blind, "search", made.search)
    return made


def searched(tmp_path: Path, *faults: Fault) -> tuple[dict[str, str], int, Results]:
    report, results = Report("zoo-blind"), Results(tmp_path / "r.json")
    blind.blind(report, faults, results, blind.Options(60, 300, 2, 1, "abc"), lambda line: None)
    return {row.id.split()[0]: row.verdict for row in report.rows}, report.exit_code, Results(tmp_path / "r.json")


def test_found_is_what_is_gone_where_it_was_corrected(tmp_path: Path, releases: Releases, searches: Searches) -> None:
    searches.finds[60] = record(("REF.queue", "x", 1.0), ("SLOT.chunk-end", "any cause", 7.5))
    verdicts, exit_code, results = searched(tmp_path, fault())
    assert (verdicts, exit_code) == ({"Z01": "found blind"}, 0)
    (only,) = results.blind.values()
    assert (only.seen, only.cause, only.gone_on, only.release) == (7.5, "any cause", "0.28.0", "0.27.0")
    assert only.seed == code.seed_of("abc", 0)
    assert searches.made == [("0.27.0", 60)]
    searched(tmp_path, fault())
    assert searches.made == [("0.27.0", 60)], "found once is found"


@pytest.mark.parametrize(
    "there",
    [
        OFF,
        Shown(seen=[("SLOT.chunk-end", "otherwise", "w")]),
        Shown(spoiled=True, ended=0),
        Shown(refused="no"),
        Shown(error="broken"),
    ],
)
def test_what_is_not_gone_is_missed_and_searched_for_longer(
    tmp_path: Path, releases: Releases, searches: Searches, capsys: pytest.CaptureFixture[str], there: Shown
) -> None:
    searches.finds = dict.fromkeys((60.0, 300.0), record(("SLOT.chunk-end", "off", 7.5)))
    releases.shows["0.28.0"] = there
    verdicts, exit_code, results = searched(tmp_path, fault())
    assert (verdicts, exit_code) == ({"Z01": "missed"}, 3)
    assert searches.made == [("0.27.0", 60), ("0.27.0", 300)]
    assert [b.limit for b in results.blind.values()] == [300]
    searched(tmp_path, fault())
    assert len(searches.made) == 2, "the same search would say the same"


def test_only_what_is_missed_is_searched_for_longer(tmp_path: Path, releases: Releases, searches: Searches) -> None:
    other = fault(id="Z03", signs=[{"invariant": "REF.queue"}])
    searches.finds[60] = record(("SLOT.chunk-end", "off", 7.5))
    searches.finds[300] = record(("SLOT.chunk-end", "off", 7.5), ("REF.queue", "x", 200.0))
    verdicts, _, results = searched(tmp_path, fault(), other)
    assert verdicts == {"Z01": "found blind", "Z03": "found blind"}
    assert {b.fault: (b.limit, b.seen) for b in results.blind.values()} == {"Z01": (60, 7.5), "Z03": (300, 200.0)}
    assert searches.made == [("0.27.0", 60), ("0.27.0", 300)], "one search serves all faults of a release"


def test_an_open_fault_is_told_by_its_cause(tmp_path: Path, releases: Releases, searches: Searches) -> None:
    still = fault(id="Z02", wrong=["0.33.0"], right=["0.25.1"], **{"class": "open"})
    searches.finds = dict.fromkeys((60.0, 300.0), record(("SLOT.chunk-end", "another", 1.0)))
    assert searched(tmp_path, still)[0] == {"Z02": "missed"}
    searches.finds[60] = record(("SLOT.chunk-end", "off", 3.0))
    assert searched(tmp_path / "again", still)[0] == {"Z02": "found blind"}
    assert releases.asked == []


def test_seeds_are_the_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert code.seed_of("abc", 0) == code.seed_of("abc", 0) != code.seed_of("abc", 1)
    assert code.seed_of("abd", 0) != code.seed_of("abc", 0)
    assert len(code.revision()) in (0, 40)
    with pytest.raises(Exception, match="name one with --commit"):
        code.seed_of("", 0)


def test_the_command_line_is_that_of_fuzz_and_differs_in_release_and_seed_only(tmp_path: Path) -> None:
    one = blind.command("0.26.0", 5, 60, 2, tmp_path, tmp_path / "r")
    other = blind.command("0.33.0", 7, 60, 2, tmp_path, tmp_path / "r")
    differing = [(a, b) for a, b in zip(one, other, strict=True) if a != b]
    assert differing == [("vllm==0.26.0", "vllm==0.33.0"), ("5", "7")]
    assert one[one.index("fuzz") :][:6] == ["fuzz", "vllm==0.26.0", "--seed", "5", "--seconds", "60"]


# -- results and the matrix --------------------------------------------------------------------------------------------


def stored(tmp_path: Path) -> tuple[tuple[Fault, ...], Results]:
    results = Results(tmp_path / "r.json")
    one, left = fault(), fault(**{**LEFT, "id": "Z04", "not_reached": "a worker's"}, wrong=[], right=[], signs=[],
                               scenario=None)  # fmt: skip
    common: dict[str, Any] = {"fault": "Z01", "digest": one.digest, "code": "c", "revision": "r"}
    for release, verdict in (("0.25.1", "refused"), ("0.27.0", "shown"), ("0.28.0", "not shown")):
        results.add(Replayed(**common, release=release, verdict=verdict))
    for seed, seen in ((1, 10.0), (2, 30.0), (3, None)):
        results.add(Blind(**common, release="0.27.0", seed=seed, workers=2, limit=60, seen=seen))
    return (one, left), Results(tmp_path / "r.json")


def test_the_matrix_says_what_came_out(tmp_path: Path) -> None:
    made = matrix.matrix(*stored(tmp_path))
    assert made.releases == ("0.25.1", "0.27.0", "0.28.0")
    assert made.lines[0].cells == ("-", "R 20 s", "·")
    assert [line.note for line in made.left_out] == ["a worker's"]
    text = matrix.as_markdown(made)
    assert "| Z01 | it breaks; not reproduced around the change | - | R 20 s | · |" in text
    assert "- Z04 it breaks: a worker's" in text
    assert "Z04  it breaks: a worker's" in matrix.as_text(made, 120)


def test_results_of_a_fault_as_it_was_are_left_out(tmp_path: Path) -> None:
    _, results = stored(tmp_path)
    made = matrix.matrix([fault(signs=[{"invariant": "REF.queue"}])], results)
    assert made.releases == ()
    assert made.lines[0].note == "not run"


def test_the_matrix_goes_between_its_markers(tmp_path: Path, folder: Path, capsys: Any) -> None:
    page = tmp_path / "page.md"
    put(folder, PAIR)
    command = ["zoo", "matrix", "--faults", str(folder), "--results", str(tmp_path / "r.json"), "--write", str(page)]
    page.write_text(f"before\n{matrix.BEGIN}\nold\n{matrix.END}\nafter\n")
    stored(tmp_path)
    for _ in range(2):
        assert cli.run(command) == 0
        text = page.read_text()
        assert text.startswith(f"before\n{matrix.BEGIN}\n")
        assert text.endswith(f"{matrix.END}\nafter\n")
        assert "old" not in text
        assert text.count("| Z01 |") == 1
    page.write_text("no markers")
    assert cli.run(command) == 2
    assert "has no place for the matrix" in capsys.readouterr().err


def test_results_that_are_something_else_are_refused(tmp_path: Path, folder: Path, capsys: Any) -> None:
    put(folder, PAIR)
    (tmp_path / "r.json").write_text('{"kvproof_zoo": 1, "surprise": 1}')
    assert cli.run(["zoo", "--faults", str(folder), "--results", str(tmp_path / "r.json")]) == 2
    assert "holds no results of the zoo" in capsys.readouterr().err


def test_what_is_stored_is_of_these_faults() -> None:
    """Results in the project are about faults that are there, on releases in order."""
    results = Results(ROOT / "bench" / "results" / "zoo.json")
    ids = {one.id for one in load()}
    assert {one.fault for one in results.replayed.values()} <= ids
    assert ordered(["0.9.0", "0.10.0"]) == ["0.9.0", "0.10.0"]
    assert [one.id for one in chosen(load(), ["z01"])] == ["Z01"]
    assert Sign("REF.queue").shown_by("REF.queue", "whatever")


# -- real releases -----------------------------------------------------------------------------------------------------


@pytest.mark.release
@pytest.mark.slow
def test_faults_show_on_the_releases_around_their_change(tmp_path: Path) -> None:
    """A real pair of releases: the fault is there, and gone."""
    report = Report("zoo-run")
    wanted = [one for one in load() if one.around in (("0.26.0", "0.27.0"), ("0.32.0", "0.33.0"))]
    assert wanted
    running.run(report, wanted[:2], Results(tmp_path / "r.json"), None, False, lambda line: None)
    assert [(row.id, row.verdict) for row in report.rows if row.outcome != "pass"] == []
    assert report.facts["shown"] == len(wanted[:2])
