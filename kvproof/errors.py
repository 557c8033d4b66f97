"""What can go wrong for a person, in one line each, and the exit code that goes with it."""

from __future__ import annotations

import errno
import os
import tempfile
import traceback
from pathlib import Path
from typing import Final

from kvproof.spec.config import ConfigError
from kvproof.spec.scenario import ScenarioError

MET: Final = 0
FOUND: Final = 1
USAGE: Final = 2
UNDETERMINED: Final = 3
INTERRUPTED: Final = 130

_CHECK = ("z3", "cvc5", "hypothesis", "filelock", "packaging", "jinja2")


class UsageError(Exception):
    """The command can't do what it was asked. The message is one line that says what to do instead."""


class CheckerError(Exception):
    """A checker, not what it checks, went wrong. The message is one line."""


class Stop:
    """What a signal that asks for an end does: it raises ``KeyboardInterrupt``, and is remembered.

    An interrupt while libraries are imported may be swallowed there, or come out as an error of their own. ``held``:
    the first one waits for :meth:`check`, for the sake of code that an exception from nowhere would leave in disorder.
    """

    def __init__(self) -> None:
        self.came = 0
        self.held = False

    def __call__(self, number: int, frame: object) -> None:
        self.came += 1
        if not self.held or self.came > 1:
            raise KeyboardInterrupt

    def check(self) -> None:
        if self.came:
            raise KeyboardInterrupt


stop: Final = Stop()


def explain(error: BaseException) -> tuple[str, int]:
    """One line about ``error`` and the exit code. With ``KVPROOF_DEBUG=1`` in the environment the trace follows."""
    message, code = _explain(error)
    message = one_line(message)
    if os.environ.get("KVPROOF_DEBUG") == "1":
        message += "\n" + "".join(traceback.format_exception(error)).rstrip()
    return message, code


def one_line(text: str) -> str:
    """``text`` without line breaks, and without what would move a terminal's cursor or change its colours."""
    return printable(" ".join(text.split()))


def printable(text: str) -> str:
    """The same with its line breaks."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def require_folder(folder: Path, what: str) -> None:
    """Refuse now, rather than after long work, a folder that ``what`` can't be written to. Makes nothing.

    Raises :class:`UsageError`.
    """
    place = folder
    try:
        while not os.path.lexists(place) and place != place.parent:
            place = place.parent
        if not place.is_dir():
            there = "is a file where a folder is wanted" if place.exists() else "is no folder"
            raise UsageError(f"can't write {what} to {folder}: {place} {there}: name another folder")
        # Asking for permission is not enough: root has it everywhere, and a full or a read-only disk gives it, too.
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(bytes(4096))
    except OSError as error:
        reason = f"nothing can be made in {place} ({error.strerror or error})"
        raise UsageError(f"can't write {what} to {folder}: {reason}: name another folder") from error


def require_file(file: Path, what: str) -> None:
    """The same for a file, which is there to be replaced or not there yet. Devices and pipes are fine."""
    if str(file) == "-":  # where it may mean standard output, nobody asks here
        raise UsageError(f"can't write {what} to -: standard output has something else: name a file")
    folder = Path(os.path.realpath(file)).parent if file.is_symlink() else file.parent
    if file.is_dir():
        raise UsageError(f"can't write {what} to {file}: it is a folder: name a file")
    if not file.exists() or file.is_file():
        try:
            require_folder(folder, what)
        except UsageError as error:
            raise UsageError(str(error).replace(f" to {folder}: ", f" to {file}: ", 1)) from error


def _explain(error: BaseException) -> tuple[str, int]:
    from kvproof.impl.vllm.fetch_error import FetchError

    if isinstance(error, (UsageError, ConfigError, ScenarioError, FetchError)):
        return str(error), USAGE
    if isinstance(error, CheckerError):
        return str(error), UNDETERMINED
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, SystemExit):  # a vLLM may ask for one anywhere: nothing has been established then
        return f"what was driven ended the process: SystemExit: {error} (KVPROOF_DEBUG=1 shows where)", UNDETERMINED
    if isinstance(error, ImportError):
        return _explain_import(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"can't write{f' {error.filename}' if error.filename else ''}: {error.strerror}: free some room", USAGE
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"the name of a file is too long: {error.filename}: choose a shorter one", USAGE
    return f"a checker failed: {type(error).__name__}: {error} (KVPROOF_DEBUG=1 shows where)", UNDETERMINED


def _explain_import(error: ImportError) -> tuple[str, int]:
    """A missing extra, a missing vLLM, and a part of kvproof that isn't there are three different things."""
    name = error.name or ""
    top = name.partition(".")[0]
    if top == "kvproof":
        return f"this kvproof has no {name} ({error})", UNDETERMINED
    if name == "vllm":
        return (
            "vLLM is not installed in this interpreter: name a release (vllm==0.33.0) or a checkout (vllm@PATH)",
            USAGE,
        )
    if top == "vllm":
        return f"this vLLM can't be driven: {error} (KVPROOF_DEBUG=1 shows where)", USAGE
    if not isinstance(error, ModuleNotFoundError):
        return f"a dependency does not fit: {error} (KVPROOF_DEBUG=1 shows where)", USAGE
    extra = "check" if top in _CHECK else top if top in ("torch", "ray") else "vllm"
    also = ",torch" if extra == "vllm" else ""
    return f"{top} is not installed: pip install 'kvproof[{extra}{also}]'", USAGE
