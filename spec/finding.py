"""A finding: which invariant broke, on which subject, by which scenario, and the witness that shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvproof.spec.scenario import Scenario


@dataclass(frozen=True)
class Violation:
    """A predicate said no. ``cause`` is a short slug that stays the same for the same fault; ``witness`` is for people.

    ``where`` names block, slot, group and request as far as they apply, and the operator's ``call`` that failed.
    """

    invariant: str
    cause: str
    witness: str
    where: tuple[tuple[str, str | int], ...] = ()

    @property
    def identity(self) -> tuple[str, str]:
        """What makes two violations the same finding."""
        return (self.invariant, self.cause)


@dataclass(frozen=True)
class Finding:
    """A violation that happened, and how to make it happen again."""

    violation: Violation
    subject: str
    scenario: Scenario
    action: int
    """Index of the action during which the violation was seen."""
    seed: str = ""
    seen: float | None = field(default=None, compare=False)
    """After how many seconds of the campaign, where it is known."""
    others: tuple[Finding, ...] = ()
    """The same violation in other settings, which may be another fault."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "invariant": self.violation.invariant,
            "cause": self.violation.cause,
            "witness": self.violation.witness,
            "where": dict(self.violation.where),
            "subject": self.subject,
            "action": self.action,
            "seed": self.seed,
            "forced": self.scenario.forced,
            "scenario": self.scenario.to_dict(),
        }
