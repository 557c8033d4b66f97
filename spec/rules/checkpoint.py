"""Which states of a prefill can be reused, and when a chunk can export one inside itself.

Where it comes from: exports and their validity are in releases from 0.29.0 (the start of the chunk was first required
to be aligned by PR 53212); from 0.32.0 the EAGLE drop is taken from the whole length instead of from length − 1
(PR 57180), and the position is counted in the units hits align to rather than in hash units; 0.33.0 adds the hash
lookahead.
"""

from __future__ import annotations

from kvproof.spec.logic import Int, Truth, all_of, any_of, negate
from kvproof.spec.radix import Position, choose, later


def checkpoint_position(
    end: Position, drop: Truth, grain_is_block: Truth, lookahead: Position | None = None
) -> Position:
    """The last position below ``end`` whose state a lookup of these ``end`` tokens can resume from; 0: none.

    A lookup must leave one token to compute (or ``lookahead`` ≥ 1 tokens, if the cache's hashes look ahead), and lands
    on a multiple of the grain: a hash unit, or a whole block. With EAGLE (``drop``) a lookup matches one grain more and
    drops it, which leaves tokens to compute anyway.
    """
    left = end.radix.one_token() if lookahead is None else later(lookahead, end.radix.one_token())
    proven = choose(drop, end, end.minus(left))
    grain = choose(grain_is_block, end.radix.boundary(1), end.radix.one_unit())
    floored = choose(grain_is_block, proven.floor_block(), proven.floor_unit())
    return choose(drop, floored.minus(grain), floored).at_least_zero()


def export_column(end: Position) -> Int:
    """The table column into which a chunk ending at ``end`` exports its checkpoint: ceil(end/B) − 2."""
    return end.blocks_up() - 2


def initial_column(start: Position) -> Int:
    """The column of the state that a chunk starts from: ceil(start/B) − 1, or −1 at 0."""
    return start.blocks_up() - 1


def export_valid(start: Position, end: Position, checkpoint: Position, aligned: Truth) -> Truth:
    """Whether a backend can export the state at ``checkpoint`` from the chunk [start, end).

    The chunk starts on a hash unit; the export column is beyond the one it starts from; the checkpoint is at least
    one unit in and strictly inside; and its distance from the start is a multiple of the kernel's alignment
    (``aligned``, see :func:`on_alignment`).
    """
    return all_of(
        start.on_unit(),
        export_column(end) > initial_column(start),
        start.plus(start.radix.one_unit()) <= checkpoint,
        checkpoint.strictly_between(start, end),
        aligned,
    )


def on_alignment(start: int, checkpoint: int, alignment: int) -> bool:
    """Whether the checkpoint's distance from the start is a multiple of the kernel's ``alignment``; 0: no exports."""
    return alignment > 0 and (checkpoint - start) % alignment == 0


def export_column_free(column: Int, length: Int, scratch: Int, null: Truth, first: Truth) -> Truth:
    """Whether a block can be reserved at the export column of a table with ``length`` slots.

    It is beyond the table, or null, or (for a request that has allocated before) one of the ``scratch`` speculative
    slots at the table's end.
    """
    return all_of(
        column >= 0,
        any_of(column >= length, null, all_of(negate(first), column >= length - scratch)),
    )
