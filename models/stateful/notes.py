"""What runs showed, as it is taken down: counts, when each kind of violation was first seen, and new findings."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvproof.models.stateful.drive import Identity, Run
from kvproof.models.stateful.shrink import size
from kvproof.spec.config import Config
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.scenario import Scenario

MOST_ERRORS = 10
MOST_SETTINGS = 3
"""In how many settings a kind of violation is taken down."""

Setting = tuple[object, ...]

Report = Callable[[Finding], None]


def setting(config: Config) -> Setting:
    """What a configuration has that faults hide in: two faults may break the same in the same way, but then seldom in
    the same setting."""
    kinds = {group.kind for group in config.groups}
    return (
        config.connector,
        config.async_scheduling,
        config.speculative > 0,
        config.eagle,
        config.checkpoint_blocks > 0,
        config.partial_hits,
        *sorted(kinds),
    )


@dataclass(frozen=True)
class Kept:
    """A scenario that reached what none before it had: a search that is continued begins with it."""

    scenario: Scenario
    reached: tuple[str, ...]


@dataclass
class Tally:
    """What was done so far. ``steps`` and ``examples`` count exploring only: making a scenario small looks at one fault
    again and again. ``kept`` waits to be handed over, and is empty where the search is not continued later."""

    findings: list[Finding] = field(default_factory=list)
    evaluations: Counter[str] = field(default_factory=Counter)
    coverage: Counter[str] = field(default_factory=Counter)
    first_seen: dict[Identity, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    steps: int = 0
    examples: int = 0
    interrupted: bool = False
    kept: list[Kept] = field(default_factory=list)

    def so_far(self) -> tuple[int, int, frozenset[Identity], tuple[Kept, ...]]:
        """Steps, runs, and everything seen, known findings included: what progress tells. With it what is kept is
        handed over."""
        kept, self.kept = tuple(self.kept), []
        return self.steps, self.examples, frozenset(self.first_seen), kept

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
    settings: dict[Identity, set[Setting]] = field(default_factory=dict)
    """Of what was found here: in which settings."""

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
        self.settings[run.broken.identity] = {setting(run.config)}
        return self._finding(run, run.broken)

    def elsewhere(self, run: Run) -> list[Finding]:
        """What a run showed that was found here before, but not in the run's setting."""
        here, found = setting(run.config), []
        for violation in run.watcher.violations:
            settings = self.settings.get(violation.identity)
            if settings is not None and here not in settings and len(settings) < MOST_SETTINGS:
                settings.add(here)
                found.append(self._finding(run, violation))
        return found

    def _finding(self, run: Run, violation: Violation) -> Finding:
        action = len(run.actions) - (not run.draining)
        scenario = Scenario(run.config, tuple(run.actions))
        return Finding(violation, self.subject, scenario, action, str(self.seed), round(self.elapsed(), 3))


def smallest(findings: Iterable[Finding]) -> dict[Identity, Finding]:
    """Of findings of one identity the smallest, in order of identity; ties go to who comes first."""
    best: dict[Identity, Finding] = {}
    for finding in findings:
        kept = best.get(finding.violation.identity)
        if kept is None or size(finding.scenario) < size(kept.scenario):
            best[finding.violation.identity] = finding
    return dict(sorted(best.items()))


def in_other_settings(first: Finding, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The few smallest of ``findings`` that are of the same identity as ``first``, each in a setting of its own."""
    seen = {setting(first.scenario.config)}
    others: list[Finding] = []
    for finding in sorted(findings, key=lambda one: size(one.scenario)):
        here = setting(finding.scenario.config)
        if finding.violation.identity == first.violation.identity and here not in seen:
            seen.add(here)
            others.append(finding)
    return tuple(others[: MOST_SETTINGS - 1])
