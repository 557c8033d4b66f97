"""Real schedulers that get nowhere: each way is seen on a release that goes it, and gone on one that doesn't."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvproof.spec.config import Config, Group
from kvproof.spec.scenario import Action, Scenario

sys.path.insert(0, str(Path(__file__).parent))
from releaseplays import play

sys.path.pop(0)

pytestmark = [pytest.mark.release, pytest.mark.slow]

HOLDERS = ("ADMIT.stall", "waiting-request-starves-behind-idle-holders")
ALONE = ("ADMIT.stall", "waiting-request-starves-in-idle-pool")
RUNNING = ("ADMIT.stall", "running-request-starves-in-idle-pool")
PASSED = ("ADMIT.starved", "waiting-request-passed-over")

ATTENTION = (Group("full", 4),)
HYBRID = (Group("full", 8), Group("mamba", 8))
ASKED = ("asked again after another", "asked again for long")


def submit(name: str, length: int, out: int = 1, **more: object) -> Action:
    return Action("submit", name, length=length, max_tokens=out, **more)  # type: ignore[arg-type]


PLAYS = {
    # PR 57104: two finished loads of 4 and 3 blocks fill a pool of 7, and each needs one more for its drafts.
    "exact fit": Scenario(
        Config(
            groups=(Group("full", 4, drafter=True),),
            num_blocks=8,
            hash_unit=4,
            step_tokens=16,
            speculative=1,
            eagle=True,
            connector="async",
            load_steps=2,
            offers="prompt",
        ),
        (submit("a", 16, 4, external=16), submit("b", 12, 4, external=12), Action("step", times=8)),
    ),
    # PR 45406: who goes first does not fit beside the blocks of a load that is done, and nobody looks behind it.
    "head of line": Scenario(
        Config(
            groups=ATTENTION,
            num_blocks=8,
            hash_unit=4,
            step_tokens=32,
            connector="async",
            load_steps=2,
            policy="priority",
        ),
        (
            submit("low", 13, 2, external=12, priority=1),
            Action("step"),
            submit("high", 24),
            Action("step", times=8),
        ),
    ),
    # PR 51603: the encoder has room for one of two images, the chunk is cut before the second, and then to a block: 0.
    "two images": Scenario(
        Config(groups=HYBRID, num_blocks=20, hash_unit=8, step_tokens=8, image_tokens=6),
        (submit("r", 24, images=(0, 6)), Action("step", times=8)),
    ),
    # What else than the store is waited for shows between its answers.
    "two images, asked again": Scenario(
        Config(
            groups=HYBRID, num_blocks=20, hash_unit=8, step_tokens=8, image_tokens=6, connector="async", offer_delay=2
        ),
        (submit("r", 24, images=(0, 6)), Action("step", times=14)),
    ),
    "two images later": Scenario(
        Config(groups=HYBRID, num_blocks=20, hash_unit=8, step_tokens=11, image_tokens=6),
        (submit("r", 40, images=(8, 14)), Action("step", times=8)),
    ),
    # Issue 45414: others take so many tokens of each step that less than a block is left over.
    "less than a block": Scenario(
        Config(groups=HYBRID, num_blocks=100, hash_unit=8, step_tokens=10),
        (
            *(submit(f"d{i}", 1, 120) for i in range(3)),
            Action("step", times=2),
            submit("long", 40),
            Action("step", times=60),
        ),
    ),
    # The same for a prompt of less than two blocks, which was let in up to 0.26 (and its state kept at the wrong key).
    "short prompt": Scenario(
        Config(
            groups=(Group("full", 8, drafter=True), Group("mamba", 8)),
            num_blocks=100,
            hash_unit=8,
            step_tokens=10,
            speculative=1,
            eagle=True,
        ),
        (
            *(submit(f"d{i}", 1, 120) for i in range(2)),
            Action("step", times=3),
            submit("short", 12),
            Action("step", times=60),
        ),
    ),
    # Nothing wrong: a client leaves while the store looks for what it holds, and the next one waits for that as well.
    "asked again after another": Scenario(
        Config(groups=ATTENTION, num_blocks=9, hash_unit=4, step_tokens=8, connector="async", offer_delay=2),
        (submit("gone", 4), Action("step"), Action("abort", "gone"), submit("next", 4), Action("step", times=4)),
    ),
    "asked again for long": Scenario(
        Config(groups=ATTENTION, num_blocks=9, hash_unit=4, step_tokens=8, connector="async", offer_delay=9),
        (submit("r", 4), Action("step", times=12)),
    ),
    # Nothing wrong: as many tokens are left over as a block has, or the newcomer waits for blocks or for a place.
    "room for a block": Scenario(
        Config(groups=HYBRID, num_blocks=100, hash_unit=8, step_tokens=11),
        (
            *(submit(f"d{i}", 1, 120) for i in range(3)),
            Action("step", times=2),
            submit("long", 40),
            Action("step", times=60),
        ),
    ),
    "no place": Scenario(
        Config(groups=HYBRID, num_blocks=100, hash_unit=8, step_tokens=11, max_running=3),
        (
            *(submit(f"d{i}", 1, 120) for i in range(3)),
            Action("step", times=2),
            submit("long", 40),
            Action("step", times=60),
        ),
    ),
    "no blocks": Scenario(
        Config(groups=HYBRID, num_blocks=31, hash_unit=8, step_tokens=24, full_sequence_must_fit=True),
        (
            submit("d", 8, 150),
            Action("step", times=2),
            submit("long", 184),
            Action("step", times=60),
        ),
    ),
}


@pytest.mark.parametrize(
    ("name", "identity", "faulty", "fixed"),
    [
        ("exact fit", HOLDERS, "0.26.0", "0.33.0"),
        ("head of line", HOLDERS, "0.26.0", "0.33.0"),
        ("two images", ALONE, "0.27.0", "0.28.0"),
        ("two images, asked again", ALONE, "0.27.0", "0.28.0"),
        ("two images later", RUNNING, "0.27.0", "0.28.0"),
        ("short prompt", PASSED, "0.27.0", "0.26.0"),
        ("less than a block", PASSED, "0.26.0", ""),
        ("less than a block", PASSED, "0.33.0", ""),
    ],
)
def test_getting_nowhere_is_seen_where_it_happens(
    name: str, identity: tuple[str, str], faulty: str, fixed: str
) -> None:
    assert identity in play(faulty, PLAYS)[name].broken
    if fixed:
        healthy = play(fixed, PLAYS)[name]
        assert not healthy.ids() & {"ADMIT.stall", "ADMIT.starved"}, healthy.text
        assert healthy.judged["ADMIT.stall"]
        assert healthy.judged["ADMIT.starved"]


@pytest.mark.parametrize("name", ["room for a block", "no place", "no blocks", *ASKED])
def test_who_waits_for_something_is_not_starved(name: str) -> None:
    for release in ("0.27.0", "0.33.0"):
        seen = play(release, PLAYS)[name]
        assert not seen.ids() & {"ADMIT.stall", "ADMIT.starved"}, seen.text


REPEATED = """
from vllm.v1.core.sched.scheduler import Scheduler
schedule = Scheduler.schedule
def loses_everything(self, *args, **kwargs):
    output = schedule(self, *args, **kwargs)
    for request in list(self.running):
        if request.request_id == "unlucky" and len(self.running) == 1 and request.num_computed_tokens >= 16:
            self.running.remove(request)
            self._preempt_request(request, 0.0)
            self.kv_cache_manager.reset_prefix_cache()
            output.num_scheduled_tokens.clear()
            output.scheduled_new_reqs.clear()
            output.total_num_scheduled_tokens = 0
    return output
Scheduler.schedule = loses_everything
"""


def test_running_again_and_again_in_vain_is_no_progress() -> None:
    plays = {
        "unlucky": Scenario(
            Config(groups=HYBRID, num_blocks=40, hash_unit=8, step_tokens=8),
            (submit("unlucky", 40), Action("step", times=150)),
        )
    }
    assert not play("0.33.0", plays)["unlucky"].broken
    found = play("0.33.0", plays, REPEATED)["unlucky"]
    assert "ADMIT.stall" in found.ids(), found.text
