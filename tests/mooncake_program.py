"""Runs inside one release: what the connector of the Mooncake store keeps of recurrent states.

``python tests/mooncake_program.py VERSION``. Drives the release's scheduler with its own connector, whose saves go
through its own sending thread, run in line, into a store that writes down where each key was read from. Prints, for
each recurrent key: its length, the block, and whether the block held that state once the step had run.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from kvproof import subjects
from kvproof.impl.vllm import driver
from kvproof.impl.vllm.drift import load
from kvproof.spec.config import Config, Group
from kvproof.spec.events import Crash, Observation, StepEnd
from kvproof.spec.scenario import Action
from kvproof.spec.tracer import decode_key, length_of

FULL, MAMBA = 0, 1
PLACE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store"
CONFIG = Config(
    (Group("full", 4), Group("mamba", 4)), 20, 4, 8, max_running=2, speculative=1, retention=None, connector="sync"
)
PROMPT = 17
"""Two chunks of two blocks and one token more: the states after 8 and 16 are kept, those after 4 and 12 never made."""


class Nobody:
    """Whom an engine that only stores asks for nothing."""

    def __init__(self, *_: object) -> None: ...

    def discard(self, request: str) -> None: ...


class Store:
    """Blocks are one byte each here, so that an address is a block."""

    def __init__(self) -> None:
        self.put: dict[str, int] = {}

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        return [int(key in self.put) for key in keys]

    def batch_put_from_multi_buffers(
        self, keys: Sequence[str], addresses: Sequence[Sequence[int]], *_: object
    ) -> list[int]:
        self.put.update((key, address) for key, (address,) in zip(keys, addresses, strict=True))
        return [0] * len(keys)


def sender(store: Store, caches: Any) -> Any:
    """The release's sending thread, not started."""
    data, worker = load(f"{PLACE}.data"), load(f"{PLACE}.worker")
    databases = []
    for group, spec in enumerate(CONFIG.groups):
        database = data.ChunkedTokenDatabase(
            data.KeyMetadata("kvproof", 0, 0, 0, 0, group), spec.block_size, CONFIG.hash_unit
        )
        database.set_kv_caches_base_addr([0])
        database.set_block_len([1])
        databases.append(database)
    block, unit = CONFIG.scheduler_block, CONFIG.hash_unit
    coordinator = load(f"{PLACE}.coordinator").MooncakeStoreCoordinator(caches.kv_cache_groups, block, unit)
    ready = threading.Event()
    return worker.KVCacheStoreSendingThread(store, coordinator, databases, block, 0, [1, 1], "kv_both", ready)


def stored(version: str) -> Iterator[tuple[int, int, bool]]:
    subject = subjects.open_subject(subjects.parse(f"vllm=={version}"), lambda line: None)
    load(f"{PLACE}.scheduler").LookupKeyClient = Nobody
    driver.connector_class = lambda *_: load(f"{PLACE}.connector").MooncakeStoreConnector
    jobs: list[Any] = []
    store = Store()
    found: list[tuple[int, int, bool]] = []

    def step_over(observation: Observation) -> None:
        assert not isinstance(observation.event, Crash), observation.event
        if not isinstance(observation.event, StepEnd):
            return
        before = set(store.put)
        while jobs:
            job = jobs.pop(0)
            sending.add_request(job)
            sending._handle_request(job)
        for key, block in store.put.items():
            if key not in before and f"@group:{MAMBA}@" in key:
                state, there = decode_key(bytes.fromhex(key.rsplit("@", 1)[1])), driven.device.mamba.get(block)
                found.append((length_of(state), block, there is not None and there.temporal == state))

    driven: Any = subject.start(CONFIG, step_over)
    connector = driven.scheduler.connector
    connector.connector_scheduler.enable_lookup = False
    sending = sender(store, driven.scheduler.kv_cache_config)
    build = connector.build_connector_meta

    def build_connector_meta(output: Any) -> Any:
        metadata = build(output)
        jobs.extend(request for request in metadata.requests if request.can_save)
        return metadata

    connector.build_connector_meta = build_connector_meta
    driven.apply(Action("submit", "r1", length=PROMPT, max_tokens=1))
    driven.apply(Action("step", times=3))
    yield from found


if __name__ == "__main__":
    print(json.dumps(sorted(stored(sys.argv[1]))))
