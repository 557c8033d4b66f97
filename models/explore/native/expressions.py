"""Expressions. Each becomes one C++ expression; what takes several statements is a statement expression (``({ … })``).

Python evaluates from left to right, C++ as it likes: where one of several parts may change something, all of them are
put into variables, in order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mypy.nodes import (
    BytesExpr,
    CallExpr,
    ComparisonExpr,
    ConditionalExpr,
    DictExpr,
    DictionaryComprehension,
    Expression,
    GeneratorExpr,
    IndexExpr,
    IntExpr,
    ListComprehension,
    ListExpr,
    MemberExpr,
    NameExpr,
    OpExpr,
    SetComprehension,
    SetExpr,
    SliceExpr,
    StarExpr,
    StrExpr,
    TupleExpr,
    TypeInfo,
    UnaryExpr,
    Var,
)

from kvproof.models.explore.native.kinds import (
    ABSENT,
    BOOL,
    BYTES,
    CONSTANT,
    INT,
    NONE,
    POINTERS,
    TEXT,
    Kind,
    Untranslatable,
    cpp,
    member,
    nullable,
    sequence,
)
from kvproof.models.explore.native.translator import FORGOTTEN, Translator

UNKNOWN: Final = object()
"""In place of a value that is not known before the code runs."""

ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "//": "floordiv", "%": "mod", "<<": "shift_left", ">>": "shift_right"}
BITS = ("|", "&", "^")
FOLDED: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "<<": operator.lshift, ">>": operator.rshift, "|": operator.or_, "&": operator.and_, "^": operator.xor,
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "is": operator.is_, "is not": operator.is_not, "in": lambda a, b: a in b, "not in": lambda a, b: a not in b,
}  # fmt: skip


@dataclass(frozen=True)
class Code:
    """A C++ expression. ``pure``: it changes nothing. ``value`` is what it is known to be; ``parts`` make up a tuple."""

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


class Expressions:
    """Of one function, whose variables are in ``variables``. Calls and loops are the affair of subclasses."""

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

    # -- from one kind to another -------------------------------------------------------------------------------------

    def value(self, node: Expression, want: Kind) -> Code:
        """An expression as ``want``."""
        found = self.expression(node, want)
        return self.convert(node, found, want)

    def convert(self, node: Expression, found: Code, want: Kind) -> Code:
        kind = found.kind
        if kind == want:
            return found
        if found.known and kind != CONSTANT:
            return self.written(node, found.value, want)

        def as_(code: str) -> Code:
            return Code(code, want, found.pure)

        if kind == NONE and want.name in POINTERS:
            return as_("nullptr")
        if kind == NONE and want.name == "maybe":
            return as_("NONE")
        if kind == NONE and want.name == "opt":
            return as_(f"{cpp(want)}{{}}")
        if want.name == "maybe" and kind in (INT, BOOL, TEXT):
            return as_(f"Int({found.code})")
        if kind.name == "maybe" and want == kind.part:
            return as_(f"({found.code} != 0)" if want == BOOL else found.code)
        if want == INT and kind == BOOL:
            return as_(f"Int({found.code})")
        if want.name == "opt" and kind == want.part:
            return as_(f"{cpp(want)}{{true, {found.code}}}")
        if kind.name == "opt" and want == kind.part:
            return as_(f"{found.code}.get()")
        if want.name == "list" and kind.name == "tuple":
            return self._listed(node, found, want)
        if kind.name == want.name and kind.name in ("list", "dict", "set") and cpp(kind) == cpp(want):
            return as_(found.code)
        raise self.fail(node, f"a {_words(kind)} where a {_words(want)} is wanted")

    def _listed(self, node: Expression, found: Code, want: Kind) -> Code:
        name = self.fresh("t")
        parts = [
            self.convert(node, Code(f"std::get<{place}>({name})", part), want.part).code
            for place, part in enumerate(found.kind.parts)
        ]
        lines = f"const auto {name} = {found.code}; const {cpp(want.part)} l{name}[] = {{{', '.join(parts)}}};"
        return Code(f"({{ {lines} {cpp(want)[:-1]}::of(l{name}, {len(parts)}); }})", want, found.pure)

    def truth(self, node: Expression, found: Code) -> str:
        """Whether Python takes it as true."""
        match found.kind.name:
            case "bool":
                return found.code
            case "int":
                return f"({found.code} != 0)"
            case "maybe" if found.kind.part != TEXT:
                name = self.fresh("m")
                return f"({{ Int {name} = {found.code}; {name} != NONE && {name} != 0; }})"
            case "list" | "dict" | "set" | "bytes":
                return f"filled({found.code})"
            case "object":
                return f"({found.code} != nullptr)"
        raise self.fail(node, f"the truth of a {_words(found.kind)}")

    def condition(self, node: Expression) -> Code:
        """An expression of which only the truth counts."""
        value = self.known(node)
        if value is not UNKNOWN:
            return Code("true" if value else "false", BOOL, value=bool(value))
        match node:
            case UnaryExpr(op="not"):
                inner = self.condition(node.expr)
                if inner.known:
                    return Code("false" if inner.value else "true", BOOL, value=not inner.value)
                return Code(f"!{inner.code}", BOOL, inner.pure)
            case OpExpr() if node.op in ("and", "or"):
                left = self.condition(node.left)
                decides = node.op == "or"
                if left.known:
                    return left if left.value == decides else self.condition(node.right)
                right = self.condition(node.right)
                if right.known and right.value != decides:
                    return left
                if right.known and left.pure:
                    return right
                sign = "||" if decides else "&&"
                return Code(f"({left.code} {sign} {right.code})", BOOL, left.pure and right.pure)
        found = self.expression(node)
        return Code(self.truth(node, found), BOOL, found.pure)

    # -- expressions --------------------------------------------------------------------------------------------------

    def expression(self, node: Expression, want: Kind | None = None) -> Code:
        """An expression; ``want`` is a hint for what has no kind of its own, as ``[]``."""
        value = self.known(node)
        if value is not UNKNOWN:
            return self.written(node, value, want)
        match node:
            case NameExpr():
                return self._name(node)
            case MemberExpr():
                return self._member(node)
            case OpExpr():
                return self._operation(node, want)
            case UnaryExpr(op="not"):
                return self.condition(node)
            case UnaryExpr(op="-"):
                inner = self.value(node.expr, INT)
                return Code(f"neg({inner.code})", INT, inner.pure)
            case ComparisonExpr():
                return self._comparison(node)
            case ConditionalExpr():
                return self._choice(node, want)
            case IndexExpr():
                return self._index(node)
            case TupleExpr() | ListExpr():
                return self._items(node, want)
            case DictExpr():
                return self._dictionary(node, want)
            case SetExpr():
                return self._set(node, want)
            case CallExpr():
                return self.call(node, want)
            case ListComprehension():
                return self.comprehension(node.generator, want)
            case SetComprehension() | DictionaryComprehension():
                return self.collection(node, want)
        raise self.fail(node, f"{type(node).__name__} has no translation")

    def call(self, node: CallExpr, want: Kind | None) -> Code:
        raise NotImplementedError

    def comprehension(self, node: GeneratorExpr, want: Kind | None) -> Code:
        raise NotImplementedError

    def collection(self, node: SetComprehension | DictionaryComprehension, want: Kind | None) -> Code:
        raise NotImplementedError

    def property(self, node: MemberExpr, base: Code) -> Code:
        raise NotImplementedError

    def _name(self, node: NameExpr) -> Code:
        if isinstance(node.node, Var) and node.node in self.variables:
            return self.variables[node.node]
        raise self.fail(node, f"{node.name} has no value that is known here")

    def _member(self, node: MemberExpr) -> Code:
        base = self.expression(node.expr)
        if base.kind.name not in ("object", "named"):
            if base.kind == CONSTANT:
                return self.property(node, base)
            raise self.fail(node, f"{node.name} of a {_words(base.kind)}")
        kind = self.translator.field(base.kind.of, node.name)
        if kind is None:
            return self.property(node, base)
        return Code(f"{base.code}{'.' if base.kind.name == 'named' else '->'}{member(node.name)}", kind, base.pure)

    def ordered(self, parts: Sequence[Code], make: Callable[[list[str]], str]) -> str:
        """``make`` of parts that are evaluated in order."""
        if len(parts) < 2 or all(part.pure for part in parts):
            return make([part.code for part in parts])
        names = [self.fresh("o") for _ in parts]
        lines = " ".join(f"{cpp(part.kind)} {name} = {part.code};" for part, name in zip(parts, names, strict=True))
        return f"({{ {lines} {make(names)}; }})"

    def _operation(self, node: OpExpr, want: Kind | None) -> Code:
        if node.op in ("and", "or"):
            return self._either(node, want)
        hint = want if want is not None and want.name == "list" and node.op in ("*", "+") else None
        left, right = self.expression(node.left, hint), self.expression(node.right, hint if node.op == "+" else None)
        return self.operate(node, node.op, left, right, node.left, node.right)

    def operate(
        self, node: Expression, sign: str, left: Code, right: Code, left_node: Expression, right_node: Expression
    ) -> Code:
        """``left`` and ``right``, added or whatever ``sign`` says."""
        kinds = left.kind, right.kind
        pure = left.pure and right.pure
        if sign in BITS and kinds == (BOOL, BOOL):
            return Code(self.ordered([left, right], lambda c: f"bool({c[0]} {sign} {c[1]})"), BOOL, pure)
        if kinds[0].name in ("int", "bool", "maybe") and kinds[1].name in ("int", "bool", "maybe"):
            parts = [self.convert(left_node, left, INT), self.convert(right_node, right, INT)]
            if sign in ARITHMETIC:
                return Code(self.ordered(parts, lambda c: f"{ARITHMETIC[sign]}({c[0]}, {c[1]})"), INT, pure)
            if sign in BITS:
                return Code(self.ordered(parts, lambda c: f"({c[0]} {sign} {c[1]})"), INT, pure)
        if sign == "+" and kinds[0].name == "list":
            parts = [left, self.convert(right_node, right, left.kind)]
            return Code(self.ordered(parts, lambda c: f"{c[0]}->plus({c[1]})"), left.kind, pure)
        if sign == "+" and kinds == (BYTES, BYTES):
            return Code(self.ordered([left, right], lambda c: f"{c[0]}->plus({c[1]})"), BYTES, pure)
        if sign == "*" and kinds[0].name in ("list", "tuple") and kinds[1] in (INT, BOOL):
            many = left
            if left.kind.name == "tuple":
                many = self.convert(left_node, left, sequence(unify(left.kind.parts)))
            parts = [many, self.convert(right_node, right, INT)]
            return Code(self.ordered(parts, lambda c: f"{c[0]}->repeat({c[1]})"), many.kind, pure)
        if sign == "|" and kinds[0].name == "set" and kinds[0] == kinds[1]:
            return Code(self.ordered([left, right], lambda c: f"{c[0]}->plus({c[1]})"), left.kind, pure)
        raise self.fail(node, f"{_words(kinds[0])} {sign} {_words(kinds[1])}")

    def _either(self, node: OpExpr, want: Kind | None) -> Code:
        if self.kind_of(node) == BOOL:
            return self.condition(node)
        left, right = self.expression(node.left, want), self.expression(node.right, want)
        kind = want if want is not None else unify([left.kind, right.kind])
        left, right = self.convert(node.left, left, kind), self.convert(node.right, right, kind)
        name = self.fresh("e")
        here = Code(name, kind)
        truth = self.truth(node, here)
        chosen = f"{truth} ? {name} : {right.code}" if node.op == "or" else f"{truth} ? {right.code} : {name}"
        return Code(f"({{ {cpp(kind)} {name} = {left.code}; {chosen}; }})", kind, left.pure and right.pure)

    def _choice(self, node: ConditionalExpr, want: Kind | None) -> Code:
        which = self.condition(node.cond)
        if which.known:
            return self.expression(node.if_expr if which.value else node.else_expr, want)
        one, other = self.expression(node.if_expr, want), self.expression(node.else_expr, want)
        kind = want if want is not None else self._common(node, one, other)
        one, other = self.convert(node.if_expr, one, kind), self.convert(node.else_expr, other, kind)
        pure = which.pure and one.pure and other.pure
        return Code(f"({which.code} ? {one.code} : {other.code})", kind, pure)

    def _common(self, node: Expression, one: Code, other: Code) -> Kind:
        if {one.kind.name, other.kind.name} == {"list", "tuple"}:
            return one.kind if one.kind.name == "list" else other.kind
        try:
            return unify([one.kind, other.kind])
        except Untranslatable as error:
            raise self.fail(node, str(error)) from error

    # -- comparisons --------------------------------------------------------------------------------------------------

    def _comparison(self, node: ComparisonExpr) -> Code:
        if len(node.operators) == 1:
            return self._compare(node, node.operators[0], node.operands[0], node.operands[1])
        codes = [self.expression(operand) for operand in node.operands]
        here = [code if code.known else Code(self.fresh("c"), code.kind) for code in codes]

        def held(place: int) -> str:
            code = codes[place]
            return "" if code.known else f"{cpp(code.kind)} {here[place].code} = {code.code};"

        # Each operand is evaluated once, and only if everything before it held.
        text = ""
        for place in reversed(range(len(node.operators))):
            test = self._test(node, node.operators[place], *here[place : place + 2], *node.operands[place : place + 2])
            text = f"({{ {held(place + 1)} {test}{f' && {text}' if text else ''}; }})"
        return Code(f"({{ {held(0)} {text}; }})", BOOL, all(code.pure for code in codes))

    def _compare(self, node: Expression, sign: str, left: Expression, right: Expression) -> Code:
        if sign in ("in", "not in") and isinstance(right, TupleExpr):
            code = self._among(left, right)
            return Code(f"!{code.code}" if sign == "not in" else code.code, BOOL, code.pure)
        one = self.expression(left)
        # Only the first hint counts: what has no kind of its own is what it is compared with.
        hint = one.kind if sign in ("==", "!=") and one.kind.name in ("list", "bytes", "dict") else None
        other = self.expression(right, hint)
        if one.known and one.kind.name != "none" and other.kind.name in ("list", "bytes") and sign in ("==", "!="):
            one = self.expression(left, other.kind)
        parts = [one, other]
        if all(part.pure for part in parts):
            return Code(self._test(node, sign, one, other, left, right), BOOL)
        names = [self.fresh("c") for _ in parts]
        here = [part if part.known else Code(name, part.kind) for part, name in zip(parts, names, strict=True)]
        lines = " ".join(f"{cpp(part.kind)} {name} = {part.code};" for part, name in zip(parts, names, strict=True)
                         if not part.known)  # fmt: skip
        return Code(f"({{ {lines} {self._test(node, sign, here[0], here[1], left, right)}; }})", BOOL, False)

    def _test(
        self, node: Expression, sign: str, one: Code, other: Code, left: Expression, right: Expression
    ) -> str:
        if sign in ("is", "is not"):
            return self._is(node, sign == "is not", one, other)
        if sign in ("in", "not in"):
            code = self._contains(node, one, other, left)
            return f"!{code}" if sign == "not in" else code
        numbers = ("int", "bool", "maybe", "text")
        if one.kind.name in numbers and other.kind.name in numbers:
            return f"({one.code} {sign} {other.code})"
        if sign in ("==", "!="):
            if one.kind != other.kind:
                if one.kind.name == "tuple":
                    one = self.convert(left, one, other.kind)
                else:
                    other = self.convert(right, other, one.kind)
            return f"{'!' if sign == '!=' else ''}eq({one.code}, {other.code})"
        raise self.fail(node, f"{_words(one.kind)} {sign} {_words(other.kind)}")

    def _is(self, node: Expression, negated: bool, one: Code, other: Code) -> str:
        sign = "!=" if negated else "=="
        if one.kind.name in POINTERS and other.kind.name in (*POINTERS, "none"):
            return f"({one.code} {sign} {other.code})"
        if other.kind == NONE and one.kind.name == "maybe":
            return f"({one.code} {sign} NONE)"
        if other.kind == NONE and one.kind.name == "opt":
            return f"({'' if negated else '!'}{one.code}.has)"
        if other.kind == NONE and one.kind.name in ("int", "bool", "text", "tuple", "named"):
            return "true" if negated else "false"
        raise self.fail(node, f"{_words(one.kind)} is {_words(other.kind)}")

    def _contains(self, node: Expression, one: Code, other: Code, left: Expression) -> str:
        kind = other.kind
        if kind.name in ("list", "set"):
            return f"{other.code}->contains({self.convert(left, one, kind.part).code})"
        if kind.name == "dict":
            return f"{other.code}->contains({self.convert(left, one, kind.parts[0]).code})"
        raise self.fail(node, f"in a {_words(kind)}")

    def _among(self, left: Expression, right: TupleExpr) -> Code:
        one = self.expression(left)
        items = [self.expression(item) for item in right.items]
        if not all(item.pure for item in items):
            raise self.fail(right, "membership in what changes something")
        name = self.fresh("a")
        here = Code(name, one.kind)
        tests = [self._test(right, "==", here, item, left, node) for item, node in zip(items, right.items, strict=True)]
        return Code(f"({{ {cpp(one.kind)} {name} = {one.code}; {' || '.join(tests) or 'false'}; }})", BOOL, one.pure)

    # -- parts and wholes ---------------------------------------------------------------------------------------------

    def _index(self, node: IndexExpr) -> Code:
        base = self.expression(node.base)
        kind = base.kind.part if base.kind.name == "opt" else base.kind
        if isinstance(node.index, SliceExpr):
            if kind.name not in ("list", "bytes") or node.index.stride is not None:
                raise self.fail(node, f"a slice of a {_words(kind)}")
            parts = [base, *self.bounds(node.index)]
            pure = all(part.pure for part in parts)
            return Code(self.ordered(parts, lambda c: f"{c[0]}->slice({c[1]}, {c[2]})"), kind, pure)
        if kind.name in ("tuple", "named"):
            place = self.known(node.index)
            if place is UNKNOWN:
                raise self.fail(node, "which part of a tuple is not known")
            value = f"{base.code}.get()" if base.kind.name == "opt" else base.code
            if kind.name == "tuple":
                place = place if place >= 0 else place + len(kind.parts)
                return Code(f"std::get<{place}>({value})", kind.parts[place], base.pure)
            name, part = list(self.translator.fields(kind.of).items())[place]
            return Code(f"{value}.{member(name)}", part, base.pure)
        if kind.name in ("list", "bytes"):
            place = self.value(node.index, INT)
            parts, part = [base, place], INT if kind == BYTES else kind.part
            code = self.ordered(parts, lambda c: f"{c[0]}->at({c[1]})")
            return Code(f"Int({code})" if kind == BYTES else code, part, base.pure and place.pure)
        if kind.name == "dict":
            key = self.value(node.index, kind.parts[0])
            code = self.ordered([base, key], lambda c: f"{c[0]}->at({c[1]})")
            return Code(code, kind.parts[1], base.pure and key.pure)
        raise self.fail(node, f"an index into a {_words(kind)}")

    def bounds(self, node: SliceExpr) -> tuple[Code, Code]:
        start = self.value(node.begin_index, INT) if node.begin_index is not None else Code("0", INT)
        stop = self.value(node.end_index, INT) if node.end_index is not None else Code("INT64_MAX", INT)
        return start, stop

    def _items(self, node: TupleExpr | ListExpr, want: Kind | None) -> Code:
        items = node.items
        starred = any(isinstance(item, StarExpr) for item in items)
        if isinstance(node, TupleExpr) and not starred and (want is None or want.name not in ("list",)):
            if want is not None and want.name == "opt":
                want = want.part
            wants: Sequence[Kind | None] = (
                want.parts if want is not None and want.name == "tuple" else [None] * len(items)
            )
            parts = [
                self.value(item, hint) if hint is not None else self.expression(item)
                for item, hint in zip(items, wants, strict=True)
            ]
            kind = Kind("tuple", tuple(part.kind for part in parts))
            if NONE in kind.parts:
                raise self.fail(node, "None in a tuple of its own")
            code = f"{cpp(kind)}{{{', '.join(part.code for part in parts)}}}"  # braces go from left to right
            return Code(code, kind, all(part.pure for part in parts), parts=tuple(parts))
        kind = want if want is not None and want.name == "list" else self._list_kind(node)
        if not items:
            return Code(f"{cpp(kind)[:-1]}::make()", kind)
        name, lines, pure = self.fresh("l"), [], True
        if not starred:
            values = [self.value(item, kind.part) for item in items]
            pure = all(value.pure for value in values)
            array = f"const {cpp(kind.part)} {name}[] = {{{', '.join(value.code for value in values)}}};"
            if kind.part.name in POINTERS:
                array = array.replace("const ", "", 1)
            return Code(f"({{ {array} {cpp(kind)[:-1]}::of({name}, {len(values)}); }})", kind, pure)
        for item in items:
            if isinstance(item, StarExpr):
                value = self.value(item.expr, kind)
                lines.append(f"{name}->extend({value.code});")
            else:
                value = self.value(item, kind.part)
                lines.append(f"{name}->append({value.code});")
            pure = pure and value.pure
        return Code(f"({{ auto* {name} = {cpp(kind)[:-1]}::make({len(items)}); {' '.join(lines)} {name}; }})", kind, pure)

    def _list_kind(self, node: TupleExpr | ListExpr) -> Kind:
        kind = self.kind_of(node)
        if kind is not None and kind.name == "list":
            return kind
        if kind is not None and kind.name == "tuple":
            return sequence(unify(kind.parts))
        inner = []
        for item in node.items:
            found = self.expression(item.expr if isinstance(item, StarExpr) else item).kind
            inner.append(found.part if isinstance(item, StarExpr) and found.name == "list" else found)
        if not inner:
            raise self.fail(node, "an empty list whose kind is not known")
        return sequence(unify(inner))

    def _dictionary(self, node: DictExpr, want: Kind | None) -> Code:
        kind = want if want is not None and want.name == "dict" else self.kind_of(node)
        if kind is None or kind.name != "dict" or node.items:
            raise self.fail(node, "a dictionary that is written out")
        return Code(f"{cpp(kind)[:-1]}::make()", kind)

    def _set(self, node: SetExpr, want: Kind | None) -> Code:
        kind = want if want is not None and want.name == "set" else self.kind_of(node)
        if kind is None or kind.name != "set" or any(isinstance(item, StarExpr) for item in node.items):
            raise self.fail(node, "a set of what is in others")
        values = [self.value(item, kind.part) for item in node.items]
        name = self.fresh("s")
        lines = " ".join(f"{name}->add({value.code});" for value in values)
        code = f"({{ auto* {name} = {cpp(kind)[:-1]}::make(); {lines} {name}; }})"
        return Code(code, kind, all(value.pure for value in values))


def _words(kind: Kind) -> str:
    return f"{kind.name} of {', '.join(map(_words, kind.parts))}" if kind.parts else kind.of or kind.name


__all__ = ["UNKNOWN", "Code", "Expressions", "unify"]
