"""What is claimed of a released function, written once for unknowns and for numbers.

A claim's ``ask`` is given :class:`Inputs` and the release, and returns a :class:`Question`. With :class:`Unknown`
inputs the function runs on terms, path by path; with :class:`Known` ones the same function runs on plain integers,
which is how every counterexample is confirmed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import z3

from kvproof.models.smt.claim import Numbers, Symbols, Unknowns
from kvproof.models.smt.shipped import tables, terms
from kvproof.spec.logic import Int, Truth
from kvproof.spec.radix import Position, Radix
from kvproof.spec.rules.checkpoint import on_alignment
from kvproof.spec.scenario import Scenario

Verdict = Literal["proved", "bounded", "refuted", "undetermined", "error"]


class Inputs(Symbols, Protocol):
    """The unknowns of a claim, and the same as a released function takes them."""

    def tokens(self, position: Position) -> Any:
        """A token count for the function."""

    def count(self, number: Int) -> Any:
        """A number of blocks for the function."""

    def flag(self, truth: Truth) -> Any:
        """A truth for the function."""

    def block(self, radix: Radix) -> Any:
        """The block size for the function."""

    def unit(self, radix: Radix) -> Any:
        """The hash unit for the function."""

    def table(self, length: Int, null: Callable[[Int], Truth]) -> Any:
        """A table for the function: ``length`` slots, of which those are null that ``null`` says so of."""

    def members(self, member: Truth, request: str) -> Any:
        """A set for the function, in which ``request`` is or is not."""

    def alignment(self, name: str) -> Any:
        """An exporting kernel's alignment for the function: any positive number of tokens."""

    def aligned(self, name: str, distance: Position) -> Truth:
        """Whether a distance is a multiple of that alignment."""

    def position_of(self, answer: Any, radix: Radix) -> Position:
        """A token count that the function answered, in digits."""

    def number_of(self, answer: Any) -> Int:
        """A number of blocks that the function answered."""


class Unknown(Unknowns):
    """:class:`Inputs` as terms."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, z3.FuncDeclRef] = {}

    def tokens(self, position: Position) -> Any:
        return terms.tokens(position)

    def count(self, number: Int) -> Any:
        return terms.count(number)

    def flag(self, truth: Truth) -> Any:
        return terms.flag(truth)

    def block(self, radix: Radix) -> Any:
        return terms.Grain.block(radix)

    def unit(self, radix: Radix) -> Any:
        return terms.Grain.unit(radix)

    def table(self, length: Int, null: Callable[[Int], Truth]) -> Any:
        return tables.Table(length, lambda at: tables.Slot(null(at)))

    def members(self, member: Truth, request: str) -> Any:
        return tables.Members(member)

    def alignment(self, name: str) -> Any:
        return terms.Alignment(lambda distance: self.aligned(name, distance))

    def aligned(self, name: str, distance: Position) -> Truth:
        multiple = self.asked.setdefault(
            name, z3.Function(name, z3.IntSort(), z3.IntSort(), z3.IntSort(), z3.BoolSort())
        )
        return multiple(*(z3.IntVal(d) if isinstance(d, int) else d for d in _digits(distance)))

    def position_of(self, answer: Any, radix: Radix) -> Position:
        if terms.is_tokens(answer):
            return answer.digits()  # type: ignore[no-any-return]
        if answer == 0:
            return radix.zero()
        raise terms.Unmodelled(f"an answer of {answer} tokens")

    def number_of(self, answer: Any) -> Int:
        return answer.term if type(answer) is terms.Count else int(answer)


class Known(Numbers):
    """:class:`Inputs` as the numbers of one counterexample. ``alignment`` is the value of each alignment."""

    def __init__(self, values: Mapping[str, int | bool], alignment: int) -> None:
        super().__init__(values)
        self.alignment_value = alignment

    def tokens(self, position: Position) -> Any:
        return int(position.value())

    def count(self, number: Int) -> Any:
        return int(number)

    def flag(self, truth: Truth) -> Any:
        return bool(truth)

    def block(self, radix: Radix) -> Any:
        return int(radix.units * radix.unit)

    def unit(self, radix: Radix) -> Any:
        return int(radix.unit)

    def table(self, length: Int, null: Callable[[Int], Truth]) -> Any:
        return [bool(null(at)) for at in range(int(length))]

    def members(self, member: Truth, request: str) -> Any:
        return {request} if member else set()

    def alignment(self, name: str) -> Any:
        return self.alignment_value

    def aligned(self, name: str, distance: Position) -> Truth:
        return on_alignment(0, int(distance.value()), self.alignment_value)

    def position_of(self, answer: Any, radix: Radix) -> Position:
        return Position.on(int(answer), radix)

    def number_of(self, answer: Any) -> Int:
        return int(answer)


def _digits(position: Position) -> tuple[Any, Any, Any]:
    return position.block, position.unit, position.offset


@dataclass(frozen=True)
class Question:
    """What must hold of a function's answer on every path.

    ``run`` calls the released function. ``goal`` takes what it returned. ``refusal_allowed`` is where the function may
    raise instead of answering (nowhere, unless given). ``say`` and ``scenario`` are called with plain integers only:
    the counterexample in words, and as something that a whole engine can do, if it can.
    """

    premises: tuple[tuple[str, Truth], ...]
    run: Callable[[], Any]
    goal: Callable[[Any], Truth]
    say: Callable[[Any], str]
    prefer: tuple[Truth, ...] = ()
    refusal_allowed: Truth = False
    scenario: Callable[[Any], Scenario | None] | None = None


@dataclass(frozen=True)
class ShippedClaim:
    """One claim about one function of a release.

    ``scope`` is what a proof covers. ``absent`` says why a release has nothing to ask about, or "". ``most_values`` is
    the bound where an unknown must be given concrete values: a proof is then *bounded*. ``invariant`` is the entry of
    the catalogue that a refutation breaks, ``findings`` the invariants and causes under which it may be recorded.
    """

    id: str
    function: str
    statement: str
    scope: str
    ask: Callable[[Inputs, Any], Question]
    invariant: str = ""
    findings: tuple[tuple[str, str], ...] = ()
    absent: Callable[[Any], str] = lambda release: ""
    most_values: int = 0
    small: bool = True
    """Whether it takes a moment; the others are better begun first."""


@dataclass(frozen=True)
class ShippedResult:
    """What came out. A proof stands only where both solvers agree that no path breaks the claim, that the paths cover
    the premises, and that these can hold; a refutation only where the real function gave the wrong answer to plain
    numbers. ``note`` says why a verdict is not decisive."""

    claim: ShippedClaim
    verdict: Verdict
    premises: tuple[str, ...]
    seconds: float
    paths: int = 0
    counterexample: str = ""
    scenario: Scenario | None = None
    note: str = ""
