"""The pool: what one action does to references, the free queue and keys.

Each function is the action of the same name in :mod:`kvproof.spec.rules.ledger`, carried out on blocks of a world. A
free block keeps its keys until it is taken. Blocks that nobody can hit go to the front of the queue, the others to its
end (as vLLM does from 0.28 on).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvproof.spec.machine.world import World
from kvproof.spec.tracer import State
from kvproof.spec.view import NULL, Key


def take(world: World, count: int) -> list[int]:
    """The first ``count`` blocks of the queue, each with one reference and without its keys. The caller has asked
    whether there are as many."""
    taken, world.queue = world.queue[:count], world.queue[count:]
    for block in taken:
        forget(world, block)
        world.references[block] += 1
        world.touched.add(block)
        if world.due is not None:
            world.due.pop(block, None)  # if it is keyed as the same again, that is a new promise
    return taken


def touch(world: World, blocks: Sequence[int]) -> None:
    """Hit blocks are adopted: one more reference each; a free one leaves the queue and keeps its keys."""
    for block in blocks:
        if block == NULL:
            continue
        if world.references[block] == 0:
            world.queue.remove(block)
        world.references[block] += 1
        world.touched.add(block)


def release(world: World, blocks: Sequence[int]) -> None:
    """One reference less each. Those that are free now join the queue in this order: at its front if they carry no
    key, at its end otherwise."""
    front: list[int] = []
    for block in blocks:
        if block == NULL:
            continue
        world.references[block] -= 1
        world.touched.add(block)
        if world.references[block] == 0:
            if world.keys[block]:
                world.queue.append(block)
            else:
                front.append(block)
    world.queue[:0] = front


def register(world: World, block: int, key: Key) -> None:
    """``block`` can be found as ``key``."""
    if key in world.keys[block]:
        return
    world.keys[block].append(key)
    world.index.setdefault((key.group, key.state), []).append(block)
    world.touched.add(block)


def forget(world: World, block: int) -> None:
    """The block loses its keys."""
    for key in world.keys[block]:
        name = (key.group, key.state)
        blocks = world.index[name]
        blocks.remove(block)
        if not blocks:
            del world.index[name]
        world.touched.add(block)
    world.keys[block] = []


def move_keys(world: World, source: int, target: int) -> None:
    """The keys of ``source`` move to ``target``, which is going to hold a copy of it."""
    keys = world.keys[source]
    forget(world, source)
    for key in keys:
        register(world, target, key)


def find(world: World, group: int, state: State) -> int | None:
    """The block that was first found under this key of those that still are."""
    blocks = world.index.get((group, state))
    return blocks[0] if blocks else None


def noted(world: World, block: int) -> int:
    """How many tokens the block's primary key stands for; 0 where it has none."""
    keys = world.keys[block]
    return keys[0].tokens if keys else 0


def writable(world: World, block: int) -> bool:
    """Whether its one owner may write it: nobody else counts on it, and it promises nothing."""
    return block != NULL and world.references[block] == 1 and not world.keys[block]
