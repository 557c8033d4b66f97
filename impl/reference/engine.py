"""The reference engine. Read on from here in the order in which a request flows:

``request.py`` what a request is · ``lookup.py`` what the cache has of it · ``chunks.py`` how much of the rest runs in
one step · ``plan.py`` which blocks that takes · ``scheduler.py`` who runs · ``device.py`` and ``memory.py`` the step
itself · ``completion.py`` what it leaves behind · ``pool.py`` where all of it is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvproof.impl.reference.batch import Model
from kvproof.impl.reference.completion import complete
from kvproof.impl.reference.device import Device, Watcher
from kvproof.impl.reference.memory import Memory
from kvproof.impl.reference.pool import CacheEvent
from kvproof.impl.reference.request import Request, Status
from kvproof.impl.reference.scheduler import Drafter, Scheduler
from kvproof.impl.reference.view import ReferenceView
from kvproof.spec.config import Config
from kvproof.spec.events import Event, Observation, Stall, StepEnd
from kvproof.spec.rules.blocks import peak_blocks
from kvproof.spec.subject import Observer

STALL_AFTER = 3
"""Steps in a row in which nothing runs, and no load is awaited, before a stall is called."""


class Engine:
    """Serves requests on ``model``, one :meth:`step` at a time.

    ``observer`` judges what happens (``None``: nobody does, and nothing is reported). ``whole`` shows it all:
    everything that a step reads, not only what is new to a request, and questions that take nothing.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        observer: Observer | None = None,
        *,
        whole: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        config.check()
        self.config = config
        self.observer = observer
        self.raised: BaseException | None = None
        words = max(model.words(group.kind, group.block_size) for group in config.groups)
        self.memory = Memory(config, words, torch.device(device))
        self.device = Device(config, model, self.memory)
        self.subscribers: list[Callable[[CacheEvent], None]] = []
        self.scheduler = Scheduler(config, self._emit if observer is not None else None, self._announce, whole)
        self.view = ReferenceView(config, self.scheduler, self.memory)
        self.watcher: Watcher | None = None
        if observer is not None:
            self.subscribers.append(self.view.hear)
            view = self.view
            self.watcher = Watcher(config, self.memory, view.sharers, view.broken_keys, self._emit, whole)
        self.idle_steps = 0
        self.accepted: tuple[int, ...] = ()
        """How many drafts the last step accepted, for each row that had any."""

    # -- observations -------------------------------------------------------------------------------------------------

    def _emit(self, event: Event) -> None:
        """Show an event to the observer. Once it has raised, the engine stands still and says no more."""
        if self.observer is None or self.raised is not None:
            return
        try:
            self.observer(Observation(event, self.view))
        except BaseException as stop:
            self.raised = stop
            raise

    def _announce(self, event: CacheEvent) -> None:
        for subscriber in self.subscribers:
            subscriber(event)

    # -- what clients and operators do --------------------------------------------------------------------------------

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int, claimed: int = 0, missing: int = 0) -> Request:
        """A request arrives. A store claims to hold the first ``claimed`` tokens, and will not deliver the last
        ``missing`` of those it is asked for. Names are not used twice; the prompt is not empty and shorter than the
        model length."""
        if name in self.scheduler.requests:
            raise ValueError(f"there is a request {name} already: choose another name")
        if not 0 < len(prompt) < self.config.max_model_len:
            raise ValueError(f"{name} has {len(prompt)} tokens: 1 to {self.config.max_model_len - 1} are possible")
        request = Request(name, len(prompt), max(1, max_tokens), claimed, missing)
        request.extend(list(prompt))
        self.scheduler.report.learn(request)
        self.scheduler.add(request)
        return request

    def finish(self, name: str) -> None:
        """The model ends the request with its next token."""
        self.scheduler.requests[name].finishing = True

    def abort(self, name: str) -> None:
        """The client goes away. Works at any time, also between the parts of a step."""
        self.scheduler.remove(self.scheduler.requests[name])

    def reset(self) -> bool:
        """The operator clears the cache. Refused while any block is in use."""
        free = self.scheduler.pool.free
        if len(free) < self.config.num_blocks - 1:
            return False
        self.scheduler.pool.evict(list(free))
        return True

    def evict(self, count: int) -> None:
        """The first ``count`` free blocks (0: all) lose their keys."""
        free = list(self.scheduler.pool.free)
        self.scheduler.pool.evict(free[: count or len(free)])

    def preempt(self, name: str) -> bool:
        """A running request loses its blocks and waits again."""
        request = self.scheduler.requests.get(name)
        if request is None or request.status is not Status.RUNNING:
            return False
        self.scheduler.preempt(request)
        return True

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self, drafter: Drafter = lambda request, count: ()) -> StepEnd:
        """Schedule, run, complete."""
        step = self.scheduler.schedule(drafter)
        if self.watcher is not None:
            self.view.scheduled()
        outcomes = self.device.execute(step, self.watcher)
        ran = [(part.drafts, outcomes[part.request.name]) for part in step.rows]
        self.accepted = tuple(outcome.accepted for drafts, outcome in ran if drafts and outcome is not None)
        arrived = self.scheduler.store.arrived()
        for flight in arrived:
            self.device.load(flight)
        complete(self.scheduler, step, outcomes, arrived)
        end = StepEnd(
            index=step.index,
            scheduled=tuple(part.request.name for part in step.rows),
            running=tuple(request.name for request in self.scheduler.running),
            waiting=tuple(request.name for request in self.scheduler.waiting),
        )
        if self.observer is not None:
            self.view.step_has_run(self.device.written)
            self._emit(end)
        self.device.written.clear()
        self._watch_progress(bool(step.rows) or bool(arrived))
        return end

    def _watch_progress(self, progress: bool) -> None:
        scheduler = self.scheduler
        if progress or not scheduler.requests or scheduler.store.flying:
            self.idle_steps = 0
            return
        self.idle_steps += 1
        if self.idle_steps != STALL_AFTER:
            return
        request = (scheduler.running or scheduler.waiting)[0]
        total = min(request.prompt + request.max_tokens, self.config.max_model_len) + self.config.speculative
        own = set(self.scheduler.planner.blocks(request))
        others = any(holder.block not in own for holder in self.view.holders())
        self._emit(
            Stall(
                request=request.name,
                schedules=self.idle_steps,
                peak=peak_blocks(self.config, total),
                pool=self.config.num_blocks - 1,
                blocked=others and not scheduler.running,
                why="running" if scheduler.running else "waiting",
            )
        )
