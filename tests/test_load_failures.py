"""External loads that fall short, on real schedulers: what each release's contract is, and who keeps it."""

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

HYBRID = (Group("full", 4), Group("mamba", 4))
UNPACKS = (
    "FLOW.no-crash",
    "scheduler._update_requests_with_invalid_blocks-ValueError-too-many-values-to-unpack-expected",
)
REFUSES = (
    "FLOW.no-crash",
    "scheduler._handle_invalid_blocks-RuntimeError-kv-connector-reported-block-level-load-failures",
)


def load(length: int, external: int, missing: int, out: int = 3, **config: object) -> Scenario:
    """One request whose store loses the last ``missing`` of ``external`` tokens, and a follow-up."""
    made = Config(groups=HYBRID, num_blocks=16, hash_unit=4, step_tokens=16, connector="async")
    return Scenario(
        replace(made, **config),  # type: ignore[arg-type]
        (
            Action("submit", "r1", length=length, max_tokens=out, external=external, missing=missing),
            Action("step", times=6),
            Action("submit", "r2", "r1", length, length + 4, 2),
            Action("step", times=4),
        ),
    )


ONE = {"groups": (Group("full", 4),)}
PLAYS = {
    "hybrid": load(13, 12, 4),
    "hybrid, by block": load(13, 12, 4, load_report="block"),
    "hybrid, sync": load(13, 12, 4, connector="sync"),
    "hybrid, fails": load(13, 12, 4, load_failure="fail"),
    "one group": load(13, 12, 4, **ONE),
    "one group, by block": load(13, 12, 4, load_report="block", **ONE),
    "one group, sync": load(13, 12, 4, connector="sync", **ONE),
    # What it computes on the load fills a block, whose key is there before anybody hears of the failure.
    "one group, sync, to a block's end": load(16, 12, 4, connector="sync", **ONE),
    "one group, all lost": load(13, 12, 12, load_report="block", **ONE),
    "one group, fails": load(13, 12, 4, load_failure="fail", **ONE),
    "kept": load(13, 12, 0),
    "kept in part of a block": load(15, 15, 0, offers="unit", groups=(Group("full", 8), Group("mamba", 8))),
}
PLAYS["left"] = Scenario(
    replace(PLAYS["kept"].config, load_steps=3),
    (
        Action("submit", "r1", length=13, max_tokens=3, external=12),
        Action("step"),
        Action("abort", "r1"),
        Action("step", times=4),
    ),
)


PLAYS["shared"] = Scenario(
    # r3 loads the last block of what r4 hits in the same step, and the store loses it: r4's row is void as well.
    Config(groups=(Group("full", 2),), num_blocks=7, hash_unit=2, step_tokens=2, max_running=2, connector="sync"),
    (
        Action("submit", "r1", length=8, max_tokens=1),
        Action("submit", "r2", length=3, max_tokens=3),
        Action("submit", "r3", "r1", 8, 9, 1, external=8, missing=2),
        Action("submit", "r4", "r1", 8, 9, 1),
        Action("step", times=12),
    ),
)

PLAYS["shared in the step of the load"] = Scenario(
    # r2 hits what r1 loads, and what r1 computes on it in the same step: both rows are void.
    Config(groups=(Group("full", 4),), num_blocks=12, hash_unit=4, step_tokens=24, connector="sync"),
    (
        Action("submit", "r1", length=9, max_tokens=1, external=4, missing=1),
        Action("submit", "r2", "r1", 8, 13, 1),
        Action("step", times=3),
    ),
)
PLAYS["shared in the step of the load, fails"] = replace(
    PLAYS["shared in the step of the load"],
    config=replace(PLAYS["shared in the step of the load"].config, load_failure="fail"),
)
PLAYS["shared behind a window"] = Scenario(
    # The block that r1 fails to load is behind r2's window: nobody takes r2 back.
    replace(PLAYS["shared in the step of the load"].config, groups=(Group("window", 4, window=2),)),
    (
        Action("submit", "r1", length=9, max_tokens=1, external=4, missing=1),
        Action("submit", "r2", "r1", 8, 9, 1),
        Action("step", times=2),
    ),
)


SHORT = Config(
    groups=(Group("full", 2),), num_blocks=12, hash_unit=2, step_tokens=16, max_running=4, connector="sync",
    async_scheduling=True,
)  # fmt: skip


def in_flight(length: int, out: int, **config: object) -> Scenario:
    """A synchronous load fails, and the next step is on its way when the scheduler hears of it."""
    first = Action("submit", "r1", length=length, max_tokens=out, external=4, missing=1)
    return Scenario(replace(SHORT, **config), (first, Action("step", times=12)))  # type: ignore[arg-type]


PLAYS["hybrid, sync, in part"] = load(14, 8, 1, connector="sync", load_report="block", step_tokens=4, max_running=4)
PLAYS["a chunk in flight"] = in_flight(16, 1, step_tokens=4)
PLAYS["an answer in flight"] = in_flight(5, 4)
PLAYS["an answer in flight, fails"] = in_flight(5, 4, load_failure="fail")
PLAYS["nothing in flight"] = in_flight(5, 1)


