"""A release's simple CPU offloading in place of the connector double, for what is played inside that release.

``import simple_store; simple_store.install()`` makes every driver with an asynchronous store use the release's own
``SimpleCPUOffloadConnector``: its scheduler's half decides what is stored and when it is given back. Of its worker's
half only the news is there: a store is over some steps after it was asked for. Nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvproof.impl.vllm import configuration, driver
from kvproof.impl.vllm.drift import load
from kvproof.spec.view import Holder

STEPS = 2
"""How many steps a store takes."""

PAGE = 1 << 26
"""Bytes of a block: the connector's default of 8 GB of host memory then has 128 of them for each on the device."""


class Stores:
    """The worker's side of one scheduler's stores. Stands where the driver has its own offloading."""

    def __init__(self, driven: driver.Driver) -> None:
        self.manager = driven.scheduler.connector.scheduler_manager
        self.left: dict[int, int] = {}
        """Store to the steps that it takes yet."""
        view = driven.view
        passing = view.passing

        def pinned() -> Iterator[Holder]:
            yield from passing()
            for event, transfer in self.manager._store_event_to_blocks.items():
                for block in transfer.gpu_block_ids:
                    yield Holder(f"connector pin {event}", block)

        view.passing = pinned

    @property
    def busy(self) -> bool:
        return bool(self.left)

    def begins(self, output: Any) -> None:
        metadata = output.kv_connector_metadata
        assert metadata.load_event < 0, "nothing is loaded here"
        if metadata.store_event >= 0:
            self.left[metadata.store_event] = STEPS

    def runner(self, output: Any) -> None:
        return None

    def after(self, output: Any) -> Any:
        self.left = {event: steps - 1 for event, steps in self.left.items()}
        over = {event: 1 for event, steps in self.left.items() if steps == 0}
        self.left = {event: steps for event, steps in self.left.items() if steps}
        news = load("vllm.v1.simple_kv_offload.metadata").SimpleCPUOffloadWorkerMetadata(completed_store_events=over)
        return load("vllm.v1.outputs").KVConnectorOutput(kv_connector_worker_meta=news)

    def arriving(self) -> dict[str, list[int]]:
        return {}


def install() -> None:
    place = "vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector"
    driver.connector_class = lambda config, store: load(place).SimpleCPUOffloadConnector  # type: ignore[assignment]
    plan, begin = configuration._kv_cache_config, driver.Driver.__init__

    def with_memory(config: Any, engine: Any) -> Any:
        caches = plan(config, engine)
        names = [name for group in caches.kv_cache_groups for name in group.layer_names]
        tensor = load("vllm.v1.kv_cache_interface").KVCacheTensor
        caches.kv_cache_tensors = [tensor(size=PAGE * config.num_blocks, shared_by=names)]
        return caches

    def with_stores(self: Any, *rest: Any) -> None:
        begin(self, *rest)
        self.offload = Stores(self)

    configuration._kv_cache_config = with_memory
    driver.Driver.__init__ = with_stores  # type: ignore[method-assign]
