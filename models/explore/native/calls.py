"""Calls of translated functions, and of classes."""

from __future__ import annotations

from collections.abc import Sequence

from mypy.nodes import (
    ArgKind,
    CallExpr,
    ConditionalExpr,
    Decorator,
    Expression,
    FuncDef,
    IntExpr,
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

from kvproof.models.explore.native.codes import UNKNOWN, Code
from kvproof.models.explore.native.kinds import (
    ABSENT,
    CONSTANT,
    INT,
    NONE,
    Kind,
    cpp,
    member,
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
            return self.builtin(node, target.fullname, want)
        if isinstance(callee, MemberExpr) and not self._is_module(callee.expr):
            return self._method(node, callee, want)
        if target is not None and target.fullname.startswith("kvproof.") and isinstance(target, FuncDef | Decorator):
            return self._function(node, self.translator.signature(target), [])
        return self.builtin(node, callee.fullname, want)

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

        call = self.ordered(parts, make)
        return Code(f"({{ {setup}{call}; }})" if setup else call, signature.returns, signature.question >= 0)

    def _argument(self, node: CallExpr, argument: Expression, kind: Kind) -> Code:
        if kind == ABSENT:
            if self.known(argument) is not None:
                raise self.fail(node, "somebody would be told, and nobody listens")
            return Code("", ABSENT, value=None)
        if kind == CONSTANT:
            value = self.known(argument)
            if not self.translator.is_constant(value):
                raise self.fail(node, "another object is passed on than the one there is")
            return Code("", CONSTANT, value=value)
        return self.value(argument, kind)

    def _method(self, node: CallExpr, callee: MemberExpr, want: Kind | None) -> Code:
        target = callee.expr
        if isinstance(target, RefExpr) and isinstance(target.node, TypeInfo):
            if target.node.fullname == "builtins.dict" and callee.name == "fromkeys":
                return self.from_keys(node, want)
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

    def builtin(self, node: CallExpr, name: str, want: Kind | None) -> Code:
        raise NotImplementedError

    def from_keys(self, node: CallExpr, want: Kind | None) -> Code:
        raise NotImplementedError

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
        name = (
            f"{type(base.value).__module__}.{type(base.value).__qualname__}" if base.kind == CONSTANT else base.kind.of
        )
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

        def make(codes: list[str]) -> str:
            filled = (f"{made}->{member(name)} = {code};" for name, code in zip(order, codes, strict=True))
            return f"({{ auto* {made} = make<{short(info.fullname)}>(); {' '.join(filled)} {made}; }})"

        return Code(self.ordered(parts, make), kind, all(part.pure for part in parts))

    def _default(self, node: CallExpr, default: Expression, kind: Kind) -> Code:
        if isinstance(default, CallExpr) and isinstance(default.callee, NameExpr) and default.callee.name == "field":
            for argument, name in zip(default.args, default.arg_names, strict=True):
                if (
                    name == "default_factory"
                    and isinstance(argument, NameExpr)
                    and argument.name in ("list", "dict", "set")
                ):
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

    def replaced(self, node: CallExpr) -> Code:
        """``dataclasses.replace``: another object, with some fields changed."""
        base = self.expression(node.args[0])
        if base.kind.name != "object":
            raise self.fail(node, f"a {base.kind.name} with something replaced")
        fields = self.translator.fields(base.kind.of)
        made, name_ = self.fresh("new"), short(base.kind.of)
        lines = [f"auto* {made} = make<{name_}>(); *{made} = *{base.code};"]
        for argument, name in zip(node.args[1:], node.arg_names[1:], strict=True):
            if name is None or name not in fields:
                raise self.fail(node, f"{name} has no kind")
            lines.append(f"{made}->{member(name)} = {self.value(argument, fields[name]).code};")
        return Code(f"({{ {' '.join(lines)} {made}; }})", base.kind, False)


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
