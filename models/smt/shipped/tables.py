"""Tables and sets of a manager, as far as its estimate looks into them, with a size that stays unknown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvproof.models.smt.shipped.terms import Count, Symbolic, as_term, count, flag, unmodelled
from kvproof.spec.logic import Truth, maximum


class Table(Symbolic):
    """A list of unknown length. ``entry`` says what is at an index; nothing can be added."""

    def __init__(self, length: Any, entry: Callable[[Any], Any]) -> None:
        self.length, self.entry = length, entry

    def __getitem__(self, index: Any) -> Any:
        if type(index) in (int, Count):
            at = as_term(index, "as an index")
            if type(index) is int and index < 0:
                at = self.length + at
            elif bool(flag(at < 0)):
                unmodelled("a negative index")  # which would count from the end
            if bool(flag(at < 0)) or bool(flag(at >= self.length)):
                raise IndexError("a table indexed beyond its ends")
            return self.entry(at)
        if type(index) is slice and index.stop is None and index.step is None:
            first = as_term(index.start, "as an index")  # not negative, or it would count from the end
            if bool(flag(first < 0)):
                unmodelled("a slice from a negative index")
            return Table(maximum(self.length - first, 0), lambda at: self.entry(at + first))
        return unmodelled(f"a table indexed by {type(index).__name__}")

    def __bool__(self) -> bool:
        return bool(count(self.length) != 0)


class Slot:
    """What is in a slot of a table: null, or a block without a key."""

    block_hash = None

    def __init__(self, null: Truth) -> None:
        self.is_null = flag(null)


class Members(Symbolic):
    """A set of which only one question is asked: whether the request is in it."""

    def __init__(self, member: Truth) -> None:
        self.member = member

    def __contains__(self, _: object) -> bool:
        return bool(flag(self.member))


def length(value: Any) -> Any:
    """What ``len`` means to a released function: a table's unknown length, else the builtin's answer."""
    return count(value.length) if type(value) is Table else len(value)


BUILTINS: Mapping[str, Callable[..., Any]] = {"len": length}
"""The builtins that a released function must find in place of Python's, which insist on plain numbers."""
