"""What lookups are promised: the rule with numbers, the promises as they are followed, and engines that keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvproof.impl.reference.engine import Engine
from kvproof.impl.reference.mutants import MUTANTS
from kvproof.impl.reference.subject import Driver, ReferenceSubject
from kvproof.models.stateful.replay import Replay, replay
from kvproof.spec.config import Config, Group
from kvproof.spec.events import Lookup, Observation, Promised
from kvproof.spec.machine.subject import MachineSubject
from kvproof.spec.promises import MOST_REMEMBERED, promising
from kvproof.spec.rules.reuse import Past, drops, interval_keeps, longest, matches, promised, replay_boundary
from kvproof.spec.scenario import Action, Scenario
from kvproof.spec.subject import Observer

FULL, DRAFTER, RECURRENT = Group("full", 4), Group("full", 4, drafter=True), Group("mamba", 8)
WINDOW = Group("window", 4, window=5, drafter=True)
PLAIN = Config((FULL, Group("mamba", 4)), num_blocks=60, hash_unit=4, step_tokens=32)
PARTIAL = replace(PLAIN, groups=(FULL, RECURRENT), hash_unit=2)
EAGLE = replace(PLAIN, groups=(DRAFTER, Group("mamba", 4)), speculative=1, eagle=True)


# -- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "prompt", "boundary"),
    [
        (PLAIN, 3, 0),
        (PLAIN, 4, 0),  # a token is left to compute
        (PLAIN, 5, 4),
        (PLAIN, 16, 12),
        (PLAIN, 17, 16),
        (PARTIAL, 16, 14),
        (PARTIAL, 15, 14),
        (EAGLE, 7, 0),
        (EAGLE, 8, 4),  # the drop leaves tokens to compute anyway
        (EAGLE, 15, 8),
        (EAGLE, 16, 12),
        (replace(EAGLE, groups=(DRAFTER, RECURRENT), hash_unit=2), 15, 12),
        # A window that is kept where whole blocks end can't serve the unit that a state may be kept at.
        (replace(EAGLE, groups=(FULL, RECURRENT, Group("window", 2, 3, True)), hash_unit=2), 25, 16),
        (replace(EAGLE, groups=(FULL, RECURRENT, Group("window", 2, 3, True)), hash_unit=2, retention=None), 25, 22),
    ],
)
def test_a_prompt_is_resumed_at_its_last_reusable_boundary(config: Config, prompt: int, boundary: int) -> None:
    assert replay_boundary(config.check(), prompt) == boundary
    assert promised(config, Past(prompt), prompt, prompt) == boundary
    assert promised(config, Past(prompt), prompt, prompt + 9) == boundary


def test_without_drafts_a_prompt_that_shares_the_boundary_is_enough() -> None:
    past = Past(18)
    assert [promised(PLAIN, past, shared, 40) for shared in (18, 17, 16, 15, 4)] == [16, 16, 16, 0, 0]
    assert promised(PLAIN, past, 16, 16) == 0, "all of it would be hit, and no token be left"


def test_with_drafts_only_who_shares_all_of_it_is_promised_where_it_would_be_resumed() -> None:
    assert [promised(EAGLE, Past(18), shared, 40) for shared in (18, 17)] == [12, 0]


def test_chunk_ends_count_as_far_as_the_retention_interval_keeps_them() -> None:
    past = Past(18, ends=[8, 14, 16, 18])
    for retention, found in ((0, 0), (None, 8), (4, 8), (8, 8), (16, 0)):
        config = replace(PLAIN, retention=retention).check()
        assert promised(config, past, 15, 40) == found, retention
    assert [interval_keeps(24, retention) for retention in (None, 0, 8, 16)] == [True, False, True, False]


def test_a_drafting_group_matches_what_it_drops() -> None:
    config = replace(EAGLE, retention=None)
    past = Past(18, ends=[8, 16, 18])
    assert [promised(config, past, shared, 40) for shared in (12, 11)] == [8, 0]
    # With the drafter in a window of its own, full attention drops nothing, and a block of the window is enough.
    apart = replace(config, groups=(Group("full", 8), RECURRENT, WINDOW), hash_unit=2).check()
    assert [drops(apart, group) for group in apart.groups] == [0, 0, 4]
    assert [promised(apart, past, shared, 40) for shared in (12, 11)] == [8, 0]
    # Where nobody is marked anybody may be the drafter: but no recurrent group.
    unmarked = replace(config, groups=(FULL, Group("mamba", 4)))
    assert [drops(unmarked, group) for group in unmarked.groups] == [4, 0]


def test_full_attention_has_the_last_unit_of_a_prompt() -> None:
    group = PARTIAL.groups[0]
    assert [matches(PARTIAL, group, 15, shared) for shared in (15, 14, 13, 12)] == [14, 14, 12, 12]
    assert matches(replace(PARTIAL, groups=(DRAFTER, RECURRENT), eagle=True, speculative=1), DRAFTER, 14, 14) == 14


def test_who_started_from_a_deeper_hit_promises_that_to_whoever_shares_all_of_it() -> None:
    apart = replace(EAGLE, groups=(Group("full", 8), RECURRENT, WINDOW), hash_unit=2).check()
    assert promised(apart, Past(21), 21, 40) == 8
    assert [promised(apart, Past(21, start=16), shared, 40) for shared in (21, 20)] == [16, 0]
    assert longest(PLAIN, [(Past(10), 10), (Past(18), 18), (Past(6), 6)], 40) == (16, 1)
    assert longest(PLAIN, [(Past(3), 3)], 40) == (0, -1)


# -- promises as they are followed ------------------------------------------------------------------------------------


def told(config: Config, *actions: Action) -> list[tuple[str, int, Promised | None]]:
    """What lookups on the reference engine answer, and what they were promised."""
    seen: list[tuple[str, int, Promised | None]] = []

    def listen(observation: Observation) -> None:
        event = observation.event
        if isinstance(event, Lookup):
            seen.append((event.request, event.tokens, event.promised))

    driver = ReferenceSubject().start(config.check(), promising(config, listen))
    for action in actions:
        driver.apply(action)
    return seen


def again(shared: int, length: int, name: str = "r2") -> tuple[Action, Action]:
    return Action("submit", name, "r1", shared, length, 1), Action("step")


FIRST = (Action("submit", "r1", length=16, max_tokens=1), Action("step", times=3))


def test_a_lookup_comes_with_what_it_was_promised() -> None:
    assert told(PLAIN, *FIRST, *again(16, 16))[-1] == ("r2", 12, Promised(12, "r1", resend=True))
    assert told(PLAIN, *FIRST, *again(16, 20))[-1] == ("r2", 12, Promised(12, "r1", resend=False))
    assert told(PLAIN, *FIRST, *again(3, 20))[-1] == ("r2", 0, None)


def test_nothing_is_promised_before_the_prompt_is_computed() -> None:
    slow = replace(PLAIN, step_tokens=8)
    assert told(slow, FIRST[0], Action("step"), *again(16, 16))[-1][2] is None


@pytest.mark.parametrize("loss", [Action("reset"), Action("evict", times=0)])
def test_what_is_lost_is_promised_to_nobody(loss: Action) -> None:
    assert told(PLAIN, *FIRST, loss, *again(16, 16))[-1] == ("r2", 0, None)
    # Nor later, when the loss was seen at the end of a step.
    assert told(PLAIN, *FIRST, loss, Action("step"), *again(16, 16))[-1] == ("r2", 0, None)


def test_what_others_lose_voids_no_promise() -> None:
    stranger = (Action("submit", "r0", length=9, max_tokens=1), Action("step", times=3))
    # What is evicted first is what was freed first: the stranger's.
    found = told(PLAIN, *stranger, *FIRST, Action("evict", times=55), *again(16, 16))
    assert found[-1] == ("r2", 12, Promised(12, "r1", resend=True))


def test_a_load_from_outside_promises_nothing() -> None:
    config = replace(PLAIN, connector="sync")
    loaded = (Action("submit", "r1", length=16, max_tokens=1, external=8), Action("step", times=4))
    assert told(config, *loaded, *again(16, 16))[-1][2] is None


def test_who_loses_its_blocks_is_promised_its_own_state() -> None:
    config = replace(PLAIN, step_tokens=20)
    actions = (Action("submit", "r1", length=16, max_tokens=9), Action("step", times=3), Action("preempt", "r1"))
    assert told(config, *actions, Action("step"))[-1][2] == Promised(12, "r1", resend=False)


def test_only_so_many_requests_are_remembered() -> None:
    config = replace(PLAIN, num_blocks=1200)
    others = [
        action
        for number in range(MOST_REMEMBERED + 1)
        for action in (Action("submit", f"o{number}", length=6, max_tokens=1), Action("step", times=2))
    ]
    assert told(config, *FIRST, *others[:-4], *again(16, 16))[-1][2] is not None
    assert told(config, *FIRST, *others, *again(16, 16))[-1][2] is None


# -- engines ----------------------------------------------------------------------------------------------------------


class Faulty(ReferenceSubject):
    """The reference engine with a mutant in it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        (self.mutant,) = (mutant for mutant in MUTANTS if mutant.id == name)

    def start(self, config: Config, observer: Observer | None) -> Driver:
        driver = super().start(config, observer)
        assert isinstance(driver.engine, Engine)
        self.mutant.plant(driver.engine)
        return driver


