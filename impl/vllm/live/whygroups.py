"""A real ``KVCacheManager`` as a lookup sees it: its groups, which keys they hold, and how a hit is cut.

Everything is read off the objects given, so that one source serves every release; nothing of vLLM is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvproof.impl.vllm.live.keyhistory import START_STEP, Prompt, digests, marks

Kind = Literal["full", "window", "mamba", "drafter"]
"""What a group caches. A drafter's own group is named so whatever it caches: it is not the model's.

An MTP head that is one more layer of the model's own kind shares the group of the model's full attention, and vLLM
flags that group. It is the model's own then.
"""

_KINDS: tuple[tuple[str, Kind], ...] = (
    ("MambaManager", "mamba"),
    ("SlidingWindowManager", "window"),
    ("ChunkedLocalAttentionManager", "window"),
    ("FullAttentionManager", "full"),
)


@dataclass(frozen=True)
class Chain:
    """A request's prefix hashes, one per ``unit`` tokens."""

    hashes: Sequence[bytes]
    unit: int

    @property
    def end(self) -> int:
        return len(self.hashes) * self.unit

    def at(self, position: int) -> bytes:
        return self.hashes[position // self.unit - 1]


@dataclass(frozen=True)
class CacheGroup:
    """One group. ``window`` is in tokens (0: none), ``chunk`` that of chunked local attention.

    ``caches`` is what is cached, ``kind`` says in addition whether the group is the drafter's. ``drops`` is how many
    tokens EAGLE drops of a hit of this group (0: none; recurrent groups never drop).
    """

    index: int
    caches: Kind
    kind: Kind
    block: int
    window: int
    chunk: int
    drops: int
    manager: Any
    suffix: bytes
    """What vLLM appends to a prefix hash to make it a key of this group."""
    cached: Callable[[bytes], Any]
    """The pool's own: the block that has a key, or ``None``."""

    def holds(self, hash: bytes) -> bool:
        return self.cached(hash + self.suffix) is not None

    def depth(self, chain: Chain, start: int, limit: int) -> int:
        """How far full attention reaches without a gap, in tokens, up to ``limit``. ``start`` is known to be served."""
        end = start // self.block * self.block
        limit = min(limit, chain.end)
        while end + self.block <= limit and self.holds(chain.at(end + self.block)):
            end += self.block
        inside = min(end + self.block, limit + chain.unit) - chain.unit
        for position in range(inside // chain.unit * chain.unit, end, -chain.unit):
            if self.holds(chain.at(position)):
                return position
        return max(end, start)

    def first_needed(self, position: int) -> int:
        """The first block that a hit of ``position`` tokens needs of a window group."""
        if self.chunk:
            return position // self.chunk * self.chunk // self.block
        return max(0, position // self.block - -(-(self.window - 1) // self.block))

    def served(self, chain: Chain, start: int, step: int) -> list[int]:
        """The multiples of ``step`` from ``start`` on at which this group alone can serve a hit, ascending.

        Not for full attention, which serves all up to :meth:`depth`.
        """
        first = max(step, -(-start // step) * step)
        candidates = range(first, chain.end + 1, step)
        if self.caches == "mamba":
            hashes, unit, suffix, cached = chain.hashes, chain.unit, self.suffix, self.cached
            return [position for position in candidates if cached(hashes[position // unit - 1] + suffix) is not None]
        run, runs = 0, []
        for end in range(self.block, chain.end + 1, self.block):
            run = run + 1 if self.holds(chain.at(end)) else 0
            runs.append(run)
        beyond = 1 if self.drops else 0  # the block that is matched and then dropped

        def covers(position: int) -> bool:
            last = position // self.block + beyond
            return last <= len(runs) and runs[last - 1] >= last - self.first_needed(position)

        return [position for position in candidates if position % self.block == 0 and covers(position)]


@dataclass(frozen=True)
class Cache:
    """A manager's groups that take part in lookups. ``alignment`` is what hits end on, ``unit`` what hashes cover.

    ``retention`` is the retention interval in tokens (``None``: every boundary is kept). ``partial`` is whether a hit
    may end inside a block.
    """

    groups: tuple[CacheGroup, ...]
    unit: int
    alignment: int
    partial: bool
    retention: int | None
    manager: Any

    @property
    def full(self) -> list[CacheGroup]:
        """The model's own full-attention groups: what they have is what attention alone could serve."""
        return [group for group in self.groups if group.kind == "full"]

    @property
    def widest(self) -> CacheGroup:
        """The group whose blocks a hit has to end on: the recurrent one, else that of the widest block."""
        return max(self.groups, key=lambda group: (group.caches == "mamba", group.block, -group.index))

    def prompt(self, request: Any, chain: Chain) -> Prompt:
        """``request``'s prompt for the history."""
        tokens = int(request.num_prompt_tokens)
        known = Prompt(request.request_id, tokens, dict(marks(chain.hashes, self.unit, self.widest.block, tokens)))
        listed = getattr(request, "prompt_token_ids", None)
        if listed is not None and not getattr(request, "mm_features", None) and self.alignment > START_STEP:
            lora = getattr(getattr(request, "lora_request", None), "lora_name", None)
            known.start = digests(listed[: self.alignment], (getattr(request, "cache_salt", None), lora))
        return known

    def computing(self, name: str, position: int) -> bool:
        """Whether request ``name`` runs and has not come to ``position`` yet, as far as its keyed blocks tell."""
        for group in self.full or self.groups:
            if name in group.manager.req_to_blocks:
                return int(group.manager.num_cached_block.get(name, 0)) * group.block < position
        return False


def read(manager: Any) -> Cache:
    """The groups of a real ``KVCacheManager``. Those that opt out of prefix caching, or cache no prefix, are left out.

    The pool's unit is what hashes cover; with one group it is its block.
    """
    coordinator = manager.coordinator
    unit = int(coordinator.block_pool.hash_block_size)
    partial = bool(getattr(coordinator, "enable_partial_hash_hits", False))
    alignment = unit if partial else int(coordinator.scheduler_block_size)
    groups = tuple(_groups(coordinator, alignment))
    retention = getattr(coordinator, "retention_interval", None)
    return Cache(groups, unit, alignment, partial, None if retention is None else int(retention), manager)


def _groups(coordinator: Any, alignment: int) -> Iterator[CacheGroup]:
    declared = coordinator.kv_cache_config.kv_cache_groups
    both = list(zip(declared, map(_caches, coordinator.single_type_managers), strict=True))
    # Without attention in another group, the flagged one has the model's own layers beside the drafter's.
    apart = any(caches not in (None, "mamba") and not _flagged(group) for group, caches in both)
    for index, ((group, caches), manager) in enumerate(zip(both, coordinator.single_type_managers, strict=True)):
        if caches is None or not getattr(group.kv_cache_spec, "prefix_cacheable", True):
            continue
        block = int(manager.block_size)
        drafter = apart and _flagged(group)
        drops = bool(getattr(manager, "use_eagle", False)) and caches != "mamba"
        yield CacheGroup(
            index=index,
            caches=caches,
            kind="drafter" if drafter else caches,
            block=block,
            window=int(getattr(manager, "sliding_window", 0)),
            chunk=int(getattr(manager, "attention_chunk_size", 0)),
            drops=(min(alignment, block) if caches == "full" else block) if drops else 0,
            manager=manager,
            suffix=index.to_bytes(4, "big"),
            cached=manager.block_pool.cached_block_hash_to_block.get_one_block,
        )


def _caches(manager: Any) -> Kind | None:
    names = {cls.__name__ for cls in type(manager).__mro__}
    return next((kind for name, kind in _KINDS if name in names), None)


def _flagged(group: Any) -> bool:
    return bool(getattr(group, "is_eagle_group", False))


def floor(position: int, step: int) -> int:
    return position // step * step


def common(step: int, block: int) -> int:
    """The boundaries at which a group of ``block`` keeps what a hit aligned to ``step`` can use."""
    return math.lcm(step, block)
