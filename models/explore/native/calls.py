"""Calls: of translated functions, of classes, and of what Python brings with it."""

from __future__ import annotations

from collections.abc import Sequence

from mypy.nodes import (
    ArgKind,
    CallExpr,
    ConditionalExpr,
    Decorator,
    Expression,
    FuncDef,
    GeneratorExpr,
    IntExpr,
    LambdaExpr,
    MemberExpr,
    MypyFile,
    NameExpr,
    OpExpr,
    RefExpr,
    ReturnStmt,
    StrExpr,
    TypeInfo,
    Var,
)

from kvproof.models.explore.native.expressions import UNKNOWN, Code, unify
from kvproof.models.explore.native.kinds import (
    ABSENT,
    BOOL,
    BYTES,
    CONSTANT,
    INT,
    NONE,
    TEXT,
    Kind,
    cpp,
    member,
    sequence,
    short,
)
from kvproof.models.explore.native.loops import Loops
from kvproof.models.explore.native.translator import Signature


class Calls(Loops):
    """Adds calls."""

    def call(self, node: CallExpr, want: Kind | None) -> Code:
        return self.called(node, node.callee, want)

    def called(self, node: CallExpr, callee: Expression, want: Kind | None) -> Code:
        """``node``, as a call of ``callee``."""
        if isinstance(callee, ConditionalExpr):
            which = self.condition(callee.cond)
            if which.known:
                return self.called(node, callee.if_expr if which.value else callee.else_expr, want)
            one, other = self.called(node, callee.if_expr, want), self.called(node, callee.else_expr, want)
            return Code(f"({which.code} ? {one.code} : {other.code})", one.kind, False)
        if not isinstance(callee, RefExpr):
            raise self.fail(node, f"a call of a {type(callee).__name__}")
        target = callee.node
        if isinstance(target, Var) and target.name == "cls" and target not in self.variables:
            assert self.owner is not None
            return self._construct(node, self.owner)
        if isinstance(target, TypeInfo):
            if target.module_name.startswith("kvproof."):
                return self._construct(node, target)
            return self._builtin(node, target.fullname, want)
        if isinstance(callee, MemberExpr) and not self._is_module(callee.expr):
            return self._method(node, callee, want)
        if target is not None and target.fullname.startswith("kvproof.") and isinstance(target, FuncDef | Decorator):
            return self._function(node, self.translator.signature(target), [])
        return self._builtin(node, callee.fullname, want)

    owner: TypeInfo | None = None
    """The class whose method this is."""

    @staticmethod
    def _is_module(node: Expression) -> bool:
        return isinstance(node, RefExpr) and isinstance(node.node, MypyFile)

    # -- what is translated -------------------------------------------------------------------------------------------

    def _function(self, node: CallExpr, signature: Signature, first: Sequence[Code]) -> Code:
        """A call with ``first`` and the arguments of ``node``."""
        names = [one.name for one in signature.parameters]
        given: dict[int, Code] = dict(enumerate(first))
        order = list(given)
        setup, place = "", len(first)
        for argument, kind, name in zip(node.args, node.arg_kinds, node.arg_names, strict=True):
            if kind == ArgKind.ARG_STAR:
                value = self.expression(argument)
                if value.kind.name != "tuple":
                    raise self.fail(node, f"a {value.kind.name} is spread over the arguments")
                spread = self.fresh("s")
                setup += f"const auto {spread} = {value.code}; "
                for inner, part in enumerate(value.kind.parts):
                    code = Code(f"std::get<{inner}>({spread})", part)
                    given[place] = self.convert(argument, code, signature.parameters[place].kind)
                    order.append(place)
                    place += 1
                continue
            if kind not in (ArgKind.ARG_POS, ArgKind.ARG_NAMED):
                raise self.fail(node, "arguments that are not written out")
            at = place if name is None else names.index(name)
            place += name is None
            given[at] = self._argument(node, argument, signature.parameters[at].kind)
            order.append(at)
        for at, one in enumerate(signature.parameters):
            if at not in given:
                if one.default is None:
                    raise self.fail(node, f"{one.name} is not given")
                given[at] = self._argument(node, one.default, one.kind)
                order.append(at)
        passed = [at for at in order if signature.parameters[at].passed]
        parts = [self.convert(node, given[at], signature.parameters[at].kind) for at in passed]

        def make(codes: list[str]) -> str:
            by_place = dict(zip(passed, codes, strict=True))
            return f"{signature.name}({', '.join(by_place[at] for at in sorted(by_place))})"

        code = self.ordered(parts, make)
        return Code(f"({{ {setup}{code}; }})" if setup else code, signature.returns, signature.question >= 0)

    def _argument(self, node: CallExpr, argument: Expression, kind: Kind) -> Code:
        if kind == ABSENT:
            if self.known(argument) is not None:
                raise self.fail(node, "somebody would be told, and nobody listens")
            return Code("", ABSENT, value=None)
        if kind == CONSTANT:
            return Code("", CONSTANT, value=self.known(argument))
        return self.value(argument, kind)

    def _method(self, node: CallExpr, callee: MemberExpr, want: Kind | None) -> Code:
        target = callee.expr
        if isinstance(target, RefExpr) and isinstance(target.node, TypeInfo):
            if target.node.fullname == "builtins.dict" and callee.name == "fromkeys":
                return self._from_keys(node, want)
            return self._function(node, self._method_of(node, target.node, callee.name), [])
        if self.is_forgotten(target):
            if callee.name != "get":
                raise self.fail(node, f"{callee.name} of a memory")
            kind = self.kind_of(node)
            assert kind is not None
            return Code(self.translator.constants.write(None, kind), kind)
        value = self.known(target)
        if value is not UNKNOWN and f"{type(value).__module__}.{type(value).__qualname__}" in self.translator.objects:
            info = self.translator.program.look_up(f"{type(value).__module__}.{type(value).__qualname__}")
            assert isinstance(info, TypeInfo)
            signature = self._method_of(node, info, callee.name)
            first = [] if self._is_static(info, callee.name) else [Code("", CONSTANT, value=value)]
            return self._function(node, signature, first)
        base = self.expression(target, self.kind_of(target))
        if base.kind.name in ("object", "named"):
            info = self.translator.classes[base.kind.of]
            if self._does_nothing(node, info, callee.name):
                return Code("(void)0", NONE)
            signature = self._method_of(node, info, callee.name)
            first = [] if self._is_static(info, callee.name) else [base]
            return self._function(node, signature, first)
        return self.builtin_method(node, base, callee.name, want)

    def builtin_method(self, node: CallExpr, base: Code, name: str, want: Kind | None) -> Code:
        raise NotImplementedError

    def _does_nothing(self, call: CallExpr, info: TypeInfo, name: str) -> bool:
        """Whether a method only tells somebody who isn't there. What it would be told is not even put together."""
        node = info.names[name].node if name in info.names else None
        return isinstance(node, FuncDef) and self.is_silent(node) and all(map(_is_plain, call.args))

    def is_silent(self, node: FuncDef) -> bool:
        raise NotImplementedError

    def _method_of(self, node: CallExpr, info: TypeInfo, name: str) -> Signature:
        symbol = info.names.get(name)
        if symbol is None or not isinstance(symbol.node, FuncDef | Decorator):
            raise self.fail(node, f"{name} is no method of {info.name}")
        return self.translator.signature(symbol.node)

    @staticmethod
    def _is_static(info: TypeInfo, name: str) -> bool:
        node = info.names[name].node
        function = node.func if isinstance(node, Decorator) else node
        return isinstance(function, FuncDef) and (function.is_static or function.is_class)

    def property(self, node: MemberExpr, base: Code) -> Code:
        """A property: a getter of one line, which changes nothing."""
        name = f"{type(base.value).__module__}.{type(base.value).__qualname__}" if base.kind == CONSTANT else base.kind.of
        info = self.translator.program.look_up(name)
        assert isinstance(info, TypeInfo)
        symbol = info.names.get(node.name)
        getter = symbol.node if symbol is not None else None
        if not isinstance(getter, Decorator) or not getter.func.is_property:
            raise self.fail(node, f"{node.name} of {info.name} has no kind")
        body = getter.func.body.body
        if not isinstance(body[-1], ReturnStmt) or len(body) > 2:
            raise self.fail(node, f"the property {node.name} does more than to return something")
        signature = self.translator.signature(getter)
        return Code(f"{signature.name}({base.code})", signature.returns, base.pure)

    # -- classes ------------------------------------------------------------------------------------------------------

    def _construct(self, node: CallExpr, info: TypeInfo) -> Code:
        if info.is_newtype:
            return self.value(node.args[0], INT)
        self.translator.kinds.seen(info)
        kind = Kind("named" if info.is_named_tuple else "object", (), info.fullname)
        if not self.translator.is_record(info):
            return self._initialised(node, info, kind)
        names = self.translator.defaults(info)
        values: dict[str, Code] = {}
        fields = self.translator.fields(info.fullname)
        place = 0
        order: list[str] = []
        for argument, how, name in zip(node.args, node.arg_kinds, node.arg_names, strict=True):
            if how not in (ArgKind.ARG_POS, ArgKind.ARG_NAMED):
                raise self.fail(node, "arguments that are not written out")
            if name is None:
                name = names[place][0]
                place += 1
            part = fields.get(name)
            if part is not None:
                values[name] = self.value(argument, part)
                order.append(name)
            elif self.translator.field(info.fullname, name) not in (CONSTANT, ABSENT):
                raise self.fail(node, f"{name} of {info.name} has no kind")
        for name, default in names:
            if name in fields and name not in values:
                if default is None:
                    raise self.fail(node, f"{name} of {info.name} is not given")
                values[name] = self._default(node, default, fields[name])
                order.append(name)
        parts = [values[name] for name in order]
        if info.is_named_tuple:
            if list(fields) == order:
                inside = ", ".join(part.code for part in parts)
                return Code(f"{short(info.fullname)}{{{inside}}}", kind, all(part.pure for part in parts))
            raise self.fail(node, f"{info.name} is not made in the order of its parts")
        made = self.fresh("new")
        code = self.ordered(parts, lambda codes: f"({{ auto* {made} = make<{short(info.fullname)}>(); " + " ".join(
            f"{made}->{member(name)} = {code};" for name, code in zip(order, codes, strict=True)) + f" {made}; }})")  # fmt: skip
        return Code(code, kind, all(part.pure for part in parts))

    def _default(self, node: CallExpr, default: Expression, kind: Kind) -> Code:
        if isinstance(default, CallExpr) and isinstance(default.callee, RefExpr) and default.callee.name == "field":
            for argument, name in zip(default.args, default.arg_names, strict=True):
                if name == "default_factory" and isinstance(argument, RefExpr) and argument.name in ("list", "dict", "set"):
                    return Code(f"{cpp(kind)[:-1]}::make()", kind)
            raise self.fail(node, "a default that is made in some other way")
        return self.value(default, kind)

    def _initialised(self, node: CallExpr, info: TypeInfo, kind: Kind) -> Code:
        symbol = info.names.get("__init__")
        if symbol is None or not isinstance(symbol.node, FuncDef):
            raise self.fail(node, f"{info.name} is made without __init__")
        made = self.fresh("new")
        signature = self.translator.signature(symbol.node)
        made_code = Code(made, kind)
        call = self._function(node, signature, [made_code])
        return Code(f"({{ auto* {made} = make<{short(info.fullname)}>(); {call.code}; {made}; }})", kind, False)

    def _replaced(self, node: CallExpr) -> Code:
        """``dataclasses.replace``: another object, with some fields changed."""
        base = self.expression(node.args[0])
        if base.kind.name != "object":
            raise self.fail(node, f"a {base.kind.name} with something replaced")
        fields = self.translator.fields(base.kind.of)
        made, name_ = self.fresh("new"), short(base.kind.of)
        lines = [f"auto* {made} = make<{name_}>(); *{made} = *{base.code};"]
        for argument, name in zip(node.args[1:], node.arg_names[1:], strict=True):
            if name not in fields:
                raise self.fail(node, f"{name} has no kind")
            lines.append(f"{made}->{member(name)} = {self.value(argument, fields[name]).code};")
        return Code(f"({{ {' '.join(lines)} {made}; }})", base.kind, False)

    # -- what Python brings with it -----------------------------------------------------------------------------------

    def _builtin(self, node: CallExpr, name: str, want: Kind | None) -> Code:
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
                return self._replaced(node)
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

    def _extreme(
        self, node: CallExpr, plain: Sequence[Expression], keywords: dict[str, Expression], sign: str
    ) -> Code:
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
        each = f"{{ const Int {name}_item = #; if (!{name}_any || {name}_item {sign} @) @ = {name}_item; {name}_any = true; }}"
        found = self.gather(plain[0], INT, lambda kind: f"Int @ = 0; bool {name}_any = false;", each)
        closing = f" {name}_any || (raise(\"ValueError: empty\"), true);"
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

    def _from_keys(self, node: CallExpr, want: Kind | None) -> Code:
        kind = want if want is not None and want.name == "dict" else self.kind_of(node)
        if kind is None or kind.name != "dict":
            raise self.fail(node, "a dictionary whose kind is not known")
        name, value = self.fresh("g"), self.value(node.args[1], kind.parts[1])
        lines = self.loop(node.args[0], lambda item: [f"{name}->set({item.code}, {name}_value);"])
        code = (f"({{ auto* {name} = {cpp(kind)[:-1]}::make(); {cpp(kind.parts[1])} {name}_value = {value.code}; "
                f"{' '.join(lines)} {name}; }})")  # fmt: skip
        return Code(code, kind, False)

    def _collected(
        self, node: CallExpr, name: str, plain: Sequence[Expression], keywords: dict[str, Expression], want: Kind | None
    ) -> Code:
        """A new list, tuple, set or dictionary of what there is in another."""
        if name == "range":
            return Code(f"range({', '.join(self.range_bounds(node))})", Kind("range"), False)
        if name in ("bytes", "bytearray"):
            if not plain:
                return Code("List<uint8_t>::make()", BYTES)
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
        return Code(f"({{ auto* {name} = {cpp(kind)[:-1]}::make(); {' '.join(lines)} {name}; }})", kind, False)

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
        return Code(f"({{ auto* {name} = {cpp(kind)[:-1]}::make(); {' '.join(lines)} {name}; }})", kind, False)

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


def _is_plain(node: Expression) -> bool:
    """Whether nothing happens when it is evaluated, by the looks of it."""
    match node:
        case CallExpr(callee=RefExpr(node=TypeInfo())):
            return all(map(_is_plain, node.args))
        case MemberExpr():
            return _is_plain(node.expr)
        case OpExpr():
            return _is_plain(node.left) and _is_plain(node.right)
    return isinstance(node, NameExpr | IntExpr | StrExpr)


__all__ = ["Calls"]