def scenario(config: Config, length: int, more: int = 0, steps: int = 8) -> Scenario:
    actions: Sequence[Action] = (
        Action("submit", "r1", length=length, max_tokens=1),
        Action("step", times=steps),
        *again(length, length + more),
    )
    return Scenario(config.check(), tuple(actions))


def broken(found: Replay) -> set[tuple[str, str]]:
    assert not found.error
    return {violation.identity for violation in found.violations}


@pytest.mark.parametrize("config", [PLAIN, PARTIAL, EAGLE, replace(EAGLE, groups=(DRAFTER, RECURRENT), hash_unit=2)])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_the_reference_engine_keeps_its_promises(config: Config, more: int) -> None:
    judged = 0
    for length in range(3, 35):
        found = replay(ReferenceSubject(), scenario(config, length, more))
        assert broken(found) == set(), length
        judged += found.evaluations.get("REUSE.sibling" if more else "REUSE.resend", 0)
    assert judged >= 20


def test_the_machine_keeps_its_promises() -> None:
    for config in (PLAIN, PARTIAL):
        for length in range(3, 35):
            found = replay(MachineSubject(), scenario(config, length))
            assert broken(found) == set(), length
            assert length < 6 or found.evaluations["REUSE.resend"]


def test_a_drafter_in_a_window_costs_a_block_of_the_window() -> None:
    """It used to cost a whole scheduler block."""
    config = replace(EAGLE, groups=(Group("full", 8), RECURRENT, WINDOW), hash_unit=2, retention=None, step_tokens=8)
    assert told(config.check(), Action("submit", "r1", length=13, max_tokens=1), Action("step", times=4),
                *again(13, 13))[-1][:2] == ("r2", 8)  # fmt: skip


@pytest.mark.parametrize(
    ("mutant", "config", "cause"),
    [
        ("no-state-is-left-for-a-resend", PLAIN, "no-chunk-ended-at-boundary"),
        ("no-state-is-left-for-a-resend", PARTIAL, "no-chunk-ended-at-tail"),
        ("drop-is-taken-twice", EAGLE, "lookup-passes-over-with-drafter"),
    ],
)
def test_a_mutant_that_nothing_else_sees_is_killed(mutant: str, config: Config, cause: str) -> None:
    found = replay(Faulty(mutant), scenario(config, 16))
    assert broken(found) == {("REUSE.resend", cause)}
    assert "has to hit" in found.violations[0].witness
