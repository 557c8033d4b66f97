"""Whether anything comes of the steps of a real scheduler: who waits, or runs, for nothing.

Three ways of getting nowhere are told apart. The engine is *stuck*: it runs nothing, and nothing that it waits for is
under way. It is *busy in vain*: it runs, but whoever runs loses its blocks again before anything new is computed. One
request is *starved*: others run, there are tokens, blocks and a place left over for it, and still it is given nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from kvproof.impl.vllm.cacheview import CacheView
from kvproof.spec.config import Config
from kvproof.spec.events import Preempted, Stall, Starved
from kvproof.spec.rules.blocks import peak_blocks
from kvproof.spec.view import NULL

STALL_AFTER = 3
"""Steps in a row in which nothing runs before a stall is called. Loads in flight are waited for."""

STARVED_AFTER = 48
"""Steps in a row in which a request is passed over, for no lack of anything, before it counts as starved. Far more
than a healthy engine needs to make room for one block; fewer than a long answer has tokens."""

PARKED = frozenset({"WAITING_FOR_REMOTE_KVS"})
"""Statuses of requests that wait for something that comes from outside."""


def waiting_queues(scheduler: Any) -> Iterable[Any]:
    """The queues of requests that wait, in the order in which they are served."""
    return (getattr(scheduler, n, ()) for n in ("kv_holding_waiting", "skipped_waiting", "waiting"))


def watch_preemptions(scheduler: Any, view: CacheView, emit: Callable[[Preempted], None]) -> Callable[..., None]:
    """Report every request that ``scheduler`` preempts, and what that freed. Returns what preempts without a word."""
    preempt: Callable[..., None] = scheduler._preempt_request

    def _preempt_request(request: Any, *args: Any, **kwargs: Any) -> None:
        name, before = request.request_id, view.free_count()
        tables = [blocks for (owner, _), blocks in view.tables().items() if owner == name]
        alone = sum(block != NULL and view.references(block) == 1 for blocks in tables for block in blocks)
        preempt(request, *args, **kwargs)
        emit(Preempted(name, alone, view.free_count() - before))

    scheduler._preempt_request = _preempt_request
    return preempt


class Progress:
    """Watches one scheduler, step by step.

    Progress is a request that ends, or of which more is computed than ever before. Rows alone are none: a request that
    runs, loses its blocks and runs again would look busy for ever.
    """

    def __init__(self, config: Config, scheduler: Any, view: CacheView) -> None:
        self._config, self._scheduler, self._view = config, scheduler, view
        self.idle = 0
        """Steps in a row that ran nothing and waited for no load. Steps in which a store put somebody off count neither
        way."""
        self._fruitless = 0
        self._stalled = False
        self._highest: dict[str, int] = {}
        self._hungry: dict[str, int] = {}
        self._refused = False

    @property
    def stuck(self) -> bool:
        """Whether more steps would bring nothing."""
        return self.idle > STALL_AFTER or self._stalled

    def refused(self) -> None:
        """In the step that is being scheduled a request did not find the blocks that it needs."""
        self._refused = True

    def interfered(self) -> None:
        """Somebody took blocks from a request, or a request away, from outside: what was lost is not the engine's."""
        self._fruitless = 0

    def after(
        self,
        rows: Mapping[str, int],
        loading: bool,
        arrived: bool,
        launched: Collection[str] = (),
        put_off: bool = False,
    ) -> list[Stall | Starved]:
        """A step is over that ran ``rows`` (tokens by request). Loads are under way (``loading``), or have ``arrived``
        with it. ``launched`` are the requests in steps that are scheduled and not over. ``put_off``: a store did not
        know yet what it holds of somebody, who is to ask again.
        """
        found: list[Stall | Starved] = []
        stall = self._stall_after(bool(rows or launched), loading, arrived, put_off and not self._refused)
        if stall is not None:
            found.append(stall)
        found += self._starved_after(rows, launched)
        self._refused = False
        return found

    # -- nothing comes of it ------------------------------------------------------------------------------------------

    def _stall_after(self, ran: bool, loading: bool, arrived: bool, put_off: bool) -> Stall | None:
        if self._brought() or not self._scheduler.requests:
            self.idle = self._fruitless = 0
            self._stalled = False
            return None
        self._fruitless += 1
        # Whoever asks again waits for the store: such a step is none of the engine's, and no progress either.
        self.idle = 0 if ran or loading or arrived else self.idle + (not put_off)
        if self._stalled or (self.idle < STALL_AFTER and self._fruitless < self._bound()):
            return None
        stall = self._stall(busy=self.idle < STALL_AFTER)
        self._stalled = stall is not None
        return stall

    def _brought(self) -> bool:
        requests = self._scheduler.requests
        progress = any(name not in requests for name in self._highest)
        for name in [name for name in self._highest if name not in requests]:
            del self._highest[name]
        for name, request in requests.items():
            computed = int(request.num_computed_tokens)
            if request.status.name not in PARKED and computed > self._highest.get(name, 0):
                progress = True
                self._highest[name] = computed
        return progress

    def _bound(self) -> int:
        """More steps than it takes to compute all that is known once again, a token at a time, to hear what the store
        holds, and to load that once."""
        steps = self._config.load_steps + self._config.offer_delay + 1
        return STALL_AFTER + sum(int(request.num_tokens) + steps for request in self._scheduler.requests.values())

    def _stall(self, busy: bool) -> Stall | None:
        scheduler = self._scheduler
        first = next(iter(scheduler.running), None) or self._next()
        if first is None:
            return None
        return self.stall_of(
            first,
            *((self._fruitless, "running") if busy else (self.idle, "running" if scheduler.running else "waiting")),
        )

    def _next(self) -> Any:
        """The waiting request that is looked at first; ``None`` where none waits."""
        heads = [next(iter(queue)) for queue in waiting_queues(self._scheduler) if queue]
        if not heads:
            return None
        return min(heads) if self._config.policy == "priority" else heads[0]

    def stall_of(self, request: Any, schedules: int, why: str) -> Stall:
        """``request`` gets nowhere, and has not for so many steps."""
        scheduler = self._scheduler
        others = {holder.request for holder in self._view.holders() if holder.request != request.request_id}
        # Where those that hold blocks are in each other's way, each of them must be one that could be served.
        held = [scheduler.requests[name] for name in sorted(others) if name in scheduler.requests]
        return Stall(
            request=request.request_id,
            schedules=schedules,
            peak=max(self._peak(one) for one in (request, *held)),
            pool=self._view.num_blocks - 1,
            blocked=bool(others) and why != "running",
            why=why,
        )

    def _peak(self, request: Any) -> int:
        config = self._config
        total = min(request.num_prompt_tokens + request.max_tokens, config.max_model_len) + config.speculative
        return peak_blocks(config, total)

    # -- one of them gets nothing -------------------------------------------------------------------------------------

    def _starved_after(self, rows: Mapping[str, int], launched: Collection[str]) -> list[Starved]:
        passed = {name: how for name, how in self._passed_over(rows).items() if name not in launched}
        self._hungry = {name: self._hungry.get(name, 0) + 1 for name in passed}
        return [
            Starved(name, STARVED_AFTER, self._config.step_tokens - sum(rows.values()), passed[name])
            for name, steps in self._hungry.items()
            if steps == STARVED_AFTER
        ]

    def _passed_over(self, rows: Mapping[str, int]) -> dict[str, str]:
        """Who was given nothing in this step although others ran and nothing was short, and how it stands."""
        scheduler = self._scheduler
        if not rows or self._refused or sum(rows.values()) >= self._config.step_tokens:
            return {}
        passed = {
            request.request_id: "running"
            for request in scheduler.running
            if request.request_id not in rows and self._wants(request)
        }
        if not passed and len(scheduler.running) < self._config.max_running:
            waiting = (request for queue in waiting_queues(scheduler) for request in queue)
            first = next((request for request in waiting if request.status.name not in PARKED), None)
            if first is not None and first.request_id not in rows:
                passed[first.request_id] = "waiting"
        return passed

    @staticmethod
    def _wants(request: Any) -> bool:
        """Whether the request has tokens left to compute; with steps in flight it may be waiting for their outcome."""
        placeholders = int(getattr(request, "num_output_placeholders", 0))
        return placeholders == 0 and int(request.num_computed_tokens) < int(request.num_tokens)
