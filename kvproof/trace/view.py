"""The cache as a trace tells it: pool, keys, tables and holders, and the shadow of the device.

Nothing here grows with the length of the trace: what is gone, or forgotten by the recording, is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, overload

from kvproof.impl.vllm.device import Device
from kvproof.impl.vllm.live.sequences import FRESH, POSITION_BITS
from kvproof.impl.vllm.rows import WorkerRequest
from kvproof.spec import sharing
from kvproof.spec.config import Config
from kvproof.spec.tracer import EMPTY, State, advance, length_of
from kvproof.spec.view import NULL, Holder, Key, MambaContent, RunningRequest


class Way(Sequence[State]):
    """The states after 1 … n tokens of a sequence, without a copy."""

    __slots__ = ("_end", "_states")

    def __init__(self, states: Sequence[State], end: int) -> None:
        self._states, self._end = states, end

    def __len__(self) -> int:
        return self._end

    @overload
    def __getitem__(self, at: int) -> State: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[State]: ...
    def __getitem__(self, at: int | slice) -> State | Sequence[State]:
        if isinstance(at, slice):
            start, stop, step = at.indices(self._end)
            return self._states[start + 1 : stop + 1 : step]
        return self._states[at + 1 if at >= 0 else self._end + at + 1]


class Told:
    """One sequence: ``states[n]`` after its first n tokens. ``name`` is its request's id."""

    __slots__ = ("name", "number", "over", "prompt", "states")

    def __init__(self, number: int, name: str, states: list[State], prompt: int) -> None:
        self.number, self.name, self.states, self.prompt = number, name, states, prompt
        self.over = False

    def add(self, numbers: Iterable[int]) -> None:
        states = self.states
        state = states[-1]
        for number in numbers:
            state = advance(state, number)
            states.append(state)

    def extend_fresh(self, origin: int, end: int) -> None:
        """Up to ``end`` tokens, those that sequence ``origin`` brought."""
        first = FRESH + (origin << POSITION_BITS)
        self.add(range(first + len(self.states) - 1, first + end))


