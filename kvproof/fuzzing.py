"""One fuzz campaign: run it, keep every finding as a file, and tell the known ones from the new.

Known findings that the campaign did not come across are looked for by their recorded scenarios at its end, so that each
is said to be there or gone.

The result is a :class:`FuzzRecord`, plain data that is also what ``--json`` writes, so that ``verify`` can run a
campaign in a process of its own (a release is imported into the process that drives it) and read the outcome.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvproof import campaigns, engines, recorded, scenario_file, subjects
from kvproof.campaign_files import code_of
from kvproof.recorded import KnownFinding
from kvproof.report import Outcome, Row
from kvproof.severity import severity
from kvproof.spec.finding import Finding
from kvproof.spec.scenario import Scenario
from kvproof.spec.subject import Subject
from kvproof.spread import ray_workers


class NewFinding(msgspec.Struct, frozen=True):
    """A finding nobody recorded. ``finding`` is ``Finding.to_dict()``; ``file`` is where it is kept, if it is; ``seen``
    is after how many seconds the campaign first came across it. ``others`` break the same in the same way in another
    setting, and may be another fault."""

    finding: dict[str, Any]
    file: str
    seen: float | None = None
    others: list[NewFinding] = []

    @property
    def invariant(self) -> str:
        return str(self.finding["invariant"])


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
    lacking: dict[str, str] = {}
    """Invariants that the subject has no mechanism for, and why."""
    ended: str = ""
    """What ended the campaign, in words."""
    earlier: list[KnownFinding] = []
    """What earlier runs of a campaign in a folder found, which nobody recorded."""
    totals: campaigns.Totals | None = None
    unsaved: str = ""
    """Why the folder lacks something; empty if it doesn't."""

    def facts(self) -> dict[str, int | float]:
        """The numbers of a report's result line. ``known`` counts those that were seen or that their scenario shows."""
        new = {(f.invariant, f.finding["cause"]) for f in self.findings}
        listed = [*self.known, *self.earlier]
        new |= {(invariant, cause) for known in listed for invariant, cause, _ in known.besides}
        gone = sum(known.gone for known in listed)
        facts: dict[str, int | float] = {"steps": self.steps, "examples": self.examples, "new": len(new)}
        facts["known"] = sum(known.seen is not None or bool(known.shown) for known in self.known)
        if self.totals is not None:
            facts["earlier"] = sum(not known.gone for known in self.earlier)
        facts |= {**({"gone": gone} if gone else {}), "seconds": self.seconds}
        if self.totals is not None:
            facts |= {"run": self.totals.run, "all_steps": self.totals.steps, "all_seconds": self.totals.seconds}
        return facts


class Options(msgspec.Struct, frozen=True):
    """How long and how wide to search. ``seconds`` bounds the time besides ``steps``. ``ray`` is the address of a Ray
    cluster whose workers search instead of forked ones (``local``: one that is started here; empty: none).
    ``campaign`` is a folder to go on from, where findings are kept instead of in ``out``."""

    seed: int
    steps: int
    seconds: float | None
    workers: int
    out: Path
    known: Path | None
    ray: str = ""
    campaign: Path | None = None


