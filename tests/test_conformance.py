"""The abstract machine and releases of vLLM take the same decisions, step by step, but for the differences that have a
name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvproof.models.conformance import Digest, Trace, compare, draw
from kvproof.spec.config import Config, Group
from kvproof.spec.machine.dialect import SPECIFICATION, SWITCHES, Dialect, dialect_of
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
