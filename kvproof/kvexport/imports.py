"""The import lines of a generated file: those of the names that it uses, and no others."""

from __future__ import annotations

import re

WIDTH = 88

_STANDARD = ("collections", "contextlib", "copy", "dataclasses", "importlib", "inspect", "itertools", "math", "time")
_THIRD = ("pytest", "torch")
_NAMES = {
    "types": ("SimpleNamespace",),
    "vllm.distributed.kv_transfer.kv_connector.factory": ("KVConnectorFactory",),
    "vllm.distributed.kv_transfer.kv_connector.v1": ("base as connector_base",),
    "vllm.multimodal.inputs": ("MultiModalFeatureSpec", "PlaceholderRange"),
    "vllm.sampling_params": ("SamplingParams",),
    "vllm.utils.hashing": ("sha256",),
    "vllm.v1": ("kv_cache_interface as kv",),
    "vllm.v1.core": ("kv_cache_utils",),
    "vllm.v1.core.sched.scheduler": ("Scheduler",),
    "vllm.v1.core.single_type_kv_cache_manager": ("register_all_kvcache_specs",),
    "vllm.v1.kv_offload.base": ("TransferResult", "make_offload_key"),
    "vllm.v1.outputs": ("DraftTokenIds", "KVConnectorOutput", "ModelRunnerOutput"),
    "vllm.v1.request": ("Request", "RequestStatus"),
    "vllm.v1.structured_output": ("StructuredOutputManager",),
}
"""Where the templates' names come from, the same in all releases."""


def imports_of(body: str) -> str:
    """The sections of import lines that ``body`` needs: standard library, third party, vLLM."""
    standard = [f"import {name}" for name in _STANDARD if re.search(rf"(?<![\w.]){name}\.", body)]
    if "copy.copy(" not in body:  # then it is somebody's variable
        standard = [line for line in standard if line != "import copy"]
    if "importlib.util." in body:
        standard[standard.index("import importlib")] = "import importlib.util"
    standard += _from("types", body)
    third = [f"import {name}" for name in _THIRD if re.search(rf"\b{name}\.", body)]
    vllm = [line for module in _NAMES if module.startswith("vllm") for line in _from(module, body)]
    return "\n\n".join("\n".join(section) for section in (standard, third, ["import vllm.config", *vllm]) if section)


def _from(module: str, body: str) -> list[str]:
    names = [name for name in _NAMES[module] if re.search(rf"\b{name.rpartition(' ')[2]}\b", body)]
    if not names:
        return []
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return [line]
    return [f"from {module} import (", *(f"    {name}," for name in names), ")"]
