"""The view of a real vLLM core: pool, tables and keys from its own objects, contents from the device oracle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from kvproof.impl.vllm.coreview import CoreView
from kvproof.impl.vllm.device import Device
from kvproof.spec import sharing
from kvproof.spec.config import Config
from kvproof.spec.tracer import State, decode_key, length_of
from kvproof.spec.view import NULL, Key, MambaContent, RunningRequest


class RequestLog:
    """One request's tokens and their prefixes: ``states[n]`` after the first n. It only grows."""

    def __init__(self, name: str, prompt: int) -> None:
        self.name = name
        self.prompt = prompt
        self.tokens: list[int] = []
        self.states: list[State] = [State(0)]


class Listener(Protocol):
    """Somebody who follows the cache's events."""

    def announced(self, block: int) -> Collection[tuple[int, State]]: ...


class CacheView(CoreView):
    """Implements :class:`kvproof.spec.view.View` over a scheduler and a device."""

    def __init__(self, config: Config, scheduler: Any, device: Device) -> None:
        super().__init__(config, scheduler.kv_cache_manager, scheduler)
        self.device = device
        self.sequences: dict[str, RequestLog] = {}
        self.known: dict[State, Sequence[State]] = {}
        self._keys: dict[tuple[bytes, int | None], Key] = {}
        self._marks: list[tuple[int, Any, int]] = [(0, None, 0)] * self.num_blocks
        self._touched: set[int] = set()
        self._keyed_before: deque[dict[int, frozenset[Any]]] = deque()
        """What was keyed when each step in flight began to be scheduled, the oldest step first."""
        self.listener: Listener | None = None
        self.loads: Callable[[], Mapping[str, Collection[int]]] = dict
        """The blocks that loads in flight write to, by request. The driver says."""
        self.owed: dict[str, set[int]] = {}
        """Blocks whose content a failed load left to be computed again, by the running request that will."""
        self.unwiped: set[int] = set()
        """Blocks that were handed out and not wiped since."""
        hand_out = self.pool.get_new_blocks

        def get_new_blocks(count: int) -> Any:
            blocks = hand_out(count)
            self.unwiped.update(block.block_id for block in blocks)
            for keyed in self._keyed_before:
                for block in blocks:  # what it carried is gone; if it is keyed as the same again, that is a new promise
                    keyed.pop(block.block_id, None)
            return blocks

        self.pool.get_new_blocks = get_new_blocks

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _decoded(self, raw: bytes, noted: int | None) -> Key:
        key = self._keys.get((raw, noted))
        if key is None:
            # Up to 0.23 a block of several units is keyed by all their hashes, one after the other: the last stands
            # for the whole prefix.
            state, group = decode_key(raw[-36:-4]), int.from_bytes(raw[-4:], "big")
            tokens = length_of(state) if noted is None else noted
            key = self._keys[raw, noted] = Key(group, state, tokens)
        return key

    def raw_keys(self, block: int) -> Sequence[bytes]:
        """The keys that the block carries as the cache has them: a prefix hash and the group, primary first."""
        return self._raw_keys(block)

    def pending(self, block: int) -> bool:
        return self._keyed_since(0, block)

    def of_this_step(self, block: int) -> bool:
        return self._keyed_since(-1, block)

    def _keyed_since(self, step: int, block: int) -> bool:
        """``step`` counts those in flight, the oldest first."""
        if self.owed and any(block in blocks for blocks in self.owed.values()):
            return True
        if not self._keyed_before:
            return False
        return not self._keyed_before[step].get(block, frozenset()) >= set(self._raw_keys(block))

    # -- who writes where ---------------------------------------------------------------------------------------------

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
        """Whose tables hold a block that ``writer`` is writing, as far as they would see what they should not."""
        return sharing.sharers(self, block, writer, owned.get(block, set()))

    def states_of(self, request: Any) -> Sequence[State]:
        """The prefixes of a release's request."""
        return self.sequences[request.request_id].states

    def requests(self) -> Mapping[str, RunningRequest]:
        running = {}
        for name, request in self.scheduler.requests.items():
            seq = self.sequences[name]
            running[name] = RunningRequest(
                name, seq.states, seq.prompt, int(request.num_computed_tokens), request.status.name
            )
        return running

    def idle(self) -> bool:
        return not self.scheduler.requests and not getattr(self.scheduler, "deferred_frees", ())

    def arriving(self) -> Mapping[str, Collection[int]]:
        return self.loads()

    def settle(self) -> None:
        """Strike off what is owed no more: it is there now, or who owed it has lost its blocks or is gone."""
        running = {request.request_id for request in self.scheduler.running}
        for name, blocks in list(self.owed.items()):
            left = {block for block in blocks if name in running and self.broken_keys(block)}
            if left:
                self.owed[name] = left
            else:
                del self.owed[name]

    # -- contents -----------------------------------------------------------------------------------------------------

    def mamba_content(self, block: int) -> MambaContent | None:
        return self.device.mamba.get(block, MambaContent(None, ()))

    def attention_content(self, block: int, group: int) -> Sequence[State | None] | None:
        return self.device.attention.get(block, [None] * self.config.groups[group].block_size)

    def prefix(self, state: State) -> Sequence[State] | None:
        states = self.known.get(state)
        return None if states is None else states[1 : length_of(state) + 1]

    # -- what changed -------------------------------------------------------------------------------------------------

    def schedule_starts(self) -> None:
        """Keys that appear from now on are pending until :meth:`device_has_run`."""
        self._keyed_before.append(
            {
                block.block_id: frozenset(self._raw_keys(block.block_id))
                for block in self.pool.blocks
                if block.block_hash is not None
            }
        )

    def device_has_run(self) -> None:
        """The forward of the oldest step in flight is over: every key from before the next one is due."""
        self._keyed_before.popleft()

    def step_has_run(self) -> None:
        """The whole step is over: what it touched is what changed since the last time."""
        self._touched = set(self.device.dirty)
        self.device.dirty.clear()
        extras = self._extra
        for block in self.pool.blocks:
            i = block.block_id
            mark = (block.ref_cnt, block.block_hash, len(extras.get(i, ())))
            if mark != self._marks[i]:
                self._marks[i] = mark
                self._touched.add(i)
        self._touched.discard(NULL)

    def touched(self) -> Collection[int]:
        return self._touched

    def touch(self, blocks: Iterable[int]) -> None:
        """These changed as well, in a way that the blocks themselves do not show."""
        self._touched.update(blocks)

    def announced(self, block: int) -> Collection[tuple[int, State]] | None:
        return None if self.listener is None else self.listener.announced(block)

    def broken_keys(self, block: int) -> list[State]:
        """The keys of ``block`` that its content does not match now. Used to judge writes."""
        return sharing.broken_keys(self, block)
