"""Rules as they were, or as they could be wrong: each must be refuted by the claim it mutates.

A claim whose mutants survive says nothing. The historical ones name the change that corrected them.
"""

from __future__ import annotations

from dataclasses import replace

from kvproof.spec.logic import Int, Truth, all_of, any_of, count, ite, maximum, minimum, negate
from kvproof.spec.radix import Position, choose, first_inside, later
from kvproof.spec.rules import blocks, chunk, hits, ledger, slots
from kvproof.spec.rules.blocks import AttentionStep, MambaStep
from kvproof.spec.rules.chunk import Prefill
from kvproof.spec.rules.ledger import Action, Entry


def split_before_51113(case: Prefill) -> Position:
    """Aligned ends only below the last cacheable position, realignment only up to it (0.26.0 and before)."""
    end = choose(case.offered < case.last_cacheable, case.offered.floor_block(), case.offered)
    inside = all_of(negate(case.start.on_block()), case.start.next_block() <= case.last_cacheable)
    realign = choose(inside, case.start.next_block(), case.start)
    return later(first_inside([realign, *chunk.declared_stops(case)], case.start, end), case.start)


def split_of_45477(case: Prefill) -> Position:
    """Realignment only for chunks that start below the last cacheable position (a fix that was not merged)."""
    aligned = case.offered.floor_block()
    floored = all_of(case.offered < case.prefill_end, any_of(aligned > case.start, case.fits))
    end = choose(floored, aligned, case.offered)
    inside = all_of(negate(case.start.on_block()), case.start < case.last_cacheable)
    realign = choose(inside, case.start.next_block(), case.start)
    return later(first_inside([realign, *chunk.declared_stops(case)], case.start, end), case.start)


def split_export_despite_junction(case: Prefill) -> Position:
    """The export exemption is granted to the whole chunk and kept when a junction then cuts it."""
    exporting = all_of(case.exports, case.offered >= case.prefill_end)
    cut = first_inside([chunk.junction_stop(case)], case.start, case.offered)
    return choose(exporting, cut, chunk.split(replace(case, exports=False)))


def keeps_to_block_never(start: Position, end: Position, prefill_end: Position, exports: Truth) -> Truth:
    """Any chunk may cross the end of the block it started in."""
    return True


def may_key_left_behind(column: Int, start: Position, end: Position, exports: Truth, checkpoint: Position) -> Truth:
    """Every complete block may be keyed, also the one an exporting chunk left at its mid-block start."""
    exported = all_of(exports, column == end.blocks_up() - 2)
    promised = slots.promise(column, end.radix)
    return all_of(promised <= end, any_of(negate(exported), checkpoint == promised))


def checkpoint_before_57180(end: Position, drop: Truth, grain_is_block: Truth) -> Position:
    """One token is left out before EAGLE's drop is taken as well (0.31.0 and before)."""
    proven = end.minus(end.radix.one_token())
    grain = choose(grain_is_block, end.radix.boundary(1), end.radix.one_unit())
    floored = choose(grain_is_block, proven.floor_block(), proven.floor_unit())
    return choose(drop, floored.minus(grain), floored).at_least_zero()


def mamba_estimate_before_57050(step: MambaStep) -> Int:
    """The constant replaces the raw count, but not where a request that holds blocks needs a checkpoint (0.30.0)."""
    length = ite(step.first, step.computed, step.held)
    extra = count(step.partial) + blocks.external_state_blocks(step)
    columns = maximum(step.needed + step.speculative - length, 0) + extra
    skipped_cap = all_of(step.checkpoint, negate(step.first))
    return ite(any_of(skipped_cap, columns <= 0), columns, minimum(columns, blocks.mamba_cap(step)))


def mamba_estimate_without_external(step: MambaStep) -> Int:
    """The block for a state that an external load brings is not charged."""
    columns = maximum(step.needed + step.speculative - ite(step.first, step.hits, step.held), 0)
    cap = blocks.mamba_cap(step) - blocks.external_state_blocks(step)
    return minimum(columns + count(step.partial), cap)


def dry_run_records(recorded: Truth, dry: Truth, needed: Truth) -> Truth:
    """A dry run, too, notes whether a checkpoint is due."""
    return needed


def attention_estimate_before_41282(step: AttentionStep, cap: Int) -> Int:
    """The whole-sequence gate's cap is applied to the columns of a single step (0.20.1 and before)."""
    return blocks.attention_estimate(replace(step, needed=minimum(step.needed, cap)))


def attention_estimate_without_copy(step: AttentionStep, cap: Int) -> Int:
    """The copy of a partial tail is not charged."""
    return blocks.attention_estimate(replace(step, partial=False))


def window_cap_aligned(window: Position, in_flight: Position, model_length: Position) -> Int:
    """The window is taken to start on a block boundary."""
    return blocks.window_cap(window, in_flight, model_length) - 1


def may_cut_before_51468(endpoint: Int, held: Int, recurrent: Truth, cacheable: Truth) -> Truth:
    """Every group must cover the endpoint, recurrent ones too (0.27.0 and 0.27.1)."""
    return endpoint <= held


def resume_without_fallback(hit: Int, tail: Int, agreed: Int, diverged: Truth, offered: Int) -> hits.Resume:
    """The deepest hit is accepted also when the store brings nothing (with a connector, 0.26.0)."""
    return hits.resume(hit, tail, agreed, False, offered)


def release_unguarded(entry: Entry) -> Action:
    """A table's reference is given back whether or not there is one: a double free."""
    return Action(True, ledger.release(entry).after)


def release_listed_twice(entry: Entry) -> Action:
    """A block listed twice in one release: both references go, then each listing is queued (0.23.0 and before)."""
    left = entry.references - 2
    return Action(
        all_of(negate(entry.null), entry.tables >= 2),
        replace(entry, references=left, tables=entry.tables - 2, queue=entry.queue + ite(left == 0, 2, 0)),
    )


def release_counts_null(entry: Entry) -> Action:
    """The null block's count goes down with every slot that lets go of it (0.32.0 and before)."""
    right = ledger.release(entry)
    return Action(right.guard, replace(right.after, references=entry.references - 1))


def copy_done_forgets_queue(entry: Entry) -> Action:
    """A copy's end lets go without putting the block back into the queue: a leak."""
    return Action(entry.copies >= 1, replace(entry, references=entry.references - 1, copies=entry.copies - 1))


def touch_leaves_queued(entry: Entry) -> Action:
    """A hit block stays in the free queue while a request holds it."""
    return Action(ledger.touch(entry).guard, replace(ledger.touch(entry).after, queue=entry.queue))
