"""Requests with images, for a scheduler without a model: placeholders in the prompt, and an encoder that only counts.

The scheduler's encoder budget and cache are its own, and so is the cap that they put on a chunk. What stands in is the
size of both, which a release reads off its multimodal processor: as many tokens as a step has, or as one image has
where that is more. The encoder itself is not run, and what it makes is not followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvproof.impl.vllm.drift import load
from kvproof.spec.config import Config
from kvproof.spec.tracer import State


def give_encoder(scheduler: Any, config: Config) -> None:
    """Make ``scheduler`` that of a model whose largest image takes ``config.image_tokens`` tokens (0: text only)."""
    if config.image_tokens:
        size = max(config.step_tokens, config.image_tokens)
        scheduler.max_num_encoder_input_tokens = size
        scheduler.encoder_cache_manager = type(scheduler.encoder_cache_manager)(cache_size=size)


def placed(config: Config, wanted: Sequence[int], inherited: Sequence[int], shared: int, length: int) -> list[int]:
    """Where images begin in a prompt of ``length`` tokens: those of the ``shared`` prefix, and from there on the
    ``wanted`` ones that fit, none overlapping another.
    """
    size, starts, free = config.image_tokens, [], 0
    for start in sorted([*(s for s in inherited if s + size <= shared), *(s for s in wanted if s >= shared)]):
        if size and start >= free and start + size <= length:
            starts.append(start)
            free = start + size
    return starts


def features(config: Config, starts: Sequence[int], states: Sequence[State]) -> list[Any]:
    """The release's features of these images. Equal prefixes have equal images."""
    inputs, size = load("vllm.multimodal.inputs"), config.image_tokens
    return [
        inputs.MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=f"image {states[start + size]}",
            mm_position=inputs.PlaceholderRange(offset=start, length=size),
        )
        for start in starts
    ]
