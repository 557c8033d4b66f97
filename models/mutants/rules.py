"""Every changed rule before what knows the right one: the claims that use it, a live engine that serves by it, and the
right rule itself on a grid of numbers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType

import kvproof.spec.rules as package
from kvproof.models.mutants.checkers import Serve, live
from kvproof.models.mutants.grid import answers, arguments
from kvproof.models.mutants.operators import Mutation, function_of, mutations, planted
from kvproof.models.smt.claim import Claim, Unknowns
from kvproof.models.smt.solve import prove_claim
from kvproof.spec.scenario import Scenario

JUDGED = Path(__file__).with_name("survivors.json")


@dataclass(frozen=True)
class Verdict:
    """What noticed the mutation, first of all: ``by`` (claims, live, grid; empty: nobody) and ``how`` in a few words.
    A survivor that was judged has a ``reason``."""

    mutation: Mutation
    by: str
    how: str = ""
    reason: str = ""


@dataclass
class Rules:
    """``claims`` judge what they use; engines from ``serve`` go through ``scenarios``. ``forget`` is called whenever a
    rule changes, for whoever remembers answers. ``judged`` are survivors' reasons, by change."""

    claims: Sequence[Claim]
    serve: Serve
    scenarios: Sequence[Scenario]
    forget: Callable[[], None]
    judged: Mapping[str, str]

    def judge(self, modules: Sequence[ModuleType]) -> Iterator[Verdict]:
        users = {claim: _reached(claim) for claim in self.claims}
        for module in modules:
            calls: dict[FunctionType, list[tuple[object, ...]]] = {}
            right: dict[FunctionType, list[object]] = {}
            for mutation in mutations(module):
                function = function_of(module, mutation)
                if function not in calls:
                    calls[function] = arguments(module, function)
                    right[function] = answers(function, calls[function])
                using = [claim for claim, codes in users.items() if function.__code__ in codes]
                self.forget()
                try:
                    with planted(module, mutation):
                        by, how = self._noticed(using, function, calls[function], right[function])
                finally:
                    self.forget()
                yield Verdict(mutation, by, how, "" if by else self.judged.get(mutation.change, ""))

    def _noticed(
        self, using: Sequence[Claim], function: FunctionType, calls: list[tuple[object, ...]], right: list[object]
    ) -> tuple[str, str]:
        for claim in using:
            how = _refuted(claim)
            if how:
                return "claims", f"{claim.id} {how}"
        for before, now in zip(right, answers(function, calls), strict=True):
            if before != now:
                return "grid", f"answers {now} instead of {before}"
        trial = live(self.serve, self.scenarios)
        if trial.killed or trial.error:
            return "live", trial.text()
        return "", ""


def rule_modules() -> list[ModuleType]:
    """Every module of rules, by name."""
    import importlib
    import pkgutil

    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


def judged_survivors(file: Path = JUDGED) -> dict[str, str]:
    """Survivors that were judged to change nothing, by change, with the reason."""
    return {entry["change"]: entry["reason"] for entry in json.loads(file.read_text(encoding="utf-8"))}


def _refuted(claim: Claim) -> str:
    """How the claim fails now, or nothing."""
    try:
        result = prove_claim(claim)
    except Exception as error:  # the changed rule makes no sense to a solver: that shows
        return f"can't be asked: {type(error).__name__}"
    if not result.premises_satisfiable:
        return "has premises that can't hold"
    return result.verdict if result.verdict in ("refuted", "error") else ""


def _reached(claim: Claim) -> frozenset[CodeType]:
    """The code of every function that runs while the claim is stated."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        claim.build(Unknowns())
    finally:
        sys.setprofile(before)
    return frozenset(seen)
