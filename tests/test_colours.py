"""Colours: on a terminal only, and nothing but colours is added."""

from __future__ import annotations

import re
import sys

import pytest

from kvproof.colours import coloured, wanted

TEXT = (
    "groups: full 4\n  1. submit r1: 8 tokens\n       step 1: r1 [0, 4)\n       ! SLOT.key-content: block 8\nthe end\n"
)


def test_what_broke_is_red_and_nothing_else_is_changed() -> None:
    made = coloured(TEXT)
    assert re.sub(r"\x1b\[[0-9;]*m", "", made) == TEXT
    red = [line for line in made.splitlines() if "31m" in line]
    assert [line for line in red if "! SLOT.key-content" in line] == red
    assert made.splitlines()[-1] == "the end"


def test_only_a_terminal_that_wants_them_gets_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert not wanted()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert wanted()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert wanted()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wanted()
