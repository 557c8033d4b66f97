"""A release's decision functions, to be run on the caller's numbers: integers, or unknowns that stand for any.

The functions are the release's own, unchanged. What they read of ``self`` is planted: the scheduler is a stand-in that
has what the split reads and refuses every other question; a manager is a real one, with the sizes, counts and tables
that its estimate reads replaced. A size that is left concrete is so large that it can't be taken for a token count of
an unknown (:data:`LARGE`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from kvproof.impl.vllm.configuration import make_scheduler
from kvproof.impl.vllm.drift import load, parameters, release
from kvproof.spec.config import Config, Group

LARGE = 4096
"""The block of the manager before anything is planted, in tokens."""

REQUEST = "r"

_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_GROUPS = {"full": 0, "window": 1, "mamba": 2}
_CONFIG = Config(
    groups=(Group("full", LARGE), Group("window", LARGE, LARGE), Group("mamba", LARGE)),
    num_blocks=64,
    hash_unit=LARGE,
    step_tokens=LARGE,
    max_model_len=LARGE,
)


class StandIn:
    """An object with a few attributes. Any other is refused, also where the reader has a default for it."""

    def __init__(self, what: str, **planted: Any) -> None:
        self.__dict__.update(planted)
        self.__dict__["_what"] = what

    def __getattr__(self, name: str) -> NoReturn:
        raise LookupError(f"the function reads {name} of {self.__dict__.get('_what', '?')}, which nobody planted")


@dataclass(frozen=True)
class Answer:
    """What an estimate answered. ``checkpoint``: it is noted that the step exports one. ``changed`` names what the
    question disturbed."""

    total: Any
    checkpoint: bool
    changed: tuple[str, ...] = ()


class Shipped:
    """The functions of the imported release. ``builtins`` are put in the place of Python's while a manager runs, for
    unknowns that Python's own would insist on knowing (``len``)."""

    def __init__(self, builtins: Mapping[str, Callable[..., Any]]) -> None:
        self.version = release().version
        self.name = release().name
        self.builtins = builtins
        self._scheduler = load("vllm.v1.core.sched.scheduler").Scheduler
        self._interface = load("vllm.v1.kv_cache_interface")
        self._module = load(_MANAGERS)

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def has_checkpoints(self) -> bool:
        """Whether prefill checkpoints are exported by a rule that is not one model's own (0.30.0)."""
        return hasattr(self._interface, "is_mamba_prefill_checkpoint_valid")

    @property
    def has_lookahead_hashes(self) -> bool:
        """Whether keys may cover tokens after their boundary (0.33.0)."""
        return release().lookahead_hashes

    @property
    def truncates(self) -> bool:
        """Whether a lookup's result can be cut (0.27.0)."""
        return release().lookup_for_connector

    # -- the split ----------------------------------------------------------------------------------------------------

    def split(
        self,
        *,
        computed: Any,
        offered: Any,
        prompt: Any,
        tokens: Any,
        block: Any,
        unit: Any,
        drop: Any,
        limit: Any,
        threshold: Any = 0,
        junction: Any = 0,
        partial: Any = False,
        junction_inside: Any = False,
        alignment: Any = None,
        lookahead: Any = 0,
    ) -> Any:
        """``Scheduler._mamba_block_aligned_split``: how many of the ``offered`` tokens are granted.

        ``computed``, ``prompt`` and ``tokens`` are the request's; ``drop`` whether hits drop a unit (EAGLE); ``limit``
        the step's token limit and ``threshold`` the long-prefill one (0: none); ``junction`` the detected one (0:
        none); ``alignment`` that of the exporting kernel (``None``: nothing is exported).
        """
        request = StandIn(
            "the request",
            num_computed_tokens=computed,
            num_prompt_tokens=prompt,
            num_tokens=tokens,
            shared_prefix_boundary=junction,
        )
        scheduler = StandIn(
            "the scheduler",
            cache_config=StandIn("the cache configuration", block_size=block),
            scheduler_config=StandIn("the scheduler configuration", long_prefill_token_threshold=threshold),
            block_size=block,
            hash_block_size=unit,
            max_num_scheduled_tokens=limit,
            mamba_partial_cache_hit=partial,
            mamba_has_prefill_checkpoint_blocks=alignment is not None,
            mamba_prefill_checkpoint_alignment=alignment,
            num_hash_lookahead_tokens=lookahead,
            # One bit under the names that it has had.
            use_eagle=drop,
            use_eagle_block_drop=drop,
            mamba_fine_grained_prefix_cache=junction_inside,
            mamba_shared_prefix_checkpoint=junction_inside,
        )
        return self._scheduler._mamba_block_aligned_split(scheduler, request, offered)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def checkpoint_position(self, tokens: Any, grain: Any, drop: Any, lookahead: Any = 0) -> Any:
        """``get_mamba_prefill_checkpoint_position``."""
        function = self._interface.get_mamba_prefill_checkpoint_position
        more = {"num_hash_lookahead_tokens": lookahead} if "num_hash_lookahead_tokens" in parameters(function) else {}
        return function(tokens, grain, drop, **more)

    def checkpoint_valid(self, start: Any, end: Any, position: Any, unit: Any, block: Any, alignment: Any) -> Any:
        """``is_mamba_prefill_checkpoint_valid``."""
        return self._interface.is_mamba_prefill_checkpoint_valid(
            query_start=start,
            query_end=end,
            checkpoint_position=position,
            hash_block_size=unit,
            mamba_block_size=block,
            checkpoint_alignment=alignment,
        )

    # -- managers -----------------------------------------------------------------------------------------------------

    def manager(self, kind: str, block: Any, unit: Any) -> Any:
        """A real manager of its own over a real pool, with its block and the hash unit planted."""
        made = make_scheduler(_CONFIG).kv_cache_manager.coordinator.single_type_managers[_GROUPS[kind]]
        spec = copy.copy(made.kv_cache_spec)
        object.__setattr__(spec, "block_size", block)
        made.kv_cache_spec = spec
        made.block_size = made.scheduler_block_size = block
        made.cache_hit_alignment_tokens = block
        made.block_pool.hash_block_size = unit
        return made

    def mamba(
        self, *, block: Any, unit: Any, grain: Any, speculative: Any, drop: Any, alignment: Any, lookahead: Any = 0
    ) -> Any:
        """A recurrent group's manager. ``grain`` is what hits align to: the block, or the unit with partial hits."""
        made = self.manager("mamba", block, unit)
        made.num_speculative_blocks = speculative
        made.cache_hit_alignment_tokens = grain
        made.has_prefill_checkpoint_blocks = alignment is not None
        made.drop_eagle_checkpoint_block = drop
        made.block_pool.num_hash_lookahead_tokens = lookahead
        if self.has_checkpoints:
            object.__setattr__(made.kv_cache_spec, "prefill_checkpoint_alignment", alignment)
        return made

    def window(self, *, block: Any, unit: Any, window: Any) -> Any:
        """A sliding-window group's manager."""
        made = self.manager("window", block, unit)
        made.sliding_window = window
        object.__setattr__(made.kv_cache_spec, "sliding_window", window)
        return made

    def full(self, *, block: Any, unit: Any) -> Any:
        """A full-attention group's manager."""
        return self.manager("full", block, unit)

    def blocks(self, manager: Any, table: Any) -> Any:
        """A table of this manager: ``table`` itself, or, for a list that says of each slot whether it is null, real
        blocks."""
        if type(table) is not list:
            return table
        pool = manager.block_pool
        if table.count(False) > pool.get_num_free_blocks():
            raise LookupError(f"a table of {len(table)} slots does not fit the pool that the function is run on")
        return [pool.null_block if null else pool.get_new_blocks(1)[0] for null in table]

    def estimate(
        self,
        manager: Any,
        *,
        end: Any,
        hits: Any,
        computed: Any,
        local: Any,
        end_with_lookahead: Any = None,
        prefill_end: Any = 0,
        dry: bool = False,
    ) -> Answer:
        """``get_num_blocks_to_allocate``, for the request :data:`REQUEST`, and what it left noted."""
        noted = getattr(manager, "_checkpoints", {})
        before = dict(noted)
        function = manager.get_num_blocks_to_allocate
        more = {"prefill_end": prefill_end} if "prefill_end" in parameters(function) else {}
        with self._builtins():
            total = function(
                REQUEST,
                end if end_with_lookahead is None else end_with_lookahead,
                hits,
                computed,
                local,
                end,
                apply_admission_cap=dry,
                **more,
            )
        changed = ("the noted checkpoint",) if before.keys() != noted.keys() else ()
        return Answer(total, REQUEST in noted, changed)

    def adopt(self, manager: Any, hits: list[Any], local: Any) -> None:
        """``add_local_computed_blocks``: the request takes what its lookup found."""
        with self._builtins():
            manager.add_local_computed_blocks(REQUEST, hits, local, 0)

    def allocate(self, manager: Any, end: Any) -> int:
        """``allocate_new_blocks``; returns how many blocks left the pool."""
        before = manager.block_pool.get_num_free_blocks()
        with self._builtins():
            manager.allocate_new_blocks(REQUEST, end, end)
        return int(before - manager.block_pool.get_num_free_blocks())

    # -- lookups ------------------------------------------------------------------------------------------------------

    def cut(self, block: Any, held: Mapping[str, int], endpoint: Any) -> tuple[dict[str, int], bool]:
        """``KVCacheManager.truncate_computed_blocks`` of a lookup that found ``held`` blocks in a group of each kind.

        Returns how many blocks of each kind are left, and whether the lookup's result and its references are as before.
        """
        made = make_scheduler(_CONFIG).kv_cache_manager
        for manager in made.coordinator.single_type_managers:
            manager.block_size = block
        found = [made.block_pool.get_new_blocks(held[kind]) for kind in _GROUPS]
        blocks = made.create_kv_cache_blocks(tuple(found))
        before = [[(b.block_id, b.ref_cnt) for b in group] for group in blocks.blocks]
        left = made.truncate_computed_blocks(blocks, endpoint)
        pure = before == [[(b.block_id, b.ref_cnt) for b in group] for group in blocks.blocks]
        return {kind: len(group) for kind, group in zip(_GROUPS, left.blocks, strict=True)}, pure

    @contextlib.contextmanager
    def _builtins(self) -> Iterator[None]:
        """The managers' module finds :attr:`builtins` in place of Python's. Nothing of the release is replaced."""
        for name, function in self.builtins.items():
            setattr(self._module, name, function)
        try:
            yield
        finally:
            for name in self.builtins:
                delattr(self._module, name)
