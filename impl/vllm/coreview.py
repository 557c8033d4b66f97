"""What a view of any vLLM core shares: pool, keys, tables and bookkeeping, read off the release's own objects."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvproof.spec.config import Config
from kvproof.spec.tracer import State
from kvproof.spec.view import Holder, Key

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
"""Where the managers of some release keep something per request (0.20 … 0.33)."""


class CoreView:
    """The part of :class:`kvproof.spec.view.View` that needs no oracle.

    ``manager`` is a release's ``KVCacheManager``, ``scheduler`` its scheduler (``None``: the manager is driven by
    somebody else). What a key stands for is said by the subclass.
    """

    def __init__(self, config: Config, manager: Any, scheduler: Any) -> None:
        self.config = config
        self.scheduler = scheduler
        self.manager = manager
        self.pool = manager.block_pool
        self.managers = manager.coordinator.single_type_managers
        self._queue: list[int] | None = None
        self._queued: frozenset[int] | None = None

    def _decoded(self, raw: bytes, noted: int | None) -> Key | None:
        """What a raw key stands for, ``noted`` the length that the cache notes for it; ``None`` if nobody can tell."""
        raise NotImplementedError

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

    def keys(self, block: int) -> Sequence[Key]:
        held = self.pool.blocks[block]
        if block not in self._extra:
            if held.block_hash is None:
                return ()
            key = self._decoded(held.block_hash, getattr(held, "block_hash_num_tokens", None))  # noted from 0.24
            return () if key is None else (key,)
        noted = held.block_hash_num_tokens
        decoded = (self._decoded(raw, None if i else noted) for i, raw in enumerate(self._raw_keys(block)))
        return [key for key in decoded if key is not None]

    @property
    def _extra(self) -> Mapping[int, Collection[bytes]]:
        """Keys of a block besides its own: one block, one key up to 0.23."""
        extra: Mapping[int, Collection[bytes]] = getattr(self.pool, "cached_block_hashes_by_block", {})
        return extra

    def lookup_map(self) -> Mapping[tuple[int, State], Collection[int]]:
        found: dict[tuple[int, State], set[int]] = {}
        for raw, value in self.pool.cached_block_hash_to_block._cache.items():
            blocks = value.values() if isinstance(value, dict) else (value,)
            key = self._decoded(raw, None)
            if key is not None:
                found.setdefault((key.group, key.state), set()).update(b.block_id for b in blocks)
        return found

    # -- holders ------------------------------------------------------------------------------------------------------

    def holders(self) -> Iterable[Holder]:
        for group, manager in enumerate(self.managers):
            for name, blocks in manager.req_to_blocks.items():
                owner = f"table {name}/{group}"
                for slot, block in enumerate(blocks):
                    if not block.is_null:
                        yield Holder(owner, block.block_id, name, group, slot)
        yield from self.passing()

    def passing(self) -> Iterable[Holder]:
        """Whatever holds a block until a copy, a transfer or a step is over."""
        for manager in self.managers:
            for source, target in getattr(manager, "_pending_cow_copies", ()):
                yield Holder("copy source", source.block_id)
                yield Holder("copy target", target.block_id)
        for name, blocks in getattr(self.manager, "_partial_tail_pins", {}).items():  # 0.27 and 0.28
            for block in blocks:
                yield Holder(f"connector pin {name}", block.block_id)
        for _, blocks in getattr(self.scheduler, "deferred_frees", ()):
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

    def bookkeeping(self) -> Sequence[str]:
        left = [
            f"{where} of group {group}: {name}"
            for group, manager in enumerate(self.managers)
            for where in _PER_REQUEST
            for name in getattr(manager, where, ())
        ]
        # Their consumer empties the list in every step, where there is one: up to 0.25 it is filled without.
        waiting = [len(getattr(manager, "new_block_ids", ())) for manager in self.managers]
        left += [f"blocks to be zeroed of group {group}: {count}" for group, count in enumerate(waiting) if count]
        left += [f"connector pin: {name}" for name in getattr(self.manager, "_partial_tail_pins", ())]
        for group, manager in enumerate(self.managers):
            left += [f"pending copy of group {group}" for _ in getattr(manager, "_pending_cow_copies", ())]
        left += [f"scheduler.requests: {name}" for name in getattr(self.scheduler, "requests", ())]
        unfinished = getattr(self.scheduler, "_inflight_prefills", ())
        left += [f"scheduler._inflight_prefills: {request.request_id}" for request in unfinished]
        return left

    # -- what no vLLM core keeps ---------------------------------------------------------------------------------------

    def tails(self) -> Mapping[tuple[str, int], tuple[int, int]]:
        return {}

    def arriving(self) -> Mapping[str, Collection[int]]:
        return {}

    def announced(self, block: int) -> Collection[tuple[int, State]] | None:
        return None
