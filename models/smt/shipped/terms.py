"""Numbers that a released function can compute with while they stay unknown.

A token count is a sum of positions in mixed radix (:mod:`kvproof.spec.radix`); its digits are built only when it is
compared or divided, so that ``start + (end - start)`` is ``end`` again. ``// B`` and ``% B`` read digits. What is not
modelled raises :class:`Unmodelled` and never computes something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

import z3

from kvproof.spec.logic import Truth, negate
from kvproof.spec.radix import Position, Radix


class Unmodelled(Exception):
    """A released function did something with an unknown that has no model. The message names the operation."""


class Forks(Protocol):
    """Whoever runs the function: decides what an unknown truth is on the path that is being run.

    ``memory`` keeps terms by what they were made of: each is built once, not once a path.
    """

    memory: dict[Any, Any]

    def decide(self, condition: Any) -> bool:
        """The side to take; both are taken, on different paths, where both can be."""

    def number(self, term: Any) -> int:
        """A concrete value for a term, one path for each, where the claim has given a bound; else Unmodelled."""

    def refuse(self, operation: str) -> NoReturn:
        """Raise :class:`Unmodelled`, and remember it where the function swallows exceptions."""


_running: list[Forks] = []


def _forks(operation: str) -> Forks:
    if not _running:
        raise Unmodelled(f"{operation} outside a run")
    return _running[-1]


def enter(forks: Forks) -> None:
    """Make ``forks`` the one that decides, until :func:`leave`."""
    _running.append(forks)


def leave() -> None:
    _running.pop()


def _once(key: Any, build: Callable[[], Any], *alive: Any) -> Any:
    """What ``build`` makes, made once in a run. ``alive`` are kept, because the key may hold their identities."""
    if not _running:
        return build()
    memory = _running[-1].memory
    if key not in memory:
        memory[key] = (build(), alive)
    return memory[key][0]


def unmodelled(operation: str) -> NoReturn:
    _forks(operation).refuse(operation)


def _refusing(kind: str, name: str) -> Callable[..., Any]:
    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        unmodelled(f"{kind}.{name}")

    return refuse


# fmt: off
_DUNDERS = (
    "abs", "add", "and", "bytes", "call", "contains", "delitem", "divmod", "enter", "eq", "exit", "float", "floor",
    "ceil", "floordiv", "ge", "getitem", "gt", "hash", "iadd", "iand", "ifloordiv", "ilshift", "imod", "imul",
    "index", "int", "invert", "ior", "ipow", "irshift", "isub", "iter", "itruediv", "ixor", "le", "len", "lshift",
    "lt", "matmul", "mod", "mul", "ne", "neg", "next", "or", "pos", "pow", "radd", "rand", "rdivmod", "rfloordiv",
    "rlshift", "rmatmul", "rmod", "rmul", "ror", "round", "rpow", "rrshift", "rshift", "rsub", "rtruediv", "rxor",
    "setitem", "sub", "truediv", "trunc", "xor", "bool", "format", "reversed", "complex",
)
# fmt: on


class Symbolic:
    """An unknown. Every operation that a subclass does not define is refused, type tests included."""

    def __init_subclass__(cls) -> None:
        for name in _DUNDERS:
            dunder = f"__{name}__"
            # In-place forms fall back to the plain ones where those are defined.
            plain = f"__{name[1:]}__" if name.startswith("i") else dunder
            if not (cls._defines(dunder) or cls._defines(plain)):
                setattr(cls, dunder, _refusing(cls.__name__, name))

    @classmethod
    def _defines(cls, dunder: str) -> bool:
        own = (base.__dict__.get(dunder) for base in cls.__mro__ if base is not object)
        return any(method is not None for method in own)  # a class with __eq__ alone has None for __hash__

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        unmodelled(f"a type test of {type(self).__name__}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class Flag(Symbolic):
    """An unknown truth. Asked for its truth, it forks the path."""

    def __init__(self, term: Any) -> None:
        self.term = term

    def __bool__(self) -> bool:
        return _forks("a branch").decide(self.term)

    def __int__(self) -> int:
        return int(bool(self))


def flag(term: Truth) -> Any:
    """A truth for a released function: plain where it is known."""
    return Flag(term) if isinstance(term, z3.ExprRef) else bool(term)


class Count(Symbolic):
    """An unknown number of blocks (or of anything that is not measured in tokens). Linear arithmetic only."""

    def __init__(self, term: Any) -> None:
        self.term = term

    def __add__(self, other: Any) -> Any:
        return count(self.term + as_term(other, "+"))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return count(self.term - as_term(other, "-"))

    def __rsub__(self, other: Any) -> Any:
        return count(as_term(other, "-") - self.term)

    def __neg__(self) -> Any:
        return count(-self.term)

    def __mul__(self, other: Any) -> Any:
        if type(other) is Grain:
            return other.times(self.term)
        if type(other) is int:
            return count(self.term * other)
        if type(other) is list:
            return other * self.__index__()
        return unmodelled(f"Count * {type(other).__name__}")

    __rmul__ = __mul__

    def __lt__(self, other: Any) -> Any:
        return flag(self.term < as_term(other, "<"))

    def __le__(self, other: Any) -> Any:
        return flag(self.term <= as_term(other, "<="))

    def __gt__(self, other: Any) -> Any:
        return flag(self.term > as_term(other, ">"))

    def __ge__(self, other: Any) -> Any:
        return flag(self.term >= as_term(other, ">="))

    def __eq__(self, other: object) -> Any:
        return flag(self.term == as_term(other, "=="))

    def __ne__(self, other: object) -> Any:
        return flag(self.term != as_term(other, "!="))

    def __bool__(self) -> bool:
        return _forks("a branch").decide(self.term != 0)

    def __index__(self) -> int:
        return _forks("a concrete value of Count").number(self.term)

    __int__ = __index__

    def __hash__(self) -> int:
        return hash(self.__index__())


def as_term(value: Any, operation: str) -> Any:
    if type(value) is Count:
        return value.term
    if type(value) in (int, bool):
        return int(value)
    return unmodelled(f"Count {operation} {type(value).__name__}")


def count(term: Any) -> Any:
    """A number of blocks for a released function: plain where it is known."""
    if not isinstance(term, z3.ExprRef):
        return int(term)
    return term.as_long() if z3.is_int_value(term) else Count(term)


class Tokens(Symbolic):
    """An unknown number of tokens: a sum of positions, each times a small number, and a small constant."""

    MOST = 4
    """The largest constant and factor; anything larger is no token count of the model, but a number left concrete."""

    def __init__(self, parts: Mapping[Any, tuple[Position, int]], constant: int, radix: Radix) -> None:
        self.parts, self.constant, self.radix = parts, constant, radix

    @property
    def identity(self) -> Any:
        """Equal for equal sums."""
        return frozenset((key, factor) for key, (_, factor) in self.parts.items()), self.constant

    # Sums.

    def _sum(self, other: Any, sign: int, operation: str) -> Any:
        parts, constant = dict(self.parts), self.constant
        if is_tokens(other):
            for key, (position, factor) in other.parts.items():
                parts[key] = (position, parts.get(key, (position, 0))[1] + sign * factor)
            constant += sign * other.constant
        elif type(other) in (int, bool):
            constant += sign * int(other)
        else:
            return unmodelled(f"Tokens {operation} {type(other).__name__}")
        parts = {key: part for key, part in parts.items() if part[1]}
        if not parts:
            return constant
        if abs(constant) > self.MOST or any(abs(factor) > self.MOST for _, factor in parts.values()):
            return unmodelled(f"a constant of {constant} tokens in a sum of unknowns")
        return Tokens(parts, constant, self.radix)

    def __add__(self, other: Any) -> Any:
        return self._sum(other, 1, "+")

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._sum(other, -1, "-")

    def __rsub__(self, other: Any) -> Any:
        return (-self) + other

    def __neg__(self) -> Any:
        return Tokens({key: (p, -f) for key, (p, f) in self.parts.items()}, -self.constant, self.radix)

    def __mul__(self, other: Any) -> Any:
        if type(other) is int and 0 < abs(other) <= self.MOST:
            scaled = {key: (p, f * other) for key, (p, f) in self.parts.items()}
            return Tokens(scaled, self.constant * other, self.radix)
        return unmodelled(f"Tokens * {type(other).__name__}")

    __rmul__ = __mul__

    # Digits.

    def digits(self) -> Position:
        """The value in mixed radix; the block digit is negative where the value is."""

        def build() -> Position:
            more, less = self._sides(0)
            return more if less is None else more.minus(less)

        return _once(("digits", self.identity), build, self)  # type: ignore[no-any-return]

    def _sides(self, constant: int) -> tuple[Position, Position | None]:
        """This minus ``constant``, as what is added and what is taken away."""
        added: list[Position] = []
        taken: list[Position] = []
        for position, factor in self.parts.values():
            (added if factor > 0 else taken).extend([position] * abs(factor))
        left = self.constant - constant
        if abs(left) > self.MOST:
            unmodelled(f"comparing an unknown number of tokens with {constant}")
        (added if left > 0 else taken).extend([self.radix.one_token()] * abs(left))
        return _total(added, self.radix), _total(taken, self.radix) if taken else None

    # Order.

    def _compare(self, other: Any, operation: str, relation: Callable[[Position, Position], Truth]) -> Any:
        if is_tokens(other):
            difference, constant = self - other, 0
        elif type(other) in (int, bool):
            difference, constant = self, int(other)
        else:
            return unmodelled(f"Tokens {operation} {type(other).__name__}")
        if type(difference) is int:
            left, right = Position(difference, 0, 0, Radix(1, 1)), Position(0, 0, 0, Radix(1, 1))
            return flag(relation(left, right))

        def build() -> Any:
            more, less = difference._sides(constant)
            truth = relation(more, self.radix.zero() if less is None else less)
            return z3.simplify(truth) if isinstance(truth, z3.ExprRef) else truth

        return flag(_once((operation, constant, difference.identity), build, difference))

    def __lt__(self, other: Any) -> Any:
        return self._compare(other, "<", lambda a, b: a < b)

    def __le__(self, other: Any) -> Any:
        return self._compare(other, "<=", lambda a, b: a <= b)

    def __gt__(self, other: Any) -> Any:
        return self._compare(other, ">", lambda a, b: b < a)

    def __ge__(self, other: Any) -> Any:
        return self._compare(other, ">=", lambda a, b: b <= a)

    def __eq__(self, other: object) -> Any:
        return self._compare(other, "==", lambda a, b: a == b)

    def __ne__(self, other: object) -> Any:
        return self._compare(other, "!=", lambda a, b: a != b)

    def __bool__(self) -> bool:
        return bool(self != 0)

    # Division.

    def __floordiv__(self, other: Any) -> Any:
        if type(other) is Grain:
            at = self.digits()
            return count(at.block) if other.is_block() else Units(at)
        if type(other) is Tokens and len(other.parts) == 1 and not other.constant:
            # -(n // -b) is how a release writes ceil(n / b).
            ((key, (_, factor)),) = other.parts.items()
            block = Grain.block(self.radix)
            if factor == -1 and key in block.parts:
                return count(-self.digits().blocks_up())
        return unmodelled(f"Tokens // {type(other).__name__}")

    def __rfloordiv__(self, other: Any) -> Any:
        # Nothing, however it is divided: what a group without a window skips.
        nothing = type(other) is int and other == 0 and type(self) is Grain
        return 0 if nothing else unmodelled(f"{type(other).__name__} // Tokens")

    def __mod__(self, other: Any) -> Any:
        if type(other) is Grain:
            return self - _once(("floor", other.kind, self.identity), lambda: (self // other) * other, self)
        if type(other) is Alignment:
            return other.rest(self)
        return unmodelled(f"Tokens % {type(other).__name__}")


def is_tokens(value: object) -> bool:
    """Whether this is a token count; the type is read without asking the value, which would be refused."""
    return issubclass(type(value), Tokens)


def _total(positions: list[Position], radix: Radix) -> Position:
    result: Position | None = None
    for position in positions:
        result = position if result is None else result.plus(position)
    return radix.zero() if result is None else result


def _key(position: Position) -> Any:
    digits = (position.block, position.unit, position.offset)
    return tuple(d.get_id() if isinstance(d, z3.ExprRef) else ("plain", int(d)) for d in digits)


def tokens(position: Position) -> Any:
    """A token count for a released function: plain where it is 0."""
    if all(type(d) is int and d == 0 for d in (position.block, position.unit, position.offset)):
        return 0
    return Tokens({_key(position): (position, 1)}, 0, position.radix)


class Grain(Tokens):
    """The block or the hash unit, of unknown size: the divisors that are modelled."""

    kind = "block"

    @classmethod
    def block(cls, radix: Radix) -> Grain:
        return cls._of(radix.boundary(1), "block")

    @classmethod
    def unit(cls, radix: Radix) -> Grain:
        return cls._of(radix.one_unit(), "unit")

    @classmethod
    def _of(cls, position: Position, kind: str) -> Grain:
        grain = cls({_key(position): (position, 1)}, 0, position.radix)
        grain.kind = kind
        return grain

    def is_block(self) -> bool:
        """Whether a division reads the block digit: also by the unit, where one unit is one block."""
        return self.kind == "block" or (type(self.radix.units) is int and self.radix.units == 1)

    def times(self, term: Any) -> Any:
        """So many blocks, or units, as tokens."""
        if self.is_block():
            return tokens(self.radix.boundary(term))
        return unmodelled("a number of blocks times the hash unit")

    def __mul__(self, other: Any) -> Any:
        if type(other) is int and self.is_block():
            return tokens(self.radix.boundary(other))
        if type(other) in (Count, Units):
            return other * self
        return super().__mul__(other)

    __rmul__ = __mul__

    def __mod__(self, other: Any) -> Any:
        if type(other) is Grain and (other.kind == self.kind or other.kind == "unit"):
            return 0  # the unit divides the block
        return super().__mod__(other)


class Units(Symbolic):
    """A position divided by the hash unit: a number that is not linear in the digits. Only ``* unit`` is modelled."""

    def __init__(self, position: Position) -> None:
        self.position = position

    def __mul__(self, other: Any) -> Any:
        if type(other) is Grain and other.kind == "unit":
            return tokens(self.position.floor_unit())
        return unmodelled(f"Units * {type(other).__name__}")

    __rmul__ = __mul__


class Alignment(Symbolic):
    """The alignment that an exporting kernel asks for: any positive number of tokens.

    Whether a distance is a multiple of it is left open, as a predicate over the distance's digits.
    """

    def __init__(self, multiple: Callable[[Position], Truth]) -> None:
        self.multiple = multiple

    def rest(self, distance: Tokens) -> Any:
        return Rest(self.multiple(distance.digits()))

    def __gt__(self, other: Any) -> Any:
        return True if type(other) is int and other == 0 else unmodelled("Alignment > something")


class Rest(Symbolic):
    """What is left of a distance after the alignment: it can be asked whether that is 0."""

    def __init__(self, nothing: Truth) -> None:
        self.nothing = nothing

    def __eq__(self, other: object) -> Any:
        return flag(self.nothing) if type(other) is int and other == 0 else unmodelled("Rest == something")

    def __ne__(self, other: object) -> Any:
        return flag(negate(self.nothing)) if type(other) is int and other == 0 else unmodelled("Rest != something")

    def __bool__(self) -> bool:
        return bool(self != 0)


__all__ = [
    "Alignment",
    "Count",
    "Flag",
    "Forks",
    "Grain",
    "Symbolic",
    "Tokens",
    "Unmodelled",
    "as_term",
    "count",
    "enter",
    "flag",
    "is_tokens",
    "leave",
    "tokens",
    "unmodelled",
]
