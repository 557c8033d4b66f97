"""The report as people read it: one table, then what needs more than a line, then the result line."""

from __future__ import annotations

import sys
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


def console() -> Console:
    """Standard output. A pipe gets a fixed width and no colours, so that what is stored does not depend on a window."""
    terminal = sys.stdout.isatty()
    return Console(width=None if terminal else _WIDTH_WITHOUT_TERMINAL, highlight=False, soft_wrap=False)


def say(line: str) -> None:
    """Progress: one line on standard error, apart from the results."""
    print(line, file=sys.stderr, flush=True)


def show(report: Report) -> None:
    """Print the table, the texts of the rows that have one, and the result line."""
    out = console()
    if report.rows:
        out.print(_table(report))
    for row in report.rows:
        if row.text:
            out.print()
            out.print(Text(f"{row.id}: {row.verdict}", style=_STYLES[row.outcome]))
            # Plain print: a scenario or a command must stay as it is, to be copied.
            out.file.write(row.text.rstrip() + "\n")
    if report.rows:
        out.print()
    out.file.write(report.result_line() + "\n")
    out.file.flush()


def _table(report: Report) -> Table:
    table = Table(title=f"kvproof {report.command} {report.subject}".strip(), title_justify="left")
    table.add_column("what", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    table.add_column("detail", overflow="fold", ratio=1)
    table.add_column("s", justify="right", no_wrap=True)
    shown = ""
    for row in report.rows:
        if row.kind != shown:
            if shown:
                table.add_section()
            table.add_row(Text(_TITLES[row.kind], style="bold"), "", "", "")
            shown = row.kind
        table.add_row(Text(f"  {row.id}"), Text(row.verdict, style=_STYLES[row.outcome]), Text(_detail(row)), _seconds(row))
    return table


def _detail(row: Row) -> str:
    return row.detail or row.statement


def _seconds(row: Row) -> str:
    return f"{row.seconds:.1f}" if row.seconds else ""