def fuzz(target: subjects.Target, options: Options, progress: engines.Progress) -> FuzzRecord:
    """Run the campaign. What was found before an interrupt is in the record, and on disk."""
    known = recorded.records_for(options.known, target.release)
    identities = frozenset(finding.identity for finding in known)
    if options.campaign is not None:
        campaigns.require(options.campaign)
    subject = subjects.open_subject(target, progress)
    folder = _go_on(target, options, identities, subject, progress)
    with contextlib.ExitStack() as stack:
        spread = None
        if options.ray:
            spread = stack.enter_context(ray_workers(options.ray, target.text, options.workers, progress))
        campaign = engines.campaign(
            subject,
            seed=folder.seed if folder else options.seed,
            steps=options.steps,
            seconds=options.seconds,
            workers=options.workers,
            known=identities | (folder.passed_over if folder else frozenset()),
            progress=progress,
            spread=spread,
            journal=folder.files if folder else None,
        )
    first_seen = dict(campaign.first_seen)
    # One that is gone stays so here: what is found of it is new.
    earlier = [one if one.gone else _seen(one, first_seen) for one in folder.earlier] if folder else []
    still = {finding.identity for finding in earlier if not finding.gone}

    def keep(finding: Finding, seen: float | None, stands: bool) -> NewFinding:
        if folder is None:
            return _keep(finding, options.out, target, progress, seen)
        file = folder.files.keep(finding) if stands else folder.files.keep_other(finding)
        return NewFinding(finding.to_dict(), file, seen)

    found = [finding for finding in campaign.findings if finding.violation.identity not in identities]
    kept = {
        f.violation.identity: msgspec.structs.replace(
            keep(f, first_seen.get(f.violation.identity), stands=True),
            others=[keep(other, other.seen, stands=False) for other in f.others],
        )
        for f in found
    }
    passed_over = identities | still | {finding.violation.identity for finding in found}
    seen = [_seen(finding, first_seen) for finding in known]
    told, errors, interrupted = recorded.look_again(subject, seen, passed_over, campaign.interrupted, progress)
    ended = _ended(campaign, options)
    return FuzzRecord(
        subject=target.text,
        release=target.release,
        seed=campaign.seed,
        steps=campaign.steps,
        examples=campaign.examples,
        seconds=campaign.seconds,
        interrupted=interrupted,
        families=sorted(subject.families()),
        evaluations=dict(campaign.evaluations),
        coverage=dict(campaign.coverage),
        findings=[finding for identity, finding in kept.items() if identity not in still],
        known=told,
        errors=[*(folder.errors if folder else ()), *campaign.errors, *errors],
        lacking=dict(subject.lacking()),
        ended=ended,
        earlier=[one for one in earlier if one.identity in still or one.identity not in kept],
        totals=folder.files.end(campaign, ended) if folder else None,
        unsaved=folder.files.problem if folder else "",
    )


def _seen(finding: KnownFinding, first_seen: Mapping[tuple[str, str], float]) -> KnownFinding:
    return msgspec.structs.replace(finding, seen=first_seen.get(finding.identity, finding.seen))


@dataclasses.dataclass(frozen=True)
class _GoneOn:
    """A campaign's folder, and what of earlier runs' findings its code still shows. ``passed_over`` need not be found
    again: it is still there, and its scenario is small."""

    files: campaigns.Folder
    seed: int
    earlier: list[KnownFinding]
    errors: list[str]
    passed_over: frozenset[tuple[str, str]]


def _go_on(
    target: subjects.Target,
    options: Options,
    recorded_ones: frozenset[tuple[str, str]],
    subject: Subject,
    progress: engines.Progress,
) -> _GoneOn | None:
    """Ask the code about what earlier runs found, before anything is searched. An interrupt goes through: all is on
    disk."""
    if options.campaign is None:
        return None
    files = campaigns.Folder(options.campaign, target, code_of(target), progress)
    seed = files.claim(options.seed)
    listed = [finding for finding in files.earlier() if finding.identity not in recorded_ones]
    asked = recorded_ones | {finding.identity for finding in listed}
    earlier, errors, interrupted = recorded.look_again(
        subject, listed, asked, False, progress, "findings of earlier runs"
    )
    if interrupted:
        files.end(None, "ended by an interrupt before the search")
        raise KeyboardInterrupt
    for finding in earlier:
        if finding.gone:
            files.outdate(finding.identity)
    passed_over = frozenset(one.identity for one in earlier if one.shown and files.is_small(one.identity))
    return _GoneOn(files, seed, earlier, errors, passed_over)


def _ended(campaign: engines.Campaign, options: Options) -> str:
    if campaign.interrupted:
        return "ended by an interrupt"
    # Where both bounds were passed it can't be told which came first: then a repeat is promised nothing.
    if options.seconds is not None and campaign.searched >= options.seconds:
        return f"ended by seconds={options.seconds:g}: a repeat may go further or less far"
    return f"ended by steps={options.steps}" if campaign.steps >= options.steps else "ended early"


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
    ours = target.kind in ("spec", "reference")
    where = f"vllm-{target.release}" if target.release and not ours else target.text.partition("@")[0]
    return (
        re.sub(r"[^\w.+-]+", "_", f"{where}-{finding.violation.invariant}-{finding.violation.cause}-{digest}") + ".json"
    )


