"""The abstract machine takes the same decisions as releases of vLLM and as the reference engine, step by step, but for
the differences that have a name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvproof.impl.reference.subject import ReferenceSubject
from kvproof.models.conformance import Digest, Trace, compare, draw, widened
from kvproof.models.stateful.replay import replay
from kvproof.spec.config import Config, Group
from kvproof.spec.machine.dialect import REFERENCE, SPECIFICATION, SWITCHES, Dialect, dialect_of
from kvproof.spec.machine.subject import MachineSubject
from kvproof.spec.scenario import Action, Scenario

BENCH = Path(__file__).parents[1] / "bench" / "conformance.py"
SCENARIOS = 40


def retention(eagle: bool) -> int | None:
    return 0


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.33.0", "0.31.0", "0.28.0", "0.26.0"])
def test_a_release_and_the_machine_in_its_dialect_are_never_apart(release: str) -> None:
    command = [sys.executable, "-P", str(BENCH), "--inside", "--release", release, "--scenarios", str(SCENARIOS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["apart"] == []
    assert result["run"] > SCENARIOS / 2
    assert result["steps"] > 5 * result["run"]
    assert result["off"]


def test_dialects_grow_towards_the_specification() -> None:
    def off(release: tuple[int, ...]) -> set[str]:
        dialect = dialect_of(release)
        return {name for name in SWITCHES if not getattr(dialect, name)}

    newest = off((0, 33, 0))
    assert newest == {"charges_external_state", "waits_for_copied_tail", "charges_no_less_than_nothing"}
    for minor in range(28, 33):
        assert off((0, minor, 0)) >= off((0, minor + 1, 0)) >= newest
    assert dialect_of((0, 34, 1)) == dialect_of((0, 33, 0))


def test_the_machine_is_never_apart_from_itself_and_the_scenarios_are_rich() -> None:
    kinds: set[str] = set()
    for seed in range(30):
        scenario = draw(seed, retention)
        kinds |= {action.kind for action in scenario.actions} | {scenario.config.connector}
        kinds |= {"drafts"} if scenario.config.speculative else set()
        steps, parted = compare(MachineSubject(), MachineSubject(), scenario)
        assert parted is None
        assert steps >= 0
    assert kinds >= {"submit", "step", "finish", "abort", "reset", "preempt", "evict", "sync", "async", "drafts"}


def test_another_dialect_is_noticed_and_said() -> None:
    config = Config((Group("full", 4), Group("mamba", 4)), 20, hash_unit=2, step_tokens=16, max_model_len=64)
    actions = (
        Action("submit", "a", length=8, max_tokens=2),
        Action("step", times=4),
        Action("submit", "b", base="a", shared=8, length=8, max_tokens=2),
        Action("step", times=4),
    )
    old = MachineSubject(Dialect(leaves_token=False))
    steps, parted = compare(MachineSubject(), old, Scenario(config, actions))
    assert parted is not None
    assert parted.step == steps + 1
    assert any(text.startswith(("ran", "keys")) for text in parted.differences)


def test_what_differs_is_named_part_by_part() -> None:
    one, other = Digest(ran=(("a", 0, 4, 0),), free=3), Digest(ran=(("a", 0, 3, 0),), free=3)
    assert one.differences(one) == []
    assert one.differences(other) == ["ran: (('a', 0, 4, 0),) against (('a', 0, 3, 0),)"]


def test_a_crash_on_one_side_alone_is_a_difference() -> None:
    config = Config((Group("full", 2), Group("mamba", 2)), 5, hash_unit=2, step_tokens=8, connector="sync",
                    full_sequence_must_fit=False, max_model_len=16)  # fmt: skip
    actions = tuple(
        action
        for name in "abcdef"
        for action in (Action("submit", name, length=5, max_tokens=2, external=4), Action("step"))
    )
    careless = MachineSubject(Dialect(charges_external_state=False))
    trace = Trace()
    driven = careless.start(config, trace)
    for action in actions:
        driven.apply(action)
    assert trace.crashed.startswith("kvproof.spec.machine: Faulty")
    _, parted = compare(MachineSubject(), careless, Scenario(config, actions))
    assert parted is not None
    assert SPECIFICATION.charges_external_state


# -- the reference engine ---------------------------------------------------------------------------------------------

STATES = ("moves_states", "keys_ahead", "frees_at_once", "lets_go", "replaces_keys", "keys_prompt_alone",
          "keeps_arrived", "queues_loads_apart")  # fmt: skip
"""Go off together, or only where the first is off."""

WAYS = [(name,) for name in SWITCHES if not getattr(REFERENCE, name) and name not in STATES[:3]]
PAIR = (Group("full", 4), Group("mamba", 4))
SMALL = Config(PAIR, 40, hash_unit=1, step_tokens=16, max_model_len=64, speculative=2)
LOADS = Config(PAIR, 9, hash_unit=4, step_tokens=16, max_model_len=64, connector="async", full_sequence_must_fit=False)
HAND_MADE = (
    # The first token of b lies in a block of its own, which is keyed for it and for the whole block.
    Scenario(
        Config(PAIR, 20, hash_unit=1, step_tokens=4),
        (Action("submit", "a", length=1, max_tokens=1), Action("submit", "b", "a", 1, 9, 1), Action("step", times=5),
         Action("submit", "c", "b", 4, 5, 1), Action("step")),
    ),
    # Who was preempted is resumed at its last known token but one.
    Scenario(
        SMALL,
        (Action("submit", "a", length=6, max_tokens=9), Action("step", times=4, accept=(0,)), Action("preempt", "a"),
         Action("step", times=6)),
    ),
    # Two fit, but not with their drafts.
    Scenario(
        replace(SMALL, num_blocks=10, full_sequence_must_fit=False),
        (Action("submit", "a", length=3, max_tokens=4), Action("submit", "b", length=3, max_tokens=4),
         Action("step", times=9, accept=(0,))),
    ),
    # The limit for prefills is less than a decoding step.
    Scenario(
        replace(SMALL, long_prefill_threshold=2),
        (Action("submit", "a", length=6, max_tokens=9), Action("step", times=9)),
    ),
    # Drafts up to the last position.
    Scenario(
        replace(SMALL, max_model_len=9), (Action("submit", "a", length=6, max_tokens=9), Action("step", times=9))
    ),
    # Both loads would fit, but neither request could start then.
    Scenario(
        replace(LOADS, num_blocks=8),
        (Action("submit", "a", length=9, max_tokens=1, external=8),
         Action("submit", "b", length=9, max_tokens=1, external=8), Action("step", times=9)),
    ),
    # Who lost its blocks has to leave room for one whose load has arrived, and who waits behind it.
    Scenario(
        LOADS,
        (Action("submit", "a", length=9, max_tokens=3, external=8), Action("step", times=2),
         Action("submit", "b", length=20, max_tokens=1, external=4), Action("step"), Action("preempt", "a"),
         Action("evict", times=0), Action("step", times=9)),
    ),
)  # fmt: skip


def in_dialect(dialect: Dialect) -> MachineSubject:
    """The machine on a model that says the same after a rejected draft as without one, as the reference engine's."""
    return MachineSubject(dialect, branches=False)


