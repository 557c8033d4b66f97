"""What one step asks of the model: rows of tokens, where their cache lies, and where their states go.

A recurrent layer reads its state from one block and may save it, at any position of the chunk, into others. So a state
is never moved: a hit's state is read where it lies, a checkpoint is one more save, a draft's state one more still, and
accepting a draft is a change of name (which block is the running one), not a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvproof.impl.reference.memory import Memory
from kvproof.spec.tracer import State


@dataclass(frozen=True)
class Save:
    """The recurrent state after ``position`` tokens goes to ``blocks[g]`` for every recurrent group g (others: 0)."""

    position: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One request's part of a step: its ``tokens`` at positions ``start``, ``start`` + 1, …

    ``tables[g]`` are the blocks of attention group g, slot by slot (0 where the window has passed; recurrent groups:
    empty). ``state[g]`` is the block with recurrent group g's state after ``start`` tokens (0: start from nothing).
    ``saves`` are in order of their positions. ``outputs`` is for how many of the last positions a next token is wanted:
    0 inside a prefill, 1 at its end, 1 + drafts when drafts are verified. ``states`` are the tracers of the prefixes
    after ``start``, ``start`` + 1, … tokens.
    """

    request: str
    tokens: tuple[int, ...]
    start: int
    tables: tuple[tuple[int, ...], ...]
    state: tuple[int, ...]
    saves: tuple[Save, ...]
    outputs: int
    states: tuple[State, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Load:
    """What an external store brings: tokens ``start`` … ``end`` − 1 for attention, and the state after ``end`` tokens.

    ``tokens`` are the sequence's first ``end`` tokens. ``tables`` and ``state`` say where, as in :class:`Row`.
    """

    request: str
    tokens: tuple[int, ...]
    start: int
    end: int
    tables: tuple[tuple[int, ...], ...]
    state: tuple[int, ...]


class Model(Protocol):
    """What computes. It sees blocks and positions only; who shares what is no concern of its own."""

    def words(self, kind: str, block_size: int) -> int:
        """How many float32 words one block takes for a group of that kind (``full``, ``window`` or ``mamba``)."""

    def forward(self, rows: Sequence[Row], memory: Memory) -> list[list[int]]:
        """Run one step over all rows at once. Writes keys, values and saved states; returns, per row, the greedy next
        token after each of its last ``outputs`` positions."""

    def fill(self, load: Load, memory: Memory) -> None:
        """Write what an external store brings, computed without any cache."""
