"""The kill matrix: every mutant before every checker that is meant to notice it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvproof.models.mutants.checkers import Trial


class Named(Protocol):
    """A mutant, as far as the matrix cares: ``id`` names it."""

    @property
    def id(self) -> str: ...


M = TypeVar("M", bound=Named)

Checker = Callable[[M | None], Trial]
"""Tries one mutant (``None``: the healthy engine)."""


@dataclass(frozen=True)
class Judged(Generic[M]):
    """One row: ``trials`` by checker. ``mutant`` is ``None`` for the healthy engine."""

    mutant: M | None
    trials: Mapping[str, Trial]
    seconds: float

    @property
    def survived(self) -> list[str]:
        """The checkers that were in order and noticed nothing."""
        return [name for name, trial in self.trials.items() if not trial.killed and not trial.error]

    @property
    def silent(self) -> bool:
        """Whether no checker noticed anything, and none failed."""
        return len(self.survived) == len(self.trials)


def judge(mutants: Sequence[M], checkers: Mapping[str, Checker[M]]) -> Iterator[Judged[M]]:
    """The healthy engine, then the mutants in order, unless the checkers are not silent about the healthy one: then
    nothing that they say of a mutant is worth anything."""
    for mutant in (None, *mutants):
        begun = time.perf_counter()
        trials = {name: check(mutant) for name, check in checkers.items()}
        row = Judged(mutant, trials, time.perf_counter() - begun)
        yield row
        if mutant is None and not row.silent:
            return
