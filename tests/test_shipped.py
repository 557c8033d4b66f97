"""Proofs about shipped code: the executor on functions of our own, then on three releases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import z3

from kvproof import cli, scenario_file, shipped
from kvproof.models.smt import prove_claim
from kvproof.models.smt.claims_radix import CLAIMS as RADIX
from kvproof.models.smt.shipped import CLAIMS, tables
from kvproof.models.smt.shipped import settle as settle_claim
from kvproof.models.smt.shipped.claim import Known, Unknown
from kvproof.models.smt.shipped.paths import Exploration, Explorer
from kvproof.models.smt.shipped.terms import Unmodelled
from kvproof.spec.radix import Position, Radix

sys.path.insert(0, str(Path(__file__).parent))
import insiders
import shipped_toys as toys

sys.path.pop(0)

settling = sys.modules["kvproof.models.smt.shipped.settle"]


def grid() -> tuple[Unknown, Radix, Position]:
    s = Unknown()
    radix = s.grid()
    return s, radix, s.position("n", radix)


def explore(s: Unknown, run: Any, *more: Any, **options: Any) -> Exploration:
    return Explorer([*s.ranges, *more], **options).explore(run)


# -- paths ------------------------------------------------------------------------------------------------------------


def test_each_branch_that_can_go_both_ways_does_and_no_other() -> None:
    s, radix, n = grid()
    block, tokens = s.block(radix), s.tokens(n)

    def run() -> str:
        if tokens < block:
            return "never" if tokens // block > 0 else "inside"
        return "on" if tokens % block == 0 else "beyond"

    found = explore(s, run)
    assert not found.problem
    assert sorted(path.answer for path in found.paths) == ["beyond", "inside", "on"]
    covered = z3.Or(*(z3.And(*path.conditions) for path in found.paths))
    solver = z3.Solver()
    solver.add(*s.ranges, z3.Not(covered))
    assert solver.check() == z3.unsat


def test_builtins_that_compare_fork() -> None:
    s, radix, n = grid()
    other = s.position("m", radix)
    found = explore(s, lambda: max(min(s.tokens(n), s.tokens(other)), 0))
    assert not found.problem
    answers = [path.answer if type(path.answer) is int else path.answer.identity for path in found.paths]
    assert {s.tokens(n).identity, s.tokens(other).identity} <= set(answers)


def test_arithmetic_is_that_of_numbers() -> None:
    """Each operation, on unknowns that are then given values, answers what Python's does."""

    def compute(n: Any, m: Any, block: Any, unit: Any) -> tuple[Any, ...]:
        return (
            n // block * block,
            n - n % block,
            n // unit * unit,
            (n // block + 1) * block,
            n + (m - n),
            (n - 1) // block * block + m % unit,
            -(n // -block) * block,
            max(n - m, 0) // block * block,
            (m - unit) % block + 2 * n,
        )

    for block, unit, first, second in ((16, 4, 0, 1), (16, 4, 37, 64), (12, 12, 24, 5), (1, 1, 3, 2), (6, 1, 7, 30)):
        s = Unknown()
        radix = s.grid()
        n, m = s.position("n", radix), s.position("m", radix)
        given = [radix.units == block // unit, radix.unit == unit]
        for position, value in ((n, first), (m, second)):
            plain = Position.of(value, block, unit)
            given += [position.block == plain.block, position.unit == plain.unit, position.offset == plain.offset]
        found = explore(s, lambda: compute(s.tokens(n), s.tokens(m), s.block(radix), s.unit(radix)), *given)  # noqa: B023
        assert not found.problem
        (path,) = found.paths
        solver = z3.Solver()
        solver.add(*s.ranges, *given)
        assert solver.check() == z3.sat
        for answer, right in zip(path.answer, compute(first, second, block, unit), strict=True):
            at = s.position_of(answer, radix)
            value = (at.block * (block // unit) + at.unit) * unit + at.offset
            assert solver.model().eval(z3.IntVal(0) + value, model_completion=True).as_long() == right


@pytest.mark.parametrize(
    ("operation", "run"),
    [
        ("Tokens.pow", lambda n, block: n**2),
        ("Tokens.rshift", lambda n, block: n >> 1),
        ("Tokens.index", lambda n, block: range(n)),
        ("Tokens.hash", lambda n, block: {n: 1}),
        ("Tokens.truediv", lambda n, block: n / 2),
        ("Tokens // int", lambda n, block: n // 7),
        ("a type test of Tokens", lambda n, block: isinstance(n, int)),
        ("a constant of 4096 tokens", lambda n, block: n + 4096),
        ("comparing an unknown number of tokens with 4096", lambda n, block: n < 4096),
        ("concrete value", lambda n, block: [0] * (n // block)),
        ("Count.floordiv", lambda n, block: n // block // 2),
        ("AttributeError", lambda n, block: SimpleNamespace().scheduler_block),
    ],
)
def test_what_is_not_modelled_is_undetermined_and_named(operation: str, run: Any) -> None:
    s, radix, n = grid()
    found = explore(s, lambda: run(s.tokens(n), s.block(radix)))
    assert found.problem.startswith("not modelled: ")
    assert operation in found.problem


def test_an_unmodelled_operation_counts_even_where_the_function_swallows_it() -> None:
    s, _, n = grid()

    def run() -> int:
        try:
            return s.tokens(n) ** 2  # type: ignore[no-any-return]
        except Exception:
            return 0

    assert "Tokens.pow" in explore(s, run).problem


def test_a_concrete_value_needs_a_bound_and_makes_a_verdict_bounded() -> None:
    s, radix, n = grid()
    run = lambda: len([0] * (s.tokens(n) // s.block(radix)))  # noqa: E731
    found = explore(s, run, n.block <= 3, most_values=4)
    assert found.bounded
    assert sorted(path.answer for path in found.paths) == [0, 1, 2, 3]
    assert "more than 3 concrete values" in explore(s, run, n.block <= 3, most_values=3).problem


def test_a_function_that_is_not_deterministic_is_noticed() -> None:
    s, _, n = grid()
    calls: list[int] = []

    def run() -> bool:
        calls.append(1)
        return bool(s.tokens(n) > len(calls) % 3)

    assert "not deterministic" in explore(s, run).problem


def test_what_a_function_raises_is_its_answer() -> None:
    s, radix, n = grid()

    def run() -> None:
        if s.tokens(n) >= s.block(radix):
            raise AssertionError("too long")

    assert sorted(path.raised for path in explore(s, run).paths) == ["", "AssertionError: too long"]


def test_a_table_of_unknown_length_answers_only_what_is_modelled() -> None:
    s, _, n = grid()
    table = s.table(n.block, lambda at: at < 2)
    assert explore(s, lambda: bool(tables.length(table) > 2)).problem == ""
    assert explore(s, lambda: bool(table[-1].is_null), n.block > 0).problem == ""
    assert "beyond its ends" in explore(s, lambda: table[s.count(n.block)], n.block > 0).problem
    assert "Table.iter" in explore(s, lambda: list(table)).problem
    assert "Table.len" in explore(s, lambda: len(table)).problem


def test_outside_a_run_nothing_is_decided() -> None:
    s, _, n = grid()
    with pytest.raises(Unmodelled):
        bool(s.tokens(n))


N = {"n.block": 1, "n.offset": 3}

# -- verdicts ---------------------------------------------------------------------------------------------------------


def test_right_functions_are_proved_and_planted_faults_are_refuted_by_the_real_function() -> None:
    for ask in (toys.rounds, toys.counts):
        assert settle_claim(toys.claim(ask), toys.Toys()).verdict == "proved"
    result = settle_claim(toys.claim(toys.rounds), toys.Toys(rounding=toys.round_down_planted))
    assert result.verdict == "refuted"
    assert result.counterexample.startswith("block 16, [")
    assert settle_claim(toys.claim(toys.counts), toys.Toys(ceiling=toys.ceil_blocks_planted)).verdict == "refuted"


def test_a_counterexample_that_the_real_function_does_not_confirm_refutes_nothing() -> None:
    """The function is wrong on unknowns only, as a wrong model of an operation would make it."""

    def two_faced(n: Any, block: Any) -> Any:
        return toys.ceil_blocks(n, block) if type(n) is int else toys.ceil_blocks_planted(n, block)

    result = settle_claim(toys.claim(toys.counts), toys.Toys(ceiling=two_faced))
    assert result.verdict == "undetermined"
    assert "does not confirm" in result.note


def test_a_counterexample_that_breaks_a_premise_is_none() -> None:
    values = {"tokens_per_block": 16, "start.block": 1, "start.offset": 0, "end.block": 0, "end.offset": 3}
    told, fault = settling.confirm(toys.claim(toys.rounds), toys.Toys(rounding=toys.round_down_planted), values)
    assert told is None
    assert "breaks a premise" in fault


def test_what_the_function_cannot_be_run_on_is_no_counterexample() -> None:
    """A table that does not fit the pool, say: that is no answer of the function."""

    def broken(n: Any, block: Any) -> Any:
        raise LookupError("no room")

    told, fault = settling.confirm(toys.claim(toys.counts), toys.Toys(ceiling=broken), {"tokens_per_block": 16, **N})
    assert told is None
    assert "can't be run on: LookupError: no room" in fault


def test_a_dropped_path_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Explorer.explore

    def dropping(self: Explorer, run: Any) -> Exploration:
        found = whole(self, run)
        return replace(found, paths=found.paths[:-1])

    monkeypatch.setattr(Explorer, "explore", dropping)
    result = settle_claim(toys.claim(toys.rounds), toys.Toys())
    assert result.verdict == "undetermined"
    assert "not shown to cover the premises" in result.note


def test_premises_that_contradict_each_other_prove_nothing() -> None:
    def ask(s: Any, release: Any) -> Any:
        question = toys.counts(s, release)
        return replace(question, premises=(("nothing", z3.BoolVal(False)),))

    result = settle_claim(toys.claim(ask), toys.Toys())
    assert result.verdict == "undetermined"
    assert "not shown satisfiable" in result.note


def test_both_solvers_are_asked_and_must_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert settle_claim(toys.claim(toys.counts), toys.Toys(), tmp_path).verdict == "proved"
    assert {file.name for file in tmp_path.iterdir()} == {
        "TOY.claim.smt2",
        "TOY.claim.premises.smt2",
        "TOY.claim.covered.smt2",
    }
    monkeypatch.setattr(settling, "ask_cvc5", lambda text: "sat")
    assert settle_claim(toys.claim(toys.counts), toys.Toys()).verdict == "error"
    monkeypatch.setattr(settling, "ask_cvc5", lambda text: "unknown")
    assert settle_claim(toys.claim(toys.counts), toys.Toys()).verdict == "undetermined"


def test_the_digit_lemma_is_proved() -> None:
    for claim in RADIX:
        result = prove_claim(claim)
        assert result.ok, claim.id


def test_claims_say_what_they_cover() -> None:
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.scope.startswith("bounded: " if claim.most_values else "proved for all"), claim.id


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", ["reference", "vllm==0.1.0", "nonsense"])
def test_a_subject_without_such_functions_is_refused(subject: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["prove", "--on", subject]) == 2
    assert capsys.readouterr().err.startswith("kvproof: error: ")


@pytest.mark.parametrize("option", [("--workers", "2"), ("--scenarios", "x"), ("--findings", "x")])
def test_options_for_a_release_need_one(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["prove", *option]) == 2
    assert "name it with --on" in capsys.readouterr().err


def test_a_killed_process_is_an_error_and_no_verdict() -> None:
    claim = toys.claim(lambda s, release: os._exit(9))
    options = shipped.Options(1, None, Path(), None)
    ((index, result),) = shipped._settled([claim], toys.Toys(), options)
    assert (index, result.verdict) == (0, "error")


def test_an_alignment_is_any_number() -> None:
    known = Known({}, 3)
    assert known.aligned("a", Position.of(9, 16, 4))
    assert not known.aligned("a", Position.of(10, 16, 4))


# -- releases ---------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys
from kvproof import engines, subjects
from kvproof.impl.vllm.shipped import Shipped
from kvproof.models.smt.shipped import BUILTINS, CLAIMS, settle
subject = subjects.open_subject(subjects.parse("vllm==" + sys.argv[1]), lambda line: None)
release, told = Shipped(BUILTINS), {}
for claim in CLAIMS:
    if claim.id in sys.argv[2].split():
        result = settle(claim, release)
        shown = []
        if result.scenario is not None:
            shown = sorted({v.identity for v in engines.replay(subject, result.scenario).violations})
        told[claim.id] = [result.verdict, result.note or result.counterexample, shown]
print(json.dumps(told))
"""

S1 = ("SPLIT.chunk-end/plain", "SPLIT.progress/plain")
S3 = ("MAMBA.estimate-bounded/checkpoint", "MAMBA.estimate-exact/checkpoint", "MAMBA.taken/plain")
S2 = ("HIT.cut",)
REST = ("MAMBA.estimate-exact/plain", "ATTENTION.estimate-exact/full", "ATTENTION.estimate-exact/window")


def verdicts(release: str, *claims: str) -> dict[str, Any]:
    asked = " ".join(claims)
    done = insiders.run(release, PROGRAM, release, asked)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize(
    ("release", "split", "bounded"),
    [("0.26.0", "refuted", "undetermined"), ("0.30.0", "proved", "refuted"), ("0.33.0", "proved", "proved")],
)
def test_the_seed_faults_are_refuted_where_they_are_and_proved_absent_where_they_are_not(
    release: str, split: str, bounded: str
) -> None:
    told = verdicts(release, *S1, *S3, *REST)
    assert told["SPLIT.chunk-end/plain"][0] == split
    assert told["MAMBA.estimate-bounded/checkpoint"][0] == told["MAMBA.estimate-exact/checkpoint"][0] == bounded
    assert told["MAMBA.taken/plain"][0] == "bounded"
    for name in (*REST, "SPLIT.progress/plain"):
        assert told[name][0] == "proved", (name, told[name])
    if split == "refuted":
        assert ["SLOT.chunk-end", "chunk-ends-off-boundary"] in told["SPLIT.chunk-end/plain"][2]
        assert "exports no checkpoints" in told["MAMBA.estimate-bounded/checkpoint"][1]
    if bounded == "refuted":
        assert ["ADMIT.mamba-bound", "estimate-beyond-bound"] in told["MAMBA.estimate-bounded/checkpoint"][2]


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize(("release", "verdict"), [("0.27.0", "refuted"), ("0.28.0", "bounded")])
def test_the_cut_that_refused_short_recurrent_groups_is_refuted(release: str, verdict: str) -> None:
    (told,) = verdicts(release, *S2).values()
    assert told[0] == verdict
    assert ("raises AssertionError" in told[1]) == (verdict == "refuted")


@pytest.mark.release
@pytest.mark.slow
def test_the_command_lists_what_is_recorded_and_keeps_a_scenario(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvproof", "prove", "--on", "vllm==0.26.0", "--report", str(tmp_path)]
    command += ["--scenarios", str(tmp_path / "kept"), "--workers", "2"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    data = json.loads((tmp_path / "prove.json").read_text())
    rows = {row["id"]: row for row in data["rows"]}
    assert set(rows) == {claim.id for claim in CLAIMS}
    assert rows["SPLIT.chunk-end/plain"]["outcome"] == "info"
    assert rows["SPLIT.chunk-end/plain"]["verdict"].startswith("refuted (known: SLOT.chunk-end")
    assert {invariant for invariant, _ in rows["SPLIT.chunk-end/plain"]["data"]["shown"]} >= {"SLOT.chunk-end"}
    assert rows["SPLIT.progress/plain"]["outcome"] == "pass"
    assert rows["SPLIT.chunk-end/checkpoint"]["outcome"] == "skip"
    new = [row["id"] for row in data["rows"] if row["outcome"] == "fail"]
    assert done.returncode == data["exit"] == (1 if new else 0), done.stderr
    loaded = scenario_file.load(tmp_path / "kept" / "vllm-0.26.0-SPLIT.chunk-end-plain.json")
    assert loaded.finding is not None
    assert loaded.finding.identity[0] == "SLOT.chunk-end"
    assert "premises: " in done.stdout
