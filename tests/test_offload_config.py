"""Offloading as a configuration: drawn now and then, and refused where nobody has it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvproof.impl.reference.subject import ReferenceSubject
from kvproof.kvexport import export_pytest
from kvproof.models.stateful.strategies import Dice, Menu, draw_setup
from kvproof.scenario_file import parse
from kvproof.spec.config import Config, ConfigError, Group
from kvproof.spec.finding import Violation
from kvproof.spec.machine.subject import MachineSubject
from kvproof.spec.scenario import Action, Scenario

OFFLOAD = Config((Group("full", 4), Group("mamba", 4)), num_blocks=20, hash_unit=4, step_tokens=16, connector="offload")


def test_some_runs_offload_and_lose_their_cache() -> None:
    rng = random.Random(1)
    setups = [draw_setup(Dice(rng.randbytes(40))) for _ in range(400)]
    offloading = [setup for setup in setups if setup.config.connector == "offload"]
    assert 20 < len(offloading) < 100
    for setup in offloading:
        assert setup.resets
        assert not setup.unreliable
        assert Menu(setup).external(Dice(b"\x01"), 8, 8) == 0, "what it holds is what was stored"
        assert setup.plain().config.connector == "async"
    assert {setup.config.offload_blocks > 0 for setup in offloading} == {True, False}


@pytest.mark.parametrize("subject", [MachineSubject(), ReferenceSubject()], ids=lambda subject: subject.name)
def test_who_has_no_host_memory_says_so(subject: MachineSubject | ReferenceSubject) -> None:
    with pytest.raises(ConfigError, match="no host memory"):
        subject.start(OFFLOAD, None)


def test_it_is_written_read_and_exported() -> None:
    scenario = Scenario(replace(OFFLOAD, offload_blocks=7), (Action("submit", "r1", length=9, max_tokens=1),))
    assert parse(scenario.to_dict()).scenario == scenario
    assert "HOST_BLOCKS = 65536, 7" in export_pytest(scenario, Violation("FLOW.no-crash", "some-error", ""), "")


def test_diverging_hits_are_not_for_it() -> None:
    assert "divergent_hits" in str(replace(OFFLOAD, divergent_hits=True).problem())
