"""Offloading to host memory by the releases' own connector, and the boundary states that any connector is handed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvproof.spec.config import Config, Group
from kvproof.spec.scenario import Action, Scenario

sys.path.insert(0, str(Path(__file__).parent))
import insiders
from releaseplays import Seen, play

sys.path.pop(0)

pytestmark = [pytest.mark.release, pytest.mark.slow]

COLUMNS = Path(__file__).with_name("state_column_program.py")
MOONCAKE = Path(__file__).with_name("mooncake_program.py")
HYBRID = (Group("full", 4), Group("mamba", 4))
OFFLOAD = Config(groups=HYBRID, num_blocks=40, hash_unit=4, step_tokens=64, connector="offload", retention=None)
MTP = replace(OFFLOAD, speculative=1, eagle=True)


def again(config: Config, first: int, shared: int, second: int) -> Scenario:
    """A prompt that is offloaded, a cache that forgets it, and a prompt that asks for it."""
    return Scenario(
        config,
        (
            Action("submit", "r1", length=first, max_tokens=1),
            Action("step", times=5),
            Action("reset"),
            Action("submit", "r2", "r1", shared, second, 1),
            Action("step", times=4),
        ),
    )


PLAYS = {
    "round trip": again(OFFLOAD, 17, 17, 22),
    "full host memory": again(replace(OFFLOAD, offload_blocks=4), 17, 17, 22),
    "ends on a boundary": again(OFFLOAD, 16, 16, 16),
    "some states and drafts": again(replace(MTP, retention=0), 17, 17, 21),
    "one state and drafts": again(replace(MTP, retention=0, num_blocks=60), 40, 40, 60),
    "drafter in small blocks": again(
        replace(MTP, groups=(Group("full", 4, drafter=True), Group("mamba", 16))), 33, 33, 50
    ),
    "slow store": Scenario(
        replace(OFFLOAD, num_blocks=6, step_tokens=4, max_running=2, load_steps=2),
        (Action("submit", "r1", length=9, max_tokens=1), Action("step", times=3)),
    ),
    "aborted before it ran": Scenario(
        OFFLOAD, (Action("submit", "r1", length=8, max_tokens=1), Action("abort", "r1"), Action("step"))
    ),
    "drafts move on": Scenario(
        replace(OFFLOAD, num_blocks=12, step_tokens=8, max_running=2, speculative=1),
        (Action("submit", "r1", length=17, max_tokens=1), Action("step", times=2)),
    ),
    "announced": Scenario(
        replace(
            OFFLOAD, groups=(Group("full", 8), Group("window", 4, 8)), num_blocks=12, step_tokens=16, cache_events=True
        ),
        (Action("submit", "r1", length=8, max_tokens=1), Action("step", times=3)),
    ),
    "shared in its step": Scenario(
        replace(OFFLOAD, groups=(Group("full", 4), Group("window", 4, 2)), num_blocks=5, step_tokens=8),
        (
            Action("submit", "r1", length=4, max_tokens=1),
            Action("submit", "r2", "r1", 4, 5, 1),
            Action("step", times=2),
        ),
    ),
    "two resets at once": Scenario(
        replace(OFFLOAD, groups=(Group("full", 4),), num_blocks=4, step_tokens=8),
        (
            Action("submit", "r1", length=4, max_tokens=1),
            Action("step"),
            Action("reset", store=True),
            Action("reset", store=True),
            Action("submit", "r2", "r1", 4, 9, 2),
            Action("step", times=6),
        ),
    ),
    # What the step chose is put off to the next one, which comes after the reset and writes to the same blocks.
    "reset before a store begins": Scenario(
        replace(OFFLOAD, groups=(Group("full", 8), Group("window", 8, 1)), num_blocks=5, hash_unit=8, step_tokens=8),
        (
            Action("submit", "r1", length=16, max_tokens=1),
            Action("step"),
            Action("reset", store=True),
            Action("step"),
        ),
    ),
    # The step that chose it was scheduled before the reset, and runs after it.
    "reset under a step in flight": Scenario(
        replace(OFFLOAD, num_blocks=12, step_tokens=8, async_scheduling=True),
        (
            Action("submit", "r1", length=17, max_tokens=9),
            Action("step"),
            Action("reset", store=True),
            Action("step", times=4),
        ),
    ),
    "handed over": Scenario(
        Config((Group("full", 4), Group("mamba", 8)), 40, 4, 64, connector="async"),
        (
            Action("submit", "r1", length=30, max_tokens=4),
            Action("step", times=8),
            Action("submit", "r2", "r1", 30, 40, 4),
            Action("step", times=8),
        ),
    ),
    "nothing to load, deeper in attention": Scenario(
        Config(HYBRID, num_blocks=5, hash_unit=4, step_tokens=8, connector="async"),
        (
            Action("submit", "r1", length=4, max_tokens=1),
            Action("submit", "r2", "r1", 4, 5, 1),
            Action("step"),
        ),
    ),
}

OVERWRITTEN = ("EXT.offload-content", "state-overwritten-before-copy")
NOTHING_SERVED = ("EXT.offload-serves", "holds-but-offers-nothing")
OFF_BOUNDARY = ("EXT.offload-offers", "offers-boundary-without-state")
MOVED = ("EXT.offload-content", "chosen-full-key-overrun")
IN_UNITS = ("EVENT.stored-well-formed", "offloaded-full-block-size-of-another-group")
STATELESS = ("HIT.resume-boundary", "resume-without-state")
RESET_FAILS = ("FLOW.no-crash", "scheduler.reset_cache-AssertionError-assert-not-self-_current_batch_jobs_to_flush")
ABORTED = (
    "FLOW.no-crash",
    "scheduler._build_store_jobs-AssertionError-assert-len-offload_keys-len-offload_block_ids",
)


def seen(release: str, name: str, spoil: str = "") -> Seen:
    alone = spoil or release < "0.26"  # these refuse some of the configurations
    return play(release, {name: PLAYS[name]} if alone else PLAYS, spoil)[name]


def about_offload(found: Seen) -> set[tuple[str, str]]:
    return {identity for identity in found.broken if identity[0].startswith(("EXT.", "SLOT.", "FLOW."))}


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("0.24.0", "round trip"),
        ("0.25.1", "round trip"),
        ("0.28.0", "round trip"),
        ("0.33.0", "round trip"),
        ("0.33.0", "full host memory"),
        ("0.33.0", "ends on a boundary"),
    ],
)
def test_what_is_offloaded_comes_back_as_its_keys_promise(release: str, name: str) -> None:
    found = seen(release, name)
    assert about_offload(found) == set()
    assert found.judged["EXT.offload-content"] > 3
    if name == "round trip":
        assert "r2 resumes at 0 local + 16 external tokens" in found.text
        assert found.judged["EXT.offload-offers"] > 0
        assert found.judged["EXT.offload-serves"] > 0
    if name == "ends on a boundary":  # one token is left to compute, so the last block's state is of no use
        assert "r2 resumes at 0 local + 12 external tokens" in found.text


@pytest.mark.parametrize(
    ("name", "faulty", "right", "identity"),
    [
        ("some states and drafts", "0.28.0", "0.33.0", NOTHING_SERVED),
        ("one state and drafts", "0.29.0", "0.33.0", NOTHING_SERVED),
        ("aborted before it ran", "0.26.0", "0.28.0", ABORTED),
        ("nothing to load, deeper in attention", "0.26.0", "0.28.0", STATELESS),
        ("drafter in small blocks", "0.33.0", "0.28.0", OFF_BOUNDARY),
        ("slow store", "0.33.0", "0.28.0", OVERWRITTEN),
        ("ends on a boundary", "0.23.0", "0.24.0", OFF_BOUNDARY),
        ("drafts move on", "0.22.1", "0.23.0", MOVED),
        ("announced", "0.27.0", "0.28.0", IN_UNITS),
    ],
)
def test_a_fault_shows_where_it_is_and_nowhere_else(
    name: str, faulty: str, right: str, identity: tuple[str, str]
) -> None:
    assert identity in seen(faulty, name).broken
    assert identity not in seen(right, name).broken


def test_a_reset_that_fails_leaves_an_engine_that_goes_on() -> None:
    """Its EngineCoreProc._invoke_utility_method answers whoever called with what was raised."""
    found = seen("0.33.0", "two resets at once")
    assert about_offload(found) == {RESET_FAILS}
    assert found.text.index("reset fails in") < found.text.index("r2 [0, 8)") < found.text.index("r2 [8, 9)")
    assert found.judged["REF.drained"] > 0


@pytest.mark.parametrize("release", ["0.26.0", "0.33.0"])
@pytest.mark.parametrize("name", ["reset before a store begins", "reset under a step in flight"])
def test_what_a_reset_gave_up_need_not_be_what_it_was(release: str, name: str) -> None:
    """Its keys are forgotten and its end is passed over, so nobody comes upon what it brings."""
    found = seen(release, name)
    assert about_offload(found) == set(), found.text
    if name == "reset under a step in flight":
        assert found.judged["EXT.offload-content"] > 0, "what is chosen anew is judged"


def test_up_to_025_a_store_is_due_with_the_step_after_that_which_chose_it() -> None:
    """r2 shares what r1 computes in the same step, so that r1's store is to be waited for, and is not submitted yet."""
    assert "EXT.offload-content" not in seen("0.22.1", "shared in its step").ids()


