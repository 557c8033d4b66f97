"""What a run established: rows with a verdict each, an exit code, and the JSON report.

A row's ``outcome`` decides the exit code; its ``verdict`` is the exact word for people (proved, refuted, new …).
Nothing is rounded up: a predicate that was never exercised is undetermined, one that the subject can't show is not
applicable, and neither is a pass.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from kvproof.errors import FOUND, INTERRUPTED, MET, UNDETERMINED, USAGE, UsageError
from kvproof.scenario_file import write_whole

Kind = Literal["proof", "invariant", "finding", "mutant", "run"]
SHOWN: Final = "known: its recorded scenario still shows it"
"""The verdict on a finding that is as it was recorded."""

Outcome = Literal["pass", "fail", "undetermined", "error", "skip", "info"]


@dataclass(frozen=True)
class Row:
    """One thing that was established. ``detail`` says it in a line or a few, ``text`` is what must be seen in full.

    ``subject`` is what it is about, where that is not the spec itself. ``pointer`` is a line that says where more is
    kept. ``belongs_to`` is the row of the same kind that this one only supports (an old fault that a claim must catch):
    a short table names it in that row as long as it passes.
    """

    kind: Kind
    id: str
    verdict: str
    outcome: Outcome
    detail: str = ""
    belongs_to: str = ""
    statement: str = ""
    text: str = ""
    pointer: str = ""
    seconds: float = 0.0
    subject: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def premises(verdict: str, data: Mapping[str, Any]) -> int:
    """How many premises the right rule was proved under; of a wrong one, or of what is refuted, none are counted.

    ``data`` is that of the proof's row."""
    if verdict not in ("proved", "bounded"):
        return 0
    return len(list(filter(None, str(data.get("premises", "")).split("; "))))


def in_words(verdict: str, data: Mapping[str, Any]) -> str:
    """A proof's verdict as it is told, in the terminal and on the site: what is proved is proved of what its premises
    admit, and of nothing else."""
    count = premises(verdict, data)
    return f"{verdict} under {count} premise{'s' * (count != 1)}" if count else verdict


@dataclass
class Report:
    """A run of one command on one subject, filled as it goes, so that an interrupted run has one, too."""

    command: str
    subject: str = ""
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, str | int | float] = field(default_factory=dict)
    """Numbers of the run (seed, steps, seconds …), shown in the result line in this order."""
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds of search by subject."""
    coverage: dict[str, int] = field(default_factory=dict)
    """How often a search did each action, met each event, and had each feature on."""
    ended: str = ""
    """Which bound ended a search, in words for the result line; empty where nothing was searched."""
    only_known: bool = False
    """Set where something showed: if nothing fails, all of it was recorded, which is not the same as a clean run."""
    interrupted: bool = False
    problem: str = ""
    """Why the environment kept a part from running at all; empty if nothing did."""

    @property
    def exit_code(self) -> int:
        """Findings win over everything; then an interrupt, then the environment, then what stayed undetermined."""
        outcomes = {row.outcome for row in self.rows}
        if "fail" in outcomes:
            return FOUND
        if self.interrupted:
            return INTERRUPTED
        if self.problem:
            return USAGE
        return UNDETERMINED if outcomes & {"undetermined", "error"} else MET

    @property
    def verdict(self) -> str:
        """The run's verdict in one word: met, known, refuted, found, interrupted, environment, error, undetermined."""
        code = self.exit_code
        if code == FOUND:
            return "refuted" if any(r.outcome == "fail" and r.kind == "proof" for r in self.rows) else "found"
        if code == UNDETERMINED:
            return "error" if any(r.outcome == "error" for r in self.rows) else "undetermined"
        return {MET: "known" if self.only_known else "met", INTERRUPTED: "interrupted", USAGE: "environment"}[code]

    def result_line(self) -> str:
        """One line that scripts can grep: ``kvproof: verify vllm==0.33.0 seed=1 … verdict=met exit=0``."""
        facts = [f"{name}={round(v, 1) if isinstance(v, float) else v}" for name, v in self.facts.items()]
        head = ["kvproof:", self.command, *([self.subject] if self.subject else [])]
        ended = [f"({self.ended})"] if self.ended else []
        interrupted = ["interrupted=yes"] if self.interrupted else []
        return " ".join([*head, *facts, *ended, *interrupted, f"verdict={self.verdict}", f"exit={self.exit_code}"])

    def to_data(self) -> dict[str, Any]:
        """The report as plain data, the same that the JSON file holds."""
        return {
            "kvproof_report": 1,
            "command": self.command,
            "subject": self.subject,
            "verdict": self.verdict,
            "exit": self.exit_code,
            "interrupted": self.interrupted,
            "problem": self.problem,
            "facts": self.facts,
            "spent": self.spent,
            "coverage": self.coverage,
            "ended": self.ended,
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }

    def save(self, folder: Path) -> list[Path]:
        """Write ``<command>.json``, ``.xml`` (JUnit) and ``.sarif``. Raises :class:`UsageError` where it can't."""
        from kvproof.junit import junit
        from kvproof.sarif import sarif

        files = {
            folder / f"{self.command}.json": json.dumps(self.to_data(), indent=1, ensure_ascii=False) + "\n",
            folder / f"{self.command}.xml": junit(self),
            folder / f"{self.command}.sarif": sarif(self),
        }
        try:
            for path, text in files.items():
                write_whole(path, text)
        except OSError as error:
            raise UsageError(f"can't write the report to {folder}: {error.strerror or error}") from error
        return list(files)
