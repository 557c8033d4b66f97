"""A model that computes nothing: for runs that judge the bookkeeping alone, where floats would only cost time."""

from __future__ import annotations

from collections.abc import Sequence

from kvproof.impl.reference.batch import Load, Row
from kvproof.impl.reference.memory import Memory
from kvproof.spec.tracer import LENGTH_BITS

FIRST_OUTPUT = 1_000_000_000
OUTPUTS = 65_521
"""Outputs lie above every id that a scenario's prompts use; a prime number of them, so that prefixes spread evenly."""


class NullModel:
    """The next token is a function of the whole prefix, as a real model's is, read off the row's tracers."""

    def words(self, kind: str, block_size: int) -> int:
        return 0

    def forward(self, rows: Sequence[Row], memory: Memory) -> list[list[int]]:
        answers = []
        for row in rows:
            count = len(row.tokens)
            last = row.states[count + 1 - row.outputs : count + 1]
            answers.append([FIRST_OUTPUT + (state >> LENGTH_BITS) % OUTPUTS for state in last])
        return answers

    def fill(self, load: Load, memory: Memory) -> None:
        """Nothing to write: a block has no words."""
