"""Blocks for a step: how many it is charged, what it takes, and what it keys.

The charge is asked of the rules (:mod:`kvproof.spec.rules.blocks`); what is taken follows from the layout of the
tables. That the two agree is an invariant, and not by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvproof.spec.events import GroupEstimate
from kvproof.spec.machine import pool
from kvproof.spec.machine.lookup import Blocks
from kvproof.spec.machine.sizes import Sizes, ceil
from kvproof.spec.machine.world import Request, World
from kvproof.spec.rules.blocks import (
    AttentionStep,
    MambaStep,
    attention_charge,
    external_state,
    mamba_cap,
    mamba_charge,
    mamba_estimate,
)
from kvproof.spec.view import NULL, Key


class Faulty(Exception):
    """The machine did what no rule allows: a block is written that is shared, or more is taken than is free."""


@dataclass(frozen=True, slots=True)
class Need:
    """Room for ``end`` tokens, of which ``local`` + ``external`` need no work and ``hits[g]`` are to be adopted.

    Attention needs room for ``ahead`` tokens more. The last ``drafts`` tokens are speculative. ``load``: what the load
    brings finds room, and nothing runs yet.
    """

    end: int
    local: int
    external: int = 0
    hits: Blocks = ()
    ahead: int = 0
    drafts: int = 0
    load: bool = False

    @property
    def computed(self) -> int:
        return self.local + self.external


# -- what it is charged ----------------------------------------------------------------------------------------------


def charge(world: World, sizes: Sizes, request: Request, need: Need) -> tuple[GroupEstimate, ...]:
    """What each group would take from the free queue. Changes nothing."""
    return tuple(
        _recurrent_charge(world, sizes, request, need, group)
        if sizes.config.groups[group].kind == "mamba"
        else attention_estimate(world, sizes, request, need, group)
        for group in range(len(sizes.config.groups))
    )


def hits_of(need: Need, group: int) -> tuple[int, ...]:
    return need.hits[group] if need.hits else ()


def evictable_hits(world: World, blocks: Sequence[int]) -> int:
    return sum(block != NULL and world.references[block] == 0 for block in blocks)


def attention_estimate(world: World, sizes: Sizes, request: Request, need: Need, group: int) -> GroupEstimate:
    hits, held, first = hits_of(need, group), len(request.tables[group]), request.cached[group] < 0
    partial = first and bool(hits) and need.local % sizes.slot != 0
    evictable = evictable_hits(world, hits)
    needed, computed = ceil(need.end + need.ahead, sizes.slot), ceil(need.computed, sizes.slot)
    total = _attention_total(needed, computed, held, len(hits), first, partial, evictable)
    deferred = partial and sizes.dialect.waits_for_copied_tail and _made_now(world, hits[-1])
    total = len(world.references) + 1 if deferred else total
    return GroupEstimate(group, total, evictable, deferred, partial, False, first, held, len(hits))


@lru_cache(maxsize=1 << 16)
def _attention_total(
    needed: int, computed: int, held: int, hits: int, first: bool, partial: bool, evictable: int
) -> int:
    step = AttentionStep(needed, computed, held, hits, 0, first, partial)
    return int(attention_charge(step, evictable))


@lru_cache(maxsize=1 << 16)
def _recurrent_total(
    needed: int,
    computed: int,
    held: int,
    hits: int,
    speculative: int,
    first: bool,
    partial: bool,
    evictable: int,
    due: bool,
) -> tuple[int, bool]:
    """What the rule charges, and whether the state at the computed position comes from outside. ``due``: no more than
    is due (:class:`kvproof.spec.machine.dialect.Dialect`)."""
    step = MambaStep(needed, computed, held, hits, speculative, first, partial, False)
    estimate, charged = int(mamba_estimate(step)), int(mamba_charge(step, evictable))
    more = int(mamba_cap(step)) - estimate if estimate > 0 and not due else 0
    return charged + more, bool(external_state(step))


def _made_now(world: World, block: int) -> bool:
    """Whether it is this step that makes the content which the block's primary key stands for."""
    return any((key.group, key.state) in world.made for key in world.keys[block][:1])


def _recurrent_charge(world: World, sizes: Sizes, request: Request, need: Need, group: int) -> GroupEstimate:
    hits, table, first = hits_of(need, group), request.tables[group], not request.grown
    # A state that this very step makes is not there yet: whoever needs it waits for the next step.
    deferred = bool(hits) and _made_now(world, hits[-1])
    partial = (bool(hits) and need.local % sizes.block != 0) or request.partial[group] >= 0
    computed = ceil(need.computed, sizes.block) if sizes.dialect.charges_external_state else len(hits)
    needed = ceil(need.end, sizes.block)
    evictable = evictable_hits(world, hits)
    total, external = _recurrent_total(
        needed, computed if first else 0, 0 if first else len(table), len(hits), sizes.config.speculative, first,
        partial, evictable, sizes.dialect.charges_what_is_due,
    )  # fmt: skip
    if not sizes.dialect.charges_no_less_than_nothing and not partial:
        total += min(0, needed + sizes.config.speculative - len(hits) - len(table))
    evictable = 0 if external else evictable
    total = len(world.references) + 1 if deferred else total
    return GroupEstimate(group, total, evictable, deferred, partial, False, first, len(table), len(hits))


