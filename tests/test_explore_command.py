"""``kvproof explore``: what it says, keeps and claims, also where it is interrupted or a scope goes wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvproof import cli, exploring
from kvproof.models.explore import mutants, saved, search
from kvproof.models.explore.mutants import MUTANTS, Mutant
from kvproof.models.explore.scope import Prompt, Scope
from kvproof.models.explore.scopes import SCOPES
from kvproof.models.explore.search import Explored, explore
from kvproof.models.explore.shard import Shard
from kvproof.spec.machine import schedule

SMALL = replace(SCOPES["tiny"], name="small", prompts=(Prompt(2),), requests=1)
"""One request at a time: explored in no time, for tests that are about something else."""


def test_the_command_says_what_was_visited(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run(["explore", "tiny", "--report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "explored completely: 796 states" in " ".join(out.split())
    assert "every request that fits comes to its end by steps alone" in out
    assert out.splitlines()[-1].endswith("verdict=met exit=0")
    assert (tmp_path / "explore.json").exists()


def test_the_command_keeps_what_it_finds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = next(one for one in MUTANTS if one.id == "states-leaked")
    with mutant.planted():
        assert cli.run(["explore", "tiny", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "a shortest way: 3 moves" in out
    assert list(tmp_path.glob("spec-explored-REF.references-*.json"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explore", "huge"], "there is no scope 'huge': use tiny, "),
        (["explore", "tiny", "--workers", "2", "--save", "s"], "use --workers 1 with --save"),
        (["explore", "--mutants", "--save", "s"], "leave out --save"),
        (["explore", "tiny", "prefills", "--mutants"], "no fault is planted in scope 'prefills': use at-once, "),
        (["explore", "tiny", "--states", "0"], "Invalid value for '--states'"),
        (["explore", "tiny", "--out", "file"], "is a file where a folder is wanted"),
    ],
)
def test_wrong_use_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert cli.run(arguments) == 2
    err = capsys.readouterr().err
    assert says in err.splitlines()[-1]


def test_too_few_states_leave_the_run_undetermined(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run(["explore", "tiny", "--states", "50", "--out", str(tmp_path)]) == 3
    assert "not all there are" in " ".join(capsys.readouterr().out.split())


def test_an_interrupt_keeps_what_was_explored(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = iter(range(6))

    def check() -> None:
        if next(pauses, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(exploring.stop, "check", check, raising=False)
    assert cli.run(["explore", "tiny", "--out", str(tmp_path), "--save", str(tmp_path)]) == 130
    assert "explored to depth" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "tiny.states").exists()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder to work in, and two small worlds that can be named."""
    for name in ("small", "other"):
        monkeypatch.setitem(SCOPES, name, replace(SMALL, name=name))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows_of(file: str, kind: str) -> dict[str, str]:
    return {row["id"]: row["verdict"] for row in json.loads(Path(file).read_text())["rows"] if row["kind"] == kind}


