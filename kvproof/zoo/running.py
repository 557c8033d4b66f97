"""``kvproof zoo run``: the faults' scenarios on releases, the mutants before their checkers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvproof import subjects
from kvproof.engines import Progress
from kvproof.errors import UsageError
from kvproof.options import MUTANT_STEPS
from kvproof.report import Outcome, Report, Row
from kvproof.zoo.code import code_hash
from kvproof.zoo.fault import Fault, is_release, nothing_of, ordered, scenario_of
from kvproof.zoo.replays import Shown, replay_all
from kvproof.zoo.results import Killed, Replayed, Results, stamp


def run(
    report: Report,
    faults: Sequence[Fault],
    results: Results,
    releases: Sequence[str] | None,
    again: bool,
    progress: Progress,
) -> None:
    """Replay the faults on ``releases`` (those around each change if not given), and have mutants judged.

    What is there already for this code is not done again unless ``again`` says so. An interrupt leaves what was done in
    ``results`` and in the report, and so does a release that can't be driven here. Raises :class:`UsageError` where
    there is nothing to run.
    """
    wanted = [
        (fault, release)
        for fault in faults
        if fault.reached
        for release in (fault.around if releases is None else releases)
    ]
    mutants = [(fault, mutant) for fault in faults for mutant in fault.mutants]
    if not wanted and not mutants:
        raise UsageError(f"there is nothing to run: {nothing_of(faults)}")
    problems: dict[tuple[str, str], str] = {}
    try:
        for release in ordered({release for _, release in wanted}):
            having = [fault for fault, where in wanted if where == release]
            for name, problem in _replay(release, having, results, again, progress):
                problems[name, release] = problem
        _judge_mutants(mutants, results, again, progress)
    except KeyboardInterrupt:
        report.interrupted = True
    report.problem = "; ".join(dict.fromkeys(problems.values()))
    for fault, release in wanted:
        if (fault.id, release) in problems:
            report.rows.append(Row("run", f"{fault.id} {release}", "not run", "error", problems[fault.id, release]))
        elif (fault.id, release) in results.replayed:
            report.rows.append(_row(fault, results.replayed[fault.id, release]))
    for fault, mutant in mutants:
        if (fault.id, mutant) in results.killed:
            report.rows.append(_mutant_row(results.killed[fault.id, mutant]))
    report.rows += [_unreached(fault) for fault in faults if fault.not_reached]
    shown = sum(row.verdict == "found by replay" for row in report.rows)
    report.facts.update(faults=len(faults), shown=shown, code=code_hash())


def _replay(
    release: str, faults: Iterable[Fault], results: Results, again: bool, progress: Progress
) -> Iterator[tuple[str, str]]:
    """Add to ``results``. Yields what could not be replayed here, by the fault's id, and why."""
    stale = {}
    for fault in faults:
        known = results.replayed.get((fault.id, release))
        if again or known is None or not known.fresh(fault):
            stale[fault.id] = fault
    for name, shown in replay_all(release, {name: scenario_of(fault) for name, fault in stale.items()}, progress):
        if shown.problem:
            yield name, shown.problem
        else:
            results.add(judged(stale[name], release, shown))


def judged(fault: Fault, release: str, shown: Shown) -> Replayed:
    """What a replay says about a fault."""
    witness = shown.witness(fault.signs)
    common = {"release": release, **stamp(fault)}
    if witness is not None:
        return Replayed(**common, verdict="shown", detail=witness)
    if shown.error:
        return Replayed(**common, verdict="error", detail=shown.error)
    if shown.refused:
        return Replayed(**common, verdict="refused", detail=shown.refused)
    if shown.spoiled:
        others = ", ".join(f"{invariant} ({cause})" for invariant, cause, _ in shown.seen)
        return Replayed(**common, verdict="undetermined", detail=f"the run ended at {others}")
    return Replayed(**common, verdict="not shown")


def _row(fault: Fault, result: Replayed) -> Row:
    """A replay passes if it came out as the data file says; where that says nothing, it is told and no more."""
    expected = fault.expects(result.release)
    verdict = {"shown": "found by replay", "not shown": "not shown", "refused": "can't be configured"}.get(
        result.verdict, result.verdict
    )
    outcome: Outcome
    if result.verdict in ("error", "undetermined"):
        outcome = "error" if result.verdict == "error" else "undetermined"
    elif expected is None:
        outcome = "info"
    elif result.verdict == ("shown" if expected else "not shown"):
        outcome = "pass"
    else:
        outcome = "fail"
    detail = result.detail or fault.title
    if outcome == "fail":
        recorded = "wrong" if expected else "right"
        detail = f"recorded as {recorded} there, so the record or the code is at fault; {detail}"
    return Row("run", f"{fault.id} {result.release}", verdict, outcome, detail)


def _judge_mutants(mutants: Sequence[tuple[Fault, str]], results: Results, again: bool, progress: Progress) -> None:
    """Before a live engine's assertions, and what they let live before the fuzzer. One of them is enough here:
    ``kvproof mutants`` asks for both."""
    stale: dict[str, list[Fault]] = {}
    for fault, mutant in mutants:
        known = results.killed.get((fault.id, mutant))
        if again or known is None or not known.fresh(fault):
            stale.setdefault(mutant, []).append(fault)
    if not stale:
        return
    from kvproof import mutating

    def judge(names: Iterable[str], checker: str) -> dict[str, Row]:
        report = Report("mutants")
        tried_by = {checker: mutating.checkers(MUTANT_STEPS)[checker]}
        mutating.run(report, mutating.Options(tuple(names), MUTANT_STEPS), progress, tried_by=tried_by)
        if report.interrupted:
            raise KeyboardInterrupt
        return {row.id: row for row in report.rows}

    rows = judge(stale, "live")
    left = [name for name in stale if name in rows and rows[name].outcome == "fail"]
    if left:
        rows |= judge(left, "fuzz")
    healthy = rows.get(mutating.HEALTHY)
    for name, faults in stale.items():
        row = rows.get(name, healthy)
        killed = row is not None and row.id == name and row.outcome == "pass"
        detail = "" if row is None else f"{row.verdict}: {row.detail}"
        for fault in faults:
            results.add(Killed(**stamp(fault), mutant=name, killed=killed, detail=detail))


def _mutant_row(result: Killed) -> Row:
    verdict, outcome = ("killed", "pass") if result.killed else ("survived", "fail")
    return Row("run", f"{result.fault} {result.mutant}", verdict, outcome, result.detail)  # type: ignore[arg-type]


def _unreached(fault: Fault) -> Row:
    return Row("run", fault.id, "not reached", "skip", fault.not_reached)


def all_releases(faults: Iterable[Fault]) -> tuple[str, ...]:
    """Every release on which some fault was established to be there, or not to be."""
    return tuple(ordered({release for fault in faults for release in (*fault.wrong, *fault.right)}))


def named_releases(text: str, faults: Iterable[Fault]) -> tuple[str, ...]:
    """``all``, or releases between commas. Raises :class:`UsageError` for what is none that can be driven."""
    if text == "all":
        return all_releases(faults)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        subjects.parse(f"vllm=={name}")
        if not is_release(name):
            raise UsageError(f"{name!r} names no release: write it as in --releases 0.26.0,0.27.0")
    if not names:
        raise UsageError("--releases names none: write it as in --releases 0.26.0,0.27.0")
    return tuple(ordered(set(names)))