# -- what it takes ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Taken:
    """Per group: new blocks, and hit blocks that left the free queue."""

    new: list[int]
    hit: list[int]


def allocate(world: World, sizes: Sizes, request: Request, need: Need) -> Taken:
    """Take what the need says. The hit blocks of every group first: none may be evicted by taking another's."""
    count = len(sizes.config.groups)
    taken = Taken([0] * count, [0] * count)
    if need.hits or need.external:
        for group in range(count):
            before = len(world.queue)
            adopt(world, sizes, request, need, group)
            taken.hit[group] = before - len(world.queue)
        for group in range(count):
            if need.external:
                missing = ceil(need.computed, sizes.config.groups[group].block_size) - len(request.tables[group])
                request.tables[group] += new_blocks(world, max(0, missing), taken, group)
    elif request.cached[0] < 0:
        request.cached = [0] * count
    for group in range(count):
        if sizes.config.groups[group].kind == "mamba":
            _grow_states(world, sizes, request, need.end, group, taken)
        else:
            grow_slots(world, sizes, request, need.end, group, taken)
    request.grown |= sizes.dialect.grows_without_blocks or any(taken.new[group] for group in sizes.recurrent)
    return taken


def new_blocks(world: World, count: int, taken: Taken, group: int) -> list[int]:
    if count > len(world.queue):
        raise Faulty(f"{count} blocks are taken where {len(world.queue)} are free")
    taken.new[group] += count
    return pool.take(world, count)


def passed_slots(sizes: Sizes, group: int, computed: int) -> int:
    """Leading slots of the group's table that a request with ``computed`` tokens behind it never reads: a recurrent
    layer reads the last state only, attention all of them."""
    spec = sizes.config.groups[group]
    return max(0, computed - 1) // spec.block_size if spec.kind == "mamba" else 0


def adopt(world: World, sizes: Sizes, request: Request, need: Need, group: int) -> None:
    spec, hits = sizes.config.groups[group], hits_of(need, group)
    passed = passed_slots(sizes, group, need.computed)
    adopted = hits[passed:]
    pool.touch(world, adopted)
    request.tables[group] = [NULL] * passed + list(adopted)
    request.cached[group] = len(request.tables[group])
    if adopted and need.local % spec.block_size:
        request.partial[group] = request.cached[group] = need.local // spec.block_size


def grow_slots(world: World, sizes: Sizes, request: Request, end: int, group: int, taken: Taken) -> None:
    table = request.tables[group]
    if request.partial[group] >= 0:
        _copy_for_writer(world, request, group, new_blocks(world, 1, taken, group)[0])
    table += new_blocks(world, max(0, ceil(end, sizes.slot) - len(table)), taken, group)


def _copy_for_writer(world: World, request: Request, group: int, fresh: int) -> None:
    """The hit's last block is shared: its writer gets a copy. Both ends are counted until it has run."""
    slot, request.partial[group] = request.partial[group], -1
    source = request.tables[group][slot]
    request.tables[group][slot] = fresh
    world.copies.append((group, source, fresh))
    world.references[fresh] += 1


def _grow_states(world: World, sizes: Sizes, request: Request, end: int, group: int, taken: Taken) -> None:
    """A recurrent table: null up to the running slot, then the running block and one per draft.

    Blocks for drafts that lie behind the new running slot move on to the table's end.
    """
    drafts, table = sizes.config.speculative, request.tables[group]
    needed, partial = ceil(end, sizes.block) + drafts, request.partial[group]
    if needed <= len(table) and partial < 0:
        return
    before, running = len(table), needed - drafts - 1
    request.previous = before - 1 - drafts if request.grown else before - 1
    table += [NULL] * (running - before)
    if request.grown:
        for slot in range(before - drafts, min(before, running)):
            if not pool.writable(world, table[slot]):
                raise Faulty(f"block {table[slot]} is moved on to be written, and somebody counts on it")
            table.append(table[slot])
            table[slot] = NULL
    fresh = new_blocks(world, max(0, needed - len(table)) + (partial >= 0), taken, group)
    if partial >= 0 and not request.grown:
        _copy_for_writer(world, request, group, fresh.pop(0))
    elif partial >= 0:
        # Its own running block is keyed inside: the key moves to a copy, for the block is written on.
        source, copy = table[partial], fresh.pop(0)
        pool.move_keys(world, source, copy)
        world.copies.append((group, source, copy))
        world.references[source] += 1
        request.partial[group] = -1
        if sizes.config.connector != "none" and not sizes.dialect.leaves_moved_tail:
            world.references[copy] += 1
            request.pins.append(copy)
        world.made.update((key.group, key.state) for key in world.keys[copy][:1])
    table += fresh


