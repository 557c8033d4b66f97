"""Packages that old releases import and kvproof never reaches, stood in for where they are not installed.

Up to 0.23 ``vllm.config`` imports ``gguf``, through ``transformers_utils/gguf_utils.py``, for three classes that are
used when a model file of that format is opened. Nothing under ``v1/core`` names them, and the configuration that
kvproof builds opens no model. Newer releases import the package when it is needed, so that nothing is stood in there.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_STANDINS = {
    "gguf": (),
    "gguf.constants": ("Keys", "VisionProjectorType"),
    "gguf.quants": ("GGMLQuantizationType",),
}


class _Absent(type):
    """A class that can be imported and nothing else."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"{cls.__name__}.{name} belongs to the package gguf: pip install gguf")

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise ImportError(f"{cls.__name__} belongs to the package gguf: pip install gguf")


def stand_in() -> None:
    """Make what the release found on the path imports at its start importable. Does nothing where it is installed."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return
    helper = Path(found.origin).parent / "transformers_utils" / "gguf_utils.py"
    try:
        imports = "\nimport gguf\n" in helper.read_text(encoding="utf-8")
    except OSError:
        return
    if not imports or "gguf" in sys.modules or importlib.util.find_spec("gguf") is not None:
        return
    for name, classes in _STANDINS.items():
        module = ModuleType(name, "Stands in for a package that is not installed.")
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        for each in classes:
            setattr(module, each, _Absent(each, (), {}))
        sys.modules[name] = module
