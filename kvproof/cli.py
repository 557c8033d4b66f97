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
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from kvproof import cli_record, subjects
from kvproof.cli_spec import spec
from kvproof.cli_trace import TraceFiles, traces
from kvproof.cli_zoo import zoo
from kvproof.errors import INTERRUPTED, USAGE, UsageError, explain, one_line, require_file, require_folder, stop
from kvproof.options import (
    MOST_STEPS,
    MOST_WORKERS,
    MUTANT_STEPS,
    STOPS,
    Known,
    ReportFolder,
    Seconds,
    Seed,
    SubjectArgument,
    Workers,
    complain,
    cores,
    finish_report,
    require_reports,
    write_file,
)
from kvproof.report import Report
from kvproof.streams import finish, prepare, say, write

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


class Preset(StrEnum):
    """Searches by name."""

    PULL_REQUEST = "pull-request"
    NIGHTLY = "nightly"


PRESETS: dict[Preset, tuple[float, int | None]] = {Preset.PULL_REQUEST: (100.0, 1), Preset.NIGHTLY: (3600.0, None)}
"""Seconds and seed (``None``: one of its own). The same seed for every pull request: what changes is the code."""


def _version(wanted: bool) -> None:
    if wanted:
        write(f"kvproof {importlib.metadata.version('kvproof')}\n")
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
    steps: Annotated[
        int,
        typer.Option(
            min=1, max=MOST_STEPS, help="Engine steps to fuzz. Whole runs are taken, so up to a few hundred more."
        ),
    ] = VERIFY_STEPS,
    seconds: Seconds = VERIFY_SECONDS,
    workers: Workers = None,
    report_folder: Annotated[Path, typer.Option("--report", metavar="DIR", help="Where the reports go.")] = Path(
        "reports"
    ),
    known: Known = None,
) -> int:
    """The main job: prove the rules, visit small worlds whole, fuzz the reference engine and the newest supported vLLM
    release, one table; report files and an exit code.
    """
    from kvproof import fuzzing
    from kvproof.table import show
    from kvproof.verify import SUBJECT
    from kvproof.verify import verify as run

    seed = secrets.randbits(32) if seed is None else seed
    kept, smt = report_folder / "findings", report_folder / "smt"
    require_reports("verify", report_folder)
    require_folder(kept, "findings")
    require_folder(smt, "proofs")
    report = Report("verify", SUBJECT, facts={"seed": seed})
    options = fuzzing.Options(seed, steps, seconds, workers or cores(), kept, known)
    run(report, options, smt, say)
    return finish_report(report, report_folder, functools.partial(show, brief=True))


@app.command()
def prove(
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="SUBJECT",
            help=f"Prove claims about a release's own functions: vllm, vllm=={subjects.NEWEST} or vllm@PATH.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write each proof there as SMT-LIB 2.")] = None,
    scenarios: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="With --on: where counterexamples that an engine can replay go (kvproof-findings)."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_WORKERS, help="With --on: processes to prove with (default: one per core)."),
    ] = None,
    known: Known = None,
    report_folder: ReportFolder = None,
) -> int:
    """Prove the rules for all sizes, with two solvers, and show that old faults are caught.

    With --on, prove claims about the functions of a release as shipped. Exit code 1 if one is refuted that is not
    recorded.
    """
    from kvproof import proofs
    from kvproof.table import show

    if out is not None:
        require_folder(out, "proofs")
    require_reports("prove", report_folder)
    if on is not None:
        return _prove_on(on, out, scenarios or Path("kvproof-findings"), workers, known, report_folder)
    if (scenarios, workers, known) != (None, None, None):
        raise UsageError("--scenarios, --workers and --findings are about a release's functions: name it with --on")
    report = Report("prove")
    try:
        report.rows.extend(proofs.prove(out, say))  # one by one: an interrupt leaves what was settled before it
    except KeyboardInterrupt:
        report.interrupted = True
    report.facts["claims"] = len(report.rows)
    return finish_report(report, report_folder, show)


def _prove_on(
    on: str, out: Path | None, scenarios: Path, workers: int | None, known: Path | None, report_folder: Path | None
) -> int:
    from kvproof import shipped

    target = subjects.parse(on)
    require_folder(scenarios, "scenarios")
    report = Report("prove", target.text)
    try:
        shipped.prove(report, target, shipped.Options(workers or cores(), out, scenarios, known), say)
    except KeyboardInterrupt:
        report.interrupted = True
    return finish_report(report, report_folder, shipped.show)


