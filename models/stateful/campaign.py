"""A fuzz campaign: one or more searches over one subject, and what they found together."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from kvproof.models.stateful.corpus import Continued, Corpus, Journal
from kvproof.models.stateful.drive import Identity, Watcher, Watchers, standard_watchers
from kvproof.models.stateful.notes import Kept, Notebook, Report, Tally, in_other_settings, smallest
from kvproof.models.stateful.reducing import Reduction
from kvproof.models.stateful.search import Search
from kvproof.models.stateful.strategies import Retention
from kvproof.models.stateful.workers import Check, Interrupts, Tick, run_workers
from kvproof.spec.events import Observation
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.subject import Subject

Progress = Callable[[str], None]
Phase = Literal["search", "reduce"]

SECONDS_BETWEEN_REPORTS = 2.0
SECONDS_TO_REDUCE = 5.0
"""What making small may take in any case, however short the search."""

STEPS_A_WORKER = 50
"""What one or two runs take (27 steps each): a worker with less to do costs more than it does."""


@dataclass(frozen=True)
class Campaign:
    """What a campaign did.

    ``findings`` are the new ones, one per identity, each reduced (as far as there was time), in order of identity, with
    what was found of the same identity in other settings.
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
    searched: float = 0.0
    """Seconds until the search was over: making small what it had found is in ``seconds`` only."""


@dataclass(frozen=True)
class Task:
    """What one worker is to do, wherever it does it: search a share of ``steps``, or make ``findings`` (and then
    ``others``) small. With a ``corpus`` the search begins with what is in it, and keeps what it may be continued with.
    Plain data."""

    phase: Phase
    worker: int
    seed: int
    known: frozenset[Identity]
    steps: int = 0
    seconds: float | None = None
    findings: tuple[Finding, ...] = ()
    others: tuple[Finding, ...] = ()
    corpus: Corpus | None = None


Spread = Callable[[Sequence[Task], Report, Tick, Interrupts], list[Tally]]
"""Has tasks done somewhere, all at once, and returns their tallies in order. It reports findings and progress."""


