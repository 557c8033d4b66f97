"""Functions of a tree of Python files by name, and how they differ from another tree's."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvproof.review.digests import meaning

_CONTEXT = 2
_LOGS = frozenset({"debug", "debug_once", "info", "info_once", "warning", "warning_once", "error", "exception"})


@dataclass(frozen=True)
class Function:
    """Where a function or class is, and what it says to Python, line by line."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Changed:
    """``how`` a function differs: ``new``, ``gone`` or ``changed``, by these lines of a unified diff."""

    name: str
    how: str
    before: Function | None
    after: Function | None

    @property
    def place(self) -> str:
        where = self.after or self.before
        assert where is not None
        return f"{where.file}:{where.line}"

    def lines(self) -> list[str]:
        """The difference, two lines of context around each; comments, types and log lines are left out."""
        old, new = ((one.text if one is not None else "").splitlines() for one in (self.before, self.after))
        return list(difflib.unified_diff(old, new, n=_CONTEXT, lineterm=""))[2:]


def functions(files: Iterable[tuple[str, str]]) -> dict[str, Function]:
    """What ``files`` (names and texts) define: functions by name, methods as ``Class.method``. Where several have one
    name, the first counts that is no declaration of a type alone. A file that is no Python is passed over."""
    found: dict[str, Function] = {}
    for file, text in files:
        tree = parsed(text)
        for node in tree.body if tree is not None else ():
            if isinstance(node, ast.FunctionDef) and not _is_overload(node):
                found.setdefault(node.name, _function(file, node))
            elif isinstance(node, ast.ClassDef):
                for member in node.body:
                    if isinstance(member, ast.FunctionDef) and not _is_overload(member):
                        found.setdefault(f"{node.name}.{member.name}", _function(file, member))
    return found


def parsed(text: str) -> ast.Module | None:
    """The syntax tree; ``None`` where it is no Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):  # of a null byte some versions say the latter
        return None


def _is_overload(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(one).rpartition(".")[2] == "overload" for one in node.decorator_list)


def _function(file: str, node: ast.FunctionDef) -> Function:
    return Function(file, node.lineno, meaning(ast.unparse(_Bare().visit(node))))


class _Bare(ast.NodeTransformer):
    """Takes out what decides nothing: types, and lines for the log."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:  # the name is ast's
        node.returns = None
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:  # the name is ast's
        return ast.Assign([node.target], node.value, lineno=node.lineno) if node.value is not None else None

    def visit_If(self, node: ast.If) -> ast.AST | None:  # the name is ast's
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:  # the name is ast's
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _LOGS:
            return None
        return node


def changes(before: Mapping[str, Function], after: Mapping[str, Function], names: Iterable[str]) -> list[Changed]:
    """Which of ``names`` differ, in order."""
    found = []
    for name in names:
        old, new = before.get(name), after.get(name)
        if (old.text if old else None) != (new.text if new else None):
            found.append(Changed(name, "new" if old is None else "gone" if new is None else "changed", old, new))
    return found


def release_files(tree: Path) -> list[tuple[str, str]]:
    """The files of a release that decide about its cache: the core, and what a cache is made of."""
    core = sorted((tree / "vllm" / "v1" / "core").rglob("*.py"))
    files = [*core, tree / "vllm" / "v1" / "kv_cache_interface.py"]
    return [
        (str(file.relative_to(tree)), file.read_text(encoding="utf-8", errors="replace"))
        for file in files
        if file.is_file()
    ]
