"""Asynchronous scheduling on real releases: two steps in flight, and what breaks where blocks are freed too early."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvproof.spec.config import Config, Group
from kvproof.spec.scenario import Action, Scenario

sys.path.insert(0, str(Path(__file__).parent))
from releaseplays import play

sys.path.pop(0)

pytestmark = [pytest.mark.release, pytest.mark.slow]

HYBRID = Config(
    groups=(Group("full", 4, drafter=True), Group("mamba", 8)),
    num_blocks=60,
    hash_unit=4,
    step_tokens=16,
    speculative=2,
    eagle=True,
    async_scheduling=True,
)
ATTENTION = Config(
    groups=(Group("full", 4),),
    num_blocks=8,
    hash_unit=4,
    step_tokens=32,
    connector="async",
    async_scheduling=True,
)
LATE_ROW = Scenario(
    # r1 ends by itself while its next row is in flight, and a load gets its blocks.
    replace(ATTENTION, num_blocks=6),
    (
        Action("submit", "r1", length=7, max_tokens=20),
        Action("step", times=3),
        Action("submit", "r2", length=17, max_tokens=2, external=16),
        Action("finish", "r1"),
        Action("step", times=12),
    ),
)
PLAYS = {
    "drafts": Scenario(
        HYBRID,
        (
            Action("submit", "r1", length=20, max_tokens=9),
            Action("step", times=3),
            Action("submit", "r2", "r1", 20, 24, 6),
            Action("step", times=20, accept=(1, 0, 2)),
        ),
    ),
    "loads": Scenario(
        replace(ATTENTION, groups=(Group("full", 4), Group("mamba", 4)), num_blocks=16),
        (
            Action("submit", "r1", length=13, max_tokens=9, external=12),
            Action("submit", "r2", length=13, max_tokens=9, external=12, missing=4),
            Action("step", times=6),
            Action("abort", "r1"),
            Action("step", times=20),
        ),
    ),
    # PR 49675: where frees wait for the step in flight, preempting somebody makes no room yet.
    "victims": Scenario(
        ATTENTION,
        (
            *(Action("submit", f"r{i}", length=7, max_tokens=30) for i in range(3)),
            Action("step", times=40),
        ),
    ),
    "late row": LATE_ROW,
}
# When the prompt's last step is heard of, the next one runs already, and has the block whose key was moved to a copy.
# Keys are registered once more then, so that block gets the tail's again. From 0.32 a tail lies short of the prompt.
TAIL = Scenario(
    Config(groups=(Group("full", 4), Group("mamba", 8)), num_blocks=60, hash_unit=4, step_tokens=16),
    (
        Action("submit", "r1", length=20, max_tokens=9),
        Action("step", times=12),
        Action("submit", "r2", "r1", 20, 24, 6),
        Action("step", times=12),
    ),
)
PLAYS["tail"] = replace(TAIL, config=replace(TAIL.config, async_scheduling=True))
PLAYS["tail, one step at a time"] = TAIL
# r1's state after its first token is keyed in step 1 and moved to a copy in step 2, from which r2 goes on in step 3.
COPY = Scenario(
    Config(
        groups=(Group("full", 4), Group("mamba", 4)),
        num_blocks=6,
        hash_unit=1,
        step_tokens=2,
        max_running=2,
        async_scheduling=True,
    ),
    (
        Action("submit", "r1", length=2, max_tokens=1),
        Action("submit", "r2", "r1", 1, 2, 1),
        Action("step", times=6),
    ),
)
# What is scheduled and has not run yet is no standing still: r3, which lost its blocks, is in the step in flight.
AGAIN = Scenario(
    Config(
        groups=(Group("full", 4), Group("mamba", 16)),
        num_blocks=28,
        hash_unit=4,
        step_tokens=11,
        retention=0,
        connector="offload",
        async_scheduling=True,
    ),
    (
        Action("submit", "r1", length=16, max_tokens=1),
        Action("submit", "r2", length=61, max_tokens=1),
        Action("submit", "r3", "r1", 16, 49, 1),
        Action("step", times=14),
    ),
)
ADMITTED = Scenario(
    Config(
        groups=(Group("full", 32), Group("mamba", 32)),
        num_blocks=8,
        hash_unit=32,
        step_tokens=32,
        retention=0,
        async_scheduling=True,
    ),
    (
        Action("submit", "r1", length=1, max_tokens=1),
        Action("submit", "r2", length=31, max_tokens=49),
        Action("submit", "r3", length=33, max_tokens=1),
        Action("step", times=50),
    ),
)
IN_VAIN = ("ADMIT.preemption-frees", "preempted-for-nothing")
OVERRUN = ("SLOT.key-content", "partial-key-overrun")


@pytest.mark.parametrize("release", ["0.33.0"])
def test_two_steps_in_flight_are_judged_like_one_after_the_other(release: str) -> None:
    seen = play(release, PLAYS)
    assert "r1 [20, 23) (2 drafts)" in seen["drafts"].text
    for name in ("drafts", "late row", "loads"):
        assert not seen[name].broken - {("REF.null-count", "null-count-negative")}, seen[name].text
        assert seen[name].judged["SLOT.attention-read"]
        assert seen[name].judged["REF.drained"]


def test_preempting_a_victim_whose_blocks_are_fenced_makes_no_room() -> None:
    assert IN_VAIN in play("0.29.0", PLAYS)["victims"].broken
    healthy = play("0.30.0", PLAYS)["victims"]
    assert IN_VAIN not in healthy.broken
    assert healthy.judged["ADMIT.preemption-frees"]


@pytest.mark.parametrize("release", ["0.26.0", "0.30.0"])
def test_a_tail_is_keyed_once_more_although_the_step_in_flight_writes_its_block(release: str) -> None:
    seen, healthy = play(release, PLAYS), play("0.33.0", PLAYS)["tail"]
    assert OVERRUN in seen["tail"].broken, seen["tail"].text
    assert OVERRUN not in seen["tail, one step at a time"].broken
    assert not healthy.broken, healthy.text
    assert healthy.judged["SLOT.key-content"]


def test_who_is_in_a_step_in_flight_is_not_passed_over() -> None:
    seen = play("0.33.0", {"again": AGAIN, "admitted in flight": ADMITTED})
    assert "nothing runs; waiting r3" in seen["again"].text
    assert "ADMIT.stall" not in seen["again"].ids(), seen["again"].text
    assert ("ADMIT.starved", "running-request-passed-over") not in seen["admitted in flight"].broken


def test_what_a_step_in_flight_writes_is_there_for_the_next_one() -> None:
    seen = play("0.33.0", {"copy in flight": COPY})["copy in flight"]
    assert "r2 resumes at 1 local tokens" in seen.text
    assert not seen.broken, seen.text
    assert seen.judged["HIT.same-step"]


# The load fails after its step has been taken for done: the scheduler goes back behind what the device has run.
BACK = Scenario(
    replace(ATTENTION, connector="sync", num_blocks=9, step_tokens=8),
    (
        Action("submit", "r1", length=24, max_tokens=1, external=4, missing=1),
        Action("step", times=5),
    ),
)


def test_a_device_goes_back_with_a_scheduler_that_lost_what_was_loaded() -> None:
    seen = play("0.23.0", {"back": BACK})["back"]
    assert not [name for name in seen.ids() if name.startswith(("SLOT", "FLOW"))], seen.text
    assert seen.text.index("r1 [4, 12)") < seen.text.index("r1 [12, 20)") < seen.text.index("r1 [0, 8)")


UNFENCED = """
from vllm.v1.core.sched.scheduler import Scheduler
made = Scheduler.__init__
def __init__(self, *args, **kwargs):
    made(self, *args, **kwargs)
    self.defer_block_free = self.defer_async_loads = False
Scheduler.__init__ = __init__
"""


def test_blocks_that_are_freed_under_a_step_in_flight_are_seen_to_be_overwritten() -> None:
    found = play("0.33.0", {"late row": LATE_ROW}, UNFENCED)["late row"]
    assert found.ids() & {"SLOT.attention-read", "SLOT.key-content"}, found.text
