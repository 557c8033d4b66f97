"""Values of an event as people read them: prefixes by length and the last digits of their hash; prose of sources."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup, escape

from kvproof.spec.tracer import State, length_of, show

_MARKUP = re.compile(r"``(.+?)``|:\w+:`~?\.?(.+?)`|\*(\w+)\*")
"""Of a docstring: code, a reference to code, emphasis."""
_MANY = 8
"""A row of more prefixes than this, each a token longer than the one before, is told by its ends."""


def marked(text: str) -> Markup:
    """Prose of a docstring: what is code there is code here."""
    parts, end = [], 0
    for found in _MARKUP.finditer(text):
        code, reference, emphasis = found.groups()
        kind = "em" if emphasis else "code"
        parts += [
            escape(text[end : found.start()]),
            Markup(f"<{kind}>{{}}</{kind}>").format(code or reference or emphasis),
        ]
        end = found.end()
    return Markup("").join([*parts, escape(text[end:])])


def fields(event: Any) -> tuple[tuple[str, str], ...]:
    """Every field of an event, or of what an event has in it, by name."""
    names = getattr(event, "_fields", None) or [field.name for field in dataclasses.fields(event)]
    hints = typing.get_type_hints(type(event))
    return tuple((name, told(getattr(event, name), hints[name])) for name in names)


def told(value: Any, hint: Any = None) -> str:
    """One value. ``hint`` is its declared type, which alone tells a prefix from a number."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int):
        return show(State(value)) if _is_state(hint) else str(value)
    if isinstance(value, str):
        return value or "–"
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        return f"{type(value).__name__}({', '.join(' '.join(pair) for pair in fields(value))})"
    if isinstance(value, (list, tuple)):
        return _several(value, _parts(hint, len(value)))
    if isinstance(value, (set, frozenset)):
        # By group and length, or by number: in an order that is the same every time.
        ordered = sorted(value, key=lambda one: (one[0], length_of(one[1])) if isinstance(one, tuple) else one)
        return _several(ordered, _parts(hint, len(ordered)))
    return str(value)


def _is_state(hint: Any) -> bool:
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return hint is State or (union and State in typing.get_args(hint))


def _parts(hint: Any, count: int) -> Sequence[Any]:
    """The declared types of the ``count`` items of a tuple or set."""
    items = typing.get_args(hint)
    if not items or typing.get_origin(hint) not in (tuple, frozenset, set, list):
        return [None] * count
    return items if len(items) == count and items[-1] is not ... else [items[0]] * count


def _several(items: Sequence[Any], hints: Sequence[Any]) -> str:
    if not items:
        return "none"
    parts = [told(item, hint) for item, hint in zip(items, hints, strict=True)]
    if len(items) > _MANY and _is_state(hints[0]):
        lengths = [length_of(item) for item in items]
        if lengths == list(range(lengths[0], lengths[0] + len(lengths))):
            return f"[{parts[0]}, {parts[1]}, … {parts[-1]}], of one conversation"
    if dataclasses.is_dataclass(items[0]) or hasattr(items[0], "_fields"):
        # Each on a line of its own, further in than what they are a part of.
        return "[\n" + ",\n".join(f"  {part}".replace("\n", "\n  ") for part in parts) + "\n]"
    return f"[{', '.join(parts)}]"


def compared(before: str, after: str) -> tuple[tuple[str, bool], ...]:
    """``after`` in pieces, and of each whether ``before`` has it otherwise. What is short differs as a whole."""
    old, new = _words(before), _words(after)
    if len(new) < _MANY:
        return ((after, True),)
    pieces: list[tuple[str, bool]] = []
    for how, _, _, first, last in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if first < last:
            pieces.append(("".join(new[first:last]), how != "equal"))
    # What is only gone leaves no piece to point at.
    return tuple(pieces) if any(differs for _, differs in pieces) else ((after, True),)


def _words(text: str) -> list[str]:
    return re.findall(r"[\w@#-]+|[^\w@#-]", text)
