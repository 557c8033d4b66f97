"""Asking two solvers the same question.

Z3 answers first. The question is then written as SMT-LIB 2 text, and cvc5 parses that text in a fresh solver: what is
checked twice is what the file says. Effort is limited by resource counts rather than by time, so verdicts repeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import cvc5
import z3

from kvproof.models.smt import backend as backend  # registers Z3's reading of the connectives
from kvproof.models.smt.claim import Claim, ClaimResult, Numbers, Obligation, Unknowns, Verdict
from kvproof.spec.logic import negate

Answer = Literal["sat", "unsat", "unknown"]

Z3_RESOURCES = 20_000_000
CVC5_RESOURCES = 5_000_000


def prove_claim(claim: Claim, out: Path | None = None) -> ClaimResult:
    """Settle one claim; with ``out``, its two SMT-LIB 2 files are written there. Never raises for a solver's sake."""
    begun = time.perf_counter()
    premises: tuple[str, ...] = ()
    path = ""
    try:
        unknowns = Unknowns()
        obligation = claim.build(unknowns)
        premises = tuple(text for text, _ in obligation.premises)
        assumed = [*unknowns.ranges, *(truth for _, truth in obligation.premises)]

        possible = _ask(assumed)
        possible_text = _smtlib(claim, "the premises alone: satisfiable is right", assumed)
        wanted = [*assumed, negate(obligation.goal)]
        answer = _ask(wanted)
        text = _smtlib(claim, "premises and the negated goal: unsatisfiable is a proof", wanted)
        if out is not None:
            path = str(_write(out, claim.id, text))
            _write(out, claim.id + ".premises", possible_text)

        second_possible, second = ask_cvc5(possible_text), ask_cvc5(text)
        verdict, note = _settle(possible, second_possible, answer, second)
        story = ""
        if answer == "sat":
            values = _readable_model(unknowns, wanted, obligation.prefer)
            story, fault = _replay(claim, values)
            if fault:
                verdict, note = "error", fault
    except (z3.Z3Exception, RuntimeError, OSError) as error:
        return _result(claim, premises, "error", begun, "error", False, note=f"{type(error).__name__}: {error}")
    return _result(
        claim,
        premises,
        verdict,
        begun,
        _verdict_of(second),
        possible == "sat" and second_possible == "sat",
        story,
        path,
        note,
    )


def prove_all(
    claims: Iterable[Claim], out: Path | None, progress: Callable[[str], None] | None = None
) -> Iterator[ClaimResult]:
    """Settle the claims in order, with one line of progress after each. What is settled is handed over at once."""
    for claim in claims:
        result = prove_claim(claim, out)
        yield result
        if progress is not None:
            progress(result.line())


def _ask(formulas: Sequence[Any]) -> Answer:
    solver = _solver(formulas)
    answer = solver.check()
    if answer == z3.unknown and "interrupted" in solver.reason_unknown():
        raise KeyboardInterrupt  # the solver takes the interrupt for itself while it searches
    return "sat" if answer == z3.sat else "unsat" if answer == z3.unsat else "unknown"


def _solver(formulas: Sequence[Any]) -> z3.Solver:
    solver = z3.Solver()
    solver.set("rlimit", Z3_RESOURCES)
    solver.set("random_seed", 0)
    # Plain True/False premises are legal: a rule may decide itself before a solver sees it.
    solver.add(*(f if isinstance(f, z3.ExprRef) else z3.BoolVal(bool(f)) for f in formulas))
    return solver


def _smtlib(claim: Claim, question: str, formulas: Sequence[Any]) -> str:
    """The question as SMT-LIB 2 text, with the claim in its header."""
    body = [line for line in _solver(formulas).to_smt2().splitlines() if not line.startswith((";", "(set-info"))]
    head = [f"; {claim.id}", f"; {claim.statement}", f"; {question}", f"(set-logic {claim.theory})"]
    return "\n".join([*head, *body, ""])


