"""Loops: over what, and what comes of them.

A generator expression is never an object here. It is written out as a loop where it is used, so that as much of it is
evaluated as Python would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mypy.nodes import (
    CallExpr,
    ConditionalExpr,
    DictionaryComprehension,
    Expression,
    GeneratorExpr,
    IndexExpr,
    Lvalue,
    MemberExpr,
    NameExpr,
    RefExpr,
    SetComprehension,
    TupleExpr,
    Var,
)

from kvproof.models.explore.native.codes import UNKNOWN, Code
from kvproof.models.explore.native.expressions import Expressions
from kvproof.models.explore.native.kinds import BYTES, INT, Kind, Untranslatable, cpp, member, sequence

Lines = list[str]


@dataclass
class Cursor:
    """How to go through something: ``setup`` once, ``more`` before each ``item``, ``step`` after it."""

    setup: Lines
    more: str
    item: Code
    step: str
    exact: list[Cursor] = field(default_factory=list)


def pair(*parts: Code) -> Code:
    """Several values as one, which is only put together where somebody wants it whole."""
    kind = Kind("tuple", tuple(part.kind for part in parts))
    inside = ", ".join(part.code for part in parts)
    return Code(f"std::make_tuple({inside})", kind, parts=parts)


class Loops(Expressions):
    """Adds loops and comprehensions. Both are taken to change something: what stands beside them is put in order."""

    # -- over what ----------------------------------------------------------------------------------------------------

    def cursor(self, node: Expression) -> Cursor:
        if isinstance(node, ConditionalExpr):
            which = self.condition(node.cond)
            if which.known:
                return self.cursor(node.if_expr if which.value else node.else_expr)
        if isinstance(node, CallExpr):
            name = node.callee.fullname if isinstance(node.callee, RefExpr) else ""
            if name == "builtins.range":
                return self._over_range(self.range_bounds(node))
            if name == "builtins.enumerate":
                return self._enumerated(node)
            if name == "builtins.zip":
                return self._zipped(node)
            if name == "builtins.reversed":
                return self._reversed(node)
            if isinstance(node.callee, MemberExpr) and node.callee.name in ("items", "values") and not node.args:
                base = self.expression(node.callee.expr)
                if base.kind.name == "dict":
                    return self._over_dictionary(base, node.callee.name)
        if isinstance(node, TupleExpr) and self.known(node) is UNKNOWN:
            return self._over_list(self.expression(node, self._list_kind(node)))
        hint = None
        if self.known(node) is not UNKNOWN:
            hint = self.kind_of(node)
            if hint is None or hint.name != "list":
                hint = self._list_kind(node) if isinstance(node, TupleExpr) else hint
        found = self.expression(node, hint)
        match found.kind.name:
            case "list" | "bytes":
                return self._over_list(found)
            case "range":
                name = self.fresh("r")
                inner = self._over_range((f"{name}.start", f"{name}.stop", f"{name}.step"))
                return Cursor([f"const Range {name} = {found.code};", *inner.setup], inner.more, inner.item, inner.step)
            case "dict":
                return self._over_dictionary(found, "keys")
            case "tuple":
                return self._over_list(self.convert(node, found, sequence(found.kind.part)))
        raise self.fail(node, f"a loop over a {found.kind.name}")

    def range_bounds(self, node: CallExpr) -> tuple[str, str, str]:
        values = [self.value(argument, INT).code for argument in node.args]
        if len(values) == 1:
            return "0", values[0], "1"
        return values[0], values[1], values[2] if len(values) == 3 else "1"

    def _over_range(self, bounds: tuple[str, str, str]) -> Cursor:
        at, stop, step = self.fresh("i"), self.fresh("stop"), self.fresh("step")
        item = Code(at, INT)
        if bounds[2] == "1":
            setup = [f"Int {at} = {bounds[0]};", f"const Int {stop} = {bounds[1]};"]
            return Cursor(setup, f"{at} < {stop}", item, f"{at}++")
        setup = [f"const Range {step} = range({', '.join(bounds)});", f"Int {at} = {step}.start;"]
        return Cursor(setup, f"goes_on({step}, {at})", item, f"{at} += {step}.step")

    def _over_list(self, found: Code) -> Cursor:
        items, at = self.fresh("l"), self.fresh("i")
        part = INT if found.kind == BYTES else found.kind.part
        setup = [f"auto* const {items} = {found.code};", f"Int {at} = 0;"]
        return Cursor(setup, f"{at} < {items}->size", Code(f"{items}->data[{at}]", part), f"{at}++")

    def _over_dictionary(self, found: Code, what: str) -> Cursor:
        items, at = self.fresh("d"), self.fresh("i")
        setup = [f"auto* const {items} = {found.code};", f"Int {at} = 0;"]
        key = Code(f"{items}->data[{at}].key", found.kind.parts[0])
        value = Code(f"{items}->data[{at}].value", found.kind.parts[1])
        item = {"items": pair(key, value), "keys": key, "values": value}[what]
        return Cursor(setup, f"{at} < {items}->size", item, f"{at}++")

    def _enumerated(self, node: CallExpr) -> Cursor:
        inner, count = self.cursor(node.args[0]), self.fresh("n")
        if len(node.args) != 1:
            raise self.fail(node, "enumerate with a start")
        setup = [*inner.setup, f"Int {count} = 0;"]
        return Cursor(setup, inner.more, pair(Code(count, INT), inner.item), f"{inner.step}, {count}++")

    def _zipped(self, node: CallExpr) -> Cursor:
        strict, parts = False, []
        for argument, name in zip(node.args, node.arg_names, strict=True):
            if name == "strict":
                strict = bool(self.known(argument))
            else:
                parts.append(self.cursor(argument))
        more = parts[0].more
        for part in parts[1:]:
            more = f"together({more}, {part.more})" if strict else f"({more}) && ({part.more})"
        setup = [line for part in parts for line in part.setup]
        return Cursor(setup, more, pair(*(part.item for part in parts)), ", ".join(part.step for part in parts))

    def _reversed(self, node: CallExpr) -> Cursor:
        found = self.expression(node.args[0])
        if found.kind.name not in ("list", "bytes"):
            raise self.fail(node, f"a {found.kind.name} from its end")
        items, at = self.fresh("l"), self.fresh("i")
        part = INT if found.kind == BYTES else found.kind.part
        setup = [f"auto* const {items} = {found.code};", f"Int {at} = {items}->size - 1;"]
        return Cursor(setup, f"{at} >= 0", Code(f"{items}->at({at})", part), f"{at}--")

    def loop(self, node: Expression, body: Callable[[Code], Lines]) -> Lines:
        """``body`` for each item of ``node``."""
        if isinstance(node, GeneratorExpr):
            return self.generate(node, lambda: body(self.expression(node.left_expr)))
        if isinstance(node, CallExpr) and isinstance(node.callee, RefExpr) and node.callee.fullname == "builtins.map":
            raise self.fail(node, "map has no translation: write a comprehension")
        cursor = self.cursor(node)
        return ["{", *cursor.setup, f"for (; {cursor.more}; {cursor.step}) {{", *body(cursor.item), "}", "}"]

    def generate(self, node: GeneratorExpr, body: Callable[[], Lines], place: int = 0) -> Lines:
        """``body`` for each time that the generator comes to its expression."""
        if place == len(node.indices):
            return body()
        if node.is_async[place]:
            raise self.fail(node, "an asynchronous comprehension")

        def inside(item: Code) -> Lines:
            lines = self.declare(node.indices[place], item)
            closing = 0
            for test in node.condlists[place]:
                which = self.condition(test)
                if which.known and not which.value:
                    return []
                if not which.known:
                    lines.append(f"if ({which.code}) {{")
                    closing += 1
            return [*lines, *self.generate(node, body, place + 1), *("}" for _ in range(closing))]

        return self.loop(node.sequences[place], inside)

    def declare(self, index: Lvalue, item: Code) -> Lines:
        """The variables of a comprehension get their values."""
        if isinstance(index, NameExpr):
            if index.name == "_":
                return []
            assert isinstance(index.node, Var)
            name = self.fresh(f"{index.name}_")
            self.variables[index.node] = Code(name, item.kind)
            return [f"{cpp(item.kind)} const {name} = {item.code};"]
        if isinstance(index, TupleExpr):
            return [line for place, inner in enumerate(index.items)
                    for line in self.declare(inner, self.part(item, place))]  # fmt: skip
        raise self.fail(index, f"a loop variable that is a {type(index).__name__}")

    def part(self, item: Code, place: int) -> Code:
        if item.parts:
            return item.parts[place]
        if item.kind.name == "tuple":
            return Code(f"std::get<{place}>({item.code})", item.kind.parts[place], item.pure)
        if item.kind.name == "named":
            name, kind = list(self.translator.fields(item.kind.of).items())[place]
            return Code(f"{item.code}.{member(name)}", kind, item.pure)
        raise Untranslatable(f"a {item.kind.name} is taken apart")

    # -- comprehensions -----------------------------------------------------------------------------------------------

    def gather(self, node: Expression, want: Kind | None, setup: Callable[[Kind], str], each: str) -> Code:
        """What comes of a loop: ``setup`` declares ``@``, ``each`` takes in the item ``#``."""
        name = self.fresh("g")
        kinds: list[Kind] = []

        def body(item: Code) -> Lines:
            if want is not None:
                item = self.convert(node, item, want)
            kinds.append(item.kind)
            return [each.replace("@", name).replace("#", item.code)]

        lines = self.loop(node, body)
        kind = want if want is not None else kinds[0] if kinds else INT
        code = f"({{ {setup(kind).replace('@', name)} {' '.join(lines)} {name}; }})"
        return Code(code, kind, False)

    def comprehension(self, node: GeneratorExpr, want: Kind | None) -> Code:
        """A list of what a generator comes to."""
        part = self.part_wanted(node, want)
        name = self.fresh("g")
        kinds: list[Kind] = []

        def body() -> Lines:
            item = self.value(node.left_expr, part) if part is not None else self.expression(node.left_expr)
            if item.kind.name == "none":
                raise self.fail(node, "a list of None")
            kinds.append(item.kind)
            return [f"{name}->append({item.code});"]

        lines = self.generate(node, body)
        kind = sequence(part if part is not None else kinds[0] if kinds else INT)
        return self.built(kind, name, lines)

    def part_wanted(self, node: GeneratorExpr, want: Kind | None) -> Kind | None:
        """The kind of a list's items: what is wanted, or what mypy says where that has a kind."""
        if want is not None and want.name == "list":
            return want.part
        return self.kind_of(node.left_expr) if self.known(node.left_expr) is UNKNOWN else None

    def collection(self, node: SetComprehension | DictionaryComprehension, want: Kind | None) -> Code:
        kind = want if want is not None and want.name in ("set", "dict") else self.kind_of(node)
        if kind is None or kind.name not in ("set", "dict"):
            raise self.fail(node, "a comprehension whose kind is not known")
        name = self.fresh("g")
        if isinstance(node, SetComprehension):
            generator = node.generator
            lines = self.generate(
                generator, lambda: [f"{name}->add({self.value(generator.left_expr, kind.part).code});"]
            )
        else:
            assert node.key is not None
            plain = GeneratorExpr(node.key, node.indices, node.sequences, node.condlists, node.is_async)
            plain.line = node.line
            lines = self.generate(plain, lambda: self._entry(node, name, kind))
        return self.built(kind, name, lines)

    def _entry(self, node: DictionaryComprehension, name: str, kind: Kind) -> Lines:
        assert node.key is not None
        parts = [self.value(node.key, kind.parts[0]), self.value(node.value, kind.parts[1])]
        return [self.ordered(parts, lambda c: f"{name}->set({c[0]}, {c[1]})") + ";"]

    def is_forgotten(self, node: Expression) -> bool:
        """Whether it is a memory of answers, which stays empty here."""
        return isinstance(node, MemberExpr) and self.known(node) == {} and not isinstance(node, IndexExpr)
