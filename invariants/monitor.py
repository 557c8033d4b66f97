"""The monitor: the catalogue, asked about every observation of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeAlias

from kvproof.invariants.catalogue import CATALOGUE
from kvproof.invariants.invariant import Invariant, Predicate, spoils
from kvproof.spec.events import Drained, Observation, StepEnd
from kvproof.spec.finding import Violation
from kvproof.spec.view import View

Stop: TypeAlias = Callable[[Violation], bool]

MOST_RECORDED = 64
"""Violations of one identity that a run keeps: a fault that shows in every step need not fill the memory."""


class InvariantBroken(Exception):
    """A violation that stops the run where it stands."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(f"{violation.invariant} ({violation.cause}): {violation.witness}")
        self.violation = violation


class RunSpoiled(Exception):
    """Something broke that need not be reported again, but after which nothing more can be judged: end quietly."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(f"not judged further after {violation.invariant} ({violation.cause})")
        self.violation = violation


class Monitor:
    """An observer that judges. Call it with every observation of one run, in order.

    ``known`` are identities that were found before: they are recorded and never raise :class:`InvariantBroken`.
    ``stop`` decides whether another violation does (``True``: every one, ``False``: none). Whatever does not stop the
    run but contaminates what follows ends it with :class:`RunSpoiled`.

    ``evaluations`` counts, by id, how often a rule was judged with something to judge; ids that were never asked are
    missing. ``violations`` are all that were seen, in order, the raised one included, the first
    :data:`MOST_RECORDED` of each identity.
    """

    def __init__(
        self,
        catalogue: Iterable[Invariant] = CATALOGUE,
        *,
        known: frozenset[tuple[str, str]] = frozenset(),
        stop: Stop | bool = True,
    ) -> None:
        self.evaluations: Counter[str] = Counter()
        self.violations: list[Violation] = []
        self._known = known
        self._stop = stop
        self._recorded: Counter[tuple[str, str]] = Counter()
        self._table: dict[type[object], list[tuple[str, Predicate, Invariant]]] = {}
        self._state: list[Invariant] = []
        for entry in catalogue:
            for event in entry.events:
                self._table.setdefault(event, []).append((entry.id, entry.predicate, entry))
            if StepEnd in entry.events and Drained in entry.events:
                self._state.append(entry)

    def __call__(self, observation: Observation) -> None:
        """Judge one observation. Everything it breaks is recorded before anything is raised."""
        entries = self._table.get(type(observation.event))
        if entries is None:
            return
        evaluations = self.evaluations
        broken: list[tuple[Invariant, Violation]] = []
        for name, predicate, entry in entries:
            verdict = predicate(observation)
            if verdict is None:
                continue
            evaluations[name] += 1
            for violation in verdict:
                broken.append((entry, violation))
        if broken:
            self._decide(broken)

    def audit(self, view: View) -> list[Violation]:
        """Judge the whole state now, every block, whether a step touched it or not. Records nothing, raises nothing.

        Ask between steps: while a step runs, what it takes and copies is not settled.
        """
        observation = Observation(Drained(), view)
        return [violation for entry in self._state for violation in entry.predicate(observation) or ()]

    def _decide(self, broken: list[tuple[Invariant, Violation]]) -> None:
        for _, violation in broken:
            if self._recorded[violation.identity] < MOST_RECORDED:
                self._recorded[violation.identity] += 1
                self.violations.append(violation)
        # In the order of the catalogue; of the same rule, new violations first.
        for entry in dict.fromkeys(entry for entry, _ in broken):
            own = [violation for owner, violation in broken if owner is entry]
            for violation in own:
                if violation.identity not in self._known and self._stops(violation):
                    raise InvariantBroken(violation)
            for violation in own:
                if spoils(entry, violation):
                    raise RunSpoiled(violation)

    def _stops(self, violation: Violation) -> bool:
        return self._stop if isinstance(self._stop, bool) else self._stop(violation)