def rows(record: FuzzRecord, *, show_known: bool = False) -> list[Row]:
    """The record as rows: one per invariant of the catalogue, then one per finding: new, earlier, gone, known, and of
    each the worst first.

    ``show_known``: known findings with their whole reasoning and their scenario.
    """
    new = [
        *(_new_row(found, record.subject) for found in record.findings),
        *(row for known in [*record.known, *record.earlier] for row in _besides_rows(known, record.subject)),
    ]
    told = [
        *_invariant_rows(record),
        *sorted(new, key=lambda row: severity(row.id.partition(" ")[0])),
        *(_earlier_row(one, record.subject) for one in sorted(record.earlier, key=lambda one: severity(one.invariant))),
        *(
            _known_row(known, record, show_known)
            for known in sorted(record.known, key=lambda known: (not known.gone, severity(known.invariant)))
        ),
        *(Row("run", "fuzz", "error", "error", error) for error in record.errors),
        *([_totals_row(record.totals)] if record.totals is not None else []),
    ]
    return [dataclasses.replace(row, subject=record.subject) for row in told]


def _invariant_rows(record: FuzzRecord) -> Iterable[Row]:
    new = {found.invariant for found in record.findings} | {one.invariant for one in record.earlier if not one.gone}
    new |= {invariant for known in [*record.known, *record.earlier] for invariant, _, _ in known.besides}
    known = {found.invariant for found in record.known if not found.gone}
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
        elif entry.id in record.lacking:
            verdict, outcome, detail = "not applicable", "skip", record.lacking[entry.id]
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
    again = scenario_file.replay_command(found.file, subject)
    replay = f"kept in {found.file}\nreplay: {again}" if found.file else "not kept"
    others = [f"in another setting, which may be another fault: {other.file}" for other in found.others if other.file]
    return Row(
        kind="finding",
        id=f"{found.invariant} {finding['cause']}",
        verdict="new",
        outcome="fail",
        detail=str(finding["witness"]),
        text="\n".join([str(finding["witness"]), f"seen {when}{forced}", scenario.text(), replay, *others]),
        data={**finding, "file": found.file},
    )


def _besides_rows(known: KnownFinding, subject: str) -> Iterable[Row]:
    """What a recorded scenario shows besides what it is recorded for is as new as what the search finds."""
    for invariant, cause, witness in known.besides:
        shown = f"shown by the recorded scenario of {known.invariant} {known.cause}"
        text = f"{witness}\n{shown}\nreplay: {scenario_file.replay_command(known.file, subject)}"
        yield Row("finding", f"{invariant} {cause}", "new", "fail", witness, text=text)


def _earlier_row(one: KnownFinding, subject: str) -> Row:
    """What an earlier run of the campaign found. Unless it is gone it fails this run as it did that one: nobody has
    mended or recorded it."""
    found = f"found by {one.reference}"
    outcome: Outcome = "fail"
    if one.gone:
        verdict, outcome = f"gone: {found}; its scenario no longer shows it", "info"
    elif one.seen is not None or one.shown:
        verdict = f"earlier: {found}, and still there"
    else:
        verdict, outcome = f"earlier: {found}, and not looked at now; {one.why}", "undetermined"
    text = f"{one.reasoning}\nkept in {one.file}\nreplay: {scenario_file.replay_command(one.file, subject)}"
    data = {**msgspec.to_builtins(one), "witness": one.reasoning}
    return Row("finding", f"{one.invariant} {one.cause}", verdict, outcome, one.reasoning, text=text, data=data)


def _totals_row(totals: campaigns.Totals) -> Row:
    return Row("run", "campaign", f"run {totals.run}", "info", totals.words(), data=msgspec.to_builtins(totals))


def _known_row(known: KnownFinding, record: FuzzRecord, show: bool) -> Row:
    what = ", ".join(part for part in (known.status, known.reference) if part)
    text = ""
    if show:
        text = f"{what}: {known.reasoning}"
        if known.scenario is not None:
            text += f"\n{Scenario.from_dict(known.scenario).text()}"
    pointer = f"record: {known.file}"
    if known.gone and record.release:
        pointer = f"update the record: {known.file} (it names {record.release})"
    return Row(
        kind="finding",
        id=f"{known.invariant} {known.cause}",
        verdict=known.verdict,
        outcome="info",
        detail=f"{what}: {first_sentence(known.reasoning)}",
        text=text,
        pointer=pointer,
        data=msgspec.to_builtins(known),
    )


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", text, maxsplit=1)[0]
