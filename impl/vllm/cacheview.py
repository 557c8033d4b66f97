"""The view of a real vLLM core: pool, tables and keys from its own objects, contents from the device oracle."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

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
        self._keyed_before: dict[int, frozenset[Any]] | None = None
        hand_out = self.pool.get_new_blocks

        def get_new_blocks(count: int) -> Any:
            blocks = hand_out(count)
            if self._keyed_before is not None:
                for block in blocks:  # what it carried is gone; if it is keyed as the same again, that is a new promise
                    self._keyed_before.pop(block.block_id, None)
            return blocks

        self.pool.get_new_blocks = get_new_blocks

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _decoded(self, raw: bytes, noted: int | None) -> Key:
        key = self._keys.get((raw, noted))
        if key is None:
            state = decode_key(raw)
            tokens = length_of(state) if noted is None else noted
            key = self._keys[raw, noted] = Key(int.from_bytes(raw[32:36], "big"), state, tokens)
        return key

    def pending(self, block: int) -> bool:
        if self._keyed_before is None:
            return False
        return not self._keyed_before.get(block, frozenset()) >= set(self._raw_keys(block))

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
        return not self.scheduler.requests and not self.scheduler.deferred_frees

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
        return sharing.broken_keys(self, block)
