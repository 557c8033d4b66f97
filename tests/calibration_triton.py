"""Triton kernels run as the Python they are written in, lane by lane, on the memory of CPU tensors.

On a machine without Triton a release's ``triton.jit`` hands the function back as it is. What it computes is then the
release's own source; only the dozen operations of ``triton.language`` that it uses are given a meaning here. Integers
are 64 bits wide and divide towards zero, as on a device; a load or store outside the memory that was allowed is an
error instead of undefined behaviour. Programs of a grid run one after the other, forwards or backwards: a device
promises no order, so a kernel whose result depends on it has a race.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

CELLS: dict[str, Any] = {
    "u1": ctypes.c_uint8,
    "u2": ctypes.c_uint16,
    "u4": ctypes.c_uint32,
    "i4": ctypes.c_int32,
    "i8": ctypes.c_int64,
    "u8": ctypes.c_int64,  # the same bits: nothing here depends on the sign
}
OF_TENSOR = {"torch.int32": "i4", "torch.int64": "i8", "torch.uint64": "u8", "torch.uint8": "u1"}
DEVICE_FUNCTIONS = ("_copy_mamba_state_block", "_memcpy_u64_tiled")


class OutOfBounds(Exception):
    """A kernel touched memory that it was not given."""


class Lanes:
    """Integers (or truth values), one per lane; a pointer where ``cell`` names what lies at the addresses."""

    __slots__ = ("cell", "value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any, cell: str | None = None) -> None:
        self.value = np.asarray(value)
        self.cell = cell

    def to(self, kind: Any) -> Lanes:
        return Lanes(self.value, kind[1] if isinstance(kind, tuple) else None)

    def __add__(self, other: Any) -> Lanes:
        step = ctypes.sizeof(CELLS[self.cell]) if self.cell else 1
        if isinstance(other, Lanes) and other.cell:
            assert not self.cell, "two pointers can't be added"
            return other + self
        return Lanes(self.value + plain(other) * step, self.cell)

    def __getitem__(self, index: Any) -> Lanes:
        return Lanes(self.value[index], self.cell)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __neg__(self) -> Lanes:
        return Lanes(-self.value)

    def __invert__(self) -> Lanes:
        return Lanes(~self.value)

    __radd__ = __add__


def plain(value: Any) -> Any:
    return value.value if isinstance(value, Lanes) else value


def towards_zero(a: Any, b: Any) -> Any:
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


def _operator(function: Callable[[Any, Any], Any], swapped: bool = False) -> Callable[[Lanes, Any], Lanes]:
    def apply(self: Lanes, other: Any) -> Lanes:
        a, b = self.value, plain(other)
        return Lanes(function(b, a) if swapped else function(a, b))

    return apply


for _name, _function in {
    "sub": np.subtract,
    "mul": np.multiply,
    "floordiv": towards_zero,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}.items():
    setattr(Lanes, f"__{_name}__", _operator(_function))
    setattr(Lanes, f"__r{_name}__", _operator(_function, swapped=True))
for _name, _function in {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}.items():
    setattr(Lanes, f"__{_name}__", _operator(_function))


class Language:
    """What stands for ``triton.language``: the operations the kernels use, on the memory that :meth:`allow` opens."""

    constexpr = staticmethod(lambda value: value)

    def __init__(self) -> None:
        self.program: tuple[int, ...] = (0, 0, 0)
        self.backwards = False
        self._ranges: list[tuple[int, int]] = []
        for name, cell in {"int32": "i4", "int64": "i8", "uint8": "u1", "uint16": "u2", "uint32": "u4"}.items():
            setattr(self, name, cell)
        self.uint64 = "u8"

    def allow(self, *tensors: Any) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            span = (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            if span not in self._ranges:
                self._ranges.append(span)

    def _cells(self, pointer: Lanes, mask: Any) -> tuple[Any, Any, Any]:
        assert pointer.cell, "not a pointer"
        at, on = np.broadcast_arrays(pointer.value, np.asarray(True if mask is None else plain(mask)))
        kind = CELLS[pointer.cell]
        size = ctypes.sizeof(kind)
        for address in at[on].tolist():
            if not any(low <= address and address + size <= high for low, high in self._ranges):
                raise OutOfBounds(f"{size} bytes at {address:#x} in program {self.program}")
        return at, on, kind

    def load(self, pointer: Lanes, mask: Any = None, other: Any = 0) -> Lanes:
        at, on, kind = self._cells(pointer, mask)
        out = np.full(at.shape, plain(other), dtype=np.int64)
        out[on] = [kind.from_address(address).value for address in at[on].tolist()]
        return Lanes(out)

    def store(self, pointer: Lanes, value: Any, mask: Any = None) -> None:
        at, on, kind = self._cells(pointer, mask)
        values = np.broadcast_to(np.asarray(plain(value)), at.shape)
        for address, item in zip(at[on].tolist(), values[on].tolist(), strict=True):
            kind.from_address(address).value = item

    def program_id(self, axis: int) -> Lanes:
        return Lanes(np.int64(self.program[axis]))

    def arange(self, start: int, end: int) -> Lanes:
        return Lanes(np.arange(start, end, dtype=np.int64))

    def maximum(self, a: Any, b: Any) -> Lanes:
        return Lanes(np.maximum(plain(a), plain(b)))

    def minimum(self, a: Any, b: Any) -> Lanes:
        return Lanes(np.minimum(plain(a), plain(b)))

    def where(self, condition: Any, a: Any, b: Any) -> Lanes:
        return Lanes(np.where(plain(condition), plain(a), plain(b)))

    def cdiv(self, a: Any, b: Any) -> Lanes:
        return Lanes(towards_zero(plain(a) + plain(b) - 1, plain(b)))

    def pointer_type(self, cell: str) -> tuple[str, str]:
        return ("pointer", cell)

    def debug_barrier(self) -> None:
        """Nothing to wait for: every lane loads before any lane stores."""


class Kernel:
    """A jitted function: launched over a grid with ``kernel[grid](...)``, or called by another kernel."""

    def __init__(self, function: Any, language: Language) -> None:
        self.function = getattr(function, "fn", function)
        self.language = language
        self.launches = 0
        self._parameters = inspect.signature(self.function).parameters

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        self.launches += 1
        values = [self._argument(argument) for argument in arguments]
        keywords = {name: self._argument(value) for name, value in named.items() if name in self._parameters}
        programs = list(itertools.product(*(range(int(size)) for size in grid)))
        for program in reversed(programs) if self.language.backwards else programs:
            self.language.program = (*program, 0, 0, 0)[:3]
            self.function(*values, **keywords)

    def _argument(self, value: Any) -> Any:
        if not hasattr(value, "data_ptr"):
            return value
        self.language.allow(value)
        return Lanes(np.int64(value.data_ptr()), OF_TENSOR[str(value.dtype)])


def install(language: Language, modules: Iterable[ModuleType]) -> dict[str, Kernel]:
    """Make every kernel of ``modules`` run here. Returns them by name; a kernel seen twice is one."""
    kernels: dict[str, Kernel] = {}
    for module in modules:
        for name, found in list(vars(module).items()):
            function = getattr(found, "fn", found)
            if not (name.endswith("_kernel") or name in DEVICE_FUNCTIONS) or not inspect.isfunction(function):
                continue
            kernels.setdefault(name, Kernel(function, language))
            setattr(module, name, kernels[name])
        module.tl = language  # type: ignore[attr-defined]
        module.triton = SimpleNamespace(  # type: ignore[attr-defined]
            cdiv=lambda a, b: -(-a // b), next_power_of_2=lambda n: 1 << max(0, n - 1).bit_length()
        )
    return kernels
