"""Exploration of small worlds, as rows: what was visited, what it exercised, and the shortest way to whatever broke."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvproof import engines, scenario_file
from kvproof.errors import CheckerError, UsageError, stop
from kvproof.report import Outcome, Report, Row
from kvproof.spec.finding import Finding

MOST_STATES = 2_000_000
"""By default. A state takes about 250 bytes."""


@dataclass(frozen=True)
class Options:
    """``scopes`` are names (none: all); ``most`` states of each are visited. ``save`` is a folder in which explorations
    that are stopped are kept, to go on from. ``out`` is where counterexamples go. ``mutants``: plant faults, and show
    that each is found."""

    scopes: tuple[str, ...] = ()
    workers: int = 1
    most: int = MOST_STATES
    save: Path | None = None
    out: Path = Path("kvproof-findings")
    mutants: bool = False


def run(report: Report, options: Options, progress: engines.Progress) -> None:
    """Fill ``report``. What was explored before an interrupt stays in it. Raises :class:`UsageError` for a scope that
    there is not, or a file in ``save`` that is not of that scope."""
    scopes: dict[str, Any] = engines.load("kvproof.models.explore.scopes", "SCOPES")
    unknown = [name for name in options.scopes if name not in scopes]
    if unknown:
        raise UsageError(f"there is no scope {unknown[0]!r}: use {', '.join(scopes)}")
    chosen = [scopes[name] for name in dict.fromkeys(options.scopes or scopes)]
    if options.mutants:
        if options.save is not None:
            raise UsageError("what is explored with faults planted is not saved: leave out --save")
        _mutants(report, {scope.name for scope in chosen}, progress)
        return
    if options.save is not None and options.workers > 1:
        raise UsageError("several processes don't save what they visit: use --workers 1 with --save")
    explore: Callable[..., Any] = engines.load("kvproof.models.explore.search", "explore")
    evaluations: Counter[str] = Counter()
    broken: set[str] = set()
    states = transitions = 0
    place = len(report.rows)
    try:
        for scope in chosen:
            save = options.save / f"{scope.name}.states" if options.save is not None else None
            stop.held = True  # the first interrupt waits until a state has been looked at
            try:
                done = explore(scope, workers=options.workers, most=options.most, save=save, progress=progress,
                               pause=stop.check)  # fmt: skip
            except ValueError as error:
                raise UsageError(str(error)) from error
            except RuntimeError as error:
                raise CheckerError(f"scope {scope.name}: {error}") from error
            finally:
                stop.held = False
            evaluations += done.evaluations
            states, transitions = states + done.states, transitions + done.transitions
            report.rows.append(_scope_row(done))
            for one in done.broken:
                broken.add(one.violation.invariant)
                report.rows.append(_broken_row(one, options.out, progress))
            if done.interrupted:
                report.interrupted = True
                return
    finally:
        report.rows[place:place] = list(_invariant_rows(evaluations, broken, transitions))
        report.facts.update(scopes=len(chosen), states=states, moves=transitions)


def _scope_row(done: Any) -> Row:
    rate = round(done.states / done.seconds) if done.seconds else 0
    lines = [done.words(), f"{done.transitions:,} moves, widest level {done.widest:,}, {rate:,} states a second"]
    verdict, outcome = ("explored, holds", "pass") if done.complete else ("not complete", "undetermined")
    if done.broken:
        verdict, outcome = "broken", "fail"
    elif done.livelocks:
        verdict, outcome = "not live", "fail"
        lines.append(f"{len(done.livelocks)} ways round: requests that fit and may never finish")
    elif done.live:
        lines.append(f"every request that fits comes to its end by steps alone (from {done.promised:,} states)")
    elif done.complete:
        lines.append("no request is sure to fit: that any comes to its end is not claimed")
    if done.cramped:
        lines.append(f"{done.cramped} ways round with a request that may need more blocks than there are")
    data = {
        "states": done.states,
        "transitions": done.transitions,
        "depth": done.depth,
        "complete": done.complete,
        "live": done.live,
        "promised": done.promised,
        "taken": dict(done.taken),
        "states_a_second": rate,
    }
    return Row("run", f"scope {done.scope.name}", verdict, _outcome(outcome), "\n".join(lines), seconds=done.seconds,
               data=data)  # fmt: skip


def _outcome(word: str) -> Outcome:
    return word  # type: ignore[return-value]


def _broken_row(one: Any, out: Path, progress: engines.Progress) -> Row:
    violation, scenario = one.violation, one.scenario
    finding = Finding(violation, "spec", scenario, len(scenario.actions) - 1)
    file = out / f"spec-explored-{violation.invariant}-{violation.cause}.json"
    kept = f"kept in {file}"
    try:
        scenario_file.save(file, scenario, finding)
    except OSError as error:
        kept = f"not kept: {error.strerror or error}"
        progress(f"can't keep {file}: {error.strerror or error}")
    return Row(
        "finding",
        f"{violation.invariant} {violation.cause}",
        "new",
        "fail",
        violation.witness,
        text="\n".join([violation.witness, f"a shortest way: {len(one.moves)} moves", scenario.text(), kept]),
    )


def _invariant_rows(evaluations: Counter[str], broken: set[str], transitions: int) -> Sequence[Row]:
    subject = engines.specification_subject()
    rows = []
    for entry in engines.catalogue():
        count = evaluations.get(entry.id, 0)
        detail = f"{count:,} evaluations in {transitions:,} moves"
        verdict, outcome = "explored, holds", "pass"
        if entry.id in broken:
            verdict, outcome = "broken", "fail"
        elif entry.family not in subject.families():
            verdict, outcome, detail = "not applicable", "skip", f"the machine can't show the family {entry.family}"
        elif entry.id in subject.lacking():
            verdict, outcome, detail = "not applicable", "skip", subject.lacking()[entry.id]
        elif entry.family == "REUSE":
            verdict, outcome, detail = "not applicable", "skip", "a world does not carry what earlier requests promised"
        elif not count:
            verdict, outcome, detail = "never exercised", "info", "in these worlds there is nothing for it to judge"
        rows.append(Row("invariant", entry.id, verdict, _outcome(outcome), detail, statement=entry.statement,
                        subject="spec"))  # fmt: skip
    return rows


def _mutants(report: Report, scopes: set[str], progress: engines.Progress) -> None:
    explore: Callable[..., Any] = engines.load("kvproof.models.explore.search", "explore")
    killed = survived = 0
    for mutant in engines.load("kvproof.models.explore.mutants", "MUTANTS"):
        if mutant.scope not in scopes:
            continue
        progress(f"planting {mutant.id}")
        with mutant.planted():
            done = explore(mutant.world(), liveness=True)
        fine = bool(done.broken or done.livelocks)
        killed, survived = killed + fine, survived + (not fine)
        if done.broken:
            first = min(done.broken, key=lambda one: len(one.moves))
            shown = f"{first.violation.invariant} after {len(first.moves)} moves: {first.violation.witness}"
        else:
            shown = f"{len(done.livelocks)} ways round" if done.livelocks else "nothing broke"
        report.rows.append(
            Row(
                "mutant",
                mutant.id,
                "killed" if fine else "survived",
                "pass" if fine else "fail",
                f"scope {mutant.scope}; {shown}",
                statement=mutant.statement,
                seconds=done.seconds,
            )
        )
        if done.interrupted:
            report.interrupted = True
            break
    report.facts.update(killed=killed, survived=survived)
