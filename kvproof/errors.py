"""What can go wrong for a person, in one line each, and the exit code that goes with it."""

from __future__ import annotations

import os
import traceback
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


def explain(error: BaseException) -> tuple[str, int]:
    """One line about ``error`` and the exit code. With ``KVPROOF_DEBUG=1`` in the environment the trace follows."""
    message, code = _explain(error)
    message = " ".join(message.split())
    if os.environ.get("KVPROOF_DEBUG") == "1":
        message += "\n" + "".join(traceback.format_exception(error)).rstrip()
    return message, code


def _explain(error: BaseException) -> tuple[str, int]:
    from kvproof.impl.vllm.fetch_error import FetchError

    if isinstance(error, (UsageError, ConfigError, ScenarioError, FetchError)):
        return str(error), USAGE
    if isinstance(error, CheckerError):
        return str(error), UNDETERMINED
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, ImportError):
        return _explain_import(error)
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
