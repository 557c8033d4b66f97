"""The reference engine. Read on from here in the order in which a request flows:

``request.py`` what a request is · ``lookup.py`` what the cache has of it · ``chunks.py`` how much of the rest runs in
one step · ``plan.py`` which blocks that takes · ``scheduler.py`` who runs · ``device.py`` and ``memory.py`` the step
itself · ``completion.py`` what it leaves behind · ``pool.py`` where all of it is counted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import SupportsIndex

import torch

from kvproof.impl.reference.batch import Model
from kvproof.impl.reference.completion import complete
from kvproof.impl.reference.device import Device, Watcher
from kvproof.impl.reference.memory import Memory
from kvproof.impl.reference.pool import CacheEvent
from kvproof.impl.reference.progress import Progress
from kvproof.impl.reference.request import Request, Status
from kvproof.impl.reference.scheduler import Drafter, Scheduler
from kvproof.impl.reference.step import Step
from kvproof.impl.reference.view import ReferenceView
from kvproof.spec.config import Config
from kvproof.spec.events import Crash, Event, Observation, StepEnd
from kvproof.spec.scenario import MOST_ACTIONS, MOST_LETTERS
from kvproof.spec.subject import Observer

MOST_NAMES = MOST_ACTIONS
"""So many names are remembered after their requests ended: as many as a scenario can have."""


class Engine:
    """Serves requests on ``model``, one :meth:`step` at a time.

    ``observer`` judges what happens (``None``: nobody does, and nothing is reported). ``whole`` shows it all:
    everything that a step reads, not only what is new to a request, and questions that take nothing. Raises
    :class:`kvproof.spec.config.ConfigError` where it can't run ``config``.
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
        self.progress = Progress(self.scheduler, self.view)
        self._names: dict[str, None] = {}
        self._drafter_raised: BaseException | None = None
        self._offered: dict[str, int] = {}
        """Of the step under way, or the last one: for whom drafts were asked, and how many came."""
        self._last: Step | None = None

    @property
    def idle_steps(self) -> int:
        """How many steps in a row ran nothing, and waited for no load, while there were requests."""
        return self.progress.idle

    @property
    def accepted(self) -> tuple[int, ...]:
        """How many drafts the last step accepted, row by row in the order scheduled, up to the last request that it
        asked for any: 0 where it did not ask.

        Of a step that came to no answer: how many it was offered.
        """
        step, outcomes, offered = self.scheduler.in_flight or self._last, self.device.outcomes, self._offered
        names = [part.request.name for part in step.rows] if step is not None else []
        while names and names[-1] not in offered:
            names.pop()
        names += [name for name in offered if name not in names]
        answers = ((outcomes.get(name), offered.get(name, 0)) for name in names)
        return tuple(count if outcome is None else outcome.accepted for outcome, count in answers)

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

    def submit(
        self, name: str, prompt: Iterable[SupportsIndex], max_tokens: int, claimed: int = 0, missing: int = 0
    ) -> Request:
        """A request arrives. A store claims to hold the first ``claimed`` tokens, and will not deliver the last
        ``missing`` of those it is asked for: neither is less than none or more than the prompt. It puts out at least
        one token, and no more than the model length has room for.

        Raises ``ValueError`` unless the name is new and printable, and the prompt has tokens (anything that is an
        index, not negative), and fewer than the model length.
        """
        self._check_name(name)
        tokens = _numbers(prompt, f"a token of {name}")
        longest = self.config.max_model_len
        if not 0 < len(tokens) < longest:
            raise ValueError(f"{name} has {len(tokens)} tokens: 1 to {longest - 1} are possible")
        if min(tokens) < 0:
            raise ValueError(f"a token of {name} is {min(tokens)}: give numbers from 0 on")
        outputs, held, lost = _numbers((max_tokens, claimed, missing), f"max_tokens, claimed or missing of {name}")
        count = len(tokens)
        request = Request(
            name, count, max(1, min(outputs, longest)), max(0, min(held, count)), max(0, min(lost, count))
        )
        request.extend(tokens)
        self.scheduler.report.learn(request)
        self.scheduler.add(request)
        self._names[name] = None
        if len(self._names) > MOST_NAMES:
            del self._names[next(iter(self._names))]
        return request

    def _check_name(self, name: str) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= MOST_LETTERS or not name.isprintable():
            raise ValueError(
                f"{str(name)[:MOST_LETTERS]!r} is no name of a request: use 1 to {MOST_LETTERS} printable characters"
            )
        if name in self.scheduler.requests:
            raise ValueError(f"there is a request {name} already: choose another name")
        if name in self._names:
            raise ValueError(f"there was a request {name} before: choose another name")

    def _request(self, name: str) -> Request:
        request = self.scheduler.requests.get(name)
        if request is None:
            raise ValueError(f"there is no request {name}, or not any more: name one that is waiting or running")
        return request

    def finish(self, name: str) -> None:
        """The model ends the request with its next token. Raises ``ValueError`` if there is no such request."""
        self._request(name).finishing = True

    def abort(self, name: str) -> None:
        """The client goes away. Works at any time, also between the parts of a step. Raises ``ValueError`` if there is
        no such request."""
        self.scheduler.remove(self._request(name))
        self.progress.interfered()

    def reset(self) -> bool:
        """The operator clears the cache. Refused while any block is in use."""
        free = self.scheduler.pool.free
        if len(free) < self.config.num_blocks - 1:
            return False
        self.scheduler.pool.evict(list(free))
        return True

    def evict(self, count: int) -> None:
        """The first ``count`` free blocks (0: all) lose their keys. Raises ``ValueError`` if it is negative."""
        if count < 0:
            raise ValueError(f"{count} blocks can't be evicted: give a number from 0 (all) on")
        free = list(self.scheduler.pool.free)
        self.scheduler.pool.evict(free[: count or len(free)])

    def preempt(self, name: str) -> bool:
        """A running request loses its blocks and waits again. False if there is none of that name that runs."""
        request = self.scheduler.requests.get(name)
        if request is None or request.status is not Status.RUNNING:
            return False
        self.scheduler.preempt(request)
        self.progress.interfered()
        return True

    @property
    def at_rest(self) -> bool:
        """Whether a step would change nothing, and show nothing that has not been judged."""
        scheduler = self.scheduler
        unseen = self.observer is not None and scheduler.pool.touched
        return not (scheduler.requests or scheduler.store.flying or unseen)

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self, drafter: Drafter = lambda request, count: ()) -> StepEnd:
        """Schedule, run, complete. Whatever ``drafter`` proposes beyond what it was asked for is left out; where it
        raises, the step ends halfway and the engine must not be used after that."""
        self._offered, self._last, self.device.outcomes = {}, None, {}
        step = self._last = self.scheduler.schedule(self._asking(drafter))
        if self.watcher is not None:
            self.view.scheduled()
        outcomes = self.device.execute(step, self.watcher)
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
            self.scheduler.report.tidy(self.scheduler.requests.values())
        self.device.written.clear()
        stall = self.progress.after(step, arrived)
        if stall is not None:
            self._emit(stall)
        return end

    def _asking(self, drafter: Drafter) -> Drafter:
        """``drafter``, with what it offers checked and counted."""

        def ask(request: Request, count: int) -> Sequence[int]:
            try:
                drafts = _numbers(drafter(request, count), f"a draft for {request.name}")[:count]
                if drafts and min(drafts) < 0:
                    raise ValueError(f"a draft for {request.name} is {min(drafts)}: give numbers from 0 on")
            except BaseException as error:
                self._drafter_raised = error
                raise
            self._offered[request.name] = len(drafts)
            return drafts

        return ask


def _numbers(values: Iterable[SupportsIndex], what: str) -> list[int]:
    """Plain integers: what stays apart in a tensor or an array is no key of a dictionary."""
    try:
        return [operator.index(value) for value in values]
    except TypeError as error:
        raise ValueError(f"{what} is not a whole number ({error}): give integers") from error


def crash_of(error: BaseException) -> Crash:
    """What is told of an exception that the engine raised: where it came from, and what it says."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = f"{frame.tb_frame.f_globals.get('__name__', '?')}:{frame.tb_frame.f_code.co_name}" if frame else "?"
    return Crash(place, " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": "), "")
