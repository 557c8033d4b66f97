"""What the site says, as data for its templates: one :class:`Entry` for each invariant, with every field filled."""

from __future__ import annotations

import importlib
import importlib.resources
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from kvproof import engines, findings, report
from kvproof.errors import CheckerError
from kvproof.invariants.catalogue import CATALOGUE, FAMILIES
from kvproof.invariants.invariant import Invariant
from kvproof.review import causes, mirrors
from kvproof.review.causes import Record, SeenOn
from kvproof.review.digests import closure
from kvproof.review.examples import Example, example
from kvproof.review.grounds import GROUNDS
from kvproof.review.helpers import helpers
from kvproof.review.mirrors import REPOSITORY, Mirror
from kvproof.review.refuted import Refutation, settled
from kvproof.review.status import RELEASES, Said, Status, Word, old
from kvproof.severity import harm

RULES = ("radix", "chunk", "checkpoint", "slots", "blocks", "hits", "ledger", "reuse")
_CONTAMINATES = {
    True: "what follows a violation in the same run proves nothing: judging ends there",
    False: "judging goes on after a violation",
}


@dataclass(frozen=True)
class Line:
    """A checker's word on an invariant. ``mark`` is a word of one of the site's colours; ``stale`` says why it is old
    (empty: it is not); ``records`` are what it is on record as. ``premises`` is how many a proof has, ``recorded``
    whether anything is on record there."""

    checker: str
    verdict: str
    words: str
    mark: str
    made: str
    stale: str
    records: tuple[Record, ...] = ()
    premises: int = 0
    recorded: bool = False

    @property
    def told(self) -> str:
        """The verdict as it is told: on its page, and where two releases are compared."""
        return told(self.verdict, self.stale)

    @property
    def colour(self) -> str:
        """Its mark, unless the rule has changed since. What is on record stands by itself: each record replays."""
        return "stale" if self.stale and not (self.recorded or self.records) else self.mark


@dataclass(frozen=True)
class Entry:
    """One invariant as it is shown."""

    id: str
    statement: str
    why: str
    harm: str
    provenance: tuple[tuple[str, str], ...]
    scope: str
    events: tuple[str, ...]
    contaminates: str
    source: str
    helpers: tuple[tuple[str, str], ...]
    rules: tuple[tuple[str, str], ...]
    example: Example
    mutants: tuple[str, ...]
    smallest: str
    lines: tuple[Line, ...]
    seen: tuple[SeenOn, ...]
    records: tuple[Record, ...]

    @property
    def anchor(self) -> str:
        return anchor(self.id)

    @property
    def said(self) -> str:
        """The name on its page of what checkers say."""
        return f"{self.anchor}-said"

    def causes_on(self, subject: str) -> str:
        """The name on its page of what breaks it on ``subject``; empty where nothing does."""
        listed = any(one.subject == subject for one in self.seen)
        return f"{self.anchor}-{subject.replace('.', '-')}" if listed else ""


@dataclass(frozen=True)
class RuleModule:
    """One file of rules: what it says of itself, its functions with their sources, and what they mirror in vLLM."""

    name: str
    text: str
    functions: tuple[tuple[str, str], ...]
    mirrors: tuple[Mirror, ...]


def anchor(invariant: str) -> str:
    """The name on its page of what is said of an invariant."""
    return invariant.lower().replace(".", "-")


def entries(status: Status) -> list[Entry]:
    """Every invariant, in the order of the catalogue. Raises :class:`CheckerError` naming a field that is missing."""
    records = causes.records()
    made = [_entry(invariant, status, records) for invariant in CATALOGUE]
    for entry in made:
        for name in (
            "statement",
            "why",
            "harm",
            "provenance",
            "scope",
            "events",
            "source",
            "mutants",
            "smallest",
            "lines",
        ):
            if not getattr(entry, name):
                raise CheckerError(f"{entry.id} has no {name}: the site would not say it")
    return made


def families(made: Sequence[Entry]) -> dict[str, list[Entry]]:
    return {family: [entry for entry in made if entry.id.startswith(f"{family}.")] for family in FAMILIES}


def _entry(invariant: Invariant, status: Status, records: Sequence[Record]) -> Entry:
    shown = example(invariant.id)
    seen = causes.seen(invariant.id, status, records)
    return Entry(
        id=invariant.id,
        statement=invariant.statement,
        why=invariant.why,
        harm=harm(invariant.id),
        provenance=tuple((text, _link(text)) for text in invariant.provenance),
        scope=invariant.scope,
        events=tuple(event.__name__ for event in invariant.events),
        contaminates=_CONTAMINATES[invariant.contaminates],
        source=inspect.getsource(invariant.predicate),
        helpers=helpers(invariant.predicate),
        rules=_rules_of(invariant),
        example=shown,
        mutants=_mutants(invariant.id, shown, status),
        smallest=_smallest(invariant.id, status),
        lines=tuple(lines(invariant.id, status, seen, records)),
        seen=seen,
        records=tuple(record for record in records if record.source.invariant == invariant.id),
    )


