"""Running a scenario again, and saying whether what it showed is still there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvproof import engines, findings, scenario_file, subjects
from kvproof.report import Outcome, Report, Row
from kvproof.spec.finding import Violation
from kvproof.spec.subject import Subject


@dataclass(frozen=True)
class Replayed:
    """The timeline, and what to take the moments of."""

    text: str
    subject: Subject
    loaded: scenario_file.ScenarioFile


def replay(
    report: Report, file: Path, target: subjects.Target, known: Path | None, progress: engines.Progress
) -> Replayed:
    """Fill ``report`` and return what happened.

    A file that names a finding asks whether it is there: if it is, the run fails, known or not, so that a search for
    the change that fixed it can go by the exit code. Anything else that is seen fails if it is not recorded.
    """
    loaded = scenario_file.load(file)
    records = findings.known_for(findings.load(known), target.release)
    subject = subjects.open_subject(target, progress)
    result = engines.replay(subject, loaded.scenario)
    asked = loaded.finding.identity if loaded.finding else None
    seen: dict[tuple[str, str], Violation] = {}
    for violation in result.violations:
        seen.setdefault(violation.identity, violation)
    status = {record.identity: record.status for record in records.records}
    outcome: Outcome
    for identity, violation in seen.items():
        if identity in status:
            verdict, fails = f"known: recorded as {status[identity]}", False
        elif identity in result.follows:
            verdict, fails = "consequence: it came with the violation that ended the run", False
        else:
            verdict, fails = "new: not recorded for this release", True
        if identity == asked:
            verdict, fails = f"reproduced ({verdict})", True
        outcome = "fail" if fails else "info"
        report.rows.append(Row("finding", " ".join(identity), verdict, outcome, violation.witness))
    if asked is not None and asked not in seen:
        why = "another violation ended the run before it could show" if result.spoiled else "not shown by this scenario"
        verdict, outcome = ("undetermined", "undetermined") if result.spoiled else ("gone", "pass")
        report.rows.append(Row("finding", " ".join(asked), verdict, outcome, why))
    evaluations = sum(result.evaluations.values())
    if result.error:
        report.rows.append(Row("run", "replay", "error", "error", f"the checker failed: {result.error}"))
    elif evaluations == 0:
        report.rows.append(Row("run", "replay", "undetermined", "undetermined", "no invariant was exercised"))
    report.facts.update(steps=result.steps, evaluations=evaluations, violations=len(seen))
    if seen:
        new = seen.keys() - status.keys() - result.follows
        report.facts.update(new=len(new), known=len(seen.keys() & status.keys()))
        report.only_known = True
    if asked is not None:
        report.facts["reproduced"] = "yes" if asked in seen else "no"
    return Replayed(result.text, subject, loaded)
