"""The abstract machine: what it refuses, what its actions leave alone, and that it keeps its own specification."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvproof.invariants.catalogue import CATALOGUE
from kvproof.invariants.monitor import Monitor
from kvproof.models.conformance import draw
from kvproof.models.stateful.replay import replay
from kvproof.spec.config import Config, ConfigError, Group
from kvproof.spec.machine.dialect import dialect_of
from kvproof.spec.machine.machine import Machine
from kvproof.spec.machine.sizes import beyond
from kvproof.spec.machine.subject import MachineSubject
from kvproof.spec.machine.world import LOADING, WAITING
from kvproof.spec.scenario import Action, Scenario
from kvproof.spec.tracer import states_of

SMALL = Config((Group("full", 4), Group("mamba", 4)), 24, hash_unit=2, step_tokens=16, max_model_len=64)


def run(config: Config, *actions: Action) -> Monitor:
    monitor = Monitor(stop=False)
    driven = MachineSubject().start(config, monitor)
    for action in actions:
        driven.apply(action)
    driven.drain()
    return monitor


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"groups": (Group("full", 4), Group("window", 4, window=8), Group("mamba", 4))}, "no sliding windows yet"),
        ({"groups": (Group("full", 4),)}, "describes hybrids"),
        ({"groups": (Group("full", 2), Group("full", 4), Group("mamba", 4))}, "one block size for full attention"),
        ({"speculative": 1, "eagle": True}, "no draft layers yet"),
        ({"checkpoint_blocks": 1, "checkpoint_alignment": 2}, "no prefill checkpoints yet"),
        ({"async_scheduling": True}, "completes a step before the next"),
        ({"watermark": 1}, "has none of"),
    ],
)
def test_what_it_does_not_describe_is_refused_with_a_way_out(change: dict[str, object], says: str) -> None:
    config = replace(SMALL, **change)  # type: ignore[arg-type]
    assert ": " in beyond(config)
    with pytest.raises(ConfigError, match=says):
        MachineSubject().start(config, None)


def test_random_scenarios_break_nothing() -> None:
    shown = MachineSubject().families()
    exercised: set[str] = set()
    for seed in range(60):
        found = replay(MachineSubject(), draw(seed, lambda eagle: 0))
        assert not found.violations, seed
        exercised |= {name for name, count in found.evaluations.items() if count}
    missing = {entry.id for entry in CATALOGUE if entry.family in shown} - exercised - set(MachineSubject().lacking())
    assert missing <= {"EXT.in-flight-held", "EXT.counts-what-came", "ADMIT.stall", "FLOW.no-crash", "REUSE.resend"}


@pytest.mark.parametrize("connector", ["sync", "async"])
def test_a_store_that_loses_what_it_promised_costs_time_and_nothing_else(connector: str) -> None:
    config = replace(SMALL, connector=connector, load_steps=2 if connector == "async" else 1)  # type: ignore[arg-type]
    monitor = run(
        config,
        Action("submit", "a", length=18, max_tokens=3, external=16, missing=4),
        Action("step", times=3),
        Action("submit", "b", base="a", shared=18, length=20, max_tokens=3),
        Action("step", times=8),
    )
    assert not monitor.violations
    assert monitor.evaluations["REF.drained"]


def test_an_aborted_load_keeps_its_blocks_until_it_lands() -> None:
    config = replace(SMALL, connector="async", load_steps=3)
    machine = Machine(config)
    machine.submit("a", states_of(range(10)), 2, store=8)
    machine.step()
    request = machine.world.find("a")
    assert request is not None
    assert request.status == LOADING
    free = len(machine.world.queue)
    assert machine.abort("a")
    assert machine.world.find("a") is None
    assert len(machine.world.queue) == free
    while machine.step():
        pass
    assert len(machine.world.queue) == config.num_blocks - 1
    assert not any(machine.world.references)


def test_actions_whose_guard_does_not_hold_change_nothing() -> None:
    machine = Machine(SMALL)
    assert not machine.step()
    assert not machine.finish("a")
    assert not machine.abort("a")
    assert not machine.preempt("a")
    assert not machine.submit("a", states_of(range(64)), 1)  # no room for an answer
    assert machine.submit("a", states_of(range(6)), 2)
    assert not machine.submit("a", states_of(range(6)), 2)
    assert not machine.preempt("a")  # it waits
    assert machine.step()
    assert not machine.reset()  # its blocks are in use
    assert machine.preempt("a")
    request = machine.world.find("a")
    assert request is not None
    assert (request.status, request.computed, request.preempted) == (WAITING, 0, True)


def test_a_copied_world_is_its_own() -> None:
    machine = Machine(replace(SMALL, speculative=1))
    machine.submit("a", states_of(range(9)), 6)
    machine.step()
    before = machine.world
    kept = before.copy()
    machine.become(before.copy())
    for _ in range(4):
        machine.step((1,))
    machine.abort("a")
    machine.evict(0)
    assert before == kept
    assert machine.world != before


def test_faults_of_old_are_switches() -> None:
    """The block of an external load's state is not asked for: the allocation takes more than admission let through."""
    config = replace(SMALL, connector="sync", num_blocks=5, groups=(Group("full", 2), Group("mamba", 2)),
                     full_sequence_must_fit=False)  # fmt: skip
    scenario = Scenario(config, (Action("submit", "a", length=5, max_tokens=1, external=4), Action("step")))
    assert not replay(MachineSubject(), scenario).violations
    found = replay(MachineSubject(dialect_of((0, 33, 0))), scenario)
    assert {violation.invariant for violation in found.violations} >= {"FLOW.no-crash"}
