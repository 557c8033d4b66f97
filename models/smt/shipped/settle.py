"""Settling a claim about a released function: all paths, three questions to two solvers, and the real function.

The questions: can the premises hold; is there a case that the paths do not cover; is there a path whose answer breaks
the goal. cvc5 is asked the same text (:func:`kvproof.models.smt.solve.ask_cvc5`). A counterexample is computed again
by the real function on plain integers, and only what that confirms is *refuted*.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path as File
from typing import Any, Final

import z3

from kvproof.models.smt import backend as backend  # registers Z3's reading of the connectives
from kvproof.models.smt.shipped.claim import Known, Question, ShippedClaim, ShippedResult, Unknown, Verdict
from kvproof.models.smt.shipped.paths import RAISED, Explorer, Path
from kvproof.models.smt.shipped.terms import Unmodelled, is_tokens
from kvproof.models.smt.solve import ask_cvc5
from kvproof.spec.logic import negate
from kvproof.spec.scenario import Scenario

RESOURCES: Final = 60_000_000
"""Of Z3, for one question."""

FAR: Final = 1_000_003
"""An alignment that no distance of a counterexample is a multiple of."""


def settle(claim: ShippedClaim, release: Any, out: File | None = None) -> ShippedResult:
    """Settle one claim about ``release``'s functions; with ``out``, its SMT-LIB 2 files are written there.

    Never raises for a solver's or for the release's sake: what goes wrong is a verdict.
    """
    begun = time.perf_counter()

    def result(verdict: Verdict, premises: Sequence[str] = (), paths: int = 0, **more: Any) -> ShippedResult:
        return ShippedResult(claim, verdict, tuple(premises), time.perf_counter() - begun, paths, **more)

    absent = claim.absent(release)
    if absent:
        return result("undetermined", note=f"absent: {absent}")
    names: tuple[str, ...] = ()
    try:
        inputs = Unknown()
        question = claim.ask(inputs, release)
        names = tuple(text for text, _ in question.premises)
        assumed = [*inputs.ranges, *(truth for _, truth in question.premises)]
        possible = _Asked(claim, "the premises alone: satisfiable is right", assumed, out, "premises")
        if possible.answers != ("sat", "sat"):
            return result("undetermined", names, note=f"the premises are not shown satisfiable: {possible}")
        found = Explorer(assumed, claim.most_values).explore(question.run)
        if found.problem:
            return result("undetermined", names, len(found.paths), note=found.problem)
        return _judge(claim, release, inputs, question, assumed, found.paths, found.bounded, out, result)
    except Unmodelled as error:
        return result("undetermined", names, note=f"not modelled: {error}")
    except (z3.Z3Exception, RuntimeError, OSError) as error:
        return result("error", names, note=f"{type(error).__name__}: {error}")


def _judge(
    claim: ShippedClaim,
    release: Any,
    inputs: Unknown,
    question: Question,
    assumed: list[Any],
    paths: tuple[Path, ...],
    bounded: bool,
    out: File | None,
    result: Callable[..., ShippedResult],
) -> ShippedResult:
    names = tuple(text for text, _ in question.premises)
    # Paths with equal answers are judged together.
    groups: dict[Any, tuple[Path, list[Any]]] = {}
    for index, path in enumerate(paths):
        same = path.answer.identity if not path.raised and is_tokens(path.answer) else index
        groups.setdefault(same, (path, []))[1].append(_all(path.conditions))
    wrong = [z3.And(_wrong(question, path), z3.Or(*ways)) for path, ways in groups.values()]
    broken = _Asked(claim, "a path whose answer is wrong: unsatisfiable is a proof", [*assumed, z3.Or(*wrong)], out, "")
    if "sat" in broken.answers:
        if "unsat" in broken.answers:
            return result("error", names, len(paths), note=f"the solvers disagree: {broken}")
        told, fault = _confirm(claim, release, inputs, question, broken.solver)
        if told is None:
            return result("undetermined", names, len(paths), note=fault)
        story, scenario = told
        return result("refuted", names, len(paths), counterexample=story, scenario=scenario)
    if broken.answers != ("unsat", "unsat"):
        return result("undetermined", names, len(paths), note=f"out of resources: {broken}")
    uncovered = [*assumed, z3.Not(z3.Or(*(_all(path.conditions) for path in paths)))]
    covered = _Asked(claim, "a case that no path covers: unsatisfiable is right", uncovered, out, "covered")
    if covered.answers != ("unsat", "unsat"):
        note = f"the paths are not shown to cover the premises: {covered}"
        return result("undetermined", names, len(paths), note=note)
    return result("bounded" if bounded else "proved", names, len(paths))


def _wrong(question: Question, path: Path) -> Any:
    truth = negate(question.refusal_allowed if path.raised else question.goal(path.answer))
    return truth if isinstance(truth, z3.ExprRef) else z3.BoolVal(bool(truth))


def _all(conditions: Sequence[Any]) -> Any:
    return z3.And(*conditions) if conditions else z3.BoolVal(True)


class _Asked:
    """One question to both solvers. ``answers`` are Z3's and cvc5's."""

    def __init__(self, claim: ShippedClaim, what: str, formulas: Sequence[Any], out: File | None, name: str) -> None:
        self.solver = z3.Solver()
        self.solver.set("rlimit", RESOURCES)
        self.solver.set("random_seed", 0)
        self.solver.add(*(f if isinstance(f, z3.ExprRef) else z3.BoolVal(bool(f)) for f in formulas))
        body = [line for line in self.solver.to_smt2().splitlines() if not line.startswith((";", "(set-info"))]
        applied = any(line.startswith("(declare-fun") and "()" not in line for line in body)
        logic = "QF_UFLIA" if applied else "QF_LIA"
        text = "\n".join([f"; {claim.id} of {claim.function}", f"; {what}", f"(set-logic {logic})", *body, ""])
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{claim.id.replace('/', '.')}{'.' if name else ''}{name}.smt2").write_text(text)
        answer = self.solver.check()
        if answer == z3.unknown and "interrupted" in self.solver.reason_unknown():
            raise KeyboardInterrupt
        self.answers = ("sat" if answer == z3.sat else "unsat" if answer == z3.unsat else "unknown", ask_cvc5(text))

    def __str__(self) -> str:
        return f"Z3 {self.answers[0]}, cvc5 {self.answers[1]}"


def _confirm(
    claim: ShippedClaim, release: Any, inputs: Unknown, question: Question, solver: z3.Solver
) -> tuple[tuple[str, Scenario | None] | None, str]:
    """The counterexample as the real function gives it, or why it is none."""
    for wish in question.prefer:
        solver.push()
        solver.add(wish if isinstance(wish, z3.ExprRef) else z3.BoolVal(bool(wish)))
        if solver.check() != z3.sat:
            solver.pop()
    solver.check()
    model = solver.model()
    values: dict[str, int | bool] = {}
    for name, term in inputs.variables.items():
        value: Any = model.eval(term, model_completion=True)
        values[name] = z3.is_true(value) if z3.is_bool(term) else int(value.as_long())
    fault = ""
    # Which distances are multiples of an alignment was left open: all of them, or none, is what a number can say.
    for alignment in (1, FAR) if inputs.asked else (1,):
        told, fault = confirm(claim, release, values, alignment)
        if told is not None:
            return told, ""
    return None, fault


def confirm(
    claim: ShippedClaim, release: Any, values: dict[str, int | bool], alignment: int = 1
) -> tuple[tuple[str, Scenario | None] | None, str]:
    """Run the real function on plain numbers: what it does wrong with them, or why that is no counterexample."""
    plain = claim.ask(Known(values, alignment), release)
    broken = [text for text, truth in plain.premises if not truth]
    if broken:
        return None, f"a counterexample that breaks a premise on integers: {broken[0]} ({values})"
    try:
        answer = plain.run()
    except RAISED as error:
        if plain.refusal_allowed:
            return None, f"a counterexample that is none on integers: {values}"
        return (f"{plain.say(None)}: raises {type(error).__name__}: {error}".rstrip(": "), None), ""
    except Exception as error:
        return None, f"a counterexample that the function can't be run on: {type(error).__name__}: {error} ({values})"
    if plain.goal(answer):
        return None, f"a counterexample that the real function does not confirm: {values}"
    return (plain.say(answer), plain.scenario(answer) if plain.scenario is not None else None), ""
