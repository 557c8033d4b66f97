"""Three scenarios written by hand, each of a fault that a release shipped."""

from __future__ import annotations

from kvproof.spec.config import Config, Group
from kvproof.spec.scenario import Action, Scenario

EAGLE = Scenario(
    Config(
        (Group("full", 16, drafter=True), Group("mamba", 16)), 64, 16, 20, speculative=1, eagle=True, retention=None
    ),
    (
        Action("submit", "a", length=16, max_tokens=4),
        Action("submit", "b", length=20, max_tokens=4),
        Action("step", times=3),
    ),
)
"""Two prompts share a step of 20 tokens: the second one's first chunk ends inside a block (PR 51113)."""

TAIL = Scenario(
    Config(
        (Group("full", 64), Group("mamba", 64)), 10, 16, 512, retention=None, connector="async", divergent_hits=True
    ),
    (
        Action("submit", "a", length=214, max_tokens=1),
        Action("step", times=3),
        Action("submit", "c", length=100, max_tokens=1),
        Action("step", times=3),
        Action("submit", "b", base="a", shared=214, length=300, max_tokens=1, external=256),
        Action("step", times=3),
    ),
)
"""c takes the blocks of a's recurrent states, which are first in the free queue; b then hits a's attention blocks up to
the partial tail at 208, and the store offers more than the tail (PR 51468)."""

LONG = Scenario(
    Config(
        (Group("full", 64), Group("mamba", 64)),
        40,
        16,
        512,
        checkpoint_blocks=1,
        checkpoint_alignment=16,
        connector="async",
        max_model_len=4096,
    ),
    (Action("submit", "a", length=1600, max_tokens=4, external=128), Action("step", times=8)),
)
"""A request that holds loaded blocks and needs a checkpoint is charged for its whole length (PR 57050)."""
