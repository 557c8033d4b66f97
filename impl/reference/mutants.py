"""The reference engine gone wrong: historical faults, one at a time, each planted in one method of one engine.

A checker that lets one of these live is blind where it was trusted.
"""

from __future__ import annotations

from typing import Final

from kvproof.impl.reference import mutants_bounds as mutants_bounds  # imported for what they plant
from kvproof.impl.reference import mutants_calls as mutants_calls
from kvproof.impl.reference import mutants_state as mutants_state
from kvproof.impl.reference.planting import PLANTED, Mutant

MUTANTS: Final[tuple[Mutant, ...]] = tuple(sorted(PLANTED, key=lambda mutant: mutant.group))
"""Every mutant, by what it breaks, in the order in which they are written."""
