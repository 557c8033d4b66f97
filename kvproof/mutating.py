"""The kill matrix of ``kvproof mutants``: faults of old, planted in the reference engine or in a rule, and which
checkers notice them.

The matrix is worth something only if the same checkers are silent about what is right: that is looked at first.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Final

from kvproof import engines, proofs
from kvproof.errors import UsageError, stop
from kvproof.report import Outcome, Report, Row

if TYPE_CHECKING:
    from kvproof.impl.reference.live import Mode
    from kvproof.impl.reference.planting import Mutant
    from kvproof.models.mutants.checkers import Serve, Trial
    from kvproof.models.mutants.matrix import Checker, Judged
    from kvproof.models.mutants.rules import Verdict
    from kvproof.spec.config import Config
    from kvproof.spec.subject import Subject

SEED = 1
HEALTHY = "the healthy engine"
WHOLE = 12
"""So many scenarios are served once more by an engine that looks at everything, where looking at what was touched found
nothing."""
WITH_RULES = 15
"""So many scenarios are served with a changed rule: each configuration in a roomy pool."""
CHECKS: Final = {"claims": "claims", "grid": "nothing but the right rule, on numbers", "live": "a live engine"}
"""What a changed rule is held to, as :mod:`kvproof.models.mutants.rules` names it, in the order asked, in words. What
differs from the right rule on numbers is no equivalent; that a checker would notice it is not said."""


@dataclass(frozen=True)
class Options:
    """``only`` these mutants and wrong rules (all if empty); ``steps`` that the fuzzer may take for each mutant.
    ``rules``: operators of the rules are changed, too."""

    only: tuple[str, ...]
    steps: int
    rules: bool = False


def run(
    report: Report,
    options: Options,
    progress: engines.Progress,
    planted_ones: Sequence[Mutant] | None = None,
    tried_by: Mapping[str, Checker[Mutant]] | None = None,
) -> None:
    """Fill ``report``: a row for the healthy engine, one a mutant, one a wrong rule that a claim must refute.

    ``planted_ones`` are the mutants to try instead of all that are kept, ``tried_by`` checkers instead of
    :func:`checkers`. An interrupt leaves the rows so far. Raises :class:`UsageError` for a name in ``only`` that
    nothing has.
    """
    from kvproof.impl.reference.mutants import MUTANTS
    from kvproof.models.smt import CLAIMS

    kept = MUTANTS if planted_ones is None else tuple(planted_ones)
    wrong_rules = {claim.id for claim in CLAIMS if claim.mutant_of} if planted_ones is None else set()
    modules = _rule_modules() if options.rules else {}
    _require_known(set(options.only) - {mutant.id for mutant in kept} - wrong_rules - modules.keys())
    if options.only:
        kept = tuple(mutant for mutant in kept if mutant.id in options.only)
        wrong_rules &= set(options.only)
        modules = {name: module for name, module in modules.items() if name in options.only}
    report.facts.update(killed=0, survived=0)
    try:
        if kept and not _engines(report, kept, tried_by or checkers(options.steps), progress):
            return
        if wrong_rules:
            _add(report, *(_rule_row(row) for row in proofs.prove(None, progress) if row.id in wrong_rules))
        if modules:
            _operators(report, modules, progress)
    except KeyboardInterrupt:
        report.interrupted = True


def _require_known(left: set[str]) -> None:
    """Refuse names that nothing has, or only a module of rules, whose operators were not asked for."""
    if unknown := left - (_rule_modules().keys() if left else set()):
        raise UsageError(f"no mutant is called {min(unknown)!r}: kvproof mutants without --only shows them all")
    if left:
        raise UsageError(f"{min(left)!r} is a module of rules: give --rules, too, to change its operators")


def _add(report: Report, *rows: Row) -> None:
    report.rows += rows
    for row in rows:
        _count(report, killed=row.outcome == "pass" and row.id != HEALTHY, survived=row.outcome == "fail")


def _count(report: Report, **numbers: int) -> None:
    for name, number in numbers.items():
        report.facts[name] = int(report.facts.get(name, 0)) + number


def _engines(
    report: Report, kept: Sequence[Mutant], tried_by: Mapping[str, Checker[Mutant]], progress: engines.Progress
) -> bool:
    """Every mutant before every checker. False if the checkers are not silent about the healthy engine."""
    from kvproof.models.mutants.matrix import judge

    for judged in judge(kept, tried_by):
        row = row_of(judged)
        _add(report, row)
        progress(f"{row.id}: {row.verdict} ({row.seconds:.1f} s)")
        stop.check()
    return report.rows[0].outcome == "pass"


def _rule_modules() -> dict[str, ModuleType]:
    from kvproof.models.mutants.rules import rule_modules

    return {module.__name__.rpartition(".")[2]: module for module in rule_modules()}


def _operators(report: Report, modules: Mapping[str, ModuleType], progress: engines.Progress) -> None:
    """One operator of a rule at a time. Those that nothing notices are rows of their own, the others are counted."""
    import z3

    from kvproof.impl.reference import chunks
    from kvproof.models.mutants.rules import Rules, judged_survivors
    from kvproof.models.mutants.workload import workload
    from kvproof.models.smt import CLAIMS

    def forget() -> None:
        chunks.reusable.cache_clear()
        chunks._cut.cache_clear()

    claims = [claim for claim in CLAIMS if not claim.mutant_of]
    rules = Rules(claims, serving(None, "touched"), workload()[:WITH_RULES], forget, judged_survivors())
    z3.set_param(ctrl_c=False)  # amid a solver's call an interrupt would come out as anything: it waits for its end
    stop.held = True
    try:
        for name, module in modules.items():
            by: Counter[str] = Counter()
            begun = time.perf_counter()
            told: list[dict[str, str]] = []
            for verdict in rules.judge([module]):
                by[verdict.by or ("equivalent" if verdict.reason else "survived")] += 1
                told.append({"change": verdict.mutation.change, "by": verdict.by, "how": verdict.how})
                if not verdict.by:
                    _add(report, _survivor_row(verdict))
                progress(f"{verdict.mutation.id}: {verdict.by or 'nobody noticed'}")
                stop.check()
            counts = ", ".join(f"{count} by {CHECKS[who]}" for who, count in sorted(by.items()) if who in CHECKS)
            killed = sum(by[who] for who in CHECKS)
            _count(report, killed=killed, equivalent=by["equivalent"])
            detail = f"{killed} of {by.total()} changes killed ({counts}), {by['equivalent']} equivalent"
            seconds = time.perf_counter() - begun
            data = {"mutations": told}
            row = Row("mutant", name, "judged", "info", detail, seconds=seconds, subject="operators", data=data)
            report.rows.append(row)
    finally:
        stop.held = False


def _survivor_row(verdict: Verdict) -> Row:
    mutation = verdict.mutation
    return Row(
        kind="mutant",
        id=mutation.id,
        verdict="equivalent" if verdict.reason else "survived",
        outcome="info" if verdict.reason else "fail",
        detail=f"{mutation.change}\n{verdict.reason}".rstrip(),
        subject="operators",
    )


def checkers(steps: int) -> dict[str, Checker[Mutant]]:
    """``live``: an engine with live assertions serves the workload; what its quick mode leaves alone (questions that
    take nothing) is looked at once more in the thorough one. ``fuzz``: the search that releases get."""
    from kvproof.models.mutants.checkers import fuzz, live
    from kvproof.models.mutants.workload import workload

    scenarios = workload()

    def assert_live(mutant: Mutant | None) -> Trial:
        quick = live(serving(mutant, "touched"), scenarios)
        if quick.killed or quick.error:
            return quick
        thorough = live(serving(mutant, "full"), scenarios[:WHOLE])
        where = f"{thorough.where}, whole state judged" if thorough.where else ""
        return dataclasses.replace(thorough, steps=quick.steps + thorough.steps, where=where)

    return {"live": assert_live, "fuzz": lambda mutant: fuzz(planted(mutant), SEED, steps)}


def serving(mutant: Mutant | None, mode: Mode) -> Serve:
    """A way to start live engines with the mutant planted."""
    import torch

    from kvproof.impl.reference.live import AssertingEngine
    from kvproof.impl.reference.null_model import NullModel
    from kvproof.impl.reference.subject import Driver, NullTeacher

    torch.set_num_threads(1)  # a fault takes microseconds; a pool of threads for it takes longer

    class Served(Driver):
        @property
        def steps(self) -> int:
            return self.engine.scheduler.steps

    def serve(config: Config) -> Served:
        engine = AssertingEngine(config, NullModel(), mode)
        if mutant is not None:
            mutant.plant(engine)
        return Served(engine, NullTeacher())

    return serve


def planted(mutant: Mutant | None) -> Subject:
    """The reference engine as a subject, with the mutant planted in each engine that is started."""
    from kvproof.impl.reference.subject import Driver, ReferenceSubject
    from kvproof.spec.subject import Observer

    class Planted(ReferenceSubject):
        def start(self, config: Config, observer: Observer | None) -> Driver:
            driver = super().start(config, observer)
            if mutant is not None:
                mutant.plant(driver.engine)
            return driver

    return Planted()


def row_of(judged: Judged[Mutant]) -> Row:
    """A mutant passes if every checker kills it; the healthy engine if none does."""
    mutant, trials = judged.mutant, judged.trials
    detail = "\n".join(f"{name}: {trial.text()}" for name, trial in trials.items())
    data = {name: _data(trial) for name, trial in trials.items()}
    verdict: str
    outcome: Outcome
    if mutant is None:
        verdict, outcome = ("silent", "pass") if judged.silent else ("not silent", "error")
        return Row("mutant", HEALTHY, verdict, outcome, detail, seconds=judged.seconds, data=data)
    if judged.survived:
        verdict, outcome = f"survived {', '.join(judged.survived)}", "fail"
    elif any(trial.error for trial in trials.values()):
        verdict, outcome = "error", "error"
    else:
        verdict, outcome = "killed", "pass"
    return Row(
        kind="mutant",
        id=mutant.id,
        verdict=verdict,
        outcome=outcome,
        detail=detail,
        statement=f"{mutant.fault} ({mutant.mirrors})",
        seconds=judged.seconds,
        subject=mutant.group,
        data={"mirrors": mutant.mirrors, **data},
    )


def _data(trial: Trial) -> dict[str, str | int]:
    found = trial.violation
    invariant, cause = found.identity if found is not None else ("", "")
    return {
        "killed": trial.killed,
        "invariant": invariant,
        "cause": cause,
        "witness": found.witness if found is not None else "",
        "steps": trial.steps,
        "where": trial.where,
        "error": trial.error,
    }


def _rule_row(proof: Row) -> Row:
    """A wrong rule that its claim must refute, as a row of the matrix."""
    survived = proof.data["expected"] == "refuted" and proof.verdict == "not caught"
    return dataclasses.replace(
        proof,
        kind="mutant",
        verdict="survived z3" if survived else "killed" if proof.outcome == "pass" else proof.verdict,
        outcome="fail" if survived else proof.outcome,
        detail=f"z3: {proof.belongs_to} refuted, {proof.data['counterexample']}"
        if proof.outcome == "pass"
        else proof.detail,
        belongs_to="",
        subject="rules",
    )
