"""Expressions. Each becomes one C++ expression; what takes several statements is a statement expression (``({ … })``).

Python evaluates from left to right, C++ as it likes: where one of several parts may change something, all of them are
put into variables, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mypy.nodes import (
    CallExpr,
    ComparisonExpr,
    ConditionalExpr,
    DictExpr,
    DictionaryComprehension,
    Expression,
    GeneratorExpr,
    IndexExpr,
    ListComprehension,
    ListExpr,
    MemberExpr,
    NameExpr,
    OpExpr,
    SetComprehension,
    SetExpr,
    SliceExpr,
    StarExpr,
    TupleExpr,
    UnaryExpr,
    Var,
)

from kvproof.models.explore.native.codes import UNKNOWN, Code, unify, words
from kvproof.models.explore.native.comparisons import Comparisons
from kvproof.models.explore.native.kinds import (
    BOOL,
    BYTES,
    CONSTANT,
    INT,
    NONE,
    POINTERS,
    Kind,
    Untranslatable,
    cpp,
    member,
    sequence,
)

ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "//": "floordiv", "%": "mod", "<<": "shift_left", ">>": "shift_right"}
BITS = ("|", "&", "^")


class Expressions(Comparisons):
    """Adds expressions. Calls and loops are the affair of subclasses."""

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
        if base.kind.name == "opt":  # mypy has seen that it is not None
            base = Code(f"{base.code}.get()", base.kind.part, base.pure)
        if base.kind.name not in ("object", "named"):
            if base.kind == CONSTANT:
                return self.property(node, base)
            raise self.fail(node, f"{node.name} of a {words(base.kind)}")
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
        raise self.fail(node, f"{words(kinds[0])} {sign} {words(kinds[1])}")

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

    # -- parts and wholes ---------------------------------------------------------------------------------------------

    def _index(self, node: IndexExpr) -> Code:
        base = self.expression(node.base)
        kind = base.kind.part if base.kind.name == "opt" else base.kind
        if isinstance(node.index, SliceExpr):
            if kind.name not in ("list", "bytes") or node.index.stride is not None:
                raise self.fail(node, f"a slice of a {words(kind)}")
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
        raise self.fail(node, f"an index into a {words(kind)}")

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
        return self.built(kind, name, lines, pure, len(items))

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
        lines = [f"{name}->add({value.code});" for value in values]
        return self.built(kind, name, lines, all(value.pure for value in values))
