"""Lookups: what the cache has of a request. Nothing here changes anything.

Attention serves any prefix of what it has, a recurrent group only the positions at which it has a state. So a hit is
the deepest position that attention covers and at which every recurrent group has its state.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproof.spec.machine import pool
from kvproof.spec.machine.sizes import Sizes, ceil
from kvproof.spec.machine.world import Request, World
from kvproof.spec.rules.hits import hit_limit
from kvproof.spec.view import NULL

Blocks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Hit:
    """``tokens`` that need no work, in ``blocks[g]``. ``junction`` is where attention reaches beyond them (0: it does
    not). ``diverged``: attention was taken alone, and no recurrent group has a state there."""

    tokens: int
    blocks: Blocks
    junction: int = 0
    diverged: bool = False


def agreed(world: World, sizes: Sizes, request: Request) -> Hit:
    """The deepest position that every group can serve, leaving a token to compute."""
    reach, attention = _deepest(world, sizes, request)
    tokens, states = _states(world, sizes, request, reach)
    if not sizes.dialect.hits_as_keyed:
        attention = _covering(world, sizes, request, tokens)
    used = ceil(tokens, sizes.slot)
    blocks = tuple(
        states[i] if i in states else attention[i][:used] for i in range(len(sizes.config.groups))
    )  # fmt: skip
    return Hit(tokens, blocks, reach if reach > tokens else 0)


def apart(world: World, sizes: Sizes, request: Request) -> Hit:
    """Attention as deep as it goes, the states as deep as they go; agreed if a state lies deeper than attention."""
    reach, attention = _deepest(world, sizes, request)
    if not sizes.dialect.asks_once:
        return _beyond(agreed(world, sizes, request), reach, attention)
    tokens, states = _states(world, sizes, request, hit_limit(request.known))
    if tokens > reach:
        return agreed(world, sizes, request)
    blocks = tuple(states[i] if i in states else attention[i] for i in range(len(sizes.config.groups)))
    return Hit(reach, blocks, diverged=tokens < reach)


def _beyond(joint: Hit, reach: int, attention: dict[int, tuple[int, ...]]) -> Hit:
    """Attention as deep as it goes, the states as agreed."""
    if reach <= joint.tokens:
        return joint
    blocks = tuple(attention.get(group, found) for group, found in enumerate(joint.blocks))
    return Hit(reach, blocks, diverged=True)


def _deepest(world: World, sizes: Sizes, request: Request) -> tuple[int, dict[int, tuple[int, ...]]]:
    """How deep attention has the prefix, leaving a token to compute, and in which blocks."""
    if sizes.dialect.hits_as_keyed:
        return _attention(world, sizes, request, hit_limit(request.known))
    reach = _reach(world, sizes, request)
    return reach, _covering(world, sizes, request, reach)


def _attention(world: World, sizes: Sizes, request: Request, limit: int) -> tuple[int, dict[int, tuple[int, ...]]]:
    """How deep full attention has the prefix: whole blocks, then the last unit inside the next one that is keyed."""
    found: dict[int, list[int]] = {group: [] for group in sizes.attention}
    slot = sizes.slot
    depth = 0
    while depth + slot <= limit:
        row = [pool.find(world, group, request.states[depth + slot]) for group in sizes.attention]
        if any(block is None for block in row):
            break
        depth += slot
        for group, block in zip(sizes.attention, row, strict=True):
            found[group].append(block if block is not None else NULL)
    if sizes.grain < slot:
        for end in range(min(depth + slot - sizes.unit, limit // sizes.unit * sizes.unit), depth, -sizes.unit):
            row = [pool.find(world, group, request.states[end]) for group in sizes.attention]
            if all(block is not None for block in row):
                depth = end
                for group, block in zip(sizes.attention, row, strict=True):
                    found[group].append(block if block is not None else NULL)
                break
    depth -= depth % sizes.grain
    return depth, {group: tuple(blocks[: ceil(depth, slot)]) for group, blocks in found.items()}


def _states(world: World, sizes: Sizes, request: Request, limit: int) -> tuple[int, dict[int, tuple[int, ...]]]:
    """The deepest position up to ``limit`` at which every recurrent group has its state; null slots come before it."""
    step = sizes.grain if sizes.config.partial_hits else sizes.block
    for end in range(limit // step * step, 0, -step):
        row = [pool.find(world, group, request.states[end]) for group in sizes.recurrent]
        if all(block is not None for block in row):
            before = (NULL,) * (ceil(end, sizes.block) - 1)
            return end, {g: (*before, b if b is not None else NULL)
                         for g, b in zip(sizes.recurrent, row, strict=True)}  # fmt: skip
    return 0, dict.fromkeys(sizes.recurrent, ())


# -- any key of the prefix that covers a slot will do ----------------------------------------------------------------


def _reach(world: World, sizes: Sizes, request: Request) -> int:
    """How deep every attention group has the prefix, in grains that leave a token to compute."""
    depth = min(_depth(world, sizes, request, group) for group in sizes.attention)
    depth = min(depth, int(hit_limit(request.known)))
    return depth - depth % sizes.grain


def _depth(world: World, sizes: Sizes, request: Request, group: int) -> int:
    depth, slot, unit = 0, sizes.slot, sizes.unit
    while depth + slot <= request.known and pool.find(world, group, request.states[depth + slot]) is not None:
        depth += slot
    for end in range(min(depth + slot - 1, request.known) // unit * unit, depth, -unit):
        if pool.find(world, group, request.states[end]) is not None:
            return end
    return depth


def _covering(world: World, sizes: Sizes, request: Request, tokens: int) -> dict[int, tuple[int, ...]]:
    """For each slot of the first ``tokens``, a block that is keyed at their end or further on in the slot."""
    found: dict[int, list[int]] = {group: [] for group in sizes.attention}
    for group, blocks in found.items():
        for end in range(sizes.slot, tokens + sizes.slot, sizes.slot):
            ends = range(min(end, tokens), min(end, request.known) + 1, sizes.unit)
            blocks.append(_first_keyed(world, request, group, ends))
    return {group: tuple(blocks) for group, blocks in found.items()}


def _first_keyed(world: World, request: Request, group: int, ends: range) -> int:
    for position in ends:
        block = pool.find(world, group, request.states[position])
        if block is not None:
            return block
    return NULL
