"""The connectives in which rules and predicates are written: one definition, three readings.

On plain booleans and integers they compute, stop at the first part that decides, and remember the witness. On solver
terms they build a formula. So the same function is asserted live, run by a fuzzer, and proved for all sizes.

The specification imports no solver. A solver's package registers itself as a :class:`Backend` when it is imported::

    logic.register(Z3Backend())

Comparisons and sums go through Python's operators, which solver terms overload. Python's ``and``, ``or``, ``not`` and
``if`` can't be overloaded: a rule must use the connectives below instead, also where it looks clumsy. Parts that must
not be evaluated in vain (an index out of range, say) are given as functions without arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

Int: TypeAlias = Any
"""An ``int``, or a solver's integer term."""
Truth: TypeAlias = Any
"""A ``bool`` (or a :class:`No`, which is false and knows why), or a solver's boolean term."""
Part: TypeAlias = Any
"""A :data:`Truth`, or a function without arguments that returns one."""

Item = TypeVar("Item")


class Backend(Protocol):
    """A solver's way to build formulas. Only ever called with at least one of its own terms among the arguments."""

    def handles(self, value: object) -> bool:
        """Whether ``value`` is one of this solver's terms."""

    def conjunction(self, parts: Sequence[Truth]) -> Truth: ...

    def disjunction(self, parts: Sequence[Truth]) -> Truth: ...

    def negation(self, part: Truth) -> Truth: ...

    def choice(self, condition: Truth, then: Any, otherwise: Any) -> Any: ...


class No:
    """False, with the witness: the items (outermost first) at which a :func:`forall` failed."""

    __slots__ = ("items",)

    def __init__(self, *items: object) -> None:
        self.items = items

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, bool | No) and not other

    def __hash__(self) -> int:
        return hash(False)

    def __repr__(self) -> str:
        return f"No({', '.join(map(repr, self.items))})"


_backends: list[Backend] = []


def register(backend: Backend) -> None:
    """Teach the connectives a solver's terms. Registering the same kind of backend twice changes nothing."""
    if not any(type(known) is type(backend) for known in _backends):
        _backends.append(backend)


def _backend_of(*values: object) -> Backend | None:
    for value in values:
        if type(value) is bool or type(value) is int or type(value) is No:
            continue
        for backend in _backends:
            if backend.handles(value):
                return backend
    return None


def _value(part: Part) -> Truth:
    return part() if callable(part) else part


def is_plain(value: object) -> bool:
    """Whether ``value`` is an ordinary Python value rather than a solver's term."""
    return _backend_of(value) is None


def witness(truth: Truth) -> tuple[object, ...]:
    """The items at which a plain :func:`forall` failed, outermost first; empty where there is no witness."""
    return truth.items if isinstance(truth, No) else ()


def all_of(*parts: Part) -> Truth:
    """Every part holds. Plainly: the first part that is false (with its witness), or ``True``."""
    terms: list[Truth] = []
    for part in parts:
        truth = _value(part)
        if _backend_of(truth) is not None:
            terms.append(truth)
        elif not truth:
            return truth
    if not terms:
        return True
    backend = _backend_of(*terms)
    assert backend is not None
    return terms[0] if len(terms) == 1 else backend.conjunction(terms)


def any_of(*parts: Part) -> Truth:
    """At least one part holds. Plainly: ``True`` at the first part that does, else the last false part."""
    terms: list[Truth] = []
    last: Truth = False
    for part in parts:
        truth = _value(part)
        if _backend_of(truth) is not None:
            terms.append(truth)
        elif truth:
            return True
        else:
            last = truth
    if not terms:
        return last
    backend = _backend_of(*terms)
    assert backend is not None
    return terms[0] if len(terms) == 1 else backend.disjunction(terms)


def negate(part: Part) -> Truth:
    """The part does not hold."""
    truth = _value(part)
    backend = _backend_of(truth)
    return (not truth) if backend is None else backend.negation(truth)


def implies(condition: Part, conclusion: Part) -> Truth:
    """Where the condition holds, so does the conclusion. A plain false condition leaves the conclusion unevaluated."""
    truth = _value(condition)
    if _backend_of(truth) is None:
        return _value(conclusion) if truth else True
    return any_of(negate(truth), conclusion)


def same(left: Truth, right: Truth) -> Truth:
    """Both hold or neither does."""
    if _backend_of(left, right) is None:
        return bool(left) == bool(right)
    return all_of(implies(left, right), implies(right, left))


def ite(condition: Truth, then: Any, otherwise: Any) -> Any:
    """``then`` where the condition holds, else ``otherwise``; both integers or both truths, already evaluated."""
    backend = _backend_of(condition)
    if backend is None:
        return then if condition else otherwise
    return backend.choice(condition, then, otherwise)


def minimum(first: Int, *others: Int) -> Int:
    """The smallest of the integers."""
    result = first
    for other in others:
        result = ite(other < result, other, result)
    return result


def maximum(first: Int, *others: Int) -> Int:
    """The largest of the integers."""
    result = first
    for other in others:
        result = ite(other > result, other, result)
    return result


def count(*truths: Truth) -> Int:
    """How many of the truths hold."""
    total: Int = 0
    for truth in truths:
        total = total + ite(truth, 1, 0)
    return total


def forall(items: Iterable[Item], predicate: Callable[[Item], Truth]) -> Truth:
    """The predicate holds for every item of a finite collection. Plainly: stops at, and names, the first that fails."""
    terms: list[Truth] = []
    for item in items:
        truth = predicate(item)
        if _backend_of(truth) is not None:
            terms.append(truth)
        elif not truth:
            return No(item, *witness(truth))
    return all_of(*terms)