def admitted_in_flight(first: int, second: int, **config: object) -> Scenario:
    """r2 hits what r1 loads, in the next step, which is on its way when the scheduler hears that the load failed."""
    return Scenario(
        replace(SHORT, long_prefill_threshold=4, **config),  # type: ignore[arg-type]
        (
            Action("submit", "r1", length=first, max_tokens=1, external=4, missing=1),
            Action("step"),
            Action("submit", "r2", "r1", 4, second, 2),
            Action("step", times=8),
        ),
    )


PLAYS["a sharer in flight"] = admitted_in_flight(16, 5)
PLAYS["a sharer in flight, fails"] = admitted_in_flight(16, 5, load_failure="fail")
PLAYS["a sharer's block in flight, fails"] = admitted_in_flight(16, 7, load_failure="fail")
PLAYS["hybrid, a sharer in flight, fails"] = admitted_in_flight(
    5, 7, load_failure="fail", groups=(Group("full", 2), Group("mamba", 2)), num_blocks=20
)


HANDED_ON = Scenario(
    Config(
        groups=(Group("full", 4), Group("window", 2, window=1), Group("mamba", 16)),
        num_blocks=15, hash_unit=2, step_tokens=14, connector="sync",
    ),
    (
        Action("submit", "r1", length=16, max_tokens=2),
        Action("submit", "r2", length=17, max_tokens=1, external=16, missing=1),
        Action("step", times=3),
    ),
)  # fmt: skip
"""r2 loads into a block that r1's window has left behind. The worker's table of r1 still names it."""


def seen(release: str, name: str) -> Seen:
    return play(release, PLAYS)[name]


def shows_nothing(found: Seen) -> None:
    assert not found.broken - {("REF.null-count", "null-count-negative")}, found.text


@pytest.mark.parametrize(
    ("release", "reported", "by_block"),
    [("0.26.0", UNPACKS, UNPACKS), ("0.30.0", None, None), ("0.31.0", None, REFUSES), ("0.33.0", None, REFUSES)],
)
def test_several_groups_have_three_contracts(
    release: str, reported: tuple[str, str] | None, by_block: tuple[str, str] | None
) -> None:
    for name, crash in (("hybrid", reported), ("hybrid, by block", by_block)):
        found = seen(release, name)
        if crash is None:
            shows_nothing(found)
            assert "r1 [0, 12)" in found.text or "r1 [0, 13)" in found.text, found.text
            assert found.judged["EXT.counts-what-came"]
        else:
            assert crash in found.broken, found.text


@pytest.mark.parametrize("release", ["0.26.0", "0.30.0", "0.33.0"])
def test_one_group_goes_on_from_what_came(release: str) -> None:
    by_request = "r1 [0, 13)" if release >= "0.30" else "r1 [8, 13)"
    for name, goes_on in {
        "one group": by_request,
        "one group, by block": "r1 [8, 13)",
        "one group, sync": "r1 [8, 13)",
        "one group, sync, to a block's end": "r1 [8, 16)",
        "one group, all lost": "r1 [0, 13)",
    }.items():
        found = seen(release, name)
        shows_nothing(found)
        assert goes_on in found.text, found.text
        assert found.judged["EXT.counts-what-came"]


@pytest.mark.parametrize("release", ["0.26.0", "0.33.0"])
def test_who_shares_what_a_load_failed_to_bring_runs_again(release: str) -> None:
    found = seen(release, "shared")
    shows_nothing(found)
    assert found.text.count("r4 [8, 9)") == 2, found.text
    assert found.judged["SLOT.attention-read"]


@pytest.mark.parametrize("release", ["0.26.0", "0.33.0"])
def test_a_void_row_may_write_what_only_void_rows_share(release: str) -> None:
    found = seen(release, "shared in the step of the load")
    shows_nothing(found)
    assert "r1 [4, 9), r2 [8, 13)" in found.text, found.text
    assert "r1 [0, 9), r2 [8, 13)" in found.text, found.text
    assert found.judged["SLOT.exclusive-write"]


@pytest.mark.parametrize("release", ["0.26.0", "0.33.0"])
def test_a_row_that_counts_is_not_to_share_what_a_void_one_writes(release: str) -> None:
    found = seen(release, "shared behind a window")
    assert ("SLOT.exclusive-write", "attention-write-shared") in found.broken, found.text


@pytest.mark.parametrize("release", ["0.26.0", "0.33.0"])
def test_a_policy_to_fail_leaves_the_keys_of_who_shared_the_load(release: str) -> None:
    found = seen(release, "shared in the step of the load, fails")
    assert ("SLOT.key-content", "attention-key-missing") in found.broken, found.text


def test_who_has_left_a_block_behind_does_not_read_what_others_load_into_it() -> None:
    found = play("0.30.0", {"it": HANDED_ON})["it"]
    assert "brought 15 of 16 tokens" in found.text, found.text
    assert "r1 [14, 16)" in found.text, found.text
    assert not found.ids() & {"SLOT.running-state", "SLOT.attention-read"}, found.text
    assert found.judged["SLOT.running-state"]


