"""What a proof claims: a statement, its scope, its premises, and a goal, written once for both readings.

A claim's ``build`` is given :class:`Symbols` and returns an :class:`Obligation`. With :class:`Unknowns` the symbols
are solver variables and the obligation is a formula; with :class:`Numbers` they are integers and the same function
computes. So every counterexample that a solver finds is run through the very rules it refutes before it is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import z3

from kvproof.spec.logic import Int, Truth
from kvproof.spec.radix import Position, Radix

Verdict = Literal["proved", "refuted", "undetermined", "error"]


class Symbols(Protocol):
    """The unknowns of a claim, by name. Names are those of the SMT-LIB files and of counterexamples."""

    def integer(self, name: str, least: int | None = None) -> Int:
        """An integer, at least ``least`` where that is given."""

    def truth(self, name: str) -> Truth:
        """A boolean."""

    def grid(self) -> Radix:
        """The block and the hash unit, both arbitrary: the unit divides the block."""

    def blocks_only(self) -> Radix:
        """A grid on which only the block matters (one unit to a block), of arbitrary size."""

    def position(self, name: str, radix: Radix) -> Position:
        """A number of tokens, as digits in range."""


@dataclass(frozen=True)
class Obligation:
    """What must follow from what. ``prefer`` are wishes for a readable counterexample, dropped where they can't be met.

    ``say`` tells a counterexample in plain words; it is called only with integers.
    """

    premises: tuple[tuple[str, Truth], ...]
    goal: Truth
    say: Callable[[], str]
    prefer: tuple[Truth, ...] = ()


@dataclass(frozen=True)
class Claim:
    """One proof. A mutant is a claim about a wrong rule (``mutant_of`` names the right one's) and must be refuted."""

    id: str
    statement: str
    scope: str
    build: Callable[[Symbols], Obligation]
    mutant_of: str = ""
    theory: str = "QF_LIA"

    @property
    def expected(self) -> Verdict:
        return "refuted" if self.mutant_of else "proved"


@dataclass(frozen=True)
class ClaimResult:
    """What came out. ``verdict`` is decisive only where both solvers agree and the premises are satisfiable.

    ``scope`` is what a proof of the claim covers ("proved for all …"); a mutant has none, since it must be refuted.
    ``counterexample`` is in plain words and has been run on plain integers. ``note`` says why a verdict is not
    decisive. ``smtlib`` is the file with the query (the premises' own is beside it), or empty where none was asked
    for.
    """

    id: str
    statement: str
    scope: str
    premises: tuple[str, ...]
    verdict: Verdict
    expected: Verdict
    seconds: float
    second_solver: Verdict
    premises_satisfiable: bool
    counterexample: str = ""
    smtlib: str = ""
    mutant_of: str = ""
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether this is what was expected."""
        return self.verdict == self.expected

    def line(self) -> str:
        """The outcome in one line. A mutant's statement is a wrong rule, so it is not said as if it were true."""
        name = f"mutant {self.id}" if self.mutant_of else self.id
        if self.verdict == "refuted":
            return f"{name} refuted, counterexample: {self.counterexample}"
        if self.verdict == "proved":
            return f"{name} proved: {self.statement}"
        return f"{name} {self.verdict}: {self.note}"


class Unknowns:
    """Symbols as Z3 variables. ``ranges`` collects what is assumed of their digits."""

    def __init__(self) -> None:
        self.variables: dict[str, z3.ExprRef] = {}
        self.ranges: list[Any] = []

    def integer(self, name: str, least: int | None = None) -> Int:
        term = z3.Int(name)
        self.variables[name] = term
        if least is not None:
            self.ranges.append(term >= least)
        return term

    def truth(self, name: str) -> Truth:
        term = z3.Bool(name)
        self.variables[name] = term
        return term

    def grid(self) -> Radix:
        return Radix(self.integer("units_per_block", 1), self.integer("tokens_per_unit", 1))

    def blocks_only(self) -> Radix:
        return Radix(1, self.integer("tokens_per_block", 1))

    def position(self, name: str, radix: Radix) -> Position:
        unit = 0 if isinstance(radix.units, int) else self.integer(f"{name}.unit")
        result = Position(self.integer(f"{name}.block"), unit, self.integer(f"{name}.offset"), radix)
        self.ranges.append(result.well_formed())
        return result


class Numbers:
    """Symbols as the numbers of one counterexample."""

    def __init__(self, values: Mapping[str, int | bool]) -> None:
        self.values = values

    def integer(self, name: str, least: int | None = None) -> Int:
        return self.values[name]

    def truth(self, name: str) -> Truth:
        return self.values[name]

    def grid(self) -> Radix:
        return Radix(self.values["units_per_block"], self.values["tokens_per_unit"])

    def blocks_only(self) -> Radix:
        return Radix(1, self.values["tokens_per_block"])

    def position(self, name: str, radix: Radix) -> Position:
        unit = self.values.get(f"{name}.unit", 0)
        return Position(self.values[f"{name}.block"], unit, self.values[f"{name}.offset"], radix)


def tokens(position: Position) -> int:
    """A position's number of tokens, for plain words."""
    return int(position.value())


def is_at(position: Position, count: int, block: int, unit: int) -> Truth:
    """A wish: the position is ``count`` tokens on a grid of ``block`` tokens in units of ``unit``."""
    return position == Position.of(count, block, unit)
