"""One state as bytes. Two states that differ in names alone have the same bytes.

Blocks are named in the order in which they come up: in the tables of running requests, of those that load, of those
that wait, of loads, and then in the free queue. Requests are told apart by their place. So what is explored is one
state of each class, and nothing has to be permuted to see that two are the same (symmetry over blocks and requests).

What can never be seen is left out: the content of a block that is free and has no key, and which prefix a content is
that no request can have (a rejected draft's).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvproof.models.explore.scope import Scope
from kvproof.spec.machine.world import RECURRENT, TOKENS, Content, Flight, Request, Status, World
from kvproof.spec.tracer import EMPTY, State, length_of
from kvproof.spec.view import Key

OTHER: Final = 0
"""Stands for a prefix that no request can have, and in place of a content for garbage of one state or token each."""
NOTHING: Final = 255
MOST: Final = 250
"""Blocks, and prefixes, that can be told apart in a byte."""


class _Writer:
    """What has been written, and the names that blocks got on the way. ``names[b]`` is 0 as long as b has none."""

    def __init__(self, blocks: int, symmetry: bool) -> None:
        self.out = bytearray()
        self.names: list[int] = [0] * blocks if symmetry else list(range(blocks))
        self.order: list[int] = [] if symmetry else list(range(1, blocks))

    def table(self, table: Sequence[int]) -> None:
        out, names = self.out, self.names
        out.append(len(table))
        for block in table:
            name = names[block]
            if name == 0 and block != 0:
                self.order.append(block)
                name = names[block] = len(self.order)
            out.append(name)


class _Reader:
    """What is left to read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.place = 0

    def next(self) -> int:
        value = self.data[self.place]
        self.place += 1
        return value

    def take(self, count: int) -> bytes:
        self.place += count
        return self.data[self.place - count : self.place]

    def table(self) -> list[int]:
        return list(self.take(self.next()))


