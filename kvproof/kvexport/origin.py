"""Where a violation is known from: the subject that it was found on, or the record of a known finding."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvproof import findings, scenario_file
from kvproof.findings import Record
from kvproof.spec.finding import Violation
from kvproof.spec.scenario import Scenario


@dataclass(frozen=True)
class Origin:
    """Whatever is not known is empty.

    ``place`` is the subject, or the releases of a record in words. ``summary`` is a record's reasoning.
    ``reference`` is where others can read about it. ``releases`` are the versions that show it. ``ours`` is whether the
    subject is none of vLLM, so that nothing is known of any release.
    """

    place: str = ""
    summary: str = ""
    reference: str = ""
    releases: tuple[str, ...] = ()
    ours: bool = False


OURS = {findings.REFERENCE: "kvproof's reference engine", findings.SPECIFICATION: "kvproof's abstract machine"}
"""Subjects that are no vLLM, in words."""

LONGEST = 1200
"""Letters of a reasoning in a docstring."""


def origin(scenario: Scenario, violation: Violation | None, subject: str) -> Origin:
    """What is known. A record counts if it is of the subject's release; without a subject, if it has this scenario."""
    if subject in OURS:
        return Origin(OURS[subject], reference=_catalogued(violation) if violation else "", ours=True)
    version = subject.partition("==")[2]
    releases: tuple[str, ...] = (version,) if version else ()
    if violation is None:
        return Origin(subject, releases=releases)
    records = [record for record in findings.load() if record.identity == violation.identity]
    if subject:
        records = list(findings.known_for(records, version).records)
    else:
        records = [r for r in records if r.scenario and scenario_file.parse(r.scenario).scenario == scenario]
    if len(records) != 1:
        return Origin(subject, reference=_catalogued(violation), releases=releases)
    record = records[0]
    reference = record.reference.rstrip(".")
    if subject:
        return Origin(subject, reference=reference, releases=releases)
    releases = _releases(record)
    return Origin(_range(releases), _summary(record), reference, releases)


def _catalogued(violation: Violation) -> str:
    """The invariant's own references: numbers of pull requests and issues."""
    from kvproof.engines import catalogue

    entry = next((entry for entry in catalogue() if entry.id == violation.invariant), None)
    numbers: Iterable[str] = getattr(entry, "provenance", ())
    known = ", ".join(number for number in numbers if re.fullmatch(r"(PR|issue) \d+", number))
    return f"vLLM {known} (of the invariant, not surely of this fault)" if known else ""


def _releases(record: Record) -> tuple[str, ...]:
    """The versions that a record names; ranges name none."""
    named = [record.releases] if isinstance(record.releases, str) else record.releases
    return tuple(release for release in named if release[:1].isdigit())


def _range(releases: tuple[str, ...]) -> str:
    if not releases:
        return ""
    return f"vLLM {releases[0]}" + (f" … {releases[-1]}" if len(releases) > 1 else "")


def _summary(record: Record) -> str:
    if record.status != "confirmed":
        return "Not confirmed: the releases' code has not been read for it."
    whole = record.reasoning.strip().rstrip(".") + "."
    if len(whole) <= LONGEST:
        return whole
    # The sentence that decides is often the last of several: whole sentences, and where the others are.
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", whole)
    while len(sentences) > 1 and len(" ".join(sentences)) > LONGEST:
        sentences.pop()
    return f"{' '.join(sentences)} (The rest is in the reasoning of kvproof's record of this finding.)"
