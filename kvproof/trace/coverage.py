"""What a trace's traffic exercised of what an engine can do, and what it never did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from kvproof.spec.config import Config

KINDS: Final = (
    "prompt that shares a beginning",
    "lookup without a hit",
    "hit",
    "hit inside a block",
    "short hit",
    "hit cut for a store",
    "tokens of a store",
    "asynchronous load",
    "prompt in several chunks",
    "block held by several",
    "copy of a block",
    "checkpoint exported",
    "drafts accepted",
    "drafts rejected",
    "eviction",
    "refusal",
    "deferral",
    "preemption",
    "return after preemption",
    "abort",
    "end by the model",
    "end by length",
    "reset of the cache",
    "nothing runs",
    "crash",
)
"""In the order of a request's life."""

_STORE: Final = frozenset({"hit cut for a store", "tokens of a store", "asynchronous load"})
_DRAFTS: Final = frozenset({"drafts accepted", "drafts rejected"})


def impossible(config: Config, lacking: Mapping[str, str]) -> frozenset[str]:
    """What such an engine can't do at all."""
    found: set[str] = set()
    if not config.speculative:
        found |= _DRAFTS
    if not config.checkpoint_blocks:
        found.add("checkpoint exported")
    if not config.partial_hits:
        found |= {"hit inside a block", "copy of a block"}
    if not any("connector" in why for why in lacking.values()):
        found |= _STORE
    if not config.mamba_block:
        found |= {"deferral", "short hit"}
    return frozenset(found)


def never(seen: Counter[str], config: Config, lacking: Mapping[str, str]) -> list[str]:
    """The kinds of events that are possible and did not happen."""
    return [kind for kind in KINDS if not seen[kind] and kind not in impossible(config, lacking)]
