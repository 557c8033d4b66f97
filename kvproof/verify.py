"""The main job: prove the rules, visit small worlds whole, fuzz the reference engine and the newest supported vLLM
release, one table.

The fuzz runs in a process of its own, since a release is imported into the process that drives it. That process is told
of an interrupt once and given time to hand over what it found.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvproof import engines, exploring, findings, fuzzing, proofs, subjects
from kvproof.errors import INTERRUPTED, USAGE, CheckerError, UsageError, explain
from kvproof.report import Report, Row

SUBJECT = f"vllm=={subjects.NEWEST}"
SHARE_OF_REFERENCE = 6
"""The reference engine gets one step for so many of the release's: it is there to show that the rules can be met."""

SCOPES = ("tiny", "at-once")
"""Worlds that take seconds. ``kvproof explore`` visits the others, too."""

_ERROR = "kvproof: error: "


def verify(report: Report, options: fuzzing.Options, smt: Path | None, progress: engines.Progress) -> None:
    """Fill ``report``. Never raises for what goes wrong in a part: the other parts' results are kept.

    Raises :class:`UsageError` before anything is run where the known findings can't be read.
    """
    findings.known_for(findings.load(options.known), subjects.NEWEST)
    try:
        _part(report, "prove", lambda: report.rows.extend(proofs.prove(smt, progress)))
        _part(report, "explore", lambda: exploring.run(report, exploring.Options(SCOPES, out=options.out), progress))
        _part(report, "fuzz reference", lambda: _reference(report, options, progress))
        _part(report, "fuzz", lambda: _release(report, options, progress))
    except KeyboardInterrupt:
        report.interrupted = True


def _part(report: Report, name: str, run: Callable[[], None]) -> None:
    try:
        run()
    except KeyboardInterrupt:
        raise
    except Exception as error:
        message, code = explain(error)
        if code == USAGE:
            report.problem = report.problem or message
        report.rows.append(Row("run", name, "not run" if code == USAGE else "error", "error", message))


def _reference(report: Report, options: fuzzing.Options, progress: engines.Progress) -> None:
    steps = -(-options.steps // SHARE_OF_REFERENCE)
    _fuzz(report, findings.REFERENCE, msgspec.structs.replace(options, steps=steps), progress)


def _release(report: Report, options: fuzzing.Options, progress: engines.Progress) -> None:
    _fuzz(report, SUBJECT, options, progress)


def _count(report: Report, subject: str, record: fuzzing.FuzzRecord) -> None:
    """The numbers of one of the two fuzzes. ``new`` is that of both, with the parts right after it."""
    facts = record.facts()
    if subject == findings.REFERENCE:
        report.facts.update({"reference-steps": facts["steps"], "new": facts["new"], "new-on-reference": facts["new"]})
        return
    report.ended = record.ended
    report.facts.pop("new", None)
    of_reference = report.facts.pop("new-on-reference", 0)
    for name, value in facts.items():
        report.facts[name] = value
        if name == "new":
            parts = {"new-on-reference": of_reference, "new-on-vllm": value}
            report.facts.update({"new": int(of_reference) + int(value), **parts})


def _fuzz(report: Report, subject: str, options: fuzzing.Options, progress: engines.Progress) -> None:
    """Fuzz ``subject``; what it shows goes into ``report`` even if an interrupt is passed on."""
    with tempfile.TemporaryDirectory(prefix="kvproof-") as folder:
        file = Path(folder) / "fuzz.json"
        code, error, interrupted = _run_child(_command(subject, options, file), progress)
        if file.exists():
            record = msgspec.json.decode(file.read_bytes(), type=fuzzing.FuzzRecord)
            report.rows.extend(fuzzing.rows(record))
            report.spent[subject] = record.seconds
            _count(report, subject, record)
            if not (interrupted or record.interrupted or code == INTERRUPTED):
                return
            report.ended = record.ended
        if interrupted or file.exists() or code == INTERRUPTED:
            raise KeyboardInterrupt
        if code == USAGE:
            raise UsageError(error or "the fuzz could not start")
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise CheckerError(error or f"the fuzz of {subject} ended without a result ({ended})")


def _command(subject: str, options: fuzzing.Options, file: Path) -> list[str]:
    command = [sys.executable, "-P", "-m", "kvproof", "fuzz", subject, "--json", str(file)]
    command += ["--seed", str(options.seed), "--steps", str(options.steps), "--workers", str(options.workers)]
    command += ["--out", str(options.out)]
    if options.seconds is not None:
        command += ["--seconds", str(options.seconds)]
    if options.known is not None:
        command += ["--findings", str(options.known)]
    return command


def _run_child(command: list[str], progress: engines.Progress) -> tuple[int, str, bool]:
    """Run ``command``, pass its progress on. Returns its exit code, its error line, and whether it was interrupted."""
    # In a session of its own the child gets Ctrl-C from here alone, once, and not a second time from the terminal.
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert child.stderr is not None
    error = ""
    interrupted = False
    try:
        while True:
            try:
                for line in child.stderr:
                    if line.startswith(_ERROR):
                        error = line.removeprefix(_ERROR).rstrip()
                    else:
                        progress(line.rstrip())
                return child.wait(), error, interrupted
            except KeyboardInterrupt:
                if interrupted:
                    raise  # asked twice: don't wait for what was found
                interrupted = True
                progress("interrupted: keeping what was found (again to stop at once)")
                child.send_signal(signal.SIGINT)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
