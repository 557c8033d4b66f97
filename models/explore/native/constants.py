"""Values that are known when the code is generated, as C++ constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvproof.models.explore.native.kinds import INT, Kind, Untranslatable, cpp, short

LINEAR = 4
"""Entries up to which a dictionary is looked through."""


class Classes(Protocol):
    """Who knows the fields of a class."""

    def fields(self, fullname: str) -> Mapping[str, Kind]: ...


class Constants:
    """C++ definitions of constants, each written once. Strings are numbers: those of digits are what they say, others
    are counted down from −1."""

    def __init__(self, classes: Classes) -> None:
        self.classes = classes
        self.lines: list[str] = []
        self._texts: dict[str, int] = {}
        self._names: dict[str, str] = {}

    def text(self, value: str) -> int:
        if value.isdigit() and str(int(value)) == value:
            return int(value)
        return self._texts.setdefault(value, -1 - len(self._texts))

    def write(self, value: Any, kind: Kind) -> str:
        """C++ for ``value``, as ``kind``. Raises :class:`Untranslatable` where it can't be that."""
        match kind.name:
            case "opt":
                return f"{cpp(kind)}{{}}" if value is None else f"{cpp(kind)}{{true, {self.write(value, kind.part)}}}"
            case "maybe":
                return "NONE" if value is None else f"Int({self.write(value, kind.part)})"
            case "list" | "dict" | "set" | "bytes" | "object" if value is None:
                return "nullptr"
            case "int" if isinstance(value, int):
                if abs(value) >= 1 << 63:
                    raise Untranslatable(f"{value} takes more than 64 bits")
                return f"Int({int(value)}LL)" if abs(value) >= 1 << 31 else str(int(value))
            case "bool" if isinstance(value, bool):
                return "true" if value else "false"
            case "text" if isinstance(value, str):
                return f"{self.text(value)}"
            case "tuple":
                parts = [self.write(part, inner) for part, inner in zip(value, kind.parts, strict=True)]
                return f"{cpp(kind)}{{{', '.join(parts)}}}"
            case "list":
                return self._list(value, kind)
            case "bytes":
                return self._list(value, kind)
            case "dict":
                return self._dict(value, kind)
            case "object" | "named":
                return self._object(value, kind)
        raise Untranslatable(f"a constant of class {type(value).__name__} is no {kind.name}")

    def _named(self, text: str, definition: str) -> str:
        """The name of what is defined by ``text``, in which ``@`` stands for the name."""
        found = self._names.get(text)
        if found is None:
            found = self._names[text] = f"k{len(self._names)}"
            self.lines.append((definition or text).replace("@", found))
        return found

    def _list(self, value: Sequence[Any], kind: Kind) -> str:
        part = "uint8_t" if kind.name == "bytes" else cpp(kind.part)
        items = ", ".join(str(item) if kind.name == "bytes" else self.write(item, kind.part) for item in value)
        size = len(value)
        array = f"static {part} const @_items[] = {{{items}}};\n" if size else ""
        start = f"const_cast<{part}*>(@_items)" if size else "nullptr"
        name = self._named(f"{array}static const List<{part}> @{{{start}, {size}, {size}}};", "")
        return f"const_cast<List<{part}>*>(&{name})"

    def _dict(self, value: Mapping[Any, Any], kind: Kind) -> str:
        inner = cpp(kind)[:-1]
        items, size = ", ".join(self._entry(key, held, kind) for key, held in value.items()), len(value)
        array = f"static {inner}::Entry @_items[] = {{{items}}};\n" if size else ""
        slots = _slots(list(value)) if size > LINEAR and kind.parts[0] == INT else []
        if slots:
            array += f"static const int16_t @_slots[] = {{{', '.join(map(str, slots))}}};\n"
        index = f", @_slots, {len(slots) - 1}" if slots else ""
        text = f"{array}static {inner} @{{{'@_items' if size else 'nullptr'}, {size}, {size}{index}}};"
        return f"(&{self._named(text, '')})"

    def _entry(self, key: Any, held: Any, kind: Kind) -> str:
        return f"{{{self.write(key, kind.parts[0])}, {self.write(held, kind.parts[1])}}}"

    def _object(self, value: Any, kind: Kind) -> str:
        fields = self.classes.fields(kind.of)
        inside = ", ".join(self.write(getattr(value, name), part) for name, part in fields.items())
        if kind.name == "named":
            return f"{short(kind.of)}{{{inside}}}"
        name = self._named(f"static const {short(kind.of)} @{{{inside}}};", "")
        return f"const_cast<{short(kind.of)}*>(&{name})"


def _slots(keys: Sequence[int]) -> list[int]:
    """Where each key is found by its hash: its place plus 1. The same hash as ``hash_slot`` in ``runtime.hpp``."""
    last = (1 << (3 * len(keys)).bit_length()) - 1
    slots = [0] * (last + 1)
    for place, key in enumerate(keys):
        at = ((key * 0x9E3779B97F4A7C15) & (1 << 64) - 1) >> 40 & last
        while slots[at]:
            at = (at + 1) & last
        slots[at] = place + 1
    return slots
