"""One worker's search: rounds of Hypothesis until the budget is spent, each new violation reduced to a small scenario.

A violation stops the run it happens in, so fault kinds hide one another. What was found is therefore known from then
on: a known violation that leaves the cache sound is passed over, one that doesn't ends its run quietly, and the search
goes on for the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import HypothesisException, InvalidDefinition
from hypothesis.internal.conjecture import engine as conjecture
from hypothesis.internal.conjecture import providers
from hypothesis.reporting import with_reporter
from hypothesis.stateful import run_state_machine_as_test

from kvproof.models.stateful.drive import Identity, Run, Watchers
from kvproof.models.stateful.machine import Broken, CacheMachine
from kvproof.models.stateful.shrink import Reducer, Reproduces, size
from kvproof.models.stateful.strategies import Retention, Setup
from kvproof.spec.config import Config, ConfigError
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.scenario import Scenario
from kvproof.spec.subject import Subject

RULES_A_RUN = 20
RUNS_A_ROUND = 400
SHRINKING_RUNS = 20
"""Runs that Hypothesis may spend on shrinking its choices before the scenario itself is reduced."""

REDUCTION_ATTEMPTS = 600
MOST_ERRORS = 10
MORE_BLOCKS = 4
MOST_POOLS = 24
"""What is found is tried again in pools from so many blocks more downwards."""

Report = Callable[[Finding], None]
Tick = Callable[["Tally"], None]


@dataclass
class Tally:
    """What a search did so far. ``steps`` counts exploring only: shrinking looks at one fault again and again."""

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


class _Enough(BaseException):
    """Ends a round from within. Not an ``Exception``, so that Hypothesis passes it on as it does an interrupt."""


@dataclass
class _Failure:
    violation: Violation
    scenario: Scenario
    action: int

    @property
    def draining(self) -> bool:
        return self.action == len(self.scenario.actions)


class Search:
    """Implements :class:`kvproof.models.stateful.machine.Host`."""

    def __init__(
        self,
        subject: Subject,
        *,
        seed: int,
        worker: int,
        steps: int,
        seconds: float | None,
        known: frozenset[Identity],
        watchers: Watchers,
        default_retention: Retention,
        report: Report,
        tick: Tick,
    ) -> None:
        self.tally = Tally()
        self._subject, self._seed, self._worker = subject, seed, worker
        self._steps, self._seconds = steps, seconds
        self._known, self._watchers, self._default_retention = known, watchers, default_retention
        self._report, self._tick = report, tick
        self._began = time.monotonic()
        self._found: dict[Identity, _Failure] = {}
        self._shrinking = 0

    # -- the whole ----------------------------------------------------------------------------------------------------

    def search(self) -> Tally:
        """Rounds until the budget is spent. An interrupt ends it early; what was found by then is in the tally."""
        number = 0
        reducer: Reducer | None = None
        try:
            while not self._spent():
                steps = self.tally.steps
                self._round(number)
                errors, found = bool(self.tally.errors), bool(self._found)
                while self._found:
                    identity = min(self._found)
                    failure = self._found[identity]
                    reducer = Reducer(failure.scenario, self._reproducer(identity, failure), REDUCTION_ATTEMPTS)
                    self._reduce(reducer)
                    scenario = self._add(identity, reducer)
                    reducer = None
                    self._try_other_pools(scenario)
                if errors:  # a checker that fails judges nothing: more of the same tells no more
                    break
                if steps == self.tally.steps and not found and not self._spent():
                    self.tally.errors.append(f"{self._subject.name} refused every configuration that was drawn")
                    break
                number += 1
        except KeyboardInterrupt:
            self.tally.interrupted = True
            for identity in sorted(self._found):
                self._add(identity, reducer)
                reducer = None
        return self.tally

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _spent(self) -> bool:
        return self._late() or self.tally.steps >= self._steps

    def _round(self, number: int) -> None:
        """One Hypothesis run: it ends with a violation, with the budget, or when its examples are used up."""
        self._shrinking = 0
        name = f"{self._seed}/{self._worker}/{number}".encode()
        derived = int.from_bytes(hashlib.sha256(name).digest()[:8], "big")

        @hypothesis.seed(derived)
        def machine() -> CacheMachine:
            return CacheMachine(self)

        chosen = settings(
            max_examples=RUNS_A_ROUND,
            stateful_step_count=RULES_A_RUN,
            database=None,
            deadline=None,
            derandomize=False,
            print_blob=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )
        # What a failure was is in self._found; what Hypothesis thinks of it (flaky, unsatisfiable) changes nothing.
        try:
            with with_reporter(_silent), _own_constants_only(), _no_mutations():
                run_state_machine_as_test(cast(type[CacheMachine], machine), settings=chosen)
        except InvalidDefinition as error:
            self.tally.errors.append(f"the machine can't go on: {error}")
        except (Broken, _Enough, HypothesisException):
            pass

    # -- what the machine calls ---------------------------------------------------------------------------------------

    def open(self, setup: Setup) -> tuple[Setup, Run]:
        if self._found:
            self._shrinking += 1
            if self._shrinking > SHRINKING_RUNS:
                raise _Enough
        elif self._spent():
            raise _Enough
        setup = setup.resolved(self._default_retention)
        if "EXT" not in self._subject.families():
            setup = replace(setup, unreliable=False)
        # Half of the runs have checkpoints, and as many draft layers or windows, which some subjects refuse for good:
        # the rest of the setup may do.
        simple = setup.in_order()
        for easier in dict.fromkeys((setup, simple, setup.without_checkpoints(), simple.without_checkpoints())):
            try:
                return self._start(easier)
            except ConfigError:
                self.tally.coverage["run refused"] += 1
        return self._start(setup.plain())

    def _start(self, setup: Setup) -> tuple[Setup, Run]:
        setup = setup.at_limit(getattr(self._subject, "startup_limit", _no_limit))
        return setup, Run(self._subject, setup.config, self._watchers(self._known, True))

    def drains(self) -> bool:
        """Shrinking what happens before the end, there is no need to see every run to its end."""
        return not self._found or any(failure.draining for failure in self._found.values())

    def close(self, setup: Setup, run: Run) -> None:
        tally = self.tally
        exploring = not self._found
        self._remember(run)
        if exploring:
            tally.examples += 1
            tally.steps += run.steps
            tally.evaluations.update(run.watcher.evaluations)
            _count(tally.coverage, setup, run)
            self._tick(tally)

    def _remember(self, run: Run) -> None:
        """What a run showed: when it was first seen, what broke, and what went wrong in a checker."""
        tally = self.tally
        for violation in run.watcher.violations:
            tally.first_seen.setdefault(violation.identity, round(self._elapsed(), 3))
        if run.broken is not None:
            self._note(run.broken, Scenario(run.config, tuple(run.actions)), len(run.actions) - (not run.draining))
        if run.error and run.error not in tally.errors and len(tally.errors) < MOST_ERRORS:
            tally.errors.append(run.error)

    def _note(self, violation: Violation, scenario: Scenario, action: int) -> None:
        """Keep the smallest scenario of each kind. While shrinking other kinds turn up, too: they are kept as well."""
        kept = self._found.get(violation.identity)
        if kept is None or size(scenario) < size(kept.scenario):
            self._found[violation.identity] = _Failure(violation, scenario, action)

    # -- reducing -----------------------------------------------------------------------------------------------------

    def _reproducer(self, identity: Identity, failure: _Failure) -> Reproduces:
        known = self._known - {identity}

        def reproduces(candidate: Scenario, drains: bool) -> int | None:
            watcher = self._watchers(known, False)
            try:
                run = Run(self._subject, candidate.config, watcher)
            except ConfigError:
                return None
            for index in range(len(candidate.actions) + drains):
                if run.over:
                    return None
                if index < len(candidate.actions):
                    run.do(candidate.actions[index])
                else:
                    run.drain()
                shown = next((violation for violation in watcher.violations if violation.identity == identity), None)
                if shown is not None:
                    failure.violation = shown
                    return index
            return None

        return reproduces

    def _reduce(self, reducer: Reducer) -> None:
        late = None if self._seconds is None else time.monotonic() + max(5.0, self._seconds / 4)
        reducer.reduce(lambda: late is not None and time.monotonic() > late)

    def _try_other_pools(self, scenario: Scenario) -> None:
        """A fault shows otherwise where there is less room, or more: a charge that is too high refuses what fits, a
        block that is missing is one that another request holds. Small scenarios are cheap to try in many pools."""
        config = scenario.config
        for blocks in range(config.smallest_pool(), config.num_blocks + MORE_BLOCKS + 1)[-MOST_POOLS:]:
            if blocks == config.num_blocks or self._late():
                continue
            try:
                run = Run(self._subject, replace(config, num_blocks=blocks), self._watchers(self._known, True))
            except ConfigError:
                continue
            for action in scenario.actions:
                run.do(action)
            run.drain()
            self._remember(run)

    def _late(self) -> bool:
        return self._seconds is not None and self._elapsed() >= self._seconds

    def _add(self, identity: Identity, reducer: Reducer | None) -> Scenario:
        failure = self._found.pop(identity)
        if reducer is not None and reducer.action >= 0:
            failure.scenario, failure.action = reducer.best, reducer.action
        elif reducer is not None and reducer.reproduced is False:
            self.tally.errors.append(f"{identity[0]} ({identity[1]}) did not show again when its scenario was replayed")
        finding = Finding(failure.violation, self._subject.name, failure.scenario, failure.action, str(self._seed))
        self.tally.findings.append(finding)
        self._known |= {identity}
        self._report(finding)
        return failure.scenario


def _no_limit(_: Config) -> int:
    """What a subject says that would start with any pool."""
    return 0


def _silent(_: object) -> None:
    """Hypothesis reports to nobody: its findings are reported as scenarios."""


@contextlib.contextmanager
def _instead(owner: object, name: str, value: object) -> Iterator[None]:
    """Meanwhile, ``owner`` has ``value`` under ``name``. Where it has nothing of that name, nothing is changed: what is
    internal to Hypothesis may be called otherwise in another version."""
    original = getattr(owner, name, None)
    if original is None:
        yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _own_constants_only() -> contextlib.AbstractContextManager[None]:
    """Keep Hypothesis from reading constants out of every module that is imported outside site-packages.

    It would parse a whole release's tree, prefer numbers found there, draw otherwise when one more module is imported
    (so that a seed would repeat nothing), and write a folder into the working directory.
    """
    kind = getattr(providers, "Constants", None)
    if kind is None:
        return contextlib.nullcontext()
    nothing = kind()
    return _instead(providers, "_get_local_constants", lambda: nothing)


def _no_mutations() -> contextlib.AbstractContextManager[None]:
    """Keep Hypothesis from varying each run four or five times before it draws another.

    What it varies is the actions: the configuration, one draw at the beginning, stays. But most faults are found by
    being in the right configuration, and then soon: so every run draws one.
    """
    runner = getattr(conjecture, "ConjectureRunner", None)
    return _instead(runner, "generate_mutations_from", lambda self, data: None)


def _count(coverage: Counter[str], setup: Setup, run: Run) -> None:
    """What a run exercised: actions (applied or not), events, and what its configuration had on."""
    for action, applied in zip(run.actions, run.applied, strict=False):
        coverage[f"action {action.kind}" if applied else f"action {action.kind} (did not apply)"] += 1
        if action.kind == "submit":
            coverage["submit " + ("with a base" if action.base else "fresh")] += 1
            coverage["submit with an external offer"] += action.external > 0
            coverage["submit with an offer that falls short"] += action.missing > 0
    for event, count in run.events.items():
        coverage[f"event {event}"] += count
    config = run.config
    guards = {
        f"pool {setup.pool}": True,
        "forced actions": setup.forced,
        "drafts": config.speculative > 0,
        "EAGLE": config.eagle,
        "partial hits": config.partial_hits,
        "prefill checkpoints": config.checkpoint_blocks > 0,
        f"connector {config.connector}": config.connector != "none",
        "divergent hits": config.divergent_hits,
        f"offers that end with a {config.offers}": config.connector == "async",
        "priorities": config.policy == "priority",
        "images": config.image_tokens > 0,
        "asynchronous scheduling": config.async_scheduling,
        "cache events": config.cache_events,
        "retention by default": setup.by_default,
        "window group": any(g.kind == "window" for g in config.groups),
        "budget below a block": config.step_tokens < config.scheduler_block,
    }
    for guard, on in guards.items():
        coverage[f"run with {guard}"] += on
    coverage["run ended by a known violation"] += run.spoiled
