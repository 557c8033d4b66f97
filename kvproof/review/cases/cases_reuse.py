"""Rules about what earlier requests have promised. Each on a sound case, and its mutants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvproof.review.cases.calls import LOOKUP, Mutant, Rule, cut_config, seen
from kvproof.review.cases.fakeview import FULL, MAMBA
from kvproof.spec.events import Observation, Promised


def _promised(tokens: int, resend: bool, lacking: str = "", group: int = -1, **more: Any) -> Observation:
    """The lookup answers 20 of 22 tokens."""
    found = Promised(tokens, "r1", resend, lacking, group)
    observation = seen(LOOKUP, promised=found)
    return cut_config(observation, replace(observation.view.config, **more)) if more else observation


REUSE = (
    Rule(
        "REUSE.resend",
        lambda: _promised(20, True),
        (
            Mutant(
                lambda: _promised(21, True, "boundary-state-not-kept", MAMBA),
                "boundary-state-not-kept",
                {"request": "r2", "group": MAMBA},
                ("22 tokens of r1 again", "hit 21 of 22", "hits 20", "mamba group 2"),
            ),
            Mutant(
                lambda: _promised(21, True, "lookup-passes-over", eagle=True, connector="sync"),
                "lookup-passes-over-with-drafter-with-store",
                {"request": "r2"},
                ("every group has what that takes",),
            ),
        ),
        right="The lookup answers at least what is promised. In the sound case that is 20: r1 left its last state "
        "there.",
    ),
    Rule(
        "REUSE.sibling",
        lambda: _promised(16, False),
        (
            Mutant(
                lambda: _promised(21, False, "full-not-kept", FULL),
                "full-not-kept",
                {"request": "r2", "group": FULL},
                ("shares a prefix with r1", "full group 0"),
            ),
        ),
        right="The lookup answers at least what is promised. In the sound case that is 16, the last boundary that both "
        "share, and it answers 20.",
    ),
)
