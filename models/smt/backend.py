"""Z3 as a reading of the connectives in :mod:`kvproof.spec.logic`. Importing this module registers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import z3

from kvproof.spec import logic


class Z3Backend:
    """Builds Z3 formulas; see :class:`kvproof.spec.logic.Backend`."""

    def handles(self, value: object) -> bool:
        return isinstance(value, z3.ExprRef)

    def conjunction(self, parts: Sequence[Any]) -> Any:
        return z3.And(*parts)

    def disjunction(self, parts: Sequence[Any]) -> Any:
        return z3.Or(*parts)

    def negation(self, part: Any) -> Any:
        return z3.Not(part)

    def choice(self, condition: Any, then: Any, otherwise: Any) -> Any:
        return z3.If(condition, then, otherwise)


logic.register(Z3Backend())
