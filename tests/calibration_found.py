"""What a comparison found, and how oracle and tensors are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from calibration_worker import Memory

from kvproof.impl.vllm.device import Device
from kvproof.spec.tracer import State
from kvproof.spec.view import MambaContent


@dataclass
class Tally:
    """One comparison: cases, cases that differed and the first difference, per device."""

    cases: int = 0
    differing: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    """How often something worth meeting was met, so that a comparison of nothing can't pass."""

    def meet(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    def add(self, devices: Sequence[type[Device]], found: dict[str, str], where: str) -> None:
        self.cases += 1
        for device in devices:
            name = device.__name__
            self.differing.setdefault(name, 0)
            if name in found:
                self.differing[name] += 1
                self.first.setdefault(name, f"{where}: {found[name]}")


class Tags:
    """States as small integers, which fit every tensor. 0 is nothing."""

    def __init__(self) -> None:
        self._tags: dict[State, int] = {}

    def __call__(self, state: State | None) -> int:
        return 0 if state is None else self._tags.setdefault(state, len(self._tags) + 1)


def difference(device: Device, memory: Memory, tags: Tags, blocks: int) -> str:
    """Where the oracle's recurrent blocks differ from the tensors. Windows that it calls garbage are not judged."""
    for block in range(1, blocks):
        content = device.mamba.get(block, MambaContent(None, ()))
        window, temporal = memory.read(block)
        if temporal != tags(content.temporal):
            return f"block {block} holds state {temporal}, the oracle says {tags(content.temporal)}"
        wanted = tuple(tags(state) for state in content.window)
        if any(ours and ours != theirs for ours, theirs in zip(wanted, window, strict=False)):
            return f"block {block} holds windows {window}, the oracle says {wanted}"
    return ""


def no_one(*_: Any) -> Any:
    return set()


def nothing(*_: Any) -> Any:
    return ()
