"""A record of a known finding, made of a scenario file that names what it shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvproof import findings, scenario_file
from kvproof.errors import UsageError
from kvproof.findings import REFERENCE, SPECIFICATION, Record, Status
from kvproof.spec.scenario import ScenarioError

TO_BE_WRITTEN = "To be written: what was read in the release's code, and which line decides."


def make(file: Path, releases: Sequence[str], status: Status, reasoning: str, reference: str) -> Record:
    """The record of the finding in ``file``; of the release it was found on where no ``releases`` are given.

    Raises :class:`UsageError` where there is nothing to record, where releases can't be read, and where *confirmed* is
    said too early; :class:`ScenarioError` for a file that can't be read.
    """
    loaded = scenario_file.load(file)
    note = loaded.finding
    if note is None:
        raise UsageError(f"{file} names no finding: record a file that fuzz, prove, explore or trace cut has kept")
    if note.subject in (SPECIFICATION, REFERENCE):
        raise UsageError(f"{file} was found on {note.subject}: what breaks there is mended, not recorded")
    if not releases:
        if not note.subject.startswith("vllm=="):
            raise UsageError(f"{file} does not say on which release it was found: name it with --release")
        releases = [note.subject]
    if status == "confirmed":
        if not reasoning.strip():
            raise UsageError("confirmed means that the code has been read: say with --reasoning what it does")
        forced = next((action.kind for action in loaded.scenario.actions if action.forced), None)
        if forced:
            raise UsageError(f"{file} forces {forced}: it stays unconfirmed until a scenario without that shows it")
    made = Record(
        note.invariant,
        note.cause,
        list(dict.fromkeys(_plain(release.strip().removeprefix("vllm==")) for release in releases)),
        status,
        reference,
        reasoning.strip() or f"{TO_BE_WRITTEN} Seen: {note.witness or note.cause}.",
        note.where,
        scenario_file.to_data(loaded.scenario),
        drained=note.action >= len(loaded.scenario.actions),
    )
    try:
        findings.check(made)
    except ScenarioError as error:
        raise UsageError(f"--release: {error}: write it as in 0.26.0 or '>=0.27,<0.28'") from error
    return made


def _plain(release: str) -> str:
    """Builds of a release are that release: under its own name a record is found for all of them."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(release).base_version
    except InvalidVersion:  # a range, or nothing that can be read
        return release.strip()


def text(record: Record) -> str:
    """What is written: as the records that come with kvproof are."""
    data = msgspec.to_builtins(record)
    if not record.drained:
        del data["drained"]  # few are
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
