"""What C++ type a Python type becomes.

Everything mutable, and every object, is a pointer into the arena: assignment shares it, as in Python. ``int | None`` is
an ``Int`` with one value for ``None``; a string is a number, for strings are only ever compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mypy.nodes import TypeInfo
from mypy.types import (
    AnyType,
    CallableType,
    Instance,
    LiteralType,
    NoneType,
    ProperType,
    TupleType,
    Type,
    UnionType,
    get_proper_type,
)


class Untranslatable(Exception):
    """A construct whose meaning in C++ is not known. The message says where it is."""


@dataclass(frozen=True)
class Kind:
    """``name`` is what it is, ``parts`` are the kinds that it is made of, ``of`` the class of an object."""

    name: str
    parts: tuple[Kind, ...] = ()
    of: str = ""

    @property
    def part(self) -> Kind:
        return self.parts[0]


INT = Kind("int")
BOOL = Kind("bool")
TEXT = Kind("text")
NONE = Kind("none")
BYTES = Kind("bytes")
RANGE = Kind("range")
ABSENT = Kind("absent")
"""An observer, or what one is told through: there is none."""
CONSTANT = Kind("constant")
"""An object that there is one of, known when the code is generated."""
NUMBERS = ("int", "bool", "text", "maybe")
POINTERS = ("list", "dict", "set", "bytes", "object")

ABSENT_CLASSES = frozenset({"kvproof.spec.view.View"})
LISTS = frozenset({
    "builtins.list", "builtins.tuple", "typing.Sequence", "typing.Iterable", "typing.Collection", "typing.Iterator",
    "typing.Generator", "builtins.reversed",
})  # fmt: skip
SETS = frozenset({"builtins.set", "builtins.frozenset"})
DICTS = frozenset({"builtins.dict", "typing.Mapping"})


def sequence(part: Kind) -> Kind:
    return Kind("list", (part,))


def nullable(kind: Kind) -> Kind:
    """``kind | None``."""
    if kind in (INT, BOOL, TEXT):
        return Kind("maybe", (kind,))
    return Kind("opt", (kind,)) if kind.name in ("tuple", "named") else kind


def short(fullname: str) -> str:
    """The C++ name of a class or function."""
    return fullname.removeprefix("kvproof.").replace(".", "_")


def member(name: str) -> str:
    """The C++ name of a field, which is no keyword."""
    return f"{name}_"


def cpp(kind: Kind) -> str:
    """The C++ type."""
    match kind.name:
        case "int" | "text" | "maybe":
            return "Int"
        case "bool":
            return "bool"
        case "bytes":
            return "List<uint8_t>*"
        case "list":
            return f"List<{cpp(kind.part)}>*"
        case "set":
            return f"Set<{cpp(kind.part)}>*"
        case "dict":
            return f"Dict<{cpp(kind.parts[0])}, {cpp(kind.parts[1])}>*"
        case "tuple":
            return f"std::tuple<{', '.join(map(cpp, kind.parts))}>"
        case "opt":
            return f"Opt<{cpp(kind.part)}>"
        case "object":
            return f"{short(kind.of)}*"
        case "named":
            return short(kind.of)
        case "range":
            return "Range"
        case "none":
            return "void"
    raise Untranslatable(f"a value of kind {kind.name} has no C++ type")


class Kinds:
    """Kinds of mypy's types. ``constants`` are the classes of which there is one object; ``seen`` hears of classes."""

    def __init__(self, constants: frozenset[str], seen: Callable[[TypeInfo], None]) -> None:
        self.constants, self.seen = constants, seen

    def of(self, type_: Type | None) -> Kind:
        """Raises :class:`Untranslatable` for a type that has no kind."""
        if type_ is None:
            raise Untranslatable("a value has no type")
        proper = get_proper_type(type_)
        match proper:
            case NoneType():
                return NONE
            case LiteralType():
                return self.of(proper.fallback)
            case UnionType():
                return self._union([get_proper_type(item) for item in proper.items])
            case TupleType():
                info = proper.partial_fallback.type
                if info.is_named_tuple:
                    self.seen(info)
                    return Kind("named", (), info.fullname)
                return Kind("tuple", tuple(self.of(item) for item in proper.items))
            case CallableType():
                return ABSENT
            case Instance():
                return self._instance(proper)
            case AnyType():
                raise Untranslatable("a value may be anything")
        raise Untranslatable(f"no kind for the type {proper}")

    def _union(self, items: list[ProperType]) -> Kind:
        kinds = {self.of(item) for item in items if not isinstance(item, NoneType)}
        if ABSENT in kinds:
            return ABSENT
        if kinds == {INT, BOOL}:
            kinds = {INT}
        if len(kinds) != 1:
            raise Untranslatable(f"a value is one of several things: {' | '.join(map(str, items))}")
        kind = kinds.pop()
        return nullable(kind) if any(isinstance(item, NoneType) for item in items) else kind

    def _instance(self, instance: Instance) -> Kind:
        info = instance.type
        name = info.fullname
        bases = {base.fullname for base in info.mro}
        if name in self.constants:
            return CONSTANT
        if name in ABSENT_CLASSES:
            return ABSENT
        if name == "builtins.bool":
            return BOOL
        if "builtins.int" in bases:  # State and Status, too
            return INT
        if name == "builtins.str":
            return TEXT
        if name in ("builtins.bytes", "builtins.bytearray"):
            return BYTES
        if name == "builtins.range":
            return RANGE
        if name in LISTS:
            return sequence(self.of(instance.args[0]))
        if name in SETS:
            return Kind("set", (self.of(instance.args[0]),))
        if name in DICTS:
            return Kind("dict", (self.of(instance.args[0]), self.of(instance.args[1])))
        if info.module_name.startswith("kvproof."):
            self.seen(info)
            return Kind("object", (), name)
        raise Untranslatable(f"no kind for the class {name}")
