"""What the commands on traces say: a check as a report, a finding as a scenario, short hits summed up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvproof import engines, findings, scenario_file, subjects
from kvproof.errors import UsageError, one_line
from kvproof.report import Outcome, Report, Row
from kvproof.spec.finding import Finding
from kvproof.spec.scenario import Scenario, ScenarioError
from kvproof.trace.checking import Checker
from kvproof.trace.checking import check as hold
from kvproof.trace.coverage import KINDS, never
from kvproof.trace.reader import Trace, arrange
from kvproof.trace.rebuilding import Found, Result


def check(report: Report, files: Sequence[Path], known: Path | None) -> None:
    """Hold the traces to the specification and fill ``report``. Raises :class:`UsageError` for a file that is none.

    What is recorded of the release that wrote the trace does not fail. Rules that were never asked about are said to
    be so, and fail nothing: what a server's clients do is not for the check to choose.
    """
    runs = arrange(files)
    releases = {trace.release for run in runs for trace in run}
    recorded = frozenset[tuple[str, str]]()
    for release in releases:
        recorded |= findings.known_for(findings.load(known), release).identities
    report.subject = " ".join(sorted({trace.subject for run in runs for trace in run}))
    result = Result()
    began = time.perf_counter()
    try:
        hold(runs, result=result)
    except KeyboardInterrupt:
        report.interrupted = True
    seconds = time.perf_counter() - began
    broken = {found.violation.invariant for found in result.found}
    for entry in engines.catalogue():
        asked = result.evaluations[entry.id]
        why = result.lacking.get(entry.id, result.lacking.get(entry.family))
        verdict, outcome = _verdict(entry.id in broken, asked, why)
        detail = why if why is not None and not asked else f"{asked:,} times"
        report.rows.append(Row("invariant", entry.id, verdict, outcome, detail, subject=report.subject))
    for number, found in enumerate(result.found, 1):
        new = found.violation.identity not in recorded
        report.rows.append(_finding(number, found, new))
    impossible_too = set(never(result.coverage, runs[0][0].config, result.lacking))
    for kind in KINDS:
        count = result.coverage[kind]
        if count or kind in impossible_too:
            report.rows.append(Row("run", kind, f"{count:,}" if count else "never", "info"))
    for note in result.notes:
        report.rows.append(Row("run", "note", "", "info", note))
    for where in result.unjudged:
        report.rows.append(Row("run", "judging", "ended early", "undetermined", where))
    evaluations = sum(result.evaluations.values())
    if not evaluations:
        report.rows.append(Row("run", "check", "undetermined", "undetermined", "no invariant was exercised"))
    report.facts.update(events=result.events, steps=result.steps, evaluations=evaluations, findings=len(result.found))
    report.facts["events_per_second"] = int(result.events / max(seconds, 1e-9))
    report.only_known = bool(result.found)


def _verdict(broken: bool, asked: int, why: str | None) -> tuple[str, Outcome]:
    if broken:
        return "broken", "info"  # its finding says whether that fails
    if asked:
        return "held", "pass"
    return ("not exercised", "info") if why is None else ("not applicable", "skip")


def _finding(number: int, found: Found, new: bool) -> Row:
    lines = [one_line(found.violation.witness), f"in step {found.step}: {found.file} line {found.line}"]
    if found.since:
        lines.append(f"first corrupting write: {found.since}")
    lines += [f"block's history: {line}" for line in found.history]
    verdict = "new: not recorded for this release" if new else "known: recorded"
    name = f"{number}. {' '.join(found.violation.identity)}"
    data = {"file": str(found.file), "line": found.line, "step": found.step, "where": dict(found.violation.where)}
    return Row("finding", name, verdict, "fail" if new else "info", "\n".join(lines), data=data)


class _Cut(Exception):
    """The finding that was asked for."""

    def __init__(self, found: Found, whole: Scenario | None, recent: Scenario | None) -> None:
        self.found, self.whole, self.recent = found, whole, recent


def cut(files: Sequence[Path], number: int, out: Path, on: str | None, progress: engines.Progress) -> tuple[str, bool]:
    """Write finding ``number`` of a check of ``files`` as a scenario to ``out``. What to say, and whether all is well.

    The scenario has everything since the engine's start, or only what happened since it was idle last. ``on`` names
    what both are tried on: the shorter that shows the finding is taken.
    """
    runs = arrange(files)
    target = subjects.parse(on) if on is not None else None
    seen = 0

    def stop(found: Found, checker: Checker) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            whole, recent = checker.scenarios()
            raise _Cut(found, whole, recent)

    try:
        hold(runs, stop)
    except _Cut as reached:
        return _write(reached, runs[0][0], out, target, progress)
    there = f"the findings are numbered 1 to {seen} (kvproof trace check lists them)" if seen else "it shows no finding"
    raise UsageError(f"{files[0]}: there is no finding {number}: {there}")


def _write(
    reached: _Cut, trace: Trace, out: Path, target: subjects.Target | None, progress: engines.Progress
) -> tuple[str, bool]:
    identity = reached.found.violation.identity
    choices = [(reached.recent, "since the engine was idle last"), (reached.whole, "since the engine's start")]
    possible = [(scenario, what) for scenario, what in choices if scenario is not None and scenario.actions]
    if not possible:
        raise UsageError("no scenario can tell this finding: too much happened, and nothing was idle lately")
    said, shown = "", True
    scenario, what = possible[-1]
    if target is not None:
        subject = subjects.open_subject(target, progress)
        shown = False
        for scenario, what in possible:  # noqa: B007  # the last one is used
            try:
                violations = engines.replay(subject, scenario).violations
            except (ScenarioError, ValueError) as error:
                said = f"it can't be replayed: {error}"
                continue
            if any(violation.identity == identity for violation in violations):
                said, shown = f"reproduced on {target.text}", True
                break
            said = f"not reproduced on {target.text}"
    finding = Finding(reached.found.violation, trace.subject, scenario, len(scenario.actions) - 1)
    try:
        scenario_file.save(out, scenario, finding)
    except OSError as error:
        raise UsageError(f"can't write {out}: {error.strerror or error}") from error
    lines = [f"{' '.join(identity)}: {len(scenario.actions)} actions, what happened {what}"]
    if scenario is not reached.whole:
        lines.append("what the cache held before is not in it: the scenario is only the end of what happened")
    lines.append(said or f"not tried; {scenario_file.replay_command(str(out), trace.subject)}")
    return "\n".join(lines) + "\n", shown


def why(files: Sequence[Path]) -> str:
    """The short hits of traces: by group kind and rule, and the requests that lost most."""
    from kvproof.impl.vllm.live.why import Miss, never_hits

    counts: Counter[tuple[str, str]] = Counter()
    lost: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], Miss] = {}
    worst: list[Miss] = []
    prompts, notes = 0, dict[str, None]()
    for run in arrange(files):
        names: dict[int, str] = {}
        never_hit = never_hits(run[0].config)
        if never_hit is not None:
            notes[never_hit] = None
        for trace in run:
            for number, line in trace.events(lambda note: notes.setdefault(note)):
                try:
                    if line[0] in ("seq", "known"):
                        names[line[1]] = one_line(line[2]) or names.get(line[1], "")
                    elif line[0] == "submit":
                        prompts += 1
                    elif line[0] == "forget":
                        for gone in line[1]:
                            names.pop(gone, None)
                    elif line[0] == "miss":
                        miss = Miss(request=names.get(line[1], "?"), **line[2])
                        key = (str(miss.kind), str(miss.rule))
                        counts[key] += 1
                        lost[key] += miss.lost
                        if key not in examples or miss.lost > examples[key].lost:
                            examples[key] = miss
                        worst = sorted([*worst, miss], key=lambda one: -one.lost)[:_WORST]
                except (TypeError, KeyError, IndexError, AttributeError) as error:
                    raise UsageError(f"{trace.path}: line {number} is damaged: it is no event of a trace") from error
    lines = [f"note: {note}" for note in notes]
    for key, tokens in sorted(lost.items(), key=lambda item: (-item[1], item[0])):
        kind, rule = key
        lines.append(f"{kind}, {rule}: {counts[key]} lookups fell short by {tokens} tokens in all")
        lines.append(f"  such as {one_line(examples[key].line())}")
    if worst:
        lines.append("requests that lost most:")
        lines += [f"  {miss.request}: {miss.lost} of {miss.prompt} tokens ({miss.kind}, {miss.rule})" for miss in worst]
    total = sum(counts.values())
    lines.append(f"kvproof: why requests={prompts} short={total} lost={sum(lost.values())} exit=0")
    return "\n".join(lines) + "\n"


_WORST = 5