@app.command()
def explore(
    scopes: Annotated[
        list[str] | None, typer.Argument(metavar="[SCOPE]...", help="Small worlds by name (default: all).")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, max=MOST_WORKERS, help="Processes to explore with. One can save and go on.")
    ] = 1,
    most: Annotated[
        int,
        typer.Option(
            "--states", min=1, max=MOST_STEPS, help="Visit no further level once so many states of each are known."
        ),
    ] = 2_000_000,
    save: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep what was visited there from time to time, and go on from it."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where counterexamples go.")] = Path("kvproof-findings"),
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Plant faults in the machine, and show that each is found.")
    ] = False,
    report_folder: ReportFolder = None,
) -> int:
    """Visit every state of the abstract machine in small worlds, and judge every move."""
    from kvproof import exploring
    from kvproof.table import show

    for folder, what in ((out, "counterexamples"), (save, "what was visited")):
        if folder is not None:
            require_folder(folder, what)
    require_reports("explore", report_folder)
    report = Report("explore")
    try:
        exploring.run(report, exploring.Options(tuple(scopes or ()), workers, most, save, out, mutants), say)
    except KeyboardInterrupt:
        report.interrupted = True
    return finish_report(report, report_folder, show)


@app.command()
def fuzz(
    subject: SubjectArgument,
    seed: Seed = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_STEPS,
            help=f"Engine steps to take ({FUZZ_STEPS} where nothing else ends it). Whole runs are taken.",
        ),
    ] = None,
    seconds: Seconds = None,
    preset: Annotated[Preset | None, typer.Option("--preset", help="Seconds and seed by name; see docs/ci.md.")] = None,
    workers: Workers = None,
    campaign: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Go on from earlier runs in this folder (made where there is none): what they found and kept, and "
            "seeds that none of them had. --steps and --seconds are for this run.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where scenario files go (kvproof-findings; a campaign's own).")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there.")] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Print known findings in full, not by name only.")] = False,
    ray: Annotated[
        str,
        typer.Option("--ray", metavar="ADDRESS", help="Search on a Ray cluster: its address, auto, or local."),
    ] = "",
    known: Known = None,
    report_folder: ReportFolder = None,
) -> int:
    """Drive a real release at random through its own scheduler and report what breaks."""
    from kvproof import campaigns, fuzzing, scenario_file
    from kvproof.table import show

    target = subjects.parse(subject)
    if campaign is not None:
        if out is not None:
            raise UsageError("a campaign keeps its findings in its own folder: leave out --out")
        campaigns.require(campaign)
    out = out or Path("kvproof-findings")
    if campaign is None:
        require_folder(out, "findings")
    if json_file is not None:
        require_file(json_file, "the result")
    require_reports("fuzz", report_folder)
    if preset is not None:
        seconds = PRESETS[preset][0] if seconds is None else seconds
        seed = PRESETS[preset][1] if seed is None else seed
    if steps is None:
        steps = FUZZ_STEPS if preset is None else MOST_STEPS
    seed = secrets.randbits(32) if seed is None else seed
    options = fuzzing.Options(seed, steps, seconds, workers or cores(), out, known, ray, campaign)
    record = fuzzing.fuzz(target, options, say)
    report = Report("fuzz", target.text, fuzzing.rows(record, show_known=show_all), interrupted=record.interrupted)
    report.facts.update(seed=record.seed, **record.facts())
    report.spent[record.subject] = record.seconds
    report.coverage.update(record.coverage)
    report.ended, report.problem = record.ended, record.unsaved
    files = {} if json_file is None else {json_file: scenario_file.encoded(record).decode()}
    return finish_report(report, report_folder, functools.partial(show, fold=not show_all), files)


@app.command()
def replay(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario or finding file.")],
    on: Annotated[str, typer.Option("--on", metavar="SUBJECT", help="What to run it on; see fuzz.")],
    show_moment: Annotated[
        bool | None,
        typer.Option(
            "--show/--no-show",
            help="Show the requests' block tables where it breaks, as the page does (default: on a terminal).",
        ),
    ] = None,
    step: Annotated[bool, typer.Option("--step", help="Go through it moment by moment; Enter is the next.")] = False,
    known: Known = None,
    report_folder: ReportFolder = None,
) -> int:
    """Run a scenario again. Exit code 1 if the finding that the file names is there, or a new one."""
    from kvproof import replaying, showing
    from kvproof.colours import coloured, wanted
    from kvproof.table import show

    target = subjects.parse(on)
    require_reports("replay", report_folder)
    report = Report("replay", target.text)
    replayed = replaying.replay(report, scenario, target, known, say)
    told = replayed.text.rstrip()
    picture = showing.picture(replayed, show_moment, step)

    def show_both(report: Report) -> None:
        write((coloured(told) if wanted() else told) + "\n\n" + (f"{picture}\n" if picture else ""))
        show(report)

    return finish_report(report, report_folder, show_both)


@app.command()
def mutants(
    only: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this mutant; may be given more than once.")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, max=MOST_STEPS, help="Engine steps that the fuzzer may take for each mutant.")
    ] = MUTANT_STEPS,
    rules: Annotated[
        bool, typer.Option("--rules", help="Change one operator at a time in the rules themselves, too. Takes long.")
    ] = False,
    report_folder: ReportFolder = None,
) -> int:
    """Plant faults of old in the reference engine and in the rules, and show which checkers notice them.

    Exit code 1 if one survives; 3 if a checker objects to the healthy engine.
    """
    from kvproof import mutating
    from kvproof.table import show

    require_reports("mutants", report_folder)
    report = Report("mutants")
    mutating.run(report, mutating.Options(tuple(only or ()), steps, rules), say)
    return finish_report(report, report_folder, show)