def _link(text: str) -> str:
    found = re.fullmatch(r"(PR|issue) (\d+)", text)
    return f"{REPOSITORY}/{'pull' if found.group(1) == 'PR' else 'issues'}/{found.group(2)}" if found else ""


def _rules_of(invariant: Invariant) -> tuple[tuple[str, str], ...]:
    """The rules that the predicate asks, by module and name."""
    asked = [part for part in closure(invariant.predicate) if part.__module__.startswith("kvproof.spec.rules.")]
    named = {
        (part.__module__.rpartition(".")[2], part.__qualname__) for part in asked if isinstance(part, FunctionType)
    }
    return tuple(sorted(named))


# -- what checkers said ------------------------------------------------------------------------------------------------


NOT_RUN = "not run"
"""The verdict where no result is stored."""


def told(verdict: str, stale: str) -> str:
    """A verdict, and why it is old if it is."""
    return f"{verdict} ({stale})" if stale else verdict


def lines(
    name: str,
    status: Status,
    seen: Sequence[SeenOn] = (),
    records: Sequence[Record] = (),
    releases: Sequence[str] = RELEASES,
) -> list[Line]:
    """What is said of an invariant, the specification and the reference engine first, then ``releases``."""
    on = {one.subject: one for one in seen}
    made = []

    def searched(subject: str, run: str, checker: str) -> list[Line]:
        said = _line(status, run, "invariant", name, checker)
        return [_as_recorded(line, on[subject]) if subject in on else line for line in said]

    for claim in GROUNDS.get(name, ()):
        made += _line(status, "prove", "proof", claim, f"prove: {claim}")
    made += searched(findings.SPECIFICATION, "explore", "explore")
    made += searched(findings.REFERENCE, "fuzz reference", "fuzz, reference engine")
    for release in releases:
        made += searched(release, f"fuzz {release}", fuzzed(release))
        made += _shipped(name, release, status, records)
    return made


def fuzzed(release: str) -> str:
    """What the search of a release is called."""
    return f"fuzz, vLLM {release}"


def _as_recorded(line: Line, seen: SeenOn) -> Line:
    """A word about what was seen, as the records are now: a search can't know of what was put on record after it, and
    is not the last word where it did not come across that."""
    line = replace(line, recorded=any(cause.record is not None for cause in seen.causes))
    missed = f"on record: {', '.join(cause.name for cause in seen.missed)}; {_why_missed(seen)}" if seen.missed else ""
    if line.mark not in ("broken", "known"):
        ran = line.verdict != NOT_RUN
        verdict = "broken (on record)" if ran else f"broken (on record; {NOT_RUN})"
        words = f"{missed}, and says: {line.verdict}; {line.words}" if ran else missed
        return replace(line, verdict=verdict, mark="known", words=words)
    count = len(seen.causes) - len(seen.missed)
    recorded = f"{seen.unrecorded} not on record" if seen.unrecorded else "all on record"
    found = f"{count} cause{'s' * (count != 1)} seen, {recorded}"
    words = "; ".join(filter(None, [line.words, found if count else "", missed]))
    if not count or seen.unrecorded:
        return replace(line, verdict="broken", mark="broken", words=words)
    return replace(line, verdict="broken (known)", mark="known", words=words)


def _why_missed(seen: SeenOn) -> str:
    return "; ".join(dict.fromkeys(cause.missed for cause in seen.missed))


def _shipped(name: str, release: str, status: Status, records: Sequence[Record]) -> list[Line]:
    claims = [claim.id for claim in engines.load("kvproof.models.smt.shipped", "CLAIMS") if claim.invariant == name]
    run = f"prove --on {release}"
    said = status.runs.get(run)
    lines = []
    for claim in claims:
        word = said.of("proof", claim) if said is not None else None
        for line in _line(status, run, "proof", claim, f"{run}: {claim}"):
            lines.append(line if word is None else _as_settled(line, _today(word, release, records)))
    return lines


def _as_settled(line: Line, today: Refutation) -> Line:
    if not today.records:
        return replace(line, verdict=today.verdict, mark="broken" if today.outcome == "fail" else line.mark)
    words = f"{line.words}; on record since it was run" if today.since else line.words
    return replace(line, verdict=today.verdict, mark="known", words=words, records=today.records)


_MARKS = {"pass": "holds", "fail": "broken", "info": "known", "undetermined": "open", "error": "open", "skip": "none"}


