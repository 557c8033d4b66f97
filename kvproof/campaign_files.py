"""The files of a campaign's folder: what they say, and reading them. One that can't be read costs a line, no more."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from kvproof import engines, scenario_file, subjects
from kvproof.errors import one_line
from kvproof.models.sources import hash_of
from kvproof.scenario_file import ScenarioFile
from kvproof.spec.scenario import Scenario, ScenarioError

Identity = tuple[str, str]
VERSION: Final = 1
_DRIVEN: Final = ("vllm/v1", "vllm/distributed/kv_transfer", "vllm/config")
_OWN: Final = (
    "kvproof.models.stateful.campaign",
    "kvproof.spec.machine.subject",
    "kvproof.impl.vllm.subject",
    "kvproof.impl.reference.subject",
)

T = TypeVar("T")


class RunNote(msgspec.Struct, frozen=True):
    """One run of a campaign. ``findings`` are those that it was the first to come across. ``again``: all that was kept
    before it was run again on this ``code``. ``ended`` is empty until it has ended, and where it was killed."""

    kvproof_run: int
    subject: str
    code: str
    seed: int
    began: str
    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    findings: list[tuple[str, str]] = []
    again: bool = False
    ended: str = ""


class Entry(msgspec.Struct, frozen=True):
    """A value of the example database. ``code`` is what it was kept on."""

    kvproof_kept: int
    code: str
    reached: list[str]
    scenario: dict[str, Any]


def code_of(target: subjects.Target) -> str:
    """A digest of what is driven, and of what drives and judges it: where it is the same, nothing new comes of running
    the same scenario again."""
    digest = hashlib.sha256(f"{target.release} {hash_of(*_OWN)}".encode())
    tree = _tree(target)
    for root in [tree / part for part in _DRIVEN] if tree is not None else []:
        for file in sorted(file for file in root.rglob("*.py") if file.is_file()):  # no editor's lock
            digest.update(str(file.relative_to(root)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _tree(target: subjects.Target) -> Path | None:
    if target.kind == "release":
        from kvproof.impl.vllm.fetch import release_tree

        return release_tree(target.release)
    if target.kind == "installed":
        spec = importlib.util.find_spec("vllm")
        return Path(spec.origin).parent.parent if spec is not None and spec.origin else None
    return target.path


def where(target: subjects.Target) -> str:
    """What findings are kept for, as the beginning of their files' names. Builds of a release are that release."""
    if target.kind in ("spec", "reference"):
        return target.text
    return f"vllm-{target.release.partition('+')[0].partition('.dev')[0]}" if target.release else "vllm"


def finding_name(target: subjects.Target, identity: Identity) -> str:
    digest = hashlib.sha256(" ".join(identity).encode()).hexdigest()[:6]
    return re.sub(r"[^\w.+-]+", "_", f"{where(target)}-{'-'.join(filter(None, identity))}-{digest}") + ".json"


def read_runs(folder: Path, say: engines.Progress) -> Iterator[RunNote]:
    """The runs, in the order in which they began."""
    notes = []
    for file in _files(folder):
        note = _read(file.read_bytes, RunNote, "kvproof_run", str(file), say)
        if note is not None:
            notes.append(note)
    return iter(sorted(notes, key=lambda note: (note.began, note.seed)))


def read_entries(values: Iterable[bytes], place: str, say: engines.Progress) -> list[tuple[Entry, Scenario]]:
    """What the example database has, in an order that does not depend on the file system."""
    entries: list[tuple[Entry, Scenario]] = []
    unread = 0

    def count(_: str) -> None:
        nonlocal unread
        unread += 1

    for value in sorted(values):
        entry = _read(functools.partial(bytes, value), Entry, "kvproof_kept", "", count)
        if entry is not None:
            try:
                entries.append((entry, scenario_file.parse(entry.scenario).scenario))
            except ScenarioError:
                unread += 1
    if unread:
        say(f"{unread} kept scenarios in {place} can't be read, or are of another version: passed over")
    return entries


def read_findings(folder: Path, place: str, say: engines.Progress) -> dict[Identity, tuple[Path, ScenarioFile]]:
    """What was found of the release that ``place`` names (see :func:`where`)."""
    found: dict[Identity, tuple[Path, ScenarioFile]] = {}
    for file in _files(folder):
        if re.match(rf"{re.escape(place)}-[A-Z]", file.name) is None:
            continue
        try:
            loaded = scenario_file.load(file)
        except ScenarioError as error:
            say(f"passed over: {one_line(str(error))}")
            continue
        if loaded.finding is not None:
            found[loaded.finding.identity] = (file, loaded)
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.json") if not file.name.startswith("."))


def _read(content: Any, shape: type[T], mark: str, name: str, say: engines.Progress) -> T | None:
    try:
        data = scenario_file.decode(content())
        if isinstance(data, dict) and isinstance(data.get(mark), int) and data[mark] > VERSION:
            raise ScenarioError("written by a newer kvproof: upgrade it")
        return scenario_file.convert(data, shape)  # type: ignore[no-any-return]
    except (ScenarioError, OSError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        say(f"passed over: {name} can't be read: {one_line(str(reason))}")
        return None
