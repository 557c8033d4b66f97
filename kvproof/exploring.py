"""Exploration of small worlds, as rows: what was visited, what it exercised, and the shortest way to whatever broke."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvproof import engines, scenario_file
from kvproof.errors import USAGE, CheckerError, UsageError, explain, stop
from kvproof.report import Kind, Outcome, Report, Row
from kvproof.spec.finding import Finding

BY_LIVENESS = frozenset({"ADMIT.stall", "ADMIT.starved"})
"""What is judged when somebody has waited for long. In a world the ways round say it."""

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
    """Fill ``report``. What was explored before an interrupt stays in it, and what goes wrong in a scope (a file in
    ``save`` that is not of it, a process lost) costs that scope alone.

    Raises :class:`UsageError` for a scope that there is not, or, where ``mutants`` are asked for, that has none.
    """
    scopes: dict[str, Any] = engines.load("kvproof.models.explore.scopes", "SCOPES")
    unknown = [name for name in options.scopes if name not in scopes]
    if unknown:
        raise UsageError(f"there is no scope {unknown[0]!r}: use {', '.join(scopes)}")
    chosen = [scopes[name] for name in dict.fromkeys(options.scopes or scopes)]
    if options.mutants:
        if options.save is not None:
            raise UsageError("what is explored with faults planted is not saved: leave out --save")
        _mutants(report, options, progress)
        return
    if options.save is not None and options.workers > 1:
        raise UsageError("several processes don't save what they visit: use --workers 1 with --save")
    evaluations: Counter[str] = Counter()
    broken: set[str] = set()
    explored = states = transitions = 0
    place = len(report.rows)
    try:
        for scope in chosen:
            try:
                done = _explore(scope, options, progress)
            except Exception as error:
                _note(report, "run", f"scope {scope.name}", error)
                continue
            evaluations += done.evaluations
            explored, states, transitions = explored + 1, states + done.states, transitions + done.transitions
            report.rows.append(_scope_row(done))
            for one in done.broken:
                broken.add(one.violation.invariant)
                report.rows.append(_broken_row(one, options.out, progress))
            report.problem = report.problem or done.unsaved
            if done.interrupted:
                report.interrupted = True
                return
    finally:
        if explored:
            report.rows[place:place] = list(_invariant_rows(evaluations, broken, transitions))
        report.facts.update(scopes=explored, states=states, moves=transitions)


def _explore(scope: Any, options: Options, progress: engines.Progress) -> Any:
    """What there is in ``scope``. The first interrupt waits until a state has been looked at."""
    explore: Callable[..., Any] = engines.load("kvproof.models.explore.search", "explore")
    save = options.save / f"{scope.name}.states" if options.save is not None else None
    stop.held = True
    try:
        return explore(scope, workers=options.workers, most=options.most, save=save, progress=progress,
                       pause=stop.check)  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error)) from error
    except RuntimeError as error:
        raise CheckerError(f"scope {scope.name}: {error}") from error
    finally:
        stop.held = False


def _note(report: Report, kind: Kind, name: str, error: Exception) -> None:
    """A row for what could not be explored, so that the others are kept."""
    message, code = explain(error)
    if code == USAGE:
        report.problem = report.problem or message
    report.rows.append(Row(kind, name, "not run" if code == USAGE else "error", "error", message))


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
    elif done.complete and done.interrupted:
        lines.append("interrupted before it was known that requests come to their end: that is not claimed")
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
        "exercised": {name: n for name, n in sorted(done.evaluations.items()) if name not in BY_LIVENESS},
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
        subject="spec",
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
        elif entry.id in BY_LIVENESS:
            verdict, outcome, detail = (
                "not applicable",
                "skip",
                "a world has no clock: liveness tells who never finishes",
            )
        elif entry.family == "REUSE":
            verdict, outcome, detail = "not applicable", "skip", "a world does not carry what earlier requests promised"
        elif not count:
            verdict, outcome, detail = "never exercised", "info", "in these worlds there is nothing for it to judge"
        rows.append(Row("invariant", entry.id, verdict, _outcome(outcome), detail, statement=entry.statement,
                        subject="spec"))  # fmt: skip
    return rows


def _mutants(report: Report, options: Options, progress: engines.Progress) -> None:
    every: Sequence[Any] = engines.load("kvproof.models.explore.mutants", "MUTANTS")
    planted = dict.fromkeys(mutant.scope for mutant in every)
    for name in options.scopes:
        if name not in planted:
            raise UsageError(f"no fault is planted in scope {name!r}: use {', '.join(planted)}")
    killed = survived = 0
    try:
        for mutant in every:
            if options.scopes and mutant.scope not in options.scopes:
                continue
            progress(f"planting {mutant.id}")
            try:
                with mutant.planted():
                    done = _explore(mutant.world(), options, lambda line: None)
            except Exception as error:
                _note(report, "mutant", mutant.id, error)
                continue
            if done.interrupted:  # whatever it would have shown is not known
                report.interrupted = True
                break
            row = _mutant_row(mutant, done)
            killed, survived = killed + (row.outcome == "pass"), survived + (row.outcome == "fail")
            report.rows.append(row)
    finally:
        report.facts.update(killed=killed, survived=survived)


def _mutant_row(mutant: Any, done: Any) -> Row:
    verdict, outcome, shown = "survived", "fail", "nothing broke"
    data: dict[str, Any] = {"states": done.states}
    if done.broken:
        first = min(done.broken, key=lambda one: len(one.moves))
        verdict, outcome = "killed", "pass"
        shown = f"{first.violation.invariant} after {len(first.moves)} moves: {first.violation.witness}"
        data |= {"invariant": first.violation.invariant, "scenario": first.scenario.to_dict()}
        shown += f"\na shortest way: {'; '.join(map(str, first.moves))}"
    elif done.livelocks:
        verdict, outcome, shown = "killed", "pass", f"{len(done.livelocks)} ways round"
    elif not done.complete:
        verdict, outcome, shown = "not complete", "undetermined", done.words()
    return Row("mutant", mutant.id, verdict, _outcome(outcome), f"scope {mutant.scope}; {shown}",
               statement=mutant.statement, seconds=done.seconds, data=data)  # fmt: skip
