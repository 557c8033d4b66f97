"""Real releases: hits that stay at zero are found where the fault is, and gone on a release without it.

One process per release, since a release is imported once. Four stand for all: the first without a fault is said beside
it where that is another.
"""

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

FULL, DRAFTER, RECURRENT = Group("full", 4), Group("full", 4, drafter=True), Group("mamba", 4)
PLAIN = Config((FULL, RECURRENT), num_blocks=40, hash_unit=4, step_tokens=32)
EAGLE = Config((DRAFTER, RECURRENT), num_blocks=40, hash_unit=4, step_tokens=32, speculative=1, eagle=True)
UNITS = Config((DRAFTER, Group("mamba", 8)), num_blocks=40, hash_unit=2, step_tokens=32, speculative=1, eagle=True)
APART = Config((Group("full", 8), Group("mamba", 8), Group("window", 4, window=5, drafter=True)), num_blocks=40,
               hash_unit=4, step_tokens=8, retention=None, speculative=1, eagle=True)  # fmt: skip


def again(config: Config, length: int, shared: int = 0, more: int = 0) -> Scenario:
    """A prompt is computed, and comes again: ``shared`` tokens of it (0: all), and ``more``."""
    shared = shared or length
    actions = (
        Action("submit", "r1", length=length, max_tokens=1),
        Action("step", times=8),
        Action("submit", "r2", "r1", shared, shared + more, 1),
        Action("step"),
    )
    return Scenario(config.check(), actions)


FAULTS = {
    # Latest-only retention keeps the state one block above where an EAGLE resend lands.
    "PR 53945": (again(EAGLE, 15), "0.28.0", "0.30.0", "REUSE.resend", "boundary-state-not-kept-with-drafter"),
    "PR 54713": (again(EAGLE, 15, more=4), "0.28.0", "0.30.0", "REUSE.sibling", "boundary-state-not-kept-with-drafter"),
    # A lookup is capped at all tokens but one before the drop, which leaves tokens anyway. Until 0.32.
    "PR 57180": (again(EAGLE, 16), "0.31.0", "0.33.0", "REUSE.resend", "lookup-passes-over-with-drafter"),
    # The chunk ends where the tail is with the drop, the key is looked for where it is without.
    "tail": (again(UNITS, 15), "0.30.0", "0.31.0", "REUSE.resend", "tail-state-not-kept-with-drafter"),
    # Where no group is recognised as the drafter's, all of them drop what they match. Until 0.29.
    "PR 57616": (again(APART, 20, 14, 6), "0.28.0", "0.30.0", "REUSE.sibling", "lookup-passes-over-with-drafter"),
    # A prompt that fills whole blocks runs as one chunk: its only state is one token above every lookup. Until 0.32.
    "issue 50235": (again(PLAIN, 16), "0.31.0", "0.33.0", "REUSE.resend", "no-chunk-ended-at-boundary"),
}

STORE = replace(EAGLE, connector="sync")
DENSE = replace(UNITS, connector="sync", hash_unit=1, retention=None, checkpoint_blocks=1, checkpoint_alignment=2)
OPEN = {
    # With one group the scan is still capped at all tokens but one before the drop.
    "one group": (
        again(replace(STORE, groups=(DRAFTER,)), 8),
        "lookup-of-one-group-passes-over-with-drafter-with-store",
    ),
    # What is matched of a window that is not filled yet is aligned before a block is dropped, and once more after it.
    "short of a window": (
        again(replace(STORE, groups=(Group("full", 8), Group("window", 4, window=12, drafter=True))), 19),
        "lookup-passes-over-short-of-a-window-with-drafter-with-store",
    ),
    # A checkpoint is exported at the last unit, the window is kept at the last block, and neither is kept at both.
    "window and checkpoint": (
        again(
            replace(
                STORE,
                groups=(FULL, Group("mamba", 8), Group("window", 2, window=3, drafter=True)),
                hash_unit=2,
                checkpoint_blocks=1,
                checkpoint_alignment=2,
            ),
            25,
        ),
        "no-chunk-ended-at-boundary-with-drafter-with-store",
    ),
    # Every chunk reserves a checkpoint, and one that does is not looked at for the prompt's tail.
    "dense checkpoints": (again(DENSE, 12), "tail-state-not-kept-with-drafter-with-store"),
    # The mask keeps no block for a window of one token, a lookup asks for one.
    "window of one token": (
        again(replace(PLAIN, groups=(FULL, Group("window", 4, window=1)), connector="none"), 9),
        "window-of-one-token",
    ),
}
"""What 0.33.0 still shows, by the scenario and the cause."""


def shown_on(release: str, name: str) -> tuple[set[tuple[str, str]], set[str]]:
    """What a scenario shows on ``release``: the REUSE violations, and which rules were judged."""
    seen = play(release, {name: (FAULTS | OPEN)[name][0]})[name]
    return {found for found in seen.broken if found[0].startswith("REUSE.")}, {i for i, n in seen.judged.items() if n}


@pytest.mark.parametrize("name", FAULTS)
def test_a_hit_that_collapses_is_found_and_gone_where_it_is_fixed(name: str) -> None:
    _, faulty, fixed, invariant, cause = FAULTS[name]
    assert shown_on(faulty, name)[0] == {(invariant, cause)}
    identities, judged = shown_on(fixed, name)
    assert identities == set()
    assert invariant in judged


def test_the_newest_release_shows_none_of_them() -> None:
    shown = {name: shown_on("0.33.0", name) for name in FAULTS}
    assert all(shown[name][0] == set() for name in FAULTS)
    assert all(fault[3] in shown[name][1] for name, fault in FAULTS.items())


@pytest.mark.parametrize("name", OPEN)
def test_what_is_open_in_0_33_is_told_apart(name: str) -> None:
    assert shown_on("0.33.0", name)[0] == {("REUSE.resend", OPEN[name][1])}
