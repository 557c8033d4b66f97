"""What an entry of the catalogue is, and the small vocabulary in which predicates speak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvproof.spec.events import Observation
from kvproof.spec.finding import Violation

Verdict = Sequence[tuple[str, str, dict[str, str | int]]] | None
"""What a predicate answers: ``None`` where there was nothing to judge (vacuous), otherwise the faults it saw, each as
(cause, witness, where). An empty answer means that the invariant held, and counts as an evaluation."""

Predicate = Callable[[Observation], Verdict]


@dataclass(frozen=True)
class Invariant:
    """One rule of the catalogue.

    ``statement`` is the rule in one sentence, ``why`` what a user sees when it breaks, ``provenance`` public records of
    it having broken, ``scope`` what one evaluation is about (block, slot, request, step, call or state), ``events`` the
    event types it judges. ``contaminates`` tells that after a violation the rest of a run means nothing (wrong content
    spreads; a wrong estimate doesn't).
    """

    id: str
    statement: str
    why: str
    provenance: str
    scope: str
    events: tuple[type, ...]
    predicate: Predicate
    contaminates: bool

    @property
    def family(self) -> str:
        return self.id.partition(".")[0]

    def judge(self, observation: Observation) -> list[Violation] | None:
        """The violations in this observation; ``None`` if there was nothing to judge. One per cause."""
        verdict = self.predicate(observation)
        if verdict is None:
            return None
        first: dict[str, Violation] = {}
        for cause, witness, where in verdict:
            first.setdefault(cause, Violation(self.id, cause, witness, tuple(where.items())))
        return list(first.values())


def some(faults: Iterable[tuple[str, str, dict[str, str | int]]], judged: int) -> Verdict:
    """The verdict of a predicate that looked at ``judged`` things."""
    return list(faults) if judged else None
