"""The explorer: small worlds visited whole, states without names, shortest ways, and planted faults that it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvproof import cli, exploring
from kvproof.invariants.catalogue import CATALOGUE
from kvproof.models.explore import mutants, saved, search
from kvproof.models.explore.encoding import Encoding
from kvproof.models.explore.liveness import livelocks
from kvproof.models.explore.mutants import MUTANTS, Mutant
from kvproof.models.explore.scope import Prompt, Scope
from kvproof.models.explore.scopes import SCOPES
from kvproof.models.explore.search import Explored, explore
from kvproof.models.explore.shard import Shard, pack, unpack
from kvproof.models.stateful.replay import replay
from kvproof.spec.machine import schedule
from kvproof.spec.machine.dialect import REFERENCE
from kvproof.spec.machine.subject import MachineSubject
from kvproof.spec.machine.world import World

QUICK = ("tiny", "at-once")
SMALL = replace(SCOPES["tiny"], name="small", prompts=(Prompt(2),), requests=1)
"""One request at a time: explored in no time, for tests that are about something else."""


def states_of(scope: Scope, symmetry: bool = True) -> set[bytes]:
    shard = Shard(scope, judged=False, symmetry=symmetry)
    shard.start()
    while shard.frontier:
        shard.level()
    return set(shard.states)


@pytest.fixture(scope="module")
def tiny() -> Explored:
    return explore(SCOPES["tiny"])


# -- states as bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUICK)
def test_every_state_reads_back_as_it_was_written(name: str) -> None:
    encoding = Encoding(SCOPES[name])
    for state in states_of(SCOPES[name]):
        assert encoding.encode(encoding.decode(state)) == state


def renamed(world: World, names: Sequence[int]) -> World:
    """The same world with block b called ``names[b]``."""
    twin = world.copy()
    for place, name in enumerate(names):
        twin.references[name], twin.keys[name] = world.references[place], list(world.keys[place])
        twin.contents[name] = world.contents[place]
    twin.queue = [names[block] for block in world.queue]
    twin.index = {key: [names[block] for block in blocks] for key, blocks in world.index.items()}
    for request in twin.requests():
        request.name = f"other {request.name}"
        request.tables = [[names[block] for block in table] for table in request.tables]
    twin.flights = [
        replace(flight, request=f"other {flight.request}",
                tables=tuple(tuple(names[block] for block in table) for table in flight.tables))
        for flight in world.flights
    ]  # fmt: skip
    return twin


@pytest.mark.parametrize("name", QUICK)
def test_names_of_blocks_and_requests_make_no_difference(name: str) -> None:
    encoding = Encoding(SCOPES[name])
    blocks = SCOPES[name].config.num_blocks
    other = [0, *range(blocks - 1, 0, -1)]
    for state in states_of(SCOPES[name]):
        assert encoding.encode(renamed(encoding.decode(state), other)) == state


def test_without_symmetry_the_same_states_come_up_under_more_names() -> None:
    small = replace(SCOPES["tiny"].config, num_blocks=6)
    scope = replace(SCOPES["tiny"], config=small, prompts=(Prompt(2),), moves=frozenset({"abort"}))
    plain, named = Encoding(scope), Encoding(scope, symmetry=False)
    every = states_of(scope, symmetry=False)
    classes = states_of(scope)
    assert len(every) > len(classes)
    assert {plain.encode(named.decode(state)) for state in every} == classes


def test_moves_survive_packing() -> None:
    scope = SCOPES["acceptance"]
    shard = Shard(scope, judged=False)
    shard.start()
    for _ in range(5):
        shard.level()
    moves = [move for state in shard.states for move in scope.possible(shard.encoding.decode(state))]
    assert {move.kind for move in moves} >= {"submit", "step", "abort", "preempt"}
    assert [unpack(pack(move)) for move in moves] == moves


# -- exploration -------------------------------------------------------------------------------------------------------


def test_a_healthy_world_is_visited_whole_and_nothing_breaks(tiny: Explored) -> None:
    assert tiny.complete
    assert not tiny.broken
    assert tiny.live
    assert tiny.promised > 100
    assert tiny.words() == f"explored completely: {tiny.states} states, {tiny.depth} moves deep"
    assert tiny.states == len(states_of(SCOPES["tiny"]))
    assert set(tiny.taken) == {"submit", "step", "abort", "preempt", "evict"}


@pytest.mark.slow
def test_together_the_worlds_exercise_every_rule_that_the_machine_can_show() -> None:
    evaluated: set[str] = set()
    for scope in SCOPES.values():
        done = explore(scope)
        assert (done.complete, done.broken, done.livelocks) == (True, [], []), scope.name
        evaluated |= {name for name, count in done.evaluations.items() if count}
    shown = MachineSubject().families() - {"REUSE"}  # a world does not carry what earlier requests promised
    lacking = MachineSubject().lacking()
    assert evaluated == {entry.id for entry in CATALOGUE if entry.family in shown and entry.id not in lacking}


def test_a_bound_on_states_is_said_and_nothing_more_is_claimed() -> None:
    done = explore(SCOPES["tiny"], most=50)
    assert not done.complete
    assert not done.live
    assert done.words().endswith("not all there are")


def test_two_processes_visit_what_one_does(tiny: Explored) -> None:
    done = explore(SCOPES["tiny"], workers=2)
    assert (done.states, done.transitions, done.depth) == (tiny.states, tiny.transitions, tiny.depth)
    assert done.evaluations == tiny.evaluations
    assert done.live


@pytest.mark.parametrize("stop", ["bound", "interrupt"])
def test_an_exploration_that_was_stopped_goes_on(tmp_path: Path, tiny: Explored, stop: str) -> None:
    file = tmp_path / "tiny.states"
    pauses = iter(range(12))

    def pause() -> None:
        if stop == "interrupt" and next(pauses, None) is None:
            raise KeyboardInterrupt

    first = explore(SCOPES["tiny"], most=100 if stop == "bound" else 10_000, save=file, pause=pause)
    assert not first.complete
    assert first.interrupted == (stop == "interrupt")
    second = explore(SCOPES["tiny"], save=file)
    assert second.complete
    assert (second.states, second.depth) == (tiny.states, tiny.depth)
    assert (second.transitions, second.taken) == (tiny.transitions, tiny.taken)
    assert second.evaluations == tiny.evaluations
    third = explore(SCOPES["tiny"], save=file)  # nothing is left to do
    assert (third.complete, third.states, third.depth) == (True, tiny.states, tiny.depth)


def test_an_interrupt_from_nowhere_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(50))

    def look_at(self: Any, index: int, outbox: Any, right: Any = Shard._look_at) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt
        right(self, index, outbox)

    monkeypatch.setattr(Shard, "_look_at", look_at)
    done = explore(SCOPES["tiny"], save=tmp_path / "tiny.states")
    assert done.interrupted
    assert done.states > 10
    assert not (tmp_path / "tiny.states").exists()


def test_what_broke_is_not_saved(tmp_path: Path) -> None:
    mutant = next(one for one in MUTANTS if one.id == "states-leaked")
    with mutant.planted():
        assert explore(mutant.world(), save=tmp_path / "x").broken
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: b"garbage", "it holds no exploration"),
        (lambda data: b"", "it holds no exploration"),
        (lambda data: b"[" * 1_000_000, "it holds no exploration"),
        (lambda data: data[:-5], "it is damaged"),
        (lambda data: data + b"x", "it is damaged"),
        (lambda data: data.replace(b'"kvproof_states": 2', b'"kvproof_states": 9'), "not written by this kvproof"),
    ],
)
def test_a_damaged_file_is_refused_with_a_way_out(tmp_path: Path, spoil: Any, says: str) -> None:
    file = tmp_path / "x"
    explore(SMALL, save=file)
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(ValueError, match=says) as refused:
        explore(SMALL, save=file)
    assert "remove it" in str(refused.value)


def test_no_bit_of_a_file_can_be_another(tmp_path: Path) -> None:
    file = tmp_path / "x"
    explore(SMALL, save=file)
    right = file.read_bytes()
    for place in range(0, len(right), 3):
        file.write_bytes(right[:place] + bytes([right[place] ^ 1]) + right[place + 1 :])
        with pytest.raises(ValueError, match="remove it"):
            saved.load(file, Shard(SMALL))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(ValueError, match="it is no regular file: name another folder"):
        explore(SMALL, save=tmp_path / "x")


def test_every_process_tells_alike_what_a_file_is_of() -> None:
    program = "from kvproof.models.explore import saved, scopes; print(*map(saved.fingerprint, scopes.SCOPES.values()))"
    told = {
        subprocess.run([sys.executable, "-P", "-c", program], env={**os.environ, "PYTHONHASHSEED": seed},
                       capture_output=True, check=True, text=True).stdout
        for seed in "123"
    }  # fmt: skip
    assert len(told) == 1


def test_a_file_that_other_code_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(saved, "DECIDING", ("elsewhere.a",))
    monkeypatch.setattr(saved, "code", saved.code.__wrapped__)
    explore(SMALL, save=tmp_path / "x")
    assert explore(SMALL, save=tmp_path / "x").complete
    (folder / "a.py").write_text("x = 2\n")
    with pytest.raises(ValueError, match="other code judged what is in it: remove it"):
        explore(SMALL, save=tmp_path / "x")


@pytest.mark.parametrize("failures", [3, 10**6])
def test_a_full_disk_does_not_end_an_exploration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    left = iter(range(failures))

    def save(*given: Any, right: Any = saved.save) -> None:
        if next(left, None) is not None:
            raise OSError(28, "No space left on device")
        right(*given)

    monkeypatch.setattr(saved, "save", save)
    monkeypatch.setattr(search, "SAVE_EVERY", 0.0)
    told: list[str] = []
    done = explore(SMALL, save=tmp_path / "x", progress=told.append)
    assert done.complete
    says = f"can't save what was visited in {tmp_path / 'x'}: No space left on device: free some room there"
    assert told.count(says) >= 3
    assert done.unsaved == ("" if failures == 3 else says)
    assert (tmp_path / "x").exists() == (failures == 3)


def test_a_file_of_another_scope_is_refused(tmp_path: Path) -> None:
    explore(SCOPES["at-once"], save=tmp_path / "x")
    with pytest.raises(ValueError, match="it is of scope at-once as it was then, and not of tiny as it is now"):
        explore(SCOPES["tiny"], save=tmp_path / "x")
    with pytest.raises(ValueError, match="as it is now"):
        explore(replace(SCOPES["at-once"], outputs=2), save=tmp_path / "x")


def test_a_lost_process_is_said() -> None:
    team = search.Team(SCOPES["tiny"], judged=False, symmetry=True, workers=2)
    team.processes[1].kill()
    team.processes[1].join()
    with pytest.raises(RuntimeError, match="was killed"):
        team.counts()
    with pytest.raises(RuntimeError, match="was killed"):
        team.way_to(1)
    team.end()
    assert not any(process.is_alive() for process in team.processes)


def test_a_process_lost_between_two_questions_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    team = search.Team(SMALL, judged=False, symmetry=True, workers=2)

    def ask(question: str, right: Any = team._ask) -> Any:
        answers = right(question)
        team.processes[1].kill()
        team.processes[1].join()
        return answers

    monkeypatch.setattr(team, "_ask", ask)
    with pytest.raises(RuntimeError, match="was killed"):
        team.level(lambda: None)
    team.end()


# -- what breaks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_every_planted_fault_is_found_by_a_way_that_replays(mutant: Mutant) -> None:
    with mutant.planted():
        done = explore(mutant.world(), liveness=False)
        assert done.broken
        for one in done.broken:
            assert len(one.moves) == done.depth  # no shorter way: all of a level is looked at before the next
            again = replay(MachineSubject(mutant.world().dialect), one.scenario)
            assert one.violation.identity in {violation.identity for violation in again.violations}
    again = replay(MachineSubject(), done.broken[0].scenario)
    assert not again.violations  # on the machine as it is, the same scenario is fine


def test_a_machine_that_admits_nobody_is_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule.Schedule, "_admit_all", lambda self: None)
    done = explore(SCOPES["tiny"], judged=False)
    assert done.complete
    assert not done.live
    assert done.livelocks


@pytest.mark.parametrize("paused", [True, False])
def test_an_interrupt_while_liveness_is_looked_at_keeps_the_rest(monkeypatch: pytest.MonkeyPatch, paused: bool) -> None:
    asked = 0

    def step_from(self: Any, state: bytes, right: Any = Shard.step_from) -> Any:
        nonlocal asked
        asked += 1
        if asked == 5 and not paused:
            raise KeyboardInterrupt
        return right(self, state)

    def pause() -> None:
        if asked == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Shard, "step_from", step_from)
    done = explore(SMALL, pause=pause)
    assert asked == 5
    assert (done.complete, done.states, done.interrupted) == (True, 24, True)
    assert (done.live, done.promised, done.livelocks) == (False, 0, [])


def test_ways_round_are_found_and_told_apart_by_whether_requests_fit() -> None:
    steps = {b"a": [b"b", b"c"], b"b": [], b"c": [b"d"], b"d": [b"c"], b"e": [b"e"]}

    class Toy:
        def step_from(self, state: bytes) -> Sequence[bytes]:
            return steps[state]

        def fits(self, state: bytes) -> bool:
            return state != b"e"

    found = livelocks(Toy(), list(steps))
    assert [(sorted(one.states), one.fits) for one in found] == [([b"c", b"d"], True), ([b"e"], False)]


def test_a_scope_with_more_prefixes_than_a_byte_can_name_is_refused() -> None:
    scope = replace(SCOPES["tiny"], prompts=(Prompt(300),), config=replace(SCOPES["tiny"].config, max_model_len=400))
    with pytest.raises(ValueError, match="at most 250"):
        Encoding(scope)


def test_a_dialect_that_holds_what_has_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="states are not moved"):
        Encoding(replace(SCOPES["tiny"], dialect=REFERENCE))


# -- the command -------------------------------------------------------------------------------------------------------


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
