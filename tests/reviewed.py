"""Stored results for the review's tests: those of this package, and some that say what a test wants."""

from __future__ import annotations

from kvproof.review import content, status
from kvproof.review.status import Said, Status, Word

STORED = status.stored_file()


def said(name: str, *words: Word) -> Status:
    """As if one checker had run and said just this."""
    return Status(1, {name: Said(name, f"kvproof {name}", "2026-01-01", "0" * 40, "kvproof: …", 1.0, list(words))})


def entry_of(name: str, stored: Status) -> content.Entry:
    """What the site would say of one invariant."""
    return next(entry for entry in content.entries(stored) if entry.id == name)
