"""Small functions of our own, written as releases write theirs, for the executor's tests: right ones and planted wrong
ones. Not vLLM's code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvproof.models.smt.claim import tokens
from kvproof.models.smt.shipped import ShippedClaim
from kvproof.models.smt.shipped.claim import Inputs, Question
from kvproof.spec.logic import any_of


def round_down(end: Any, start: Any, block: Any) -> Any:
    """The last boundary at or before ``end``, if that is past ``start``, else ``end``."""
    aligned = end // block * block
    return aligned if aligned > start else end


def round_down_planted(end: Any, start: Any, block: Any) -> Any:
    """The fault: what starts in the first block is left as it is."""
    if start < block:
        return end
    return round_down(end, start, block)


def ceil_blocks(n: Any, block: Any) -> Any:
    return -(n // -block)


def ceil_blocks_planted(n: Any, block: Any) -> Any:
    """The fault: a whole number of blocks takes one more."""
    return n // block + 1


@dataclass(frozen=True)
class Toys:
    """What stands for a release: two functions."""

    rounding: Any = round_down
    ceiling: Any = ceil_blocks
    version: tuple[int, ...] = (0,)


def rounds(s: Inputs, release: Any) -> Question:
    """The answer is a boundary, or nothing in between was one."""
    grid = s.blocks_only()
    start, end = s.position("start", grid), s.position("end", grid)
    return Question(
        (("there is something between", start < end),),
        lambda: release.rounding(s.tokens(end), s.tokens(start), s.block(grid)),
        lambda answer: any_of(s.position_of(answer, grid).on_block(), end.floor_block() <= start),
        lambda answer: f"block {int(grid.unit)}, [{tokens(start)}, {tokens(end)}): {answer}",
        (end.block <= 3, grid.unit == 16),
    )


def counts(s: Inputs, release: Any) -> Question:
    """So many blocks, and not one more."""
    grid = s.blocks_only()
    n = s.position("n", grid)
    return Question(
        (),
        lambda: release.ceiling(s.tokens(n), s.block(grid)),
        lambda answer: s.number_of(answer) == n.blocks_up(),
        lambda answer: f"block {int(grid.unit)}, {tokens(n)} tokens: {answer}",
        (n.block <= 3, grid.unit == 16),
    )


def claim(ask: Any, **more: Any) -> ShippedClaim:
    return ShippedClaim("TOY.claim", "a toy", "it is right", "proved for all blocks", ask, **more)
