"""The report as people read it: proofs, invariants and findings, each in its own form, then the result line."""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, get_args

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvproof.proofs import SOLVERS
from kvproof.report import SHOWN, Report, Row, in_words
from kvproof.spec.scenario import ActionKind
from kvproof.streams import write

_STYLES: Final = {
    "pass": "green",
    "fail": "bold red",
    "undetermined": "yellow",
    "error": "bold red",
    "skip": "dim",
    "info": "cyan",
}
_GONE: Final = "bold yellow"
_WIDTH_WITHOUT_TERMINAL: Final = 100
_WIDTH_OF_NAMES: Final = 40
_COUNTED: Final = {
    "run refused": "configuration that this subject refused (a simpler one was run)",
    "kept scenario run again (refused)": "kept scenario whose configuration this subject refused",
    "variation of a kept scenario (refused)": "variation whose configuration this subject refused",
}
"""What a count of a search is in words, where its name does not say it."""

_SEEN: Final = "known: seen in this run"
"""How the verdict on a known finding begins that the search came across by itself."""


def show(report: Report, *, brief: bool = False, fold: bool = False) -> None:
    """Write everything that was established, and the result line.

    ``brief``: proofs that came out as expected take a line or a few per family and not one or more each. ``fold``:
    known findings that are as they were recorded are named only (``brief`` folds them, too). The report files hold
    everything in any case.
    """
    # A pipe gets a fixed width, so that what is stored does not depend on a window.
    out = Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL, highlight=False)
    with out.capture() as captured:
        if report.rows:
            out.print(Text(f"kvproof {report.command} {report.subject}".strip(), style="bold"))
        parts = {"proof": _proofs, "invariant": _invariants, "finding": _findings, "mutant": _mutants, "run": _runs}
        findings = [row for row in report.rows if row.kind == "finding"]
        failing = [row for row in findings if row.outcome == "fail"]
        for kind, part in parts.items():
            rows = [row for row in report.rows if row.kind == kind]
            if kind == "finding" and len(failing) == len(findings):
                continue
            if rows:
                out.print()
                part(out, report, rows, brief or (fold and kind == "finding"))
        if report.coverage and not brief:
            out.print()
            _heading(out, "coverage")
            never = [f"action {kind}" for kind in get_args(ActionKind) if not report.coverage.get(f"action {kind}")]
            counts = [f"{_COUNTED.get(name, name)} {count:,}" for name, count in report.coverage.items()]
            counts += [f"{name} never" for name in never]
            out.print(Padding(Text(", ".join(counts)), (0, 0, 0, 2)))
        if why := _undetermined(report):
            out.print()
            out.print(Text(why, style=_STYLES["undetermined"]))
        if failing:  # last, where nobody has to look for it
            out.print()
            named = "findings" if len(failing) == len(findings) else "findings that fail this run"
            _heading(out, f"{named}: {_counted(failing)}")
            for row in failing:
                _block(out, row)
        if report.rows:
            out.print()
    text = "".join(line.rstrip() + "\n" for line in captured.get().splitlines())
    write(text + report.result_line() + "\n")


def _proofs(out: Console, report: Report, rows: Sequence[Row], brief: bool) -> None:
    claims, mutants = ([row for row in rows if bool(row.belongs_to) == mutant] for mutant in (False, True))
    proved = f"{_passed(claims)} of {len(claims)} claims proved for all sizes ({SOLVERS}, premises satisfiable)"
    proofs = "proofs (kvproof prove shows each in full)" if brief else "proofs"
    _heading(out, f"{proofs}: {proved}, {_passed(mutants)} of {len(mutants)} mutants refuted")
    if brief:
        listed = [row for row in rows if row.outcome != "pass"]
        out.print(_table(_families(rows)))
    else:
        listed = list(rows)
    for row in listed:
        out.print()
        time = f" ({row.seconds:.1f} s)" if row.seconds else ""
        _block(out, replace(row, id=f"{row.id}: {in_words(row.verdict, row.data)}{time}", verdict="", text=""))
        if row.text:
            out.out(row.text.rstrip(), highlight=False)


def _families(rows: Sequence[Row]) -> list[Row]:
    """One row per family: the claims that were proved, each with the mutants that it catches."""
    families: dict[str, list[str]] = {}
    seconds: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        family = row.id.partition(".")[0]
        seconds[family] += row.seconds
        if row.outcome == "pass" and not row.belongs_to:
            caught = [r.id.removeprefix(f"{row.id}/") for r in rows if r.belongs_to == row.id and r.outcome == "pass"]
            families.setdefault(family, []).append(row.id + (f" (catches {', '.join(caught)})" if caught else ""))
    return [
        Row("proof", family, "proved", "pass", ", ".join(names), seconds=seconds[family])
        for family, names in families.items()
    ]


