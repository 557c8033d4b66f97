"""What a test says: what broke, where it was found, what is promised."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable

from kvproof.spec.finding import Violation
from kvproof.spec.scenario import Scenario

WIDTH = 88
"""vLLM's own line length."""


def headline(violation: Violation | None) -> str:
    """The docstring's first line."""
    if violation is None:
        return "A hybrid prefix cache scenario runs to its end and leaves nothing behind."
    return f"{violation.invariant}: {_safe(violation.cause)}."


def explanation(scenario: Scenario, violation: Violation | None, subject: str) -> str:
    """The rest of the docstring: what broke, on which release, what is known of it, and how it was found."""
    parts = []
    if violation is not None:
        parts.append(f"Promised: {promise(violation)}")
        parts.append(f"Found on {subject}: {violation.witness}.")
        known = provenance(violation)
        if known:
            parts.append(f"See {known}.")
    parts.append(
        "Found by kvproof, which drives the real scheduler at random, and shrunk. This file needs "
        "vLLM's Python sources and pytest only."
    )
    if scenario.note:
        parts.append(scenario.note)
    if scenario.forced:
        parts.append("It preempts or evicts from outside: whether the scheduler gets there by itself is open.")
    return "\n\n".join(textwrap.fill(_safe(" ".join(part.split())), WIDTH, break_on_hyphens=False) for part in parts)


def promise(violation: Violation | None) -> str:
    """The invariant's statement, in the catalogue's words."""
    if violation is None:
        return "The scenario raises nothing, and everything is given back at its end."
    return str(getattr(_entry(violation.invariant), "statement", "")) or f"{violation.invariant} holds."


def provenance(violation: Violation) -> str:
    """Where the fault is known: from the record of a known finding, else the catalogue; empty where it is nowhere."""
    from kvproof import findings

    record = next((r for r in findings.load() if r.identity == violation.identity and r.reference), None)
    if record is not None:
        return record.reference.rstrip(".")
    known: str | Iterable[str] = getattr(_entry(violation.invariant), "provenance", "")
    if isinstance(known, str):
        return known
    numbers = ", ".join(known)
    return f"vLLM {numbers} (of the invariant, not surely of this fault)" if numbers else ""


def constant(name: str, text: str) -> str:
    """``name = text`` as source lines of at most the line length."""
    if len(name) + len(text) + 5 <= WIDTH:
        return f"{name} = {literal(text)}"
    lines = textwrap.wrap(text, WIDTH - 7, break_on_hyphens=False)
    parts = [literal(line + (" " if index < len(lines) - 1 else "")) for index, line in enumerate(lines)]
    return "\n".join([f"{name} = (", *(f"    {part}" for part in parts), ")"])


def _entry(invariant: str) -> object | None:
    """The catalogue's entry, or ``None`` for an id that this catalogue does not have."""
    from kvproof.engines import catalogue

    return next((entry for entry in catalogue() if entry.id == invariant), None)


def _safe(text: str) -> str:
    """Text that can stand in a docstring."""
    return text.replace("\\", "\\\\").replace('"""', "'''").rstrip('"')


def literal(text: str) -> str:
    """A string literal, in double quotes unless that needs backslashes and single ones do not."""
    if '"' in text and "'" not in text:
        return repr(text)
    return json.dumps(text, ensure_ascii=False)
