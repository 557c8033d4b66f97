"""One engine before one checker: what killed it, and after how many steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvproof.invariants.monitor import InvariantBroken
from kvproof.models.stateful import campaign
from kvproof.models.stateful.drive import Identity, Watcher, standard_watchers, told
from kvproof.spec.config import Config
from kvproof.spec.events import Observation, StepEnd
from kvproof.spec.finding import Violation
from kvproof.spec.scenario import Scenario
from kvproof.spec.subject import Driven, Subject


@dataclass(frozen=True)
class Trial:
    """What came of it. ``violation`` is what was noticed first (``None``: nothing, in all ``steps``), ``where`` in
    which scenario or from which seed. ``error``: the checker itself failed, and nothing is known."""

    steps: int
    violation: Violation | None = None
    where: str = ""
    error: str = ""

    @property
    def killed(self) -> bool:
        return self.violation is not None

    def text(self) -> str:
        """The trial in a few words."""
        if self.error:
            return f"error: {self.error}"
        if self.violation is None:
            return f"noticed nothing in {self.steps} steps"
        return f"{self.violation.invariant} ({self.violation.cause}) in step {self.steps}, {self.where}"


class Served(Driven, Protocol):
    """An engine that judges itself, and raises ``InvariantBroken`` where it breaks."""

    @property
    def steps(self) -> int: ...


Serve = Callable[[Config], Served]


def live(serve: Serve, scenarios: Iterable[Scenario]) -> Trial:
    """Put an engine with live assertions through ``scenarios``, each on a fresh one, until one breaks."""
    steps = 0
    for scenario in scenarios:
        served = serve(scenario.config)
        try:
            for action in scenario.actions:
                served.apply(action)
            served.drain()
        except InvariantBroken as broken:
            return Trial(steps + served.steps, broken.violation, scenario.note)
        except Exception as error:
            return Trial(steps + served.steps, where=scenario.note, error=told(error))
        steps += served.steps
    return Trial(steps)


def fuzz(subject: Subject, seed: int, steps: int) -> Trial:
    """Fuzz until something breaks or ``steps`` are spent (whole runs are taken). Nothing is reduced."""
    taken = 0

    def step() -> None:
        nonlocal taken
        taken += 1

    judges = standard_watchers(subject)

    def watchers(known: frozenset[Identity], stops: bool) -> Watcher:
        return _First(judges(known, stops), step)

    where = f"seed {seed}"
    try:
        done = campaign.run(subject, seed=seed, steps=steps, watchers=watchers)
    except _Found as found:
        return Trial(taken, found.violation, where)
    if done.interrupted:
        raise KeyboardInterrupt
    return Trial(taken, where=where, error="; ".join(done.errors))


class _Found(BaseException):
    """Ends a campaign at its first finding. Not an ``Exception``: neither an engine nor Hypothesis must keep it."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation)
        self.violation = violation


class _First:
    """A judge that ends everything with the first thing that breaks."""

    def __init__(self, judge: Watcher, step: Callable[[], None]) -> None:
        self._judge, self._step = judge, step

    def __call__(self, observation: Observation, /) -> None:
        if type(observation.event) is StepEnd:
            self._step()
        try:
            self._judge(observation)
        except InvariantBroken as broken:
            raise _Found(broken.violation) from None

    @property
    def evaluations(self) -> Mapping[str, int]:
        return self._judge.evaluations

    @property
    def violations(self) -> Sequence[Violation]:
        return self._judge.violations
