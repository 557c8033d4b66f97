"""RADIX: the digit lemma, on which every other proof stands.

Stated over products, so these are the only claims that are not linear. One level (high·b + low) is enough for order:
the two levels of a position are one level applied twice, (block·units + unit)·U + offset.
"""

from __future__ import annotations

from kvproof.models.smt.claim import Claim, Obligation, Symbols, tokens
from kvproof.spec.logic import all_of, any_of, implies, same
from kvproof.spec.radix import Position, Radix

SCOPE = "proved for all block sizes, units and positions"


def order(s: Symbols, digit_may_reach_base: bool = False) -> Obligation:
    """high·b + low compares as (high, low) does."""
    base = s.integer("base", 1)
    high, other_high = s.integer("high"), s.integer("other_high")
    low, other_low = s.integer("low", 0), s.integer("other_low", 0)
    top = base if digit_may_reach_base else base - 1
    gap = other_high - high
    return Obligation(
        premises=(("the low digits are below the base", all_of(low <= top, other_low <= top)),),
        goal=all_of(
            # Split by the distance of the high digits, which is all a solver needs to see.
            implies(gap >= 1, high * base + low < (high + gap) * base + other_low),
            implies(gap <= -1, high * base + low > (high + gap) * base + other_low),
            implies(gap == 0, same(low < other_low, high * base + low < other_high * base + other_low)),
        ),
        say=lambda: f"base {base}: ({high}, {low}) against ({other_high}, {other_low})",
        prefer=(high >= 0, other_high >= 0, base == 16),
    )


def _pair(s: Symbols) -> tuple[Position, Position, Radix]:
    grid = s.grid()
    return s.position("a", grid), s.position("b", grid), grid


def total(s: Symbols, carries: bool = True) -> Obligation:
    """Adding by carries is addition, and leaves the digits in range."""
    a, b, grid = _pair(s)
    result = a.plus(b) if carries else Position(a.block + b.block, a.unit + b.unit, a.offset + b.offset, grid)
    return Obligation(
        premises=(),
        goal=all_of(result.well_formed(), result.value() == a.value() + b.value()),
        say=lambda: (
            f"unit {grid.unit}, {grid.units} units to a block: {tokens(a)} + {tokens(b)} gave the digits "
            f"({result.block}, {result.unit}, {result.offset})"
        ),
    )


def difference(s: Symbols) -> Obligation:
    """Subtracting by borrows is subtraction; the digits stay in range exactly if the result is not negative."""
    a, b, grid = _pair(s)
    result = a.minus(b)
    return Obligation(
        premises=(),
        goal=all_of(
            result.value() == a.value() - b.value(),
            implies(b <= a, result.well_formed()),
            any_of(b <= a, result.block < 0),
        ),
        say=lambda: f"unit {grid.unit}, {grid.units} units to a block: {tokens(a)} − {tokens(b)} gave {tokens(result)}",
    )


CLAIMS = (
    Claim(
        "RADIX.order",
        "digits compare as the numbers they stand for",
        SCOPE,
        order,
        theory="QF_NIA",
    ),
    Claim(
        "RADIX.order/digit-reaches-base",
        "digits that may reach their base still compare as the numbers they stand for",
        SCOPE,
        lambda s: order(s, digit_may_reach_base=True),
        mutant_of="RADIX.order",
        theory="QF_NIA",
    ),
    Claim("RADIX.sum", "adding digits with carries adds the numbers", SCOPE, total, theory="QF_NIA"),
    Claim(
        "RADIX.sum/no-carries",
        "adding digits without carries keeps them in range",
        SCOPE,
        lambda s: total(s, carries=False),
        mutant_of="RADIX.sum",
        theory="QF_NIA",
    ),
    Claim(
        "RADIX.difference", "subtracting digits with borrows subtracts the numbers", SCOPE, difference, theory="QF_NIA"
    ),
)
