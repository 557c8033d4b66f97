"""What a translation gathers: the functions and classes that can be reached, constants, and questions to Python."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mypy.nodes import (
    AssignmentStmt,
    CallExpr,
    Context,
    Decorator,
    Expression,
    FuncDef,
    NameExpr,
    RefExpr,
    TempNode,
    TypeInfo,
    Var,
)
from mypy.types import AnyType, CallableType, get_proper_type

from kvproof.models.explore.native.constants import Constants
from kvproof.models.explore.native.kinds import (
    ABSENT,
    CONSTANT,
    INT,
    NONE,
    Kind,
    Kinds,
    Untranslatable,
    cpp,
    member,
    short,
)
from kvproof.models.explore.native.program import Program

ASKED_MODULES = ("kvproof.spec.rules.",)
"""Functions of these modules are asked in Python, as are those that remember their answers (``lru_cache``)."""
ASKED = frozenset({"kvproof.spec.tracer.advance"})
"""So are these: its products take more than 64 bits."""

UNDERSTOOD = ("functools.lru_cache", "builtins.property", "builtins.classmethod", "builtins.staticmethod")
"""Decorators."""

FORGOTTEN = frozenset({
    ("kvproof.models.explore.encoding.Encoding", "_bytes"),
    ("kvproof.models.explore.encoding.Encoding", "_contents"),
})  # fmt: skip
"""Dictionaries of answers that are remembered to save time. Here they stay empty: each answer is worked out again."""


@dataclass(frozen=True)
class Parameter:
    """``kind`` is :data:`CONSTANT` or :data:`ABSENT` for what is not passed on."""

    name: str
    kind: Kind
    default: Expression | None = None

    @property
    def passed(self) -> bool:
        return self.kind not in (CONSTANT, ABSENT)


@dataclass(frozen=True)
class Signature:
    """How a function is called. ``question`` is its number if it is asked in Python, −1 if it is translated."""

    name: str
    parameters: tuple[Parameter, ...]
    returns: Kind
    question: int = -1

    def declaration(self) -> str:
        inside = ", ".join(f"{cpp(one.kind)} {one.name}_" for one in self.parameters if one.passed)
        return f"static {cpp(self.returns)} {self.name}({inside})"


@dataclass(frozen=True)
class Question:
    """A function that is asked in Python, with the kinds of its arguments and of its answer."""

    fullname: str
    arguments: tuple[Kind, ...]
    answer: Kind


class Translator:
    """Everything that is reached from what was asked for. ``objects`` are those there is one of, by class."""

    def __init__(self, program: Program, objects: Mapping[str, Any]) -> None:
        self.program, self.objects = program, objects
        self.kinds = Kinds(frozenset(objects), self._see)
        self.constants = Constants(self)
        self.classes: dict[str, TypeInfo] = {}
        self.questions: list[Question] = []
        self.waiting: deque[FuncDef] = deque()
        self._signatures: dict[FuncDef, Signature] = {}
        self._fields: dict[str, dict[str, Kind]] = {}

    def is_constant(self, value: Any) -> bool:
        """Whether it is one of the objects that there is one of."""
        return any(value is one for one in self.objects.values())

    # -- where we are -------------------------------------------------------------------------------------------------

    def fail(self, node: Context, module: str, reason: str) -> Untranslatable:
        """What is raised for a construct that has no translation."""
        path = self.program.files[module].path if module in self.program.files else module
        return Untranslatable(f"{Path(path).name}, line {node.line}: {reason}")

    # -- classes ------------------------------------------------------------------------------------------------------

    def _see(self, info: TypeInfo) -> None:
        self.classes.setdefault(info.fullname, info)

    def fields(self, fullname: str) -> Mapping[str, Kind]:
        """What an object of a class carries: everything that has a kind, and is not constant."""
        if fullname not in self._fields:
            found = self._fields[fullname] = {}
            info = self.classes[fullname]
            names = [name for name, _ in self.defaults(info)] if self.is_record(info) else list(info.names)
            for name in names:
                node = info.names[name].node
                if not isinstance(node, Var) or node.is_classvar or node.type is None:
                    continue
                try:
                    kind = self._rule_kind(node, info)
                except Untranslatable:
                    continue  # whoever uses it is told
                if kind not in (CONSTANT, ABSENT):
                    found[name] = kind
        return self._fields[fullname]

    def field(self, fullname: str, name: str) -> Kind | None:
        """The kind of one field, constant or not; ``None`` if it has none, or there is no such field."""
        found = self.fields(fullname).get(name)
        if found is not None:
            return found
        symbol = self.classes[fullname].names.get(name)
        if symbol is None or not isinstance(symbol.node, Var):
            return None
        try:
            return self.kinds.of(symbol.node.type)
        except Untranslatable:
            return None

    def _rule_kind(self, node: Var, info: TypeInfo) -> Kind:
        """Rules are written for solvers, too: their numbers may be anything, and here they are numbers."""
        if info.module_name.startswith(ASKED_MODULES) and isinstance(get_proper_type(node.type), AnyType):
            return INT
        return self.kinds.of(node.type)

    def defaults(self, info: TypeInfo) -> list[tuple[str, Expression | None]]:
        """The fields that a data class or named tuple is made of, in order, with their default."""
        found: list[tuple[str, Expression | None]] = []
        for statement in info.defn.defs.body:
            if isinstance(statement, AssignmentStmt) and isinstance(statement.lvalues[0], NameExpr):
                value = statement.rvalue
                default = None if isinstance(value, TempNode) and value.no_rhs else value
                found.append((statement.lvalues[0].name, default))
        return found

    @staticmethod
    def is_record(info: TypeInfo) -> bool:
        """Whether its objects are compared field by field."""
        return info.is_named_tuple or "dataclass" in info.metadata

    # -- functions ----------------------------------------------------------------------------------------------------

    def signature(self, node: FuncDef | Decorator) -> Signature:
        """How to call a function, which is reached from now on."""
        decorators = node.original_decorators if isinstance(node, Decorator) else []
        function = node.func if isinstance(node, Decorator) else node
        if function not in self._signatures:
            self._signatures[function] = self._sign(function, decorators)
        return self._signatures[function]

    def _sign(self, node: FuncDef, decorators: Sequence[Expression]) -> Signature:
        module = self.module_of(node.fullname)
        if not isinstance(node.type, CallableType):
            raise self.fail(node, module, f"{node.name} has no types")
        asked = node.fullname.startswith(ASKED_MODULES) or node.fullname in ASKED
        for decorator in decorators:
            inner = decorator.callee if isinstance(decorator, CallExpr) else decorator
            name = inner.fullname if isinstance(inner, RefExpr) else ""
            asked = asked or name == "functools.lru_cache"
            if name not in UNDERSTOOD:
                raise self.fail(node, module, f"{node.name} is decorated with something that has no translation")
        try:
            parameters = self._parameters(node, node.type, asked)
            returns = self._asked_kind(node.type.ret_type) if asked else self.kinds.of(node.type.ret_type)
        except Untranslatable as error:
            raise self.fail(node, module, f"{node.name}: {error}") from error
        question = -1
        if asked:
            question = len(self.questions)
            self.questions.append(Question(node.fullname, tuple(one.kind for one in parameters), returns))
        else:
            self.waiting.append(node)
        return Signature(short(node.fullname), tuple(parameters), returns, question)

    def _parameters(self, node: FuncDef, type_: CallableType, asked: bool) -> list[Parameter]:
        found = []
        for place, argument in enumerate(node.arguments):
            if place == 0 and node.info and not node.is_static:
                if node.is_class:
                    continue
                kind = CONSTANT
                if node.info.fullname not in self.objects:
                    kind = Kind("named" if node.info.is_named_tuple else "object", (), node.info.fullname)
                    self._see(node.info)
            else:
                kind = self._asked_kind(type_.arg_types[place]) if asked else self.kinds.of(type_.arg_types[place])
            if argument.kind.is_star():
                raise Untranslatable("it takes any number of arguments")
            found.append(Parameter(argument.variable.name, kind, argument.initializer))
        return found

    def _asked_kind(self, type_: Any) -> Kind:
        return INT if isinstance(get_proper_type(type_), AnyType) else self.kinds.of(type_)

    def module_of(self, fullname: str) -> str:
        module = fullname
        while module and module not in self.program.files:
            module = module.rpartition(".")[0]
        return module

    def value_of(self, fullname: str) -> Any:
        """The value of a module's constant."""
        module = self.module_of(fullname)
        return getattr(importlib.import_module(module), fullname[len(module) + 1 :])

    # -- C++ ----------------------------------------------------------------------------------------------------------

    def class_lines(self) -> list[str]:
        """Definitions of the classes that were seen."""
        for name in list(self.classes):
            self.fields(name)  # which may come across others
        done: list[str] = []
        forward = [f"struct {short(name)};" for name in self.classes]
        forward += [f"static inline bool eq({self._by(info)}, {self._by(info)});" for info in self.classes.values()]

        def define(name: str) -> None:
            info = self.classes[name]
            if name in defined:
                return
            defined.add(name)
            for kind in self.fields(name).values():
                for inner in _values(kind):
                    define(inner)
            inside = " ".join(f"{cpp(kind)} {member(field)};" for field, kind in self.fields(name).items())
            done.append(f"struct {short(name)} {{ {inside} }};")
            parts = [f"eq({'a.' if info.is_named_tuple else 'a->'}{member(f)}, "
                     f"{'b.' if info.is_named_tuple else 'b->'}{member(f)})"
                     for f in self.fields(name)]  # fmt: skip
            if info.is_named_tuple:
                body = " && ".join(parts) or "true"
            elif self.is_record(info):
                body = f"a == b || (a && b && {' && '.join(parts) or 'true'})"
            else:
                body = "a == b"
            equal.append(f"static inline bool eq({self._by(info, 'a')}, {self._by(info, 'b')}) {{ return {body}; }}")

        defined: set[str] = set()
        equal: list[str] = []
        for name in list(self.classes):
            define(name)
        return forward + done + equal

    @staticmethod
    def _by(info: TypeInfo, name: str = "") -> str:
        return f"const {short(info.fullname)}& {name}" if info.is_named_tuple else f"{short(info.fullname)}* {name}"

    def question_lines(self) -> list[str]:
        """How questions are put to Python: a thread remembers the answers that it got."""
        kept: list[str] = []
        lines: list[str] = []
        for signature in self._signatures.values():
            if signature.question < 0:
                continue
            numbers = [part for one in signature.parameters for part in _flat(f"{one.name}_", one.kind)]
            answer = cpp(signature.returns)
            kept.append(f"    Answers<{len(numbers)}, {answer}> to_{signature.question};")
            lines += [
                f"{signature.declaration()} {{",
                f"    const Int numbers[] = {{{', '.join(numbers)}}};",
                f"    return answers->to_{signature.question}.ask({signature.question}, numbers, "
                f"[](const Int*& at) -> {answer} {{ return {self._reading(signature.returns)}; }});",
                "}",
            ]
        return ["struct AllAnswers {", *kept, "};", "OWN AllAnswers* answers;", *lines]

    def _reading(self, kind: Kind) -> str:
        match kind.name:
            case "int":
                return "read_number(at)"
            case "bool":
                return "(read_number(at) != 0)"
            case "tuple":
                return f"{cpp(kind)}{{{', '.join(map(self._reading, kind.parts))}}}"
            case "list" if kind.part == INT:
                return "read_list(at)"
            case "object":
                return f"new {short(kind.of)}{{{', '.join(map(self._reading, self.fields(kind.of).values()))}}}"
        raise Untranslatable(f"an answer of kind {kind.name} can't be read")

    def prototypes(self) -> list[str]:
        return [f"{signature.declaration()};" for signature in self._signatures.values()]


def _flat(code: str, kind: Kind) -> list[str]:
    if kind.name == "tuple":
        return [part for place, inner in enumerate(kind.parts) for part in _flat(f"std::get<{place}>({code})", inner)]
    if kind.name in ("int", "bool"):
        return [f"Int({code})"]
    raise Untranslatable(f"an argument of kind {kind.name} can't be asked with")


def _values(kind: Kind) -> list[str]:
    """Classes whose objects lie in a value of this kind itself."""
    if kind.name == "named":
        return [kind.of]
    return [name for part in kind.parts for name in _values(part)] if kind.name in ("tuple", "opt") else []


__all__ = ["FORGOTTEN", "NONE", "Parameter", "Question", "Signature", "Translator"]
