"""Claims judged by solvers, as rows."""

from __future__ import annotations

from pathlib import Path

from kvproof import engines
from kvproof.engines import Claim
from kvproof.errors import CheckerError
from kvproof.report import Outcome, Row


def prove(out: Path | None, progress: engines.Progress) -> list[Row]:
    """Prove every claim; write SMT-LIB 2 files to ``out`` if given."""
    claims = engines.prove(out, progress)
    if not claims:
        raise CheckerError("there are no claims to prove")
    return [row_of(claim) for claim in claims]


def row_of(claim: Claim) -> Row:
    """One claim's row: as expected, refuted, undetermined, or an error of the checker."""
    verdict, outcome, why = _judge(claim)
    premises = claim.premises if isinstance(claim.premises, str) else "; ".join(claim.premises)
    detail = f"{claim.statement} [{claim.scope}]"
    if premises:
        detail += f"; premises{' (satisfiable)' if claim.premises_satisfiable else ''}: {premises}"
    why = claim.note or why
    brief = f"{claim.statement} [{claim.scope}]"
    if why:
        detail, brief = f"{why}: {detail}", f"{why}: {brief}"
    return Row(
        kind="proof",
        id=claim.id,
        verdict=verdict,
        outcome=outcome,
        detail=detail,
        brief=brief,
        belongs_to=claim.mutant_of,
        statement=claim.statement,
        text=str(claim.counterexample or "") if claim.verdict == "refuted" else "",
        seconds=claim.seconds,
        data={
            "scope": claim.scope,
            "premises": premises,
            "premises_satisfiable": claim.premises_satisfiable,
            "expected": claim.expected,
            "second_solver": str(claim.second_solver),
        },
    )


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
    return ("proved" if claim.verdict == "proved" else "refuted as due"), "pass", ""
