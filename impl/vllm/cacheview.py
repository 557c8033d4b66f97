"""The view of a real vLLM core: pool, tables and keys from its own objects, contents from the device oracle."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvproof.impl.vllm.device import Device
from kvproof.spec.config import Config
from kvproof.spec.tracer import State, decode_key, length_of
from kvproof.spec.view import NULL, Holder, Key, MambaContent, RunningRequest

_PER_REQUEST = (
    "req_to_blocks",
    "num_cached_block",
    "last_state_block_idx",
    "_num_retired_blocks",
    "_allocated_block_reqs",
    "_checkpoints",
    "_num_checkpoint_blocks",
    "_producer_partial_tail_reqs",
    "_partial_hit_reqs",
)
"""Where the managers of some release keep something per request (0.26 … 0.33)."""


class RequestLog:
    """One request's tokens and their prefixes: ``states[n]`` after the first n. It only grows."""

    def __init__(self, name: str, prompt: int) -> None:
        self.name = name
        self.prompt = prompt
        self.tokens: list[int] = []
        self.states: list[State] = [State(0)]


class CacheView:
    """Implements :class:`kvproof.spec.view.View` over a scheduler and a device."""

    def __init__(self, config: Config, scheduler: Any, device: Device) -> None:
        self.config = config
        self.scheduler = scheduler
        self.device = device
        self.manager = scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.managers = self.manager.coordinator.single_type_managers
        self.sequences: dict[str, RequestLog] = {}
        self.known: dict[State, Sequence[State]] = {}
        self._keys: dict[tuple[bytes, int | None], Key] = {}
        self._queue: list[int] | None = None
        self._queued: frozenset[int] | None = None
        self._marks: list[tuple[int, Any, int]] = [(0, None, 0)] * self.num_blocks
        self._touched: set[int] = set()
        self._keyed_before: dict[int, frozenset[Any]] | None = None
        hand_out = self.pool.get_new_blocks

        def get_new_blocks(count: int) -> Any:
            blocks = hand_out(count)
            if self._keyed_before is not None:
                for block in blocks:  # what it carried is gone; if it is keyed as the same again, that is a new promise
                    self._keyed_before.pop(block.block_id, None)
            return blocks

        self.pool.get_new_blocks = get_new_blocks

    @property
    def num_blocks(self) -> int:
        return len(self.pool.blocks)

    # -- pool ---------------------------------------------------------------------------------------------------------

    def references(self, block: int) -> int:
        return int(self.pool.blocks[block].ref_cnt)

    def _walk(self) -> Iterator[Any]:
        queue = self.pool.free_block_queue
        node, seen = queue.fake_free_list_head.next_free_block, 0
        while node is not None and node is not queue.fake_free_list_tail and seen <= self.num_blocks:
            yield node
            node, seen = node.next_free_block, seen + 1

    def refresh(self) -> None:
        """Something may have changed since the last observation: walk the queue again when asked."""
        self._queue = self._queued = None

    def free_queue(self) -> Sequence[int]:
        if self._queue is None:
            self._queue = [node.block_id for node in self._walk()]
        return self._queue

    def queued(self, block: int) -> bool:
        if self._queued is None:
            self._queued = frozenset(self.free_queue())
        return block in self._queued

    def free_count(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def queue_fault(self) -> str:
        queue = self.pool.free_block_queue
        before, count = queue.fake_free_list_head, 0
        for node in self._walk():
            if node.prev_free_block is not before:
                return f"block {node.block_id}: its back link does not name its predecessor"
            before, count = node, count + 1
        if count > self.num_blocks:
            return "the queue runs in a circle"
        if before.next_free_block is not queue.fake_free_list_tail:
            return f"the queue breaks off after block {before.block_id}"
        return ""

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _raw_keys(self, block: int) -> list[bytes]:
        primary = self.pool.blocks[block].block_hash
        extra = self._extra.get(block)
        if extra:
            return ([primary] if primary is not None else []) + sorted(extra)
        return [primary] if primary is not None else []

    def _decoded(self, raw: bytes, noted: int | None) -> Key:
        key = self._keys.get((raw, noted))
        if key is None:
            state = decode_key(raw)
            tokens = length_of(state) if noted is None else noted
            key = self._keys[raw, noted] = Key(int.from_bytes(raw[32:36], "big"), state, tokens)
        return key

    def keys(self, block: int) -> Sequence[Key]:
        held = self.pool.blocks[block]
        if block not in self._extra:
            return () if held.block_hash is None else (self._decoded(held.block_hash, held.block_hash_num_tokens),)
        noted = held.block_hash_num_tokens
        return [self._decoded(raw, None if i else noted) for i, raw in enumerate(self._raw_keys(block))]

    @property
    def _extra(self) -> Mapping[int, Collection[bytes]]:
        extra: Mapping[int, Collection[bytes]] = self.pool.cached_block_hashes_by_block
        return extra

    def lookup_map(self) -> Mapping[tuple[int, State], Collection[int]]:
        found: dict[tuple[int, State], set[int]] = {}
        for raw, value in self.pool.cached_block_hash_to_block._cache.items():
            blocks = value.values() if isinstance(value, dict) else (value,)
            key = self._decoded(raw, None)
            found.setdefault((key.group, key.state), set()).update(b.block_id for b in blocks)
        return found

    def pending(self, block: int) -> bool:
        if self._keyed_before is None:
            return False
        return not self._keyed_before.get(block, frozenset()) >= set(self._raw_keys(block))

    # -- holders ------------------------------------------------------------------------------------------------------

    def holders(self) -> Iterable[Holder]:
        for group, manager in enumerate(self.managers):
            for name, blocks in manager.req_to_blocks.items():
                owner = f"table {name}/{group}"
                for slot, block in enumerate(blocks):
                    if not block.is_null:
                        yield Holder(owner, block.block_id, name, group, slot)
            for source, target in manager._pending_cow_copies:
                yield Holder("copy source", source.block_id)
                yield Holder("copy target", target.block_id)
        for name, blocks in getattr(self.manager, "_partial_tail_pins", {}).items():  # 0.27 and 0.28
            for block in blocks:
                yield Holder(f"connector pin {name}", block.block_id)
        for _, blocks in self.scheduler.deferred_frees:
            for block in blocks:
                if not block.is_null:
                    yield Holder("deferred free", block.block_id)

    def holders_of(self, blocks: Collection[int]) -> Iterable[Holder]:
        return (holder for holder in self.holders() if holder.block in blocks)

    def tables(self) -> Mapping[tuple[str, int], Sequence[int]]:
        return {
            (name, group): [block.block_id for block in blocks]
            for group, manager in enumerate(self.managers)
            for name, blocks in manager.req_to_blocks.items()
        }

    def owners(self) -> dict[int, set[str]]:
        """Block to the requests whose tables hold it."""
        owned: dict[int, set[str]] = {}
        for manager in self.managers:
            for name, blocks in manager.req_to_blocks.items():
                for block in blocks:
                    if not block.is_null:
                        owned.setdefault(block.block_id, set()).add(name)
        return owned

    def sharers(self, block: int, writer: str, owned: dict[int, set[str]]) -> set[str]:
        """Whose tables hold a block that ``writer`` is writing, as far as they would see a write that they should not.

        An attention block that this very step completes and keys may be shared within the step: in every layer the
        keys and values are written before any are read. Recurrent blocks have no such order.
        """
        holders = owned.get(block, set())
        if len(holders) < 2 or not self.pending(block) or self.broken_keys(block):
            return holders
        recurrent = any(self.config.groups[key.group].kind == "mamba" for key in self.keys(block))
        return holders if recurrent else {writer}

    def requests(self) -> Mapping[str, RunningRequest]:
        running = {}
        for name, request in self.scheduler.requests.items():
            seq = self.sequences[name]
            running[name] = RunningRequest(
                name, seq.states, seq.prompt, int(request.num_computed_tokens), request.status.name
            )
        return running

    def bookkeeping(self) -> Sequence[str]:
        left = [
            f"{where} of group {group}: {name}"
            for group, manager in enumerate(self.managers)
            for where in _PER_REQUEST
            for name in getattr(manager, where, ())
        ]
        left += [f"connector pin: {name}" for name in getattr(self.manager, "_partial_tail_pins", ())]
        left += [f"pending copy of group {g}" for g, m in enumerate(self.managers) for _ in m._pending_cow_copies]
        left += [f"scheduler.requests: {name}" for name in self.scheduler.requests]
        left += [f"scheduler._inflight_prefills: {r.request_id}" for r in self.scheduler._inflight_prefills]
        return left

    def idle(self) -> bool:
        return not self.scheduler.requests and not self.scheduler.deferred_frees

    # -- contents -----------------------------------------------------------------------------------------------------

    def mamba_content(self, block: int) -> MambaContent | None:
        return self.device.mamba.get(block, MambaContent(None, ()))

    def attention_content(self, block: int, group: int) -> Sequence[State | None] | None:
        return self.device.attention.get(block, [None] * self.config.groups[group].block_size)

    def tails(self) -> Mapping[tuple[str, int], tuple[int, int]]:
        return {}

    def arriving(self) -> Mapping[str, Collection[int]]:
        return {}

    def announced(self, block: int) -> Collection[tuple[int, State]] | None:
        return None

    def prefix(self, state: State) -> Sequence[State] | None:
        states = self.known.get(state)
        return None if states is None else states[1 : length_of(state) + 1]

    # -- what changed -------------------------------------------------------------------------------------------------

    def schedule_starts(self) -> None:
        """Keys that appear from now on are pending until :meth:`device_has_run`."""
        self._keyed_before = {
            block.block_id: frozenset(self._raw_keys(block.block_id))
            for block in self.pool.blocks
            if block.block_hash is not None
        }

    def device_has_run(self) -> None:
        """The forward is over: every key is due."""
        self._keyed_before = None

    def step_has_run(self) -> None:
        """The whole step is over: what it touched is what changed since the last time."""
        self._touched = set(self.device.dirty)
        self.device.dirty.clear()
        extras = self.pool.cached_block_hashes_by_block
        for block in self.pool.blocks:
            i = block.block_id
            mark = (block.ref_cnt, block.block_hash, len(extras.get(i, ())))
            if mark != self._marks[i]:
                self._marks[i] = mark
                self._touched.add(i)
        self._touched.discard(NULL)

    def touched(self) -> Collection[int]:
        return self._touched

    def broken_keys(self, block: int) -> list[State]:
        """The keys of ``block`` that its content does not match now. Used to judge writes."""
        broken = []
        for key in self.keys(block):
            group = self.config.groups[key.group]
            if group.kind == "mamba":
                content = self.device.mamba.get(block)
                good = content is not None and content.temporal == key.state
            else:
                prefix = self.prefix(key.state)
                length, size = length_of(key.state), group.block_size
                first = (length - 1) // size * size
                tokens = self.device.attention.get(block)
                good = prefix is None or (tokens is not None and tokens[: length - first] == list(prefix[first:length]))
            if not good:
                broken.append(key.state)
        return broken
