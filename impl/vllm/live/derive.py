"""What a running vLLM is, in the specification's words: its configuration, and which families it can show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvproof.spec.config import Config, Group, GroupKind


class Unsupported(Exception):
    """Nothing of this engine can be judged. The message says why."""


@dataclass
class Engine:
    """``config`` as far as predicates need it; ``lacking`` are families or ids that can't be judged, with the reason.

    ``contents`` tells whether what blocks hold can be followed.
    """

    config: Config
    lacking: dict[str, str] = field(default_factory=dict)
    contents: bool = True


_KINDS: Mapping[str, GroupKind] = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "SlidingWindowMLASpec": "window",
    "ChunkedLocalAttentionSpec": "chunked",
    "MambaSpec": "mamba",
}


def engine_of(manager: Any, scheduler: Any = None) -> Engine:
    """Read a ``KVCacheManager``, and the scheduler around it if there is one. Raises :class:`Unsupported`."""
    caches = manager.kv_cache_config
    coordinator = manager.coordinator
    groups = tuple(_group(part, one) for part, one in
                   zip(caches.kv_cache_groups, coordinator.single_type_managers, strict=True))  # fmt: skip
    mamba = [part.kv_cache_spec for part in caches.kv_cache_groups if type(part.kv_cache_spec).__name__ == "MambaSpec"]
    pool = manager.block_pool
    eagle = bool(getattr(coordinator, "eagle_group_ids", ()) or getattr(coordinator, "use_eagle", False))
    extra: dict[str, Any] = {}
    if scheduler is not None:
        settings = scheduler.scheduler_config
        extra = {
            "step_tokens": int(scheduler.max_num_scheduled_tokens),
            "max_running": int(scheduler.max_num_running_reqs),
            "speculative": int(getattr(scheduler, "num_spec_tokens", 0)),
            "long_prefill_threshold": int(settings.long_prefill_token_threshold or 0),
            "full_sequence_must_fit": bool(getattr(scheduler, "scheduler_reserve_full_isl", True)),
            "async_scheduling": bool(settings.async_scheduling),
        }
        eagle = bool(getattr(scheduler, "use_eagle", eagle))
    checkpoint = next((int(getattr(spec, "num_prefill_checkpoint_blocks", 0) or 0) for spec in mamba), 0)
    config = Config(
        groups=groups,
        num_blocks=len(pool.blocks),
        hash_unit=int(pool.hash_block_size),
        max_model_len=int(manager.max_model_len),
        eagle=eagle,
        checkpoint_blocks=checkpoint,
        checkpoint_alignment=next((int(getattr(s, "prefill_checkpoint_alignment", 0) or 0) for s in mamba), 0),
        retention=_retention(coordinator),
        **{"step_tokens": int(manager.max_model_len), "speculative": _drafts(mamba), **extra},
    )
    found = Engine(config)
    found.lacking.update(_lacking(found, manager, scheduler, mamba))
    return found


def _group(part: Any, manager: Any) -> Group:
    spec = part.kv_cache_spec
    name = type(spec).__name__
    if name == "UniformTypeKVCacheSpecs":  # layers of one kind with different sizes: any of them tells
        spec = next(iter(spec.kv_cache_specs.values()))
        name = type(spec).__name__
    kind = _KINDS.get(name)
    if kind is None:
        raise Unsupported(f"a cache group of kind {name} has no rules here")
    sizes = {"window": "sliding_window", "chunked": "attention_chunk_size"}
    window = int(getattr(spec, sizes[kind], 0) or 0) if kind in sizes else 0
    return Group(kind, int(manager.block_size), window, bool(getattr(part, "is_eagle_group", False)))


def _cacheable(part: Any) -> bool:
    return bool(getattr(part.kv_cache_spec, "prefix_cacheable", True))


def _drafts(mamba: list[Any]) -> int:
    return next((int(getattr(spec, "num_speculative_blocks", 0) or 0) for spec in mamba), 0)


def _retention(coordinator: Any) -> int | None:
    value = getattr(coordinator, "retention_interval", getattr(coordinator, "prefix_cache_retention_interval", None))
    return None if value is None else int(value)


def _lacking(found: Engine, manager: Any, scheduler: Any, mamba: list[Any]) -> dict[str, str]:
    lacking = {
        "TAIL": "vLLM keeps no holds",
        "EXT": "loads of an external store are not followed in a live engine",
        "EVENT": "the cache's events are not followed in a live engine",
        "REUSE": "what earlier requests promise is not followed in a live engine: its short hits are explained",
        "ADMIT.startup": "a live engine has started, and is hardly ever left to one request",
        "ADMIT.starved": "it is not followed who is passed over step after step",
        "ADMIT.preemption-frees": "it is not asked what each preemption frees",
    }
    if not manager.enable_caching:
        lacking["HIT"] = "prefix caching is off"
    if not all(_cacheable(part) for part in manager.kv_cache_config.kv_cache_groups):
        lacking["HIT.covers"] = "a group takes no part in prefix caching"
    blind = _blind(manager, scheduler, mamba)
    if scheduler is not None and getattr(scheduler, "connector", None) is not None:
        lacking["REF.references"] = "a connector may hold blocks that no table names"
    if blind:
        found.contents = False
        lacking["SLOT"] = blind
        lacking["HIT.same-step"] = blind
    if not mamba:
        nothing = "there is no recurrent group"
        for name in ("SLOT.chunk-end", "SLOT.running-state", "ADMIT.mamba-bound", "ADMIT.deferred",
                     "HIT.resume-boundary", "HIT.same-step"):  # fmt: skip
            lacking.setdefault(name, nothing)
    if scheduler is None or getattr(scheduler, "connector", None) is None:
        for name in ("HIT.only-recurrent-short", "HIT.pure-view"):
            lacking[name] = "hits are cut only for an external store"
    return lacking


def _blind(manager: Any, scheduler: Any, mamba: list[Any]) -> str:
    """Why what blocks hold can't be followed; an empty string where it can."""
    if scheduler is None:
        return "no scheduler says what runs"
    if getattr(scheduler, "connector", None) is not None:
        return "a connector writes blocks unseen"
    modes = {str(getattr(spec, "mamba_cache_mode", "align")) for spec in mamba}
    if modes - {"align"}:
        return f"recurrent states are cached in mode {', '.join(sorted(modes - {'align'}))}; only align is followed"
    parallel = getattr(getattr(scheduler, "vllm_config", None), "parallel_config", None)
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if int(getattr(parallel, name, 1) or 1) > 1:
            return f"{name} is above 1"
    if not manager.enable_caching:
        return "prefix caching is off: nothing is promised"
    if not all(_cacheable(part) for part in manager.kv_cache_config.kv_cache_groups):
        return "a group takes no part in prefix caching, and is computed again after a hit"
    return ""
