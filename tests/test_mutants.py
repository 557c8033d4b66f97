"""The kill matrix: faults are noticed, harmless changes are told as survivors, and a healthy engine is left alone."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest

from kvproof import cli, mutating
from kvproof.impl.reference import lookup
from kvproof.impl.reference.engine import Engine
from kvproof.impl.reference.mutants import MUTANTS
from kvproof.impl.reference.planting import Mutant, wrap
from kvproof.models.mutants.checkers import Trial, fuzz, live
from kvproof.models.mutants.grid import answers, arguments
from kvproof.models.mutants.matrix import Checker
from kvproof.models.mutants.operators import Mutation, function_of, mutations, planted
from kvproof.models.mutants.rules import Rules, judged_survivors, rule_modules
from kvproof.models.mutants.workload import workload
from kvproof.options import MUTANT_STEPS
from kvproof.report import Report
from kvproof.spec.config import Config, Group
from kvproof.spec.rules import hits

SCENARIOS = workload()[:3]
CROSSES = next(mutant for mutant in MUTANTS if mutant.id == "chunk-crosses-a-boundary")


def plant_nothing(engine: Engine) -> None:
    pass


NOTHING = Mutant("nothing-at-all", "others", "nothing is wrong", "nothing", plant_nothing)


def by_live(mutant: Mutant | None) -> Trial:
    return live(mutating.serving(mutant, "touched"), SCENARIOS)


def report_of(*mutants: Mutant, **checkers: Checker[Mutant]) -> Report:
    report = Report("mutants")
    mutating.run(report, mutating.Options((), 1), lambda line: None, mutants, checkers)
    return report


def rows_of(report: Report) -> Mapping[str, tuple[str, str]]:
    return {row.id: (row.verdict, row.outcome) for row in report.rows}


def change(module: str, function: str, before: str, after: str) -> Mutation:
    found = mutations(importlib.import_module(f"kvproof.spec.rules.{module}"))
    return next(m for m in found if (m.function, m.before, m.after) == (function, before, after))


# -- the matrix -------------------------------------------------------------------------------------------------------


def test_a_fault_is_killed_and_the_healthy_engine_is_not() -> None:
    report = report_of(CROSSES, live=by_live)
    assert rows_of(report) == {mutating.HEALTHY: ("silent", "pass"), CROSSES.id: ("killed", "pass")}
    killed = report.rows[1]
    assert killed.subject == "S1"
    assert killed.data["live"]["invariant"] == "SLOT.chunk-end"
    assert killed.data["live"]["cause"] == "chunk-crosses-boundary"
    assert killed.data["live"]["steps"] < 100
    assert report.result_line() == "kvproof: mutants killed=1 survived=0 verdict=met exit=0"


def test_a_change_that_nothing_notices_survives() -> None:
    report = report_of(NOTHING, CROSSES, live=by_live)
    assert rows_of(report)[NOTHING.id] == ("survived live", "fail")
    assert rows_of(report)[CROSSES.id] == ("killed", "pass")
    assert report.result_line() == "kvproof: mutants killed=1 survived=1 verdict=found exit=1"


def test_one_blind_checker_is_enough_to_survive() -> None:
    report = report_of(CROSSES, live=by_live, blind=lambda mutant: Trial(5))
    assert rows_of(report)[CROSSES.id] == ("survived blind", "fail")


def test_a_checker_that_is_not_silent_about_the_healthy_engine_ends_it() -> None:
    report = report_of(NOTHING, live=lambda mutant: by_live(CROSSES))
    assert rows_of(report) == {mutating.HEALTHY: ("not silent", "error")}
    assert report.exit_code == 3


def test_a_checker_that_fails_kills_nothing() -> None:
    def fails(mutant: Mutant | None) -> Trial:
        return Trial(1) if mutant is None else Trial(1, error="ValueError: no")

    report = report_of(CROSSES, live=fails)
    assert rows_of(report)[CROSSES.id] == ("error", "error")
    assert report.exit_code == 3


def test_the_fuzzer_stops_at_its_first_finding() -> None:
    (stale,) = (mutant for mutant in MUTANTS if mutant.id == "stale-keys-survive")
    trial = fuzz(mutating.planted(stale), 1, 2_000)
    assert trial.killed
    assert trial.steps < 100
    assert fuzz(mutating.planted(stale), 1, 2_000) == trial
    silent = fuzz(mutating.planted(None), 1, 100)
    assert not silent.killed
    assert not silent.error
    assert silent.steps >= 100


def test_an_unknown_mutant_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["mutants", "--only", "no-such-thing"]) == 2
    assert capsys.readouterr().err.startswith("kvproof: error: no mutant is called 'no-such-thing': ")


def test_a_module_of_rules_without_its_operators_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["mutants", "--only", "chunk"]) == 2
    assert capsys.readouterr().err.startswith("kvproof: error: 'chunk' is a module of rules: give --rules, too")
    assert cli.run(["mutants", "--only", "chunk", "--only", ""]) == 2
    assert capsys.readouterr().err.startswith("kvproof: error: no mutant is called '': ")


def test_the_workload_is_fixed_and_possible() -> None:
    assert workload() == workload()
    for scenario in workload():
        scenario.config.check()
    assert len({scenario.note for scenario in workload()}) == len(workload())


def test_mutants_have_names_of_their_own_in_the_order_of_what_they_break() -> None:
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)
    assert list(dict.fromkeys(mutant.group for mutant in MUTANTS)) == ["S1", "S2", "S3", "S4", "others"]


SMALL = Config((Group("full", 4), Group("mamba", 4)), num_blocks=30, hash_unit=4, step_tokens=8)


def test_every_mutant_fits_the_engine_that_it_is_planted_in() -> None:
    """One that takes other parameters falls over when it is called, and is killed for nothing."""
    for mutant in MUTANTS:
        mutating.planted(mutant).start(SMALL, None)


@pytest.mark.parametrize(
    ("misfit", "why"),
    [
        (lambda original, request: True, "too many positional arguments"),
        (lambda original, request, target, step: True, "too many positional arguments"),
        (lambda original, request, target, step, reserved: True, "missing a required argument: 'reserved'"),
        (lambda original, request, target, step, left=0: True, "unexpected keyword argument 'reserved'"),
        (lambda original, request, target, step, reserved=0, *, more: True, "missing a required .*'more'"),
    ],
)
def test_what_can_not_be_called_as_its_method_is_is_not_planted(misfit: Any, why: str) -> None:
    scheduler = mutating.planted(None).start(SMALL, None).engine.scheduler
    before = scheduler._allocate
    with pytest.raises(TypeError, match=rf"<lambda> takes request.*, and _allocate request: .* = 0: .*{why}"):
        wrap(scheduler, "_allocate", misfit)
    assert scheduler._allocate == before


@pytest.mark.parametrize(
    "around",
    [
        lambda original, *given, **named: (original, given, named),
        lambda original, r, t, s, reserved=1, more=2: (original, (r, t, s), {"reserved": reserved}),
    ],
)
def test_what_can_be_called_as_its_method_is_is_planted(around: Any) -> None:
    scheduler = mutating.planted(None).start(SMALL, None).engine.scheduler
    original = scheduler._allocate
    wrap(scheduler, "_allocate", around)
    assert scheduler._allocate("r", "t", "s", reserved=3) == (original, ("r", "t", "s"), {"reserved": 3})


@pytest.mark.slow
def test_every_mutant_is_killed_by_every_checker() -> None:
    report = Report("mutants")
    mutating.run(report, mutating.Options((), MUTANT_STEPS), lambda line: None)
    assert [(row.id, row.verdict) for row in report.rows if row.outcome != "pass"] == []
    assert report.facts["killed"] == len(MUTANTS) + sum(row.subject == "rules" for row in report.rows)
    assert report.exit_code == 0


# -- operators --------------------------------------------------------------------------------------------------------


def test_every_operator_is_changed() -> None:
    changes = {m.change for m in mutations(hits)}
    assert {
        "hits.hit_limit: tokens - 1 -> tokens + 1",
        "hits.hit_limit: 1 -> 2",
        "hits.hit_limit: 1 -> 0",
        "hits.hit_within: hit >= 0 -> hit > 0",
        "hits.after_drop: ite(matched < unit, 0, matched - unit) -> ite(matched < unit, matched - unit, 0)",
        "hits.cut_length: minimum(endpoint, held) -> maximum(endpoint, held)",
        "hits.cut_right: negate(cacheable) -> any_of(cacheable)",
        "hits.resume: all_of(tail > 0, offered > tail) -> any_of(tail > 0, offered > tail)",
        "hits.Resume.boundary: self.local + self.external -> self.local - self.external",
    } <= changes
    assert len(changes) == len(mutations(hits))


def test_a_changed_rule_is_changed_for_everybody_until_it_is_put_back() -> None:
    mutation = change("hits", "hit_limit", "tokens - 1", "tokens + 1")
    with planted(hits, mutation):
        assert hits.hit_limit(5) == lookup.hit_limit(5) == 6
    assert hits.hit_limit(5) == lookup.hit_limit(5) == 4


@pytest.mark.slow
def test_every_rule_can_be_called_with_numbers() -> None:
    for module in rule_modules():
        for function in {function_of(module, mutation) for mutation in mutations(module)}:
            calls = arguments(module, function)
            assert calls, function.__qualname__
            assert len(set(map(repr, answers(function, calls)))) > 1, f"{function.__qualname__} answers always the same"


def test_a_changed_rule_is_killed_or_told_with_its_reason() -> None:
    wrong = {"hits.after_drop: matched < unit -> matched <= unit": "at one unit both leave nothing"}
    rules = Rules((), mutating.serving(None, "touched"), (), lambda: None, wrong)
    found = {verdict.mutation.change: (verdict.by, verdict.reason) for verdict in rules.judge([hits])}
    assert found["hits.hit_limit: tokens - 1 -> tokens + 1"] == ("grid", "")
    assert found["hits.after_drop: matched < unit -> matched <= unit"] == ("", "at one unit both leave nothing")


def test_judged_survivors_are_changes_that_can_still_be_made() -> None:
    changes = {mutation.change for module in rule_modules() for mutation in mutations(module)}
    assert set(judged_survivors()) <= changes
    assert all(judged_survivors().values())


@pytest.mark.slow
def test_every_changed_rule_is_killed_or_judged() -> None:
    report = Report("mutants")
    names = tuple(module.__name__.rpartition(".")[2] for module in rule_modules())
    mutating.run(report, mutating.Options(names, 1, rules=True), lambda line: None)
    assert [row.detail for row in report.rows if row.outcome == "fail"] == []
    assert report.facts["survived"] == 0
    assert report.facts["killed"]