def test_what_is_offloaded_is_announced_in_blocks_of_its_group() -> None:
    here = replace(PLAYS["announced"], config=replace(PLAYS["announced"].config, connector="none"))
    for release in ("0.28.0", "0.33.0"):
        alone = play(release, {"announced": here})["announced"].judged["EVENT.stored-well-formed"]
        found = seen(release, "announced")
        assert "EVENT.stored-well-formed" not in found.ids()
        assert found.judged["EVENT.stored-well-formed"] == alone + 1, "a window's blocks are offloaded without a word"


@pytest.mark.parametrize(
    ("release", "wrong"), [("0.28.0", {4: "null block", 12: "columns of drafts"}), ("0.29.0", {}), ("0.33.0", {})]
)
def test_the_mooncake_store_is_given_the_blocks_of_its_recurrent_states(
    inside: Callable[..., Any], release: str, wrong: dict[int, str]
) -> None:
    """Up to 0.28 it finds them by their position in what it heard of the table: r1 runs [0, 8) and [8, 16)."""
    stored = inside(release, MOONCAKE, release, first=True)
    assert {length for length, _, holds in stored if not holds} == set(wrong)
    assert {length for length, _, holds in stored if holds} == {8, 16}
    assert {length for length, block, _ in stored if block == 0} == {4} & set(wrong)