def test_a_scope_that_goes_wrong_costs_itself_alone(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (small / "small.states").write_bytes(b"garbage")
    assert cli.run(["explore", "small", "other", "--save", ".", "--report", "."]) == 2
    captured = capsys.readouterr()
    assert "can't go on from small.states: it holds no exploration" in captured.err.splitlines()[-1]
    assert "explored completely: 24 states" in " ".join(captured.out.split())
    assert captured.out.splitlines()[-1].startswith("kvproof: explore scopes=1 states=24 ")
    assert rows_of("explore.json", "run") == {"scope small": "not run", "scope other": "explored, holds"}
    mutant = next(one for one in MUTANTS if one.id == "states-leaked")
    (small / "other.states").unlink()
    with mutant.planted():
        assert cli.run(["explore", "other", "small", "--save", "."]) == 1
    assert "REF.references" in capsys.readouterr().out


def test_a_process_that_is_lost_costs_its_scope_alone(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(scope: Scope, **options: Any) -> Explored:
        if scope.name == "other":
            raise RuntimeError("a process was killed")
        return explore(scope, **options)

    monkeypatch.setattr(search, "explore", lost)
    assert cli.run(["explore", "small", "other", "--report", "."]) == 3
    assert "scope other: a process was killed" in " ".join(capsys.readouterr().out.split())
    assert rows_of("explore.json", "run") == {"scope small": "explored, holds", "scope other": "error"}


def test_what_can_not_be_saved_is_shown_and_said(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved, "save", full)
    assert cli.run(["explore", "small", "--save", "kept"]) == 2
    captured = capsys.readouterr()
    assert "can't save what was visited in kept/small.states: No space left" in captured.err.splitlines()[-1]
    assert "explored completely: 24 states" in " ".join(captured.out.split())


def test_an_interrupt_amid_liveness_keeps_the_scope_and_claims_no_liveness(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def step_from(self: Any, state: bytes, right: Any = Shard.step_from) -> Any:
        monkeypatch.setattr(exploring.stop, "came", 1)
        return right(self, state)

    monkeypatch.setattr(Shard, "step_from", step_from)
    assert cli.run(["explore", "small", "other"]) == 130
    out = " ".join(capsys.readouterr().out.split())
    assert "explored completely: 24 states" in out
    assert "interrupted before it was known that requests come to their end: that is not claimed" in out
    assert "scope other" not in out


@pytest.fixture
def planted(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two faults: one that breaks something, and one that is none."""
    leaked = next(one for one in MUTANTS if one.id == "states-leaked")
    none = Mutant("none", "nothing is wrong", "small", place=(schedule,), name="release_all", plant=lambda right: right)
    monkeypatch.setattr(mutants, "MUTANTS", (replace(leaked, scope="small"), none))


def test_a_planted_fault_that_was_not_looked_for_everywhere_has_not_survived(
    planted: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["explore", "--mutants", "--report", "."]) == 1
    assert rows_of("explore.json", "mutant") == {"states-leaked": "killed", "none": "survived"}
    assert "killed=1 survived=1" in capsys.readouterr().out
    assert cli.run(["explore", "small", "--mutants", "--states", "1", "--report", "."]) == 3
    assert rows_of("explore.json", "mutant") == {"states-leaked": "not complete", "none": "not complete"}
    assert "killed=0 survived=0" in capsys.readouterr().out


def test_planted_faults_are_looked_for_by_as_many_processes_as_named(
    planted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    def noted(scope: Scope, workers: int, **options: Any) -> Explored:
        given.append(workers)
        return explore(scope, workers=workers, **options)

    monkeypatch.setattr(search, "explore", noted)
    assert cli.run(["explore", "--mutants", "--workers", "2", "--report", "."]) == 1
    assert given == [2, 2]
    assert rows_of("explore.json", "mutant") == {"states-leaked": "killed", "none": "survived"}


def test_an_interrupted_fault_has_neither_survived_nor_been_killed(
    planted: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def explored(scope: Scope, **options: Any) -> Explored:
        if explored_before:
            monkeypatch.setattr(exploring.stop, "came", 1)
        explored_before.append(scope)
        return explore(scope, **options)

    explored_before: list[Scope] = []
    monkeypatch.setattr(search, "explore", explored)
    assert cli.run(["explore", "--mutants", "--report", "."]) == 130
    assert rows_of("explore.json", "mutant") == {"states-leaked": "killed"}
    assert "killed=1 survived=0 interrupted=yes" in capsys.readouterr().out


def test_a_planted_fault_that_a_checker_fails_on_costs_itself_alone(
    planted: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mutant, "world", lambda self: SMALL if self.id == "none" else None)
    assert cli.run(["explore", "--mutants", "--report", "."]) == 1
    assert rows_of("explore.json", "mutant") == {"states-leaked": "error", "none": "survived"}
    assert "a checker failed" in " ".join(capsys.readouterr().out.split())
