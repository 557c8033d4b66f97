"""Asynchronous loads in a small pool of the reference engine: none begins that would keep others from ever starting."""

from __future__ import annotations

from dataclasses import replace

from kvproof.impl.reference.subject import ReferenceSubject
from kvproof.models.stateful.replay import Replay, replay
from kvproof.spec.config import Config, Group
from kvproof.spec.scenario import Action, Scenario

PAIR = Config((Group("full", 4), Group("mamba", 4)), 8, hash_unit=4, step_tokens=16, max_model_len=64,
              connector="async")  # fmt: skip


def played(config: Config, *actions: Action) -> Replay:
    found = replay(ReferenceSubject(), Scenario(config, actions))
    assert not found.error
    assert found.evaluations["ADMIT.refused-though-fits"]
    return found


def test_a_load_begins_only_where_it_leaves_room_for_what_is_under_way() -> None:
    """Two loads would fit, but then there is no room for the token that either has yet to compute."""
    found = played(
        PAIR,
        Action("submit", "a", length=9, external=8, max_tokens=1),
        Action("submit", "b", length=9, external=8, max_tokens=1),
        Action("step", times=9),
    )
    assert found.violations == ()
    assert found.steps == 4
    assert "b is refused: 3 blocks asked, 4 free" in found.text
    assert "step 4: b [8, 9)" in found.text


def test_where_nothing_runs_a_loaded_request_gives_way_to_the_first_in_line() -> None:
    """a lost its blocks while b was loading, and its own load has to leave room for the rest of b."""
    found = played(
        replace(PAIR, num_blocks=9, full_sequence_must_fit=False),
        Action("submit", "a", length=9, external=8, max_tokens=3),
        Action("step", times=2),
        Action("submit", "b", length=20, external=4, max_tokens=1),
        Action("step"),
        Action("preempt", "a"),
        Action("evict", times=0),
        Action("step", times=20),
    )
    assert found.violations == ()
    assert found.steps == 7
    assert "step 5: a [8, 11); waiting b" in found.text
    assert "step 7: b [16, 20)" in found.text
