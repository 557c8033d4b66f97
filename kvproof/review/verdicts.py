"""On which verdicts two releases differ, or two commits. They are told in the words of the site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvproof import report
from kvproof.invariants.catalogue import CATALOGUE
from kvproof.review import causes, content
from kvproof.review.status import Said, Status, Word
from kvproof.shipped import OnRecord


@dataclass(frozen=True)
class Verdict:
    """A checker's word on one thing, on either side."""

    checker: str
    id: str
    before: str
    after: str


@dataclass(frozen=True)
class Stand:
    """A verdict in words, and which ``side`` it is on: holds, broken, or not judged."""

    told: str
    side: str


Stands = Mapping[tuple[str, str], Stand]
"""By checker and what it speaks of."""

_SIDES = {"holds": "holds", "broken": "broken", "known": "broken", "open": "not judged", "none": "not judged"}
"""Of the site's marks."""


def of_release(release: str, status: Status) -> Stands:
    """What the site says of a release, as the records are today; nothing of a checker of which no result is stored."""
    found = {}
    records = causes.records()
    for run, words in content.claims(status, (release,)):
        for word, today in words if run == f"prove --on {release}" else ():
            found["prove --on", word.id] = Stand(today.verdict, _side(word))
    if f"fuzz {release}" in status.runs:
        for entry in CATALOGUE:
            seen = causes.seen(entry.id, status, records)
            for line in content.lines(entry.id, status, seen, records, (release,)):
                if line.checker == content.fuzzed(release):
                    found["fuzz", entry.id] = Stand(line.told, _SIDES[line.mark])
    return found


def of_commit(status: Status) -> Stands:
    """What the results say that are stored at a commit, by the records as they were then."""
    return {
        (run, word.id): Stand(_as_stored(word), _side(word))
        for run, said in status.runs.items()
        for word in said.words
        if word.kind in ("proof", "invariant")
    }


def differences(before: Stands, after: Stands) -> list[Verdict]:
    """Where both say something and not the same. How often something was counted is no difference."""
    return [
        Verdict(*key, stand.told, after[key].told)
        for key, stand in before.items()
        if key in after and after[key].side != stand.side
    ]


def shown(said: Said | None) -> frozenset[tuple[str, str]]:
    """What a stored search came across, on record or not."""
    words = said.words if said is not None else []
    told = [word.id.split(" ", 1) for word in words if word.kind == "finding" and not word.verdict.startswith("gone")]
    return frozenset((invariant, cause) for invariant, cause in told)


def _side(word: Word) -> str:
    broken = word.verdict.startswith(("broken", "refuted"))
    return "broken" if broken else "holds" if word.outcome == "pass" else "not judged"


def _as_stored(word: Word) -> str:
    if word.kind != "proof" or not word.verdict.startswith("refuted ("):
        return report.in_words(word.verdict, word.data)
    return OnRecord((("", ""),), "did not show it" not in word.verdict).verdict


__all__ = ["Stand", "Stands", "Verdict", "differences", "of_commit", "of_release", "shown"]
