"""Known findings as a campaign tells them: seen on the way, shown by their recorded scenario, or gone."""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kvproof import engines, findings
from kvproof.report import SHOWN
from kvproof.spec.config import ConfigError
from kvproof.spec.scenario import Scenario
from kvproof.spec.subject import Subject

_SHARED: Final = ("invariant", "cause", "status", "reference", "reasoning", "scenario")


class KnownFinding(msgspec.Struct, frozen=True):
    """A record for this release, kept in ``file``. ``seen`` is after how many seconds the campaign came across it.

    Where it did not, ``shown`` tells whether the recorded scenario still shows it, and ``why`` why that was not told.
    ``besides`` is what this scenario showed that nobody recorded: invariant, cause and witness of each.
    """

    invariant: str
    cause: str
    status: str
    reference: str
    reasoning: str
    scenario: dict[str, Any] | None
    file: str
    seen: float | None = None
    shown: bool | None = None
    why: str = ""
    besides: list[tuple[str, str, str]] = []

    @property
    def identity(self) -> tuple[str, str]:
        return (self.invariant, self.cause)

    @property
    def gone(self) -> bool:
        return self.seen is None and self.shown is False

    @property
    def verdict(self) -> str:
        if self.seen is not None:
            return f"known: seen in this run after {self.seen:.1f} s"
        if self.shown is None:
            return f"known: not seen in this run; {self.why}"
        if self.shown:
            return SHOWN
        return "gone: its recorded scenario no longer shows it"


def records_for(folder: Path | None, release: str) -> list[KnownFinding]:
    """The records that apply to ``release``, with the files that they are in. Raises as :func:`findings.load` does."""
    records = findings.load(folder)
    apply = findings.known_for(records, release).records
    told = []
    for file, record in zip(_files(folder), records, strict=True):
        if record in apply:
            fields = {name: getattr(record, name) for name in _SHARED}
            told.append(KnownFinding(**fields, file=file))
    return told


def _files(folder: Path | None) -> list[str]:
    """The records' files in the order of :func:`findings.load`, as somebody in the current folder would name them."""
    if folder is not None and not folder.is_dir():
        return []  # the loader says so
    place = folder if folder is not None else importlib.resources.files(findings.PACKAGE)
    files = sorted((f for f in place.iterdir() if f.name.endswith(".json")), key=lambda f: f.name)
    here = os.path.join(os.getcwd(), "")
    return [os.path.abspath(str(file)).removeprefix(here) for file in files]


def look_again(
    subject: Subject,
    listed: Sequence[KnownFinding],
    passed_over: frozenset[tuple[str, str]],
    interrupted: bool,
    progress: engines.Progress,
    whose: str = "known findings that this run did not come across",
) -> tuple[list[KnownFinding], list[str], bool]:
    """Run the recorded scenarios of what was not seen. Returns the findings, a checker's errors, and whether somebody
    interrupted. ``whose`` they are is said in the progress."""
    unseen = sum(known.seen is None for known in listed)
    if unseen and not interrupted:
        progress(f"running the recorded scenarios of {unseen} {whose}")
    told: list[KnownFinding] = []
    errors: list[str] = []
    for known in listed:
        if known.seen is None:
            try:
                answer = {"why": "the run was interrupted"} if interrupted else _ask(subject, known, passed_over)
            except KeyboardInterrupt:
                interrupted, answer = True, {"why": "the run was interrupted"}
            if "error" in answer:
                errors.append(f"{known.file}: {answer.pop('error')}")
            known = msgspec.structs.replace(known, **answer)
            passed_over |= {(invariant, cause) for invariant, cause, _ in known.besides}
        told.append(known)
    return told, errors, interrupted


def _ask(subject: Subject, known: KnownFinding, passed_over: frozenset[tuple[str, str]]) -> dict[str, Any]:
    """What the recorded scenario says now: fields of :class:`KnownFinding`, and ``error`` where the checker failed."""
    if known.scenario is None:
        return {"why": "no scenario is recorded"}
    try:
        result = engines.replay(subject, Scenario.from_dict(known.scenario))
    except ConfigError as error:
        return {"why": f"its recorded scenario can't run here: {error}"}
    except Exception as error:  # a mistake of a checker, which must not cost what the campaign found
        return {"why": "the checker failed on its scenario", "error": f"{type(error).__name__}: {error}"}
    first: dict[tuple[str, str], str] = {}
    for violation in result.violations:
        first.setdefault(violation.identity, violation.witness)
    shown = (known.invariant, known.cause) in first
    passed_over |= result.follows
    besides = [(*identity, witness) for identity, witness in first.items() if identity not in passed_over]
    if result.error and not shown:
        return {"why": "the checker failed on its scenario", "besides": besides, "error": result.error}
    if result.spoiled and not shown:
        return {"why": "its recorded scenario ended at another violation first", "besides": besides}
    return {"shown": shown, "besides": besides}
