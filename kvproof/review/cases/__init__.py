"""A small cache for each invariant on which it is judged and holds, and ways to spoil one thing of it that it notices.

The predicates are tested by them, and the review's worked examples are the first of each. ``fakeview.py`` is the cache,
``calls.py`` what happens to it, ``cases_*.py`` the table of cases.
"""

from __future__ import annotations

from kvproof.review.cases.calls import Mutant, Rule
from kvproof.review.cases.cases_calls import CALLS
from kvproof.review.cases.cases_kept import KEPT
from kvproof.review.cases.cases_offload import OFFLOAD
from kvproof.review.cases.cases_reuse import REUSE
from kvproof.review.cases.cases_state import STATE
from kvproof.review.cases.cases_told import TOLD

__all__ = ["CASES", "Mutant", "Rule"]

CASES: tuple[Rule, ...] = (*CALLS, *STATE, *KEPT, *REUSE, *OFFLOAD, *TOLD)
"""One for each invariant of the catalogue."""
