"""What is known before the code runs: constants, and what follows from them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from mypy.nodes import (
    BytesExpr,
    CallExpr,
    ComparisonExpr,
    ConditionalExpr,
    Expression,
    IndexExpr,
    IntExpr,
    MemberExpr,
    NameExpr,
    OpExpr,
    SliceExpr,
    StrExpr,
    TupleExpr,
    TypeInfo,
    UnaryExpr,
    Var,
)

from kvproof.models.explore.native.codes import UNKNOWN, Code
from kvproof.models.explore.native.kinds import (
    ABSENT,
    BOOL,
    CONSTANT,
    INT,
    NONE,
    TEXT,
    Kind,
    Untranslatable,
)
from kvproof.models.explore.native.translator import FORGOTTEN, Translator

FOLDED: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "<<": operator.lshift, ">>": operator.rshift, "|": operator.or_, "&": operator.and_, "^": operator.xor,
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "is": operator.is_, "is not": operator.is_not, "in": lambda a, b: a in b, "not in": lambda a, b: a not in b,
}  # fmt: skip


class Known:
    """Of one function, whose variables are in ``variables``."""

    def __init__(self, translator: Translator, module: str) -> None:
        self.translator, self.module = translator, module
        self.variables: dict[Var, Code] = {}
        self._count = 0

    def fresh(self, name: str) -> str:
        self._count += 1
        return f"{name}{self._count}"

    def fail(self, node: Expression, reason: str) -> Untranslatable:
        return self.translator.fail(node, self.module, reason)

    # -- what is known ------------------------------------------------------------------------------------------------

    def known(self, node: Expression) -> Any:
        """The value of an expression that is known now, or :data:`UNKNOWN`."""
        match node:
            case IntExpr() | StrExpr():
                return node.value
            case BytesExpr():
                return UNKNOWN
            case NameExpr() | MemberExpr():
                return self._known_name(node)
            case UnaryExpr():
                inner = self.known(node.expr)
                if inner is UNKNOWN or node.op not in ("not", "-"):
                    return UNKNOWN
                return not inner if node.op == "not" else -inner
            case OpExpr() if node.op in ("and", "or"):
                left = self.known(node.left)
                if left is UNKNOWN:
                    return UNKNOWN
                return left if bool(left) == (node.op == "or") else self.known(node.right)
            case OpExpr():
                left, right = self.known(node.left), self.known(node.right)
                if left is UNKNOWN or right is UNKNOWN or node.op not in FOLDED or isinstance(left, list):
                    return UNKNOWN
                return FOLDED[node.op](left, right)
            case ComparisonExpr():
                values = [self.known(operand) for operand in node.operands]
                if any(value is UNKNOWN for value in values):
                    return UNKNOWN
                pairs = zip(node.operators, values, values[1:], strict=False)
                return all(FOLDED[sign](a, b) for sign, a, b in pairs)
            case IndexExpr() if not isinstance(node.index, SliceExpr):
                base, place = self.known(node.base), self.known(node.index)
                return UNKNOWN if base is UNKNOWN or place is UNKNOWN else base[place]
            case ConditionalExpr():
                which = self.condition(node.cond)
                if not which.known:
                    return UNKNOWN
                return self.known(node.if_expr if which.value else node.else_expr)
            case TupleExpr():
                items = [self.known(item) for item in node.items]
                return UNKNOWN if any(item is UNKNOWN for item in items) else tuple(items)
            case CallExpr(callee=NameExpr()):
                return self._known_call(node)
        return UNKNOWN

    def _known_call(self, node: CallExpr) -> Any:
        assert isinstance(node.callee, NameExpr)
        if isinstance(node.callee.node, TypeInfo) and node.callee.node.fullname in self.translator.objects:
            if not all(self.translator.is_constant(self.known(argument)) for argument in node.args):
                raise self.fail(node, f"another {node.callee.node.name} than the one there is")
            return self.translator.objects[node.callee.node.fullname]
        if node.callee.fullname in ("builtins.len", "builtins.bool", "builtins.int") and len(node.args) == 1:
            value = self.known(node.args[0])
            calls: dict[str, Callable[[Any], Any]] = {"len": len, "bool": bool, "int": int}
            return value if value is UNKNOWN else calls[node.callee.name](value)
        return UNKNOWN

    def _known_name(self, node: NameExpr | MemberExpr) -> Any:
        if node.fullname in ("builtins.True", "builtins.False", "builtins.None"):
            return {"True": True, "False": False, "None": None}[node.name]
        if isinstance(node.node, Var):
            variable = self.variables.get(node.node)
            if variable is not None and variable.known:
                return variable.value
            if isinstance(node, NameExpr | MemberExpr) and "." in node.node.fullname and not node.node.info:
                return self.translator.value_of(node.node.fullname)
        kind = self.kind_of(node)
        if kind == ABSENT:
            return None
        if kind == CONSTANT:
            return self._constant(node)
        if isinstance(node, MemberExpr):
            base = self.known(node.expr)
            if base is not UNKNOWN and base is not None:
                if (f"{type(base).__module__}.{type(base).__qualname__}", node.name) in FORGOTTEN:
                    return {}
                value = getattr(base, node.name, UNKNOWN)
                return UNKNOWN if callable(value) and not isinstance(value, type) else value
        return UNKNOWN

    def _constant(self, node: Expression) -> Any:
        from mypy.types import Instance, get_proper_type

        proper = get_proper_type(self.translator.program.types.get(node))
        assert isinstance(proper, Instance)
        return self.translator.objects[proper.type.fullname]

    def kind_of(self, node: Expression) -> Kind | None:
        """What mypy says; ``None`` where that has no kind."""
        type_ = self.translator.program.types.get(node)
        try:
            return self.translator.kinds.of(type_) if type_ is not None else None
        except Untranslatable:
            return None

    def written(self, node: Expression, value: Any, want: Kind | None) -> Code:
        """A value that is known, as C++."""
        plain = {bool: BOOL, int: INT, str: TEXT, type(None): NONE}.get(type(value))
        if value is None and want is None:
            return Code("nullptr", NONE, value=None)
        kind = want if want is not None else plain if plain is not None else self.kind_of(node)
        if kind in (CONSTANT, ABSENT):
            return Code("", kind, value=value)
        if kind is None:
            raise self.fail(node, f"a constant of class {type(value).__name__} has no kind")
        if plain == BOOL and kind == INT:
            value = int(value)
        if kind == BOOL and plain != BOOL:
            raise self.fail(node, "a truth is a number here")
        try:
            return Code(self.translator.constants.write(value, kind), kind, value=value)
        except Untranslatable as error:
            raise self.fail(node, str(error)) from error

    def condition(self, node: Expression) -> Code:
        raise NotImplementedError
