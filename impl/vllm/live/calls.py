"""The calls of a live cache manager, as events: lookups, cuts, chunks, estimates and allocations.

``lean`` looks only where something happens. A request that decodes into blocks it has asks for nothing and takes
nothing: two wrappers see that, and say no more. Only when blocks are asked for is the question put again, group by
group, and what is taken counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvproof.impl.vllm.live.judge import Judge
from kvproof.impl.vllm.live.poolhooks import PoolHooks, wrap
from kvproof.impl.vllm.live.view import LiveView
from kvproof.impl.vllm.watch import Watch
from kvproof.spec.config import Config
from kvproof.spec.events import Allocate, Estimate, Event

_COUNTED = ("add_local_computed_blocks", "allocate_external_computed_blocks", "allocate_new_blocks")


class Offers:
    """What the external store offered last, by request."""

    def __init__(self) -> None:
        self.offered: dict[str, int] = {}


class LiveCalls(Watch):
    """``looked_up(request, tokens)`` hears of every lookup's answer."""

    def __init__(
        self,
        config: Config,
        manager: Any,
        scheduler: Any,
        view: LiveView,
        judge: Judge,
        hooks: PoolHooks,
        changed: Callable[[str], None],
        lean: bool,
    ) -> None:
        self.judge, self.hooks, self.lean = judge, hooks, lean
        self.changed = changed
        self.looked_up: Callable[[Any, int], None] | None = None
        self.undo: list[Callable[[], None]] = []
        self._armed: list[_Kept] = []
        self._arguments = list(inspect.signature(manager.allocate_slots).parameters)[2:]
        self._question = list(inspect.signature(manager.coordinator.get_num_blocks_to_allocate).parameters)
        super().__init__(config, _Holder(manager, scheduler), view, Offers(), judge.observe)  # type: ignore[arg-type]

    def _install(self) -> None:
        undo = self.undo
        wrap(self.manager, "get_computed_blocks", self._live_lookup, undo)
        wrap(self.manager, "get_computed_blocks_for_connector", self._live_lookup_apart, undo)
        self._replace(self.manager, "allocate_slots", self._allocating)
        self._replace(self.coordinator, "get_num_blocks_to_allocate", self._estimating)
        scheduler = self.scheduler.real
        if scheduler is not None:
            wrap(self.manager, "truncate_computed_blocks", self._live_truncate, undo)
            if getattr(scheduler, "need_mamba_block_aligned_split", False):
                self._replace(scheduler, "_mamba_block_aligned_split", self._splitting)

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        setattr(owner, name, make(getattr(owner, name)))
        self.undo.append(lambda: owner.__dict__.pop(name, None))

    def forget(self, request: str) -> None:
        self._lookup.pop(request, None)
        self.store.offered.pop(request, None)

    # -- lookups ------------------------------------------------------------------------------------------------------

    def _live_lookup(self, original: Any, request: Any, limit: int | None = None, **kwargs: Any) -> Any:
        answer = original(request, *(() if limit is None else (limit,)), **kwargs)
        self.judge.guard(self._lookup_done, request, answer, limit, True)
        return answer

    def _live_lookup_apart(self, original: Any, request: Any, limit: int | None = None, **kwargs: Any) -> Any:
        answer = original(request, *(() if limit is None else (limit,)), **kwargs)
        self.judge.guard(self._lookup_done, request, answer, limit, False)
        return answer

    def _lookup_done(self, request: Any, answer: Any, limit: int | None, joint: bool) -> None:
        if answer[1] and len(answer[0].blocks) != len(self.config.groups):
            return
        if answer[1]:
            self._found(request, answer[0], answer[1], joint, not joint and bool(answer[3]), limit)
        if self.looked_up is not None and joint:
            self.looked_up(request, int(answer[1]))

    def _live_truncate(self, original: Any, blocks: Any, num_computed_tokens: int) -> Any:
        if self.judge.spoiled:
            return original(blocks, num_computed_tokens)
        return self._truncate(original, blocks, num_computed_tokens)

    # -- chunks -------------------------------------------------------------------------------------------------------

    def _splitting(self, original: Any) -> Callable[..., int]:
        lean = self.lean

        def split(request: Any, offered: int, local: int = 0, external: int = 0) -> int:
            granted = int(original(request, offered, local, external))
            # One token at a time is decoding, as a rule: whether it still is prefill takes a second look.
            if (
                offered != 1
                or not lean
                or request.num_computed_tokens < request.num_prompt_tokens
                or (request.num_computed_tokens < request.num_tokens - 1)
            ):
                self.judge.guard(self._split_done, request, offered, local, external, granted)
            return granted

        return split

    def _split_done(self, request: Any, offered: int, local: int, external: int, granted: int) -> None:
        self._split(lambda *_: granted, request, offered, local, external)

    # -- estimates and allocations ------------------------------------------------------------------------------------

    def _estimating(self, original: Any) -> Callable[..., int]:
        lean = self.lean

        def estimate(*args: Any, **kwargs: Any) -> int:
            total = int(original(*args, **kwargs))
            if total or not lean:
                self.judge.guard(self._asked, original, args, kwargs, total)
            return total

        return estimate

    def _asked(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any], total: int) -> None:
        """Put the question that was just answered again, and listen to each group's part."""
        if self.hooks.inside < 1:
            return  # somebody asks by hand: nothing comes of it
        question = {**dict(zip(self._question, args, strict=False)), **kwargs}
        self._arm()
        with self._undisturbed(), self._listening():
            if not question.get("apply_admission_cap", False) and not self.lean:
                with self._undisturbed():
                    self._ask(original, {**question, "apply_admission_cap": True})
            again, _ = self._ask(original, question)
        self._free_at_estimate = self.view.free_count()
        if again != total:
            raise RuntimeError(f"the same question was answered with {total} and {again} blocks")

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """While the question is put again each group's answer is noted."""
        kept = [_Kept(manager, "get_num_blocks_to_allocate") for manager in self.coordinator.single_type_managers]
        for group, manager in enumerate(self.coordinator.single_type_managers):
            self._wrap(manager, "get_num_blocks_to_allocate", self._group_estimate, group, manager)
        try:
            yield
        finally:
            for method in kept:
                method.restore()

    def _arm(self) -> None:
        """Blocks may be taken now: count them by group until the allocation is over."""
        if self._armed:
            return
        for group, manager in enumerate(self.coordinator.single_type_managers):
            for name, counter in zip(_COUNTED, (self._touched, self._taken, self._taken), strict=True):
                self._armed.append(_Kept(manager, name))
                self._wrap(manager, name, self._count, counter, group)

    def _disarm(self) -> None:
        while self._armed:
            self._armed.pop().restore()

    def _allocating(self, original: Any) -> Callable[..., Any]:
        hooks, judge = self.hooks, self.judge

        def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            before = hooks.changes
            hooks.inside += 1
            try:
                if self._estimates or self._armed:
                    judge.guard(self._begin)
                hooks.who = request.request_id
                answer = original(request, num_new_tokens, *args, **kwargs)
            finally:
                hooks.inside -= 1
            if answer is None or self._estimates or hooks.changes != before:
                judge.guard(self._allocated, request, args, kwargs, answer)
            return answer

        return allocate_slots

    def _begin(self) -> None:
        self._estimates = []
        self._disarm()
        self._reset()

    def _reset(self) -> None:
        groups = len(self.config.groups)
        self._taken[:] = [0] * groups
        self._touched[:] = [0] * groups

    def _ask(self, original: Any, kwargs: dict[str, Any]) -> tuple[int, Estimate]:
        if not self._estimates:
            self._reset()
        return super()._ask(original, kwargs)

    def _fingerprint(self) -> dict[str, Any]:
        return {} if self.lean else super()._fingerprint()

    def _watermark(self, request: Any, given: dict[str, Any]) -> int:
        """Blocks that a new request has to leave free while others run."""
        waits = request.status.name in ("WAITING", "PREEMPTED")
        return (
            int(getattr(self.manager, "watermark_blocks", 0)) if waits and given.get("has_scheduled_reqs", True) else 0
        )

    def _allocated(self, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> None:
        name = request.request_id
        estimates, self._estimates = tuple(self._estimates), []
        self._disarm()
        self.changed(name)
        given = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        granted = answer is not None
        if granted and given.get("new_computed_blocks") is not None:
            self._resumed(request, given)
        free = self.view.free_count()
        event: Event = Allocate(
            request=name,
            granted=granted,
            taken=self._free_at_estimate - free if granted else 0,
            free_before=self._free_at_estimate if granted else free,
            estimates=estimates,
            new_blocks=tuple(self._taken),
            evictable_hits=tuple(self._touched),
            reserved=int(given.get("reserved_blocks", 0)) + self._watermark(request, given),
        )
        if estimates:
            self.judge.observe(event)


class _Kept:
    """A method as one object has it, to be put back: somebody else may have wrapped it, too."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.own = owner.__dict__.get(name)

    def restore(self) -> None:
        if self.own is None:
            self.owner.__dict__.pop(self.name, None)
        else:
            setattr(self.owner, self.name, self.own)


class _Holder:
    """What :class:`Watch` asks of a scheduler, with or without one."""

    def __init__(self, manager: Any, real: Any) -> None:
        self.kv_cache_manager, self.real = manager, real
