"""The view of the reference engine: its own structures, as predicates see any cache."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvproof.impl.reference.memory import GARBAGE, Memory
from kvproof.impl.reference.pool import CacheEvent, KeyName
from kvproof.impl.reference.request import Request
from kvproof.impl.reference.scheduler import Scheduler
from kvproof.spec.config import Config
from kvproof.spec.tracer import State, length_of
from kvproof.spec.view import NULL, Holder, Key, MambaContent, RunningRequest


class ReferenceView:
    """Implements :class:`kvproof.spec.view.View`."""

    def __init__(self, config: Config, scheduler: Scheduler, memory: Memory) -> None:
        self._config = config
        self.scheduler, self.pool, self.memory = scheduler, scheduler.pool, memory
        self._holdings = Holdings(scheduler, config)
        self._announced: dict[int, dict[KeyName, None]] = {}
        self._touched: set[int] = set()

    @property
    def config(self) -> Config:
        return self._config

    @property
    def num_blocks(self) -> int:
        return len(self.pool.references)

    # -- pool ---------------------------------------------------------------------------------------------------------

    def references(self, block: int) -> int:
        return self.pool.references[block]

    def queued(self, block: int) -> bool:
        return block in self.pool.free

    def free_queue(self) -> Sequence[int]:
        return list(self.pool.free)

    def free_count(self) -> int:
        return len(self.pool.free)

    def queue_fault(self) -> str:
        return ""  # an ordered dictionary has no links to break

    # -- keys ---------------------------------------------------------------------------------------------------------

    def keys(self, block: int) -> Sequence[Key]:
        keys = self.pool.keys[block]
        return [Key(group, state, length_of(state)) for group, state in keys] if keys else ()

    def lookup_map(self) -> Mapping[KeyName, Collection[int]]:
        return self.pool.index

    def pending(self, block: int) -> bool:
        return False  # keys appear after the forward that makes their content

    def of_this_step(self, block: int) -> bool:
        return False

    def tails(self) -> Mapping[tuple[str, int], tuple[int, int]]:
        """(request, group) to the newest state it left or resumed from: its position and its block."""
        return {
            (name, group): own.newest
            for name, request in self.scheduler.requests.items()
            for group, own in request.recurrent.items()
            if own.newest is not None
        }

    def arriving(self) -> Mapping[str, Collection[int]]:
        """The blocks that asynchronous loads are still writing to, by request."""
        found = {}
        for name, flight in self.scheduler.store.flying.items():
            load = flight.load
            slots = [table[load.start // group.block_size :] for group, table in
                     zip(self._config.groups, load.tables, strict=True)]  # fmt: skip
            found[name] = {block for table in slots for block in table} | set(load.state) - {NULL}
            found[name].discard(NULL)
        return found

    def announced(self, block: int) -> Collection[KeyName] | None:
        """The keys of ``block`` according to the events told so far."""
        return self._announced.get(block, ())

    def hear(self, event: CacheEvent) -> None:
        """Follow the cache by what it announces, as a router would."""
        keys = self._announced.setdefault(event.block, {})
        if event.kind == "stored":
            keys[event.key] = None
        else:
            keys.pop(event.key, None)

    # -- holders ------------------------------------------------------------------------------------------------------

    def holders(self) -> Iterable[Holder]:
        for request in self.scheduler.requests.values():
            for group in range(len(self._config.groups)):
                yield from held_by(request, group, self._config)
        yield from self._passing()

    def holders_of(self, blocks: Collection[int]) -> Iterable[Holder]:
        """By an index that follows the tables, so that what nobody touched is not looked at."""
        self._holdings.follow()
        found: list[Holder] = []
        for block in blocks:
            found += self._holdings.of(block)
        found += [holder for holder in self._passing() if holder.block in blocks]
        return found

    def _passing(self) -> Iterable[Holder]:
        """Whatever holds a block until a step or a load is over."""
        step = self.scheduler.in_flight
        if step is not None:
            for source, target in step.copies:
                yield Holder("copy source", source)
                yield Holder("copy target", target)
            yield from (Holder("deferred free", block) for block in step.deferred)
        for name, blocks in self.scheduler.fenced.items():
            yield from (Holder(f"deferred free {name}", block) for block in blocks)

    def tables(self) -> Mapping[tuple[str, int], Sequence[int]]:
        """Attention tables as they are; a recurrent one is null up to its running state."""
        found: dict[tuple[str, int], Sequence[int]] = {}
        for name, request in self.scheduler.requests.items():
            for group in range(len(self._config.groups)):
                own = request.recurrent.get(group)
                if own is None:
                    found[name, group] = request.tables[group]
                elif own.running:
                    found[name, group] = [NULL] * column(request, self._config) + [own.running]
        return found

    def sharers(self, block: int) -> set[str]:
        """The requests that have ``block`` in a table or as scratch, as of :meth:`scheduled`; a hold reads nothing."""
        return {holder.request for holder in self._holdings.of(block) if not holder.owner.startswith("hold ")}

    def requests(self) -> Mapping[str, RunningRequest]:
        return {
            name: RunningRequest(name, request.states, request.prompt, request.computed, request.status.value)
            for name, request in self.scheduler.requests.items()
        }

    def bookkeeping(self) -> Sequence[str]:
        scheduler = self.scheduler
        left = [f"requests: {name}" for name in scheduler.requests]
        left += [f"waiting: {request.name}" for request in scheduler.waiting]
        left += [f"running: {request.name}" for request in scheduler.running]
        left += [f"fenced blocks: {name}" for name in scheduler.fenced]
        left += [f"load in flight: {name}" for name in scheduler.store.flying]
        left += [f"distrusted store: {name}" for name in scheduler.store.distrusted]
        return left

    def idle(self) -> bool:
        return not self.scheduler.requests and not self.scheduler.store.flying

    # -- contents -----------------------------------------------------------------------------------------------------

    def mamba_content(self, block: int) -> MambaContent | None:
        temporal, window = self.memory.state_at(block)
        return MambaContent(_known(temporal), (_known(window),))

    def attention_content(self, block: int, group: int) -> Sequence[State | None] | None:
        return [_known(mark) for mark in self.memory.tokens_at(block, self._config.groups[group].block_size)]

    def prefix(self, state: State) -> Sequence[State] | None:
        return self.scheduler.report.prefix(state)

    def broken_keys(self, block: int) -> Sequence[State]:
        """The keys of ``block`` that its content does not match."""
        keys = self.pool.keys[block]
        if not keys:
            return ()
        broken: list[State] = []
        for index, state in keys:
            group, length = self._config.groups[index], length_of(state)
            if group.kind == "mamba":
                good = self.memory.state_at(block) == (state, state)
            else:
                first = (length - 1) // group.block_size * group.block_size
                prefix = self.prefix(state)
                there = self.memory.tokens_at(block, group.block_size)[: length - first]
                good = prefix is not None and there == list(prefix[first:length])
            if not good:
                broken.append(state)
        return broken

    # -- what changed -------------------------------------------------------------------------------------------------

    def scheduled(self) -> None:
        """A step has been scheduled: until it is complete no table changes."""
        self._holdings.follow()

    def step_has_run(self, written: set[int]) -> None:
        """The whole step is over: what it touched is what changed since the last one."""
        self._touched = (written | self.pool.touched) - {NULL}
        self.pool.touched.clear()

    def touched(self) -> Collection[int]:
        return self._touched


def column(request: Request, config: Config) -> int:
    """The slot of a recurrent table in which the state at the computed position lies."""
    return max(0, -(-request.computed // config.mamba_block) - 1)


def held_by(request: Request, group: int, config: Config) -> list[Holder]:
    """What one request counts on in one group."""
    name = request.name
    own = request.recurrent.get(group)
    if own is None:
        owner = f"table {name}/{group}"
        slots = enumerate(request.tables[group])
        return [Holder(owner, block, name, group, slot) for slot, block in slots if block != NULL]
    found = [Holder(f"scratch {name}/{group}", block, name, group) for block in own.scratch]
    if own.running:
        found.append(Holder(f"table {name}/{group}", own.running, name, group, column(request, config)))
    if own.exporting:
        found.append(Holder(f"export {name}/{group}", own.exporting, name, group))
    if own.held is not None:
        found.append(Holder(f"hold {name}/{group}", own.held[1], name, group))
    return found


@dataclass
class Seen:
    """What one request counted on in one group when it was last looked at, and the holders that this makes."""

    mark: object = None
    holders: list[Holder] = field(default_factory=list)


class Holdings:
    """Block to its holders, kept up by comparing each request's tables with what they were.

    Comparing lists costs little; only where they differ is anything looked up.
    """

    def __init__(self, scheduler: Scheduler, config: Config) -> None:
        self._scheduler, self._config = scheduler, config
        self._last: dict[str, list[Seen]] = {}
        self._by_block: dict[int, list[Holder]] = {}

    def of(self, block: int) -> Sequence[Holder]:
        return self._by_block.get(block, ())

    def follow(self) -> None:
        """Catch up with the scheduler."""
        requests, config = self._scheduler.requests, self._config
        for name in self._last.keys() - requests.keys():
            for seen in self._last.pop(name):
                self._drop(seen.holders)
        for name, request in requests.items():
            last = self._last.get(name)
            if last is None:
                last = self._last[name] = [Seen() for _ in config.groups]
            for group, table in enumerate(request.tables):
                if table != last[group].mark and group not in request.recurrent:
                    self._renew(request, group, last[group])
                    last[group].mark = list(table)
            slot = column(request, config) if request.recurrent else 0
            for group, own in request.recurrent.items():
                mark = (slot, own.running, own.exporting, own.held, tuple(own.scratch))
                if mark != last[group].mark:
                    self._renew(request, group, last[group])
                    last[group].mark = mark

    def _renew(self, request: Request, group: int, seen: Seen) -> None:
        self._drop(seen.holders)
        seen.holders = held_by(request, group, self._config)
        for holder in seen.holders:
            self._by_block.setdefault(holder.block, []).append(holder)

    def _drop(self, holders: list[Holder]) -> None:
        for holder in holders:
            there = self._by_block[holder.block]
            there.remove(holder)
            if not there:
                del self._by_block[holder.block]


def _known(mark: int) -> State | None:
    return None if mark == GARBAGE else State(mark)
