"""The functions that a predicate is written with: a reader of the predicate needs them before them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from kvproof.review.digests import OURS

RULES = ("kvproof.spec.rules.", "kvproof.spec.radix", "kvproof.spec.logic")
"""Rules have a page of their own, with the arithmetic and the connectives that they are written with."""


def helpers(predicate: Any) -> tuple[tuple[str, str], ...]:
    """The functions of the specification that ``predicate`` names, those that these name, and so on: each once, the
    nearest first, with its source. Rules are none of them, and of classes only what the invariants define."""
    found = [inspect.unwrap(predicate)]
    for part in found:  # which grows meanwhile
        found += [one for one in _named(part) if one not in found]
    return tuple((f"{one.__module__.removeprefix('kvproof.')}.{one.__qualname__}", _source(one)) for one in found[1:])


def _source(part: Any) -> str:
    return textwrap.dedent(inspect.getsource(part))


def _named(part: Any) -> Iterator[Any]:
    if not isinstance(part, FunctionType):
        return
    # By names and not by attributes: a view's references() is not the predicate that is called references.
    nodes = [node for node in ast.walk(ast.parse(_source(part))) if isinstance(node, ast.Name)]
    own = {node.id for node in nodes if not isinstance(node.ctx, ast.Load)} | set(part.__code__.co_varnames)
    for name in dict.fromkeys(node.id for node in nodes if node.id not in own):
        value = inspect.unwrap(part.__globals__[name]) if callable(part.__globals__.get(name)) else None
        if _is_helper(value):
            yield value


def _is_helper(value: Any) -> bool:
    module = str(getattr(value, "__module__", ""))
    if inspect.isclass(value):
        return module.startswith("kvproof.invariants.")
    return isinstance(value, FunctionType) and module.startswith(OURS) and not module.startswith(RULES)
