"""The worlds that are explored, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvproof.models.explore.scope import Prompt, Scope
from kvproof.spec.config import Config, Group

_SMALL = Config(
    groups=(Group("full", 2), Group("mamba", 2)),
    num_blocks=7,
    hash_unit=1,
    step_tokens=4,
    max_running=2,
    max_model_len=8,
    retention=0,
)
"""One attention and one recurrent group, both of two tokens a block, with hash units of one: hits end inside blocks."""


def _small(**more: Any) -> Config:
    return replace(_SMALL, **more)


SCOPES: dict[str, Scope] = {
    scope.name: scope
    for scope in (
        # Two requests, one of whose prompts begins like the other's.
        Scope("tiny", _small(num_blocks=8, step_tokens=3), (Prompt(2), Prompt(3, 0, 2))),
        # Prefills that don't fit into one step together.
        Scope("prefills", _small(num_blocks=8, step_tokens=3), (Prompt(4), Prompt(5, 0, 1))),
        # Blocks of four units: somebody may resume inside one that another has just taken over. Nobody interferes, and
        # no room is asked for whole sequences, so that this world stays small.
        Scope("tails", _small(num_blocks=9, groups=(Group("full", 4), Group("mamba", 4)), step_tokens=8,
                              max_model_len=12, full_sequence_must_fit=False),
              (Prompt(2), Prompt(9, 0, 1)), moves=frozenset()),
        # Each step may verify a draft, and every block's end is keyed.
        Scope("drafts", _small(num_blocks=10, speculative=1, retention=None), (Prompt(2), Prompt(3, 0, 2)), outputs=3),
        # An external store that delivers what it offers, two steps later; a hit inside a block is cut for its sake.
        Scope("store", _small(num_blocks=10, connector="async", load_steps=2), (Prompt(2), Prompt(4, 0, 1, store=4))),
        # The same, but what it brings is there within the step.
        Scope("at-once", _small(num_blocks=9, connector="sync"), (Prompt(3, store=2), Prompt(3, 0, 2))),
        # All of it in six blocks, so that no request is sure to fit: drafts, and a store that may lose what it
        # promised; preemption, aborts and evictions as everywhere. Requests put out enough to go on from a draft that
        # was accepted.
        Scope("acceptance", _small(speculative=1, connector="async", load_steps=2),
              (Prompt(2), Prompt(4, 0, 1, store=4), Prompt(3, 0, 2, store=2, missing=1)), outputs=4),
    )
}  # fmt: skip
