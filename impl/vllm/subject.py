"""vLLM as a subject: a release's tree, an installed vLLM, or a checkout."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvproof.impl.vllm.configuration import absent, default_retention, legal, release
from kvproof.impl.vllm.device import CheckpointRule
from kvproof.impl.vllm.drift import load
from kvproof.impl.vllm.driver import Driver
from kvproof.impl.vllm.overlapped import OverlappedDriver
from kvproof.impl.vllm.startup import smallest_promising
from kvproof.spec.config import Config, ConfigError
from kvproof.spec.subject import Observer

QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


OFFLOAD_SINCE = (0, 22)
"""The first release whose offloading connector is driven: until then transfers are told apart by their requests."""

EVENTS_SINCE = (0, 24)
"""The first release whose cache events are followed: until then a key of several units was all their hashes."""

_OF_CUTS = ("HIT.only-recurrent-short", "HIT.pure-view")
_OF_OFFLOADING = ("EXT.offload-content", "EXT.offload-offers", "EXT.offload-serves")
_OF_EVENTS = ("EVENT.replays", "EVENT.stored-well-formed", "EVENT.removed-is-gone")


class VllmSubject:
    """The vLLM found in ``tree`` (``None``: the installed one). Importing happens here, once per process (seconds).

    Raises :class:`ImportError` when another vLLM is already imported, or when the tree's dependencies are missing.
    """

    def __init__(self, tree: Path | None, name: str) -> None:
        self.name = name
        for variable, value in QUIET.items():
            os.environ.setdefault(variable, value)
        if tree is not None:
            root = str(tree.resolve())
            imported = sys.modules.get("vllm")
            if imported is not None and not str(getattr(imported, "__file__", "")).startswith(root):
                raise ImportError(f"another vLLM is already imported in this process ({imported.__file__})")
            if root not in sys.path:
                sys.path.insert(0, root)
        self.release = release()
        load("vllm.v1.core.sched.scheduler")

    def families(self) -> frozenset[str]:
        return frozenset({"SLOT", "ADMIT", "REF", "HIT", "EXT", "EVENT", "FLOW", "REUSE"})

    def lacking(self) -> Mapping[str, str]:
        """What is asked of a cut lookup result says nothing where the release's manager has no such cut, and so on."""
        lacks: dict[str, str] = {}
        if not self.release.lookup_for_connector:
            lacks |= dict.fromkeys(_OF_CUTS, "this release does not truncate hits")
        if self.release.version < OFFLOAD_SINCE:
            lacks |= dict.fromkeys(_OF_OFFLOADING, "this release's offloading is not driven")
        if self.release.version < EVENTS_SINCE:
            lacks |= dict.fromkeys(_OF_EVENTS, "this release's cache events are not followed")
        return lacks

    def default_retention(self, eagle: bool) -> int | None:
        """The retention interval that this release's engine arguments resolve to when none is given."""
        return default_retention(eagle)

    def fitting(self, config: Config) -> Config:
        """The same without the rarer things that this release does not have."""
        usual = config.usual()
        return replace(config, **{name: getattr(usual, name) for name in absent(config)})

    def startup_limit(self, config: Config) -> int:
        """The smallest pool with which this release agrees to start. Raises :class:`ConfigError` as :meth:`start`."""
        self._accept(config)
        return smallest_promising(config)

    def start(self, config: Config, observer: Observer | None) -> Driver:
        self._accept(config)
        made = OverlappedDriver if config.async_scheduling else Driver
        return made(config, observer, checkpoint_rule(config, config.eagle) if config.checkpoint_blocks else None)

    def _accept(self, config: Config) -> None:
        """Raises :class:`ConfigError` for what is not driven, and for what the release's own validation refuses."""
        config.check()
        if config.checkpoint_blocks and self.release.version < (0, 30):
            raise ConfigError(f"vLLM {self.release.name} exports checkpoints in one model only: not driven before 0.30")
        if config.connector == "offload" and self.release.version < OFFLOAD_SINCE:
            raise ConfigError(f"vLLM {self.release.name}: its offloading connector is driven from 0.22 on")
        chunked = any(group.kind == "chunked" for group in config.groups)
        if config.connector == "offload" and chunked and self.release.version < (0, 29):
            raise ConfigError(f"vLLM {self.release.name}: its offloading connector refuses chunked local attention")
        for lacking in absent(config).values():
            raise ConfigError(f"vLLM {self.release.name} {lacking}")
        if config.cache_events and self.release.version < EVENTS_SINCE:
            raise ConfigError(f"vLLM {self.release.name}: its cache events are followed from 0.24 on")
        reason = legal(config)
        if reason is not None:
            raise ConfigError(reason)


def checkpoint_rule(config: Config, eagle: bool) -> CheckpointRule:
    """The release's own rule for what a prefill kernel exports: position (0: nothing) and column of the block table.

    From 0.31 it is one function; 0.30 has its two halves, which are put together as its one backend does.
    """
    interface = load("vllm.v1.kv_cache_interface")
    block, unit = config.mamba_block, config.hash_unit
    align = unit if config.partial_hits else config.scheduler_block
    if release().version >= (0, 31):
        compute = load("vllm.model_executor.layers.mamba.checkpoint").compute_mamba_prefill_checkpoints
        extra: dict[str, Any] = {}
        lookahead = release().lookahead_hashes and eagle and config.connector == "none" and config.lookahead_keys
        if lookahead:
            several = min(config.draft_modules, config.speculative) > 1
            extra["num_hash_lookahead_tokens"] = config.speculative if several else 1
        names = compute.__code__.co_varnames
        if "cache_hit_alignment_tokens" in names:
            extra["cache_hit_alignment_tokens"] = align

        def from_031(end: int, tokens: int) -> tuple[int, int]:
            offsets, columns = compute(
                [end],
                [tokens],
                hash_block_size=unit,
                mamba_block_size=block,
                checkpoint_alignment=config.checkpoint_alignment,
                drop_eagle_block=eagle and not lookahead,
                **extra,
            )
            return (end - tokens + offsets[0], columns[0]) if offsets[0] else (0, -1)

        return from_031

    def in_030(end: int, tokens: int) -> tuple[int, int]:
        start = end - tokens
        position = interface.get_mamba_prefill_checkpoint_position(end, unit, drop_eagle_block=eagle)
        valid = interface.is_mamba_prefill_checkpoint_valid(
            query_start=start,
            query_end=end,
            checkpoint_position=position,
            hash_block_size=unit,
            mamba_block_size=block,
            checkpoint_alignment=config.checkpoint_alignment,
        )
        return (position, -(-end // block) - 2) if valid else (0, -1)

    return in_030