class TraceView:
    """Implements :class:`kvproof.spec.view.View`. ``device`` is ``None`` where contents can't be followed."""

    def __init__(self, config: Config, device: Device | None) -> None:
        self.config, self.device = config, device
        self.num_blocks = config.num_blocks
        self.counts = [0] * config.num_blocks
        self.free = dict.fromkeys(range(1, config.num_blocks))
        """The free blocks, in the order in which they became free."""
        self.said_free = config.num_blocks - 1
        self.null_count = 0
        self.sequences: dict[int, Told] = {}
        self.live: dict[str, Told] = {}
        self.due: dict[int, int] = {}
        """Block to the step in which its newest key appeared, as long as that step has not run."""
        self.scheduled = -1
        """The newest step that is scheduled."""
        self.stamps: dict[int, int] = {}
        self.changed: set[int] = set()
        """Blocks whose keys, or whose place in tables, changed."""
        self.counted: set[int] = set()
        """Blocks whose references changed."""
        self.passing: list[Holder] = []
        self.left: Sequence[str] = ()
        self.waiting = True
        self._keys: dict[int, list[Key]] = {}
        self._map: dict[tuple[int, State], set[int]] = {}
        self._ways: dict[State, tuple[list[State], int]] = {}
        self._tables: dict[tuple[str, int], list[int]] = {}
        self._by_block: dict[int, list[Holder]] = {}
        self._touched: set[int] = set()
        self._contents: set[int] = set()

    # -- what events do -----------------------------------------------------------------------------------------------

    def count(self, block: int, references: int, queued: bool, stamp: int) -> None:
        self.counts[block] = references
        self.stamps[block] = stamp
        self.counted.add(block)
        if queued:
            self.free[block] = None
        else:
            self.free.pop(block, None)

    def key(self, block: int, told: Told, tokens: int, group: int, noted: int | None, step: int) -> Key:
        state = told.states[tokens]
        key = Key(group, state, tokens if noted is None else noted)
        self._keys.setdefault(block, []).append(key)
        self._map.setdefault((group, state), set()).add(block)
        way = self._ways.get(state)
        self._ways[state] = (told.states, 1) if way is None else (way[0], way[1] + 1)
        self.changed.add(block)
        if step >= 0:
            self.due[block] = step
        return key

    def unkey(self, block: int) -> bool:
        """Whether it carried a key."""
        self.changed.add(block)
        self.due.pop(block, None)
        keys = self._keys.pop(block, ())
        for key in keys:
            blocks = self._map[key.group, key.state]
            blocks.discard(block)
            if not blocks:
                del self._map[key.group, key.state]
            way, uses = self._ways[key.state]
            if uses > 1:
                self._ways[key.state] = way, uses - 1
            else:
                del self._ways[key.state]
        return bool(keys)

    def table(self, name: str, group: int, start: int, stop: int, blocks: list[int]) -> None:
        """Slots [start, stop) become ``blocks``."""
        table = self._tables.get((name, group))
        if table is None:
            table = self._tables[name, group] = []
        moved = len(blocks) != stop - start and stop < len(table)
        last = len(table) if moved else stop
        for slot in range(start, min(last, len(table))):
            self._drop(table[slot], name, group, slot)
        self.counted.update(table[start:stop])
        self.changed.update(blocks)
        table[start:stop] = blocks
        owner = f"table {name}/{group}"
        for slot in range(start, len(table) if moved else start + len(blocks)):
            block = table[slot]
            if block != NULL:
                self._by_block.setdefault(block, []).append(Holder(owner, block, name, group, slot))
        if not table:
            del self._tables[name, group]

    def _drop(self, block: int, name: str, group: int, slot: int) -> None:
        holders = self._by_block.get(block)
        if holders is None:
            return
        left = [h for h in holders if h.slot != slot or h.request != name or h.group != group]
        if left:
            self._by_block[block] = left
        else:
            del self._by_block[block]

    def settle(self, step: int) -> None:
        if self.due:
            self.due = {block: at for block, at in self.due.items() if at > step}

    def collect(self) -> None:
        """What was touched since the last time, for the judgement to come."""
        contents = self.changed
        self.changed = {block for block in contents if block in self.due}
        if self.device is not None:
            contents = contents | self.device.dirty
            self.device.dirty.clear()
        contents.discard(NULL)
        self.counted.discard(NULL)
        self._contents, self._touched = contents, contents | self.counted
        self.counted = set()

    def only_contents(self) -> None:
        """From here to the next collection, blocks of which only references changed don't count as touched."""
        self._touched = self._contents

    def promise_kept(self, block: int, key: Key) -> None:
        """Take it for granted that the block holds what this key says."""
        if self.device is None:
            return
        group, length = self.config.groups[key.group], length_of(key.state)
        if group.kind == "mamba":
            self.device.attention.pop(block, None)
            self.device.mamba[block] = MambaContent(key.state, (key.state,))
            return
        first = (length - 1) // group.block_size * group.block_size
        content = self.device.attention.get(block)
        if content is None or len(content) != group.block_size:
            content = self.device.attention[block] = [None] * group.block_size
        content[: length - first] = self._ways[key.state][0][first + 1 : length + 1]

    def unknown_worker(self, name: str) -> None:
        """The worker has this request, and nobody here knows how far."""
        if self.device is not None:
            tables: list[list[int]] = [list(self._tables.get((name, g), ())) for g in range(len(self.config.groups))]
            self.device.workers[name] = WorkerRequest(name, tables, 0, 0)

    # -- pool and keys ------------------------------------------------------------------------------------------------

    def references(self, block: int) -> int:
        return self.null_count if block == NULL else self.counts[block]

    def queued(self, block: int) -> bool:
        return block in self.free

    def free_queue(self) -> Sequence[int]:
        return list(self.free)

    def free_count(self) -> int:
        return self.said_free

    def queue_fault(self) -> str:
        return ""

    def keys(self, block: int) -> Sequence[Key]:
        return self._keys.get(block, ())

    def lookup_map(self) -> Mapping[tuple[int, State], Collection[int]]:
        return self._map

    def pending(self, block: int) -> bool:
        return block in self.due

    def of_this_step(self, block: int) -> bool:
        return self.due.get(block, -1) > self.scheduled

    # -- holders ------------------------------------------------------------------------------------------------------

    def holders(self) -> Iterable[Holder]:
        for holders in self._by_block.values():
            yield from holders
        yield from self.passing

    def holders_of(self, blocks: Collection[int]) -> Iterable[Holder]:
        by_block = self._by_block
        found = [holder for block in blocks if block in by_block for holder in by_block[block]]
        if self.passing:
            found += [holder for holder in self.passing if holder.block in blocks]
        return found

    def sharers(self, block: int, writer: str, stamp: int) -> set[str]:
        """Whose tables hold a block that ``writer`` wrote in the step scheduled as ``stamp``; see the live view."""
        if self.stamps.get(block, 0) > stamp:
            return {writer}
        return sharing.sharers(self, block, writer, {holder.request for holder in self._by_block.get(block, ())})

    def broken_keys(self, block: int) -> list[State]:
        """The keys of ``block`` that its content does not match now."""
        return sharing.broken_keys(self, block)

    def tables(self) -> Mapping[tuple[str, int], Sequence[int]]:
        return self._tables

    # -- requests -----------------------------------------------------------------------------------------------------

    def requests(self) -> Mapping[str, RunningRequest]:
        return {
            name: RunningRequest(name, told.states, told.prompt, 0, "")
            for name, told in self.live.items()
            if not told.over
        }

    def bookkeeping(self) -> Sequence[str]:
        return self.left

    def idle(self) -> bool:
        return not self.live

    # -- contents -----------------------------------------------------------------------------------------------------

    def mamba_content(self, block: int) -> MambaContent | None:
        return None if self.device is None else self.device.mamba.get(block, MambaContent(None, ()))

    def attention_content(self, block: int, group: int) -> Sequence[State | None] | None:
        if self.device is None:
            return None
        return self.device.attention.get(block, [None] * self.config.groups[group].block_size)

    def prefix(self, state: State) -> Sequence[State] | None:
        found = self._ways.get(state)
        length = length_of(state)
        if found is not None:
            return Way(found[0], length)
        for told in self.live.values():
            if length < len(told.states) and told.states[length] == state:
                return Way(told.states, length)
        return None

    # -- what changed, and what no vLLM core keeps --------------------------------------------------------------------

    def touched(self) -> Collection[int]:
        return self._touched

    def tails(self) -> Mapping[tuple[str, int], tuple[int, int]]:
        return {}

    def arriving(self) -> Mapping[str, Collection[int]]:
        return {}

    def announced(self, block: int) -> Collection[tuple[int, State]] | None:
        return None


def begins(told: Told | None, shared: int) -> list[State]:
    """The states of a sequence that starts with ``shared`` tokens of ``told``."""
    return [EMPTY] if told is None else told.states[: shared + 1]


__all__ = ["Any", "Told", "TraceView", "Way", "begins"]
