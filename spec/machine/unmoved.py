"""Recurrent states that are never moved, as in the reference engine: the dialect's ``moves_states`` is off.

A request has one *running* block, with the state at its computed position, and private *scratch* blocks to save states
into: one at the end of a chunk, or one per draft. A step reads from the running block and saves where nobody else
looks (into the running block itself, if it has no key and nobody counts on it). Afterwards the block with the state at
the new position is the running one, what is worth it is keyed by the position that it was saved at, and the newest of
those is *held* until the request goes.
"""

from __future__ import annotations

from functools import lru_cache

from kvproof.spec.events import GroupEstimate
from kvproof.spec.machine import pool
from kvproof.spec.machine.blocks import (
    Need,
    Taken,
    adopt,
    attention_estimate,
    evictable_hits,
    grow_slots,
    hits_of,
    new_blocks,
)
from kvproof.spec.machine.sizes import Sizes, ceil
from kvproof.spec.machine.world import Request, World
from kvproof.spec.radix import Position, Radix
from kvproof.spec.rules.checkpoint import checkpoint_position
from kvproof.spec.view import NULL, Key

Places = tuple[tuple[int, ...], ...]
"""Per recurrent group, the blocks that a step saves its states into, in the order of their positions."""


def running(request: Request, group: int) -> int:
    """The block with the state at the computed position: a table's last. :data:`NULL`: there is none yet."""
    table = request.tables[group]
    return table[-1] if table else NULL


def _run_on(sizes: Sizes, request: Request, group: int, block: int, position: int) -> None:
    request.tables[group] = [NULL] * (max(1, ceil(position, sizes.block)) - 1) + [block] if block != NULL else []


# -- what a step takes -----------------------------------------------------------------------------------------------


def charge(world: World, sizes: Sizes, request: Request, need: Need) -> tuple[GroupEstimate, ...]:
    """What each group would take from the free queue. Changes nothing."""
    return tuple(
        _states_charge(world, sizes, request, need, group)
        if sizes.config.groups[group].kind == "mamba"
        else attention_estimate(world, sizes, request, need, group)
        for group in range(len(sizes.config.groups))
    )


def _states_charge(world: World, sizes: Sizes, request: Request, need: Need, group: int) -> GroupEstimate:
    hits, first = hits_of(need, group), not request.grown
    free = evictable_hits(world, hits)
    state = NULL if need.external else hits[-1] if hits else running(request, group)
    inside = request.grown and pool.writable(world, state)
    partial = not need.load and need.computed % sizes.block != 0 and not inside
    # As if the running and scratch blocks were a table's last slots.
    held = ceil(request.computed, sizes.block) + (0 if first else sizes.config.speculative)
    total = _fresh(sizes, request, need, group, inside) + free
    return GroupEstimate(group, total, free, False, partial, False, first, held, len(hits))


