"""Scenarios written by hand: three of faults that releases shipped, and others for what an engine may be made of."""

from __future__ import annotations

from dataclasses import replace

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

HOST = Scenario(
    Config(
        (Group("full", 8), Group("window", 8, window=16), Group("mamba", 16)),
        40,
        8,
        16,
        connector="offload",
        load_steps=2,
        cache_events=True,
    ),
    (
        Action("submit", "a", length=60, max_tokens=3),
        Action("step", times=8),
        Action("reset"),
        Action("submit", "b", base="a", shared=60, length=80, max_tokens=2),
        Action("step", times=8),
    ),
)
"""What a left in host memory comes back for b."""

FLIGHT = Scenario(
    Config(
        (Group("full", 8), Group("mamba", 8)),
        40,
        8,
        16,
        speculative=2,
        connector="async",
        load_steps=2,
        async_scheduling=True,
    ),
    (
        Action("submit", "a", length=20, max_tokens=12, external=8),
        Action("step", times=5, accept=(1,)),
        Action("submit", "b", base="a", shared=20, length=30, max_tokens=9, external=24),
        Action("step", times=4),
        Action("finish", "a"),
        Action("step", times=9),
    ),
)
"""Two steps in flight, with drafts that stay on the device, and loads."""

IMAGES = Scenario(
    Config((Group("full", 8), Group("mamba", 8)), 40, 8, 16, image_tokens=6),
    (
        Action("submit", "a", length=40, max_tokens=2, images=(4, 8, 20)),
        Action("step", times=6),
        Action("submit", "b", base="a", shared=24, length=48, max_tokens=2, images=(12, 30)),
        Action("step", times=6),
    ),
)
"""Of a's images the second overlaps the first; b has the one that lies in what they share, and one of its own."""

UNITS = Scenario(
    Config(
        (Group("full", 8), Group("mamba", 8)),
        20,
        4,
        16,
        speculative=1,
        checkpoint_blocks=1,
        checkpoint_alignment=4,
        connector="async",
        offers="unit",
    ),
    (Action("submit", "a", length=23, max_tokens=1, external=12), Action("step", times=6)),
)
"""A load that ends inside a block."""

SHORT = Scenario(
    Config((Group("full", 4),), 12, 4, 5, max_running=4, connector="sync"),
    (Action("submit", "a", length=14, max_tokens=3, external=8, missing=1), Action("step", times=8)),
)
"""A synchronous load that does not bring all that was promised."""

SHORT_IN_FLIGHT = replace(SHORT, config=replace(SHORT.config, async_scheduling=True))
