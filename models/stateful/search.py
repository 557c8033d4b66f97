"""One worker's search: rounds of Hypothesis until the budget is spent.

A violation stops the run it happens in, so fault kinds hide one another. What was found is therefore known from then
on: a known violation that leaves the cache sound is passed over, one that doesn't ends its run quietly, and the search
goes on for the others. Hypothesis draws and never learns that something broke: it would stop to shrink its choices,
where there is a scenario to be reduced, and time to search meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import HypothesisException, InvalidDefinition
from hypothesis.internal.conjecture import engine as conjecture
from hypothesis.internal.conjecture import providers
from hypothesis.reporting import with_reporter
from hypothesis.stateful import run_state_machine_as_test

from kvproof.models.stateful.drive import Run, Watchers
from kvproof.models.stateful.machine import CacheMachine
from kvproof.models.stateful.notes import Notebook, Report, Tally
from kvproof.models.stateful.strategies import Retention, Setup
from kvproof.spec.config import Config, ConfigError
from kvproof.spec.subject import Subject

RULES_A_RUN = 20
RUNS_A_ROUND = 400

Tick = Callable[[Tally], None]


class _Enough(BaseException):
    """Ends a round from within. Not an ``Exception``, so that Hypothesis passes it on as it does an interrupt."""


class Search:
    """Implements :class:`kvproof.models.stateful.machine.Host`."""

    def __init__(
        self,
        subject: Subject,
        *,
        notebook: Notebook,
        worker: int,
        steps: int,
        seconds: float | None,
        watchers: Watchers,
        default_retention: Retention,
        report: Report,
        tick: Tick,
    ) -> None:
        self.tally = notebook.tally
        self._subject, self._notebook, self._worker = subject, notebook, worker
        self._steps, self._seconds = steps, seconds
        self._watchers, self._default_retention = watchers, default_retention
        self._report, self._tick = report, tick

    # -- the whole ----------------------------------------------------------------------------------------------------

    def search(self) -> Tally:
        """Rounds until the budget is spent. An interrupt ends it early; what was found by then is in the tally."""
        number = 0
        try:
            while not self._spent():
                steps = self.tally.steps
                self._round(number)
                if self.tally.errors:  # a checker that fails judges nothing: more of the same tells no more
                    break
                if steps == self.tally.steps and not self._spent():
                    self.tally.error(f"{self._subject.name} refused every configuration that was drawn")
                    break
                number += 1
        except KeyboardInterrupt:
            self.tally.interrupted = True
        return self.tally

    def _spent(self) -> bool:
        late = self._seconds is not None and self._notebook.elapsed() >= self._seconds
        return late or self.tally.steps >= self._steps

    def _round(self, number: int) -> None:
        """One Hypothesis run: it ends with the budget, or when its examples are used up."""
        name = f"{self._notebook.seed}/{self._worker}/{number}".encode()
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
            phases=(Phase.generate,),
        )
        # What Hypothesis thinks of it all (unsatisfiable, say) changes nothing.
        try:
            with with_reporter(_silent), _own_constants_only(), _no_mutations():
                run_state_machine_as_test(cast(type[CacheMachine], machine), settings=chosen)
        except InvalidDefinition as error:
            self.tally.error(f"the machine can't go on: {error}")
        except (_Enough, HypothesisException):
            pass

    # -- what the machine calls ---------------------------------------------------------------------------------------

    def open(self, setup: Setup) -> tuple[Setup, Run]:
        if self._spent():
            raise _Enough
        setup = setup.resolved(self._default_retention)
        setup = replace(setup, config=getattr(self._subject, "fitting", _as_it_is)(setup.config))
        if "EXT" not in self._subject.families():
            setup = replace(setup, unreliable=False)
        # Half of the runs have checkpoints, and as many draft layers or windows, which some subjects refuse for good:
        # the rest of the setup may do.
        simple = setup.in_order()
        tried = (setup, setup.usual(), simple.usual(), setup.usual().without_checkpoints())
        for easier in dict.fromkeys((*tried, simple.usual().without_checkpoints())):
            try:
                return self._start(easier)
            except ConfigError:
                self.tally.coverage["run refused"] += 1
        return self._start(setup.plain())

    def _start(self, setup: Setup) -> tuple[Setup, Run]:
        setup = setup.at_limit(getattr(self._subject, "startup_limit", _no_limit))
        return setup, Run(self._subject, setup.config, self._watchers(self._notebook.known, True))

    def close(self, setup: Setup, run: Run) -> None:
        _count(self.tally.coverage, setup, run)
        self.account(run)

    def account(self, run: Run) -> None:
        """Take down what a run did and showed."""
        tally = self.tally
        elsewhere = self._notebook.elsewhere(run)
        found = self._notebook.remember(run)
        tally.examples += 1
        tally.steps += run.steps
        tally.evaluations.update(run.watcher.evaluations)
        for one in elsewhere if found is None else [*elsewhere, found]:
            tally.findings.append(one)
            self._report(one)
        self._tick(tally)


def _no_limit(_: Config) -> int:
    """What a subject says that would start with any pool."""
    return 0


def _as_it_is(config: Config) -> Config:
    """What a subject has of a configuration that says nothing of what it lacks."""
    return config


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
        "offers that have to be asked for again": config.offer_delay > 0,
        "blocks that are sent away": config.send_steps > 0,
        "states at junctions": config.junction_state,
        "keys that do not look ahead": not config.lookahead_keys,
        "a watermark": config.watermark > 0,
        f"host memory that gives up by {config.offload_policy}": config.connector == "offload",
        "outputs offloaded": config.offload_outputs,
        "retention by default": setup.by_default,
        "window group": any(g.kind == "window" for g in config.groups),
        "budget below a block": config.step_tokens < config.scheduler_block,
    }
    for guard, on in guards.items():
        coverage[f"run with {guard}"] += on
    coverage["run ended by a known violation"] += run.spoiled
