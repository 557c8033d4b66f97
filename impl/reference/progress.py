"""Whether anything comes of the steps: who notices that requests wait, or run, for nothing."""

from __future__ import annotations

from collections.abc import Sequence

from kvproof.impl.reference.request import Status
from kvproof.impl.reference.scheduler import Scheduler
from kvproof.impl.reference.step import Step
from kvproof.impl.reference.store import Flight
from kvproof.impl.reference.view import ReferenceView
from kvproof.spec.events import Stall
from kvproof.spec.rules.blocks import peak_blocks

STALL_AFTER = 3
"""Steps in a row in which nothing runs, and no load is awaited, before a stall is called."""


class Progress:
    """Watches one engine, step by step.

    Progress is a request that ends, or of which more is computed than ever before. Rows alone are none: a request that
    runs, loses its blocks and runs again would look busy for ever. ``idle`` is how many steps in a row ran nothing and
    waited for no load, ``fruitless`` how many brought no progress, ``stalled`` whether a stall was called since the
    last progress.
    """

    def __init__(self, scheduler: Scheduler, view: ReferenceView) -> None:
        self._scheduler, self._view = scheduler, view
        self.idle = 0
        self.fruitless = 0
        self.stalled = False

    def after(self, step: Step, arrived: Sequence[Flight]) -> Stall | None:
        """A step is complete, and these loads with it. The stall, where one is to be called."""
        scheduler = self._scheduler
        if self._brought(step, arrived) or not scheduler.requests:
            self.idle = self.fruitless = 0
            self.stalled = False
            return None
        self.fruitless += 1
        self.idle = 0 if step.rows or arrived or scheduler.store.flying else self.idle + 1
        if self.stalled or (self.idle < STALL_AFTER and self.fruitless < self.bound()):
            return None
        self.stalled = True
        return self._stall(busy=self.idle < STALL_AFTER)

    def bound(self) -> int:
        """More steps than it takes to compute all that is known once again, a token at a time, and to load it once.

        Who lost its blocks has to, and is served in its turn: the first in line gets a token in every step.
        """
        steps = self._scheduler.config.load_steps + 1
        return STALL_AFTER + sum(request.known + steps for request in self._scheduler.requests.values())

    def interfered(self) -> None:
        """Somebody took blocks from a request, or a request away, from outside: what was lost is not the engine's."""
        self.fruitless = 0

    def _brought(self, step: Step, arrived: Sequence[Flight]) -> bool:
        requests = [part.request for part in step.rows]
        loading = (self._scheduler.requests.get(flight.load.request) for flight in arrived)
        requests += [request for request in loading if request is not None]
        progress = False
        for request in requests:
            progress |= request.status is Status.FINISHED or request.computed > request.highest
            request.highest = max(request.highest, request.computed)
        return progress

    def _stall(self, busy: bool) -> Stall:
        """``busy``: it runs again and again, in vain; whether it does so in this very step says nothing."""
        scheduler, config = self._scheduler, self._scheduler.config
        request = (scheduler.running or scheduler.waiting)[0]
        # Without drafts: who fits only without them runs without them.
        total = min(request.prompt + request.max_tokens, config.max_model_len)
        own = set(scheduler.planner.blocks(request))
        others = any(holder.block not in own for holder in self._view.holders())
        return Stall(
            request=request.name,
            schedules=self.fruitless if busy else self.idle,
            peak=peak_blocks(config, total),
            pool=config.num_blocks - 1,
            blocked=others and not scheduler.running,
            why="running" if busy or scheduler.running else "waiting",
        )