class Form(StrEnum):
    """What a scenario can be turned into."""

    pytest = "pytest"
    text = "text"
    html = "html"


@app.command()
def export(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario or finding file.")],
    form: Annotated[
        Form, typer.Option("--as", help="A stand-alone test file, plain text, or a page that one steps through.")
    ] = Form.pytest,
    on: Annotated[
        str | None,
        typer.Option(
            "--on", metavar="SUBJECT", help="With --as html: what to run it on (default: where it was found)."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: standard output.")
    ] = None,
) -> int:
    """Turn a scenario into a test that imports vLLM, torch and pytest only, into text, or into a page of its own."""
    from kvproof import engines, paging, scenario_file

    if on and form is not Form.html:
        raise UsageError("--on is for --as html: a test asks whatever vLLM it is run with, a text runs nothing")
    loaded = scenario_file.load(scenario)
    if out is not None and out.exists() and out.samefile(scenario):
        raise UsageError(f"{out} is the scenario itself: name another file with --output")
    note = loaded.finding
    if form is Form.html:
        text = paging.page(scenario, loaded, on, say)
    else:
        violation = note.violation() if note else None
        text = engines.export(
            form.value, loaded.scenario, violation, note.subject if note else "", note.action if note else -1
        )
    if out is None or str(out) == "-":
        write(text)
        return 0
    require_file(out, "the export")
    write_file(out, text)
    write(f"kvproof: export {scenario} form={form.value} file={out} exit=0\n")
    return 0


app.command()(cli_record.record)


@app.command()
def why(files: TraceFiles) -> int:
    """Sum up the lookups of a recorded trace that found less than attention has, and say which rule cost what."""
    from kvproof.trace import commands

    write(commands.why(files))
    return 0


app.add_typer(traces, name="trace")
app.add_typer(zoo, name="zoo")
app.add_typer(spec, name="spec")


def run(arguments: Sequence[str] | None = None) -> int:
    """The whole command, and its exit code. Errors are one line on standard error."""
    try:
        os.getcwd()
    except OSError:  # libraries take it for granted, each in its own way
        complain("the current folder is there no more: change to another")
        return USAGE
    try:
        code = app(args=arguments, prog_name="kvproof", standalone_mode=False)
        if code == INTERRUPTED:
            complain("interrupted")
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except (Exception, SystemExit) as error:
        cause: BaseException = error
        if type(error).__name__ == "Abort":  # what the option parser makes of Ctrl-C, and of whatever ended too early
            cause = error.__cause__ or error
        if stop.came or isinstance(cause, KeyboardInterrupt):
            complain("interrupted")
            return INTERRUPTED
        if hasattr(cause, "format_message"):  # what the option parser says of wrong options
            command = getattr(getattr(cause, "ctx", None), "command_path", "kvproof")
            complain(f"{one_line(cause.format_message())} ({command} --help lists what there is)")
            return USAGE
        message, code = explain(cause)
        complain(message)
        return code


def main() -> NoReturn:
    """Entry point of the ``kvproof`` script, once :mod:`kvproof.__main__` has imported this."""
    prepare()
    sys.unraisablehook = _raise_again
    code = INTERRUPTED
    try:
        # A polite end (a CI server's time limit) keeps what was found, as Ctrl-C does. A shell that started this in the
        # background made it ignore interrupts; asked for one, it must stop all the same.
        _on_stops(stop)
        if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup has it ignored
            signal.signal(signal.SIGHUP, _terminal_gone)
        code = run()
        _on_stops(signal.SIG_IGN)  # all is said and done: what is left is the interpreter's own end
    except KeyboardInterrupt:  # amid these very lines, or a second one while something was said about the first
        _on_stops(signal.SIG_IGN)
        complain("interrupted")
    finish()
    sys.exit(code)


def _terminal_gone(number: int, frame: object) -> None:
    """Is as good as a polite request for an end, whoever answers that by now."""
    os.kill(os.getpid(), signal.SIGTERM)


def _on_stops(handler: Callable[[int, object], None] | signal.Handlers) -> None:
    for number in STOPS:
        signal.signal(number, handler)


def _raise_again(lost: Any) -> None:
    """An interrupt that came up in a destructor or in a callback of the garbage collector is lost there. It is tried
    once more a moment later."""
    # Of one that comes up while it calls a library, ctypes makes an error about the argument.
    if not issubclass(lost.exc_type, KeyboardInterrupt) and "KeyboardInterrupt" not in str(lost.exc_value):
        sys.__unraisablehook__(lost)
    elif sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, 0.01)
