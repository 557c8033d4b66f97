"""What real releases announce, count and promise at start-up: known faults show, planted ones too, and no others."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvproof.impl.vllm.fetch import release_tree
from kvproof.spec.config import Config, Group
from kvproof.spec.scenario import Action, Scenario

sys.path.insert(0, str(Path(__file__).parent))
import insiders
from releaseplays import play

sys.path.pop(0)

pytestmark = [pytest.mark.release, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("told_program.py")
COUNTS_NULL, RESERVES_NULL, NEWEST = "0.28.0", "0.29.0", "0.33.0"
OLD = ("REF.null-count", "null-count-negative")
"""Known up to 0.32, and about something else."""


@functools.cache
def told(release: str) -> dict[str, Any]:
    done = insiders.run(release, PROGRAM, release)
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def shown(release: str, name: str) -> set[tuple[str, str]]:
    return {(invariant, cause) for invariant, cause in told(release)[name]["shown"]} - {OLD}


def judged(release: str, name: str, invariant: str) -> int:
    return int(told(release)[name]["evaluations"].get(invariant, 0))


@pytest.mark.parametrize("release", [COUNTS_NULL, NEWEST])
def test_a_sparse_group_announces_tokens_that_its_hashes_do_not_cover(release: str) -> None:
    assert shown(release, "sparse") == {("EVENT.stored-well-formed", "mamba-tokens-of-other-blocks")}


@pytest.mark.parametrize("release", [COUNTS_NULL, NEWEST])
def test_replaying_the_events_of_full_attention_yields_its_keys(release: str) -> None:
    assert shown(release, "evicting") == set()
    for invariant in ("EVENT.replays", "EVENT.stored-well-formed", "EVENT.removed-is-gone", "EVENT.counters"):
        assert judged(release, "evicting", invariant) > 4, invariant


def test_one_of_two_copies_goes_and_the_key_is_announced_as_removed() -> None:
    assert shown(NEWEST, "twice") == {("EVENT.removed-is-gone", "removed-while-carried")}


def test_a_block_that_another_token_follows_is_no_replacement_where_keys_look_ahead() -> None:
    assert shown(NEWEST, "ahead") == set()
    assert judged(NEWEST, "ahead", "REUSE.sibling") > 0


@pytest.mark.parametrize(
    ("planted", "invariant", "cause"),
    [
        ("says nothing of what goes", "EVENT.replays", "removal-not-announced"),
        ("says half of what comes", "EVENT.replays", "key-not-announced"),
        ("counts more hits", "EVENT.counters", "lookups-in-the-cache-hits-beyond-queries"),
        ("counts a part twice", "EVENT.counters", "prompt-local-negative"),
    ],
)
def test_a_planted_fault_is_seen(planted: str, invariant: str, cause: str) -> None:
    assert shown(NEWEST, planted) == {(invariant, cause)}


def test_the_null_block_was_counted_as_usable_at_start_up_until_029() -> None:
    starved = {("ADMIT.startup", "lone-request-starves")}
    assert shown(COUNTS_NULL, "null counted") == starved
    assert told(COUNTS_NULL)["limit"] == {"blocks": 42}
    for release in (RESERVES_NULL, NEWEST):
        assert shown(release, "null counted") == set()
        assert told(release)["limit"] == {"blocks": 43}


@pytest.mark.parametrize("release", [COUNTS_NULL, RESERVES_NULL, NEWEST])
def test_what_fits_the_accepted_pool_runs_to_its_end(release: str) -> None:
    assert shown(release, "fits") == set()
    assert judged(release, "fits", "ADMIT.startup") == 1


def test_a_hit_inside_a_block_takes_more_than_the_accepted_pool_has() -> None:
    assert shown(NEWEST, "copies") == {("ADMIT.startup", "lone-request-starves-with-partial-hit")}


PREEMPTED = Scenario(
    Config((Group("full", 4),), num_blocks=7, hash_unit=4, step_tokens=5, max_running=2, retention=None),
    (
        Action("submit", "r1", length=8, max_tokens=4),
        Action("submit", "r2", length=16, max_tokens=1),
        Action("step", times=7),
    ),
)
"""The second request loses its blocks in the midst of its prompt, and finds two of them in the cache again."""


@pytest.mark.parametrize(("release", "counted"), [("0.25.1", True), ("0.26.0", False)])
def test_what_a_request_had_computed_itself_counted_as_cached_until_025(release: str, counted: bool) -> None:
    found = play(release, {"it": PREEMPTED})["it"]
    assert (("EVENT.counters", "prompt-cached-beyond-first-hit") in found.broken) is counted
    assert "r2 resumes at 8 local tokens" in found.text
    assert found.judged["EVENT.counters"] > 1


def test_a_checkout_that_was_not_built_is_driven_as_the_newest_release(tmp_path: Path) -> None:
    """It calls itself "dev", which is no version: taken for the oldest, it would not be given checkpoints at all."""
    (tmp_path / "vllm").mkdir()
    for part in (release_tree(NEWEST) / "vllm").iterdir():
        if part.name != "_version.py":
            (tmp_path / "vllm" / part.name).symlink_to(part)
    scenario = Path(__file__).parent.parent / "findings" / "slot-key-content-full-key-stale.json"
    command = [sys.executable, "-P", "-m", "kvproof", "replay", str(scenario), "--on", f"vllm@{tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "! SLOT.key-content (full-key-stale)" in done.stdout