class Encoding:
    """Bytes of worlds of one scope, and back. At most :data:`MOST` blocks and prefixes: raises ``ValueError``."""

    def __init__(self, scope: Scope, symmetry: bool = True) -> None:
        self.scope = scope
        self.symmetry = symmetry
        self.groups = len(scope.config.groups)
        self.blocks = scope.config.num_blocks
        states: list[State] = [EMPTY]
        for sequence in scope.sequences:
            states += [state for state in sequence if state not in states]
        if len(states) > MOST or self.blocks > MOST:
            raise ValueError(
                f"scope {scope.name} has {len(states)} prefixes and {self.blocks} blocks: "
                f"at most {MOST} of each can be told apart in a byte"
            )
        if not scope.dialect.moves_states:
            raise ValueError(
                f"scope {scope.name} speaks a dialect in which states are not moved: "
                "what requests hold there has no bytes yet"
            )
        self.states = states
        self.number: dict[State, int] = {state: index for index, state in enumerate(states)}
        self._prompts: dict[tuple[State, int], int] = {}
        for number, prompt in reversed(list(enumerate(scope.prompts))):
            self._prompts[scope.sequences[number][prompt.length], prompt.missing] = number
        # What a block is, and its bytes: the same few come up again and again.
        self._bytes: dict[tuple[int, tuple[Key, ...], Content], bytes] = {}
        self._contents: dict[bytes, Content] = {}

    # -- to bytes -----------------------------------------------------------------------------------------------------

    def encode(self, world: World) -> bytes:
        """The bytes of ``world``."""
        writer = _Writer(self.blocks, self.symmetry)
        out = writer.out
        for queue in (world.running, world.loading, world.waiting):
            out.append(len(queue))
            for request in queue:
                self._request(request, writer)
        out.append(len(world.flights))
        if world.flights:
            names = {request.name: place for place, request in enumerate(world.requests())}
            for flight in world.flights:
                self._flight(flight, names, writer)
        writer.table(world.queue)
        for block in writer.order:
            what = (world.references[block], tuple(world.keys[block]), world.contents[block])
            found = self._bytes.get(what)
            if found is None:
                found = self._bytes[what] = self._block(*what)
            out += found
        shared = [(key[0], self.number[key[1]], blocks) for key, blocks in world.index.items() if len(blocks) > 1]
        if shared:
            shared.sort(key=lambda entry: (entry[0], entry[1]))
            for group, number, blocks in shared:
                out.append(group)
                out.append(number)
                writer.table(blocks)
        return bytes(out)

    def _request(self, request: Request, writer: _Writer) -> None:
        prompt = self._prompts.get((request.states[request.prompt], request.missing), -1)
        if prompt < 0:
            raise ValueError(f"request {request.name} has a prompt that the scope does not")
        out = writer.out
        flags = 8 if request.grown else 0
        flags += (1 if request.preempted else 0) + (2 if request.finishing else 0) + (4 if request.prefilling else 0)
        out += bytes((
            prompt, len(request.states) - 1, request.status, request.computed, request.drafts,
            request.junction, flags, request.retired, request.previous + 1, request.column + 1, request.accepted,
            request.store,
        ))  # fmt: skip
        writer.table(request.pins)
        for group in range(self.groups):
            out.append(request.cached[group] + 1)
            out.append(request.partial[group] + 1)
            writer.table(request.tables[group])

    def _flight(self, flight: Flight, names: dict[str, int], writer: _Writer) -> None:
        writer.out += bytes((
            NOTHING if flight.orphan else names[flight.request], flight.steps, flight.start, flight.end,
            flight.missing, self.number[flight.states[-1]],
        ))  # fmt: skip
        for table in flight.tables:
            writer.table(table)

    def _block(self, references: int, keys: tuple[Key, ...], content: Content) -> bytes:
        out = bytearray((references, len(keys)))
        for key in keys:
            out.append(key.group)
            out.append(self.number[key.state])
        if len(content) == 0 or (references == 0 and len(keys) == 0):
            out.append(0)
            return bytes(out)
        out.append(len(content))
        out.append(1 if content[0] == RECURRENT else 2)
        for place in range(1, len(content)):
            state = content[place]
            out.append(NOTHING if state is None else self.number.get(state, OTHER))
        return bytes(out)

    # -- and back -----------------------------------------------------------------------------------------------------

    def decode(self, data: bytes) -> World:
        """A world that has these bytes."""
        reader = _Reader(data)
        world = World.empty(self.scope.config)
        place = 0
        for queue in (world.running, world.loading, world.waiting):
            for _ in range(reader.next()):
                queue.append(self._read_request(reader, str(place)))
                place += 1
        for _ in range(reader.next()):
            flight = self._read_flight(reader, str(place))
            if flight.orphan:
                place += 1
            world.flights.append(flight)
        world.queue = reader.table()
        for block in range(1, self.blocks):
            self._read_block(reader, world, block)
        while reader.place < len(data):
            group = reader.next()
            state = self.states[reader.next()]
            world.index[group, state] = reader.table()
        return world

    def _read_request(self, reader: _Reader, name: str) -> Request:
        number, known = reader.next(), reader.next()
        prompt = self.scope.prompts[number]
        request = Request(
            name, list(self.scope.sequences[number][: known + 1]), prompt.length, self.scope.outputs, 0, prompt.missing
        )
        request.status = Status(reader.next())
        request.computed, request.drafts, request.junction = reader.next(), reader.next(), reader.next()
        flags = reader.next()
        request.preempted, request.finishing = bool(flags & 1), bool(flags & 2)
        request.prefilling, request.grown = bool(flags & 4), bool(flags & 8)
        request.retired, request.previous, request.column = reader.next(), reader.next() - 1, reader.next() - 1
        request.accepted, request.store = reader.next(), reader.next()
        request.pins = reader.table()
        for _ in range(self.groups):
            request.cached.append(reader.next() - 1)
            request.partial.append(reader.next() - 1)
            request.tables.append(reader.table())
        return request

    def _read_flight(self, reader: _Reader, nobody: str) -> Flight:
        """``nobody`` is what the request of an orphan is called."""
        who, steps, start, end = reader.next(), reader.next(), reader.next(), reader.next()
        missing, last = reader.next(), self.states[reader.next()]
        tables = tuple([tuple(reader.table()) for _ in range(self.groups)])
        states = next(
            sequence[: end + 1] for sequence in self.scope.sequences if len(sequence) > end and sequence[end] == last
        )
        orphan = who == NOTHING
        return Flight(nobody if orphan else str(who), steps, start, end, missing, tables, states, orphan)

    def _read_block(self, reader: _Reader, world: World, block: int) -> None:
        world.references[block] = reader.next()
        for _ in range(reader.next()):
            group, state = reader.next(), self.states[reader.next()]
            world.keys[block].append(Key(group, state, length_of(state)))
            world.index.setdefault((group, state), []).append(block)
        size = reader.next()
        if size == 0:
            return
        told = reader.take(size)
        content = self._contents.get(told)
        if content is None:
            content = self._contents[told] = self._content(told)
        world.contents[block] = content

    def _content(self, told: bytes) -> Content:
        states = [None if number == NOTHING else self.states[number] if number else State(-9) for number in told[1:]]
        return (RECURRENT if told[0] == 1 else TOKENS, *states)
