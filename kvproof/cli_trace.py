"""The wiring of ``kvproof trace``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvproof.errors import UNDETERMINED, require_file
from kvproof.options import Known, ReportFolder, finish_report, require_reports
from kvproof.report import Report
from kvproof.streams import say, write

traces = typer.Typer(help="Work on what a server recorded (KVPROOF=record).", no_args_is_help=True)
TraceFiles = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="A trace, in all its files: FILE.3 FILE.2 FILE.1 FILE.")
]


@traces.command("check")
def trace_check(files: TraceFiles, known: Known = None, report_folder: ReportFolder = None) -> int:
    """Hold a recorded trace to the specification, and say what its traffic never exercised."""
    from kvproof.table import show
    from kvproof.trace import commands

    require_reports("trace-check", report_folder)
    report = Report("trace-check")
    commands.check(report, files, known)
    return finish_report(report, report_folder, show)


@traces.command("cut")
def trace_cut(
    files: TraceFiles,
    finding: Annotated[int, typer.Option("--finding", metavar="N", min=1, help="Which, as trace check numbers them.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Default: trace-finding-N.json.")] = None,
    on: Annotated[str | None, typer.Option("--on", metavar="SUBJECT", help="Try it there; see fuzz.")] = None,
) -> int:
    """Turn a finding in a recorded trace into a scenario for replay. Exit code 3 if, tried, it does not show it."""
    from kvproof.trace import commands

    out = out or Path(f"trace-finding-{finding}.json")
    require_file(out, "the scenario")
    text, shown = commands.cut(files, finding, out, on, say)
    code = 0 if shown else UNDETERMINED
    write(f"{text}kvproof: trace-cut finding={finding} file={out} exit={code}\n")
    return code
