"""What people read: proofs, invariants and findings, in words that say no more than was established, and few."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvproof import engines, fuzzing, proofs, recorded, subjects, table, verify
from kvproof.errors import UsageError
from kvproof.invariants.catalogue import CATALOGUE
from kvproof.junit import junit
from kvproof.models.smt import CLAIMS, ClaimResult, prove_claim
from kvproof.models.smt.claim import Unknowns
from kvproof.recorded import KnownFinding
from kvproof.report import Report, Row
from kvproof.spec.config import Config, Group
from kvproof.spec.scenario import Action, Scenario

NAMES = ("HIT.cut-is-total", "HIT.cut-is-total/before-51468", "RADIX.sum")


@pytest.fixture(scope="module")
def results() -> dict[str, ClaimResult]:
    return {claim.id: prove_claim(claim) for claim in CLAIMS if claim.id in NAMES}


def shown(report: Report, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    capsys.readouterr()
    table.show(report, **options)
    return capsys.readouterr().out


def flat(text: str) -> str:
    return " ".join(text.split())


def as_expected() -> list[Row]:
    """Rows of all claims and mutants, as if both solvers had just agreed on each."""
    made = [
        ClaimResult(
            c.id,
            c.statement,
            "" if c.mutant_of else c.scope,
            tuple(text for text, _ in c.build(Unknowns()).premises),
            c.expected,
            c.expected,
            0.1,
            c.expected,
            True,
            counterexample="at 7 tokens" if c.mutant_of else "",
            mutant_of=c.mutant_of,
        )
        for c in CLAIMS
    ]
    by_id = {result.id: result for result in made}
    return [proofs.row_of(result, by_id.get(result.mutant_of)) for result in made]


# -- proofs -----------------------------------------------------------------------------------------------------------


def test_a_proof_says_that_both_solvers_agree_and_what_it_assumes(
    results: dict[str, ClaimResult], capsys: pytest.CaptureFixture[str]
) -> None:
    claim = results["HIT.cut-is-total"]
    out = flat(shown(Report("prove", rows=[proofs.row_of(claim)]), capsys))
    assert f"{claim.scope} (z3, cvc5 agree)" in out
    assert f"premises satisfiable: {'; '.join(claim.premises)}" in out
    assert f"HIT.cut-is-total: proved under {len(claim.premises)} premise" in out
    sum_of_digits = flat(shown(Report("prove", rows=[proofs.row_of(results["RADIX.sum"])]), capsys))
    assert "RADIX.sum: proved (" in sum_of_digits
    assert "no premises" in sum_of_digits


def test_a_mutant_is_refuted_and_not_said_to_be_proved_of_anything(
    results: dict[str, ClaimResult], capsys: pytest.CaptureFixture[str]
) -> None:
    claim, mutant = results["HIT.cut-is-total"], results["HIT.cut-is-total/before-51468"]
    row = proofs.row_of(mutant, claim)
    out = flat(shown(Report("prove", rows=[row]), capsys))
    assert "before-51468: mutant refuted" in out
    assert flat(f"counterexample (z3, cvc5 agree): {mutant.counterexample}") in out
    assert "premises satisfiable: those of HIT.cut-is-total" in out
    assert "proved for" not in out.replace("0 of 0 claims proved for all sizes", "")
    assert "proved for" not in str(row.data)


def test_premises_that_a_mutant_has_besides_are_said() -> None:
    rows = {row.id: row for row in as_expected()}
    detail = rows["SLOT.chunk-end/before-51113"].detail
    assert "premises satisfiable: those of SLOT.chunk-end; the prompt is part of the request; " in detail
    fewer = rows["ADMIT.window-peak/beyond-the-sequence"].detail
    assert "those of" not in fewer, "it lacks one of its claim's"
    assert "unsettled tokens are within the limit" in fewer


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"second_solver": "undetermined"}, "the second solver says undetermined"),
        ({"verdict": "undetermined", "note": "out of resources"}, "out of resources"),
        ({"premises_satisfiable": False}, "premises not shown satisfiable"),
        ({"verdict": "refuted", "counterexample": "at 5 tokens"}, "at 5 tokens"),
    ],
)
def test_what_was_not_proved_is_not_called_proved(
    results: dict[str, ClaimResult], capsys: pytest.CaptureFixture[str], changes: dict[str, Any], says: str
) -> None:
    row = proofs.row_of(replace(results["HIT.cut-is-total"], **changes))
    for brief in (False, True):
        out = shown(Report("verify", rows=[row]), capsys, brief=brief)
        assert says in flat(out)
        assert "0 of 1 claims proved" in out
        assert "agree)" not in row.detail
        assert "proved for" not in row.detail
        assert "claimed for all block sizes" in flat(out)


def test_a_short_table_names_what_a_claim_catches_once_and_only_there(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row("proof", "SLOT.chunk-end", "proved", "pass"),
        Row("proof", "SLOT.chunk-end/old", "mutant refuted", "pass", belongs_to="SLOT.chunk-end"),
        Row("invariant", "SLOT.chunk-end", "fuzzed, holds", "pass", "7 evaluations"),
    ]
    out = shown(Report("verify", rows=rows), capsys, brief=True)
    assert out.count("catches old") == 1
    assert re.search(r"SLOT +proved +SLOT\.chunk-end \(catches old\)", out)
    assert "1 of 1 claims proved for all sizes (z3, cvc5 agree, premises satisfiable), 1 of 1 mutants refuted" in flat(
        out
    )


# -- invariants and findings ------------------------------------------------------------------------------------------


def known(**changes: Any) -> KnownFinding:
    made = KnownFinding(
        "SLOT.chunk-end",
        "chunk-crosses-boundary",
        "confirmed",
        "PR 1",
        "The chunk runs past the end of 0.33.0's block. Much more is said about it.",
        None,
        "findings/a.json",
    )
    return fuzzing.msgspec.structs.replace(made, **changes)


def made_record(**changes: Any) -> fuzzing.FuzzRecord:
    made = fuzzing.FuzzRecord(
        subject="vllm==0.33.0",
        release="0.33.0",
        seed=1,
        steps=60_016,
        examples=2000,
        seconds=83.25,
        interrupted=False,
        families=sorted({entry.family for entry in CATALOGUE}),
        evaluations={entry.id: 5 for entry in CATALOGUE},
        coverage={},
        findings=[],
        known=[],
        errors=[],
        ended="ended by steps=60000",
    )
    return fuzzing.msgspec.structs.replace(made, **changes)


def made_report(record: fuzzing.FuzzRecord, **options: Any) -> Report:
    report = Report("fuzz", record.subject, fuzzing.rows(record, **options), ended=record.ended)
    report.facts.update(record.facts())
    report.spent[record.subject] = record.seconds
    return report


@pytest.mark.parametrize(
    ("changes", "says", "invariant"),
    [
        ({"seen": 3.21}, "known: seen in this run after 3.2 s", "broken (known)"),
        ({"shown": True}, "known: its recorded scenario still shows it", "broken (known)"),
        ({"why": "no scenario is recorded"}, "known: not seen in this run; no scenario is recorded", "broken (known)"),
        ({"shown": False}, "gone: its recorded scenario no longer shows it", "fuzzed, holds"),
    ],
)
def test_a_known_finding_is_listed_whether_it_was_seen_or_not(
    capsys: pytest.CaptureFixture[str], changes: dict[str, Any], says: str, invariant: str
) -> None:
    report = made_report(made_record(known=[known(**changes)]))
    out = shown(report, capsys)
    assert re.search(rf"SLOT\.chunk-end +{re.escape(invariant)}", out)
    assert f"\n    {says}\n" in out
    assert "confirmed, PR 1: The chunk runs past the end of 0.33.0's block.\n" in out
    assert "Much more" not in out
    assert "findings/a.json" in out
    assert ("update the record: findings/a.json (it names 0.33.0)" in out) == ("gone" in says)
    assert report.exit_code == 0
    assert ("gone=1" in out) == ("gone" in says)
    assert "Much more" in shown(made_report(made_record(known=[known(**changes)]), show_known=True), capsys)


def test_the_worst_of_a_kind_is_told_first() -> None:
    scenario = Scenario(Config((Group("full", 4),), 20, 4, 8), (Action("step"),)).to_dict()
    mild, dead, wrong = "REUSE.resend", "FLOW.no-crash", "SLOT.key-content"
    new = [
        fuzzing.NewFinding({"invariant": one, "cause": "x", "witness": "", "action": 0, "scenario": scenario}, "")
        for one in (mild, dead, wrong)
    ]
    listed = [known(invariant=one, shown=True) for one in (mild, wrong, dead)]
    gone = [known(invariant=one, shown=False) for one in (mild, wrong)]
    besides = [known(invariant=mild, cause="y", shown=True, besides=[("HIT.covers", "x", "")])]
    rows = made_report(made_record(findings=new, known=[*listed, *besides, *gone], earlier=listed)).rows
    told = [(row.verdict.partition(":")[0], row.id.partition(" ")[0]) for row in rows if row.kind == "finding"]
    assert told == [
        *(("new", one) for one in (wrong, "HIT.covers", dead, mild)),
        *(("earlier", one) for one in (wrong, dead, mild)),
        *(("gone", one) for one in (wrong, mild)),
        *(("known", one) for one in (wrong, dead, mild, mild)),
    ]


def test_what_fails_a_run_comes_last(capsys: pytest.CaptureFixture[str]) -> None:
    scenario = Scenario(Config((Group("full", 4),), 20, 4, 8), (Action("step"),)).to_dict()
    finding = {"invariant": "HIT.covers", "cause": "x", "witness": "w", "action": 0, "scenario": scenario}
    new = fuzzing.NewFinding(finding, "f.json")
    report = made_report(made_record(findings=[new], known=[known(shown=True)], errors=["a worker died"]))
    report.coverage = {"action step": 3}
    out = shown(report, capsys)
    assert "findings: 1 new, 1 known (below)" in out
    at = out.index("findings that fail this run: 1 new\n  HIT.covers x\n    new on vllm==0.33.0\n")
    assert max(out.index(said) for said in ("known: its", "a worker died", "action step 3")) < at
    lines = out[at:].splitlines()
    assert lines[-3].startswith("replay: kvproof replay f.json"), "and nothing but the result line after it"
    alone = shown(made_report(made_record(findings=[new])), capsys)
    assert "\nfindings: 1 new\n  HIT.covers x\n" in alone
    assert "fail this run" not in alone


def test_known_findings_are_folded_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    listed = [known(shown=True), known(cause="other", seen=1.5), known(cause="lost", why="it can't run")]
    report = made_report(made_record(known=listed))
    lines = [line.strip() for line in shown(report, capsys, fold=True).splitlines()]
    assert "findings: 3 known; kvproof fuzz vllm==0.33.0 --all prints each in full" in lines
    at = lines.index("known: seen in this run (findings/README.md):")
    assert lines[at + 1] == "SLOT.chunk-end other"
    at = lines.index("known: its recorded scenario still shows it (findings/README.md):")
    assert lines[at + 1] == "SLOT.chunk-end chunk-crosses-boundary"
    assert lines.count("record: findings/a.json") == 1, "what could not be told is not as it was recorded"
    assert any(line.startswith("HIT.covers") for line in lines), "findings are folded and nothing else"


def test_a_search_says_at_its_end_what_it_never_exercised(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {entry.id: 5 for entry in CATALOGUE if entry.id not in ("HIT.pure-view", "TAIL.one-hold")}
    report = made_report(made_record(evaluations=counts))
    last = shown(report, capsys).splitlines()[-4:-1]
    assert "undetermined, as never exercised: HIT.pure-view, TAIL.one-hold." in flat(" ".join(last))
    assert "A longer run (--seconds, --steps) decides." in flat(" ".join(last))
    assert "never exercised:" not in shown(made_report(made_record()), capsys)


def test_gone_findings_come_before_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    record = made_record(known=[known(shown=True), known(cause="other", shown=False)])
    out = shown(made_report(record), capsys)
    assert "findings: 1 gone, 1 known" in out
    assert out.index("gone: its") < out.index("known: its")
    assert "new=0 known=1 gone=1" in out


def test_what_a_recorded_scenario_shows_besides_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    besides = [("REF.queue", "queued-in-use", "block 3 is queued")]
    report = made_report(made_record(known=[known(shown=True, besides=besides)]))
    out = shown(report, capsys)
    assert report.exit_code == 1
    assert "kvproof replay findings/a.json --on vllm==0.33.0" in out
    assert "new=1 known=1" in out
    assert re.search(r"REF\.queue +broken ", out)


def test_what_a_release_has_no_mechanism_for_is_not_applicable(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {entry.id: 5 for entry in CATALOGUE if entry.id != "HIT.pure-view"}
    assert made_report(made_record(evaluations=counts)).exit_code == 3
    report = made_report(made_record(evaluations=counts, lacking={"HIT.pure-view": "this release does not truncate"}))
    assert re.search(r"HIT\.pure-view +not applicable +this release does not truncate", shown(report, capsys))
    assert report.exit_code == 0


def test_a_short_table_says_once_what_is_not_applicable_for_one_reason(capsys: pytest.CaptureFixture[str]) -> None:
    record = made_record(families=["SLOT", "REF"])
    out = shown(made_report(record), capsys, brief=True)
    assert re.search(r"HIT\.limit and \d+ more +not applicable +this subject can't show the family HIT", out)
    assert "HIT.covers" not in out
    assert "HIT.covers" in shown(made_report(record), capsys)
    assert "REF.queue-shape" in out


def test_the_time_and_what_ended_it_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    report = made_report(made_record())
    out = shown(report, capsys)
    assert "fuzzed for 83.2 s" in out
    assert out.splitlines()[-1].endswith("seconds=83.2 (ended by steps=60000) verdict=met exit=0")
    assert report.to_data()["ended"] == "ended by steps=60000"


def test_what_a_search_did_is_said_and_what_it_never_did(capsys: pytest.CaptureFixture[str]) -> None:
    report = made_report(made_record())
    report.coverage = {"action step": 1200, "action submit": 7, "run with EAGLE": 3, "run refused": 53}
    out = flat(shown(report, capsys))
    assert "configuration that this subject refused (a simpler one was run) 53" in out
    del report.coverage["run refused"]
    out = flat(shown(report, capsys))
    assert "action step 1,200, action submit 7, run with EAGLE 3, action finish never, action abort never" in out
    assert "coverage" not in flat(shown(report, capsys, brief=True))


def test_verify_fits_on_a_few_screens(capsys: pytest.CaptureFixture[str]) -> None:
    listed = recorded.records_for(None, subjects.NEWEST)
    record = made_record(known=[fuzzing.msgspec.structs.replace(k, shown=True) for k in listed])
    report = Report("verify", record.subject, [*as_expected(), *fuzzing.rows(record)], ended=record.ended)
    report.facts.update(seed=1, **record.facts())
    lines = shown(report, capsys, brief=True).splitlines()
    causes = {(known.invariant, known.cause) for known in listed}
    assert len(lines) <= 80 + len(causes), "a line at most for each that is known"
    assert all(len(line) <= 100 or line.lstrip().startswith(("record: ", "kvproof: ")) for line in lines)
    assert all(claim.id in "\n".join(lines) for claim in CLAIMS if not claim.mutant_of)
    assert all(known.cause in flat("\n".join(lines)).replace(" ", "") for known in listed)
    assert "known: its recorded scenario still shows it" in junit(report)


# -- verify -----------------------------------------------------------------------------------------------------------


def test_verify_reads_the_known_findings_before_it_proves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def proved(*_: Any) -> Any:
        raise AssertionError("the proofs ran")

    monkeypatch.setattr(engines, "prove", proved)
    (tmp_path / "a.json").write_text("{}")
    report = Report("verify")
    with pytest.raises(UsageError, match=r"a\.json"):
        verify.verify(report, fuzzing.Options(1, 1, None, 1, tmp_path, tmp_path), None, print)
    assert report.rows == []


LACKING = """
import sys
from kvproof import subjects
print(sorted(subjects.open_subject(subjects.parse("vllm==" + sys.argv[1]), lambda line: None).lacking().items()))
"""


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize(("release", "lacks"), [("0.26.0", True), (subjects.NEWEST, False)])
def test_a_release_says_what_it_has_no_mechanism_for(release: str, lacks: bool) -> None:
    done = subprocess.run([sys.executable, "-c", LACKING, release], check=True, capture_output=True, text=True)
    why = "this release does not truncate hits"
    expected = [("HIT.only-recurrent-short", why), ("HIT.pure-view", why)] if lacks else []
    assert done.stdout.splitlines()[-1] == str(expected)
