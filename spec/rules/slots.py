"""What a recurrent slot holds after a prefill chunk, and which slot may carry the full key (align mode).

The invariant "slot p holds the state after exactly (p+1)·B tokens" is a statement about one slot. These rules follow
one arbitrary slot through one chunk, so that an inductive proof covers every slot, every number of chunks and every
size.

A chunk [start, end) reads the running state and writes the state at ``end`` into column ceil(end/B) − 1. Columns
between the old running one and the new one are null. A last chunk that exports a checkpoint writes it into column
ceil(end/B) − 2 (releases from 0.29.0).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproof.spec.logic import Int, Truth, all_of, any_of, implies, ite, negate
from kvproof.spec.radix import Position, Radix, choose


@dataclass(frozen=True)
class Slot:
    """One table slot: a null placeholder, or a block that holds the state at ``state`` tokens."""

    null: Truth
    state: Position


def running_column(computed: Position) -> Int:
    """The column of the running state at ``computed`` > 0 tokens: ceil(n/B) − 1."""
    return computed.blocks_up() - 1


def promise(column: Int, radix: Radix) -> Position:
    """The position whose state a full key on this column stands for: (p+1)·B."""
    return radix.boundary(column + 1)


def keeps_promise(column: Int, slot: Slot, computed: Position) -> Truth:
    """A full, non-null slot holds exactly the promised state. ``computed`` tokens are done."""
    promised = promise(column, computed.radix)
    return implies(all_of(negate(slot.null), promised <= computed), slot.state == promised)


def carries_state(column: Int, slot: Slot, computed: Position) -> Truth:
    """The running column holds the state at ``computed``; columns beyond it hold nothing yet (speculative ones
    aside).
    """
    column_now = running_column(computed)
    return all_of(
        implies(column == column_now, all_of(negate(slot.null), slot.state == computed)),
        implies(column > column_now, slot.null),
    )


def after_chunk(
    column: Int, before: Slot, start: Position, end: Position, exports: Truth, checkpoint: Position
) -> Slot:
    """The slot at ``column`` after the chunk [start, end), which may export the state at ``checkpoint``."""
    written = column == running_column(end)
    exported = all_of(exports, column == end.blocks_up() - 2)
    skipped = all_of(column >= start.blocks_up(), column < running_column(end))
    state = choose(written, end, choose(exported, checkpoint, before.state))
    null = ite(written, False, ite(exported, False, ite(skipped, True, before.null)))
    return Slot(null, state)


def may_key(column: Int, start: Position, end: Position, exports: Truth, checkpoint: Position) -> Truth:
    """Whether the chunk [start, end) may put (or leave) the full key on a non-null slot at ``column``.

    Not before the block is complete; not on the column that an exporting chunk left at a mid-block ``start``; and on
    the export column only if the checkpoint is that block's end (otherwise the block is keyed as the partial state it
    is).
    """
    promised = promise(column, end.radix)
    left_behind = all_of(exports, negate(start.on_block()), column == start.block, end > start.next_block())
    exported = all_of(exports, column == end.blocks_up() - 2)
    return all_of(
        promised <= end,
        negate(left_behind),
        any_of(negate(exported), checkpoint == promised),
    )
