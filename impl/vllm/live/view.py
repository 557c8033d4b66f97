"""The view of a vLLM core that is serving: its own objects, with an index where looking at everything costs too much.

Nothing here grows with the pool while an engine works: what a step touched is what its hooks were told of, holders are
looked up in an index, and a block is in the free queue if it has a neighbour there. When everything is looked at
(:attr:`LiveView.whole`), queue and tables are walked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvproof.impl.vllm.coreview import CoreView
from kvproof.impl.vllm.device import Device
from kvproof.impl.vllm.live.holdings import Holdings
from kvproof.impl.vllm.live.naming import Names
from kvproof.impl.vllm.live.poolhooks import PoolHooks
from kvproof.spec import sharing
from kvproof.spec.config import Config
from kvproof.spec.tracer import State, length_of
from kvproof.spec.view import NULL, Holder, Key, MambaContent, RunningRequest


class LookupMap(Mapping[tuple[int, State], Collection[int]]):
    """The cache's map of keys, asked key by key: a serving cache has more of them than a step could look through."""

    def __init__(self, view: LiveView) -> None:
        self._view = view
        self._cache = view.pool.cached_block_hash_to_block._cache

    def __getitem__(self, key: tuple[int, State]) -> Collection[int]:
        group, state = key
        found: set[int] = set()
        for name in self._view.names.hashes(state):
            value = self._cache.get(name + group.to_bytes(4, "big"))
            if value is not None:
                found.update(value if isinstance(value, dict) else (value.block_id,))
        if not found:
            raise KeyError(key)
        return found

    def __iter__(self) -> Iterator[tuple[int, State]]:
        return iter(self._view.all_keys())

    def __len__(self) -> int:
        return len(self._cache)


class LiveView(CoreView):
    """Implements :class:`kvproof.spec.view.View`. ``device`` is ``None`` where contents can't be followed."""

    def __init__(
        self, config: Config, manager: Any, scheduler: Any, names: Names, hooks: PoolHooks, device: Device | None
    ) -> None:
        super().__init__(config, manager, scheduler)
        self.names, self.hooks, self.device = names, hooks, device
        self.holdings = Holdings(self.managers)
        self.whole = False
        self._touched: set[int] = set()

    # -- pool and keys ------------------------------------------------------------------------------------------------

    def queued(self, block: int) -> bool:
        if self.whole:
            return super().queued(block)
        return self.pool.blocks[block].next_free_block is not None

    def _decoded(self, raw: bytes, noted: int | None) -> Key | None:
        state = self.names.state(raw)
        if state is None:
            return None
        return Key(int.from_bytes(raw[-4:], "big"), state, length_of(state) if noted is None else noted)

    def lookup_map(self) -> Mapping[tuple[int, State], Collection[int]]:
        return self.all_keys() if self.whole else LookupMap(self)

    def all_keys(self) -> Mapping[tuple[int, State], Collection[int]]:
        """The map as a whole."""
        return super().lookup_map()

    def pending(self, block: int) -> bool:
        return block in self.hooks.keyed

    def of_this_step(self, block: int) -> bool:
        return self.hooks.keyed.get(block) == self.hooks.scheduling

    # -- holders ------------------------------------------------------------------------------------------------------

    def holders(self) -> Iterable[Holder]:
        yield from super().holders()
        yield from self.hooks.held_outside()

    def holders_of(self, blocks: Collection[int]) -> Iterable[Holder]:
        if self.whole:
            return (holder for holder in self.holders() if holder.block in blocks)
        found = [holder for block in blocks for holder in self.holdings.of(block)]
        found += [holder for holder in self.passing() if holder.block in blocks]
        found += [holder for holder in self.hooks.held_outside() if holder.block in blocks]
        return found

    def sharers(self, block: int, writer: str, stamp: int) -> set[str]:
        """Whose tables hold a block that ``writer`` wrote in the step scheduled as ``stamp``, as far as they would see
        a write that they should not.

        What was given away or taken since then says nothing about that step.
        """
        if self.hooks.stamps.get(block, 0) > stamp:
            return {writer}
        return sharing.sharers(self, block, writer, {holder.request for holder in self.holdings.of(block)})

    # -- requests -----------------------------------------------------------------------------------------------------

    def states_of(self, request: Any) -> Sequence[State]:
        return self.names.learn(request).states

    def requests(self) -> Mapping[str, RunningRequest]:
        running = {}
        for name, request in getattr(self.scheduler, "requests", {}).items():
            computed, status = int(request.num_computed_tokens), request.status.name
            running[name] = RunningRequest(name, self.states_of(request), request.num_prompt_tokens, computed, status)
        return running

    def idle(self) -> bool:
        return not getattr(self.scheduler, "requests", ()) and not getattr(self.scheduler, "deferred_frees", ())

    # -- contents -----------------------------------------------------------------------------------------------------

    def mamba_content(self, block: int) -> MambaContent | None:
        return None if self.device is None else self.device.mamba.get(block, MambaContent(None, ()))

    def attention_content(self, block: int, group: int) -> Sequence[State | None] | None:
        if self.device is None:
            return None
        return self.device.attention.get(block, [None] * self.config.groups[group].block_size)

    def prefix(self, state: State) -> Sequence[State] | None:
        return self.names.way(state)

    def broken_keys(self, block: int) -> list[State]:
        """The keys of ``block`` that its content does not match now. Used to judge writes."""
        return sharing.broken_keys(self, block)

    # -- what changed -------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """What was touched since the last time, for the judgement to come. Blocks whose keys are not due yet are kept
        for the next one, too."""
        touched = self.hooks.touched
        self.hooks.touched = {block for block in touched if block in self.hooks.keyed}
        if self.device is not None:
            touched = touched | self.device.dirty
            self.device.dirty.clear()
        self._touched = touched - {NULL}

    def touched(self) -> Collection[int]:
        return self._touched
