"""Comparisons: equality is Python's, field by field and item by item."""

from __future__ import annotations

from mypy.nodes import (
    ComparisonExpr,
    Expression,
    TupleExpr,
)

from kvproof.models.explore.native.codes import Code, words
from kvproof.models.explore.native.conversions import Conversions
from kvproof.models.explore.native.kinds import (
    BOOL,
    NONE,
    POINTERS,
    cpp,
)


class Comparisons(Conversions):
    """Adds comparisons."""

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
            left, right = node.operands[place : place + 2]
            test = self._test(node, node.operators[place], here[place], here[place + 1], left, right)
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

    def _test(self, node: Expression, sign: str, one: Code, other: Code, left: Expression, right: Expression) -> str:
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
        raise self.fail(node, f"{words(one.kind)} {sign} {words(other.kind)}")

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
        raise self.fail(node, f"{words(one.kind)} is {words(other.kind)}")

    def _contains(self, node: Expression, one: Code, other: Code, left: Expression) -> str:
        kind = other.kind
        if kind.name in ("list", "set"):
            return f"{other.code}->contains({self.convert(left, one, kind.part).code})"
        if kind.name == "dict":
            return f"{other.code}->contains({self.convert(left, one, kind.parts[0]).code})"
        raise self.fail(node, f"in a {words(kind)}")

    def _among(self, left: Expression, right: TupleExpr) -> Code:
        one = self.expression(left)
        items = [self.expression(item) for item in right.items]
        if not all(item.pure for item in items):
            raise self.fail(right, "membership in what changes something")
        name = self.fresh("a")
        here = Code(name, one.kind)
        tests = [self._test(right, "==", here, item, left, node) for item, node in zip(items, right.items, strict=True)]
        return Code(f"({{ {cpp(one.kind)} {name} = {one.code}; {' || '.join(tests) or 'false'}; }})", BOOL, one.pure)