def test_a_store_is_not_handed_what_it_failed_to_load_as_a_promise() -> None:
    """The store knows that it failed before it stores anything; whoever handed it over did not."""
    found = seen("0.30.0", "hybrid, sync, in part")
    assert "EXT.offload-content" not in found.ids(), found.text
    assert ("SLOT.null-write", "state-write-to-null") in found.broken, found.text


@pytest.mark.parametrize("release", ["0.26.0", "0.30.0", "0.33.0"])
def test_a_row_in_flight_counts_where_its_answer_is_taken(release: str) -> None:
    """The scheduler goes back to what came, so that a chunk on its way is computed again; but a token that is sampled
    on its way is taken, although nothing was there to sample it from."""
    found = seen(release, "an answer in flight")
    assert ("SLOT.attention-read", "attention-missing") in found.broken, found.text
    found = seen(release, "an answer in flight, fails")
    shows_nothing(found)
    assert "r1 [4, 5)" in found.text, found.text


@pytest.mark.parametrize("release", ["0.26.0", "0.30.0", "0.33.0"])
def test_who_fails_with_a_load_while_in_flight_is_void(release: str) -> None:
    """It is answered with an error, so that nobody takes what its row samples. Where it goes on, that is taken; and
    what its row wrote counts where the key is left on it."""
    found = seen(release, "a sharer in flight, fails")
    shows_nothing(found)
    assert "r2 [4, 5)" in found.text, found.text
    found = seen(release, "a sharer in flight")
    assert ("SLOT.attention-read", "attention-missing") in found.broken
    assert "r2 attends from 4 tokens to position 3" in found.text, found.text
    found = seen(release, "a sharer's block in flight, fails")
    assert ("SLOT.key-content", "attention-key-missing") in found.broken, found.text


def test_who_fails_with_a_load_while_in_flight_has_no_state_to_go_on_from() -> None:
    found = seen("0.30.0", "hybrid, a sharer in flight, fails")
    assert "r2 resumes at 4 local tokens" in found.text, found.text
    assert "r2 [4, " in found.text, found.text
    assert not [name for name in found.ids() if name.startswith("SLOT")], found.text


@pytest.mark.parametrize("release", ["0.26.0", "0.30.0", "0.33.0"])
def test_a_token_that_the_scheduler_waits_for_in_vain_is_no_crash_of_ours(release: str) -> None:
    """What was sampled on a load that failed is thrown away, but the scheduler goes on counting it."""
    beyond = ("FLOW.no-crash", "scheduler.schedule-MalformedOutput-more-tokens-than-there-are")
    assert beyond in seen(release, "nothing in flight").broken
    found = seen(release, "a chunk in flight")
    assert "r1 [8, 12)" in found.text, found.text
    shows_nothing(found)


@pytest.mark.parametrize("release", ["0.30.0", "0.33.0"])
def test_a_policy_to_fail_ends_the_request(release: str) -> None:
    for name in ("hybrid, fails", "one group, fails"):
        found = seen(release, name)
        shows_nothing(found)
        assert "r1 [" not in found.text, found.text


def test_a_synchronous_store_keeps_its_word_where_it_could_not_say_that_it_failed() -> None:
    found = seen("0.33.0", "hybrid, sync")
    assert not found.ids() & {"EXT.counts-what-came", "FLOW.no-crash"}, found.text
    assert "r1 [12, 13)" in found.text
    assert "brought" not in found.text
    assert UNPACKS in seen("0.26.0", "hybrid, sync").broken


def test_the_rest_of_a_block_that_a_load_filled_in_part_is_left_as_it_was() -> None:
    for release in ("0.26.0", "0.33.0"):
        found = seen(release, "kept in part of a block")
        assert ("EXT.rest-wiped", "rest-of-loaded-block-dirty") in found.broken, found.text


DEAF = """
from vllm.v1.core.sched.scheduler import Scheduler
Scheduler._handle_failed_recving = lambda self, failed: set()
"""
WIPES = """
from kvproof.impl.vllm import connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
KVConnectorBase_V1.get_loaded_kv_cache_group_ids = lambda self, request: ()
"""
FREES = """
from vllm.v1.core.sched.scheduler import Scheduler
finish = Scheduler.finish_requests
def finish_requests(self, names, status):
    for name in [names] if isinstance(names, str) else list(names):
        self.kv_cache_manager.free(self.requests[name])
    return finish(self, names, status)
Scheduler.finish_requests = finish_requests
"""


@pytest.mark.parametrize(
    ("spoil", "name", "identity"),
    [
        (DEAF, "hybrid", ("EXT.counts-what-came", "counts-what-never-came")),
        (WIPES, "kept", ("EXT.zero-spares-load", "block-of-load-wiped")),
        (FREES, "left", ("EXT.in-flight-held", "block-of-load-in-flight-free")),
    ],
    ids=["deaf", "wipes", "frees"],
)
def test_a_scheduler_that_breaks_the_contract_is_caught(spoil: str, name: str, identity: tuple[str, str]) -> None:
    shows_nothing(seen("0.33.0", name))
    assert identity in play("0.33.0", {name: PLAYS[name]}, spoil)[name].broken
