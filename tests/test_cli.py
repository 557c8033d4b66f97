"""The command: exit codes, reports and what is kept, with made-up engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvproof import cli, fuzzing, proofs, scenario_file, subjects, verify
from kvproof.errors import CheckerError, UsageError
from kvproof.report import Report, Row

sys.path.insert(0, str(Path(__file__).parent))
from fakeengines import (
    FINDING,
    FUZZ,
    SCENARIO,
    VIOLATION,
    Engines,
    FakeCampaign,
    FakeClaim,
    FakeReplay,
    command,
    install,
    line,
    record,
)

sys.path.pop(0)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engines:
    return install(monkeypatch, tmp_path)


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    scenario_file.save(tmp_path / "s.json", SCENARIO)
    return str(tmp_path / "s.json")


def test_proofs_that_come_out_as_expected_are_met(fakes: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["prove", "--report", "r"]) == 0
    out = capsys.readouterr().out
    claim, mutant = (row["detail"] for row in json.loads(Path("r/prove.json").read_text())["rows"])
    assert "premises satisfiable: the block is positive" in claim
    assert "premises satisfiable: those of slot.ends" in mutant
    assert line(out) == "kvproof: prove claims=2 verdict=met exit=0"


@pytest.mark.parametrize(
    ("claim", "code", "verdict"),
    [
        (FakeClaim(verdict="refuted", counterexample="at 5 tokens"), 1, "refuted"),
        (FakeClaim(verdict="undetermined", second_solver="undetermined"), 3, "undetermined"),
        (FakeClaim(verdict="error", second_solver="error"), 3, "error"),
        (FakeClaim(second_solver="undetermined"), 3, "undetermined"),
        (FakeClaim(second_solver=""), 3, "undetermined"),
        (FakeClaim(premises_satisfiable=False), 3, "undetermined"),
        (FakeClaim(expected="refuted"), 3, "error"),
    ],
)
def test_claims_that_come_out_otherwise(
    fakes: Engines, capsys: pytest.CaptureFixture[str], claim: FakeClaim, code: int, verdict: str
) -> None:
    fakes.claims = [FakeClaim(), claim]
    assert cli.run(["prove"]) == code
    out = capsys.readouterr().out
    assert f"verdict={verdict} exit={code}" in line(out)
    assert claim.counterexample in out


def test_a_refuted_claim_wins_over_an_undetermined_one(fakes: Engines) -> None:
    fakes.claims = [FakeClaim(verdict="undetermined"), FakeClaim(verdict="refuted", second_solver="refuted")]
    assert cli.run(["prove"]) == 1


def test_no_claims_at_all_is_no_proof(fakes: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.claims = []
    assert cli.run(["prove"]) == 3
    assert capsys.readouterr().err == "kvproof: error: there are no claims to prove\n"


@pytest.mark.parametrize(("verdict", "code"), [("proved", 130), ("refuted", 1)])
def test_interrupted_proofs_keep_what_was_settled(
    fakes: Engines, capsys: pytest.CaptureFixture[str], verdict: str, code: int
) -> None:
    def claims() -> Iterator[FakeClaim]:
        yield FakeClaim()
        yield FakeClaim("slot.starts", verdict=verdict)
        raise KeyboardInterrupt

    fakes.claims = claims()
    assert cli.run(["prove"]) == code
    out = capsys.readouterr().out
    assert "slot.starts" in out
    assert line(out).startswith("kvproof: prove claims=2 interrupted=yes ")
    fakes.claims = claims()
    assert cli.run(["verify"]) == code
    assert "slot.starts" in Path("reports/verify.json").read_text()


def test_a_fuzz_without_findings(fakes: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*FUZZ, "--report", "r"]) == 0
    captured = capsys.readouterr()
    assert "not applicable" in captured.out
    assert "seed 7" in captured.err
    assert line(captured.out).startswith(
        "kvproof: fuzz vllm==0.33.0 seed=7 steps=1000 examples=10 new=0 known=0 seconds=1.5"
    )
    assert line(captured.out).endswith("verdict=met exit=0")
    rows = {row["id"]: row["outcome"] for row in json.loads(Path("r/fuzz.json").read_text())["rows"]}
    assert rows == {"SLOT.full": "pass", "REF.count": "pass", "TAIL.hold": "skip"}


def test_a_predicate_that_was_never_exercised_is_undetermined(
    fakes: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.campaign = FakeCampaign(evaluations={"SLOT.full": 5})
    assert cli.run(list(FUZZ)) == 3
    out = capsys.readouterr().out
    assert "never exercised" in out
    assert "verdict=undetermined exit=3" in line(out)


def test_a_new_finding_is_shown_kept_and_failed_on(
    fakes: Engines, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fakes.campaign = FakeCampaign(findings=(FINDING,), evaluations={})
    assert cli.run([*FUZZ, "--out", "kept here"]) == 1
    out = capsys.readouterr().out
    (file,) = (tmp_path / "kept here").iterdir()
    loaded = scenario_file.load(file)
    assert loaded.scenario == SCENARIO
    assert loaded.finding is not None
    assert loaded.finding.identity == VIOLATION.identity
    assert VIOLATION.witness in out, "square brackets are no markup"
    assert SCENARIO.text() in out
    assert f"kvproof replay 'kept here/{file.name}' --on vllm==0.33.0" in out
    assert "new=1 known=0" in line(out)
    assert "verdict=found exit=1" in line(out)


def test_a_finding_is_printed_even_if_it_can_not_be_kept(
    fakes: Engines, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scenario_file, "save", full)
    fakes.campaign = FakeCampaign(findings=(FINDING,))
    assert cli.run(list(FUZZ)) == 1
    captured = capsys.readouterr()
    assert SCENARIO.text() in captured.out
    assert "No space left" in captured.err


@pytest.mark.parametrize("releases", [["0.33.0"], ["0.26.0", "0.33.0"], ">=0.30,<0.34", [">=0.33"], "0.33.0"])
def test_a_known_finding_is_listed_and_not_failed_on(
    fakes: Engines, capsys: pytest.CaptureFixture[str], tmp_path: Path, releases: Any
) -> None:
    record(tmp_path, releases=releases)
    fakes.campaign = FakeCampaign(first_seen={VIOLATION.identity: 3.5})
    assert cli.run(list(FUZZ)) == 0
    out = capsys.readouterr().out
    assert fakes.known == {VIOLATION.identity}
    assert "known: seen in this run (findings/README.md):" in out
    assert "confirmed, PR 1" not in out, "named only, unless --all"
    assert SCENARIO.text() not in out
    assert "new=0 known=1" in line(out)
    assert cli.run([*FUZZ, "--all"]) == 0
    assert SCENARIO.text() in capsys.readouterr().out


def test_a_finding_known_of_other_releases_is_new(fakes: Engines, tmp_path: Path) -> None:
    record(tmp_path, releases=["0.26.0", ">=0.27,<0.33"])
    fakes.campaign = FakeCampaign(findings=(FINDING,))
    assert cli.run(list(FUZZ)) == 1


def test_a_known_finding_that_was_not_seen_is_said(
    fakes: Engines, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record(tmp_path)
    assert cli.run(list(FUZZ)) == 0
    assert "gone: its recorded scenario no longer shows it" in " ".join(capsys.readouterr().out.split())


def test_an_interrupted_fuzz_keeps_what_it_found(fakes: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.campaign = FakeCampaign(interrupted=True)
    assert cli.run(list(FUZZ)) == 130
    assert "interrupted=yes verdict=interrupted exit=130" in line(capsys.readouterr().out)
    fakes.campaign = FakeCampaign(interrupted=True, findings=(FINDING,))
    assert cli.run(list(FUZZ)) == 1
    assert list(Path("kvproof-findings").iterdir())


def test_replay_shows_the_timeline(fakes: Engines, capsys: pytest.CaptureFixture[str], scenario: str) -> None:
    assert cli.run(["replay", scenario, "--on", "vllm==0.33.0", "--findings", "known"]) == 0
    out = capsys.readouterr().out
    assert fakes.replay.text in out
    assert line(out) == "kvproof: replay vllm==0.33.0 steps=2 evaluations=5 violations=0 verdict=met exit=0"


def test_replay_of_a_finding_asks_whether_it_is_there(
    fakes: Engines, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record(tmp_path)
    scenario_file.save(tmp_path / "f.json", SCENARIO, FINDING)
    command = ["replay", "f.json", "--on", "vllm==0.33.0", "--findings", "known"]
    assert cli.run(command) == 0
    assert "reproduced=no" in line(capsys.readouterr().out)
    fakes.replay = FakeReplay(violations=(VIOLATION,))
    assert cli.run(command) == 1, "known or not"
    assert "reproduced=yes" in line(capsys.readouterr().out)


def test_replay_fails_on_what_is_new_only(fakes: Engines, scenario: str, tmp_path: Path) -> None:
    command = ["replay", scenario, "--on", "vllm==0.33.0", "--findings", "known"]
    fakes.replay = FakeReplay(violations=(VIOLATION,))
    assert cli.run(command) == 1
    record(tmp_path)
    assert cli.run(command) == 0
    fakes.replay = FakeReplay(evaluations={})
    assert cli.run(command) == 3


def test_export(fakes: Engines, capsys: pytest.CaptureFixture[str], scenario: str, tmp_path: Path) -> None:
    assert cli.run(["export", scenario, "--as", "text"]) == 0
    assert capsys.readouterr().out == fakes.export
    assert fakes.given == (SCENARIO, None, "")
    scenario_file.save(tmp_path / "f.json", SCENARIO, FINDING)
    assert cli.run(["export", "f.json", "--as", "pytest", "-o", "out/test_it.py"]) == 0
    assert (tmp_path / "out/test_it.py").read_text() == fakes.export
    assert fakes.given == (SCENARIO, VIOLATION, "vllm==0.33.0", 1)
    assert line(capsys.readouterr().out).endswith("exit=0")


def test_a_campaign_with_errors_claims_nothing(fakes: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.campaign = FakeCampaign(errors=("a worker died",))
    assert cli.run(list(FUZZ)) == 3
    out = capsys.readouterr().out
    assert "a worker died" in out
    assert "verdict=error exit=3" in line(out)


CHILD = """
import json, signal, sys, time
mode = sys.argv[1]
print("a line of progress", file=sys.stderr, flush=True)
if mode == "usage":
    print("kvproof: error: there is no vLLM release 9", file=sys.stderr); sys.exit(2)
