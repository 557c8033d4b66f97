"""The rules of :mod:`kvproof.spec.rules`, proved for all sizes by Z3 and confirmed by cvc5.

Each claim is one proof about a rule of the specification; it says nothing about any implementation. Each has mutants,
the rule as it once was or could be wrong, which must be refuted. Install the extra ``check`` to use this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from kvproof.models.smt import claims_admit, claims_hit, claims_radix, claims_ref, claims_slot
from kvproof.models.smt.claim import Claim, ClaimResult, Verdict
from kvproof.models.smt.solve import prove_all, prove_claim

CLAIMS: tuple[Claim, ...] = (
    *claims_radix.CLAIMS,
    *claims_slot.CLAIMS,
    *claims_admit.CLAIMS,
    *claims_hit.CLAIMS,
    *claims_ref.CLAIMS,
)
"""Every claim and every mutant, in the order in which they are settled."""


def prove(out: Path | None, progress: Callable[[str], None] | None = None) -> Iterator[ClaimResult]:
    """Settle every claim and every mutant with both solvers, one after another.

    With ``out``, the SMT-LIB 2 text of each question is written there (the folder is made if need be); ``OSError``
    where it can't be. ``progress`` is called with one line after each claim.
    """
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    return prove_all(CLAIMS, out, progress)


__all__ = ["CLAIMS", "Claim", "ClaimResult", "Verdict", "prove", "prove_claim"]
