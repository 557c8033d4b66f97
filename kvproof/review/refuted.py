"""What a stored proof about a release refuted, as the records are now: it can't know of what was recorded after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvproof import engines, findings
from kvproof.review.causes import Record
from kvproof.review.status import Word
from kvproof.shipped import REFUTED_KNOWN, on_record


@dataclass(frozen=True)
class Refutation:
    """``verdict`` is short; ``records`` are what it is on record as, and ``since`` tells that it was recorded later."""

    verdict: str
    outcome: str
    records: tuple[Record, ...] = ()
    since: bool = False


def settled(word: Word, release: str, known: Sequence[Record]) -> Refutation:
    """What a proof about ``release`` says of a claim today. Other verdicts than a refutation are as they were, and so
    is that of a claim which there is no more."""
    claim = _claims().get(word.id)
    if claim is None or not word.verdict.startswith("refuted"):
        return Refutation(word.verdict, word.outcome)
    here = [one for one in known if findings.known_for([one.source], release).records]
    shown = {(str(invariant), str(cause)) for invariant, cause in word.data.get("shown", ())}
    found = on_record(claim, shown, {one.source.identity for one in here})
    if not found.identities:
        return Refutation("refuted", "fail")
    records = tuple(one for one in here if one.source.identity in found.identities)
    # Where it is not stored what a whole engine showed, nothing is said of that.
    verdict = found.verdict if "shown" in word.data else REFUTED_KNOWN
    return Refutation(verdict, "info", records, since=word.outcome == "fail")


def _claims() -> Mapping[str, Any]:
    return {claim.id: claim for claim in engines.load("kvproof.models.smt.shipped", "CLAIMS")}
