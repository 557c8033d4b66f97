"""How many blocks a step is charged, how many it takes, and how many a request ever holds.

Two independent readings of the same step: an *estimate*, asked before anything is allocated, and what the table layout
then *takes*. They must agree at the same arguments, for every size: an estimate above what is taken refuses requests
that fit and, for the first in line, stalls everything (PR 57050, wrong in 0.30.0); one below it lets an allocation fail
halfway. Blocks that a hit takes off the free queue (0 references) are a term of their own, and only those that are
adopted count: :func:`mamba_charge`, :func:`attention_charge`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproof.spec.config import Config, Group
from kvproof.spec.logic import Int, Truth, all_of, any_of, count, implies, ite, maximum, minimum, negate
from kvproof.spec.radix import Position, Radix, earlier


@dataclass(frozen=True)
class MambaStep:
    """One allocation for a recurrent group in align mode, in table columns (blocks).

    ``needed`` = ceil(tokens/B) at the end of the step, drafts included and lookahead excluded. ``computed`` =
    ceil(computed/B) columns already computed, local and external (used on the first allocation). ``held`` is the
    table's length before the call (0 on the first), of which the last 1 + ``speculative`` are the running slots.
    ``hits`` is how many slots the local hit brings, null ones included. ``partial``: a tail inside a block is copied
    before it is written. ``checkpoint``: the chunk exports a state inside itself.
    """

    needed: Int
    computed: Int
    held: Int
    hits: Int
    speculative: Int
    first: Truth
    partial: Truth
    checkpoint: Truth


def external_state_blocks(step: MambaStep) -> Int:
    """1 if an external load brings the state at the resume boundary, which then needs a block of its own, else 0."""
    return count(external_state(step))


def external_state(step: MambaStep) -> Truth:
    """Whether the local hit ends before the computed position, so that the state there comes from outside."""
    return ite(step.first, step.hits < step.computed, False)


def mamba_cap(step: MambaStep) -> Int:
    """The most new blocks one step can take, whatever the prompt: 1 + partial + checkpoint, + K on the first
    allocation.

    Plus one for the external state, where there is one.
    """
    return 1 + count(step.partial, step.checkpoint) + ite(step.first, step.speculative, 0) + external_state_blocks(step)


def mamba_estimate(step: MambaStep) -> Int:
    """New blocks the step is charged: what its columns need, but at most the cap.

    "The minimum with a cap" is PR 57050's form (from 0.31.0; with this cap, without K for a request that already has
    its speculative blocks, from 0.32.0). The columns of the table that are null are what the cap takes out: only the
    running, speculative, copied and exported ones are blocks.
    """
    length = ite(step.first, step.computed, step.held)
    columns = maximum(step.needed + step.speculative - length, 0)
    extra = ite(step.partial, 1, 0) + external_state_blocks(step)
    return minimum(columns + extra, mamba_cap(step))


def mamba_charge(step: MambaStep, evictable: Int) -> Int:
    """What leaves the free queue in all: new blocks, and the ``evictable`` hit blocks (0 or 1) where they are adopted.

    If the state at the computed position comes from outside, the local hit's own state lies below it and is not
    adopted.
    """
    return mamba_estimate(step) + ite(external_state(step), 0, evictable)


def mamba_taken(step: MambaStep) -> Int:
    """New blocks the step takes, from the layout of the table.

    The table grows to ``needed`` + K columns. Columns before the running one become null, except the one a checkpoint
    is exported into. A request that already had K speculative blocks moves those it leaves behind to the table's end
    instead of allocating others. What is then missing is taken from the pool.
    """
    length = ite(step.first, step.computed, step.held)
    running = step.needed - 1
    null_end = running - ite(step.checkpoint, 1, 0)
    padded = maximum(length, null_end)
    left_behind = minimum(maximum(null_end - (length - step.speculative), 0), step.speculative)
    moved = ite(step.first, 0, left_behind)
    missing = maximum(step.needed + step.speculative - padded - moved, 0)
    return missing + ite(step.partial, 1, 0) + external_state_blocks(step)


def mamba_step_possible(step: MambaStep) -> Truth:
    """What holds of every step that a scheduler can ask for; the premise of the proofs about it."""
    return all_of(
        step.needed >= 1,
        step.speculative >= 0,
        step.computed >= 0,
        step.hits >= 0,
        implies(step.first, all_of(step.held == 0, step.hits <= step.computed, step.computed <= step.needed)),
        implies(negate(step.first), all_of(step.held >= 1 + step.speculative, step.hits == 0)),
        # The export column lies beyond every column that holds a state.
        implies(step.checkpoint, step.needed - 2 >= ite(step.first, step.computed, step.held - step.speculative)),
    )


def recorded_checkpoint(recorded: Truth, dry: Truth, due: Truth) -> Truth:
    """What the allocation will read about a checkpoint after one more question: a dry run leaves it as it was.

    The allocation takes its export column from what the last *real* estimate noted; the dry run of the whole-sequence
    gate asks about other tokens (PR 57050).
    """
    return ite(dry, recorded, due)


@dataclass(frozen=True)
class AttentionStep:
    """One allocation for a full-attention or sliding-window group, in its own blocks.

    ``needed`` = ceil(tokens with lookahead/B). ``computed`` = ceil(computed/B), local and external. ``held`` is the
    table's length before the call (null slots included), ``hits`` what the local hit brings, ``skipped`` how many whole
    blocks lie below the window at the computed position (0 for full attention). ``partial``: the hit ends inside a
    block, which is copied.
    """

    needed: Int
    computed: Int
    held: Int
    hits: Int
    skipped: Int
    first: Truth
    partial: Truth


def attention_estimate(step: AttentionStep) -> Int:
    """New blocks the step is charged: the columns that neither the table, nor the hit, nor the skipped part covers.

    The per-request cap of a window group belongs to the whole-sequence gate only; applied here it charges less than is
    taken (PR 41282, wrong up to 0.20.1).
    """
    covered = ite(step.first, maximum(step.skipped, step.hits + step.held), step.held)
    return maximum(step.needed - covered, 0) + ite(step.partial, 1, 0)


def attention_charge(step: AttentionStep, evictable: Int) -> Int:
    """What leaves the free queue in all. ``evictable`` counts the hit blocks at or above ``skipped`` with 0
    references.
    """
    return attention_estimate(step) + evictable


def attention_taken(step: AttentionStep) -> Int:
    """New blocks the step takes, from the layout of the table.

    On the first allocation the skipped columns become null, the rest of the hit is adopted, columns up to the computed
    position are taken for external tokens, then those up to ``needed``. A partial tail's copy is one more.
    """
    adopted = step.skipped + maximum(step.hits - step.skipped, 0)
    external = maximum(step.computed - adopted, 0)
    length = ite(step.first, adopted + external, step.held)
    return ite(step.first, external, 0) + maximum(step.needed - length, 0) + ite(step.partial, 1, 0)


def attention_step_possible(step: AttentionStep) -> Truth:
    """What holds of every step that a scheduler can ask for; the premise of the proofs about it."""
    return all_of(
        step.needed >= 1,
        step.hits >= 0,
        step.held >= 0,
        step.skipped >= 0,
        step.skipped <= step.computed,
        implies(step.first, all_of(step.held == 0, step.hits <= step.computed, step.computed <= step.needed)),
        implies(negate(step.first), all_of(step.held >= 1, step.hits == 0, negate(step.partial))),
        any_of(negate(step.partial), step.hits >= 1),
    )


def window_skipped(computed: Position, window: Position) -> Position:
    """How many leading tokens no later token of a window of ``window`` tokens attends to: max(0, computed − window +
    1).
    """
    return computed.plus(computed.radix.one_token()).minus(window).at_least_zero()


def window_held(computed: Position, end: Position, window: Position) -> Int:
    """Blocks held while tokens up to ``end`` are in flight and ``computed`` are settled: those that overlap the window.

    Blocks wholly below the window at the *settled* position have been given back; ``end`` includes lookahead slots.
    """
    return end.blocks_up() - window_skipped(computed, window).block


def window_cap(window: Position, in_flight: Position, model_length: Position) -> Int:
    """The most blocks one request is charged for a window group by the whole-sequence gate.

    ceil(min(window − 1 + in flight, model length)/B) + 1: the window need not start on a block boundary.
    ``in_flight`` is the most tokens that can be scheduled and not yet settled.
    """
    tokens = window.plus(in_flight).minus(window.radix.one_token())
    return earlier(tokens, model_length).blocks_up() + 1


def window_gate(whole: Position, cap: Int) -> Int:
    """Blocks the whole-sequence gate charges for a window group: the whole sequence, but at most the cap."""
    return minimum(whole.blocks_up(), cap)


def group_peak(config: Config, group: Group, total_tokens: int) -> int:
    """The most blocks one request holds in ``group`` at any time, alone in an idle pool. An upper bound.

    ``total_tokens`` is everything it may ever need slots for: prompt, output and drafts. Full attention keeps every
    block. A window or chunk group keeps what overlaps the window and the tokens in flight. A recurrent group keeps the
    previous state, the running one and K speculative ones, one more per step in flight, a checkpoint, and for a tail
    inside a block both ends of its copy.
    """
    columns = -(-total_tokens // group.block_size)
    tail = 1 if config.partial_hits else 0
    in_flight_steps = 2 if config.async_scheduling else 1
    if group.kind == "full":
        return columns + tail
    if group.recycles:
        radix = Radix(1, group.block_size)
        cap: int = window_cap(
            Position.on(group.window, radix),
            Position.on(config.step_tokens * in_flight_steps + config.speculative, radix),
            Position.on(max(config.max_model_len, total_tokens), radix),
        )
        return min(columns, cap) + tail
    states = min(columns, 1 + in_flight_steps + config.checkpoint_blocks)
    external = 1 if config.connector != "none" else 0
    return states + config.speculative + 2 * tail + external


def peak_blocks(config: Config, total_tokens: int) -> int:
    """The most blocks one request holds over its life in all groups, alone in an idle pool. An upper bound.

    A request whose peak is at most ``config.num_blocks - 1`` fits an idle pool, and refusing it for ever is a stall.
    """
    return sum(group_peak(config, group, total_tokens) for group in config.groups)
