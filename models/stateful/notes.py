"""What runs showed, as it is taken down: counts, when each kind of violation was first seen, and new findings."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvproof.models.stateful.drive import Identity, Run
from kvproof.spec.finding import Finding
from kvproof.spec.scenario import Scenario

MOST_ERRORS = 10

Report = Callable[[Finding], None]


@dataclass
class Tally:
    """What was done so far. ``steps`` and ``examples`` count exploring only: making a scenario small looks at one fault
    again and again."""

    findings: list[Finding] = field(default_factory=list)
    evaluations: Counter[str] = field(default_factory=Counter)
    coverage: Counter[str] = field(default_factory=Counter)
    first_seen: dict[Identity, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    steps: int = 0
    examples: int = 0
    interrupted: bool = False

    def so_far(self) -> tuple[int, int, frozenset[Identity]]:
        """Steps, runs, and everything seen, known findings included: what progress tells."""
        return self.steps, self.examples, frozenset(self.first_seen)

    def error(self, text: str) -> None:
        """Note a mistake of a checker, once, and not without end."""
        if text not in self.errors and len(self.errors) < MOST_ERRORS:
            self.errors.append(text)


@dataclass
class Notebook:
    """Takes down runs of one subject. ``known`` grows with what is found; ``began`` is when the campaign did
    (``time.monotonic()``)."""

    subject: str
    seed: int
    known: frozenset[Identity]
    began: float
    tally: Tally = field(default_factory=Tally)

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def remember(self, run: Run) -> Finding | None:
        """What a run showed: when it was first seen, and what went wrong in a checker. Returns what broke for the first
        time, which is known from then on."""
        tally = self.tally
        for violation in run.watcher.violations:
            tally.first_seen.setdefault(violation.identity, round(self.elapsed(), 3))
        if run.error:
            tally.error(run.error)
        if run.broken is None:
            return None
        self.known |= {run.broken.identity}
        action = len(run.actions) - (not run.draining)
        scenario = Scenario(run.config, tuple(run.actions))
        return Finding(run.broken, self.subject, scenario, action, str(self.seed))
