"""The view of a world: what predicates see of the abstract machine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from kvproof.spec.config import Config
from kvproof.spec.machine.world import LOADING, RECURRENT, RUNNING, TOKENS, World
from kvproof.spec.tracer import State
from kvproof.spec.view import NULL, Holder, Key, MambaContent, RunningRequest


class MachineView:
    """Implements :class:`kvproof.spec.view.View`. ``world`` is what is looked at; whoever moves on replaces it."""

    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.world = world
        self.prefixes: dict[State, Sequence[State]] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.world.references)

    # -- pool and keys ------------------------------------------------------------------------------------------------

    def references(self, block: int) -> int:
        return self.world.references[block]

    def queued(self, block: int) -> bool:
        return block in self.world.queue

    def free_queue(self) -> Sequence[int]:
        return self.world.queue

    def free_count(self) -> int:
        return len(self.world.queue)

    def queue_fault(self) -> str:
        return "" if len(set(self.world.queue)) == len(self.world.queue) else "a block is queued twice"

    def keys(self, block: int) -> Sequence[Key]:
        return self.world.keys[block]

    def lookup_map(self) -> Mapping[tuple[int, State], Collection[int]]:
        return self.world.index

    def pending(self, block: int) -> bool:
        due = self.world.due
        return due is not None and not due.get(block, frozenset()) >= set(self.world.keys[block])

    def of_this_step(self, block: int) -> bool:
        return self.pending(block)

    # -- holders ------------------------------------------------------------------------------------------------------

    def holders(self) -> Iterable[Holder]:
        for request in self.world.requests():
            for group, table in enumerate(request.tables):
                for slot, block in enumerate(table):
                    if block != NULL:
                        yield Holder(f"table {request.name}/{group}", block, request.name, group, slot)
            yield from (Holder(f"pin of {request.name}", block) for block in request.pins)
            for group, blocks in request.scratch.items():
                yield from (Holder(f"scratch {request.name}/{group}", block, request.name, group) for block in blocks)
            for group, (_, block) in request.held.items():
                yield Holder(f"hold {request.name}/{group}", block, request.name, group)
        for _, source, target in self.world.copies:
            yield Holder("copy source", source)
            yield Holder("copy target", target)
        yield from (Holder("deferred free", block) for block in self.world.deferred or ())
        for flight in self.world.flights:
            if flight.orphan:
                for held in flight.tables:
                    yield from (Holder(f"load for {flight.request}", block) for block in held if block != NULL)

    def holders_of(self, blocks: Collection[int]) -> Iterable[Holder]:
        return (holder for holder in self.holders() if holder.block in blocks)

    def tables(self) -> Mapping[tuple[str, int], Sequence[int]]:
        return {
            (request.name, group): table
            for request in self.world.requests()
            for group, table in enumerate(request.tables)
            if table
        }

    def requests(self) -> Mapping[str, RunningRequest]:
        found = {}
        for request in self.world.requests():
            waits = "PREEMPTED" if request.preempted else "WAITING"
            status = "RUNNING" if request.status == RUNNING else "LOADING" if request.status == LOADING else waits
            found[request.name] = RunningRequest(
                request.name, request.states, request.prompt, request.computed, status
            )  # fmt: skip
        return found

    def bookkeeping(self) -> Sequence[str]:
        left = [f"request: {request.name}" for request in self.world.requests()]
        return left + [f"load: {flight.request}" for flight in self.world.flights]

    def idle(self) -> bool:
        return not self.world.requests() and not self.world.flights

    # -- contents -----------------------------------------------------------------------------------------------------

    def mamba_content(self, block: int) -> MambaContent | None:
        content = self.world.contents[block]
        state = content[1] if content[:1] == (RECURRENT,) else None
        return MambaContent(state, (state,))

    def attention_content(self, block: int, group: int) -> Sequence[State | None] | None:
        content, size = self.world.contents[block], self.config.groups[group].block_size
        return content[1:] if content[:1] == (TOKENS,) else [None] * size

    def prefix(self, state: State) -> Sequence[State] | None:
        return self.prefixes.get(state)

    def learn(self, states: Sequence[State]) -> None:
        """A request has these prefixes: whoever asks what leads to one of them is told."""
        for length in range(len(states) - 1, 0, -1):
            if states[length] in self.prefixes:
                break
            self.prefixes[states[length]] = states[1 : length + 1]

    # -- what a machine does not keep apart ---------------------------------------------------------------------------

    def tails(self) -> Mapping[tuple[str, int], tuple[int, int]]:
        return {}

    def arriving(self) -> Mapping[str, Collection[int]]:
        return {
            flight.request: [
                block
                for group, table in enumerate(flight.tables)
                for block in self._written_by_load(group, table, flight.start)
            ]
            for flight in self.world.flights
        }

    def _written_by_load(self, group: int, table: Sequence[int], start: int) -> Sequence[int]:
        size = self.config.groups[group].block_size
        return [block for slot, block in enumerate(table) if block != NULL and slot >= start // size]

    def announced(self, block: int) -> Collection[tuple[int, State]] | None:
        return None

    def touched(self) -> Collection[int]:
        return self.world.touched - {NULL}
