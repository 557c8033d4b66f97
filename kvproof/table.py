"""The report as people read it: one table, then what needs more than a line, then the result line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvproof.report import Report, Row

_STYLES: Final = {
    "pass": "green",
    "fail": "bold red",
    "undetermined": "yellow",
    "error": "bold red",
    "skip": "dim",
    "info": "cyan",
}
_TITLES: Final = {"proof": "proofs", "invariant": "invariants", "finding": "findings", "run": "run"}
_WIDTH_WITHOUT_TERMINAL: Final = 120
_WIDTH_OF_NAMES: Final = 40


def say(line: str) -> None:
    """Progress: one line on standard error, apart from the results."""
    print(line, file=sys.stderr, flush=True)


def write(text: str) -> None:
    """Results: ``text`` as it is, on standard output. A reader that stopped reading changes no verdict."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes again on exit, which must not fail then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show(report: Report, *, brief: bool = False) -> None:
    """Write the table, the texts of the rows that have one, and the result line.

    ``brief``: what passed takes one line and no text, and supporting rows that passed are named in the rows that they
    support. The report files hold everything in any case.
    """
    rows = report.rows if not brief else [row for row in report.rows if not (row.belongs_to and row.outcome == "pass")]
    texts = [row for row in rows if row.text and not (brief and row.outcome == "pass")]
    # A pipe gets a fixed width, so that what is stored does not depend on a window.
    out = Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL, highlight=False)
    with out.capture() as captured:
        if rows:
            out.print(_table(report, rows, brief))
        for row in texts:
            out.print()
            out.print(Text(f"{row.id}: {row.verdict}", style=_STYLES[row.outcome]))
            # Neither wrapped nor marked up: a scenario or a command must stay as it is, to be copied.
            out.out(row.text.rstrip(), highlight=False)
        if rows:
            out.print()
    write(captured.get() + report.result_line() + "\n")


def _table(report: Report, rows: Sequence[Row], brief: bool) -> Table:
    table = Table(title=f"kvproof {report.command} {report.subject}".strip(), title_justify="left")
    table.add_column("what", overflow="fold", max_width=_WIDTH_OF_NAMES)
    table.add_column("verdict", no_wrap=True)
    table.add_column("detail", overflow="fold", ratio=1)
    table.add_column("s", justify="right", no_wrap=True)
    shown = ""
    for row in rows:
        if row.kind != shown:
            if shown:
                table.add_section()
            table.add_row(Text(_TITLES[row.kind], style="bold"), "", "", "")
            shown = row.kind
        table.add_row(
            Text(f"  {row.id}"),
            Text(row.verdict, style=_STYLES[row.outcome]),
            Text(_detail(report, row, brief)),
            _seconds(row),
        )
    return table


def _detail(report: Report, row: Row, brief: bool) -> str:
    if not brief:
        return row.detail or row.statement
    caught = [r.id.removeprefix(f"{row.id}/") for r in report.rows if r.belongs_to == row.id and r.outcome == "pass"]
    return (row.brief or row.detail or row.statement) + (f"; catches {', '.join(caught)}" if caught else "")


def _seconds(row: Row) -> str:
    return f"{row.seconds:.1f}" if row.seconds else ""
