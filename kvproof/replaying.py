"""Running a scenario again, and saying whether what it showed is still there."""

from __future__ import annotations

from pathlib import Path

from kvproof import engines, findings, scenario_file, subjects
from kvproof.report import Report, Row
from kvproof.spec.finding import Violation


def replay(report: Report, file: Path, target: subjects.Target, known: Path | None, progress: engines.Progress) -> str:
    """Fill ``report`` and return the timeline.

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
    for violation in seen.values():
        record = next((r for r in records.records if r.identity == violation.identity), None)
        if violation.identity == asked:
            verdict, fails = "reproduced", True
        elif record is not None:
            verdict, fails = f"known ({record.status})", False
        else:
            verdict, fails = "new", True
        title = " ".join(violation.identity)
        report.rows.append(Row("finding", title, verdict, "fail" if fails else "info", violation.witness))
    if asked is not None and asked not in seen:
        report.rows.append(Row("finding", " ".join(asked), "gone", "pass", "this scenario does not show it here"))
    evaluations = sum(result.evaluations.values())
    if result.error:
        report.rows.append(Row("run", "replay", "error", "error", f"the checker failed: {result.error}"))
    elif evaluations == 0:
        report.rows.append(Row("run", "replay", "undetermined", "undetermined", "no invariant was exercised"))
    report.facts.update(steps=result.steps, evaluations=evaluations, violations=len(seen))
    if asked is not None:
        report.facts["reproduced"] = "yes" if asked in seen else "no"
    return result.text
