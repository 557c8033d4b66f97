"""What differs between vLLM releases 0.20.0 … 0.33.0, in one place.

Everything else in :mod:`kvproof.impl.vllm` asks :func:`release` for a flag instead of comparing versions. Wherever a
release can say something about itself (a field of a dataclass, a parameter of a function), it is asked; only what can't
be read off is tied to a version number.

What releases before 0.26 do without
====================================

| release | lacks |
| --- | --- |
| up to 0.25 | partial hits and block copies; the hash unit is no user's choice (``hash_block_size``) |
| up to 0.25 | ``num_local_computed_tokens`` in the block estimate, ``Request.shared_prefix_boundary`` |
| up to 0.23 | the junction (a parameter of the split in 0.24 and 0.25), deferred frees, several keys per block |
| up to 0.23 | two passes over the groups: each touches its hits and takes its external blocks in one go |
| up to 0.23 | retention of recurrent states (refused); up to 0.22 retention altogether |
| up to 0.22 | external tokens of a hybrid model (an assertion); reserved blocks |
| 0.20 | the whole-sequence gate inside ``allocate_slots``: it is ``can_fit_full_sequence`` |
| 0.20.0, 0.20.1 | ``apply_admission_cap``: a window group's cap holds for every estimate |

Connector hooks of ``KVConnectorBase_V1`` that the scheduler side calls, by release
====================================================================================

Abstract in every release (a double must define all of them, worker hooks included):
``get_num_new_matched_tokens``, ``update_state_after_alloc``, ``build_connector_meta``, ``start_load_kv``,
``wait_for_layer_load``, ``save_kv_layer``, ``wait_for_save``; and ``request_finished_all_groups`` from ``SupportsHMA``,
without which an engine with several cache groups refuses the connector.

Called on every release (where it has the hook), with a default that does nothing: ``on_new_request`` (request added),
``update_connector_output`` (the worker's half of a step came back), ``request_finished`` (connectors without
``SupportsHMA``), ``take_events``, ``get_kv_connector_stats``, ``has_pending_push_work``, ``reset_cache``, ``shutdown``,
``set_xfer_handshake_metadata_pp_aware``.

| hook or property | called by the scheduler side |
| --- | --- |
| ``bind_gpu_block_pool(pool)`` | 0.20 … 0.29 directly; from 0.30 through ``bind_kv_cache_manager`` of the base class |
| ``bind_kv_cache_manager(manager)`` | from 0.30, once, after the manager is built (call ``super()``) |
| ``requires_kv_delivery`` (property) | from 0.27; default: whether the role is a producer, so true for ``kv_both`` |
| ``supports_divergent_local_hybrid_hits`` (property) | from 0.28; default false. 0.27: always; 0.24 on: deepest group |
| ``has_pending_block_frees()`` | from 0.30; default false: true makes the scheduler wait instead of preempting |
| ``register_finished_partial_tail(request, block_ids, offloads)`` | from 0.30, at finish; default false |
| ``get_loaded_kv_cache_group_ids(request)`` | from 0.32, after a positive match; default: the prefix-cacheable groups |
| ``get_external_cache_hit_sources(request, tokens)`` | from 0.32, after allocation; default: one unspecified source |

``get_num_new_matched_tokens(request, computed)`` returns (tokens or ``None`` for "ask again", asynchronous?);
``update_state_after_alloc(request, blocks, external)`` is called with 0 external tokens too, and a second time once an
asynchronous load has arrived; ``request_finished_all_groups(request, block_ids)`` returns (delay the frees?,
parameters).
The scheduler constructs ``connector_cls(vllm_config, role, kv_cache_config)``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
import os
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kvproof.impl.vllm.absent import stand_in

OLDEST = (0, 20, 0)
NEWEST = (0, 33, 0)
"""The range that is tested. Other releases are tried as they are; a flag that is read off still fits them."""


def load(name: str) -> Any:
    """A module of the imported release, untyped: one source must serve every release, so no static type fits."""
    if "vllm" not in sys.modules:
        stand_in()
    return importlib.import_module(name)


def parameters(function: Any) -> frozenset[str]:
    """The parameter names of a function or of a class's constructor."""
    return frozenset(inspect.signature(function).parameters)


def fields(cls: Any) -> frozenset[str]:
    """The names of a dataclass's constructor fields."""
    return frozenset(field.name for field in dataclasses.fields(cls) if field.init)


