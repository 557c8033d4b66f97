"""The wiring of ``kvproof zoo``. Nothing of the zoo is imported before one of its commands runs: a blind search must
not."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvproof.errors import require_file
from kvproof.options import MOST_SEEDS, MOST_WORKERS, ReportFolder, finish_report, require_reports
from kvproof.report import Report
from kvproof.streams import say, write

if TYPE_CHECKING:
    from kvproof.zoo.results import Results

zoo = typer.Typer(help="Known public faults, on the releases that shipped them, and which searches find them.")

_RESULTS = Path("bench/results/zoo.json")
_WIDTH_WITHOUT_TERMINAL = 160

Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Faults by id (default: all).")]
Data = Annotated[Path | None, typer.Option("--faults", metavar="DIR", help="Data files (default: kvproof's own).")]
ResultsFile = Annotated[Path, typer.Option("--results", metavar="FILE", help="Where results are kept.")]
Again = Annotated[bool, typer.Option("--again", help="Do again what is there already for this code.")]
Seconds = Annotated[float, typer.Option("--seconds", min=1, help="How long each release is searched at first.")]
Long = Annotated[float, typer.Option("--long", min=0, help="How long for what that missed; 0: not again.")]
Workers = Annotated[int, typer.Option("--workers", min=1, max=MOST_WORKERS, help="Processes to search with.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, max=MOST_SEEDS, help="Searches of each release.")]
Commit = Annotated[
    str | None,
    typer.Option(
        "--commit",
        metavar="HASH",
        help="What seeds are derived from (default: that of stored searches by this code, or else the checkout's).",
    ),
]


@zoo.callback(invoke_without_command=True)
def show_zoo(context: typer.Context, results: ResultsFile = _RESULTS, faults: Data = None) -> int:
    """Show what is known: releases by faults, from stored results."""
    if context.invoked_subcommand is not None:
        return 0
    from kvproof.zoo import fault, matrix
    from kvproof.zoo.results import Results

    made = matrix.matrix(fault.load(faults), Results(results))
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
    write(matrix.as_text(made, columns))
    counts = " ".join(f"{name}={number}" for name, number in made.counts.items())
    write(f"kvproof: zoo {counts} exit=0\n")
    return 0


@zoo.command("run")
def run_zoo(
    ids: Ids = None,
    releases: Annotated[
        str | None,
        typer.Option("--releases", metavar="LIST", help="As in 0.26.0,0.27.0, or all (default: around each change)."),
    ] = None,
    again: Again = False,
    results: ResultsFile = _RESULTS,
    faults: Data = None,
    report_folder: ReportFolder = None,
) -> int:
    """Replay the faults' scenarios on releases, and have mutants judged. Exit code 1 if one comes out otherwise than
    its data file says."""
    from kvproof.table import show
    from kvproof.zoo import running
    from kvproof.zoo.fault import chosen, load
    from kvproof.zoo.results import Results

    report, all_of_them = _begin("run", results, report_folder), load(faults)
    named = None if releases is None else running.named_releases(releases, all_of_them)
    running.run(report, chosen(all_of_them, ids or ()), Results(results), named, again, say)
    return finish_report(report, report_folder, show)


@zoo.command("blind")
def blind_zoo(
    ids: Ids = None,
    seconds: Seconds = 60,
    long: Long = 150,
    workers: Workers = 2,
    seeds: Seeds = 1,
    commit: Commit = None,
    again: Again = False,
    results: ResultsFile = _RESULTS,
    faults: Data = None,
    report_folder: ReportFolder = None,
) -> int:
    """Search the faulty releases without knowing the faults. Exit code 3 if one is missed."""
    from kvproof.table import show
    from kvproof.zoo import blind
    from kvproof.zoo.fault import chosen, load
    from kvproof.zoo.results import Results

    report = _begin("blind", results, report_folder)
    stored = Results(results)
    options = blind.Options(seconds, long, workers, seeds, _commit(commit, again, stored), again)
    blind.blind(report, chosen(load(faults), ids or ()), stored, options, say)
    return finish_report(report, report_folder, show)


@zoo.command("refresh")
def refresh_zoo(
    ids: Ids = None,
    seconds: Seconds = 60,
    long: Long = 150,
    workers: Workers = 2,
    seeds: Seeds = 1,
    commit: Commit = None,
    results: ResultsFile = _RESULTS,
    faults: Data = None,
    report_folder: ReportFolder = None,
) -> int:
    """Do again what is there for other code or other faults, and what is not there yet: replays, mutants, searches."""
    from kvproof.table import show
    from kvproof.zoo import blind, running
    from kvproof.zoo.fault import chosen, load
    from kvproof.zoo.results import Results

    report, all_of_them, stored = _begin("refresh", results, report_folder), load(faults), Results(results)
    options = blind.Options(seconds, long, workers, seeds, _commit(commit, False, stored))
    wanted = chosen(all_of_them, ids or ())
    running.run(report, wanted, stored, running.all_releases(all_of_them), False, say)
    if not report.interrupted and blind.searchable(wanted):
        blind.blind(report, wanted, stored, options, say)
    return finish_report(report, report_folder, show)


@zoo.command("matrix")
def matrix_zoo(
    files: Annotated[
        list[Path] | None,
        typer.Option("--write", metavar="FILE", help="Put it between the markers in this file (may be repeated)."),
    ] = None,
    results: ResultsFile = _RESULTS,
    faults: Data = None,
) -> int:
    """The matrix in Markdown, and the faults that have no row in it."""
    from kvproof.zoo import fault, matrix
    from kvproof.zoo.results import Results

    made = matrix.matrix(fault.load(faults), Results(results))
    if not files:
        write(f"{matrix.as_markdown(made)}\n{matrix.rest_as_markdown(made)}")
        return 0
    for file in files:
        matrix.write_between(file, made)
        write(f"kvproof: zoo-matrix file={file} exit=0\n")
    return 0


def _begin(command: str, results: Path, report_folder: Path | None) -> Report:
    require_file(results, "results")
    require_reports(f"zoo-{command}", report_folder)
    return Report(f"zoo-{command}")


def _commit(named: str | None, again: bool, stored: Results) -> str:
    """What seeds are derived from."""
    from kvproof.revision import revision
    from kvproof.zoo.blind import commit_of

    return named or ("" if again else commit_of(stored)) or revision()
