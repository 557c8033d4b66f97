"""What an invariant stands on: claims about the rules that its predicate asks, and what the rules mirror in vLLM."""

from __future__ import annotations

from collections.abc import Mapping

_REF = tuple(
    f"REF.{action}"
    for action in (
        "fresh-pool", "allocate", "touch", "release", "pad", "copy-from-a-hit", "copy-from-a-running-block",
        "copy-to-a-table", "copy-to-the-cache", "copy-done", "hold", "pin", "unhold",
    )
)  # fmt: skip

GROUNDS: Mapping[str, tuple[str, ...]] = {
    "SLOT.chunk-end": ("SLOT.chunk-end", "SLOT.checkpoint-position", "SLOT.chunk-progress"),
    "SLOT.key-content": ("SLOT.two-chunks", "SLOT.slot-state"),
    "ADMIT.exact": ("ADMIT.mamba-exact", "ADMIT.attention-exact"),
    "ADMIT.refused-though-fits": ("ADMIT.mamba-exact", "ADMIT.attention-exact", "ADMIT.window-peak"),
    "ADMIT.mamba-bound": ("ADMIT.mamba-bounded",),
    "ADMIT.dry-pure": ("ADMIT.dry-run-pure",),
    "HIT.only-recurrent-short": ("HIT.cut-is-total",),
    "HIT.resume-boundary": ("HIT.resume-has-state",),
    "HIT.limit": ("HIT.leaves-a-token",),
    "REF.references": _REF,
    "REF.queue": _REF,
}
"""Claims of ``kvproof prove`` by invariant. RADIX is the arithmetic under all of them."""

MIRRORS: Mapping[str, tuple[str, ...]] = {
    "chunk": ("Scheduler._mamba_block_aligned_split",),
    "checkpoint": (
        "get_mamba_prefill_checkpoint_position",
        "is_mamba_prefill_checkpoint_valid",
        "MambaManager._needs_internal_checkpoint",
    ),
    "blocks": (
        "SingleTypeKVCacheManager.get_num_blocks_to_allocate",
        "SingleTypeKVCacheManager.allocate_new_blocks",
        "SingleTypeKVCacheManager.add_local_computed_blocks",
        "SingleTypeKVCacheManager.allocate_external_computed_blocks",
        "MambaManager.get_num_blocks_to_allocate",
        "MambaManager.allocate_new_blocks",
        "SlidingWindowSpec.max_admission_blocks_per_request",
        "ChunkedLocalAttentionSpec.max_admission_blocks_per_request",
    ),
    "hits": (
        "KVCacheManager.truncate_computed_blocks",
        "KVCacheManager.get_computed_blocks",
        "KVCacheManager.get_computed_blocks_for_connector",
        "HybridKVCacheCoordinator.find_longest_cache_hit",
        "HybridKVCacheCoordinator.find_longest_cache_hit_per_group",
        "FullAttentionManager.find_longest_cache_hit",
        "SlidingWindowManager.find_longest_cache_hit",
        "MambaManager.find_longest_cache_hit",
        "Scheduler._get_local_prefix_cache_hit",
    ),
    "ledger": (
        "BlockPool.get_new_blocks",
        "BlockPool.touch",
        "BlockPool.free_blocks",
        "BlockPool.cache_full_blocks",
        "BlockPool.cache_partial_block",
        "BlockPool.move_block_hashes",
        "SingleTypeKVCacheManager.free",
        "SingleTypeKVCacheManager._apply_cow",
    ),
    "slots": (
        "SingleTypeKVCacheManager.cache_blocks",
        "MambaManager.cache_blocks",
        "MambaManager._cache_partial_tail_block",
        "FullAttentionManager._cache_partial_tail_block",
        "MambaManager.remove_skipped_blocks",
        "MambaManager._relocate_speculative_block",
    ),
    "reuse": (
        "MambaManager.reachable_block_mask",
        "SingleTypeKVCacheManager.reachable_block_mask",
        "SlidingWindowManager.reachable_block_mask",
        "KVCacheCoordinator.get_replay_boundaries",
        "replay_boundaries",
        "HybridKVCacheCoordinator.get_num_cacheable_tokens",
    ),
    "machine": (
        "Scheduler.schedule",
        "Scheduler._preempt_request",
        "Scheduler._free_request_blocks",
        "Scheduler._inflight_prefill_reserved_blocks",
        "Scheduler._request_remaining_blocks",
        "Scheduler._update_requests_with_invalid_blocks",
        "KVCacheManager.allocate_slots",
        "KVCacheCoordinator.allocate_new_computed_blocks",
        "KVCacheCoordinator.get_num_blocks_to_allocate",
    ),
}
"""By module of rules (``spec/rules``; ``machine`` is the abstract machine): the functions of vLLM whose decisions they
describe, as far as a release has them."""