def scenarios(count: int) -> Iterator[Scenario]:
    yield from HAND_MADE
    for seed in range(count):
        yield draw(seed, retention)
        yield widened(draw(seed, retention), seed)


def test_the_reference_engine_and_the_machine_in_its_dialect_are_never_apart() -> None:
    machine, engine, steps, kinds = in_dialect(REFERENCE), ReferenceSubject(), 0, set()
    for scenario in scenarios(SCENARIOS):
        agreed, parted = compare(machine, engine, scenario)
        assert parted is None, f"{scenario.note}: {parted}"
        steps += agreed
        kinds |= {"load falls short" for action in scenario.actions if action.missing}
        kinds |= {"rows differ" for action in scenario.actions if len(set(action.accept)) > 1}
    assert steps > 10 * SCENARIOS
    assert kinds >= {"load falls short", "rows differ"}


@pytest.mark.slow
@pytest.mark.parametrize("together", [STATES, *WAYS], ids=lambda together: together[0])
def test_each_way_of_the_reference_engine_shows(together: tuple[str, ...]) -> None:
    """A switch that could as well be on says nothing."""
    machine, engine = in_dialect(replace(REFERENCE, **dict.fromkeys(together, True))), ReferenceSubject()
    assert any(compare(machine, engine, scenario)[1] for scenario in scenarios(150))


def test_the_machine_in_the_reference_engines_dialect_breaks_nothing() -> None:
    for seed in range(20):
        found = replay(in_dialect(REFERENCE), widened(draw(seed, retention), seed))
        assert found.violations == ()
        assert not found.error


def test_releases_have_none_of_the_ways_of_the_reference_engine() -> None:
    for minor in range(26, 34):
        dialect = dialect_of((0, minor, 0))
        assert all(getattr(dialect, name) for name in (*STATES, *(name for (name,) in WAYS))
                   if name != "spares_lone_prefill")  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_what_the_machine_does_not_describe_is_no_dialect(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}|moves_states"):
        Dialect(**{name: False})


def test_what_is_drawn_wide_is_the_same_again_and_can_be_run() -> None:
    for seed in range(60):
        scenario = draw(seed, retention)
        wide = widened(scenario, seed)
        assert wide == widened(scenario, seed)
        assert wide.config.problem() is None
        assert len(wide.actions) == len(scenario.actions)
        assert all(action.missing <= action.external for action in wide.actions)
