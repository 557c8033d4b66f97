"""A fuzz campaign: one or more searches over one subject, and what they found together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvproof.models.stateful.drive import Identity, Watcher, Watchers, standard_watchers
from kvproof.models.stateful.search import Search, Tally
from kvproof.models.stateful.shrink import size
from kvproof.models.stateful.strategies import Retention
from kvproof.models.stateful.workers import Check, Interrupts, run_workers
from kvproof.spec.events import Observation
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.subject import Subject

Progress = Callable[[str], None]

SECONDS_BETWEEN_REPORTS = 2.0
STEPS_A_WORKER = 50
"""What one or two runs take (27 steps each): a worker with less to do costs more than it does."""


@dataclass(frozen=True)
class Campaign:
    """What a campaign did.

    ``findings`` are the new ones, one per identity, each reduced (as far as there was time), in order of identity.
    ``evaluations`` counts by predicate how often it judged something. ``steps`` are engine steps and ``examples`` runs,
    shrinking left out. ``coverage`` counts actions, events and what configurations had on. ``first_seen`` tells after
    how many seconds each identity, known ones included, was first seen. ``errors`` are mistakes of a checker or lost
    workers: a campaign with errors claims nothing beyond its findings. ``interrupted``: somebody stopped it early.
    """

    findings: tuple[Finding, ...]
    evaluations: Mapping[str, int]
    steps: int
    examples: int
    seconds: float
    coverage: Mapping[str, int]
    seed: int
    interrupted: bool
    first_seen: Mapping[Identity, float] = field(default_factory=dict)
    errors: tuple[str, ...] = ()


def run(
    subject: Subject,
    *,
    seed: int,
    steps: int,
    seconds: float | None = None,
    workers: int = 1,
    known: frozenset[Identity] = frozenset(),
    progress: Progress | None = None,
    default_retention: Retention | None = None,
    watchers: Watchers | None = None,
) -> Campaign:
    """Fuzz ``subject`` until ``steps`` engine steps (all workers together) or ``seconds`` are spent.

    ``known`` identities are passed over. ``default_retention`` says which retention interval users get who set none
    (asked of the subject if not given; 0 if it doesn't say). ``watchers`` judge the runs (the catalogue if not given).
    With ``workers`` > 1 as many processes are forked, which inherit whatever the subject has imported; no more than
    one for every :data:`STEPS_A_WORKER` steps.

    The same seed, steps and workers give the same campaign, unless ``seconds`` or an interrupt cut it short. An
    interrupt (``KeyboardInterrupt``) is not raised but returned, with everything found so far.
    """
    if steps < 1 or workers < 1:
        raise ValueError("steps and workers must be at least 1")
    began = time.monotonic()
    retention = default_retention or getattr(subject, "default_retention", None) or _nothing_kept
    judges = watchers or standard_watchers(subject)
    ticker = _Ticker(progress, known)
    workers = min(workers, -(-steps // STEPS_A_WORKER))

    def search(worker: int, report: Callable[[Finding], None], tick: Callable[[Tally], None], check: Check) -> Tally:
        share = steps // workers + (worker < steps % workers)
        return Search(
            subject,
            seed=seed,
            worker=worker,
            steps=share,
            seconds=seconds,
            known=known,
            watchers=lambda known, stops: _Stoppable(judges(known, stops), check),
            default_retention=retention,
            report=report,
            tick=tick,
        ).search()

    with Interrupts() as interrupts:
        if workers == 1:
            tallies = [search(0, ticker.found, lambda tally: ticker.tick(0, *tally.so_far()), interrupts.check)]
        else:
            tallies = run_workers(workers, search, ticker.found, ticker.tick, interrupts)
    tallies[0].interrupted |= interrupts.count > 0  # also one that came when all was done
    return _merge(tallies, seed, time.monotonic() - began)


class _Stoppable:
    """A judge that lets an interrupt in before it looks: there a run can be stopped."""

    def __init__(self, judge: Watcher, check: Check) -> None:
        self._judge, self._check = judge, check

    def __call__(self, observation: Observation, /) -> None:
        self._check()
        self._judge(observation)

    @property
    def evaluations(self) -> Mapping[str, int]:
        return self._judge.evaluations

    @property
    def violations(self) -> Sequence[Violation]:
        return self._judge.violations


def _nothing_kept(eagle: bool) -> int | None:
    return 0


def _merge(tallies: Iterable[Tally], seed: int, seconds: float) -> Campaign:
    """All workers' tallies as one. Of findings of one identity the smallest stays; ties go to the lower worker."""
    whole = Tally()
    best: dict[Identity, Finding] = {}
    for tally in tallies:
        for finding in tally.findings:
            kept = best.get(finding.violation.identity)
            if kept is None or size(finding.scenario) < size(kept.scenario):
                best[finding.violation.identity] = finding
        for identity, at in tally.first_seen.items():
            whole.first_seen[identity] = min(at, whole.first_seen.get(identity, at))
        whole.evaluations.update(tally.evaluations)
        whole.coverage.update(tally.coverage)
        whole.errors += [error for error in tally.errors if error not in whole.errors]
        whole.steps += tally.steps
        whole.examples += tally.examples
        whole.interrupted |= tally.interrupted
    return Campaign(
        findings=tuple(replace(best[i], scenario=best[i].scenario.trimmed()) for i in sorted(best)),
        evaluations=dict(sorted(whole.evaluations.items())),
        steps=whole.steps,
        examples=whole.examples,
        seconds=seconds,
        coverage={name: count for name, count in sorted(whole.coverage.items()) if count},
        seed=seed,
        interrupted=whole.interrupted,
        first_seen=dict(sorted(whole.first_seen.items())),
        errors=tuple(whole.errors),
    )


class _Ticker:
    """Tells how far all workers are, every few seconds and at each finding."""

    def __init__(self, progress: Progress | None, known: frozenset[Identity]) -> None:
        self._progress, self._known = progress, known
        self._seen: set[Identity] = set()
        self._began = self._told = time.monotonic()
        self._done: dict[int, tuple[int, int]] = {}
        self._identities: Counter[Identity] = Counter()

    def tick(self, worker: int, steps: int, examples: int, seen: frozenset[Identity]) -> None:
        self._done[worker] = (steps, examples)
        self._seen |= seen & self._known
        now = time.monotonic()
        if self._progress is None or now - self._told < SECONDS_BETWEEN_REPORTS:
            return
        self._told = now
        total, runs = (sum(column) for column in zip(*self._done.values(), strict=True))
        rate = total / (now - self._began)
        found = f"{len(self._identities)} new, {len(self._seen)} known"
        self._progress(f"{total} steps in {runs} runs, {rate:.0f} a second, {found}")

    def found(self, finding: Finding) -> None:
        violation = finding.violation
        self._identities[violation.identity] += 1
        if self._progress is not None and self._identities[violation.identity] == 1:
            count = len(finding.scenario.actions)
            self._progress(f"found {violation.invariant} ({violation.cause}) in {count} actions")
