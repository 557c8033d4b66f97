"""Watching a real scheduler decide: its own methods, wrapped on the instance, report events.

Nothing is replaced and no answer is changed. The one question asked on top is a dry estimate with the arguments of each
real one (the managers answer both from the same function), because "asked" and "taken" must agree at equal arguments;
what it may disturb is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvproof.impl.vllm.cacheview import CacheView
from kvproof.impl.vllm.connector import Store
from kvproof.impl.vllm.drift import release
from kvproof.impl.vllm.requests import unread
from kvproof.spec.config import Config
from kvproof.spec.events import Allocate, Estimate, Event, GroupEstimate, Lookup, Resume, Split, Truncate
from kvproof.spec.view import NULL

_RECORDED_BY_ESTIMATES = ("_checkpoints", "_num_checkpoint_blocks")


def _ids(blocks: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(block.block_id for block in group) for group in blocks)


def _passed(manager: Any, computed: int) -> int:
    """How many leading slots a request with ``computed`` tokens needs no more: hits there are not adopted."""
    return max(0, int(manager.get_num_skipped_tokens(computed))) // int(manager.block_size)


class Watch:
    """Wraps the decision methods of one scheduler and turns their calls into events."""

    def __init__(self, config: Config, scheduler: Any, view: CacheView, store: Store, emit: Callable[[Event], None]):
        self.config, self.scheduler, self.view, self.store, self.emit = config, scheduler, view, store, emit
        self.manager = scheduler.kv_cache_manager
        self.coordinator = self.manager.coordinator
        self._groups: list[GroupEstimate] = []
        self._estimates: list[Estimate] = []
        self._free_at_estimate = 0
        self._taken: list[int] = []
        self._touched: list[int] = []
        self._lookup: dict[str, Lookup] = {}
        self.found: dict[str, int] = {}
        """How many tokens of each request were in a cache when it was admitted first."""
        self._at_gate = False
        self._passed_gate: tuple[str, list[Estimate]] = ("", [])
        self._install()

    def _install(self) -> None:
        self._wrap(self.manager, "get_computed_blocks", self._get_computed_blocks)
        self._wrap(self.manager, "get_computed_blocks_for_connector", self._get_computed_blocks_for_connector)
        self._wrap(self.manager, "truncate_computed_blocks", self._truncate)
        self._wrap(self.manager, "can_fit_full_sequence", self._gate)  # 0.20; then a part of the next
        self._wrap(self.manager, "allocate_slots", self._allocate_slots)
        self._wrap(self.coordinator, "get_num_blocks_to_allocate", self._estimate)
        self._wrap(self.scheduler, "_mamba_block_aligned_split", self._split)
        for group, manager in enumerate(self.coordinator.single_type_managers):
            self._wrap(manager, "get_num_blocks_to_allocate", self._group_estimate, group, manager)
            self._wrap(manager, "allocate_new_computed_blocks", self._adopt, group, manager)  # up to 0.23; then two
            self._wrap(manager, "add_local_computed_blocks", self._count, self._touched, group)
            self._wrap(manager, "allocate_external_computed_blocks", self._count, self._taken, group)
            self._wrap(manager, "allocate_new_blocks", self._count, self._taken, group)

    @staticmethod
    def _wrap(owner: Any, name: str, around: Callable[..., Any], *extra: Any) -> None:
        original = getattr(owner, name, None)
        if original is not None:
            setattr(owner, name, lambda *args, **kwargs: around(original, *extra, *args, **kwargs))

    # -- lookups ------------------------------------------------------------------------------------------------------

    def _found(self, request: Any, blocks: Any, tokens: int, joint: bool, diverged: bool, limit: int | None) -> None:
        name = request.request_id
        longest = 0 if unread(request) else request.num_tokens - 1
        event = Lookup(
            request=name,
            states=tuple(self.view.states_of(request)),
            tokens=tokens,
            limit=longest if limit is None else min(limit, longest),
            blocks=_ids(blocks.blocks),
            joint=joint,
            diverged=diverged,
        )
        self._lookup[name] = event
        self.emit(event)

    def _get_computed_blocks(self, original: Any, request: Any, limit: int | None = None, **kwargs: Any) -> Any:
        answer = original(request, *(() if limit is None else (limit,)), **kwargs)
        self._found(request, answer[0], answer[1], True, False, limit)
        return answer

    def _get_computed_blocks_for_connector(
        self, original: Any, request: Any, limit: int | None = None, **kwargs: Any
    ) -> Any:
        answer = original(request, *(() if limit is None else (limit,)), **kwargs)
        self._found(request, answer[0], answer[1], False, bool(answer[3]), limit)
        return answer

    def _truncate(self, original: Any, blocks: Any, num_computed_tokens: int) -> Any:
        before = _ids(blocks.blocks)
        references = [[b.ref_cnt for b in group] for group in blocks.blocks]
        request = next((name for name, last in self._lookup.items() if last.blocks == before), "")
        after, error = None, ""
        try:
            answer = original(blocks, num_computed_tokens)
            after = _ids(answer.blocks)
            return answer
        except Exception as exception:
            error = f"{type(exception).__name__}: {exception}".rstrip(": ")
            raise
        finally:
            self.emit(
                Truncate(
                    request=request,
                    endpoint=num_computed_tokens,
                    before=before,
                    after=after,
                    error=error,
                    references_changed=references != [[b.ref_cnt for b in group] for group in blocks.blocks],
                    input_changed=before != _ids(blocks.blocks),
                )
            )

    def partial_hit(self, name: str) -> bool:
        """Whether the request's last lookup ended inside a block."""
        last = self._lookup.get(name)
        return last is not None and any(last.tokens % group.block_size for group in self.config.groups)

    # -- chunks -------------------------------------------------------------------------------------------------------

    def _split(
        self, original: Any, request: Any, offered: int, local: int = 0, external: int = 0, uncached: int = 0
    ) -> int:
        """``uncached``: how far the junction is (0.24 and 0.25; then the request says where)."""
        granted = int(original(request, offered, local, external, *((uncached,) if uncached else ())))
        start = request.num_computed_tokens + local + external
        self._chunk(request, start, offered, granted, start + uncached)
        return granted

    def _chunk(self, request: Any, start: int, offered: int, granted: int, junction: int = 0) -> None:
        """A chunk of ``granted`` tokens was cut for ``request`` from ``start`` on."""
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if start < prefill_end:
            threshold = self.config.long_prefill_threshold
            self.emit(
                Split(
                    request=request.request_id,
                    start=start,
                    offered=offered,
                    granted=granted,
                    prefill_end=prefill_end,
                    limit=min(self.config.step_tokens, threshold) if threshold else self.config.step_tokens,
                    stops=self._stops(request, start, junction),
                )
            )

    def _stops(self, request: Any, start: int, junction: int) -> tuple[int, ...]:
        """Declared stops other than block boundaries: the partial tail (EAGLE: one unit lower) and the junction."""
        stops = set()
        if self.config.partial_hits and release().partial_hits:
            unit = self.config.hash_unit
            for last in (request.num_prompt_tokens, request.num_prompt_tokens - 1):
                stops |= {last // unit * unit, last // unit * unit - unit}
        junction = max(junction, getattr(request, "shared_prefix_boundary", 0))
        if junction > start:
            block = self.config.mamba_block
            stops |= {junction, start + (junction - start) // block * block}
        return tuple(sorted(stop for stop in stops if stop > start))

    # -- estimates and allocations ------------------------------------------------------------------------------------

    def _group_estimate(self, original: Any, group: int, manager: Any, *args: Any, **kwargs: Any) -> int:
        total = int(original(*args, **kwargs))
        request, _, hits, computed = args[:4]
        local = args[4] if release().local_in_estimate else 0
        dry = self._is_dry(kwargs)
        recurrent = self.config.groups[group].kind == "mamba"
        held = len(manager.req_to_blocks.get(request, ()))
        due = any(request in getattr(manager, where, ()) for where in _RECORDED_BY_ESTIMATES)
        self._groups.append(
            GroupEstimate(
                group=group,
                total=total,
                evictable=sum(b.ref_cnt == 0 and not b.is_null for b in hits[_passed(manager, computed) :]),
                deferred=recurrent and total > self.view.num_blocks,
                partial=(len(hits) > 0 and local % manager.block_size != 0)
                or request in getattr(manager, "_partial_hit_reqs", ()),
                checkpoint=recurrent and self.config.checkpoint_blocks > 0 and (dry or due),
                first=request not in getattr(manager, "_allocated_block_reqs", ()),
                held=held,
                hits=len(hits),
            )
        )
        return total

    def _is_dry(self, kwargs: dict[str, Any]) -> bool:
        return self._at_gate or bool(kwargs.get("apply_admission_cap", False))

    def _ask(self, original: Any, kwargs: dict[str, Any]) -> tuple[int, Estimate]:
        self._groups = []
        dry = self._is_dry(kwargs)
        before = self._fingerprint() if dry else {}
        total = original(**kwargs)
        changed: tuple[str, ...] = ()
        if dry:
            after = self._fingerprint()
            changed = tuple(name for name in before if before[name] != after[name])
        event = Estimate(
            request=kwargs["request_id"],
            dry=dry,
            tokens=kwargs["num_tokens"],
            computed=kwargs["total_computed_tokens"],
            groups=tuple(self._groups),
            free=self.view.free_count(),
            changed=changed,
            main=kwargs.get("num_tokens_main_model", 0),
        )
        self._estimates.append(event)
        self.emit(event)
        return total, event

    def _estimate(self, original: Any, **kwargs: Any) -> int:
        if release().admission_cap and not self._is_dry(kwargs):
            with self._undisturbed():
                self._ask(original, {**kwargs, "apply_admission_cap": True})
        total, _ = self._ask(original, kwargs)
        self._free_at_estimate = self.view.free_count()
        return total

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        kept = [
            (manager, name, dict(getattr(manager, name)))
            for manager in self.coordinator.single_type_managers
            for name in _RECORDED_BY_ESTIMATES
            if hasattr(manager, name)
        ]
        yield
        for manager, name, value in kept:
            setattr(manager, name, value)

    def _fingerprint(self) -> dict[str, Any]:
        """What a dry run could change: cheap to take, and enough to name what was changed."""
        managers = self.coordinator.single_type_managers
        return {
            "free blocks": self.view.free_count(),
            "references": sum(block.ref_cnt for block in self.view.pool.blocks),
            "keys": len(self.view.pool.cached_block_hash_to_block),
            "tables": [sum(map(len, m.req_to_blocks.values())) for m in managers],
            "recorded checkpoints": [dict(getattr(m, n, ())) for m in managers for n in _RECORDED_BY_ESTIMATES],
            "partial hits": [len(getattr(m, "_partial_hit_reqs", ())) for m in managers],
            "pending copies": [len(getattr(m, "_pending_cow_copies", ())) for m in managers],
            "admitted requests": [len(getattr(m, "_allocated_block_reqs", ())) for m in managers],
        }

    def _count(self, original: Any, counter: list[int], group: int, *args: Any, **kwargs: Any) -> Any:
        before = self.view.free_count()
        answer = original(*args, **kwargs)
        if len(counter) == len(self.config.groups):
            counter[group] += before - self.view.free_count()
        return answer

    def _adopt(
        self, original: Any, group: int, manager: Any, request: str, hits: Any, local: int, external: int
    ) -> None:
        """Hits are touched and blocks for external tokens are taken in one go."""
        fresh = request not in manager.num_cached_block
        touched = sum(b.ref_cnt == 0 and not b.is_null for b in hits[_passed(manager, local + external) :])
        before = self.view.free_count()
        original(request, hits, local, external)
        if fresh and len(self._taken) == len(self.config.groups):
            self._touched[group] += touched
            self._taken[group] += before - self.view.free_count() - touched

    def _gate(self, original: Any, request: Any, **kwargs: Any) -> bool:
        """Whether the whole sequence fits: a question of its own, which comes before the allocation."""
        name, before = request.request_id, self.view.free_count()
        self._estimates, self._at_gate = [], True
        try:
            fits = bool(original(request, **kwargs))
        finally:
            self._at_gate = False
        asked = self._estimates
        self._passed_gate = (name, asked) if fits else ("", [])
        if not fits:
            self.emit(Allocate(request=name, granted=False, taken=0, free_before=before, estimates=tuple(asked)))
        return fits

    def _allocate_slots(self, original: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        name, groups = request.request_id, len(self.config.groups)
        fresh = not any(name in manager.num_cached_block for manager in self.coordinator.single_type_managers)
        at_gate, self._passed_gate = self._passed_gate, ("", [])
        self._estimates = at_gate[1] if at_gate[0] == name else []
        self._taken[:] = [0] * groups
        self._touched[:] = [0] * groups
        # Headroom that is asked of whoever is admitted beside others.
        admitted = request.status.name in ("WAITING", "PREEMPTED") and kwargs.get("has_scheduled_reqs", False)
        above = int(getattr(self.manager, "watermark_blocks", 0)) if admitted else 0
        before = self._free_at_estimate = self.view.free_count()
        answer = original(request, num_new_tokens, *args, **kwargs)
        granted = answer is not None
        if granted and fresh:
            self._resumed(request, kwargs)
        self.emit(
            Allocate(
                request=name,
                granted=granted,
                taken=self._free_at_estimate - self.view.free_count() if granted else 0,
                free_before=self._free_at_estimate if granted else before,
                estimates=tuple(self._estimates),
                new_blocks=tuple(self._taken),
                evictable_hits=tuple(self._touched),
                reserved=int(kwargs.get("reserved_blocks", 0)) + above,
            )
        )
        return answer

    def _resumed(self, request: Any, kwargs: dict[str, Any]) -> None:
        name = request.request_id
        local = kwargs.get("num_new_computed_tokens", 0)
        external = kwargs.get("num_external_computed_tokens", 0)
        blocks = kwargs.get("new_computed_blocks")
        last = self._lookup.get(name)
        # A load that is over is continued with tokens that count as computed: that is no other admission.
        if request.num_preemptions == 0 and request.num_computed_tokens == 0:
            self.found[name] = local + external
        if local + external == 0 or blocks is None:
            return
        adopted = []
        for manager, ids in zip(self.coordinator.single_type_managers, _ids(blocks.blocks), strict=True):
            passed = min(_passed(manager, local + external), len(ids))
            adopted.append((*[NULL] * passed, *ids[passed:]))
        self.emit(
            Resume(
                request=name,
                local=local,
                external=external,
                blocks=tuple(adopted),
                hit=last.tokens if last is not None else 0,
                offered=self.store.offered.get(name, 0),
                diverged=last is not None and last.diverged,
                asynchronous=bool(kwargs.get("delay_cache_blocks", False)),
                unread=unread(request),
            )
        )
