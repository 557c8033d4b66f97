"""Oracles with one planted fault each: a comparison that does not tell them from the release has seen nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvproof.impl.vllm.device import Device
from kvproof.spec.view import NULL


class IgnoresShift(Device):
    """Moves the state of the first draft, whatever was accepted."""

    def _move_state(self, row: Any) -> None:
        before, row.worker.accepted = row.worker.accepted, 1
        column = row.worker.state_column
        super()._move_state(row)
        if column == row.worker.state_column:
            row.worker.accepted = before


class KeepsWindow(Device):
    """Moves the temporal state rightly, and the convolution window without its shift."""

    def _move_state(self, row: Any) -> None:
        column = row.worker.state_column
        old = [self.mamba.get(self._block(row, g, column)) if column is not None else None for g in self._mamba_groups]
        super()._move_state(row)
        if column in (None, -1, row.column):
            return
        for group, source in zip(self._mamba_groups, old, strict=True):
            block = self._block(row, group, row.column)
            if source is not None and block > NULL:
                self._set_mamba(block, self.mamba[block].temporal, source.window)


class NeverResets(Device):
    """Still counts the drafts as accepted once the state has moved to a new column."""

    def _move_state(self, row: Any) -> None:
        accepted = row.worker.accepted
        super()._move_state(row)
        row.worker.accepted = accepted


class OneColumnOn(Device):
    """Runs one column too far on."""

    def _block(self, row: Any, group: int, column: int) -> int:
        return super()._block(row, group, column + 1)


class SavesNoBoundary(Device):
    """Forgets to save the state at a boundary that acceptance crossed."""

    def _after_sampling(self, row: Any) -> Any:
        row.worker.accepted = max(1, len(row.sampled.tokens))
        return []


class ForgetsSittingOut(Device):
    """Forgets how many drafts were accepted when a request sits out a step: the V1 runner's way."""

    def execute(self, output: Any, *rest: Any) -> Any:
        for name, worker in self.workers.items():
            if name not in output.num_scheduled_tokens:
                worker.accepted = 1
        return super().execute(output, *rest)


class CopiesOneByOne(Device):
    """Copies blocks one after the other, so that a chain carries its first block along."""

    def _copy(self, copies: Sequence[Any]) -> None:
        for copy in copies:
            super()._copy([copy])


class ExportsOneColumnOn(Device):
    """Exports a checkpoint to the running column."""

    def _checkpoint(self, row: Any, end: int) -> tuple[int, int]:
        position, column = super()._checkpoint(row, end)
        return (position, column + 1) if position else (position, column)


MOVES = (Device, IgnoresShift, KeepsWindow, NeverResets, OneColumnOn, SavesNoBoundary)
