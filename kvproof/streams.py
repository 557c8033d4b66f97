"""Standard output and standard error where they are full, closed, or no longer read.

Results that can't be written are an error, since nobody gets to see them. Progress is a courtesy: without it a run goes
on as ever, to the same result.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Literal, TextIO

from kvproof.errors import UsageError

_closed: list[TextIO] = []
"""What :func:`prepare` put in the place of a standard output that was closed."""


def prepare() -> None:
    """Make both streams usable by whoever prints, libraries included, which expect them to be open."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets this number, the lowest that is free: no file of a run may get it
    if sys.stdout is None:
        sys.stdout = _nowhere()
        _closed.append(sys.stdout)
    if sys.stderr is None:
        sys.stderr = _nowhere()
    if sys.stdin is None:
        sys.stdin = _nowhere("r")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what a terminal can't show must not end a run


def say(line: str) -> None:
    """Progress and errors: one line on standard error, apart from the results, if there is somebody to read it."""
    if sys.stderr is None:
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        # What is left in its buffer would come up as an error in whoever flushes it next: on exit, or before a fork.
        discard(sys.stderr)


def write(text: str) -> None:
    """Results: ``text`` as it is, on standard output. A reader that stopped reading changes no verdict.

    Raises :class:`UsageError` where it can't be written: the disk is full, or standard output is closed.
    """
    if sys.stdout is None or sys.stdout in _closed:
        raise UsageError("can't write to standard output: it is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)  # Python flushes again on exit, which must not fail then
    except OSError as error:
        raise UsageError(f"can't write to standard output: {error.strerror or error}") from error


def finish() -> None:
    """Flush standard output, so that the interpreter has nothing left to complain about on exit."""
    try:
        sys.stdout.flush()
    except OSError:  # a full disk, of which has been told
        discard(sys.stdout)


def discard(stream: TextIO) -> None:
    """From now on nothing that is written to ``stream`` goes anywhere, what is in its buffer included."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _nowhere(mode: Literal["r", "w"] = "w") -> TextIO:
    return open(os.devnull, mode, encoding="utf-8")
