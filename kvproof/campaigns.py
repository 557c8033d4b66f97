"""A campaign in a folder: a search that goes on from what earlier runs found and kept, however they ended.

``findings/`` has one scenario file for each invariant and cause (and ``findings/other-settings/`` the same in other
settings), ``corpus/`` what reached something new, as a Hypothesis example database whose values are scenarios, and
``runs/`` one file for each run. Every file is whole or not there, and none is needed to read another: runs at the same
time on one folder take seeds of their own and add to it side by side.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvproof import engines, scenario_file, subjects
from kvproof.campaign_files import (
    VERSION,
    Entry,
    Identity,
    RunNote,
    finding_name,
    read_entries,
    read_findings,
    read_runs,
    where,
)
from kvproof.errors import UsageError, one_line, require_folder
from kvproof.options import MOST_SEED
from kvproof.recorded import KnownFinding
from kvproof.scenario_file import ScenarioFile
from kvproof.spec.finding import Finding
from kvproof.spec.scenario import Scenario, ScenarioError

if TYPE_CHECKING:
    from kvproof.models.stateful.corpus import Corpus
    from kvproof.models.stateful.notes import Kept

FOLDERS: Final = ("findings", "corpus", "runs")
KEY: Final = b"kvproof scenarios"
"""Under which the example database has them."""

MOST_KEPT: Final = 1_000
NOT_SMALL: Final = "as it was found, not made small"
"""The note of a scenario that a run left behind before it was reduced."""

_SECONDS_BETWEEN_NOTES: Final = 5.0
_MOST_TRIED: Final = 100_000


class Totals(msgspec.Struct, frozen=True):
    """What all runs of a campaign did together, with this one, which is number ``run``. ``findings`` are of this
    release, ``kept`` scenarios are in the corpus."""

    run: int
    steps: int
    examples: int
    seconds: float
    findings: int
    kept: int
    new_kept: int

    def words(self) -> str:
        return (
            f"all runs together: {self.steps:,} steps, {self.examples:,} engines, {self.seconds:,.0f} s, "
            f"found that was not on record: {self.findings}; "
            f"{self.kept:,} scenarios kept, {self.new_kept:,} by this run"
        )


def require(folder: Path) -> None:
    """Refuse a folder that holds something else, or that nothing can be written to. Raises :class:`UsageError`."""
    require_folder(folder, "the campaign")
    try:
        inside = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    except OSError as error:
        raise UsageError(f"can't read the campaign {folder}: {error.strerror or error}") from error
    if inside and not inside & set(FOLDERS):
        raise UsageError(f"{folder} holds something else than a campaign: name a new folder")
    for name in FOLDERS:
        require_folder(folder / name, "the campaign")


class Folder:
    """A campaign's folder, read for a run on ``target`` whose code has the digest ``code``.

    Files that can't be read are passed over with a line, and left where they are. What can't be written is said once,
    and is the :attr:`problem`. Implements :class:`kvproof.models.stateful.corpus.Journal`.
    Raises :class:`UsageError` as :func:`require` does.
    """

    def __init__(self, folder: Path, target: subjects.Target, code: str, progress: engines.Progress) -> None:
        from hypothesis.database import DirectoryBasedExampleDatabase

        require(folder)
        self.problem = ""
        self._folder, self._target, self._code, self._say = folder, target, code, progress
        self._database = DirectoryBasedExampleDatabase(folder / "corpus")
        self._runs = list(read_runs(folder / "runs", progress))
        entries = read_entries(self._database.fetch(KEY), str(folder / "corpus"), progress)
        self._findings = read_findings(folder / "findings", where(target), progress)
        self._outdated: set[Identity] = set()
        self._reached = {one for entry, _ in entries for one in entry.reached}
        self._new_kept = 0
        self._stored = self._count()
        self.corpus: Corpus = self._corpus(entries)
        self._note: RunNote | None = None
        self._began = self._noted = time.monotonic()
        progress(f"campaign {folder}: {len(self._runs)} runs so far, {len(entries)} scenarios kept")

    # -- this run -----------------------------------------------------------------------------------------------------

    def claim(self, seed: int) -> int:
        """The seed of this run: ``seed``, or the next that no run on this code has. Raises :class:`UsageError`."""
        began = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        for one in range(seed, min(seed + _MOST_TRIED, MOST_SEED + 1)):
            note = RunNote(VERSION, self._target.text, self._code, one, began)
            try:
                self._file(note).parent.mkdir(parents=True, exist_ok=True)
                if not _claimed(self._file(note), scenario_file.encoded(note)):
                    continue
            except OSError as error:
                raise UsageError(f"can't write to the campaign {self._folder}: {error.strerror or error}") from error
            self._note, self._began = note, time.monotonic()
            if one != seed:
                self._say(f"an earlier run had seed {seed} on this code: going on with {one}")
            return one
        raise UsageError(f"seeds from {seed} on were all used in this campaign: give another --seed")

    def end(self, campaign: engines.Campaign | None, ended: str) -> Totals:
        """Write down how the run went, and sum up. ``None``: it never came to search."""
        from kvproof.models.stateful.corpus import AGAIN

        if campaign is not None:
            self._update(
                steps=campaign.steps,
                examples=campaign.examples,
                seconds=round(campaign.seconds, 1),
                again=not campaign.interrupted and campaign.coverage.get(AGAIN, 0) >= len(self.corpus.again),
            )
        self._update(ended=ended)
        self._write_note()
        stored = self._count()
        if stored < self._stored + self._new_kept:
            self._fail(self._folder / "corpus", "not all that this run kept is there")
        notes = [*self._runs, *([self._note] if self._note is not None else [])]
        return Totals(
            run=len(notes),
            steps=sum(note.steps for note in notes),
            examples=sum(note.examples for note in notes),
            seconds=round(sum(note.seconds for note in notes), 1),
            findings=len(self._findings),
            kept=stored,
            new_kept=self._new_kept,
        )

    # -- what it goes on from -----------------------------------------------------------------------------------------

    def earlier(self) -> list[KnownFinding]:
        """What earlier runs found of this release: ``reference`` says which, ``reasoning`` is the witness."""
        told = []
        for identity, (file, loaded) in self._findings.items():
            first = next((n for n, note in enumerate(self._runs, 1) if identity in note.findings), None)
            run = (
                f"run {first} of this campaign ({self._runs[first - 1].began[:10]})"
                if first
                else "an earlier run of it"
            )
            witness = loaded.finding.witness if loaded.finding else ""
            told.append(KnownFinding(*identity, "", run, witness, loaded.scenario.to_dict(), str(file)))
        return told

    def is_small(self, identity: Identity) -> bool:
        return identity in self._findings and self._findings[identity][1].scenario.note != NOT_SMALL

    def outdate(self, identity: Identity) -> None:
        """The scenario on file shows it no more: whatever does may take its place."""
        self._outdated.add(identity)

    def _corpus(self, entries: list[tuple[Entry, Scenario]]) -> Corpus:
        """All that was kept or found is varied. What was kept on other code, or is not made small, is run again."""
        from kvproof.models.stateful.corpus import Corpus

        seen = any(note.again and note.code == self._code for note in self._runs)
        found = [loaded.scenario for _, loaded in self._findings.values()]
        again = [scenario for scenario in found if scenario.note == NOT_SMALL]
        again += [scenario for entry, scenario in entries if entry.code != self._code and not seen]
        every = [*(scenario for _, scenario in entries), *found]
        plain = [tuple(replace(scenario, note="") for scenario in some) for some in (again, every)]
        return Corpus(plain[0], plain[1], frozenset(self._reached))

    # -- the journal --------------------------------------------------------------------------------------------------

    def kept(self, one: Kept) -> None:
        new = sorted(set(one.reached) - self._reached)
        if not new or self._stored + self._new_kept >= MOST_KEPT:
            return
        # Where the database can't write, it says nothing: ``end`` looks.
        self._database.save(KEY, scenario_file.encoded(Entry(VERSION, self._code, new, one.scenario.to_dict())))
        self._reached.update(new)
        self._new_kept += 1

    def found(self, finding: Finding, small: bool) -> None:
        self.keep(finding, small)

    def keep(self, finding: Finding, small: bool = True) -> str:
        """Keep a finding, or the smaller one that is there. Returns its file, empty where it can't be written."""
        from kvproof.models.stateful.shrink import size

        identity = finding.violation.identity
        held = self._held(identity)
        if held is not None and identity not in self._outdated and self.is_small(identity):
            if not small or size(held[1].scenario) <= size(finding.scenario):
                return str(held[0])
        elif held is None and self._note is not None and identity not in self._note.findings:
            self._update(findings=[*self._note.findings, identity])
            self._write_note()
        scenario = replace(finding.scenario.trimmed(), note="" if small else NOT_SMALL)
        return self._save(self._folder / "findings" / finding_name(self._target, identity), finding, scenario)

    def _held(self, identity: Identity) -> tuple[Path, ScenarioFile] | None:
        """What is there of it now: a run beside this one may have kept it meanwhile, somebody may have taken it away.
        What can't be read makes room for what can, and stays beside it."""
        named = self._folder / "findings" / finding_name(self._target, identity)
        file, _ = self._findings.pop(identity, (named, None))
        try:
            loaded = scenario_file.load(file)
        except ScenarioError as error:
            if file.exists():
                aside = file.with_name(f"{file.name}.unread")
                with contextlib.suppress(OSError):
                    file.replace(aside)
                    self._say(f"{one_line(str(error))}: moved to {aside}")
            return None
        self._findings[identity] = (file, loaded)
        return file, loaded

    def keep_other(self, finding: Finding) -> str:
        """The same in another setting, beside the one that stands for it."""
        name = finding_name(self._target, finding.violation.identity).removesuffix(".json")
        text = json.dumps(finding.scenario.to_dict(), sort_keys=True)
        name = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
        file = self._folder / "findings" / "other-settings" / name
        return self._save(file, finding, finding.scenario, stands=False)

    def _save(self, file: Path, finding: Finding, scenario: Scenario, *, stands: bool = True) -> str:
        try:
            scenario_file.save(file, scenario, finding)
        except OSError as error:
            self._fail(file, error.strerror or str(error))
            return ""
        if stands:
            self._outdated.discard(finding.violation.identity)
            self._findings[finding.violation.identity] = (file, ScenarioFile(scenario))
        return str(file)

    def went(self, steps: int, examples: int) -> None:
        now = time.monotonic()
        self._update(steps=steps, examples=examples, seconds=round(now - self._began, 1))
        if now - self._noted >= _SECONDS_BETWEEN_NOTES:
            self._write_note()

    # -- files --------------------------------------------------------------------------------------------------------

    def _file(self, note: RunNote) -> Path:
        return self._folder / "runs" / f"{note.code}-{note.seed}.json"

    def _update(self, **changes: Any) -> None:
        if self._note is not None:
            self._note = msgspec.structs.replace(self._note, **changes)

    def _write_note(self) -> None:
        self._noted = time.monotonic()
        if self._note is not None:
            try:
                scenario_file.write_whole(self._file(self._note), scenario_file.encoded(self._note).decode() + "\n")
            except OSError as error:
                self._fail(self._file(self._note), error.strerror or str(error))

    def _fail(self, file: Path, reason: str) -> None:
        if not self.problem:
            self.problem = f"can't keep {file}: {reason}: free some room, and what comes is kept"
            self._say(self.problem)

    def _count(self) -> int:
        return sum(1 for _ in self._database.fetch(KEY))


def _claimed(file: Path, content: bytes) -> bool:
    """Make ``file``, unless it is there: then it is somebody's. Raises ``OSError``."""
    try:
        with file.open("xb", buffering=0) as made:
            try:
                made.write(content)
            except BaseException:
                file.unlink(missing_ok=True)
                raise
    except FileExistsError:
        return False
    return True
