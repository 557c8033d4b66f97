"""The explorer: small worlds visited whole, states without names, shortest ways, and planted faults that it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvproof.invariants.catalogue import CATALOGUE
from kvproof.models.explore import search
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
    """The larger ones in their first levels, which have seen it all; ``kvproof explore`` visits them whole."""
    evaluated: set[str] = set()
    for scope in SCOPES.values():
        done = explore(scope, most=8_000)
        assert (done.broken, done.livelocks) == ([], []), scope.name
        assert done.complete or done.states >= 8_000, scope.name
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
