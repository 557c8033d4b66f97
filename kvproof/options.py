"""What several commands share: options, and how a command ends."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvproof import subjects
from kvproof.errors import UsageError, require_file, require_folder
from kvproof.report import Report
from kvproof.streams import say

STOPS = [signal.SIGINT, signal.SIGTERM]
if sys.platform != "win32":
    STOPS.append(signal.SIGALRM)
"""What asks the command for an end."""

MOST_STEPS = 10**12
MUTANT_STEPS = 24_000
"""What the fuzzer may take for each mutant. From seed 1 the slowest needs 9 746."""

MOST_SEED = 10**18 - 1
"""As large as what is read back from files may be (:func:`kvproof.scenario_file.decode`)."""

MOST_SEEDS = 100
"""Searches of each release in the zoo."""

MOST_WORKERS = 64
"""Each worker takes 200 MB of its own. A run repeats with the same number of workers only, so this is no matter of the
cores that a machine happens to have."""


def _a_number(value: float | None) -> float | None:
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is no number of seconds")
    return value


SubjectArgument = Annotated[
    str,
    typer.Argument(
        metavar="SUBJECT", help=f"spec, reference, vllm (installed here), vllm=={subjects.NEWEST} or vllm@PATH"
    ),
]
Seed = Annotated[
    int | None, typer.Option(min=0, max=MOST_SEED, help="Where the random search starts; printed in any case.")
]
Seconds = Annotated[
    float | None,
    typer.Option(
        min=1,
        callback=_a_number,
        help="Stop searching after that long, counted after the import; making small what was found comes on top.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1, max=MOST_WORKERS, help="Processes to search with (default: one per core), 200 MB of memory each."
    ),
]
Known = Annotated[
    Path | None,
    typer.Option("--findings", metavar="DIR", help="Known findings (default: those that kvproof comes with)."),
]
ReportFolder = Annotated[
    Path | None, typer.Option("--report", metavar="DIR", help="Write JSON, JUnit and SARIF reports there.")
]


def cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


def require_reports(command: str, folder: Path | None) -> None:
    """Refuse a folder that the reports can't be written to, before anything is searched."""
    if folder is not None:
        require_folder(folder, "the report")
        for kind in ("json", "xml", "sarif"):
            require_file(folder / f"{command}.{kind}", "the report")


def write_file(file: Path, text: str) -> None:
    from kvproof.scenario_file import write_whole

    try:
        write_whole(file, text)
    except OSError as error:
        raise UsageError(f"can't write {file}: {error.strerror or error}") from error


def finish_report(report: Report, folder: Path | None, show: Any, files: Mapping[Path, str] | None = None) -> int:
    """Write what was asked for, show the rest, and return the exit code. What can't be written is still shown.

    The files come first: a reader that closes the pipe early must not cost them. From here on an interrupt is too late:
    what is left takes a moment, and must not be lost to somebody who presses Ctrl-C twice.
    """
    with _uninterrupted():
        for file, text in (files or {}).items():
            with _noting(report):
                write_file(file, text)
        if folder is not None:
            with _noting(report):
                report.save(folder)
        with _noting(report):
            show(report)
        if report.problem:
            complain(report.problem)
    return report.exit_code


@contextlib.contextmanager
def _noting(report: Report) -> Iterator[None]:
    """What can't be written is the environment's problem, and no more than that."""
    try:
        yield
    except UsageError as error:
        report.problem = "; ".join(filter(None, [report.problem, str(error)]))
    except OSError as error:  # unbuffered, standard output refuses even the nothing that the table's library writes
        report.problem = report.problem or f"can't write to standard output: {error.strerror or error}"


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread is ever interrupted
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def complain(message: str) -> None:
    say(f"kvproof: error: {message}")
