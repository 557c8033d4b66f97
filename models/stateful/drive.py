"""Driving a subject through a scenario under observation. The machine, the reducer and ``replay`` all do it here."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvproof.invariants.monitor import InvariantBroken, RunSpoiled
from kvproof.spec.config import Config
from kvproof.spec.events import Event, Observation, StepEnd
from kvproof.spec.finding import Violation
from kvproof.spec.promises import Promises
from kvproof.spec.scenario import Action
from kvproof.spec.subject import Subject

Identity = tuple[str, str]
"""Invariant and cause: what makes two violations the same finding."""


class Watcher(Protocol):
    """What judges a run: called with every observation.

    Raises ``InvariantBroken`` for a violation that stops the run and ``RunSpoiled`` for a known one after which nothing
    more can be judged.
    """

    def __call__(self, observation: Observation, /) -> None: ...

    @property
    def evaluations(self) -> Mapping[str, int]: ...

    @property
    def violations(self) -> Sequence[Violation]:
        """All so far, in order, those that stopped the run included."""


Watchers = Callable[[frozenset[Identity], bool], Watcher]
"""Makes the judge of one run from what is known already, and whether new violations stop the run."""

Tap = Callable[[Observation], None]


class Run:
    """One engine, and what was done to it and seen so far.

    ``over`` is set when nothing more can come of it: ``broken`` (a violation stopped it), ``spoiled`` (a known one
    did), or ``error`` (the checker itself failed: how, and where).
    """

    def __init__(self, subject: Subject, config: Config, watcher: Watcher, tap: Tap | None = None) -> None:
        self.config = config
        self.watcher = watcher
        self.actions: list[Action] = []
        self.applied: list[bool] = []
        self.events: Counter[str] = Counter()
        self.steps = 0
        self.over = False
        self.draining = False
        self.broken: Violation | None = None
        self.spoiled = False
        self.error = ""
        self._tap = tap
        self._promises = Promises(config)
        self.driven = subject.start(config, self._observe)

    def _observe(self, observation: Observation) -> None:
        observation = self._promises(observation)
        event: Event = observation.event
        if type(event) is StepEnd:
            self.steps += 1
        self.events[type(event).__name__] += 1
        if self._tap is not None:
            self._tap(observation)
        self.watcher(observation)

    def do(self, action: Action) -> bool:
        """Apply one action. False if it did not apply, or if the run is over."""
        if self.over:
            return False
        self.actions.append(action)
        applied = self._guard(lambda: self.driven.apply(action))
        self.applied.append(applied)
        return applied

    def drain(self) -> None:
        """Let everything finish, so that what is left over is judged. Ends the run."""
        if not self.over:
            self.draining = True
            self._guard(self._drain)
            self.over = True

    def _drain(self) -> bool:
        self.driven.drain()
        return True

    def _guard(self, what: Callable[[], bool]) -> bool:
        try:
            return what()
        except InvariantBroken as stop:
            self.broken = stop.violation
        except RunSpoiled:
            self.spoiled = True
        except Exception as error:
            # A subject reports its own failures as Crash events: what arrives here is a mistake in a checker.
            self.error = told(error)
        except BaseException:  # an interrupt: whatever the engine was doing, it is in no state to go on
            self.over = True
            raise
        self.over = True
        return True


def told(error: BaseException) -> str:
    """An error of a checker in a line: what it is, and where it came up."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{frame.name} in {frame.filename.rpartition('/')[2]}:{frame.lineno}"
    return f"{type(error).__name__}: {error} ({where})"


def standard_watchers(subject: Subject) -> Watchers:
    """The whole catalogue, as far as the subject can show it."""
    from kvproof.invariants.catalogue import CATALOGUE
    from kvproof.invariants.monitor import Monitor

    shown = subject.families()
    catalogue = tuple(entry for entry in CATALOGUE if entry.family in shown)

    def make(known: frozenset[Identity], stops: bool) -> Watcher:
        return Monitor(catalogue, known=known, stop=stops)

    return make
