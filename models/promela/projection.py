"""A state in words, as the Promela model prints it: everything that can differ in a world without drafts and store.

Requests in order, running ones first; the free queue from its front; by block its references, its keys (group and
number of the prefix, the primary one first) and what it holds; and where several blocks have one key, in which order.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvproof.models.explore.encoding import Encoding
from kvproof.models.explore.scope import Scope
from kvproof.models.explore.shard import Shard
from kvproof.spec.machine.world import RECURRENT, RUNNING, Request, World
from kvproof.spec.tracer import State


@dataclass(frozen=True)
class Visited:
    """What the explorer saw of a world without symmetry: its states in words, how many there were as bytes, the moves
    between them, and in how many seconds it found them, nothing judged and nothing told."""

    states: frozenset[str]
    stored: int
    transitions: int
    seconds: float

    @property
    def rate(self) -> float:
        """Distinct states per second."""
        return self.stored / self.seconds


def visited(scope: Scope) -> Visited:
    """Visit every state of ``scope``, blocks called by their names."""
    shard = Shard(scope, judged=False, symmetry=False)
    began = time.perf_counter()
    shard.start()
    while shard.frontier:
        shard.level()
    seconds = time.perf_counter() - began
    told = frozenset(words(shard.encoding, shard.encoding.decode(state)) for state in shard.states)
    return Visited(told, len(shard.states), shard.transitions, seconds)


def words(encoding: Encoding, world: World) -> str:
    """One state, on a line of its own."""
    number = encoding.number
    parts = [_request(encoding, request) for request in world.requests()]
    parts.append(" ".join(["free", *map(str, world.queue)]))
    for block in range(1, len(world.references)):
        keys = "".join(f" key {key.group}.{number[key.state]}" for key in world.keys[block])
        parts.append(f"{block} ref {world.references[block]}{keys}{_content(encoding, world, block)}")
    for group, state in sorted(world.index, key=lambda name: (name[0], number[name[1]])):
        blocks = world.index[group, state]
        if len(blocks) > 1:
            parts.append(f"key {group}.{number[state]} in {' '.join(map(str, blocks))}")
    return "; ".join(parts)


def _request(encoding: Encoding, request: Request) -> str:
    tables = "".join(
        f" [cached {cached} partial {partial}:{''.join(f' {block}' for block in table)}]"
        for cached, partial, table in zip(request.cached, request.partial, request.tables, strict=True)
    )
    flags = [name for name in ("preempted", "prefilling", "grown") if getattr(request, name)]
    return (
        f"{'runs' if request.status == RUNNING else 'waits'} {_prompt(encoding.scope, request)}/{request.known} "
        f"at {request.computed} junction {request.junction}{''.join(f' {flag}' for flag in flags)} "
        f"retired {request.retired} previous {request.previous} column {request.column}{tables}"
    )


def _prompt(scope: Scope, request: Request) -> int:
    for number, prompt in enumerate(scope.prompts):
        if prompt.length == request.prompt and list(scope.sequences[number][: request.known + 1]) == request.states:
            return number
    raise ValueError(f"request {request.name} has a prompt that scope {scope.name} does not")


def _content(encoding: Encoding, world: World, block: int) -> str:
    content = world.contents[block]
    if not content:
        return ""
    held: list[State | None] = list(content[1:])
    told = ["-" if state is None else str(encoding.number.get(state, 0)) for state in held]
    return " ".join([" state" if content[0] == RECURRENT else " tokens", *told])
