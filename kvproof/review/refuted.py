"""What a stored proof about a release refuted, as the records are now: it can't know of what was recorded after it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvproof import engines, findings
from kvproof.review.causes import Record
from kvproof.review.status import Word

Identity = tuple[str, str]


@dataclass(frozen=True)
class Refutation:
    """``verdict`` is short; ``records`` are what it is on record as, and ``since`` tells that it was recorded later."""

    verdict: str
    outcome: str
    records: tuple[Record, ...] = ()
    since: bool = False


def settled(word: Word, release: str, known: Sequence[Record]) -> Refutation:
    """What a proof about ``release`` says of a claim today. Other verdicts than a refutation are as they were."""
    if not word.verdict.startswith("refuted"):
        return Refutation(word.verdict, word.outcome)
    here = [one for one in known if findings.known_for([one.source], release).records]
    shown = {(str(invariant), str(cause)) for invariant, cause in word.data.get("shown", ())}
    claim = _claims().get(word.id)
    # As in kvproof.shipped: what the whole engine shows decides, and else what such a refutation is recorded as.
    own = {identity for identity in shown if claim is not None and identity[0] == claim.invariant}
    named = _named(word.verdict) or own or set(claim.findings if claim is not None else ())
    records = tuple(one for one in here if one.source.identity in named)
    if not records or not own <= {one.source.identity for one in here}:
        return Refutation("refuted", "fail")
    unrun = ", no scenario was run" if "no scenario was run" in word.verdict else ""
    return Refutation(f"refuted (known{unrun})", "info", records, since=word.outcome == "fail")


def _named(verdict: str) -> set[Identity]:
    """The records that the verdict itself names: ``refuted (known: ADMIT.exact a-cause, HIT.cut another)``."""
    found = re.search(r": (.*)\)$", verdict)
    pairs = [text.partition(" ") for text in found.group(1).split(", ")] if found else []
    return {(invariant, cause) for invariant, _, cause in pairs}


def _claims() -> Mapping[str, Any]:
    return {claim.id: claim for claim in engines.load("kvproof.models.smt.shipped", "CLAIMS")}
