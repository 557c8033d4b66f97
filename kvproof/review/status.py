"""What checkers said last, in one file, with the digest of the rule that each spoke of; and where in vLLM the functions
are that our rules mirror.

A word about a rule that has changed since is *stale*: the site says so, and a test fails. ``kvproof spec refresh`` runs
again what is stale or missing.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvproof import engines
from kvproof.errors import CheckerError, UsageError, require_file
from kvproof.invariants.catalogue import CATALOGUE
from kvproof.locking import locked
from kvproof.report import Outcome
from kvproof.review import mirrors
from kvproof.review.digests import digest
from kvproof.review.mirrors import Place
from kvproof.revision import revision
from kvproof.scenario_file import write_whole

FILE = "kvproof/review/status.json"
"""Where the stored results are in a checkout."""
VERSION = 1
RELEASES = ("0.26.0", "0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
PLACES = "mirrors"
"""What finding these places again is called among the checks."""
KEPT = ("invariant", "proof", "mutant", "run", "finding")
_FUZZ = ("--seed", "1", "--workers", "2")


@dataclass(frozen=True)
class Check:
    """A checker to be run: what it is called on the site, and the command line that runs it."""

    name: str
    arguments: tuple[str, ...]

    @property
    def command(self) -> str:
        return " ".join(("kvproof", *self.arguments))


CHECKS = (
    Check("prove", ("prove",)),
    Check("explore", ("explore", "--workers", "2")),
    Check("explore --mutants", ("explore", "--mutants")),
    Check("mutants", ("mutants",)),
    Check("fuzz reference", ("fuzz", "reference", "--steps", "20000", *_FUZZ)),
    *(Check(f"fuzz {release}", ("fuzz", f"vllm=={release}", "--seconds", "40", *_FUZZ)) for release in RELEASES),
    *(Check(f"prove --on {release}", ("prove", "--on", f"vllm=={release}")) for release in RELEASES),
)
_ON_EVERY_INVARIANT = frozenset(check.name for check in CHECKS if check.name.startswith(("fuzz", "explore"))) - {
    "explore --mutants"
}


class Word(msgspec.Struct, frozen=True):
    """What a checker said of one thing. ``digest`` is that of the rule or claim as it was then (empty: none is)."""

    kind: str
    id: str
    verdict: str
    outcome: Outcome
    detail: str = ""
    statement: str = ""
    digest: str = ""
    data: dict[str, Any] = {}


class Said(msgspec.Struct, frozen=True):
    """One run of a checker: ``made`` is the day, ``revision`` the commit it was run on."""

    name: str
    command: str
    made: str
    revision: str
    line: str
    seconds: float
    words: list[Word]

    def of(self, kind: str, name: str) -> Word | None:
        """The word on one thing, if there is one."""
        return next((word for word in self.words if (word.kind, word.id) == (kind, name)), None)


class Status(msgspec.Struct):
    """All runs that are stored, by name, and the place of every function that rules mirror."""

    kvproof_status: int
    runs: dict[str, Said]
    mirrors: dict[str, Place] = {}

    def stale(self, name: str) -> bool:
        """Whether there is no such run, or a word of it is :func:`old`."""
        said = self.runs.get(name)
        return said is None or any(old(word) for word in said.words)

    def lacking(self, name: str) -> list[str]:
        """Invariants that a search or an exploration says nothing of: they are newer than it."""
        said = self.runs.get(name)
        if said is None or name not in _ON_EVERY_INVARIANT:
            return []
        return [entry.id for entry in CATALOGUE if said.of("invariant", entry.id) is None]

    def misplaced(self) -> bool:
        """Whether a function that rules mirror is missing, or a newer release is looked at than they are placed in."""
        return mirrors.stale(self.mirrors, RELEASES[-1])


def stored_file() -> Path:
    """Where the stored results are: beside this module."""
    return Path(__file__).with_name("status.json")


def load(file: Path) -> Status:
    """The stored runs; none where there is no file. Raises :class:`UsageError` for a file that is something else."""
    if not file.exists():
        return Status(VERSION, {})
    try:
        made = msgspec.json.decode(file.read_bytes(), type=Status)
        if made.kvproof_status > VERSION:
            raise UsageError(f"{file} was written by a newer kvproof (version {made.kvproof_status}): upgrade it")
        for word in (word for said in made.runs.values() for word in said.words):
            _require_data(word)
    except OSError as error:
        raise UsageError(f"can't read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{file} holds no results of checkers ({error}): move it away, and kvproof spec refresh makes it anew"
        ) from error
    return made


def _require_data(word: Word) -> None:
    """What the site reads of a word is there in the form it has. Raises ``ValueError``."""
    read = {"mutant": ("live", "fuzz"), "run": ("exercised",)}.get(word.kind, ())
    odd = [name for name in read if not isinstance(word.data.get(name) or {}, dict)]
    if "exercised" in read and word.data.get("exercised") and not isinstance(word.data.get("states"), int):
        odd.append("states")
    if odd:
        raise ValueError(f"{odd[0]} of {word.kind} {word.id} is no such thing")


def current(word: Word) -> str:
    """The digest of what a word is about, as it is now; empty where that has no rule or is there no more."""
    return _digests().get((word.kind, word.id), "gone")


def old(word: Word) -> str:
    """Why a word is older than what is asked of it today; empty where it is not."""
    if word.digest and word.digest != current(word):
        return "the rule has changed since"
    # What is refuted of a release's function is replayed on a whole engine, and that decides what it is known as.
    if word.kind == "proof" and word.verdict.startswith("refuted") and "shown" not in word.data:
        about = {claim.id for claim in engines.load("kvproof.models.smt.shipped", "CLAIMS")}
        return "stored without what a whole engine showed" if word.id in about else ""
    return ""


_known: dict[tuple[str, str], str] = {}


def _digests() -> Mapping[tuple[str, str], str]:
    if not _known:
        claims = [*engines.load("kvproof.models.smt", "CLAIMS"), *engines.load("kvproof.models.smt.shipped", "CLAIMS")]
        _known.update({("invariant", entry.id): digest(entry.predicate) for entry in CATALOGUE})
        _known.update({("proof", claim.id): digest(*_functions(claim)) for claim in claims})
    return _known


def _functions(claim: Any) -> Iterator[Any]:
    """What a claim is made of: every function among its fields."""
    for name in claim.__dataclass_fields__:
        value = getattr(claim, name)
        if callable(value) and hasattr(value, "__code__"):
            yield value


# -- doing it again ----------------------------------------------------------------------------------------------------


def refresh(
    file: Path, names: Sequence[str], again: bool, progress: Callable[[str], None], stop: Callable[[], None]
) -> Iterator[tuple[str, bool]]:
    """Run the checks ``names`` (all if none) that are stale, or all of them ``again``, and store what they say, each as
    soon as it is known; first of all find :data:`PLACES`. Yields each that was run, and whether it gave a result.

    Raises :class:`UsageError` for a name that no check has, or a file that can't be written.
    """
    possible = [PLACES, *(check.name for check in CHECKS)]
    unknown = set(names) - set(possible)
    if unknown:
        known = ", ".join(map(repr, possible))
        raise UsageError(f"no check is called {min(unknown)!r}: there are {known}")
    require_file(file, "results")
    status = load(file)
    if (not names or PLACES in names) and (again or status.misplaced()):
        stop()
        progress(f"{PLACES} …")
        yield PLACES, _place(file, progress)
    for check in CHECKS:
        due = again or status.stale(check.name) or bool(status.lacking(check.name))
        if (names and check.name not in names) or not due:
            continue
        stop()
        progress(f"{check.command} …")
        try:
            said = run(check)
        except CheckerError as error:
            progress(str(error))
            yield check.name, False
            continue
        progress(said.line)
        _add(file, {said.name: said}, {})
        yield check.name, True


def _place(file: Path, progress: Callable[[str], None]) -> bool:
    try:
        found = mirrors.find(RELEASES, progress)
    except UsageError as error:  # a release can't be had: the checks that are left may not need it
        progress(str(error))
        return False
    _add(file, {}, found)
    missing = [name for name in mirrors.named() if name not in found]
    progress(f"in no release: {', '.join(missing)}" if missing else f"found {len(found)} functions")
    return not missing


def _add(file: Path, runs: Mapping[str, Said], places: Mapping[str, Place]) -> None:
    """Store runs or places in place of older ones. What another refresh stored meanwhile stays. Raises
    :class:`UsageError`."""
    try:
        with locked(file):
            there = load(file)
            there.runs.update(runs)
            there.mirrors = dict(places) or there.mirrors
            save(file, there)
    except OSError as error:
        raise UsageError(f"can't write {file}: {error.strerror or error}") from error


def save(file: Path, status: Status) -> None:
    """Write the file whole or not at all, runs in the order of :data:`CHECKS`. Raises :class:`UsageError`."""
    order = [check.name for check in CHECKS]
    status.runs = {name: status.runs[name] for name in order if name in status.runs}
    text = json.dumps(msgspec.to_builtins(status), indent=0, ensure_ascii=False) + "\n"
    try:
        write_whole(file, text)
    except OSError as error:
        raise UsageError(f"can't write {file}: {error.strerror or error}") from error


def run(check: Check) -> Said:
    """Run one check in a process of its own, and take down what it says. Raises :class:`CheckerError` where it says
    nothing, and :class:`KeyboardInterrupt` where it was interrupted."""
    with tempfile.TemporaryDirectory(prefix="kvproof-review-") as name:
        folder = Path(name)
        command = [sys.executable, "-P", "-m", "kvproof", *check.arguments, "--report", str(folder)]
        done = subprocess.run(command, check=False, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        report = folder / f"{check.arguments[0]}.json"
        if not report.exists():
            raise CheckerError(f"{check.command} gave no result (exit code {done.returncode})")
        data = json.loads(report.read_bytes())
    if data["interrupted"]:
        raise KeyboardInterrupt
    lines = done.stdout.decode(errors="replace").splitlines()
    line = next((line for line in reversed(lines) if line.startswith("kvproof:")), "")
    words = [_word(row) for row in data["rows"] if row["kind"] in KEPT]
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    seconds = sum(row["seconds"] for row in data["rows"])
    return Said(check.name, check.command, day, revision(), line, round(seconds, 1), words)


_DATA = ("evaluations", "scope", "premises", "function", "paths", "states", "depth", "complete", "exercised", "mirrors",
         "status", "reference", "live", "fuzz", "second_solver", "counterexample", "shown")  # fmt: skip


def _word(row: Mapping[str, Any]) -> Word:
    kind, name = row["kind"], row["id"]
    made = _digests().get((kind, name), "")
    data = {key: value for key, value in row["data"].items() if key in _DATA}
    return Word(kind, name, row["verdict"], row["outcome"], row["detail"], row["statement"], made, data)
