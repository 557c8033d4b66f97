"""Functions that Python brings with it."""

from __future__ import annotations

from collections.abc import Sequence

from mypy.nodes import (
    CallExpr,
    Expression,
    GeneratorExpr,
    LambdaExpr,
    RefExpr,
)

from kvproof.models.explore.native.calls import Calls
from kvproof.models.explore.native.codes import Code, unify
from kvproof.models.explore.native.kinds import (
    BOOL,
    BYTES,
    INT,
    TEXT,
    Kind,
    cpp,
    sequence,
)


class Builtins(Calls):
    """Adds functions that Python brings with it."""

    def builtin(self, node: CallExpr, name: str, want: Kind | None) -> Code:
        args = node.args
        keywords = {name: argument for argument, name in zip(args, node.arg_names, strict=True) if name is not None}
        plain = [argument for argument, name in zip(args, node.arg_names, strict=True) if name is None]
        short_name = name.removeprefix("builtins.")
        match short_name, len(plain):
            case "len", 1:
                found = self.expression(plain[0])
                if found.kind.name in ("list", "dict", "set", "bytes"):
                    return Code(f"{found.code}->size", INT, found.pure)
            case "int", 1:
                return self.value(plain[0], INT)
            case "bool", 1:
                return self.condition(plain[0])
            case "str", 1 if self.kind_of(plain[0]) == INT:
                found = self.value(plain[0], INT)
                return Code(f"text_of({found.code})", TEXT, found.pure)
            case "any" | "all", 1:
                return self._quantified(plain[0], short_name == "any")
            case "sum", 1:
                return self.gather(plain[0], INT, lambda kind: "Int @ = 0;", "@ = add(@, #);")
            case "min" | "max", _:
                return self._extreme(node, plain, keywords, "<" if short_name == "min" else ">")
            case "next", 1 | 2:
                return self._first(node, plain, want)
            case "list" | "tuple" | "bytes" | "bytearray" | "set" | "frozenset" | "dict" | "sorted" | "range", _:
                return self._collected(node, short_name, plain, keywords, want)
            case "dataclasses.replace", 1:
                return self.replaced(node)
            case "itertools.product", 1:
                return self._product(node, plain[0], keywords)
        raise self.fail(node, f"a call of {name} has no translation")

    def _quantified(self, node: Expression, some: bool) -> Code:
        """``any`` and ``all``, which stop at what decides."""
        name, label = self.fresh("q"), self.fresh("done")
        sign = "" if some else "!"
        jump = f"{{ {name} = {'true' if some else 'false'}; goto {label}; }}"

        def each() -> list[str]:
            assert isinstance(node, GeneratorExpr)
            return [f"if ({sign}({self.condition(node.left_expr).code})) {jump}"]

        if isinstance(node, GeneratorExpr):
            lines = self.generate(node, each)
        else:
            lines = self.loop(node, lambda item: [f"if ({sign}({self.truth(node, item)})) {jump}"])
        start = "false" if some else "true"
        return Code(f"({{ bool {name} = {start}; {' '.join(lines)} {label}: {name}; }})", BOOL, False)

    def _first(self, node: CallExpr, plain: Sequence[Expression], want: Kind | None) -> Code:
        """``next``: the first item that a generator comes to."""
        if not isinstance(plain[0], GeneratorExpr):
            raise self.fail(node, "next of what is not a generator expression")
        otherwise = self.expression(plain[1], want) if len(plain) == 2 else None
        name, label = self.fresh("n"), self.fresh("done")
        kinds: list[Kind] = []
        marker = f"/*{name}*/"

        def body(item: Code) -> list[str]:
            kind = item.kind
            if kind.name == "maybe" and otherwise is not None and otherwise.kind == kind.part:
                kind = kind.part  # a test has shown that it is not None
            kinds.append(kind)
            return [f"{name} = {marker}{self.convert(node, item, kind).code}; goto {label};"]

        lines = self.loop(plain[0], body)
        kind = kinds[0]
        if otherwise is None:
            missing = 'raise("StopIteration");'
            return Code(f"({{ {cpp(kind)} {name}{{}}; {' '.join(lines)} {missing} {label}: {name}; }})", kind, False)
        whole = unify([kind, otherwise.kind])
        if whole.name == "opt":
            lines = [line.replace(f"{name} = {marker}", f"{name} = {cpp(whole)}") for line in lines]
            raise self.fail(node, "next of a tuple, or None")
        start = self.convert(plain[1], otherwise, whole).code
        return Code(f"({{ {cpp(whole)} {name} = {start}; {' '.join(lines)} {label}: {name}; }})", whole, False)

    def _extreme(self, node: CallExpr, plain: Sequence[Expression], keywords: dict[str, Expression], sign: str) -> Code:
        if set(keywords) - {"default"}:
            raise self.fail(node, "the largest or smallest by something else than itself")
        if len(plain) > 1:
            parts = [self.value(argument, INT) for argument in plain]
            names = [self.fresh("x") for _ in parts]
            lines = " ".join(f"Int {name} = {part.code};" for name, part in zip(names, parts, strict=True))
            first = names[0]
            lines += " ".join(f" if ({name} {sign} {first}) {first} = {name};" for name in names[1:])
            return Code(f"({{ {lines} {first}; }})", INT, all(part.pure for part in parts))
        name = self.fresh("x")
        each = (f"{{ const Int {name}_item = #; if (!{name}_any || {name}_item {sign} @) @ = {name}_item; "
                f"{name}_any = true; }}")  # fmt: skip
        found = self.gather(plain[0], INT, lambda kind: f"Int @ = 0; bool {name}_any = false;", each)
        closing = f' {name}_any || (raise("ValueError: empty"), true);'
        if "default" in keywords:
            otherwise = self.value(keywords["default"], INT)
            closing = f" if (!{name}_any) @ = {otherwise.code};"
        head, _, result = found.code.removesuffix("; })").rpartition(" ")
        return Code(f"{head}{closing.replace('@', result)} {result}; }})", INT, False)

    def _product(self, node: CallExpr, values: Expression, keywords: dict[str, Expression]) -> Code:
        if not isinstance(values, CallExpr) or not isinstance(values.callee, RefExpr) or set(keywords) != {"repeat"}:
            raise self.fail(node, "a product of something else than one range with itself")
        start, stop, step = self.range_bounds(values)
        if values.callee.fullname != "builtins.range" or (start, step) != ("0", "1"):
            raise self.fail(node, "a product of something else than one range from 0 with itself")
        code = f"product({stop}, {self.value(keywords['repeat'], INT).code})"
        return Code(code, sequence(sequence(INT)), False)

    def from_keys(self, node: CallExpr, want: Kind | None) -> Code:
        kind = want if want is not None and want.name == "dict" else self.kind_of(node)
        if kind is None or kind.name != "dict":
            raise self.fail(node, "a dictionary whose kind is not known")
        name, value = self.fresh("g"), self.value(node.args[1], kind.parts[1])
        lines = self.loop(node.args[0], lambda item: [f"{name}->set({item.code}, {name}_value);"])
        return self.built(kind, name, [f"{cpp(kind.parts[1])} {name}_value = {value.code};", *lines])

    def _collected(
        self, node: CallExpr, name: str, plain: Sequence[Expression], keywords: dict[str, Expression], want: Kind | None
    ) -> Code:
        """A new list, tuple, set or dictionary of what there is in another."""
        if name == "range":
            return Code(f"range({', '.join(self.range_bounds(node))})", Kind("range"), False)
        if name in ("bytes", "bytearray"):
            if not plain:
                return Code("List<uint8_t>::make(120)", BYTES)  # room for most states
            found = self.expression(plain[0], sequence(INT))
            if found.kind == BYTES:
                return Code(f"{found.code}->copy()", BYTES, found.pure)
            found = self.convert(plain[0], found, sequence(INT))
            return Code(f"bytes_of({found.code})", BYTES, found.pure)
        if not plain:
            kind = want if want is not None and want.name in ("list", "set", "dict") else self.kind_of(node)
            if kind is None:
                raise self.fail(node, "an empty collection whose kind is not known")
            return Code(f"{cpp(kind)[:-1]}::make()", kind)
        source = plain[0]
        if name in ("set", "frozenset", "dict"):
            found = self.expression(source)
            if found.kind.name == ("dict" if name == "dict" else "set"):
                return Code(f"{found.code}->copy()", found.kind, found.pure)
            if name == "dict":
                raise self.fail(node, "a dictionary of pairs")
            kind = want if want is not None and want.name == "set" else self.kind_of(node)
            if kind is None or kind.name != "set":
                raise self.fail(node, "a set whose kind is not known")
            return self._into(source, kind, "add")
        made = self._as_list(source, want)
        if name != "sorted":
            return made
        return self._sorted(node, made, keywords)

    def _into(self, source: Expression, kind: Kind, how: str) -> Code:
        name = self.fresh("g")
        lines = self.loop(source, lambda item: [f"{name}->{how}({self.convert(source, item, kind.part).code});"])
        return self.built(kind, name, lines)

    def _as_list(self, source: Expression, want: Kind | None) -> Code:
        """A list of its own with the items of ``source``."""
        if isinstance(source, GeneratorExpr):
            return self.comprehension(source, want)
        looped = isinstance(source, CallExpr) and isinstance(source.callee, RefExpr) and source.callee.fullname in (
            "builtins.range", "builtins.zip", "builtins.enumerate", "builtins.reversed")  # fmt: skip
        if not looped:
            hint = want if want is not None and want.name == "list" else self.kind_of(source)
            found = self.expression(source, hint if hint is not None and hint.name == "list" else None)
            if found.kind == BYTES:
                return Code(f"ints_of({found.code})", sequence(INT), found.pure)
            if found.kind.name == "list":
                return Code(f"{found.code}->copy()", found.kind, found.pure)
            if found.kind.name not in ("dict",):
                raise self.fail(source, f"a list of a {found.kind.name}")
        kinds: list[Kind] = []
        name = self.fresh("g")

        def body(item: Code) -> list[str]:
            kinds.append(item.kind)
            return [f"{name}->append({item.code});"]

        lines = self.loop(source, body)
        kind = sequence(kinds[0])
        return self.built(kind, name, lines)

    def _sorted(self, node: CallExpr, made: Code, keywords: dict[str, Expression]) -> Code:
        name = self.fresh("g")
        key = self.sort_key(node, keywords, made.kind)
        return Code(f"({{ auto* {name} = {made.code}; {name}->sort({key}); {name}; }})", made.kind, made.pure)

    def sort_key(self, node: CallExpr, keywords: dict[str, Expression], kind: Kind) -> str:
        """What is compared in a sort, as a C++ function."""
        if set(keywords) - {"key"}:
            raise self.fail(node, "a sort in some other order")
        item = self.fresh("k")
        if "key" not in keywords:
            if kind.part.name not in ("int", "tuple"):
                raise self.fail(node, f"a sort of {kind.part.name}s")
            return f"[](const {cpp(kind.part)}& {item}) {{ return {item}; }}"
        key = keywords["key"]
        if not isinstance(key, LambdaExpr) or len(key.arguments) != 1:
            raise self.fail(node, "a sort by something else than a lambda")
        self.variables[key.arguments[0].variable] = Code(item, kind.part)
        found = self.expression(key.expr())
        parts = found.kind.parts if found.kind.name == "tuple" else (found.kind,)
        if any(part not in (INT, BOOL) for part in parts):
            raise self.fail(node, "a sort by something else than numbers")
        return f"[&]({cpp(kind.part)} {item}) {{ return {found.code}; }}"
