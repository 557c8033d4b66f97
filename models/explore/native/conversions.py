"""From one kind to another, and to truth."""

from __future__ import annotations

from collections.abc import Sequence

from mypy.nodes import (
    Expression,
    OpExpr,
    UnaryExpr,
)

from kvproof.models.explore.native.codes import UNKNOWN, Code, words
from kvproof.models.explore.native.kinds import (
    BOOL,
    CONSTANT,
    INT,
    NONE,
    POINTERS,
    TEXT,
    Kind,
    cpp,
)
from kvproof.models.explore.native.known import Known


class Conversions(Known):
    """Adds conversions."""

    def expression(self, node: Expression, want: Kind | None = None) -> Code:
        """An expression; ``want`` is a hint for what has no kind of its own, as ``[]``."""
        raise NotImplementedError

    def value(self, node: Expression, want: Kind) -> Code:
        """An expression as ``want``."""
        found = self.expression(node, want)
        return self.convert(node, found, want)

    def built(self, kind: Kind, name: str, lines: Sequence[str], pure: bool = False, room: int = 0) -> Code:
        """A new list, set or dictionary called ``name``, into which ``lines`` put something."""
        made = f"auto* {name} = {cpp(kind)[:-1]}::make({room or ''});"
        return Code(f"({{ {made} {' '.join(lines)} {name}; }})", kind, pure)

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
        raise self.fail(node, f"a {words(kind)} where a {words(want)} is wanted")

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
        raise self.fail(node, f"the truth of a {words(found.kind)}")

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
