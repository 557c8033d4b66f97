"""Every path of a function through its branches on unknowns.

The function is run again for each path with the branches recorded so far; at a new branch Z3 says which sides can be.
Nothing is taken on trust: each path carries the conditions of all its branches, and that the paths together cover the
premises is a question of its own (:mod:`kvproof.models.smt.shipped.settle`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import z3

from kvproof.models.smt.shipped import terms
from kvproof.models.smt.shipped.terms import Unmodelled

MOST_PATHS: Final = 4_000
RESOURCES: Final = 4_000_000
"""Of Z3, for one branch."""

RAISED: Final = (AssertionError, ValueError)
"""What a released function may raise as its answer. Anything else is a mistake of how it is run."""


@dataclass(frozen=True)
class Path:
    """One way through: what was true on it, and the answer, or what was raised instead of one."""

    conditions: tuple[Any, ...]
    answer: Any
    raised: str = ""


@dataclass(frozen=True)
class Exploration:
    """All paths. ``bounded``: some unknown was given concrete values. ``problem``: why there may be others, if so."""

    paths: tuple[Path, ...]
    bounded: bool = False
    problem: str = ""


@dataclass
class _Branch:
    condition: Any
    side: bool
    other: z3.ModelRef | None
    """What makes the other side true, until that side is taken; ``None`` where it can't be or is done."""
    value: int | None = None
    """The concrete value that the condition asks about, if it does."""

    @functools.cached_property
    def _negated(self) -> Any:
        return z3.Not(self.condition)

    @property
    def taken(self) -> Any:
        """What holds on the side that is taken."""
        return self.condition if self.side else self._negated


class _Undecided(Exception):
    pass


class Explorer:
    """Runs one function through all its paths, depth first. ``most_values``: how many concrete values an unknown may
    be given (0: none, which makes it :class:`Unmodelled`)."""

    def __init__(self, assumed: Sequence[Any], most_values: int = 0, most_paths: int = MOST_PATHS) -> None:
        self.solver = z3.Solver()
        self.solver.set("rlimit", RESOURCES)
        self.solver.set("random_seed", 0)
        self.solver.set("arith.solver", 2)  # a fifth faster on these many small questions
        self.solver.add(*(f if isinstance(f, z3.ExprRef) else z3.BoolVal(bool(f)) for f in assumed))
        self.most_values, self.most_paths = most_values, most_paths
        self.branches: list[_Branch] = []
        self.at = 0
        self.model: z3.ModelRef | None = None
        self.memory: dict[Any, Any] = {}
        self.simple: dict[int, tuple[Any, Any]] = {}
        self.known: dict[int, bool] = {}
        self.bounded = False
        self.refused = ""

    def explore(self, run: Callable[[], Any]) -> Exploration:
        """Every path, or those found until something stopped it."""
        paths: list[Path] = []
        if self._check() != z3.sat:
            return Exploration((), problem="the premises are not satisfiable")
        self.model = self.solver.model()
        terms.enter(self)
        try:
            while True:
                self.at, self.known, self.refused = 0, {}, ""
                answer, raised = None, ""
                try:
                    answer = run()
                except RAISED as error:
                    raised = f"{type(error).__name__}: {error}".rstrip(": ")
                if self.refused:
                    raise Unmodelled(self.refused)
                if self.at != len(self.branches):
                    raise _Undecided("the function is not deterministic: a run ended before its recorded branches")
                paths.append(Path(tuple(b.taken for b in self.branches), answer, raised))
                if not self._backtrack():
                    return Exploration(tuple(paths), self.bounded)
                if len(paths) >= self.most_paths:
                    raise _Undecided(f"more than {self.most_paths} paths")
        except Unmodelled as error:
            return Exploration(tuple(paths), self.bounded, f"not modelled: {error}")
        except _Undecided as error:
            return Exploration(tuple(paths), self.bounded, str(error))
        except Exception as error:
            # An unknown that a library chokes on, an attribute that the stand-in for ``self`` lacks.
            if self.refused:
                return Exploration(tuple(paths), self.bounded, f"not modelled: {self.refused}")
            return Exploration(tuple(paths), self.bounded, f"not modelled: {type(error).__name__}: {error}")
        finally:
            terms.leave()

    def _backtrack(self) -> bool:
        while self.branches and self.branches[-1].other is None:
            self.branches.pop()
            self.solver.pop()
        if not self.branches:
            return False
        last = self.branches[-1]
        self.solver.pop()
        last.side, self.model, last.other = not last.side, last.other, None
        self._assume(last)
        return True

    def _assume(self, branch: _Branch) -> None:
        self.solver.push()
        self.solver.add(branch.taken)

    def _check(self, *more: Any) -> Any:
        answer = self.solver.check(*more)
        if answer == z3.unknown:
            if "interrupted" in self.solver.reason_unknown():
                raise KeyboardInterrupt
            raise _Undecided(f"Z3 can't tell which side of a branch is possible ({self.solver.reason_unknown()})")
        return answer

    # What unknowns ask (:class:`kvproof.models.smt.shipped.terms.Forks`).

    def decide(self, condition: Any) -> bool:
        if not isinstance(condition, z3.ExprRef):
            return bool(condition)
        # An identity belongs to a term only as long as the term lives, so both are kept.
        if condition.get_id() not in self.simple:
            self.simple[condition.get_id()] = (z3.simplify(condition), condition)
        simple, _ = self.simple[condition.get_id()]
        if z3.is_true(simple) or z3.is_false(simple):
            return bool(z3.is_true(simple))
        known = self.known.get(simple.get_id())
        if known is not None:
            return known
        if self.at < len(self.branches):
            branch = self.branches[self.at]
            if not branch.condition.eq(simple):
                raise _Undecided("the function is not deterministic: another branch came up")
        else:
            branch = self._fork(simple)
        self.at += 1
        self.known[simple.get_id()] = branch.side
        return branch.side

    def _fork(self, condition: Any) -> _Branch:
        assert self.model is not None
        side = z3.is_true(self.model.eval(condition, model_completion=True))
        other = None
        if self._check(z3.Not(condition) if side else condition) == z3.sat:
            other = self.solver.model()
        branch = _Branch(condition, side, other)
        self.branches.append(branch)
        self._assume(branch)
        return branch

    def number(self, term: Any) -> int:
        if not self.most_values:
            self.refuse("a concrete value of an unknown (as an index, in range or as a key)")
        self.bounded = True
        for _ in range(self.most_values):
            assert self.model is not None
            value = self.branches[self.at].value if self.at < len(self.branches) else None
            if value is None:  # nothing is recorded here: any value that is possible on this path
                value = self.model.eval(term, model_completion=True).as_long()
            before = len(self.branches)
            taken = self.decide(term == value)
            if len(self.branches) > before:
                self.branches[-1].value = value
            if taken:
                return int(value)
        self.refuse(f"more than {self.most_values} concrete values of an unknown")

    def refuse(self, operation: str) -> NoReturn:
        self.refused = self.refused or operation
        raise Unmodelled(operation)
