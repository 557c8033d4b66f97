"""Functions, statement by statement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from mypy.nodes import (
    AssertStmt,
    AssignmentStmt,
    Block,
    BreakStmt,
    CallExpr,
    ContinueStmt,
    DelStmt,
    Expression,
    ExpressionStmt,
    ForStmt,
    FuncDef,
    IfStmt,
    IndexExpr,
    MemberExpr,
    NameExpr,
    OperatorAssignmentStmt,
    PassStmt,
    RaiseStmt,
    ReturnStmt,
    SliceExpr,
    Statement,
    StrExpr,
    TempNode,
    TupleExpr,
    Var,
    WhileStmt,
    YieldExpr,
)
from mypy.types import Instance, TupleType, get_proper_type

from kvproof.models.explore.native.expressions import UNKNOWN, Code
from kvproof.models.explore.native.kinds import ABSENT, BYTES, CONSTANT, INT, NONE, POINTERS, Kind, Untranslatable, cpp, member
from kvproof.models.explore.native.methods import Methods
from kvproof.models.explore.native.translator import Translator

FAULTY = "kvproof.spec.machine.blocks.Faulty"
Lines = list[str]


def _assigned(block: Block, times: Counter[Var]) -> None:
    """Count how often each variable is assigned."""
    for statement in block.body:
        targets: Sequence[Expression] = ()
        inner: list[Block | None] = []
        match statement:
            case AssignmentStmt():
                targets = statement.lvalues
            case OperatorAssignmentStmt():
                targets = (statement.lvalue,)
            case ForStmt():
                targets, inner = (statement.index,), [statement.body, statement.else_body]
            case WhileStmt():
                inner = [statement.body, statement.else_body]
            case IfStmt():
                inner = [*statement.body, statement.else_body]
        times.update(name.node for target in targets for name in _names(target) if isinstance(name.node, Var))
        for one in inner:
            if one is not None:
                _assigned(one, times)


def _names(target: Expression) -> Iterator[NameExpr]:
    if isinstance(target, NameExpr):
        yield target
    elif isinstance(target, TupleExpr):
        for item in target.items:
            yield from _names(item)


class Function(Methods):
    """One function's translation."""

    def __init__(self, translator: Translator, node: FuncDef) -> None:
        super().__init__(translator, translator.module_of(node.fullname))
        self.node = node
        self.owner = node.info or None
        self.signature = translator.signature(node)
        self.times: Counter[Var] = Counter()
        _assigned(node.body, self.times)
        self.declared: Lines = []
        by_name = {argument.variable.name: argument.variable for argument in node.arguments}
        for one in self.signature.parameters:
            self.times[by_name[one.name]] += 1
            code = f"{one.name}_" if one.passed else ""
            value = None if one.kind == ABSENT else UNKNOWN
            self.variables[by_name[one.name]] = Code(code, one.kind, value=value)

    def lines(self) -> Lines:
        """The whole definition."""
        body, generator = self._block(self.node.body), self.node.is_generator
        result = cpp(self.signature.returns)
        start = [f"{result} out_ = {result[:-1]}::make();"] if generator else []
        end = ["return out_;"] if generator else []
        if not generator and self.signature.returns != NONE:
            end = ['raise("a function came to its end");']
        return [f"{self.signature.declaration()} {{", *start, *self.declared, *body, *end, "}"]

    def is_silent(self, node: FuncDef) -> bool:
        body = [statement for statement in node.body.body if not _is_text(statement)]
        if len(body) != 1 or not isinstance(body[0], IfStmt) or body[0].else_body is not None:
            return False
        which = self.condition(body[0].expr[0])
        return which.known and not which.value

    # -- statements ---------------------------------------------------------------------------------------------------

    def _block(self, block: Block | None) -> Lines:
        if block is None:
            return []
        if block.is_unreachable:
            return ['raise("mypy takes this to be unreachable");']
        lines: Lines = []
        for statement in block.body:
            found = self._statement(statement)
            lines += found
            if found and found[-1] == ENDS:
                break
        return lines

    def _statement(self, node: Statement) -> Lines:
        try:
            return self._translated(node)
        except Untranslatable as error:
            if ", line " in str(error):
                raise
            raise self.translator.fail(node, self.module, str(error)) from error

    def _translated(self, node: Statement) -> Lines:
        match node:
            case ExpressionStmt(expr=StrExpr()) | PassStmt():
                return []
            case ExpressionStmt(expr=YieldExpr()):
                item = node.expr.expr  # type: ignore[attr-defined]
                return [f"out_->append({self.value(item, self.signature.returns.part).code});"]
            case ExpressionStmt():
                return [f"{self.expression(node.expr).code};"]
            case AssignmentStmt():
                return self._assignment(node)
            case OperatorAssignmentStmt():
                return self._operator_assignment(node)
            case ReturnStmt():
                return self._return(node)
            case IfStmt():
                return self._if(node)
            case ForStmt():
                return self._for(node)
            case WhileStmt():
                return self._while(node)
            case BreakStmt():
                return ["break;"]
            case ContinueStmt():
                return ["continue;"]
            case RaiseStmt():
                return self._raise(node)
            case DelStmt():
                return self._del(node)
            case AssertStmt():
                which = self.condition(node.expr)
                return [] if which.known and which.value else [f'if (!{which.code}) raise("AssertionError");']
        raise self.fail_at(node, f"{type(node).__name__} has no translation")

    def fail_at(self, node: Statement, reason: str) -> Untranslatable:
        return self.translator.fail(node, self.module, reason)

    def _return(self, node: ReturnStmt) -> Lines:
        if self.node.is_generator:
            return ["return out_;", ENDS]
        if node.expr is None or self.signature.returns == NONE:
            if node.expr is not None and self.known(node.expr) is not None:
                raise self.fail_at(node, "something is returned where nothing is to be")
            return ["return;", ENDS]
        return [f"return {self.value(node.expr, self.signature.returns).code};", ENDS]

    def _if(self, node: IfStmt) -> Lines:
        lines: Lines = []
        closing = 0
        for test, body in zip(node.expr, node.body, strict=True):
            which = self.condition(test)
            if which.known and not which.value:
                continue
            if which.known:
                inner = self._block(body)
                return [*lines, *inner, *_closed(closing), *([ENDS] if not closing and _ends(inner) else [])]
            lines += [f"if ({which.code}) {{", *self._block(body), "} else {"]
            closing += 1
        other = self._block(node.else_body)
        if not closing:
            return other
        return [*lines, *other, *_closed(closing)]

    def _for(self, node: ForStmt) -> Lines:
        if node.else_body is not None or node.is_async:
            raise self.fail_at(node, "a loop with else")

        def body(item: Code) -> Lines:
            return [*self._store(node.index, item), *self._block(node.body)]

        return self.loop(node.expr, body)

    def _while(self, node: WhileStmt) -> Lines:
        if node.else_body is not None:
            raise self.fail_at(node, "a loop with else")
        which = self.condition(node.expr)
        return [f"while ({which.code}) {{", *self._block(node.body), "}"]

    def _raise(self, node: RaiseStmt) -> Lines:
        made = node.expr
        name = made.callee if isinstance(made, CallExpr) else made
        if isinstance(name, NameExpr) and name.fullname == FAULTY:
            return ["throw Faulty{};", ENDS]
        if isinstance(name, NameExpr):
            return [f'raise("{name.name}");', ENDS]
        raise self.fail_at(node, "something else than an exception is raised")

    def _del(self, node: DelStmt) -> Lines:
        if isinstance(node.expr, IndexExpr) and not isinstance(node.expr.index, SliceExpr):
            base = self.expression(node.expr.base)
            if base.kind.name == "dict":
                return [f"{base.code}->remove({self.value(node.expr.index, base.kind.parts[0]).code});"]
        raise self.fail_at(node, "del of something else than a dictionary's entry")

    # -- assignments --------------------------------------------------------------------------------------------------

    def _assignment(self, node: AssignmentStmt) -> Lines:
        if isinstance(node.rvalue, TempNode):  # a declaration
            return []
        targets = node.lvalues
        if len(targets) == 1 and isinstance(targets[0], TupleExpr) and isinstance(node.rvalue, TupleExpr):
            return self._in_parallel(node, targets[0].items, node.rvalue.items)
        if len(targets) == 1 and self._is_constant(targets[0], node.rvalue):
            return []
        want = self._target_kind(targets[0])
        found = self.expression(node.rvalue, want)
        if want is not None and want not in (CONSTANT, ABSENT):
            found = self.convert(node.rvalue, found, want)
        if len(targets) == 1 and not isinstance(targets[0], TupleExpr):
            return self._store(targets[0], found)
        if found.kind in (CONSTANT, ABSENT):
            return [line for target in targets for line in self._store(target, found)]
        name = self.fresh("v")
        here = Code(name, found.kind)
        return [f"{cpp(found.kind)} {name} = {found.code};",
                *(line for target in targets for line in self._store(target, here))]  # fmt: skip

    def _in_parallel(self, node: AssignmentStmt, targets: Sequence[Expression], values: Sequence[Expression]) -> Lines:
        """``a, b = x, y``: all values first."""
        if len(targets) != len(values):
            raise self.fail_at(node, "more is assigned than there are values, or less")
        before, after = [], []
        for target, value in zip(targets, values, strict=True):
            if self._is_constant(target, value):
                continue
            want = self._target_kind(target)
            found = self.expression(value, want)
            if want is not None and want not in (CONSTANT, ABSENT):
                found = self.convert(value, found, want)
            if found.kind in (CONSTANT, ABSENT) or (found.known and want is not None):
                after += self._store(target, found)
                continue
            if found.kind == NONE:
                raise self.fail(value, "None in an assignment of several things")
            name = self.fresh("v")
            before.append(f"{cpp(found.kind)} {name} = {found.code};")
            after += self._store(target, Code(name, found.kind))
        return [*before, *after]

    def _is_constant(self, target: Expression, value: Expression) -> bool:
        """Whether a variable gets one value, known now, once and for all: then it is that value."""
        if not isinstance(target, NameExpr) or not isinstance(target.node, Var) or self.times[target.node] != 1:
            return False
        known = self.known(value)
        if known is UNKNOWN or isinstance(known, list | dict | set):
            return False
        self.variables[target.node] = Code("", CONSTANT, value=known)
        return True

    def _target_kind(self, target: Expression) -> Kind | None:
        """The kind that a target has, if it is known before something is assigned."""
        if isinstance(target, NameExpr) and isinstance(target.node, Var):
            found = self.variables.get(target.node)
            if found is not None:
                return found.kind
            return self._declared_kind(target.node)
        if isinstance(target, MemberExpr):
            base = self.known(target.expr)
            if base is not UNKNOWN:
                raise self.fail(target, f"{target.name} of a constant is changed")
            owner = self.expression(target.expr)
            if owner.kind.name == "object":
                kind = self.translator.field(owner.kind.of, target.name)
                if kind is None:
                    raise self.fail(target, f"{target.name} has no kind")
                return kind
        if isinstance(target, IndexExpr) and not self.is_forgotten(target.base):
            owner = self.expression(target.base)
            if isinstance(target.index, SliceExpr):
                return owner.kind
            return owner.kind.parts[-1] if owner.kind.parts else None
        return None

    def _declared_kind(self, variable: Var) -> Kind | None:
        try:
            return self.translator.kinds.of(variable.type)
        except Untranslatable:
            return None

    def _store(self, target: Expression, found: Code) -> Lines:
        """``target = found``."""
        match target:
            case NameExpr():
                return self._store_name(target, found)
            case MemberExpr():
                return self._store_member(target, found)
            case IndexExpr():
                return self._store_item(target, found)
            case TupleExpr():
                if found.kind.name == "opt":
                    found = Code(f"{found.code}.get()", found.kind.part, found.pure)
                if not found.parts and not found.code.isidentifier():
                    name = self.fresh("v")
                    here = Code(name, found.kind)
                    return [f"const auto {name} = {found.code};", *self._store(target, here)]
                return [line for place, item in enumerate(target.items)
                        for line in self._store(item, self.part(found, place))]  # fmt: skip
        raise self.fail(target, f"an assignment to a {type(target).__name__}")

    def _store_name(self, target: NameExpr, found: Code) -> Lines:
        if target.name == "_":
            return []
        variable = target.node
        assert isinstance(variable, Var)
        if variable not in self.variables:
            kind = self._declared_kind(variable) or found.kind
            if kind in (CONSTANT, ABSENT):
                self.variables[variable] = Code("", kind, value=found.value)
                return []
            name = self.fresh(f"{target.name}_")
            self.declared.append(f"{cpp(kind)} {name}{{}};")
            self.variables[variable] = Code(name, kind)
        here = self.variables[variable]
        if here.kind in (CONSTANT, ABSENT):
            if found.known and (here.value is found.value or here.value == found.value):
                return []
            raise self.fail(target, f"{target.name} is not always the same constant")
        return [f"{here.code} = {self.convert(target, found, here.kind).code};"]

    def _store_member(self, target: MemberExpr, found: Code) -> Lines:
        base = self.expression(target.expr)
        if base.kind.name != "object":
            raise self.fail(target, f"{target.name} of a {base.kind.name} is changed")
        kind = self.translator.field(base.kind.of, target.name)
        if kind in (CONSTANT, ABSENT):
            if not found.known or (kind == ABSENT and found.value is not None):
                raise self.fail(target, f"{target.name} is not constant")
            return []
        if kind is None:
            raise self.fail(target, f"{target.name} has no kind")
        return [f"{base.code}->{member(target.name)} = {self.convert(target, found, kind).code};"]

    def _store_item(self, target: IndexExpr, found: Code) -> Lines:
        if self.is_forgotten(target.base):
            return []
        base = self.expression(target.base)
        if isinstance(target.index, SliceExpr):
            if base.kind.name != "list":
                raise self.fail(target, "a slice of something else than a list is assigned")
            start, stop = self.bounds(target.index)
            value = self.convert(target, found, base.kind)
            return [f"{base.code}->splice({start.code}, {stop.code}, {value.code});"]
        if base.kind == BYTES or base.kind.name not in ("list", "dict"):
            raise self.fail(target, f"an item of a {base.kind.name} is assigned")
        key = self.value(target.index, INT if base.kind.name == "list" else base.kind.parts[0])
        if not (base.pure and key.pure):
            raise self.fail(target, "where something is assigned changes something")
        value = self.convert(target, found, base.kind.parts[-1])
        if base.kind.name == "list":
            name = self.fresh("v")  # the list may grow while the value is worked out
            return [f"{{ {cpp(value.kind)} {name} = {value.code}; {base.code}->at({key.code}) = {name}; }}"]
        name = self.fresh("v")
        return [f"{{ {cpp(value.kind)} {name} = {value.code}; {base.code}->set({key.code}, {name}); }}"]

    def _operator_assignment(self, node: OperatorAssignmentStmt) -> Lines:
        target = node.lvalue
        if isinstance(target, NameExpr) and isinstance(target.node, Var) and target.node not in self.variables:
            raise self.fail(target, f"{target.name} has no value yet")
        here = self.expression(target)
        if not here.pure:
            raise self.fail(target, "where something is added changes something")
        if here.kind.name in ("list", "bytes") and node.op == "+" and not self._is_tuple(target):
            held = self.fresh("v")
            value = self.value(node.rvalue, here.kind)
            return [f"{{ auto* {held} = {here.code}; {held}->extend({value.code});", *self._again(target, here, held), "}"]
        old = self.fresh("v")
        right = self.expression(node.rvalue, here.kind if here.kind.name in POINTERS else None)
        result = self.operate(target, node.op, Code(old, here.kind), right, target, node.rvalue)
        return [f"{{ {cpp(here.kind)} {old} = {here.code};", *self._store(target, result), "}"]

    def _again(self, target: Expression, here: Code, held: str) -> Lines:
        """Python assigns the list that has grown once more: another may have taken its place meanwhile."""
        return [] if isinstance(target, NameExpr) else self._store(target, Code(held, here.kind))

    def _is_tuple(self, target: Expression) -> bool:
        """Whether it is something of which adding makes another."""
        proper = get_proper_type(self.translator.program.types.get(target))
        if isinstance(target, NameExpr) and isinstance(target.node, Var):
            proper = get_proper_type(target.node.type)
        named = proper.type.fullname if isinstance(proper, Instance) else ""
        return isinstance(proper, TupleType) or named in ("builtins.tuple", "builtins.bytes")


ENDS = "/* nothing comes after this */"


def _ends(lines: Lines) -> bool:
    return bool(lines) and lines[-1] == ENDS


def _closed(count: int) -> Lines:
    return ["}"] * count


def _is_text(statement: Statement) -> bool:
    return isinstance(statement, ExpressionStmt) and isinstance(statement.expr, StrExpr)
