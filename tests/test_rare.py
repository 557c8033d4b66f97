"""What few engines have and few users ask for, on real schedulers: it happens, and breaks nothing that is not."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvproof.models.stateful.strategies import Dice, draw_setup
from kvproof.spec.config import RARE, Config, Group
from kvproof.spec.scenario import Action, Scenario

sys.path.insert(0, str(Path(__file__).parent))
from releaseplays import Seen, play

sys.path.pop(0)

HYBRID = (Group("full", 4), Group("mamba", 8))
STORE = Config(groups=(Group("full", 4),), num_blocks=24, hash_unit=4, step_tokens=16, connector="async", load_steps=2)
FIRST = Action("submit", "a", length=17, max_tokens=3)
AGAIN = Action("submit", "b", "a", 17, 17, 3)
STEPS = Action("step", times=8)

FAULTS = {
    # Whose prompt's log probabilities are wanted was still given what a store holds (up to 0.30).
    "unread, store": {("HIT.limit", "store-read-for-unread")},
    # A block of outputs was stored when its last token was sampled, and not computed.
    "host memory cleared": {("EXT.offload-content", "chosen-attention-key-missing")},
}
"""What 0.26.0 does wrong."""

PLAYS = {
    "unread": Scenario(replace(STORE, connector="none", load_steps=1), (FIRST, STEPS, replace(AGAIN, unread=True))),
    "unread, store": Scenario(STORE, (replace(FIRST, external=16, unread=True), STEPS)),
    "asked again": Scenario(replace(STORE, offer_delay=2), (replace(FIRST, external=16), STEPS)),
    "sent away": Scenario(replace(STORE, send_steps=4), (FIRST, STEPS, AGAIN, STEPS)),
    "sent away, overlapped": Scenario(
        replace(STORE, send_steps=4, async_scheduling=True), (FIRST, STEPS, AGAIN, Action("step", times=2))
    ),
    "starts over": Scenario(
        Config(groups=HYBRID, num_blocks=24, hash_unit=4, step_tokens=16),
        (FIRST, Action("step", times=2), Action("reset", running=True), AGAIN, STEPS),
    ),
    "waits for a load": Scenario(
        STORE, (replace(FIRST, external=16), Action("step"), Action("reset", running=True), STEPS)
    ),
    "host memory cleared": Scenario(
        replace(STORE, connector="offload", offload_policy="arc", offload_outputs=True, offload_blocks=8),
        (FIRST, STEPS, Action("reset", store=True), AGAIN, STEPS),
    ),
    "watermark": Scenario(
        replace(STORE, connector="none", load_steps=1, watermark=2), (FIRST, AGAIN, Action("step", times=12))
    ),
}

READS_FOR_ALL = """
from vllm.v1.core.kv_cache_manager import KVCacheManager

plain = KVCacheManager.get_computed_blocks


def for_all(self, request, *args, **named):
    asked, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, False
    try:
        return plain(self, request, *args, **named)
    finally:
        request.skip_reading_prefix_cache = asked


KVCacheManager.get_computed_blocks = for_all
"""


def seen(release: str, name: str) -> Seen:
    return play(release, PLAYS)[name]


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.26.0", "0.33.0"])
@pytest.mark.parametrize("name", sorted(PLAYS))
def test_nothing_is_broken_by_it(release: str, name: str) -> None:
    known = FAULTS.get(name, set()) if release == "0.26.0" else set()
    found = seen(release, name)
    assert found.broken - {("REF.null-count", "null-count-negative")} == known, found.text


@pytest.mark.release
@pytest.mark.slow
def test_a_cache_that_is_read_for_everybody_is_seen() -> None:
    found = play("0.33.0", {"unread": PLAYS["unread"]}, READS_FOR_ALL)["unread"]
    assert found.broken == {("HIT.limit", "hit-beyond-limit-at-lookup")}, found.text


@pytest.mark.release
@pytest.mark.slow
def test_it_happens() -> None:
    for name, says in {
        "unread": "b [0, 16)",
        "starts over": "step 3: a [0, 16)",
    }.items():
        assert says in seen("0.33.0", name).text, seen("0.33.0", name).text


def test_all_of_it_is_drawn() -> None:
    rolls, drawn = random.Random(0), set()
    for _ in range(2000):
        config = draw_setup(Dice(rolls.randbytes(72))).config
        assert config.problem() is None, config
        drawn |= {name for name in RARE if getattr(config, name) != getattr(config.usual(), name)}
    assert drawn == set(RARE) - {"draft_modules"}
