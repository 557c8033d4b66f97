"""One fuzz campaign: run it, keep every finding as a file, and tell the known ones from the new.

The result is a :class:`FuzzRecord`, plain data that is also what ``--json`` writes, so that ``verify`` can run a
campaign in a process of its own (a release is imported into the process that drives it) and read the outcome.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvproof import engines, findings, scenario_file, subjects
from kvproof.errors import UsageError
from kvproof.report import Row
from kvproof.spec.finding import Finding
from kvproof.spec.scenario import Scenario


class FoundRecord(msgspec.Struct, frozen=True):
    """One finding. ``finding`` is ``Finding.to_dict()``; ``file`` is where its scenario was kept (empty: nowhere)."""

    state: Literal["new", "known"]
    finding: dict[str, Any]
    text: str
    file: str
    status: str = ""
    reference: str = ""

    @property
    def identity(self) -> tuple[str, str]:
        return (str(self.finding["invariant"]), str(self.finding["cause"]))


class FuzzRecord(msgspec.Struct, frozen=True):
    """What a campaign did: counts, findings, and how often each invariant was judged for real."""

    subject: str
    release: str
    seed: int
    steps: int
    examples: int
    seconds: float
    interrupted: bool
    families: list[str]
    evaluations: dict[str, int]
    coverage: dict[str, int]
    findings: list[FoundRecord]
    not_seen: list[tuple[str, str, str]]
    """Invariant, cause and status of the records for this release that the campaign did not come across."""


class Options(msgspec.Struct, frozen=True):
    """How long and how wide to search. ``seconds`` bounds the time besides ``steps``."""

    seed: int
    steps: int
    seconds: float | None
    workers: int
    out: Path
    known: Path | None


def fuzz(target: subjects.Target, options: Options, progress: engines.Progress) -> FuzzRecord:
    """Run the campaign. What was found before an interrupt is in the record, and on disk."""
    known = findings.known_for(findings.load(options.known), target.release)
    check_folder(options.out)
    subject = subjects.open_subject(target, progress)
    campaign = engines.campaign(
        subject,
        seed=options.seed,
        steps=options.steps,
        seconds=options.seconds,
        workers=options.workers,
        known=known.identities,
        progress=progress,
    )
    found = [_record(finding, known, options.out, target, progress) for finding in campaign.findings]
    return FuzzRecord(
        subject=target.text,
        release=target.release,
        seed=campaign.seed,
        steps=campaign.steps,
        examples=campaign.examples,
        seconds=campaign.seconds,
        interrupted=campaign.interrupted,
        families=sorted(subject.families()),
        evaluations=dict(campaign.evaluations),
        coverage=dict(campaign.coverage),
        findings=found,
        not_seen=[(r.invariant, r.cause, r.status) for r in known.not_seen(f.identity for f in found)],
    )


def check_folder(folder: Path) -> None:
    """Refuse a folder that findings can't be written to now, rather than after a long search."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise UsageError(f"can't keep findings in {folder}: {place} is not a folder")


def _record(
    finding: Finding, known: findings.Known, out: Path, target: subjects.Target, progress: engines.Progress
) -> FoundRecord:
    file = out / _file_name(finding, target)
    try:
        scenario_file.save(file, finding.scenario, finding)
        kept = str(file)
    except OSError as error:
        # The finding is still printed in full: losing the file must not lose what was found.
        progress(f"can't keep {file}: {error.strerror or error}")
        kept = ""
    record = known.find(finding.violation.identity)
    return FoundRecord(
        state="new" if record is None else "known",
        finding=finding.to_dict(),
        text=finding.scenario.text(),
        file=kept,
        status="" if record is None else record.status,
        reference="" if record is None else record.reference,
    )


def _file_name(finding: Finding, target: subjects.Target) -> str:
    """The same finding by the same scenario gets the same name, so that a repeat run adds no second file."""
    digest = hashlib.sha256(json.dumps(finding.scenario.to_dict(), sort_keys=True).encode()).hexdigest()[:8]
    where = f"vllm-{target.release}" if target.release else "vllm"
    return (
        re.sub(r"[^\w.+-]+", "_", f"{where}-{finding.violation.invariant}-{finding.violation.cause}-{digest}") + ".json"
    )


def replay_command(file: str, subject: str) -> str:
    return f"kvproof replay {shlex.quote(file)} --on {shlex.quote(subject)}"


def rows(record: FuzzRecord, *, show_known: bool = False) -> list[Row]:
    """The record as rows: one per invariant of the catalogue, then one per finding, then what was not seen."""
    return [
        *_invariant_rows(record),
        *(_finding_row(f, record.subject, show_known) for f in record.findings),
        *_gone(record),
    ]


def _invariant_rows(record: FuzzRecord) -> Iterable[Row]:
    states: dict[str, set[str]] = {}
    for found in record.findings:
        states.setdefault(found.identity[0], set()).add(found.state)
    for entry in engines.catalogue():
        count = record.evaluations.get(entry.id, 0)
        seen = states.get(entry.id, set())
        detail = f"{count:,} evaluations in {record.steps:,} steps"
        data = {"evaluations": count, "family": entry.family}
        # A new violation is counted once, in its finding's row; here it is only told.
        if "new" in seen:
            yield Row("invariant", entry.id, "broken", "fail", detail, entry.statement, data=data)
        elif seen:
            yield Row("invariant", entry.id, "broken (known)", "info", detail, entry.statement, data=data)
        elif entry.family not in record.families:
            detail = f"this subject can't show the family {entry.family}"
            yield Row("invariant", entry.id, "not applicable", "skip", detail, entry.statement, data=data)
        elif count == 0:
            detail = f"never exercised in {record.steps:,} steps"
            yield Row("invariant", entry.id, "undetermined", "undetermined", detail, entry.statement, data=data)
        else:
            yield Row("invariant", entry.id, "fuzzed, holds", "pass", detail, entry.statement, data=data)


def _finding_row(found: FoundRecord, subject: str, show_known: bool) -> Row:
    invariant, cause = found.identity
    finding = found.finding
    text = ""
    if found.state == "new" or show_known:
        scenario = Scenario.from_dict(finding["scenario"])
        forced = " (needs a forced action: unconfirmed until it is reproduced without)" if scenario.forced else ""
        text = "\n".join(
            [
                f"{finding['witness']}",
                f"seen at action {finding['action'] + 1} of {len(scenario.actions)}{forced}",
                found.text,
                f"kept in {found.file}\nreplay: {replay_command(found.file, subject)}" if found.file else "not kept",
            ]
        )
    detail = str(finding["witness"])
    if found.state == "known":
        detail = f"{found.status}, {found.reference}: {detail}"
    return Row(
        kind="finding",
        id=f"{invariant} {cause}",
        verdict=found.state,
        outcome="fail" if found.state == "new" else "info",
        detail=detail,
        text=text,
        data={**finding, "file": found.file, "status": found.status},
    )


def _gone(record: FuzzRecord) -> Iterable[Row]:
    for invariant, cause, status in record.not_seen:
        detail = f"recorded for this release ({status}), but gone or not reached in this run"
        yield Row("finding", f"{invariant} {cause}", "not seen", "info", detail)