# -- what is given back, and what is keyed ---------------------------------------------------------------------------


def retire(world: World, sizes: Sizes, request: Request, computed: int) -> None:
    """Recurrent states below the one at ``computed`` are of no use to their request any more."""
    last = max(0, computed - 1) // sizes.block
    retired = request.retired
    for group in sizes.recurrent:
        table = request.tables[group]
        upto = min(last, len(table))
        if not sizes.dialect.retires_across_gaps:
            _retire_to_gap(world, request, table, upto, last)
        elif request.retired < upto:
            gone = [slot for slot in range(upto - 1, request.retired - 1, -1) if table[slot] != NULL]
            blocks = [table[slot] for slot in gone]
            for slot in gone:
                table[slot] = NULL
            pool.release(world, blocks)
            retired = upto
    request.retired = retired


def _retire_to_gap(world: World, request: Request, table: list[int], upto: int, last: int) -> None:
    """Before 0.30: back to the first null slot, and the running state of the step before."""
    gone: list[int] = []
    for slot in range(upto - 1, -1, -1):
        if table[slot] == NULL:
            break
        gone.append(table[slot])
        table[slot] = NULL
    pool.release(world, gone)
    previous = request.previous
    if 0 <= previous < last and table[previous] != NULL:
        pool.release(world, [table[previous]])
        table[previous] = NULL


def key(world: World, sizes: Sizes, request: Request, upto: int) -> None:
    """Everything complete among the first ``upto`` tokens gets its key, ahead of the forward that makes its content."""
    if not sizes.config.partial_hits:
        upto -= upto % sizes.config.scheduler_block
    for group in range(len(sizes.config.groups)):
        _key_full_blocks(world, sizes, request, upto, group)
        if sizes.config.groups[group].kind == "mamba":
            _key_state(world, sizes, request, upto, group)
        elif sizes.slot != sizes.unit:
            _key_tail(world, sizes, request, upto, group)


def _hashed(sizes: Sizes, request: Request) -> int:
    return request.known // sizes.unit * sizes.unit


def _key_full_blocks(world: World, sizes: Sizes, request: Request, upto: int, group: int) -> None:
    spec, table = sizes.config.groups[group], request.tables[group]
    size, first = spec.block_size, max(0, request.cached[group])
    full = min(upto, _hashed(sizes, request)) // size
    if first >= full:
        return
    for slot in range(first, full):
        block = table[slot]
        if block == NULL or (spec.kind == "mamba" and not sizes.kept(slot, request.prompt, request.junction)):
            continue
        if pool.noted(world, block) >= (slot + 1) * size:
            raise Faulty(f"block {block} is keyed as {pool.noted(world, block)} tokens already")
        pool.forget(world, block)
        name = Key(group, request.states[(slot + 1) * size], (slot + 1) * size)
        pool.register(world, block, name)
        world.made.add((group, name.state))
    request.cached[group] = full


def _key_tail(world: World, sizes: Sizes, request: Request, upto: int, group: int) -> None:
    """Attention also keys the last unit of a prompt inside its block."""
    end = sizes.tail(request.prompt)
    slot, table = end // sizes.slot, request.tables[group]
    if 0 < end <= upto and end % sizes.slot and slot < len(table):
        _key_inside(world, request, table[slot], group, end)


def _key_inside(world: World, request: Request, block: int, group: int, end: int) -> None:
    """A key inside a block takes the place of keys for less, and stands beside one for more."""
    name = Key(group, request.states[end], end)
    if block == NULL or name in world.keys[block]:
        return
    world.made.add((group, name.state))
    if 0 < pool.noted(world, block) < end:
        pool.forget(world, block)
    pool.register(world, block, name)


def _key_state(world: World, sizes: Sizes, request: Request, upto: int, group: int) -> None:
    """A recurrent state inside a block is keyed where the prompt can be resumed last: the next step must copy it."""
    if upto <= 0 or upto % sizes.unit or upto != sizes.tail(request.prompt):
        return
    if upto % sizes.block == 0 and not sizes.dialect.leaves_token:
        return
    slot, table = ceil(upto, sizes.block) - 1, request.tables[group]
    if slot >= len(table) or table[slot] == NULL:
        return
    if pool.noted(world, table[slot]) == upto:
        if sizes.dialect.knows_keyed_tail:
            return
        world.made.add((group, request.states[upto]))
    _key_inside(world, request, table[slot], group, upto)
    if upto % sizes.block:
        request.partial[group] = request.cached[group] = slot