def _fresh(sizes: Sizes, request: Request, need: Need, group: int, inside: bool) -> int:
    """New blocks: for the state that a load brings, and for those that the step saves, as far as there are none."""
    arriving = int(need.external > 0)
    if need.load:
        return arriving
    states = 1 + sizes.config.speculative
    if need.drafts:
        boundary = (need.computed // sizes.block + 1) * sizes.block
        states += boundary < need.end and wanted(sizes, request, boundary)
    return max(0, states - len(request.scratch.get(group, ())) - inside) + arriving


def allocate(world: World, sizes: Sizes, request: Request, need: Need) -> Taken:
    """Take what the need says. The hit blocks of every group first: none may be evicted by taking another's."""
    count = len(sizes.config.groups)
    taken = Taken([0] * count, [0] * count)
    first = request.cached[0] < 0
    for group in range(count if first else 0):
        before = len(world.queue)
        if sizes.config.groups[group].kind != "mamba":
            adopt(world, sizes, request, need, group)
        elif hits_of(need, group):
            pool.touch(world, need.hits[group][-1:])
            _run_on(sizes, request, group, need.hits[group][-1], need.local)
        taken.hit[group] = before - len(world.queue)
    request.cached = [0] * count
    for group in range(count):
        if sizes.config.groups[group].kind != "mamba":
            grow_slots(world, sizes, request, need.end, group, taken)
            continue
        inside = request.grown and pool.writable(world, running(request, group))
        fresh = new_blocks(world, _fresh(sizes, request, need, group, inside), taken, group)
        if need.external:
            _run_on(sizes, request, group, fresh.pop(), need.computed)
        request.scratch[group] = request.scratch.get(group, []) + fresh
    for group in sizes.recurrent:
        if hits_of(need, group):
            hold(world, sizes, request, group, need.local, need.hits[group][-1])
    return taken


def places(world: World, sizes: Sizes, request: Request, drafts: int, external: int) -> Places:
    """Where a step saves its states: in the running block, if nobody else may see it, and in scratch."""
    found = []
    for group in sizes.recurrent:
        block, scratch = running(request, group), request.scratch[group]
        inside = pool.writable(world, block) and not external
        found.append(tuple(([block, *scratch] if inside else scratch)[: 1 + drafts]))
    return tuple(found)


# -- what a step leaves ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 16)
def _reusable(block: int, unit: int, tokens: int, whole_blocks: bool) -> int:
    return int(checkpoint_position(Position.on(tokens, Radix.of(block, unit)), False, whole_blocks).value())


def declare(sizes: Sizes, request: Request) -> None:
    """On admission: the last position at which these tokens can be resumed, and the last block's end among them."""
    tokens = request.prompt if sizes.dialect.stops_by_prompt else request.known
    request.tail = _reusable(sizes.block, sizes.unit, tokens, not sizes.config.partial_hits)
    request.last = request.tail // sizes.block * sizes.block


def wanted(sizes: Sizes, request: Request, position: int) -> bool:
    """Whether the state at ``position`` is worth a key."""
    if position <= 0:
        return False
    if position in (request.tail, request.last, request.junction):
        return True
    interval = sizes.config.retention
    if position % sizes.block or interval == 0:
        return False
    return interval is None or position % interval == 0


def settle(world: World, sizes: Sizes, request: Request, ends: range, saved: Places) -> None:
    """A step has saved the states at ``ends`` in ``saved``. Those that can be reused are keyed, the one at the computed
    position is the running one, and what is superseded is given back."""
    for group, blocks in zip(sizes.recurrent, saved, strict=True):
        old = running(request, group)
        states = {end: block for end, block in zip(ends, blocks, strict=True) if end <= request.computed}
        _run_on(sizes, request, group, states[request.computed], request.computed)
        scratch = sorted({*request.scratch[group], *blocks} - {states[request.computed]})
        for position, block in states.items():
            if not wanted(sizes, request, position):
                continue
            pool.register(world, block, Key(group, request.states[position], position))
            hold(world, sizes, request, group, position, block)
            if block in scratch:
                scratch.remove(block)
                pool.release(world, [block])
        request.scratch[group] = scratch
        if old not in blocks:
            pool.release(world, [old])


def key_attention(world: World, sizes: Sizes, request: Request, before: int) -> None:
    """Key the attention blocks that were completed since ``before`` tokens, and where hits may end inside one."""
    inside: tuple[int, ...] = ()
    if sizes.config.partial_hits:
        inside = (request.tail,)
        inside += () if sizes.dialect.keys_prompt_alone else (request.tail + sizes.grain, request.junction)
    for group in sizes.attention:
        ends = [slot * sizes.slot + sizes.slot for slot in range(before // sizes.slot, request.computed // sizes.slot)]
        ends += [end for end in inside if before < end <= request.computed and end % sizes.slot]
        for end in ends:
            block = request.tables[group][(end - 1) // sizes.slot]
            if sizes.dialect.replaces_keys and 0 < pool.noted(world, block) < end:
                pool.forget(world, block)
            pool.register(world, block, Key(group, request.states[end], end))


def key_loaded(world: World, sizes: Sizes, request: Request, position: int) -> None:
    """The state that a load brought can be reused as much as one that was computed."""
    for group in sizes.recurrent:
        block = running(request, group)
        pool.register(world, block, Key(group, request.states[position], position))
        hold(world, sizes, request, group, position, block)


# -- the newest state ------------------------------------------------------------------------------------------------


def hold(world: World, sizes: Sizes, request: Request, group: int, position: int, block: int) -> None:
    """The state at ``position`` can be resumed from: count on it, and let go of an older one."""
    held = request.held.get(group)
    if sizes.dialect.lets_go or (held is not None and held[0] >= position):
        return
    pool.touch(world, [block])
    request.held[group] = (position, block)
    if held is not None:
        pool.release(world, [held[1]])


def give_up(world: World, request: Request) -> bool:
    """Before a request loses everything it gives up its held states, for good: nobody can resume there. False: it
    holds none."""
    held, request.held = request.held, {}
    for group, (_, block) in held.items():
        if world.references[block] == 1 + (block == running(request, group)):
            pool.forget(world, block)
        pool.release(world, [block])
    return bool(held)


def blocks_of(sizes: Sizes, request: Request) -> list[int]:
    """All that the request counts on, in the order to let go: attention, later slots first, then states, then holds."""
    order = [block for group in sizes.attention for block in reversed(request.tables[group])]
    for group in sizes.recurrent:
        order += [*request.scratch.get(group, ()), running(request, group)]
    return [block for block in order + [block for _, block in request.held.values()] if block != NULL]