if mode == "killed":
    import os; os.kill(os.getpid(), signal.SIGKILL)
if mode == "wait":
    try:
        print("waiting", file=sys.stderr, flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        pass
open(sys.argv[2], "w").write(sys.argv[3])
sys.exit(130 if mode == "wait" else 0)
"""


def child_record(**changes: Any) -> str:
    import msgspec

    target = subjects.Target("vllm==0.33.0", "release", "0.33.0")
    made = fuzzing.FuzzRecord(
        target.text,
        "0.33.0",
        1,
        1000,
        10,
        1.5,
        False,
        ["REF", "SLOT"],
        {"SLOT.full": 5, "REF.count": 9},
        {},
        [],
        [],
        [],
    )
    return msgspec.json.encode(msgspec.structs.replace(made, **changes)).decode()


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A stand-in for the fuzz process: a real process of its own that does one thing."""

    def use(mode: str, content: str) -> None:
        def command(subject: str, options: fuzzing.Options, file: Path) -> list[str]:
            own = content.replace('"subject":"vllm==0.33.0"', f'"subject":"{subject}"')
            return [sys.executable, "-c", CHILD, mode, str(file), own]

        monkeypatch.setattr(verify, "_command", command)

    return use


def test_verify_puts_it_all_in_one_report(
    fakes: Engines, child: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    child("ok", child_record())
    assert cli.run(["verify"]) == 0
    captured = capsys.readouterr()
    assert "a line of progress" in captured.err
    assert "catches old" in " ".join(captured.out.split())
    assert "at 7 tokens" not in captured.out
    assert line(captured.out).startswith(
        "kvproof: verify vllm==0.33.0 seed=1 scopes=2 states=6 moves=8 reference-steps=1000 steps=1000"
        " examples=10 new=0 new-on-reference=0 new-on-vllm=0 known=0 "
    )
    report = json.loads(Path("reports/verify.json").read_text())
    assert (report["verdict"], report["exit"], len(report["rows"])) == ("met", 0, 13)
    root = ET.parse("reports/verify.xml").getroot()
    assert [(s.get("name"), s.get("tests"), s.get("skipped")) for s in root] == [
        ("proof", "2", "0"),
        ("invariant spec", "3", "1"),
        ("run", "2", "0"),
        ("invariant reference", "3", "1"),
        ("invariant vllm==0.33.0", "3", "1"),
    ]


def test_verify_fails_on_a_new_finding(
    fakes: Engines, child: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    found = fuzzing.NewFinding(FINDING.to_dict(), "reports/findings/f.json")
    child("ok", child_record(findings=[found], evaluations={}))
    assert cli.run(["verify"]) == 1
    out = capsys.readouterr().out
    assert "kvproof replay reports/findings/f.json --on vllm==0.33.0" in out
    assert "new=2 new-on-reference=1 new-on-vllm=1 known=0" in line(out)
    for subject in ("reference", "vllm==0.33.0"):
        assert f"\n    new on {subject}\n" in out
    failures = ET.parse("reports/verify.xml").getroot().findall(".//failure")
    assert any(SCENARIO.text() in (failure.text or "") for failure in failures)


@pytest.mark.parametrize(
    ("mode", "content", "code", "says"),
    [
        ("usage", "", 2, "there is no vLLM release 9"),
        ("killed", "", 3, "ended without a result (signal 9)"),
        ("ok", "not json", 3, "a checker failed"),
    ],
)
def test_verify_keeps_the_proofs_when_the_fuzz_fails(
    fakes: Engines,
    child: Callable[[str, str], None],
    capsys: pytest.CaptureFixture[str],
    mode: str,
    content: str,
    code: int,
    says: str,
) -> None:
    child(mode, content)
    assert cli.run(["verify"]) == code
    captured = capsys.readouterr()
    assert "slot.ends" in captured.out
    assert says in " ".join(captured.out.split())
    assert (f"kvproof: error: {says}" in captured.err) == (code == 2)
    assert json.loads(Path("reports/verify.json").read_text())["exit"] == code


def test_verify_fuzzes_even_if_the_proofs_can_not_run(
    fakes: Engines, child: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.claims = CheckerError("this kvproof has no kvproof.models.smt")
    child("ok", child_record())
    assert cli.run(["verify"]) == 3
    out = capsys.readouterr().out
    assert "this kvproof has no kvproof.models.smt" in " ".join(out.split())
    assert "SLOT.full" in out


def test_an_interrupt_of_verify_reaches_the_fuzz_once_and_keeps_its_findings(
    fakes: Engines, child: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    child("wait", child_record(interrupted=True, evaluations={"SLOT.full": 5, "REF.count": 2}))

    def say(text: str) -> None:
        if text == "waiting":
            os.kill(os.getpid(), signal.SIGINT)

    report = Report("verify", verify.SUBJECT)
    options = fuzzing.Options(1, 10, None, 1, Path("f"), None)
    verify.verify(report, options, None, say)
    assert report.interrupted
    assert report.exit_code == 130
    assert "SLOT.full" in {row.id for row in report.rows}


def test_what_a_claim_is_called_without_a_second_opinion() -> None:
    assert proofs.row_of(replace(FakeClaim(), second_solver="refuted")).outcome == "undetermined"
    assert proofs.row_of(FakeClaim()).verdict == "proved"


def test_findings_win_over_an_interrupt_and_over_the_environment() -> None:
    fail, open_question = Row("finding", "a", "new", "fail"), Row("invariant", "b", "undetermined", "undetermined")
    assert Report("fuzz", rows=[open_question]).exit_code == 3
    assert Report("fuzz", rows=[open_question], problem="no network").exit_code == 2
    assert Report("fuzz", rows=[open_question], problem="no network", interrupted=True).exit_code == 130
    assert Report("fuzz", rows=[open_question, fail], problem="no network", interrupted=True).exit_code == 1


def test_reports_survive_any_text(tmp_path: Path) -> None:
    rows = [
        Row("finding", "a\x00<b>", "new", "fail", "detail \x1b[31m & more", text="\ud800 lone", subject="vllm@\x01")
    ]
    from kvproof.junit import junit

    root = ET.fromstring(junit(Report("fuzz", "vllm", rows)))
    assert root.find(".//failure") is not None


def test_a_checkout_names_its_release(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("")
    assert subjects.parse(f"vllm@{tmp_path}").release == ""
    (tmp_path / "vllm/_version.py").write_text("__version__ = version = '0.33.1.dev5+gabc'\n")
    assert subjects.parse(f"vllm@{tmp_path}").release == "0.33.1.dev5+gabc"
    (tmp_path / "vllm-0.33.0.dist-info").mkdir()
    target = subjects.parse(f"vllm@{tmp_path}")
    assert (target.kind, target.release, target.path) == ("checkout", "0.33.0", tmp_path.resolve())
    with pytest.raises(UsageError, match="no vLLM checkout"):
        subjects.parse(f"vllm@{tmp_path / 'vllm'}")


def test_the_real_command_helps(tmp_path: Path) -> None:
    done = command("--help", cwd=tmp_path)
    assert done.returncode == 0
    for name in ("verify", "prove", "fuzz", "replay", "export"):
        assert name in done.stdout
        assert command(name, "--help", cwd=tmp_path).returncode == 0
    assert command("--version", cwd=tmp_path).stdout.startswith("kvproof ")


def test_a_reader_that_stops_early_is_no_error_message(tmp_path: Path, scenario: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "kvproof", "export", scenario, "--as", "text"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
