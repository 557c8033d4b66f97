"""The connector double: an external store that holds a prefix of each request, behind vLLM's real connector interface.

It never lies: what it offers, it loads, and offers end on a scheduler block. Faithfulness matters more than variety
here; failing and over-reporting stores are another family's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvproof.impl.vllm.device import Load
from kvproof.spec.config import Config
from kvproof.spec.tracer import State


class Store:
    """What the external store holds, and the loads it has been asked for."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.depth: dict[str, int] = {}
        self.states: dict[str, Sequence[State]] = {}
        self.offered: dict[str, int] = {}
        self.shown: dict[str, int] = {}
        """The block-aligned local hit that the scheduler showed with its last question."""
        self.synchronous: list[Load] = []
        self.flying: dict[str, tuple[int, Load]] = {}

    def offer(self, request: str, num_tokens: int, local: int) -> int:
        """Tokens that the store can add to ``local`` (block-aligned) computed tokens, leaving one token to compute."""
        block = self.config.scheduler_block
        depth = min(self.depth.get(request, 0), num_tokens - 1) // block * block
        self.shown[request] = local
        self.offered[request] = max(0, depth - local)
        return self.offered[request]

    def take(self, request: str, tables: tuple[tuple[int, ...], ...], local: int, external: int) -> None:
        """The scheduler has allocated blocks for ``external`` tokens after ``local``: start the load."""
        load = Load(request, local, local + external, tables, self.states[request])
        if self.config.connector == "async":
            self.flying[request] = (self.config.load_steps, load)
        else:
            self.synchronous.append(load)

    def due_now(self) -> list[Load]:
        """Synchronous loads of this step, handed over once."""
        due, self.synchronous = self.synchronous, []
        return due

    def arrived(self) -> list[Load]:
        """Asynchronous loads that complete with this step. A load outlives its request: the blocks wait for it."""
        done = [load for steps, load in self.flying.values() if steps <= 1]
        self.flying = {name: (steps - 1, load) for name, (steps, load) in self.flying.items() if steps > 1}
        return done


def make_connector_class(store: Store) -> type:
    """A connector class of the imported release, bound to ``store``. Must run after the release is importable."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
        KVConnectorBase_V1,
        KVConnectorMetadata,
        SupportsHMA,
    )

    class StoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
        """Scheduler side of the double; its worker side is the device oracle."""

        @property
        def supports_divergent_local_hybrid_hits(self) -> bool:
            return store.config.divergent_hits

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
            tokens = store.offer(request.request_id, request.num_tokens, num_computed_tokens)
            return tokens, store.config.connector == "async" and tokens > 0

        def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens <= 0:
                return
            local = store.shown[request.request_id]
            store.take(
                request.request_id, tuple(tuple(ids) for ids in blocks.get_block_ids()), local, num_external_tokens
            )

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            return KVConnectorMetadata()

        def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
            return False, None

        def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
            return False, None

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
        def wait_for_layer_load(self, layer_name: str) -> None: ...
        def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
        def wait_for_save(self) -> None: ...

    return StoreConnector
