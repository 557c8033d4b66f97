"""Two copy kernels that the CPU build of vLLM lacks, so that a drafter runs there beside recurrent states.

vLLM 0.32.0 replaces its Triton kernels on the CPU one by one (``vllm/utils/cpu_triton_utils.py``), those of EAGLE and
MTP too. The two that move recurrent states between blocks around a step with drafts are not among them, and the first
step ends with ``TypeError: 'function' object is not subscriptable`` (``vllm/v1/worker/mamba_utils.py``, line 1226:
``precopy_mamba_align_fused_kernel[grid]``). Here is what they do, for vLLM's own ``register_kernels``: bytes are copied
from where to where the kernels copy them, one request and one state tensor at a time.
"""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _States:
    """The kernels' flattened description of all state tensors: lists by state, and the groups' block tables."""

    tables: list[int]
    row: int
    base: list[int]
    stride: list[int]
    element: list[int]
    inner: list[int]
    width: list[int]
    group: list[int]

    def copy(self, request: int, source: int, target: int, bias: int) -> None:
        """Copy a request's state between two columns of its table. ``bias`` tokens of the draft were accepted."""
        for state, base in enumerate(self.base):
            table = self.tables[self.group[state]] + 4 * request * self.row  # of 32-bit block numbers
            size = self.inner[state] * self.element[state]
            to = base + _block(table, target) * self.stride[state]
            if self.width[state]:  # a convolution's window moves on by the accepted tokens
                start = base + _block(table, source) * self.stride[state] + bias * size
                ctypes.memmove(to, start, (self.width[state] - bias) * size)
            else:  # there is one temporal state for each token of the draft
                ctypes.memmove(to, base + _block(table, source + bias) * self.stride[state], size)


def _block(table: int, column: int) -> int:
    return ctypes.c_int32.from_address(table + 4 * column).value


def _states(arguments: tuple[Any, ...], rows_first: bool) -> _States:
    if rows_first:
        raise NotImplementedError("the convolution's window is not copied row by row here: VLLM_SSM_CONV_STATE_LAYOUT")
    tables, row, *parts = arguments
    return _States(tables.tolist(), int(row), *(part.tolist() for part in parts[:6]))


def precopy(state_idx: Any, source: Any, bias: Any, *arguments: Any, **constants: Any) -> None:
    """Before a forward pass: a request that enters a new block takes its state along."""
    *described, _mapping, requests = arguments
    states = _states(tuple(described), constants["CONV_STATE_DIM_FIRST"])
    if constants["HAS_IDX_MAPPING"]:
        raise NotImplementedError("requests are in the order of the batch here")
    for request in range(requests):
        start, target = int(source[request]), int(state_idx[request])
        if start >= 0 and start != target:
            states.copy(request, start, target, int(bias[request]))


def postprocess(
    accepted: Any, state_idx: Any, scheduled: Any, computed: Any, drafted: Any, *arguments: Any, **constants: Any
) -> None:
    """After one: where the accepted tokens reach a boundary, the state there goes into the boundary's block."""
    *described, left, _mapping, requests = arguments
    states = _states(tuple(described), constants["CONV_STATE_DIM_FIRST"])
    block = constants["block_size"]
    for request in range(requests):
        running = int(computed[request]) + int(scheduled[request]) - int(drafted[request])
        boundary = (running + int(accepted[request]) - 1) // block * block
        if boundary < running:
            continue
        start, target, bias = int(state_idx[request]), boundary // block - 1, boundary - running
        if start == target:
            left[request] = 1
        if start != target or bias:
            states.copy(request, start, target, bias)


def register() -> None:
    """Make them known to the vLLM of this process, if it runs on a CPU and has none of its own."""
    if not importlib.import_module("vllm.platforms").current_platform.is_cpu():
        return
    dispatcher = importlib.import_module("vllm.triton_utils.dispatcher")
    owner = "vllm.v1.worker.mamba_utils"
    kernels = {
        f"{owner}.precopy_mamba_align_fused_kernel": precopy,
        f"{owner}.postprocess_mamba_fused_kernel": postprocess,
    }
    dispatcher.register_kernels({name: kernel for name, kernel in kernels.items() if name not in dispatcher._registry})