@pytest.mark.parametrize("release", ["0.29.0", "0.33.0"])
def test_boundaries_are_handed_over_with_the_blocks_that_hold_them(release: str) -> None:
    found = seen(release, "handed over")
    assert about_offload(found) == set()
    assert found.judged["EXT.offload-content"] > 1


SPOIL = {
    "a wrong block is handed over": (
        "handed over",
        """
from kvproof.impl.vllm import offloads_watch
offers = offloads_watch._offers
offloads_watch._offers = lambda output: [(r, g, b + 1, n) for r, g, b, n in offers(output)]
""",
        "EXT.offload-content",
    ),
    "the lookup adds a block": (
        "round trip",
        """
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler as scheduler
lookup = scheduler._lookup
scheduler._lookup = lambda self, *rest: (lookup(self, *rest) or 0) + 4
""",
        "EXT.offload-offers",
    ),
    "the lookup forgets a block": (
        "round trip",
        """
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler as scheduler
lookup = scheduler._lookup
scheduler._lookup = lambda self, *rest: max(0, (lookup(self, *rest) or 0) - 4)
""",
        "EXT.offload-serves",
    ),
    "a reset does not pass over what it gave up": (
        "reset under a step in flight",
        """
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler as scheduler
scheduler._stale_job_threshold = property(lambda self: 0, lambda self, number: None)
""",
        "EXT.offload-content",
    ),
}


@pytest.mark.parametrize("planted", SPOIL)
def test_a_fault_planted_in_a_release_is_found(planted: str) -> None:
    name, spoil, invariant = SPOIL[planted]
    assert invariant in seen("0.33.0", name, spoil).ids()


@pytest.mark.parametrize(("release", "by_recurrent_block"), [("0.26.0", False), ("0.31.0", False), ("0.32.0", True)])
def test_the_column_of_a_resumed_state_is_counted_in_recurrent_blocks(
    inside: Callable[..., Any], release: str, by_recurrent_block: bool
) -> None:
    """Up to 0.31 the V2 worker divides by the configured block: another column wherever the two differ."""
    for configured, recurrent, computed, column in inside(release, COLUMNS, first=True):
        wanted = (computed - 1) // recurrent
        assert (column == wanted) is (by_recurrent_block or configured == recurrent)


ASK = """
import sys
from kvproof import subjects
from kvproof.spec.config import Config, ConfigError, Group
subject = subjects.open_subject(subjects.parse("vllm==" + sys.argv[1]), lambda line: None)
for other in (Group("mamba", 4), Group("chunked", 4, 8)):
    try:
        subject.startup_limit(Config((Group("full", 4), other), 9, 4, 8, retention=None, connector="offload"))
        print("starts")
    except ConfigError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("release", "answers"),
    [
        ("0.20.0", ["its offloading connector is driven from 0.22 on"] * 2),
        ("0.23.0", ["starts", "its offloading connector refuses chunked local attention"]),
        ("0.28.0", ["starts", "its offloading connector refuses chunked local attention"]),
    ],
)
def test_what_a_release_does_not_offload_is_refused_before_its_smallest_pool_is_asked_for(
    release: str, answers: list[str]
) -> None:
    done = insiders.run(release, ASK, release)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()[-2:]
    assert all(answer in line for answer, line in zip(answers, said, strict=True)), done.stdout
