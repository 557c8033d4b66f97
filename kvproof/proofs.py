"""Claims judged by solvers, as rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvproof import engines
from kvproof.engines import Claim
from kvproof.errors import CheckerError
from kvproof.report import Outcome, Row

SOLVERS = "z3, cvc5 agree"


def prove(out: Path | None, progress: engines.Progress) -> Iterator[Row]:
    """Prove every claim; write SMT-LIB 2 files to ``out`` if given. Each row comes as soon as its claim is settled."""
    by_id: dict[str, Claim] = {}
    for claim in engines.prove(out, progress):
        by_id[claim.id] = claim
        yield row_of(claim, by_id.get(claim.mutant_of))  # a claim comes before its mutants
    if not by_id:
        raise CheckerError("there are no claims to prove")


def row_of(claim: Claim, right: Claim | None = None) -> Row:
    """One claim's row: as expected, refuted, undetermined, or an error of the checker. ``right`` is the claim that a
    mutant belongs to."""
    verdict, outcome, why = _judge(claim)
    why = claim.note or why
    premises = _premises(claim)
    return Row(
        kind="proof",
        id=claim.id,
        verdict=verdict,
        outcome=outcome,
        detail="\n".join(filter(None, [f"{why}:" if why else "", *_said(claim, outcome), _assumed(claim, right)])),
        belongs_to=claim.mutant_of,
        statement=claim.statement,
        text=str(claim.counterexample or "") if claim.verdict == "refuted" and outcome != "pass" else "",
        seconds=claim.seconds,
        data={
            "scope": "" if claim.mutant_of else claim.scope,
            "premises": "; ".join(premises),
            "premises_satisfiable": claim.premises_satisfiable,
            "expected": claim.expected,
            "second_solver": str(claim.second_solver),
            "counterexample": str(claim.counterexample or ""),
        },
    )


def _said(claim: Claim, outcome: Outcome) -> list[str]:
    """The statement and what is known of it. Only what both solvers proved is called proved."""
    if claim.mutant_of:
        refuted = f"counterexample ({SOLVERS}): {claim.counterexample}"
        return [f"the wrong rule: {claim.statement}", refuted if outcome == "pass" else ""]
    sizes = claim.scope.removeprefix("proved for ")
    return [claim.statement, f"proved for {sizes} ({SOLVERS})" if outcome == "pass" else f"claimed for {sizes}"]


def _assumed(claim: Claim, right: Claim | None) -> str:
    """The premises, those of a mutant only as far as its claim does not have them."""
    premises = _premises(claim)
    if not premises:
        return "no premises"
    shared = _premises(right) if right is not None else []
    if shared and set(shared) <= set(premises):
        premises = [f"those of {claim.mutant_of}", *(p for p in premises if p not in shared)]
    return f"premises {'' if claim.premises_satisfiable else 'not shown '}satisfiable: {'; '.join(premises)}"


def _premises(claim: Claim) -> list[str]:
    return list(filter(None, [claim.premises] if isinstance(claim.premises, str) else claim.premises))


def _judge(claim: Claim) -> tuple[str, Outcome, str]:
    if claim.verdict == "error":
        return "error", "error", "the solver failed"
    if claim.verdict not in ("proved", "refuted"):
        return "undetermined", "undetermined", "no decisive answer"
    if not claim.premises_satisfiable:
        return "undetermined", "undetermined", "the premises can't all hold, so this says nothing"
    if claim.verdict == "refuted" and claim.expected == "proved":
        return "refuted", "fail", ""
    if claim.second_solver != claim.verdict:
        return "undetermined", "undetermined", f"the second solver says {claim.second_solver or 'nothing'}"
    if claim.verdict == "proved" and claim.expected == "refuted":
        # A historical fault that "holds" means that the claim can't tell right from wrong.
        return "not caught", "error", "a fault of old is not caught"
    return ("proved" if claim.verdict == "proved" else "mutant refuted"), "pass", ""
