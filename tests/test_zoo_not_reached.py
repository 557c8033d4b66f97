"""What the zoo says of faults that no scenario of its own reaches: each claim, made on real releases."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvproof.spec.config import Config, Group
from kvproof.spec.scenario import Action, Scenario

sys.path.insert(0, str(Path(__file__).parent))
from releaseplays import Seen, play

sys.path.pop(0)

pytestmark = [pytest.mark.release, pytest.mark.slow]

OLD = {("REF.null-count", "null-count-negative"), ("REF.drained", "record-left-blocks-to-be-zeroed")}
"""Known of old releases, and about something else."""

SIMPLE_STORE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import simple_store
simple_store.install()
"""

LISTED_TWICE = Scenario(
    Config(
        (Group("full", 32), Group("window", 4, 5)),
        num_blocks=6,
        hash_unit=4,
        step_tokens=4,
        max_running=1,
        retention=None,
        connector="async",
    ),
    (Action("submit", "r1", length=40, max_tokens=1), Action("step", times=12)),
)
"""What leaves the window is given back and handed out again for later tokens before the store looks, which it does once
for 32 tokens: then one block stands for several places of the window's group."""

ONE_PLACE = Scenario(
    Config(
        (Group("full", 4),),
        num_blocks=20,
        hash_unit=4,
        step_tokens=16,
        max_running=1,
        retention=None,
        connector="async",
        load_steps=6,
    ),
    (
        *(Action("submit", f"parked{i}", length=9, max_tokens=1, external=8) for i in (1, 2, 3)),
        Action("submit", "other", length=5, max_tokens=2),
        Action("step", times=5),
    ),
)
"""Three requests wait for their loads, where there may be one sequence; a fourth needs none."""

BLOCK_ENDS = Scenario(
    Config(
        (Group("full", 4), Group("mamba", 4)),
        num_blocks=40,
        hash_unit=4,
        step_tokens=8,
        speculative=3,
        eagle=True,
        retention=None,
    ),
    (
        Action("submit", "r1", length=16, max_tokens=24),
        Action("step", times=2),
        *(Action("step", accept=(count,)) for count in (3, 3, 0, 1, 2, 0, 3, 1, 3, 3)),
    ),
)
"""Prefill ends on a block's end, and so do decodes of one token and three drafts, and those that lose some of them."""

SMALL_WINDOW = Config(
    (Group("full", 64), Group("window", 4, 8, drafter=True)),
    num_blocks=36,
    hash_unit=4,
    step_tokens=64,
    max_running=2,
    speculative=3,
    eagle=True,
)


def seen(release: str, scenario: Scenario, spoil: str = "") -> Seen:
    return play(release, {"it": scenario}, spoil)["it"]


@pytest.mark.parametrize(("release", "faulty"), [("0.22.1", True), ("0.23.0", True), ("0.24.0", False)])
def test_z20_a_block_that_the_simple_store_lists_twice_is_queued_twice_up_to_023(release: str, faulty: bool) -> None:
    found = seen(release, LISTED_TWICE, SIMPLE_STORE)
    assert found.broken - OLD == ({("REF.queue-shape", "links-broken")} if faulty else set())
    assert found.judged["REF.queue-shape"] > 4


@pytest.mark.parametrize("release", ["0.24.0", "0.27.1", "0.30.0", "0.33.0"])
def test_z72_who_waits_for_a_load_takes_nobodys_place(release: str) -> None:
    found = seen(release, ONE_PLACE)
    assert found.broken - OLD == set()
    assert "step 1: other [0, 5); waiting parked" in found.text


@pytest.mark.parametrize("release", ["0.23.0", "0.26.0", "0.33.0"])
def test_z05_a_step_has_a_column_for_every_state_that_it_writes(release: str) -> None:
    found = seen(release, BLOCK_ENDS)
    assert found.broken - OLD == set()
    assert found.judged["SLOT.exclusive-write"] > 8


def test_z05_a_column_that_is_missing_would_be_seen() -> None:
    spoil = """
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
begin = MambaManager.__init__
def with_one_less(self, *rest, **named):
    begin(self, *rest, **named)
    self.num_speculative_blocks -= 1
MambaManager.__init__ = with_one_less
"""
    assert ("SLOT.exclusive-write", "state-write-past-table") in seen("0.33.0", BLOCK_ENDS, spoil).broken


@pytest.mark.parametrize("release", ["0.31.0", "0.33.0"])
def test_z16_a_small_window_is_charged_no_more_than_what_start_up_counts(release: str) -> None:
    longest = (Action("submit", "r1", length=1000, max_tokens=24), Action("step", times=60))
    found = seen(release, Scenario(SMALL_WINDOW, longest))
    assert found.broken - OLD == set()
    assert found.judged["ADMIT.startup"] == 1
    # It is the smallest pool that start-up accepts, and more than half of it is for the window.
    refused = seen(release, Scenario(replace(SMALL_WINDOW, num_blocks=35), longest))
    assert not refused.judged.get("ADMIT.startup")
