"""What a test says: what broke, where it was found, what is promised."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from kvproof.errors import printable
from kvproof.kvexport.origin import Origin
from kvproof.spec.finding import Violation
from kvproof.spec.scenario import Scenario

WIDTH = 88
"""vLLM's own line length."""

NEEDS = "This file imports vLLM (its Python sources are enough), torch and pytest only."


def headline(violation: Violation | None) -> str:
    """The docstring's first line."""
    if violation is None:
        return "A hybrid prefix cache scenario runs to its end and leaves nothing behind."
    line = f"{violation.invariant}: {_safe(violation.cause)}."
    return line if len(line) + 3 <= WIDTH else f"{violation.invariant} does not hold."


def explanation(scenario: Scenario, violation: Violation | None, origin: Origin) -> str:
    """The rest of the docstring: what broke, on which release, what is known of it, and how it was found."""
    parts = []
    if violation is not None:
        parts.append(_found(violation, origin))
    parts.append(f"{_how(origin)} {NEEDS}")
    if scenario.note:
        parts.append(scenario.note)
    if scenario.forced:
        parts.append("It preempts or evicts from outside: whether the scheduler gets there by itself is open.")
    paragraphs = [_wrapped(part) for part in parts if part]
    if violation is not None and violation.cause not in headline(violation):
        paragraphs.insert(0, textwrap.fill(_safe(f"Cause: {violation.cause}."), WIDTH))
    return "\n\n".join(paragraphs)


def _found(violation: Violation, origin: Origin) -> str:
    found = f"Found on {origin.place}" if origin.place else "Found" if violation.witness else ""
    found += f": {violation.witness}" if violation.witness else ""
    see = f"See {origin.reference}." if origin.reference else ""
    return " ".join(part for part in (found and f"{found}.", origin.summary, see) if part)


def _how(origin: Origin) -> str:
    """How it was come across. Only what was found on a release is said to be of the real scheduler."""
    if origin.ours:
        return (
            "kvproof found it on an engine of its own, not on vLLM, and shrunk it: this test asks the vLLM that it is "
            "run with."
        )
    if origin.place:
        return "Found by kvproof, which drives the real scheduler at random, and shrunk."
    return "Written by kvproof, from a scenario that it can drive the real scheduler with."


def promise(violation: Violation | None) -> str:
    """The invariant's statement, in the catalogue's words."""
    if violation is None:
        return "The scenario raises nothing, and everything is given back at its end."
    return str(getattr(_entry(violation.invariant), "statement", "")) or f"{violation.invariant} holds."


def docstring(text: str) -> str:
    """A function's docstring as source lines."""
    lines = textwrap.wrap(_safe(text), WIDTH - 7, initial_indent='"""', break_on_hyphens=False)
    if len(lines) == 1:
        return f'    {lines[0]}"""'
    return "\n".join(f"    {line}" for line in [*lines, '"""'])


def _entry(invariant: str) -> object | None:
    """The catalogue's entry, or ``None`` for an id that this catalogue does not have."""
    from kvproof.engines import catalogue

    return next((entry for entry in catalogue() if entry.id == invariant), None)


def _wrapped(text: str) -> str:
    return textwrap.fill(_safe(" ".join(text.split())), WIDTH, break_on_hyphens=False)


def _safe(text: str) -> str:
    """Text that can stand in a docstring."""
    return printable(text).replace("\\", "\\\\").replace('"""', "'''").rstrip('"')


def call(head: str, arguments: Sequence[str], tail: str = "", indent: int = 0) -> str:
    """A call, or a function's first line, as Ruff lays it out."""
    room, joined = " " * indent, ", ".join(arguments)
    if len(line := f"{room}{head}({joined}){tail}") <= WIDTH:
        return line
    if len(inner := f"{room}    {joined}") > WIDTH:
        inner = "\n".join(f"{room}    {argument}," for argument in arguments)
    return f"{room}{head}(\n{inner}\n{room}){tail}"


def literal(text: str) -> str:
    """A string literal, in double quotes unless that needs backslashes and single ones do not."""
    if '"' in text and "'" not in text:
        return repr(text)
    return json.dumps(text, ensure_ascii=False)
