"""The wiring of ``kvproof spec``: the specification as a site, and what changed between two of its states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvproof.errors import require_file, require_folder, stop
from kvproof.options import ReportFolder, finish_report, require_reports, write_file
from kvproof.report import Report, Row
from kvproof.streams import say, write

spec = typer.Typer(help="The specification to read and review: a site, and what changed between two states of it.")

Stored = Annotated[
    Path | None, typer.Option("--status", metavar="FILE", help="Stored results of checkers (default: kvproof's own).")
]


@spec.callback(invoke_without_command=True)
def build_site(
    context: typer.Context,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the pages go.")] = Path("kvproof-spec"),
    status: Stored = None,
) -> int:
    """Write the site from the catalogue, the rules and stored results. Open index.html in it."""
    if context.invoked_subcommand is not None:
        return 0
    from kvproof.review.site import build, note
    from kvproof.review.status import load, stored_file

    require_folder(out, "pages")
    stored = load(status or stored_file())
    counts = build(out, stored)
    if told := note(stored):
        write(f"{told}{f' --status {status}' if status is not None else ''}\n")
    facts = " ".join(f"{name}={number}" for name, number in counts.items())
    write(f"kvproof: spec {facts} out={out} exit=0\n")
    return 0


@spec.command("refresh")
def refresh_status(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[CHECK]...", help="As in 'fuzz 0.33.0', or mirrors (default: all).")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also what is fresh.")] = False,
    status: Stored = None,
    report_folder: ReportFolder = None,
) -> int:
    """Run the checkers whose stored results are missing or older than a rule, and store what they say; find where in
    vLLM the functions are that rules mirror. All of them take about half an hour on two cores."""
    from kvproof.review.status import refresh, stored_file
    from kvproof.table import show

    require_reports("spec refresh", report_folder)
    report = Report("spec refresh")
    done = Row("run", "", "done", "pass")
    failed = Row("run", "", "failed", "error", "it gave no result")
    try:
        for name, fine in refresh(status or stored_file(), names or (), again, say, stop.check):
            report.rows.append(replace(done if fine else failed, id=name))
    except KeyboardInterrupt:
        report.interrupted = True
    bad = sum(row.outcome == "error" for row in report.rows)
    report.facts.update(run=len(report.rows) - bad, failed=bad)
    return finish_report(report, report_folder, show)


@spec.command("diff")
def spec_diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A release, as in vllm==0.30.0, or a commit.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The other.")],
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page there, too.")] = None,
    status: Stored = None,
) -> int:
    """What changed between two releases of vLLM, or two commits of the specification: functions to be read again,
    verdicts, findings."""
    from kvproof.review.diff import as_text, diff
    from kvproof.review.site import diff_page
    from kvproof.review.status import load, stored_file

    if html is not None:
        require_file(html, "the page")
    made = diff(before, after, load(status or stored_file()), Path(), say)
    if html is not None:
        write_file(html, diff_page(made))
    write(as_text(made))
    facts = " ".join(f"{name}={number}" for name, number in made.counts().items())
    write(f"kvproof: spec diff {before} {after} {facts} exit=0\n")
    return 0
