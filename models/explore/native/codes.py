"""A piece of C++, and what is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvproof.models.explore.native.kinds import (
    BOOL,
    INT,
    NONE,
    TEXT,
    Kind,
    Untranslatable,
    nullable,
)

UNKNOWN: Final = object()
"""In place of a value that is not known before the code runs."""


@dataclass(frozen=True)
class Code:
    """A C++ expression. ``pure``: it changes nothing. ``value``: what it is known to be. ``parts`` make up a tuple."""

    code: str
    kind: Kind
    pure: bool = True
    value: Any = UNKNOWN
    parts: tuple[Code, ...] = ()

    @property
    def known(self) -> bool:
        return self.value is not UNKNOWN


def unify(kinds: Sequence[Kind]) -> Kind:
    """The kind of what is one of several things."""
    found = {kind for kind in kinds if kind != NONE}
    if found == {INT, BOOL}:
        found = {INT}
    if found in ({INT, nullable(INT)}, {BOOL, nullable(BOOL)}, {TEXT, nullable(TEXT)}):
        found = {next(kind for kind in found if kind.name == "maybe")}
    if len(found) != 1:
        raise Untranslatable(f"one of several things: {', '.join(kind.name for kind in kinds)}")
    kind = found.pop()
    return nullable(kind) if NONE in kinds and kind.name != "opt" else kind


def words(kind: Kind) -> str:
    """What a kind is called in messages."""
    return f"{kind.name} of {', '.join(map(words, kind.parts))}" if kind.parts else kind.of or kind.name
