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
    NameExpr,
    OperatorAssignmentStmt,
    PassStmt,
    RaiseStmt,
    ReturnStmt,
    SliceExpr,
    Statement,
    StrExpr,
    TupleExpr,
    Var,
    WhileStmt,
    YieldExpr,
)

from kvproof.models.explore.native.assignments import Assignments
from kvproof.models.explore.native.codes import UNKNOWN, Code
from kvproof.models.explore.native.kinds import (
    ABSENT,
    NONE,
    Untranslatable,
    cpp,
)
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


class Function(Assignments):
    """One function's translation."""

    def __init__(self, translator: Translator, node: FuncDef) -> None:
        super().__init__(translator, translator.module_of(node.fullname))
        self.node = node
        self.owner = node.info or None
        self.signature = translator.signature(node)
        _assigned(node.body, self.times)
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
                return self.assignment(node)
            case OperatorAssignmentStmt():
                return self.operator_assignment(node)
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
            return [*self.store(node.index, item), *self._block(node.body)]

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


ENDS = "/* nothing comes after this */"


def _ends(lines: Lines) -> bool:
    return bool(lines) and lines[-1] == ENDS


def _closed(count: int) -> Lines:
    return ["}"] * count


def _is_text(statement: Statement) -> bool:
    return isinstance(statement, ExpressionStmt) and isinstance(statement.expr, StrExpr)