def do(
    task: Task,
    subject: Subject,
    report: Report,
    tick: Callable[[Tally], None],
    check: Check,
    *,
    began: float,
    watchers: Watchers | None = None,
    retention: Retention | None = None,
) -> Tally:
    """Do one task. ``began`` is when the campaign did (``time.monotonic()``)."""
    judges = watchers or standard_watchers(subject)
    notebook = Notebook(subject.name, task.seed, task.known, began)

    def stoppable(known: frozenset[Identity], stops: bool) -> Watcher:
        return _Stoppable(judges(known, stops), check)

    if task.phase == "reduce":
        return Reduction(
            subject,
            task.findings,
            task.others,
            notebook=notebook,
            watchers=stoppable,
            seconds=None if task.seconds is None else max(task.seconds, SECONDS_TO_REDUCE),
            report=report,
        ).run()
    search = Search if task.corpus is None else functools.partial(Continued, corpus=task.corpus)
    return search(
        subject=subject,
        notebook=notebook,
        worker=task.worker,
        steps=task.steps,
        seconds=task.seconds,
        watchers=stoppable,
        default_retention=retention or getattr(subject, "default_retention", None) or _nothing_kept,
        report=report,
        tick=tick,
    ).search()


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
    spread: Spread | None = None,
    journal: Journal | None = None,
) -> Campaign:
    """Fuzz ``subject`` until ``steps`` engine steps (all workers together) or ``seconds`` are spent; then make what was
    found small, which takes as long again at most where ``seconds`` are given.

    ``known`` identities are passed over. ``default_retention`` says which retention interval users get who set none
    (asked of the subject if not given; 0 if it doesn't say). ``watchers`` judge the runs (the catalogue if not given).
    With ``workers`` > 1 as many processes are forked, which inherit whatever the subject has imported; no more than
    one for every :data:`STEPS_A_WORKER` steps. ``spread`` has them work elsewhere. With a ``journal`` the search begins
    with its corpus, and what it finds and keeps is written down as it comes.

    The same seed, steps and workers give the same campaign, wherever they work, unless ``seconds`` or an interrupt cut
    it short. An interrupt (``KeyboardInterrupt``) is not raised but returned, with everything found so far.
    """
    if steps < 1 or workers < 1:
        raise ValueError("steps and workers must be at least 1")
    began = time.monotonic()
    ticker = _Ticker(progress, known, journal)

    def here(tasks: Sequence[Task], found: Report, tick: Tick, interrupts: Interrupts) -> list[Tally]:
        def one(worker: int, report: Report, tick: Callable[[Tally], None], check: Check) -> Tally:
            return do(tasks[worker], subject, report, tick, check, began=began, watchers=watchers,
                      retention=default_retention)  # fmt: skip

        if len(tasks) == 1:
            return [one(0, found, lambda tally: tick(0, *tally.so_far()), interrupts.check)]
        return run_workers(len(tasks), one, found, tick, interrupts)

    spread = spread or here
    with Interrupts() as interrupts:
        searchers = min(workers, -(-steps // STEPS_A_WORKER))
        shares = [steps // searchers + (worker < steps % searchers) for worker in range(searchers)]
        corpora = [
            journal.corpus.share(worker, searchers) if journal is not None else None for worker in range(searchers)
        ]
        tasks = [
            Task("search", worker, seed, known, share, seconds, corpus=corpus)
            for worker, (share, corpus) in enumerate(zip(shares, corpora, strict=True))
        ]
        tallies = spread(tasks, ticker.found, ticker.tick, interrupts)
        for worker, tally in enumerate(tallies):
            ticker.last(worker, tally)
        searched = time.monotonic() - began
        everything = [finding for tally in tallies for finding in tally.findings]
        found = list(smallest(everything).values())
        if found and not interrupts.count and not any(tally.interrupted for tally in tallies):
            ticker.say(f"making {len(found)} scenarios small" if len(found) > 1 else "making its scenario small")
            tasks = _reductions(min(workers, len(found)), found, everything, seed, seconds, known)
            tallies += spread(tasks, ticker.reduced, lambda *_: None, interrupts)
    tallies[0].interrupted |= interrupts.count > 0  # also one that came when all was done
    return _merge(tallies, searchers, seed, time.monotonic() - began, searched)


def _reductions(
    workers: int,
    found: Sequence[Finding],
    everything: Sequence[Finding],
    seed: int,
    seconds: float | None,
    known: frozenset[Identity],
) -> list[Task]:
    """What was found, dealt out to ``workers``, each of which knows of all of it."""
    others = [other for first in found for other in in_other_settings(first, everything)]
    all_known = known | {finding.violation.identity for finding in found}
    return [
        Task("reduce", worker, seed, all_known, seconds=seconds, findings=tuple(found[worker::workers]),
             others=tuple(others[worker::workers]))
        for worker in range(workers)
    ]  # fmt: skip


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


def _merge(tallies: Sequence[Tally], searches: int, seed: int, seconds: float, searched: float) -> Campaign:
    """All workers' tallies as one; those from ``searches`` on made small what the others had found."""
    whole = Tally()
    best = smallest(finding for tally in tallies for finding in tally.findings)
    reduced = [_trimmed(finding) for tally in tallies[searches:] for finding in tally.findings]
    for tally in tallies:
        for identity, at in tally.first_seen.items():
            whole.first_seen[identity] = min(at, whole.first_seen.get(identity, at))
        whole.evaluations.update(tally.evaluations)
        whole.coverage.update(tally.coverage)
        whole.errors += [error for error in tally.errors if error not in whole.errors]
        whole.steps += tally.steps
        whole.examples += tally.examples
        whole.interrupted |= tally.interrupted
    return Campaign(
        findings=tuple(
            replace(first, others=in_other_settings(first, reduced)) for first in map(_trimmed, best.values())
        ),
        evaluations=dict(sorted(whole.evaluations.items())),
        steps=whole.steps,
        examples=whole.examples,
        seconds=seconds,
        coverage={name: count for name, count in sorted(whole.coverage.items()) if count},
        seed=seed,
        interrupted=whole.interrupted,
        first_seen=dict(sorted(whole.first_seen.items())),
        errors=tuple(whole.errors),
        searched=searched,
    )


def _trimmed(finding: Finding) -> Finding:
    return replace(finding, scenario=finding.scenario.trimmed())


class _Ticker:
    """Tells how far all workers are, every few seconds and at each finding."""

    def __init__(self, progress: Progress | None, known: frozenset[Identity], journal: Journal | None = None) -> None:
        self._progress, self._known, self._journal = progress, known, journal
        self._seen: set[Identity] = set()
        self._began = self._told = time.monotonic()
        self._done: dict[int, tuple[int, int]] = {}
        self._new: set[Identity] = set()

    def tick(
        self, worker: int, steps: int, examples: int, seen: frozenset[Identity], kept: tuple[Kept, ...] = ()
    ) -> None:
        self._done[worker] = (steps, examples)
        self._seen |= seen & self._known
        self._note(kept)
        now = time.monotonic()
        if self._progress is None or now - self._told < SECONDS_BETWEEN_REPORTS:
            return
        self._told = now
        total, runs = self._total()
        rate = total / (now - self._began)
        found = f"{len(self._new)} new, {len(self._seen)} known"
        self._progress(f"{total} steps in {runs} runs, {rate:.0f} a second, {found}")

    def last(self, worker: int, tally: Tally) -> None:
        """A worker has ended its search."""
        steps, examples, _, kept = tally.so_far()
        self._done[worker] = (steps, examples)
        self._note(kept)

    def _note(self, kept: Iterable[Kept]) -> None:
        if self._journal is not None:
            for one in kept:
                self._journal.kept(one)
            self._journal.went(*self._total())

    def _total(self) -> tuple[int, int]:
        steps, runs = zip(*self._done.values(), strict=True)
        return sum(steps), sum(runs)

    def found(self, finding: Finding) -> None:
        if self._journal is not None:
            self._journal.found(finding, False)
        self._tell(finding)

    def _tell(self, finding: Finding) -> None:
        violation = finding.violation
        if violation.identity not in self._new:
            self._new.add(violation.identity)
            self.say(f"found {violation.invariant} ({violation.cause})")

    def reduced(self, finding: Finding) -> None:
        violation, count = finding.violation, len(finding.scenario.actions)
        if self._journal is not None:
            self._journal.found(finding, True)
        self._tell(finding)
        self.say(f"{violation.invariant} ({violation.cause}) in {count} actions")

    def say(self, line: str) -> None:
        if self._progress is not None:
            self._progress(line)
