"""Values that are known when the code is generated, as C++ constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvproof.models.explore.native.kinds import Kind, Untranslatable, cpp, sequence, short


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
        items = ", ".join(f"{{{self.write(k, kind.parts[0])}, {self.write(v, kind.parts[1])}}}" for k, v in value.items())
        size = len(value)
        array = f"static {inner}::Entry @_items[] = {{{items}}};\n" if size else ""
        text = f"{array}static {inner} @{{{'@_items' if size else 'nullptr'}, {size}, {size}}};"
        return f"(&{self._named(text, '')})"

    def _object(self, value: Any, kind: Kind) -> str:
        fields = self.classes.fields(kind.of)
        inside = ", ".join(self.write(getattr(value, name), part) for name, part in fields.items())
        if kind.name == "named":
            return f"{short(kind.of)}{{{inside}}}"
        name = self._named(f"static const {short(kind.of)} @{{{inside}}};", "")
        return f"const_cast<{short(kind.of)}*>(&{name})"


__all__ = ["Classes", "Constants", "sequence"]
