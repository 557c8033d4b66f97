"""One state as bytes. Two states that differ in names alone have the same bytes.

Blocks are named in the order in which they come up: in the tables of running requests, of those that load, of those
that wait, of loads, and then in the free queue. Requests are told apart by their place. So what is explored is one
state of each class, and nothing has to be permuted to see that two are the same (symmetry over blocks and requests).

What can never be seen is left out: the content of a block that is free and has no key, and which prefix a content is
that no request can have (a rejected draft's).
"""

from __future__ import annotations

from kvproof.models.explore.scope import Scope
from kvproof.spec.machine.world import RECURRENT, TOKENS, Content, Flight, Request, Status, World
from kvproof.spec.tracer import EMPTY, State, length_of
from kvproof.spec.view import Key

OTHER = 0
NOTHING = 255


class Encoding:
    """Bytes of worlds of one scope, and back. At most 250 blocks and 250 prefixes."""

    def __init__(self, scope: Scope, symmetry: bool = True) -> None:
        self.scope = scope
        self.symmetry = symmetry
        self.groups = len(scope.config.groups)
        states: list[State] = [EMPTY]
        self.prompt_of: dict[tuple[State, ...], int] = {}
        for sequence in scope.sequences:
            states += [state for state in sequence if state not in states]
        if len(states) > 250 or scope.config.num_blocks > 250:
            raise ValueError(f"scope {scope.name} has {len(states)} prefixes and {scope.config.num_blocks} blocks: "
                             "at most 250 of each can be told apart in a byte")  # fmt: skip
        self.states = states
        self.number = {state: index for index, state in enumerate(states)}
        self.lengths = [length_of(state) for state in states]

    # -- to bytes -----------------------------------------------------------------------------------------------------

    def encode(self, world: World) -> bytes:
        out: list[int] = []
        name = [0] * len(world.references)
        order: list[int] = []
        if not self.symmetry:
            order = list(range(1, len(world.references)))
            name = list(range(len(world.references)))

        def named(block: int) -> int:
            if block and not name[block]:
                order.append(block)
                name[block] = len(order)
            return name[block]

        for queue in (world.running, world.loading, world.waiting):
            out.append(len(queue))
            for request in queue:
                self._request(request, out, named)
        names = {request.name: place for place, request in enumerate(world.requests())}
        out.append(len(world.flights))
        for flight in world.flights:
            self._flight(flight, names, out, named)
        out.append(len(world.queue))
        for block in world.queue:
            out.append(named(block))
        for block in order:
            self._block(world, block, out)
        for key in sorted((key for key, blocks in world.index.items() if len(blocks) > 1),
                          key=lambda key: (key[0], self.number[key[1]])):  # fmt: skip
            out += [key[0], self.number[key[1]], len(world.index[key]), *(name[b] for b in world.index[key])]
        return bytes(out)

    def _request(self, request: Request, out: list[int], named) -> None:  # type: ignore[no-untyped-def]
        prompt = self._prompt(request)
        out += [prompt, request.known, request.status, request.computed, request.drafts, request.junction,
                request.preempted + 2 * request.finishing + 4 * request.prefilling + 8 * request.grown,
                request.retired, request.previous + 1, request.column + 1, request.accepted, request.store]  # fmt: skip
        out.append(len(request.pins))
        for block in request.pins:
            out.append(named(block))
        for group in range(self.groups):
            table = request.tables[group]
            out += [request.cached[group] + 1, request.partial[group] + 1, len(table)]
            for block in table:
                out.append(named(block))

    def _prompt(self, request: Request) -> int:
        """The menu's number of a request's prompt: the first that starts like it, with as much in the store."""
        last = request.states[request.prompt]
        for number, prompt in enumerate(self.scope.prompts):
            same = prompt.length == request.prompt and self.scope.sequences[number][request.prompt] == last
            if same and prompt.missing == request.missing:
                return number
        raise ValueError(f"request {request.name} has a prompt that the scope does not")

    def _flight(self, flight: Flight, names: dict[str, int], out: list[int], named) -> None:  # type: ignore[no-untyped-def]
        out += [NOTHING if flight.orphan else names[flight.request], flight.steps, flight.start, flight.end,
                flight.missing, self.number[flight.states[-1]]]  # fmt: skip
        for table in flight.tables:
            out.append(len(table))
            for block in table:
                out.append(named(block))

    def _block(self, world: World, block: int, out: list[int]) -> None:
        keys = world.keys[block]
        out += [world.references[block], len(keys)]
        for key in keys:
            out += [key.group, self.number[key.state]]
        content = world.contents[block]
        if not content or not (keys or world.references[block]):
            out.append(0)
            return
        out += [len(content), 1 if content[0] == RECURRENT else 2]
        out += [NOTHING if state is None else self.number.get(state, OTHER) for state in content[1:]]

    # -- and back -----------------------------------------------------------------------------------------------------

    def decode(self, data: bytes) -> World:
        reader = iter(data)
        take = reader.__next__
        world = World.empty(self.scope.config)
        queues: list[list[Request]] = []
        place = 0
        for _ in range(3):
            queue = []
            for _ in range(take()):
                queue.append(self._read_request(take, str(place)))
                place += 1
            queues.append(queue)
        world.running, world.loading, world.waiting = queues
        orphans = place
        for _ in range(take()):
            flight = self._read_flight(take)
            if flight.orphan:
                flight = Flight(str(orphans), flight.steps, flight.start, flight.end, flight.missing, flight.tables,
                                flight.states, True)  # fmt: skip
                orphans += 1
            world.flights.append(flight)
        world.queue = [take() for _ in range(take())]
        for block in range(1, self.scope.config.num_blocks):
            self._read_block(take, world, block)
        while True:
            group = next(reader, None)
            if group is None:
                return world
            key = (group, self.states[take()])
            world.index[key] = [take() for _ in range(take())]

    def _read_request(self, take, name: str) -> Request:  # type: ignore[no-untyped-def]
        number, known = take(), take()
        prompt, sequence = self.scope.prompts[number], self.scope.sequences[number]
        request = Request(name, list(sequence[: known + 1]), prompt.length, self.scope.outputs, 0, prompt.missing)
        request.status = Status(take())
        request.computed, request.drafts, request.junction = take(), take(), take()
        flags = take()
        request.preempted, request.finishing = bool(flags & 1), bool(flags & 2)
        request.prefilling, request.grown = bool(flags & 4), bool(flags & 8)
        request.retired, request.previous, request.column = take(), take() - 1, take() - 1
        request.accepted, request.store = take(), take()
        request.pins = [take() for _ in range(take())]
        for _ in range(self.groups):
            request.cached.append(take() - 1)
            request.partial.append(take() - 1)
            request.tables.append([take() for _ in range(take())])
        return request

    def _read_flight(self, take) -> Flight:  # type: ignore[no-untyped-def]
        who, steps, start, end, missing, last = take(), take(), take(), take(), take(), self.states[take()]
        tables = tuple(tuple(take() for _ in range(take())) for _ in range(self.groups))
        states = next(sequence[: end + 1] for sequence in self.scope.sequences
                      if len(sequence) > end and sequence[end] == last)  # fmt: skip
        return Flight(str(who), steps, start, end, missing, tables, states, who == NOTHING)

    def _read_block(self, take, world: World, block: int) -> None:  # type: ignore[no-untyped-def]
        world.references[block] = take()
        for _ in range(take()):
            group, state = take(), self.states[take()]
            world.keys[block].append(Key(group, state, length_of(state)))
            world.index.setdefault((group, state), []).append(block)
        size = take()
        if size:
            kind = RECURRENT if take() == 1 else TOKENS
            rest: list[State | None] = []
            for _ in range(size - 1):
                number = take()
                rest.append(None if number == NOTHING else self.states[number] if number else State(-9))
            content: Content = (kind, *rest)
            world.contents[block] = content