def _invariants(out: Console, report: Report, rows: Sequence[Row], brief: bool) -> None:
    for index, subject in enumerate(dict.fromkeys(row.subject for row in rows)):
        if index:
            out.print()
        seconds = report.spent.get(subject)
        _heading(out, f"invariants on {subject}" + (f": fuzzed for {seconds:.1f} s" if seconds is not None else ""))
        own = [row for row in rows if row.subject == subject]
        out.print(_table(_together(own) if brief else own))


def _together(rows: Sequence[Row]) -> list[Row]:
    """What is not applicable for the same reason, in one row."""
    left: list[Row] = []
    for row in rows:
        alike = [r for r in rows if (r.outcome, r.verdict, r.detail) == ("skip", row.verdict, row.detail)]
        if len(alike) < 2:
            left.append(row)
        elif row is alike[0]:
            left.append(replace(row, id=f"{row.id} and {len(alike) - 1} more"))
    return left


def _findings(out: Console, report: Report, rows: Sequence[Row], brief: bool) -> None:
    # What is as it was recorded is named only; its record says the rest.
    folded = {said: [row for row in rows if brief and row.verdict.startswith(said)] for said in (_SEEN, SHOWN)}
    named_only = {id(row) for same in folded.values() for row in same}
    more = f"; kvproof fuzz {shlex.quote(report.subject)} --all prints each in full" if named_only else ""
    below = " (below)" if any(row.outcome == "fail" for row in rows) else ""
    _heading(out, f"findings: {_counted(rows)}{below}{more}")
    for row in rows:
        if id(row) not in named_only and row.outcome != "fail":
            _block(out, row)
    for said, same in folded.items():
        if same:
            out.print(Padding(Text(f"{said} (findings/README.md):", style=_STYLES["info"]), (0, 0, 0, 2)))
        for invariant in dict.fromkeys(row.id.partition(" ")[0] for row in same):
            causes = [row.id.partition(" ")[2] for row in same if row.id.partition(" ")[0] == invariant]
            out.print(Padding(Text(f"{invariant} {', '.join(causes)}"), (0, 0, 0, 4)))


def _counted(rows: Sequence[Row]) -> str:
    counts = Counter(re.split(r"\W", row.verdict, maxsplit=1)[0] for row in rows)
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def _undetermined(report: Report) -> str:
    """Why a search that found nothing new is no pass: what it never exercised, and what would decide."""
    never = [row.id for row in report.rows if (row.kind, row.outcome) == ("invariant", "undetermined")]
    if report.command not in ("fuzz", "verify") or report.verdict != "undetermined" or not never:
        return ""
    return f"undetermined, as never exercised: {', '.join(never)}. A longer run (--seconds, --steps) decides."


def _mutants(out: Console, report: Report, rows: Sequence[Row], brief: bool) -> None:
    _heading(out, f"mutants: {report.facts.get('killed', 0)} killed, {report.facts.get('survived', 0)} survived")
    for subject in dict.fromkeys(row.subject for row in rows):
        if subject:
            out.print()
            _heading(out, subject)
        own = [row for row in rows if row.subject == subject]
        out.print(_table(replace(row, detail="\n".join(filter(None, [row.statement, row.detail]))) for row in own))


def _runs(out: Console, report: Report, rows: Sequence[Row], brief: bool) -> None:
    _heading(out, "run")
    out.print(_table(rows))


def _heading(out: Console, text: str) -> None:
    out.print(Text(text, style="bold"))


def _block(out: Console, row: Row) -> None:
    """A row with lines of its own. What there is in full is neither wrapped nor marked up, to be copied as it is."""
    gone = row.verdict.startswith("gone")
    style = _GONE if gone else _STYLES[row.outcome]
    out.print(Padding(Text(row.id, style="" if row.verdict else style), (0, 0, 0, 2)))
    if row.verdict:
        where = f" on {row.subject}" if (row.verdict, row.kind) == ("new", "finding") and row.subject else ""
        out.print(Padding(Text(row.verdict + where, style=style), (0, 0, 0, 4)))
    if row.text:
        out.out(row.text.rstrip(), highlight=False)
    else:
        # Where the rest is kept elsewhere, what fits into a line is enough.
        short = bool(row.pointer)
        for line in row.detail.splitlines():
            out.print(Padding(Text(line, no_wrap=short, overflow="ellipsis" if short else None), (0, 0, 0, 4)))
    if row.pointer:
        out.out(f"    {row.pointer}", style=_GONE if gone else None, highlight=False)


def _table(rows: Iterable[Row]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold", max_width=_WIDTH_OF_NAMES)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    table.add_column(justify="right", no_wrap=True)
    for row in rows:
        verdict = Text(row.verdict, style=_STYLES[row.outcome])
        seconds = f"{row.seconds:.1f} s" if row.seconds else ""
        table.add_row(Text(f"  {row.id}"), verdict, Text(row.detail or row.statement), seconds)
    return table


def _passed(rows: Sequence[Row]) -> int:
    return sum(row.outcome == "pass" for row in rows)
