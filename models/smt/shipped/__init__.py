"""Proofs about shipped code: a release's own functions, run on numbers that stay unknown.

The rules of :mod:`kvproof.spec.rules` say what the answers must be; the release's functions are handed in as an object
(:class:`kvproof.impl.vllm.shipped.Shipped`), since models import no implementation. docs/shipped.md says how to read a
verdict. That digits order and add as the numbers do, on which all of this stands, is proved among the claims of
:mod:`kvproof.models.smt` (``RADIX.*``).
"""

from __future__ import annotations

from kvproof.models.smt.shipped import claims_attention, claims_mamba, claims_split
from kvproof.models.smt.shipped.claim import ShippedClaim, ShippedResult, Verdict
from kvproof.models.smt.shipped.settle import settle
from kvproof.models.smt.shipped.tables import BUILTINS

CLAIMS: tuple[ShippedClaim, ...] = (*claims_split.CLAIMS, *claims_mamba.CLAIMS, *claims_attention.CLAIMS)
"""Every claim about a release, in the order in which they are told."""

__all__ = ["BUILTINS", "CLAIMS", "ShippedClaim", "ShippedResult", "Verdict", "settle"]
