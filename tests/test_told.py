"""What a cache announces and counts, and pools that are just large enough: the rules where the tables do not reach."""

from __future__ import annotations

import dataclasses

import pytest

from kvproof.invariants.catalogue import by_id
from kvproof.models.stateful.strategies import Dice, Menu, draw_setup
from kvproof.review.cases.calls import seen
from kvproof.review.cases.cases_told import INSIDE, LONE, LOOKUPS, STORED
from kvproof.review.cases.fakeview import STATES
from kvproof.spec.events import Counted, Lone, Stored


def test_a_key_inside_a_block_is_announced_by_the_unit() -> None:
    assert by_id("EVENT.stored-well-formed").predicate(seen(INSIDE)) == []
    assert by_id("EVENT.stored-well-formed").predicate(seen(INSIDE, offloaded=True)) == []


def test_the_last_unit_of_a_block_is_announced_by_the_cache_alone() -> None:
    last = dataclasses.replace(INSIDE, keys=(STATES[8],), parent=STATES[4], reached=(STATES[8],))
    assert by_id("EVENT.stored-well-formed").predicate(seen(last)) == []
    (found,) = by_id("EVENT.stored-well-formed").predicate(seen(last, offloaded=True)) or ()
    assert found.cause == "offloaded-mamba-block-size-of-another-group"


def test_an_event_that_names_no_group_may_be_of_any() -> None:
    wrong = Stored(-1, STORED.keys, STORED.parent, tokens=6, block_size=3, reached=())
    assert by_id("EVENT.stored-well-formed").predicate(seen(STORED, group=-1)) == []
    (found,) = by_id("EVENT.stored-well-formed").predicate(seen(wrong)) or ()
    assert found.cause == "some-block-size-of-another-group"


def test_more_hits_than_queries_are_counted_by_nobody() -> None:
    judge = by_id("EVENT.counters").predicate
    assert judge(seen(LOOKUPS)) == []
    (found,) = judge(seen(Counted("lookups in the cache", (("queries", 12), ("hits", 20))))) or ()
    assert found.cause == "lookups-in-the-cache-hits-beyond-queries"
    assert "hits 20" in found.witness


@pytest.mark.parametrize("change", [{"longest": 0}, {"longest": 19}], ids=["not promised", "too long"])
def test_who_was_promised_nothing_has_nothing_to_complain_of(change: dict[str, int]) -> None:
    starved: Lone = dataclasses.replace(LONE, finished=False, **change)
    assert by_id("ADMIT.startup").predicate(seen(starved)) is None


def test_a_pool_is_drawn_exactly_at_the_limit_that_the_subject_names() -> None:
    drawn = (draw_setup(Dice(bytes([seed * 7 % 256, seed % 256, *range(seed, seed + 46)]))) for seed in range(200))
    exact = [setup for setup in drawn if setup.pool == "exact"]
    assert 5 <= len(exact) <= 100
    for setup in exact:
        assert setup.at_limit(lambda config: 77).config.num_blocks == 77
        assert setup.at_limit(lambda config: 0) == setup
        longest = max(Menu(setup).prompts)
        assert setup.config.max_model_len - setup.config.scheduler_block - 1 <= longest < setup.config.max_model_len
    roomy = dataclasses.replace(exact[0], pool="roomy")
    assert roomy.at_limit(lambda config: 77) == roomy