def _write(out: Path, name: str, text: str) -> Path:
    path = out / (name.replace("/", ".").replace(" ", "-") + ".smt2")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def ask_cvc5(text: str) -> Answer:
    """cvc5's answer to an SMT-LIB 2 text with one ``check-sat``."""
    solver = cvc5.Solver(cvc5.TermManager())
    solver.setOption("rlimit", str(CVC5_RESOURCES))
    parser = cvc5.InputParser(solver)
    parser.setStringInput(cvc5.InputLanguage.SMT_LIB_2_6, text, "claim")
    symbols = parser.getSymbolManager()
    said: list[str] = []
    while True:
        command = parser.nextCommand()
        if command.isNull():
            break
        said += command.invoke(solver, symbols).split()
    if said == ["sat"]:
        return "sat"
    return "unsat" if said == ["unsat"] else "unknown"


def _verdict_of(answer: Answer) -> Verdict:
    return {"sat": "refuted", "unsat": "proved", "unknown": "undetermined"}[answer]  # type: ignore[return-value]


def _settle(possible: Answer, second_possible: Answer, answer: Answer, second: Answer) -> tuple[Verdict, str]:
    """A verdict, and why it is not decisive where it isn't. Nothing empty and nothing one-sided counts."""
    if {possible, second_possible} == {"sat", "unsat"} or {answer, second} == {"sat", "unsat"}:
        return "error", f"the solvers disagree: Z3 {possible}/{answer}, cvc5 {second_possible}/{second}"
    if "unsat" in (possible, second_possible):
        return "undetermined", "the premises contradict each other: nothing is claimed"
    if "unknown" in (possible, second_possible):
        return "undetermined", "no solver showed the premises satisfiable within its resources"
    if "unknown" in (answer, second):
        return "undetermined", f"out of resources: Z3 {answer}, cvc5 {second}"
    return _verdict_of(answer), ""


def _readable_model(unknowns: Unknowns, wanted: Sequence[Any], prefer: Sequence[Any]) -> dict[str, int | bool]:
    """A model that meets as many of the wishes, in their order, as can be met together."""
    solver = _solver(wanted)
    model: z3.ModelRef | None = None
    for wish in prefer:
        solver.push()
        solver.add(wish)
        if solver.check() == z3.sat:
            model = solver.model()
        else:
            solver.pop()
    if model is None:
        solver.check()
        model = solver.model()
    values: dict[str, int | bool] = {}
    for name, term in unknowns.variables.items():
        value: Any = model.eval(term, model_completion=True)
        values[name] = z3.is_true(value) if z3.is_bool(term) else int(value.as_long())
    return values


def _replay(claim: Claim, values: dict[str, int | bool]) -> tuple[str, str]:
    """The counterexample in plain words, and what is wrong with it if the rules don't confirm it on integers."""
    plain: Obligation = claim.build(Numbers(values))
    broken = [text for text, truth in plain.premises if not truth]
    if broken:
        return "", f"the solver's counterexample breaks a premise on integers: {broken[0]} ({values})"
    if plain.goal:
        return "", f"the solver's counterexample is none on integers: {values}"
    return plain.say(), ""


def _result(
    claim: Claim,
    premises: tuple[str, ...],
    verdict: Verdict,
    begun: float,
    second: Verdict,
    satisfiable: bool,
    story: str = "",
    path: str = "",
    note: str = "",
) -> ClaimResult:
    return ClaimResult(
        id=claim.id,
        statement=claim.statement,
        scope="" if claim.mutant_of else claim.scope,
        premises=premises,
        verdict=verdict,
        expected=claim.expected,
        seconds=time.perf_counter() - begun,
        second_solver=second,
        premises_satisfiable=satisfiable,
        counterexample=story,
        smtlib=path,
        mutant_of=claim.mutant_of,
        note=note,
    )