def _line(status: Status, run: str, kind: str, name: str, checker: str) -> list[Line]:
    said = status.runs.get(run)
    word = said.of(kind, name) if said is not None else None
    if said is None or word is None:
        return [Line(checker, NOT_RUN, "no result is stored", "open", "", "")]
    verdict, count = report.in_words(word.verdict, word.data), report.premises(word.verdict, word.data)
    return [Line(checker, verdict, _coverage(word), _mark(word), _made(said), old(word), premises=count)]


def _mark(word: Word) -> str:
    if word.outcome == "info" and not word.verdict.startswith(("broken", "refuted", "differs")):
        return "none"
    return _MARKS[word.outcome]


def _coverage(word: Word) -> str:
    """How far the word reaches: of a proof its scope and premises, else what was counted."""
    if word.kind == "proof":
        scope = str(word.data.get("scope", "")).removeprefix("proved ")
        premises = word.data.get("premises", "")
        return f"{scope}; premises: {premises}" if premises else scope
    return word.detail


def _made(said: Said) -> str:
    return f"{said.made} on {said.revision[:9]}" if said.revision else said.made


def _mutants(name: str, shown: Example, status: Status) -> tuple[str, ...]:
    """Faults that this predicate noticed: in the hand-made caches, and planted in the machine or the engine."""
    found = [f"a hand-made cache with one thing wrong: {cause}" for cause in shown.causes]
    planted = status.runs.get("mutants")
    for word in planted.words if planted is not None else ():
        by = [checker for checker in ("live", "fuzz") if (word.data.get(checker) or {}).get("invariant") == name]
        if word.kind == "mutant" and by:
            found.append(f"the reference engine, {' and '.join(by)}: {word.statement}")
    explored = status.runs.get("explore --mutants")
    for word in explored.words if explored is not None else ():
        if f"; {name} after " in word.detail:
            found.append(f"the abstract machine, explored: {word.statement}")
    wrong = status.runs.get("prove")
    for word in wrong.words if wrong is not None else ():
        if word.kind == "proof" and word.id.partition("/")[0] in GROUNDS.get(name, ()) and "/" in word.id:
            found.append(f"a wrong rule, refuted by both solvers: {word.statement}")
    return tuple(found)


def _smallest(name: str, status: Status) -> str:
    """The world with the fewest states in which it was judged at all."""
    said = status.runs.get("explore")
    if said is None or said.of("invariant", name) is None:
        return "not run yet (kvproof spec refresh explore)"
    scopes = [word for word in said.words if word.kind == "run" and (word.data.get("exercised") or {}).get(name)]
    if not scopes:
        return "no world that is explored has anything for it to judge"
    least = min(scopes, key=lambda word: int(word.data["states"]))
    return f"{least.id}: {least.data['states']} states, judged {least.data['exercised'][name]} times"


# -- rules and words ---------------------------------------------------------------------------------------------------


def rule_modules(status: Status) -> list[RuleModule]:
    made = []
    for name in RULES:
        module: Any = importlib.import_module(f"kvproof.spec.{'' if name == 'radix' else 'rules.'}{name}")
        parts = [
            (part.__qualname__, inspect.getsource(part))
            for part in vars(module).values()
            if getattr(part, "__module__", "") == module.__name__ and (inspect.isclass(part) or callable(part))
            and not part.__qualname__.startswith("_")
        ]  # fmt: skip
        made.append(RuleModule(name, inspect.getdoc(module) or "", tuple(parts), mirrors.of(name, status.mirrors)))
    return made


def glossary() -> Mapping[str, str]:
    """Terms and what they mean, in the order of the file."""
    text = (importlib.resources.files("kvproof.review") / "glossary.txt").read_text(encoding="utf-8")
    return dict(line.split(": ", 1) for line in text.splitlines() if line)


def claims(status: Status, releases: Sequence[str] = RELEASES) -> list[tuple[str, list[tuple[Word, Refutation]]]]:
    """Stored proofs with what they say today, by run: those of the rules first, then those about ``releases``."""
    records = causes.records()

    def words(run: str) -> list[Word]:
        return [word for word in status.runs[run].words if word.kind == "proof"]

    runs = {"prove": "", **{f"prove --on {release}": release for release in releases}}
    return [
        (run, [(word, _today(word, release, records, marked=True)) for word in words(run)])
        for run, release in runs.items()
        if run in status.runs
    ]


def _today(word: Word, release: str, records: Sequence[Record], marked: bool = False) -> Refutation:
    """A rule of ours that is refuted is on no record: only a wrong rule must be. ``marked``: the verdict says if it is
    old."""
    today = settled(word, release, records) if release else Refutation(word.verdict, word.outcome)
    verdict = today.verdict if word.verdict.startswith("refuted") else report.in_words(word.verdict, word.data)
    return replace(today, verdict=told(verdict, old(word)) if marked else verdict)
