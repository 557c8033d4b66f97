"""Known findings: what is already recorded of a release, so that a run fails on what is new.

One JSON file per finding, in ``findings/`` of the project, which is part of the package. A record names the invariant
and the cause, the releases that show it, what is known about it and the scenario that shows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from kvproof import scenario_file
from kvproof.datafiles import data_files
from kvproof.errors import UsageError
from kvproof.spec.finding import Violation
from kvproof.spec.scenario import ScenarioError

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

PACKAGE = "kvproof.known"
REFERENCE = "reference"
"""What stands for a release where the subject is the reference engine."""

SPECIFICATION = "spec"
"""What stands for a release where the subject is the abstract machine."""

Status = Literal["confirmed", "unconfirmed", "adapter"]
"""``confirmed``: a fault of the release. ``unconfirmed``: the real scheduler may not reach it. ``adapter``: an artefact
of how the release is driven."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One known finding. ``releases`` is a list of versions or ranges such as ``>=0.27,<0.28``, or one of either.

    ``where`` holds what a violation says of its place, as far as an exported test has to know it. ``drained``: it shows
    only once all is drained, so that an exported test does that, too.
    """

    invariant: str
    cause: str
    releases: list[str] | str
    status: Status
    reference: str
    reasoning: str
    where: dict[str, str | int] = {}
    scenario: dict[str, Any] | None = None
    drained: bool = False

    @property
    def identity(self) -> tuple[str, str]:
        return (self.invariant, self.cause)

    def violation(self) -> Violation:
        """What the record says that its scenario shows."""
        return Violation(self.invariant, self.cause, "", tuple(self.where.items()))


@dataclass(frozen=True)
class Known:
    """The records that apply to one release."""

    records: tuple[Record, ...]

    @property
    def identities(self) -> frozenset[tuple[str, str]]:
        return frozenset(record.identity for record in self.records)


def load(folder: Path | None = None) -> tuple[Record, ...]:
    """All records, of ``folder`` or else of this package. Raises :class:`UsageError` naming the damaged file."""
    return tuple(_read(file, somebodys=folder is not None) for file in data_files(folder, PACKAGE, "known findings"))


def _read(file: Traversable, somebodys: bool) -> Record:
    """One record. ``somebodys``: it did not come with kvproof, so its invariant may be one that there isn't."""
    try:
        data = scenario_file.decode(file.read_bytes())
        if isinstance(data, dict) and "kvproof_scenario" in data:
            raise UsageError(f"{file} is a scenario file, not a record: make one with kvproof record {file} -o RECORD")
        record: Record = scenario_file.convert(data, Record)
        if somebodys:
            scenario_file.check_invariant(record.invariant)
        if record.scenario is not None:
            scenario_file.parse(record.scenario)
        check(record)
    except (ScenarioError, OSError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UsageError(f"known finding {file} can't be read: {reason}") from error
    return record


def check(record: Record) -> None:
    """Refuse releases that can't be read as versions or ranges. Raises :class:`ScenarioError`."""
    _ranges(record)


def known_for(records: Iterable[Record], release: str) -> Known:
    """The records that apply to ``release``. To a checkout that was not built (empty), or was built after the newest
    release that any of them names (``0.33.1.dev5``), those of that release: an old fault that is back there is none
    that is known.

    None does to the abstract machine and the reference engine: what breaks there is mended, not recorded.
    """
    if release in (SPECIFICATION, REFERENCE):
        return Known(())
    records = tuple(records)
    newest = _newest(records)
    release = newest if not release or _built_after(release, newest) else release
    return Known(tuple(record for record in records if not release or _covers(record, release)))


def names(records: Iterable[Record], release: str) -> bool:
    """Whether any of them says of ``release`` itself, by number or range, that it is wrong there: what no record names
    nobody has asked yet."""
    return bool(release) and any(_covers(record, release) for record in records)


def _newest(records: Iterable[Record]) -> str:
    """The newest release that one of them names by itself; empty where they name ranges only."""
    from packaging.version import Version

    clauses = [clause for record in records for one in _ranges(record) for clause in one if clause.operator == "=="]
    return max((clause.version for clause in clauses if "*" not in clause.version), key=Version, default="")


def _built_after(release: str, newest: str) -> bool:
    """Whether ``release`` is a build on the way to the one after ``newest``."""
    from packaging.version import InvalidVersion, Version

    try:
        version = Version(release)
        return version.is_prerelease and version > Version(newest)
    except InvalidVersion:
        return False


def _covers(record: Record, release: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        version = Version(Version(release).base_version)  # a build of 0.33.0 with local changes is known as 0.33.0
    except InvalidVersion:
        return True
    return any(one.contains(version, prereleases=True) for one in _ranges(record))


def _ranges(record: Record) -> list[SpecifierSet]:
    """The releases as sets. Raises :class:`ScenarioError`."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    ranges = [record.releases] if isinstance(record.releases, str) else record.releases
    if not all(one.strip() for one in ranges):  # to the library that means all releases
        raise ScenarioError("it has an empty release range")
    try:
        return [SpecifierSet(one if one[:1] in "<>=!~" else f"=={one}") for one in ranges]
    except InvalidSpecifier as error:
        raise ScenarioError(f"it has an unreadable release range: {error}") from error
