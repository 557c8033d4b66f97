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
from typing import Any

import msgspec

from kvproof import engines, findings, scenario_file, subjects
from kvproof.errors import UsageError
from kvproof.report import Outcome, Row
from kvproof.spec.finding import Finding
from kvproof.spec.scenario import Scenario


class NewFinding(msgspec.Struct, frozen=True):
    """A finding nobody recorded. ``finding`` is ``Finding.to_dict()``; ``file`` is where it is kept, if it is; ``seen``
    is after how many seconds the campaign first came across it."""

    finding: dict[str, Any]
    file: str
    seen: float | None = None

    @property
    def invariant(self) -> str:
        return str(self.finding["invariant"])


class KnownFinding(msgspec.Struct, frozen=True):
    """A record for this release. ``seen`` is after how many seconds the campaign came across it, if it did."""

    invariant: str
    cause: str
    status: str
    reference: str
    reasoning: str
    scenario: dict[str, Any] | None
    seen: float | None


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
    findings: list[NewFinding]
    known: list[KnownFinding]
    errors: list[str]
    """Mistakes of a checker, or lost workers: with any, nothing is claimed beyond the findings."""


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
    new = [finding for finding in campaign.findings if finding.violation.identity not in known.identities]
    first_seen = dict(campaign.first_seen)
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
        findings=[_keep(f, options.out, target, progress, first_seen.get(f.violation.identity)) for f in new],
        known=[
            KnownFinding(
                r.invariant, r.cause, r.status, r.reference, r.reasoning, r.scenario, first_seen.get(r.identity)
            )
            for r in known.records
        ],
        errors=list(campaign.errors),
    )


def check_folder(folder: Path) -> None:
    """Refuse a folder that findings can't be written to now, rather than after a long search."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise UsageError(f"can't keep findings in {folder}: {place} is not a folder")


def _keep(
    finding: Finding, out: Path, target: subjects.Target, progress: engines.Progress, seen: float | None
) -> NewFinding:
    file = out / _file_name(finding, target)
    try:
        scenario_file.save(file, finding.scenario, finding)
    except OSError as error:
        # The finding is still printed in full: losing the file must not lose what was found.
        progress(f"can't keep {file}: {error.strerror or error}")
        return NewFinding(finding.to_dict(), "", seen)
    return NewFinding(finding.to_dict(), str(file), seen)


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
    """The record as rows: one per invariant of the catalogue, then one per finding, the new ones first."""
    return [
        *_invariant_rows(record),
        *(_new_row(found, record.subject) for found in record.findings),
        *(_known_row(known, show_known) for known in record.known),
        *(Row("run", "fuzz", "error", "error", error) for error in record.errors),
    ]


def _invariant_rows(record: FuzzRecord) -> Iterable[Row]:
    new = {found.invariant for found in record.findings}
    known = {found.invariant for found in record.known if found.seen is not None}
    for entry in engines.catalogue():
        count = record.evaluations.get(entry.id, 0)
        detail = f"{count:,} evaluations in {record.steps:,} steps"
        verdict: str
        outcome: Outcome
        if entry.id in new:
            verdict, outcome = "broken", "fail"
        elif entry.id in known:
            verdict, outcome = "broken (known)", "info"
        elif entry.family not in record.families:
            verdict, outcome = "not applicable", "skip"
            detail = f"this subject can't show the family {entry.family}"
        elif count == 0:
            verdict, outcome = "undetermined", "undetermined"
            detail = f"never exercised in {record.steps:,} steps"
        else:
            verdict, outcome = "fuzzed, holds", "pass"
        data = {"evaluations": count, "family": entry.family}
        yield Row("invariant", entry.id, verdict, outcome, detail, statement=entry.statement, data=data)


def _new_row(found: NewFinding, subject: str) -> Row:
    finding = found.finding
    scenario = Scenario.from_dict(finding["scenario"])
    at = finding["action"] + 1
    when = f"at action {at} of {len(scenario.actions)}" if at <= len(scenario.actions) else "when all was drained"
    forced = " (needs a forced action: unconfirmed until it is reproduced without one)" if scenario.forced else ""
    replay = f"kept in {found.file}\nreplay: {replay_command(found.file, subject)}" if found.file else "not kept"
    return Row(
        kind="finding",
        id=f"{found.invariant} {finding['cause']}",
        verdict="new",
        outcome="fail",
        detail=str(finding["witness"]),
        text="\n".join([str(finding["witness"]), f"seen {when}{forced}", scenario.text(), replay]),
        data={**finding, "file": found.file},
    )


def _known_row(known: KnownFinding, show: bool) -> Row:
    seen = known.seen is not None
    what = ", ".join(part for part in (known.status, known.reference) if part)
    text = ""
    if show and known.scenario is not None:
        text = f"{known.reasoning}\n{Scenario.from_dict(known.scenario).text()}"
    return Row(
        kind="finding",
        id=f"{known.invariant} {known.cause}",
        verdict="known" if seen else "not seen",
        outcome="info",
        detail=f"{what}: {known.reasoning}" if seen else f"recorded for this release ({what}), but gone or not reached",
        text=text,
        data=msgspec.to_builtins(known),
    )
