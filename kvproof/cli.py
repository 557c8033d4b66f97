"""The ``kvproof`` command. Each command gathers its options and hands over; results go to standard output, progress and
errors to standard error.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from kvproof import subjects
from kvproof.errors import INTERRUPTED, USAGE, UsageError, explain
from kvproof.report import Report

app = typer.Typer(
    help="Hold hybrid prefix caches to their specification: prove its rules, fuzz real releases, replay what is found.",
    epilog="Exit codes: 0 all met, 1 a new finding or a refuted claim, 2 usage or environment, "
    "3 undetermined or a checker's error, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

VERIFY_STEPS = 60_000
VERIFY_SECONDS = 100.0
FUZZ_STEPS = 50_000

SubjectArgument = Annotated[
    str, typer.Argument(metavar="SUBJECT", help=f"vllm (installed here), vllm=={subjects.NEWEST} or vllm@PATH")
]
Seed = Annotated[int | None, typer.Option(min=0, help="Where the random search starts; printed in any case.")]
Seconds = Annotated[float | None, typer.Option(min=1, help="Stop after that long, counted after the import.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes to search with (default: one per core).")]
Known = Annotated[
    Path | None,
    typer.Option("--findings", metavar="DIR", help="Known findings (default: those that kvproof comes with)."),
]
ReportFolder = Annotated[
    Path | None, typer.Option("--report", metavar="DIR", help="Write JSON and JUnit reports there.")
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvproof {importlib.metadata.version('kvproof')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def verify(
    seed: Seed = 1,
    steps: Annotated[int, typer.Option(min=1, help="Engine steps to fuzz.")] = VERIFY_STEPS,
    seconds: Seconds = VERIFY_SECONDS,
    workers: Workers = None,
    report_folder: Annotated[Path, typer.Option("--report", metavar="DIR", help="Where the reports go.")] = Path(
        "reports"
    ),
    known: Known = None,
) -> int:
    """Prove the rules and fuzz the newest supported release: one table, report files, an exit code."""
    from kvproof import fuzzing
    from kvproof.table import say, show
    from kvproof.verify import SUBJECT
    from kvproof.verify import verify as run

    seed = secrets.randbits(32) if seed is None else seed
    fuzzing.check_folder(report_folder)
    report = Report("verify", SUBJECT, facts={"seed": seed})
    options = fuzzing.Options(seed, steps, seconds, workers or _cores(), report_folder / "findings", known)
    run(report, options, report_folder / "smt", say)
    code = _finish(report, report_folder, functools.partial(show, brief=True))
    if report.problem:
        _complain(report.problem)
    return code


@app.command()
def prove(
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write each proof there as SMT-LIB 2.")] = None,
    report_folder: ReportFolder = None,
) -> int:
    """Prove the rules for all sizes, with two solvers, and show that old faults are caught."""
    from kvproof import proofs
    from kvproof.table import say, show

    report = Report("prove")
    try:
        report.rows.extend(proofs.prove(out, say))
    except KeyboardInterrupt:
        report.interrupted = True
    report.facts["claims"] = len(report.rows)
    return _finish(report, report_folder, show)


@app.command()
def fuzz(
    subject: SubjectArgument,
    seed: Seed = None,
    steps: Annotated[int, typer.Option(min=1, help="Engine steps to take at most.")] = FUZZ_STEPS,
    seconds: Seconds = None,
    workers: Workers = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where scenario files go.")] = Path("kvproof-findings"),
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there.")] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Print known findings in full, too.")] = False,
    known: Known = None,
    report_folder: ReportFolder = None,
) -> int:
    """Drive a real release at random through its own scheduler and report what breaks."""
    from kvproof import fuzzing
    from kvproof.table import say, show

    target = subjects.parse(subject)
    seed = secrets.randbits(32) if seed is None else seed
    options = fuzzing.Options(seed, steps, seconds, workers or _cores(), out, known)
    say(f"fuzzing {target.text} from seed {seed}")
    record = fuzzing.fuzz(target, options, say)
    if json_file is not None:
        import msgspec

        _write(json_file, msgspec.json.encode(record).decode())
    seen = sum(known.seen is not None for known in record.known)
    report = Report("fuzz", target.text, fuzzing.rows(record, show_known=show_all), interrupted=record.interrupted)
    report.facts.update(seed=record.seed, steps=record.steps, examples=record.examples)
    report.facts.update(new=len(record.findings), known=seen, seconds=record.seconds)
    return _finish(report, report_folder, show)


@app.command()
def replay(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario or finding file.")],
    on: Annotated[str, typer.Option("--on", metavar="SUBJECT", help="What to run it on; see fuzz.")],
    known: Known = None,
    report_folder: ReportFolder = None,
) -> int:
    """Run a scenario again. Exit code 1 if the finding that the file names is there, or a new one."""
    from kvproof import replaying
    from kvproof.table import say, show, write

    target = subjects.parse(on)
    report = Report("replay", target.text)
    text = replaying.replay(report, scenario, target, known, say)
    write(text.rstrip() + "\n\n")
    return _finish(report, report_folder, show)


class Form(StrEnum):
    """What a scenario can be turned into."""

    pytest = "pytest"
    text = "text"


@app.command()
def export(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario or finding file.")],
    form: Annotated[Form, typer.Option("--as", help="A stand-alone test file, or plain text.")] = Form.pytest,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: standard output.")
    ] = None,
) -> int:
    """Turn a scenario into a test that needs only vLLM and pytest, or into text."""
    from kvproof import engines, scenario_file
    from kvproof.table import write

    loaded = scenario_file.load(scenario)
    note = loaded.finding
    violation = note.violation() if note else None
    text = engines.export(
        form.value, loaded.scenario, violation, note.subject if note else "", note.action if note else -1
    )
    if out is None or str(out) == "-":
        write(text)
        return 0
    _write(out, text)
    write(f"kvproof: export {scenario} form={form.value} file={out} exit=0\n")
    return 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write(file: Path, text: str) -> None:
    from kvproof.scenario_file import write_whole

    try:
        write_whole(file, text)
    except OSError as error:
        raise UsageError(f"can't write {file}: {error.strerror or error}") from error


def _finish(report: Report, folder: Path | None, show: Any) -> int:
    # The report files come first: a reader that closes the pipe early must not cost them.
    if folder is not None:
        report.save(folder)
    show(report)
    return report.exit_code


def _complain(message: str) -> None:
    print(f"kvproof: error: {message}", file=sys.stderr, flush=True)


def run(arguments: Sequence[str] | None = None) -> int:
    """The whole command, and its exit code. Errors are one line on standard error."""
    try:
        code = app(args=arguments, prog_name="kvproof", standalone_mode=False)
        if code == INTERRUPTED:
            _complain("interrupted")
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message"):  # what the option parser says of wrong options
            _complain(f"{error.format_message()} (kvproof --help lists what there is)")
            return USAGE
        if type(error).__name__ == "Abort":  # how the option parser passes on Ctrl-C
            _complain("interrupted")
            return INTERRUPTED
        message, code = explain(error)
        _complain(message)
        return code


def main() -> NoReturn:
    """Entry point of the ``kvproof`` script."""
    signal.signal(signal.SIGTERM, _terminate)
    # A shell that started this in the background made it ignore interrupts; asked for one, it must stop all the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run())


def _terminate(number: int, frame: object) -> NoReturn:
    """A polite end (a CI server's time limit) keeps what was found, as Ctrl-C does."""
    raise KeyboardInterrupt