def only(cls: Any, **wanted: Any) -> Any:
    """``cls(**wanted)``, leaving out what this release's dataclass does not have."""
    known = fields(cls)
    return cls(**{name: value for name, value in wanted.items() if name in known})


@dataclass(frozen=True)
class Release:
    """The imported vLLM and what it can do.

    ``retention``: there is a retention interval. ``retention_from_environment``: it is read from
    ``VLLM_PREFIX_CACHE_RETENTION_INTERVAL`` when the coordinator is built, not from ``KVCacheConfig``.
    ``partial_hits``: hits may end inside a recurrent block. ``admission_cap``: an estimate is told whether it is the
    whole-sequence gate that asks, and caps what it charges a window group only then. ``local_in_estimate``: it is told
    how many of the computed tokens are local. ``lookup_for_connector``:
    ``get_computed_blocks_for_connector`` and ``truncate_computed_blocks`` exist. ``checkpoint_blocks`` and
    ``checkpoint_alignment``: ``MambaSpec`` has the field. ``prefix_cacheable``: groups may opt out of prefix caching.
    ``lookahead_hashes``: with EAGLE and no connector, a key also covers the tokens after its boundary, and no unit of
    a hit is dropped. ``hash_block_in_config``: ``KVCacheConfig`` carries the hash unit and the hit alignment.

    ``drafters_recognised``: the drafting methods to use where a group is marked as the drafter's. Where the release
    recognises no drafter, every group takes the EAGLE drop, recurrent ones included: up to 0.28 in any hybrid model.
    0.29 and 0.30 recognise DSpark alone; from 0.31 MTP is recognised (by its last layer, from 0.33 by a mark).
    """

    version: tuple[int, ...]
    retention: bool
    retention_from_environment: bool
    partial_hits: bool
    admission_cap: bool
    local_in_estimate: bool
    lookup_for_connector: bool
    checkpoint_blocks: bool
    checkpoint_alignment: bool
    prefix_cacheable: bool
    lookahead_hashes: bool
    hash_block_in_config: bool
    drafters_recognised: frozenset[str]

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))


def _version() -> tuple[int, ...]:
    """The version of the imported tree: its own statement, or the metadata folder beside it, or else the newest."""
    vllm = load("vllm")
    text = str(getattr(vllm, "__version__", ""))
    if not re.match(r"\d+\.\d+", text) or text.startswith("0.0"):
        beside = [str(Path(vllm.__file__).parent.parent)]
        text = next((d.version for d in metadata.distributions(name="vllm", path=beside)), text)
    # A checkout that was not built calls itself "dev". It is newer than what was released sooner than older.
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3]) or NEWEST


def _drafters_recognised(version: tuple[int, ...]) -> frozenset[str]:
    if version < (0, 29):
        return frozenset()
    return frozenset({"dspark"}) if version < (0, 31) else frozenset({"mtp"})


def quiet() -> None:
    """Let the release say only what ``VLLM_LOGGING_LEVEL`` (default here: ERROR) lets through.

    Needed because newer releases configure their logging when an engine starts, and none does here.
    """
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))


@functools.cache
def release() -> Release:
    """The release that ``import vllm`` finds. Imports its core (seconds, once)."""
    version = _version()
    interface = load("vllm.v1.kv_cache_interface")
    manager = load("vllm.v1.core.kv_cache_manager").KVCacheManager
    single = load("vllm.v1.core.single_type_kv_cache_manager").SingleTypeKVCacheManager
    estimate = parameters(single.get_num_blocks_to_allocate)
    retention = "retention_interval" in parameters(single.cache_blocks)
    cache_fields = fields(interface.KVCacheConfig)
    mamba_fields = fields(interface.MambaSpec)
    return Release(
        version=version,
        retention=retention,
        retention_from_environment=retention and "prefix_cache_retention_interval" not in cache_fields,
        partial_hits=hasattr(manager, "take_kv_cache_block_copies"),
        admission_cap="apply_admission_cap" in estimate,
        local_in_estimate="num_local_computed_tokens" in estimate,
        lookup_for_connector=hasattr(manager, "truncate_computed_blocks"),
        checkpoint_blocks="num_prefill_checkpoint_blocks" in mamba_fields,
        checkpoint_alignment="prefill_checkpoint_alignment" in mamba_fields,
        prefix_cacheable=hasattr(interface.KVCacheSpec, "prefix_cacheable"),
        lookahead_hashes="num_hash_lookahead_tokens" in parameters(manager.__init__),
        hash_block_in_config="hash_block_size" in cache_fields,
        drafters_recognised=_drafters_recognised(version),
    )
