"""Positions in mixed radix: n = block·B + unit·U + offset, with B = units_per_block·U.

A position is a number of tokens. Written in digits, comparison is lexicographic, rounding to a boundary drops digits,
whole blocks move only the first digit, and sums need nothing but carries. All of that is linear while B and U stay
symbolic, so a rule written over positions is proved for *every* block size and hash unit; over plain integers the same
rule contains ``n // B``, and solvers give up on it. On integers the digits are an exact rewriting of ``//`` and ``%``.

The digits must be in range (:meth:`Position.well_formed`); every operation here keeps them so. That digits order and
add as the numbers do is itself proved (claims ``RADIX.*``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproof.spec.logic import Int, Truth, all_of, any_of, ite


@dataclass(frozen=True)
class Radix:
    """The grid of a recurrent cache: ``units`` hash units of ``unit`` tokens make one block."""

    units: Int
    unit: Int

    @classmethod
    def of(cls, block: int, unit: int) -> Radix:
        """The grid of ``block`` tokens in units of ``unit`` tokens, which must divide the block."""
        if unit <= 0 or block <= 0 or block % unit:
            raise ValueError(f"unit {unit} does not divide block {block}")
        return cls(block // unit, unit)

    def well_formed(self) -> Truth:
        """At least one token to a unit and one unit to a block."""
        return all_of(self.units >= 1, self.unit >= 1)

    def zero(self) -> Position:
        """Position 0."""
        return Position(0, 0, 0, self)

    def boundary(self, blocks: Int) -> Position:
        """The position after ``blocks`` whole blocks."""
        return Position(blocks, 0, 0, self)

    def one_unit(self) -> Position:
        """The position after one hash unit."""
        return choose(self.units > 1, Position(0, 1, 0, self), Position(1, 0, 0, self))

    def one_token(self) -> Position:
        """The position after one token."""
        return choose(self.unit > 1, Position(0, 0, 1, self), self.one_unit())


@dataclass(frozen=True, eq=False)
class Position:
    """A number of tokens on a :class:`Radix`, as digits. ``==`` and ``<`` build formulas where the digits are terms."""

    block: Int
    unit: Int
    offset: Int
    radix: Radix

    @classmethod
    def of(cls, tokens: int, block: int, unit: int) -> Position:
        """The digits of ``tokens`` for blocks of ``block`` and hash units of ``unit`` tokens."""
        return cls.on(tokens, Radix.of(block, unit))

    @classmethod
    def on(cls, tokens: int, radix: Radix) -> Position:
        """The digits of ``tokens`` on a grid of plain integers."""
        blocks, rest = divmod(tokens, radix.units * radix.unit)
        units, offset = divmod(rest, radix.unit)
        return cls(blocks, units, offset, radix)

    def value(self) -> Int:
        """The number of tokens. Not linear over terms: for plain digits, and for stating the digit lemma."""
        return (self.block * self.radix.units + self.unit) * self.radix.unit + self.offset

    def well_formed(self) -> Truth:
        """Digits in range, and not negative."""
        return all_of(
            self.block >= 0,
            self.unit >= 0,
            self.unit < self.radix.units,
            self.offset >= 0,
            self.offset < self.radix.unit,
        )

    # Order.

    def __lt__(self, other: Position) -> Truth:
        return any_of(
            self.block < other.block,
            all_of(
                self.block == other.block,
                any_of(self.unit < other.unit, all_of(self.unit == other.unit, self.offset < other.offset)),
            ),
        )

    def __le__(self, other: Position) -> Truth:
        return any_of(
            self.block < other.block,
            all_of(
                self.block == other.block,
                any_of(self.unit < other.unit, all_of(self.unit == other.unit, self.offset <= other.offset)),
            ),
        )

    def __gt__(self, other: Position) -> Truth:
        return other < self

    def __ge__(self, other: Position) -> Truth:
        return other <= self

    def __eq__(self, other: object) -> Truth:
        if not isinstance(other, Position):
            return NotImplemented
        return all_of(self.block == other.block, self.unit == other.unit, self.offset == other.offset)

    def __ne__(self, other: object) -> Truth:
        if not isinstance(other, Position):
            return NotImplemented
        return any_of(self.block != other.block, self.unit != other.unit, self.offset != other.offset)

    def __hash__(self) -> int:
        return hash((self.block, self.unit, self.offset))

    def strictly_between(self, low: Position, high: Position) -> Truth:
        """low < this < high."""
        return all_of(low < self, self < high)

    # Boundaries.

    def on_unit(self) -> Truth:
        """Whether this is a hash-unit boundary."""
        return self.offset == 0

    def on_block(self) -> Truth:
        """Whether this is a block boundary."""
        return all_of(self.unit == 0, self.offset == 0)

    def floor_block(self) -> Position:
        """The last block boundary at or before this."""
        return Position(self.block, 0, 0, self.radix)

    def ceil_block(self) -> Position:
        """The first block boundary at or after this."""
        return Position(self.blocks_up(), 0, 0, self.radix)

    def next_block(self) -> Position:
        """The first block boundary after this."""
        return Position(self.block + 1, 0, 0, self.radix)

    def floor_unit(self) -> Position:
        """The last hash-unit boundary at or before this."""
        return Position(self.block, self.unit, 0, self.radix)

    def ceil_unit(self) -> Position:
        """The first hash-unit boundary at or after this."""
        return choose(self.on_unit(), self, self.floor_unit().plus(self.radix.one_unit()))

    def blocks_up(self) -> Int:
        """How many blocks this many tokens need: ceil(n / B)."""
        return ite(self.on_block(), self.block, self.block + 1)

    # Sums.

    def plus_blocks(self, blocks: Int) -> Position:
        """This plus whole blocks (minus, where negative; the caller keeps the sum from going below 0)."""
        return Position(self.block + blocks, self.unit, self.offset, self.radix)

    def plus(self, other: Position) -> Position:
        """The sum, by carries."""
        offset = self.offset + other.offset
        carry = offset >= self.radix.unit
        unit = self.unit + other.unit + ite(carry, 1, 0)
        over = unit >= self.radix.units
        return Position(
            self.block + other.block + ite(over, 1, 0),
            unit - ite(over, self.radix.units, 0),
            offset - ite(carry, self.radix.unit, 0),
            self.radix,
        )

    def minus(self, other: Position) -> Position:
        """The difference, by borrows. Negative where ``other`` is larger: its block digit is then below 0."""
        offset = self.offset - other.offset
        borrow = offset < 0
        unit = self.unit - other.unit - ite(borrow, 1, 0)
        under = unit < 0
        return Position(
            self.block - other.block - ite(under, 1, 0),
            unit + ite(under, self.radix.units, 0),
            offset + ite(borrow, self.radix.unit, 0),
            self.radix,
        )

    def at_least_zero(self) -> Position:
        """This, or 0 where it is negative."""
        return choose(self.block < 0, self.radix.zero(), self)


def choose(condition: Truth, then: Position, otherwise: Position) -> Position:
    """One of two positions on the same grid."""
    return Position(
        ite(condition, then.block, otherwise.block),
        ite(condition, then.unit, otherwise.unit),
        ite(condition, then.offset, otherwise.offset),
        then.radix,
    )


def earlier(left: Position, right: Position) -> Position:
    """The smaller of two positions."""
    return choose(left <= right, left, right)


def later(left: Position, right: Position) -> Position:
    """The larger of two positions."""
    return choose(left >= right, left, right)


def first_inside(stops: Sequence[Position], start: Position, end: Position) -> Position:
    """The first of the stops that lies strictly between ``start`` and ``end``, else ``end``."""
    result = end
    for stop in stops:
        result = choose(stop.strictly_between(start, result), stop, result)
    return result
