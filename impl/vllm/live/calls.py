"""The calls of a live cache manager, as events: lookups, cuts, chunks, estimates and allocations.

``lean`` looks only where something happens. A request that decodes into blocks it has asks for nothing and takes
nothing: two wrappers see that, and say no more. Only when blocks are asked for is the question put again, group by
group, and what is taken counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from kvproof.impl.vllm.live.judge import Judge
from kvproof.impl.vllm.live.overlay import given, lasting, listening, wrap
from kvproof.impl.vllm.live.poolhooks import PoolHooks
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
        self._hearing = False
        self._aside = False
        super().__init__(config, _Holder(manager, scheduler), view, Offers(), judge.observe)  # type: ignore[arg-type]

    def _install(self) -> None:
        undo = self.undo
        self._lay(self.manager, "get_computed_blocks", lambda original: self._looking_up(original, True))
        self._lay(self.manager, "get_computed_blocks_for_connector", lambda original: self._looking_up(original, False))
        scheduler = self.scheduler.real
        self._groups_asked = self.coordinator.single_type_managers
        self._groups_heard = tuple(self._heard(*pair) for pair in enumerate(self._groups_asked))
        self._lay(self.coordinator, "get_num_blocks_to_allocate", self._estimating)
        self._lay(self.manager, "allocate_slots", self._allocating)
        undo.append(self._disarm)
        if scheduler is not None:
            wrap(self.manager, "truncate_computed_blocks", self._live_truncate, undo)
            wrap(scheduler, "_request_remaining_blocks", self._only_asking, undo)
            if not self.lean and getattr(scheduler, "need_mamba_block_aligned_split", False):
                self._lay(scheduler, "_mamba_block_aligned_split", self._splitting)

    def _heard(self, group: int, manager: Any) -> StandIn:
        """One group's manager while blocks are asked for and taken: answers are noted, and what is taken counted."""
        answers = {"get_num_blocks_to_allocate": partial(self._group_asked, group, manager)}
        for name, counter in zip(_COUNTED, (self._touched, self._taken, self._taken), strict=True):
            original = getattr(manager, name, None)
            if original is not None:
                answers[name] = partial(self._count, original, counter, group)
        return StandIn(manager, answers)

    def _lay(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        overlay = lasting(owner)
        overlay.lay(name, make)
        self.undo.append(lambda: overlay.remove(name))

    def forget(self, request: str) -> None:
        self._lookup.pop(request, None)
        self.store.offered.pop(request, None)

    # -- lookups ------------------------------------------------------------------------------------------------------

    def _looking_up(self, original: Any, joint: bool) -> Callable[..., Any]:
        def look_up(request: Any, limit: int | None = None, **kwargs: Any) -> Any:
            answer = original(request, *(() if limit is None else (limit,)), **kwargs)
            self.judge.guard(self._lookup_done, request, answer, limit, joint)
            return answer

        return look_up

    def _lookup_done(self, request: Any, answer: Any, limit: int | None, joint: bool) -> None:
        if answer[1] and len(answer[0].blocks) != len(self.config.groups):
            return
        self.hooks.who = request.request_id
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
        def split(*args: Any, **kwargs: Any) -> int:
            granted = int(original(*args, **kwargs))
            self.judge.guard(self._was_split, args, kwargs, granted)
            return granted

        return split

    def _was_split(self, args: tuple[Any, ...], kwargs: dict[str, Any], granted: int) -> None:
        request, offered = given(args, kwargs, 0, "request"), given(args, kwargs, 1, "num_new_tokens")
        local = given(args, kwargs, 2, "num_new_local_computed_tokens") or 0
        external = given(args, kwargs, 3, "num_external_computed_tokens") or 0
        self._chunk(request, request.num_computed_tokens + local + external, offered, granted)

    def scheduled(self, output: Any, names: Collection[str]) -> None:
        """``lean``: the chunks of these requests as they were scheduled, which is what the device will run."""
        scheduler = self.scheduler.real
        if not self.lean or not getattr(scheduler, "need_mamba_block_aligned_split", False):
            return
        cached, drafts = output.scheduled_cached_reqs, output.scheduled_spec_decode_tokens
        rows = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        rows += [row for row in zip(cached.req_ids, cached.num_computed_tokens, strict=True) if row[0] in names]
        for name, start in rows:
            request = scheduler.requests.get(name)
            if request is not None:
                granted = output.num_scheduled_tokens[name] - len(drafts.get(name, ()))
                self._chunk(request, start, granted, granted)

    # -- estimates and allocations ------------------------------------------------------------------------------------

    def _estimating(self, original: Any) -> Callable[..., Any]:
        def asked(total: Any, question: dict[str, Any]) -> None:
            self.judge.guard(self._asked, original, question, total)

        return listening(original, self.hooks, "answer" if self.lean else "True", asked)

    def _asked(self, original: Any, question: dict[str, Any], total: int) -> None:
        """Put the question that was just answered again, and listen to each group's part."""
        if self.hooks.inside < 1 or self._aside:
            return  # nothing will come of it
        self.hooks.who = question["request_id"]
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
        self._hearing = True
        try:
            yield
        finally:
            self._hearing = False

    def _group_asked(self, group: int, manager: Any, *args: Any, **kwargs: Any) -> Any:
        original = manager.get_num_blocks_to_allocate
        if not self._hearing:
            return original(*args, **kwargs)
        return self._group_estimate(original, group, manager, *args, **kwargs)

    def _only_asking(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """The scheduler wants to know what a request still needs, and takes nothing."""
        self._aside = True
        try:
            return original(*args, **kwargs)
        finally:
            self._aside = False

    def _arm(self) -> None:
        """Blocks may be taken now: count them by group until the allocation is over."""
        self.coordinator.single_type_managers = self._groups_heard

    def _disarm(self) -> None:
        if self.coordinator.single_type_managers is self._groups_heard:
            self.coordinator.single_type_managers = self._groups_asked

    def _allocating(self, original: Any) -> Callable[..., Any]:
        def allocated(answer: Any, given: dict[str, Any]) -> None:
            self.judge.guard(self._allocated, given, answer)

        allocate_slots = listening(
            original, self.hooks, "answer is None or calls._estimates or hooks.changes != before", allocated, calls=self
        )

        def allocate_by_hand(*args: Any, **kwargs: Any) -> Any:
            with self.hooks.at_work():
                return allocate_slots(*args, **kwargs)

        # A scheduler's own calls are known to be inside already; this is where a decoding request passes each step.
        return allocate_slots if self.scheduler.real is not None else allocate_by_hand

    def _reset(self) -> None:
        groups = len(self.config.groups)
        self._taken[:] = [0] * groups
        self._touched[:] = [0] * groups

    def _ask(self, original: Any, kwargs: dict[str, Any]) -> tuple[int, Estimate]:
        if not self._estimates or self._estimates[-1].request != kwargs["request_id"]:
            self._estimates = []
            self._reset()
        return super()._ask(original, kwargs)

    def _fingerprint(self) -> dict[str, Any]:
        return {} if self.lean else super()._fingerprint()

    def _watermark(self, request: Any, given: dict[str, Any]) -> int:
        """Blocks that a new request has to leave free while others run."""
        waits = request.status.name in ("WAITING", "PREEMPTED")
        if not waits or not given.get("has_scheduled_reqs", True):
            return 0
        return int(getattr(self.manager, "watermark_blocks", 0))

    def _allocated(self, given: dict[str, Any], answer: Any) -> None:
        request = given["request"]
        name = request.request_id
        estimates, self._estimates = tuple(one for one in self._estimates if one.request == name), []
        self._disarm()
        self.changed(name)
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


class StandIn:
    """Stands where ``manager`` stood: some methods are answered by ``answers``, everything else by ``manager``."""

    def __init__(self, manager: Any, answers: Mapping[str, Callable[..., Any]]) -> None:
        for name, value in {"_manager": manager, **answers}.items():
            object.__setattr__(self, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._manager)  # where isinstance looks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._manager, name, value)


class _Holder:
    """What :class:`Watch` asks of a scheduler, with or without one."""

    def __init__(self, manager: Any, real: Any) -> None:
        self.kv_cache_manager, self.real = manager, real
