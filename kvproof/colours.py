"""A timeline in colours, where it goes to a terminal: actions stand out, what ran is soft, what broke is red."""

from __future__ import annotations

import os
import re
import sys

_ENDS = "\x1b[0m"
_STYLES = (
    (re.compile(r"\s*! "), "\x1b[1;31m"),
    (re.compile(r"\s*\d+\. "), "\x1b[1m"),
    (re.compile(r"\s*(step \d+:|groups:|with )"), "\x1b[2m"),
)


def wanted() -> bool:
    """Whether standard output is a terminal that takes colours; ``NO_COLOR`` and a dumb ``TERM`` say no. With
    ``FORCE_COLOR`` anything takes them."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def coloured(text: str) -> str:
    """``text`` with each line in the colour of what it tells."""
    return "\n".join(_line(line) for line in text.split("\n"))


def _line(line: str) -> str:
    style = next((style for what, style in _STYLES if what.match(line)), "")
    return f"{style}{line}{_ENDS}" if style else line
