"""Wrong rules made by changing one operator: every place in a module's source where one stands, each on its own.

A changed function runs in place of the right one wherever that is used: in claims, in the engine and in its judges
(:func:`planted` exchanges the code of the function that all of them hold).
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
_SUMS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_CALLS = {
    "all_of": "any_of",
    "any_of": "all_of",
    "minimum": "maximum",
    "maximum": "minimum",
    "min": "max",
    "max": "min",
    "earlier": "later",
    "later": "earlier",
    "floor_block": "ceil_block",
    "ceil_block": "floor_block",
    "floor_unit": "ceil_unit",
    "ceil_unit": "floor_unit",
    "plus": "minus",
    "minus": "plus",
}
_CHOICES = {"ite", "choose"}


@dataclass(frozen=True)
class Mutation:
    """``function`` of ``module`` with the expression ``before`` in ``line`` changed to ``after``; the ``nth`` change in
    it that reads so."""

    module: str
    function: str
    line: int
    column: int
    before: str
    after: str
    code: CodeType
    nth: int = 1

    @property
    def id(self) -> str:
        """Where it is."""
        return f"{self.module.rpartition('.')[2]}.{self.function}:{self.line}:{self.column}"

    @property
    def change(self) -> str:
        """What it changes, whatever line that stands in: what it is remembered by."""
        number = f" ({self.nth})" if self.nth > 1 else ""
        return f"{self.module.rpartition('.')[2]}.{self.function}: {self.before} -> {self.after}{number}"


def mutations(module: ModuleType) -> list[Mutation]:
    """Every mutation of the module's functions, in the order of their places."""
    tree = ast.parse(inspect.getsource(module))
    found: list[Mutation] = []
    seen: Counter[tuple[str, str, str, str]] = Counter()
    for path, node in _functions(tree):
        for place, part in enumerate(ast.walk(node)):
            if part is node or not hasattr(part, "lineno"):
                continue
            for variant in range(len(_changed(part))):
                mutated = copy.deepcopy(tree)
                function = next(n for p, n in _functions(mutated) if p == path)
                target = list(ast.walk(function))[place]
                before = ast.unparse(target)
                change = _changed(target)[variant]
                _replace(function, target, change)
                code = _code(compile(ast.fix_missing_locations(mutated), module.__file__ or "", "exec"), path)
                if code is not None:
                    line, column = part.lineno, part.col_offset  # type: ignore[attr-defined]
                    same = (module.__name__, ".".join(path), before, ast.unparse(change))
                    seen[same] += 1
                    found.append(Mutation(*same[:2], line, column, *same[2:], code, seen[same]))
    return found


def _functions(tree: ast.Module) -> Iterator[tuple[tuple[str, ...], ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield (node.name,), node
        elif isinstance(node, ast.ClassDef):
            yield from (((node.name, part.name), part) for part in node.body if isinstance(part, ast.FunctionDef))


def _changed(node: ast.AST) -> list[ast.expr]:
    """What the expression at ``node`` itself (not inside it) can be changed to."""
    match node:
        case ast.Compare(left, [operator], comparators) if type(operator) in _COMPARISONS:
            return [ast.Compare(left, [_COMPARISONS[type(operator)]()], comparators)]
        case ast.BinOp(left, operator, right) if type(operator) in _SUMS:
            return [ast.BinOp(left, _SUMS[type(operator)](), right)]
        case ast.BoolOp(operator, values):
            return [ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)]
        case ast.UnaryOp(ast.Not(), operand):
            return [operand]
        case ast.IfExp(test, body, orelse):
            return [ast.IfExp(test, orelse, body)]
        case ast.Constant(bool() as truth):
            return [ast.Constant(not truth)]
        case ast.Constant(int() as number):
            return [ast.Constant(number + 1), ast.Constant(number - 1)]
        case ast.Call(ast.Name("negate"), [part], []):
            return [ast.Call(ast.Name("any_of", ast.Load()), [part], [])]
        case ast.Call(ast.Name(name), [condition, then, otherwise], []) if name in _CHOICES:
            return [ast.Call(ast.Name(name, ast.Load()), [condition, otherwise, then], [])]
        case ast.Call(ast.Name(name), arguments, []) if name in _CALLS:
            return [ast.Call(ast.Name(_CALLS[name], ast.Load()), arguments, [])]
        case ast.Call(ast.Attribute(value, name), arguments, []) if name in _CALLS:
            return [ast.Call(ast.Attribute(value, _CALLS[name], ast.Load()), arguments, [])]
    return []


def _replace(root: ast.AST, target: ast.AST, change: ast.expr) -> None:
    class Exchange(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return ast.copy_location(change, node) if node is target else self.generic_visit(node)

    Exchange().visit(root)


def _code(module: CodeType, path: tuple[str, ...]) -> CodeType | None:
    """The code object of the function at ``path`` in a compiled module."""
    code: CodeType | None = module
    for name in path:
        constants = code.co_consts if code is not None else ()
        code = next((part for part in constants if isinstance(part, CodeType) and part.co_name == name), None)
    return code


def function_of(module: ModuleType, mutation: Mutation) -> FunctionType:
    """The function itself, also behind a property."""
    found: object = module
    for name in mutation.function.split("."):
        found = inspect.getattr_static(found, name)
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, classmethod | staticmethod):
        found = found.__func__
    assert isinstance(found, FunctionType)
    return found


@contextlib.contextmanager
def planted(module: ModuleType, mutation: Mutation) -> Iterator[None]:
    """Inside, the function is the mutated one for everybody who holds it."""
    function = function_of(module, mutation)
    right = function.__code__
    function.__code__ = mutation.code
    try:
        yield
    finally:
        function.__code__ = right
