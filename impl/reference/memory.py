"""The device's memory: one pool of blocks for every group, and the tracers beside it.

A block is a row of float32 words, read as keys and values by an attention group and as a recurrent state by a recurrent
one: which, depends on who holds it. Beside each block lie its *marks*, integers moved by the very same copies: for
attention the prefix whose key and value lies at each position, for a recurrent block the prefix that its temporal state
(mark 0) and its convolution window (mark 1) stand for. ``GARBAGE`` marks what nobody wrote; the words under it are NaN,
so that a read of it can't go unnoticed in the floats either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from kvproof.spec.config import Config, ConfigError
from kvproof.spec.tracer import State

GARBAGE = -1
TEMPORAL, WINDOW = 0, 1

MOST_MARKS: Final = 1 << 27
"""The most marks of all blocks together: 1 GiB of them."""


class Memory:
    """``words`` is (blocks, float32 words a block), ``marks`` is (blocks, int64 marks a block), both on ``device``.

    Raises :class:`kvproof.spec.config.ConfigError` where there would be more than :data:`MOST_MARKS` marks.
    """

    def __init__(self, config: Config, words: int, device: torch.device) -> None:
        self.config = config
        self.device = device
        longest = max([2, *(g.block_size for g in config.groups if g.kind != "mamba")])
        if config.num_blocks * longest > MOST_MARKS:
            raise ConfigError(
                f"{config.num_blocks} blocks of up to {longest} tokens hold {config.num_blocks * longest} tokens: the "
                f"reference engine follows at most {MOST_MARKS}; set num_blocks to at most {MOST_MARKS // longest}"
                " or use smaller blocks"
            )
        self.words = torch.full((config.num_blocks, words), float("nan"), device=device)
        self.marks = torch.full((config.num_blocks, longest), GARBAGE, dtype=torch.int64, device=device)

    def clear(self, blocks: Sequence[int]) -> None:
        """Fresh blocks hold nothing: whatever was there must not be taken for content."""
        if blocks:
            self.marks[blocks] = GARBAGE
            if self.words.shape[1]:
                self.words[blocks] = float("nan")

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, target), as if all were read before any is written."""
        if pairs:
            sources, targets = [s for s, _ in pairs], [t for _, t in pairs]
            self.marks[targets] = self.marks[sources]
            if self.words.shape[1]:
                self.words[targets] = self.words[sources]

    # -- marks --------------------------------------------------------------------------------------------------------

    def mark_tokens(self, block: int, offset: int, states: Sequence[State]) -> None:
        """From ``offset`` on, the block now holds the keys and values of these prefixes."""
        self.marks[block, offset : offset + len(states)] = torch.tensor(states, device=self.device)

    def mark_state(self, block: int, temporal: State, window: State) -> None:
        """A recurrent block now holds these."""
        self.marks[block, :2] = torch.tensor((temporal, window), device=self.device)

    def tokens_at(self, block: int, block_size: int) -> list[int]:
        """The marks of an attention block, position by position."""
        return list(self.marks[block, :block_size].tolist())

    def state_at(self, block: int) -> tuple[int, int]:
        """The marks of a recurrent block: temporal state, convolution window."""
        temporal, window = self.marks[block, :2].tolist()
        return temporal, window
