"""A digest of everything that a rule is made of, to tell a result that is older than its rule.

A function's digest covers its own source and that of every function and class of kvproof that it names, and so on: its
closure in the specification. Comments and docstrings are not part of it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterable
from types import CodeType, FunctionType, ModuleType
from typing import Any

OURS = ("kvproof.spec", "kvproof.invariants")
"""What a rule is made of. How a view comes about is no part of it."""


def digest(*functions: Any) -> str:
    """One digest of all of ``functions``, by what they are made of."""
    parts = {_name(part): _meaning(part) for function in functions for part in closure(function)}
    text = "\0".join(f"{name}\0{source}" for name, source in sorted(parts.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def closure(function: Any) -> list[Any]:
    """``function``, and the functions and classes of :data:`OURS` that it names, directly or not."""
    found: dict[str, Any] = {}
    ahead = [inspect.unwrap(function)]
    while ahead:
        part = ahead.pop()
        if _name(part) not in found:
            found[_name(part)] = part
            ahead += _named(part)
    return list(found.values())


def _named(part: Any) -> list[Any]:
    if inspect.isclass(part):
        methods = [inspect.unwrap(getattr(value, "__func__", value)) for value in vars(part).values()]
        return [one for method in methods if isinstance(method, FunctionType) for one in _named(method)]
    if not isinstance(part, FunctionType):
        return []
    values = [part.__globals__.get(name) for name in _names(part.__code__)]
    members = [getattr(value, name, None) for value in values if isinstance(value, ModuleType)
               for name in _names(part.__code__)]  # fmt: skip
    return [inspect.unwrap(value) for value in (*values, *members) if callable(value) and _is_ours(value)]


def _names(code: CodeType) -> Iterable[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_ours(value: Any) -> bool:
    made = inspect.isclass(value) or (callable(value) and isinstance(inspect.unwrap(value), FunctionType))
    return made and str(getattr(value, "__module__", "")).startswith(OURS)


def _name(part: Any) -> str:
    return f"{part.__module__}.{part.__qualname__}"


@functools.cache
def _meaning(part: Any) -> str:
    return meaning(textwrap.dedent(inspect.getsource(part)))


def meaning(source: str) -> str:
    """What ``source`` says to Python: without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            kept = [one for one in node.body if not _is_text(one)]
            node.body = kept or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
