"""The sources as mypy reads them: trees in which every name is resolved and every expression has a type."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mypy import build
from mypy.modulefinder import BuildSource
from mypy.nodes import Decorator, Expression, FuncDef, MypyFile, SymbolNode, TypeInfo
from mypy.options import Options
from mypy.types import Type

EXPLORER = "kvproof.models.explore"


@dataclass(frozen=True)
class Program:
    """Modules by name, and the type of each expression."""

    files: Mapping[str, MypyFile]
    types: Mapping[Expression, Type]

    def look_up(self, fullname: str) -> SymbolNode:
        """What has this name: a function or class of a module, or a method."""
        for dots in range(1, fullname.count(".") + 1):
            module, *rest = fullname.rsplit(".", dots)
            if module in self.files:
                node = self.files[module].names[rest[0]].node
                for name in rest[1:]:
                    assert isinstance(node, TypeInfo)
                    node = node.names[name].node
                assert node is not None
                return node
        raise KeyError(fullname)

    def function(self, fullname: str) -> FuncDef:
        node = self.look_up(fullname)
        node = node.func if isinstance(node, Decorator) else node
        assert isinstance(node, FuncDef)
        return node


def sources() -> dict[str, Path]:
    """Everything that an exploration without a judge can come to, by module."""
    spec = Path(importlib.import_module("kvproof.spec").__file__ or "").parent
    found = {}
    for path in sorted(spec.rglob("*.py")):
        parts = path.relative_to(spec).with_suffix("").parts
        found[".".join(("kvproof.spec", *(part for part in parts if part != "__init__")))] = path
    for name in ("scope", "encoding"):
        found[f"{EXPLORER}.{name}"] = Path(importlib.import_module(f"{EXPLORER}.{name}").__file__ or "")
    return found


def read(texts: Mapping[str, str] | None = None) -> Program:
    """Read and type the sources. ``texts`` take the place of modules, or are modules of their own.

    Raises ``ValueError`` for sources with type errors.
    """
    options = Options()
    options.export_types = options.preserve_asts = options.ignore_missing_imports = True
    options.incremental = False
    options.cache_dir = "/dev/null"
    options.python_executable = None
    texts = texts or {}
    paths = sources()
    modules = [BuildSource(str(paths.get(name, f"{name}.py")), name, texts.get(name)) for name in {**paths, **texts}]
    result = build.build(modules, options=options)
    if result.errors:
        raise ValueError(f"the sources have type errors: {result.errors[0]}")
    return Program(result.files, result.types)
