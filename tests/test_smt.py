"""The proofs: verdicts, honesty of the verdicts, and that breaking a rule breaks its proof."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvproof.models.smt import CLAIMS, Claim, ClaimResult, claims_slot, prove, prove_claim, solve
from kvproof.models.smt.claim import Obligation, Symbols, Unknowns
from kvproof.spec import logic
from kvproof.spec.radix import Radix
from kvproof.spec.rules import blocks, checkpoint, chunk, hits, ledger, slots

BY_ID = {claim.id: claim for claim in CLAIMS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smt")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, ClaimResult]:
    return {result.id: result for result in prove(folder)}


@pytest.mark.parametrize("name", BY_ID)
def test_verdict(name: str, results: dict[str, ClaimResult]) -> None:
    result = results[name]
    assert result.verdict == result.expected, result
    assert result.second_solver == result.verdict
    assert result.premises_satisfiable
    assert result.ok
    assert bool(result.counterexample) == (result.expected == "refuted")


def test_ids_are_unique_and_mutants_name_their_claim() -> None:
    assert len(BY_ID) == len(CLAIMS)
    for claim in CLAIMS:
        if claim.mutant_of:
            assert claim.id.startswith(claim.mutant_of + "/")
            assert not BY_ID[claim.mutant_of].mutant_of


def test_every_family_has_mutants() -> None:
    for family in ("RADIX", "SLOT", "ADMIT", "HIT", "REF"):
        assert any(c.mutant_of.startswith(family) for c in CLAIMS)


def test_counterexamples_of_the_seed_faults_are_told_in_numbers(results: dict[str, ClaimResult]) -> None:
    slot = results["SLOT.two-chunks/before-51113"].counterexample
    assert "block 1600, prompt 3000, EAGLE on" in slot
    assert "[0, 364)" in slot
    assert "crosses 1600" in slot
    assert "holds the state after 364" in slot
    admit = results["ADMIT.mamba-exact/before-57050"].counterexample
    assert "block 1536" in admit
    assert "704547 tokens" in admit
    assert "charged 444 new blocks, taken 2" in admit
    hit = results["HIT.cut-is-total/before-51468"].counterexample
    assert "block 1536, unit 128" in hit
    assert "the recurrent group has 1" in hit


def test_each_question_is_a_file_that_cvc5_answers_alike(results: dict[str, ClaimResult]) -> None:
    for result in results.values():
        path = Path(result.smtlib)
        text = path.read_text()
        assert text.startswith(f"; {result.id}\n")
        assert "(check-sat)" in text
        premises = path.with_name(path.name.removesuffix(".smt2") + ".premises.smt2")
        assert premises.exists()
    sample = results["SLOT.chunk-end"]
    assert solve.ask_cvc5(Path(sample.smtlib).read_text()) == "unsat"


def test_verdicts_repeat(results: dict[str, ClaimResult]) -> None:
    for name in ("SLOT.chunk-end", "SLOT.two-chunks/before-51113"):
        again = prove_claim(BY_ID[name])
        assert (again.verdict, again.counterexample) == (results[name].verdict, results[name].counterexample)


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    right, mutant = BY_ID["REF.touch"], BY_ID["REF.touch/stays-queued"]
    told = list(solve.prove_all([right, mutant], None, lines.append))
    assert lines == [
        f"REF.touch proved: {right.statement}",
        f"mutant REF.touch/stays-queued refuted, counterexample: {told[1].counterexample}",
    ]
    monkeypatch.setattr(solve, "Z3_RESOURCES", 1000)
    (undecided,) = solve.prove_all([BY_ID["SLOT.chunk-end"]], None, lines.append)
    assert lines[-1] == f"SLOT.chunk-end undetermined: {undecided.note}"
    assert undecided.note


# Breaking a rule breaks its proof.


def _off_by_one(rule: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: rule(*args, **options) + 1


def _always(*_: Any, **__: Any) -> bool:
    return True


def _never(*_: Any, **__: Any) -> bool:
    return False


def _offered(case: chunk.Prefill) -> Any:
    return case.offered


def _one_token_later(*args: Any, **options: Any) -> Any:
    found = _POSITION(*args, **options)
    return found.plus(found.radix.one_token())


def _deep(hit: Any, tail: Any, agreed: Any, diverged: Any, offered: Any) -> hits.Resume:
    return hits.Resume(hit, offered)


_POSITION = checkpoint.checkpoint_position


@pytest.mark.parametrize(
    ("module", "rule", "broken", "claim"),
    [
        (chunk, "split", _offered, "SLOT.chunk-end"),
        (chunk, "split", _offered, "SLOT.two-chunks"),
        (chunk, "keeps_to_block", _always, "SLOT.slot-state"),
        (slots, "may_key", _always, "SLOT.slot-state"),
        (checkpoint, "checkpoint_position", _one_token_later, "SLOT.checkpoint-position"),
        (blocks, "mamba_estimate", _off_by_one(blocks.mamba_estimate), "ADMIT.mamba-exact"),
        (blocks, "mamba_estimate", _off_by_one(blocks.mamba_cap), "ADMIT.mamba-bounded"),
        (blocks, "mamba_taken", _off_by_one(blocks.mamba_taken), "ADMIT.mamba-exact"),
        (blocks, "attention_estimate", _off_by_one(blocks.attention_estimate), "ADMIT.attention-exact"),
        (blocks, "recorded_checkpoint", _always, "ADMIT.dry-run-pure"),
        (blocks, "window_held", _off_by_one(blocks.window_held), "ADMIT.window-peak"),
        (hits, "may_cut", _never, "HIT.cut-is-total"),
        (hits, "cut_length", _off_by_one(hits.cut_length), "HIT.cut-is-total"),
        (hits, "after_drop", _off_by_one(hits.after_drop), "HIT.leaves-a-token"),
        (hits, "resume", _deep, "HIT.resume-has-state"),
    ],
)
def test_a_broken_rule_is_refuted(
    module: Any, rule: str, broken: Callable[..., Any], claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prove_claim(BY_ID[claim]).verdict == "proved"
    monkeypatch.setattr(module, rule, broken)
    assert prove_claim(BY_ID[claim]).verdict == "refuted"


@pytest.mark.parametrize("name", ledger.ACTIONS)
def test_a_broken_account_is_refuted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ledger.ACTIONS[name]

    def broken(entry: ledger.Entry) -> ledger.Action:
        done = right(entry)
        return replace(done, after=replace(done.after, references=done.after.references + 1))

    monkeypatch.setitem(ledger.ACTIONS, name, broken)
    assert prove_claim(BY_ID[f"REF.{name.replace(' ', '-')}"]).verdict == "refuted"


# Honesty: nothing empty, one-sided or unsupported is a proof.


def _claim(build: Callable[[Symbols], Obligation], **options: Any) -> Claim:
    return Claim("TEST.claim", "a claim of this test", "nothing", build, **options)


def test_contradicting_premises_prove_nothing() -> None:
    def build(s: Symbols) -> Obligation:
        n = s.integer("n")
        return Obligation((("n is both", logic.all_of(n > 1, n < 1)),), n == 7, lambda: "")

    result = prove_claim(_claim(build))
    assert result.verdict == "undetermined"
    assert not result.premises_satisfiable
    assert "contradict" in result.note


def test_running_out_of_resources_is_undetermined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve, "Z3_RESOURCES", 1000)
    result = prove_claim(BY_ID["SLOT.chunk-end"])
    assert result.verdict == "undetermined"
    assert not result.ok


def test_disagreement_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve, "ask_cvc5", lambda text: "sat")
    result = prove_claim(BY_ID["REF.touch"])
    assert result.verdict == "error"
    assert "disagree" in result.note


def test_a_counterexample_that_integers_do_not_confirm_is_an_error() -> None:
    def build(s: Symbols) -> Obligation:
        n = s.integer("n")
        return Obligation((), n == 7 if isinstance(s, Unknowns) else True, lambda: "")

    result = prove_claim(_claim(build))
    assert result.verdict == "error"
    assert "on integers" in result.note


def test_a_folder_that_cannot_be_written_is_an_error_of_its_own(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OSError, match="file"):
        prove(blocked / "sub")


def test_a_proof_covers_plain_sizes() -> None:
    """A formula built on terms and evaluated at numbers is the rule at those numbers."""
    s = Unknowns()
    grid = s.grid()
    start, end, prefill_end = (s.position(name, grid) for name in ("start", "end", "prefill_end"))
    assert not logic.is_plain(chunk.keeps_to_block(start, end, prefill_end, s.truth("exports")))
    first, second, third = (Radix.of(32, 8).boundary(n) for n in (0, 1, 2))
    assert logic.is_plain(chunk.keeps_to_block(first, second, third, False))


def test_claims_name_their_scope_and_say_what_is_assumed(results: dict[str, ClaimResult]) -> None:
    for result in results.values():
        assert result.scope.startswith("proved for") != bool(result.mutant_of), "a mutant is proved for nothing"
        assert result.premises or result.id.startswith("RADIX"), result.id
    assert results["SLOT.chunk-end"].scope == claims_slot.SCOPE
