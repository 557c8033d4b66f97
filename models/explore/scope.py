"""A small world: its configuration, who may ask for what, and who may interfere.

Bounds are what is bounded and nothing else: how many requests there are at once, which prompts they may have, how many
tokens they put out. How often requests come and go is not bounded: the machine is explored until nothing new appears.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvproof.spec.config import Config
from kvproof.spec.machine.device import next_token
from kvproof.spec.machine.dialect import SPECIFICATION, Dialect
from kvproof.spec.machine.machine import Machine
from kvproof.spec.machine.world import LOADING, RUNNING, World
from kvproof.spec.tracer import EMPTY, State, advance


@dataclass(frozen=True)
class Prompt:
    """``length`` tokens, of which the first ``shared`` are those of prompt number ``base`` and what was put out on it.

    A ``base`` of −1: all of them are its own. An external store holds ``store`` of them, and may lose the last
    ``missing``.
    """

    length: int
    base: int = -1
    shared: int = 0
    store: int = 0
    missing: int = 0


@dataclass(frozen=True)
class Move:
    """One action of a small world. ``request`` is its place in :meth:`World.requests`, ``prompt`` a number in the menu,
    ``accept`` how many drafts the model agrees with, for each running request that has any, in order."""

    kind: str
    request: int = -1
    prompt: int = -1
    accept: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind == "submit":
            return f"submit prompt {self.prompt}"
        if self.kind == "step":
            return f"step, {' and '.join(map(str, self.accept))} drafts accepted" if self.accept else "step"
        return self.kind if self.request < 0 else f"{self.kind} request {self.request}"


@dataclass(frozen=True)
class Scope:
    """What is explored. ``outputs`` is how many tokens a request puts out at most, ``requests`` how many are there at
    once. ``moves`` names what may happen besides submissions and steps."""

    name: str
    config: Config
    prompts: tuple[Prompt, ...]
    requests: int = 2
    outputs: int = 1
    moves: frozenset[str] = frozenset({"abort", "preempt", "evict"})
    dialect: Dialect = SPECIFICATION
    sequences: tuple[tuple[State, ...], ...] = field(init=False, compare=False, repr=False, default=())
    """The prefixes of each prompt, and of what is put out on it."""

    def __post_init__(self) -> None:
        sequences: list[tuple[State, ...]] = []
        for number, prompt in enumerate(self.prompts):
            states = list(sequences[prompt.base][: prompt.shared + 1]) if prompt.base >= 0 else [EMPTY]
            for place in range(len(states) - 1, prompt.length):
                states.append(advance(states[-1], 1000 * (number + 1) + place))
            for _ in range(self.outputs):
                states.append(advance(states[-1], next_token(states[-1])))
            sequences.append(tuple(states))
        object.__setattr__(self, "sequences", tuple(sequences))

    def machine(self) -> Machine:
        """A machine for this world, which nobody observes. What a model says does not depend on its drafts."""
        return Machine(self.config, branches=False, dialect=self.dialect)

    def possible(self, world: World) -> Iterator[Move]:
        """Everything that can happen in ``world``."""
        here = world.requests()
        if len(here) < self.requests:
            for number in range(len(self.prompts)):
                yield Move("submit", prompt=number)
        if here or world.flights:
            drafted = sum(request.drafts > 0 for request in world.running)
            for accept in itertools.product(range(self.config.speculative + 1), repeat=drafted):
                yield Move("step", accept=accept)
        for place, request in enumerate(here):
            if "abort" in self.moves:
                yield Move("abort", place)
            if "preempt" in self.moves and request.status == RUNNING:
                yield Move("preempt", place)
            if "finish" in self.moves and not request.finishing and request.status != LOADING:
                yield Move("finish", place)
        if "evict" in self.moves and any(world.keys[block] for block in world.queue):
            yield Move("evict")
        if "reset" in self.moves and not here and len(world.queue) == self.config.num_blocks - 1 and world.index:
            yield Move("reset")

    def carry_out(self, machine: Machine, move: Move) -> None:
        """Do ``move`` to the machine's world."""
        if move.kind == "submit":
            prompt = self.prompts[move.prompt]
            states = self.sequences[move.prompt][: prompt.length + 1]
            machine.submit(self.free_name(machine.world), states, self.outputs, prompt.store, prompt.missing)
        elif move.kind == "step":
            machine.step(move.accept)
        elif move.kind == "evict":
            machine.evict(1)
        elif move.kind == "reset":
            machine.reset()
        else:
            name = machine.world.requests()[move.request].name
            if move.kind == "abort":
                machine.abort(name)
            elif move.kind == "preempt":
                machine.preempt(name)
            else:
                machine.finish(name)

    def free_name(self, world: World) -> str:
        """A name that no request has, nor any load that is still under way."""
        taken = {request.name for request in world.requests()} | {flight.request for flight in world.flights}
        return next(name for name in (str(number) for number in range(len(taken) + 1)) if name not in taken)
