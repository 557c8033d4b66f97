"""The zoo: its data files, what replays and searches make of them, and that a search knows nothing of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvproof import cli, scenario_file
from kvproof.errors import CheckerError, UsageError
from kvproof.report import Report
from kvproof.revision import revision
from kvproof.zoo import blind, code, running
from kvproof.zoo.fault import Fault, Sign, load
from kvproof.zoo.replays import Shown, replay_all
from kvproof.zoo.results import Results

sys.path.insert(0, str(Path(__file__).parent))
from zoocases import LEFT, OFF, PAIR, SCENARIO, Releases, Searches, fault, put, record

sys.path.pop(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "zoo").mkdir()
    return tmp_path / "zoo"


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
        (["run", "--releases", "0.33.x"], "'0.33.x' names no release"),
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


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> Releases:
    made = Releases()
    monkeypatch.setattr(running, "replay_all", made.replay_all)
    monkeypatch.setattr(blind, "replay_all", made.replay_all)
    return made


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


def test_a_release_that_can_not_be_driven_is_the_problem_of_each_scenario() -> None:
    scenarios = dict.fromkeys(("Z01", "Z02"), scenario_file.parse(SCENARIO).scenario)
    told = dict(replay_all("0.1.0", scenarios, lambda line: None))
    assert [shown.problem.split(":")[0] for shown in told.values()] == ["vLLM 0.1.0 is too old to be driven"] * 2
    assert {shown.error for shown in told.values()} == {""}
    assert not any(shown.lacks("REF.queue", 0) for shown in told.values())
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


def test_what_can_not_be_driven_here_is_not_kept_and_tried_again(tmp_path: Path, releases: Releases) -> None:
    releases.shows = {"0.27.0": OFF, "0.28.0": Shown(problem="no room in the cache")}
    report, results = Report("zoo-run"), Results(tmp_path / "r.json")
    running.run(report, [fault()], results, None, False, lambda line: None)
    assert (report.exit_code, report.problem) == (2, "no room in the cache")
    assert [(row.id, row.verdict) for row in report.rows][1:] == [
        ("Z01 0.27.0", "found by replay"),
        ("Z01 0.28.0", "not run"),
    ]
    assert set(Results(tmp_path / "r.json").replayed) == {("Z01", "0.25.1"), ("Z01", "0.27.0")}
    del releases.shows["0.28.0"]
    assert ran(tmp_path, fault())[:2] == (
        {"Z01 0.25.1": "not shown", "Z01 0.27.0": "found by replay", "Z01 0.28.0": "not shown"},
        0,
    )
    assert releases.asked == ["0.25.1", "0.27.0", "0.28.0", "0.28.0"]


def test_what_was_there_is_not_lost_to_a_release_that_can_not_be_driven_now(tmp_path: Path, releases: Releases) -> None:
    releases.shows["0.27.0"] = OFF
    ran(tmp_path, fault())
    releases.shows = dict.fromkeys(fault().around, Shown(problem="no network"))
    verdicts, exit_code, results = ran(tmp_path, fault(), again=True)
    assert (set(verdicts.values()), exit_code) == ({"not run"}, 2)
    assert results.replayed["Z01", "0.27.0"].verdict == "shown"


def test_a_checker_s_error_is_tried_again(tmp_path: Path, releases: Releases) -> None:
    releases.shows["0.27.0"] = Shown(error="the process ended with code -9")
    assert ran(tmp_path, fault())[1] == 3
    releases.shows["0.27.0"] = OFF
    assert ran(tmp_path, fault())[1] == 0
    assert releases.asked == ["0.25.1", "0.27.0", "0.28.0", "0.27.0"]


def test_a_release_that_there_is_not_is_the_environment_s(folder: Path, capsys: Any, monkeypatch: Any) -> None:
    """Asked of a real process; no cache can be made there, so that nothing is fetched."""
    put(folder, PAIR)
    results = folder / "r.json"
    monkeypatch.setenv("KVPROOF_CACHE", "/proc/x")
    command = ["zoo", "run", "--releases", "9.9", "--faults", str(folder), "--results", str(results)]
    assert cli.run(command) == 2
    captured = capsys.readouterr()
    assert captured.out.endswith("verdict=environment exit=2\n")
    assert captured.err.splitlines()[-1].startswith("kvproof: error: can't write to the cache folder /proc/x")
    assert not results.exists()


@pytest.mark.parametrize("command", ["run", "blind"])
def test_where_nothing_can_be_tried_it_is_said(folder: Path, capsys: Any, command: str) -> None:
    arguments = ["zoo", command, "--faults", str(folder), "--results", str(folder / "r.json"), "--commit", "abc"]
    arguments = arguments if command == "blind" else arguments[:-2]
    assert cli.run(arguments) == 2
    assert "there are no faults" in capsys.readouterr().err
    put(folder, {**LEFT, "not_reached": "a worker's"})
    assert cli.run(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("kvproof: error: there is nothing to ")
    assert err.endswith(": Z01 is not reached (kvproof zoo says why)\n")


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


def test_what_can_not_be_judged_here_is_no_miss(tmp_path: Path, releases: Releases, searches: Searches) -> None:
    searches.finds[60] = record(("SLOT.chunk-end", "off", 7.5))
    releases.shows["0.28.0"] = Shown(problem="no network")
    verdicts, exit_code, results = searched(tmp_path, fault())
    assert (verdicts, exit_code, results.blind) == ({}, 2, {})
    del releases.shows["0.28.0"]
    assert searched(tmp_path, fault())[:2] == ({"Z01": "found blind"}, 0)


def test_a_search_that_was_cut_off_in_the_cache_is_made_again(tmp_path: Path, monkeypatch: Any) -> None:
    import msgspec

    made = record(("SLOT.chunk-end", "off", 7.5))

    def run(command: list[str], **_: Any) -> Any:
        Path(command[command.index("--json") + 1]).write_bytes(msgspec.json.encode(made))

    monkeypatch.setenv("KVPROOF_CACHE", str(tmp_path))
    monkeypatch.setattr("subprocess.run", run)
    told: list[str] = []
    assert blind.search("0.27.0", 1, 60, 2, told.append) == made
    (kept,) = (tmp_path / "zoo").rglob("*.json")
    whole = kept.read_bytes()
    assert blind.search("0.27.0", 1, 60, 2, told.append) == made
    assert len(told) == 1, "kept, so not made twice"
    kept.write_bytes(whole[:-20])
    assert blind.search("0.27.0", 1, 60, 2, told.append) == made
    assert told[1] == f"{kept} is damaged: searching again"
    assert kept.read_bytes() == whole
    assert list(kept.parent.iterdir()) == [kept]


def test_a_search_whose_release_can_not_be_driven_here_is_the_environment_s(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("KVPROOF_CACHE", str(tmp_path))
    for code_, kind in ((2, UsageError), (3, CheckerError)):
        monkeypatch.setattr("subprocess.run", lambda *_, ended=code_, **__: SimpleNamespace(returncode=ended))
        with pytest.raises(kind, match=f"exit code {code_}"):
            blind.search("0.27.0", 1, 60, 2, lambda line: None)


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
    assert len(revision()) in (0, 40)
    with pytest.raises(Exception, match="name one with --commit"):
        code.seed_of("", 0)


def test_a_commit_that_leaves_the_code_as_it_is_searches_nothing_anew(
    tmp_path: Path, folder: Path, releases: Releases, searches: Searches, monkeypatch: Any
) -> None:
    searches.finds[60] = record(("SLOT.chunk-end", "off", 7.5))
    put(folder, PAIR)
    command = ["zoo", "blind", "--faults", str(folder), "--results", str(tmp_path / "r.json")]

    def after(commit: str, *more: str, hashed: str = "c") -> list[int]:
        """How often it was searched, and the seeds that results are of, once this is run at ``commit``."""
        monkeypatch.setattr("kvproof.revision.revision", lambda: commit)
        monkeypatch.setattr("kvproof.zoo.results.revision", lambda: commit)
        for module in ("blind", "results"):
            monkeypatch.setattr(f"kvproof.zoo.{module}.code_hash", lambda: hashed)
        assert cli.run([*command, *more]) == 0
        return [len(searches.made), *(b.seed for b in Results(tmp_path / "r.json").blind.values())]

    first, later = code.seed_of("first", 0), code.seed_of("later", 0)
    assert after("first") == [1, first]
    assert after("later") == [1, first], "no commit was named, and what is stored is of this code"
    assert sorted(after("later", "--again")) == sorted([2, first, later])
    assert after("later", "--commit", "later") == after("later", "--commit", "first") == after("later")
    changed = code.seed_of("changed", 0)
    assert after("changed", hashed="d") == [3, changed], "what is of other code gives way"


def test_an_interrupted_search_misses_nothing_that_it_did_not_look_for(
    tmp_path: Path, releases: Releases, searches: Searches, monkeypatch: Any
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    other = fault(id="Z02", wrong=["0.33.0"], right=["0.25.1"], **{"class": "open"})
    third = fault(id="Z03", signs=[{"invariant": "REF.queue"}])
    searches.finds = dict.fromkeys((60.0, 300.0), record(("SLOT.chunk-end", "off", 7.5)))
    searched(tmp_path, fault(), third)
    monkeypatch.setattr(blind, "search", interrupted)
    report = Report("zoo-blind")
    options = blind.Options(60, 300, 2, 1, "abc")
    blind.blind(report, [fault(), other, third], Results(tmp_path / "r.json"), options, lambda line: None)
    assert report.exit_code == 130
    assert [report.facts[name] for name in ("faults", "found", "missed", "unsearched")] == [3, 1, 1, 1]


def test_the_command_line_is_that_of_fuzz_and_differs_in_release_and_seed_only(tmp_path: Path) -> None:
    one = blind.command("0.26.0", 5, 60, 2, tmp_path, tmp_path / "r")
    other = blind.command("0.33.0", 7, 60, 2, tmp_path, tmp_path / "r")
    differing = [(a, b) for a, b in zip(one, other, strict=True) if a != b]
    assert differing == [("vllm==0.26.0", "vllm==0.33.0"), ("5", "7")]
    assert one[one.index("fuzz") :][:6] == ["fuzz", "vllm==0.26.0", "--seed", "5", "--seconds", "60"]


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
