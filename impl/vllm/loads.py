"""How a release is told that an external load failed, which is another contract from release to release.

Up to 0.29 a worker names the blocks that were not written, and the scheduler finds out whose they are. In 0.30 it may
name the requests instead, if they wait for their load. From 0.31 it must, where there are several cache groups: blocks
named there make the engine raise, by design. So a synchronous load of several groups has no way left to fail.
"""

from __future__ import annotations

from typing import Any

from kvproof.impl.vllm.connector import Store, Transfers
from kvproof.impl.vllm.drift import fields, load, release
from kvproof.spec.config import Config

BLOCKS_REFUSED = (0, 31)
"""The release from which failed blocks are refused where there are several groups."""


def names_requests() -> bool:
    """Whether the release can be told which requests' loads failed."""
    return "failed_recving" in fields(load("vllm.v1.outputs").KVConnectorOutput)


def can_fail(config: Config) -> bool:
    """Whether a store that keeps to the release's contract can own up to a load that fell short."""
    if config.connector not in ("sync", "async"):
        return False
    named = config.connector == "async" and names_requests()
    return config.load_report == "block" or named or len(config.groups) == 1 or release().version < BLOCKS_REFUSED


def make_store(config: Config) -> Store:
    """A store that fails as the release allows: where there is no way to say so, it keeps its word."""
    return Store(config, config.load_report == "request" and names_requests(), can_fail(config))


def transfers(said: Transfers | None) -> Any | None:
    """The release's ``KVConnectorOutput``; ``None`` where nothing is said."""
    if said is None:
        return None
    more = {"failed_recving": set(said.failed)} if said.failed else {}
    output = load("vllm.v1.outputs").KVConnectorOutput
    if said.sent:
        more["finished_sending"] = set(said.sent)
    return output(finished_recving=set(said.finished), invalid_block_ids=set(said.invalid), **more)
