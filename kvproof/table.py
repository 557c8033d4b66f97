"""The report as people read it: one table, then what needs more than a line, then the result line."""

from __future__ import annotations

import os
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


def show(report: Report) -> None:
    """Write the table, the texts of the rows that have one, and the result line."""
    # A pipe gets a fixed width, so that what is stored does not depend on a window.
    out = Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL, highlight=False)
    with out.capture() as captured:
        if report.rows:
            out.print(_table(report))
        for row in report.rows:
            if row.text:
                out.print()
                out.print(Text(f"{row.id}: {row.verdict}", style=_STYLES[row.outcome]))
                # Neither wrapped nor marked up: a scenario or a command must stay as it is, to be copied.
                out.out(row.text.rstrip(), highlight=False)
        if report.rows:
            out.print()
    write(captured.get() + report.result_line() + "\n")


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
        table.add_row(
            Text(f"  {row.id}"), Text(row.verdict, style=_STYLES[row.outcome]), Text(_detail(row)), _seconds(row)
        )
    return table


def _detail(row: Row) -> str:
    return row.detail or row.statement


def _seconds(row: Row) -> str:
    return f"{row.seconds:.1f}" if row.seconds else ""
