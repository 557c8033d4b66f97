"""Assignments: to variables, fields, items and slices, one or several at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mypy.nodes import (
    AssignmentStmt,
    Expression,
    IndexExpr,
    MemberExpr,
    NameExpr,
    OperatorAssignmentStmt,
    SliceExpr,
    Statement,
    TempNode,
    TupleExpr,
    Var,
)
from mypy.types import Instance, TupleType, get_proper_type

from kvproof.models.explore.native.codes import UNKNOWN, Code
from kvproof.models.explore.native.kinds import (
    ABSENT,
    BYTES,
    CONSTANT,
    INT,
    NONE,
    POINTERS,
    Kind,
    Untranslatable,
    cpp,
    member,
)
from kvproof.models.explore.native.methods import Methods
from kvproof.models.explore.native.translator import Translator

Lines = list[str]


class Assignments(Methods):
    """Adds assignments. ``times`` counts how often a variable is assigned, ``declared`` declares those there are."""

    def __init__(self, translator: Translator, module: str) -> None:
        super().__init__(translator, module)
        self.times: Counter[Var] = Counter()
        self.declared: Lines = []

    def fail_at(self, node: Statement, reason: str) -> Untranslatable:
        return self.translator.fail(node, self.module, reason)

    def assignment(self, node: AssignmentStmt) -> Lines:
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
            return self.store(targets[0], found)
        if found.kind in (CONSTANT, ABSENT):
            return [line for target in targets for line in self.store(target, found)]
        name = self.fresh("v")
        here = Code(name, found.kind)
        return [f"{cpp(found.kind)} {name} = {found.code};",
                *(line for target in targets for line in self.store(target, here))]  # fmt: skip

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
                after += self.store(target, found)
                continue
            if found.kind == NONE:
                raise self.fail(value, "None in an assignment of several things")
            name = self.fresh("v")
            before.append(f"{cpp(found.kind)} {name} = {found.code};")
            after += self.store(target, Code(name, found.kind))
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

    def store(self, target: Expression, found: Code) -> Lines:
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
                    return [f"const auto {name} = {found.code};", *self.store(target, here)]
                return [line for place, item in enumerate(target.items)
                        for line in self.store(item, self.part(found, place))]  # fmt: skip
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
            if found.value is not None if kind == ABSENT else not self.translator.is_constant(found.value):
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

    def operator_assignment(self, node: OperatorAssignmentStmt) -> Lines:
        target = node.lvalue
        if isinstance(target, NameExpr) and isinstance(target.node, Var) and target.node not in self.variables:
            raise self.fail(target, f"{target.name} has no value yet")
        here = self.expression(target)
        if not here.pure:
            raise self.fail(target, "where something is added changes something")
        if here.kind.name in ("list", "bytes") and node.op == "+" and not self._is_tuple(target):
            held = self.fresh("v")
            value = self.value(node.rvalue, here.kind)
            return [
                f"{{ auto* {held} = {here.code}; {held}->extend({value.code});",
                *self._again(target, here, held),
                "}",
            ]
        old = self.fresh("v")
        right = self.expression(node.rvalue, here.kind if here.kind.name in POINTERS else None)
        result = self.operate(target, node.op, Code(old, here.kind), right, target, node.rvalue)
        return [f"{{ {cpp(here.kind)} {old} = {here.code};", *self.store(target, result), "}"]

    def _again(self, target: Expression, here: Code, held: str) -> Lines:
        """Python assigns the list that has grown once more: another may have taken its place meanwhile."""
        return [] if isinstance(target, NameExpr) else self.store(target, Code(held, here.kind))

    def _is_tuple(self, target: Expression) -> bool:
        """Whether it is something of which adding makes another."""
        proper = get_proper_type(self.translator.program.types.get(target))
        if isinstance(target, NameExpr) and isinstance(target.node, Var):
            proper = get_proper_type(target.node.type)
        named = proper.type.fullname if isinstance(proper, Instance) else ""
        return isinstance(proper, TupleType) or named in ("builtins.tuple", "builtins.bytes")
