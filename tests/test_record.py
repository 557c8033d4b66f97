"""``kvproof record``: what a run has kept becomes a record that the next run knows, and that replays like the file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvproof import cli, findings, recorded, scenario_file
from kvproof.spec.config import Config, Group
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.scenario import Action, Scenario

CONFIG = Config((Group("full", 8), Group("mamba", 8)), num_blocks=8, hash_unit=8, step_tokens=8)
SCENARIO = Scenario(CONFIG, (Action("submit", "r1", length=9, max_tokens=1), Action("step", times=2)))
FINDING = Finding(
    Violation("SLOT.key-content", "full-key-stale", "block 5 is keyed as state@8", (("block", 5), ("group", 1))),
    "vllm==0.26.0",
    SCENARIO,
    1,
    "7",
)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    file = tmp_path / "kept.json"
    scenario_file.save(file, SCENARIO, FINDING)
    return file


def _record(*arguments: object) -> int:
    return cli.run(["record", *map(str, arguments)])


def test_a_kept_file_becomes_a_record_that_runs_know(
    kept: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "known" / "stale.json"
    assert _record(kept, "-o", out) == 0
    assert "SLOT.key-content (full-key-stale) status=unconfirmed releases=0.26.0" in capfd.readouterr().out
    (made,) = findings.load(out.parent)
    assert made.identity == FINDING.violation.identity
    assert (made.releases, made.status, made.where) == (["0.26.0"], "unconfirmed", {"block": 5, "group": 1})
    assert "To be written" in made.reasoning
    assert findings.known_for([made], "0.26.0").identities == {made.identity}
    assert not findings.known_for([made], "0.27.0").identities
    again = scenario_file.load(out)
    assert again.scenario == SCENARIO
    assert again.finding is not None
    assert again.finding.violation().where == FINDING.violation.where


def test_a_checkout_between_releases_is_held_to_what_is_known_of_the_newest(kept: Path, tmp_path: Path) -> None:
    """Else a fault that was mended long ago, and is back, would be listed as known and fail nobody's run."""
    for name, releases in {"old": ("0.26.0",), "new": ("0.9.0", "0.33.0"), "range": ("0.4.*",)}.items():
        out = tmp_path / "known" / f"{name}.json"
        assert _record(kept, "-o", out, *(part for one in releases for part in ("--release", one))) == 0
    for checkout in ("", "0.33.1.dev5+g0a1b2c3", "0.34.0rc1"):
        told = recorded.records_for(tmp_path / "known", checkout)
        assert [Path(one.file).name for one in told] == ["new.json"], checkout
    assert recorded.records_for(tmp_path / "known", "0.34.0") == [], "a new release is looked at anew"
    ranges = [record for record in findings.load(tmp_path / "known") if record.releases == ["0.4.*"]]
    assert findings.known_for(ranges, "").identities, "nothing says which of these is the newest"


def test_what_shows_when_all_is_drained_is_recorded_as_that(kept: Path, tmp_path: Path) -> None:
    assert _record(kept, "-o", tmp_path / "early.json") == 0
    scenario_file.save(kept, SCENARIO, replace(FINDING, action=len(SCENARIO.actions)))
    assert _record(kept, "-o", tmp_path / "late.json") == 0
    for name, drained in (("early", False), ("late", True)):
        data = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        assert data.get("drained", False) is drained
        out = tmp_path / f"test_{name}.py"
        assert cli.run(["export", str(tmp_path / f"{name}.json"), "-o", str(out)]) == 0
        assert ("engine.drain()" in out.read_text(encoding="utf-8")) is drained


def test_what_is_said_of_it_is_in_the_record(kept: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    said = ("--release", "vllm==0.25.1", "--release", ">=0.26,<0.27", "--status", "confirmed")
    assert _record(kept, "-o", out, *said, "--reasoning", "The split.", "--reference", "PR 51113") == 0
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["releases"] == ["0.25.1", ">=0.26,<0.27"]
    assert (data["status"], data["reasoning"], data["reference"]) == ("confirmed", "The split.", "PR 51113")


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ({}, ("--status", "confirmed"), "say with --reasoning"),
        ({}, ("--release", "soon"), "--release: it has an unreadable release range"),
        ({}, ("--release", ""), "--release: it has an empty release range"),
        ({"subject": "vllm@."}, (), "name it with --release"),
        ({"subject": "reference"}, (), "mended, not recorded"),
        (
            {"scenario": replace(SCENARIO, actions=(SCENARIO.actions[0], Action("preempt", "r1")))},
            ("--status", "confirmed", "--reasoning", "seen"),
            "forces preempt",
        ),
    ],
)
def test_what_can_not_be_recorded_is_said_in_a_line(
    kept: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    changes: dict[str, object],
    options: tuple[str, ...],
    says: str,
) -> None:
    found = replace(FINDING, **changes)
    scenario_file.save(kept, found.scenario, found)
    assert _record(kept, "-o", tmp_path / "x.json", *options) == 2
    error = capfd.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x.json").exists()


def test_a_file_without_a_finding_is_not_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scenario_file.save(tmp_path / "s.json", SCENARIO)
    assert _record(tmp_path / "s.json", "-o", tmp_path / "x.json") == 2
    assert "names no finding" in capfd.readouterr().err


def test_nothing_is_overwritten(kept: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = kept.read_bytes()
    assert _record(kept, "-o", kept) == 2
    assert "is there already" in capfd.readouterr().err
    assert kept.read_bytes() == before


def test_a_build_of_a_release_is_recorded_as_that_release(kept: Path, tmp_path: Path) -> None:
    assert _record(kept, "-o", tmp_path / "k/a.json", "--release", "0.26.0+cu128", "--release", ">=0.29") == 0
    (made,) = findings.load(tmp_path / "k")
    assert made.releases == ["0.26.0", ">=0.29"]
    assert findings.known_for([made], "0.26.0+cpu").identities == {made.identity}


def test_on_request_it_goes_to_standard_output(
    kept: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(kept.parent)
    assert _record(kept, "-o", "-") == 0
    assert json.loads(capfd.readouterr().out)["releases"] == ["0.26.0"]
    assert [file.name for file in kept.parent.iterdir()] == [kept.name]


def test_a_name_that_is_too_long_is_a_matter_of_usage(kept: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _record(kept, "-o", kept.parent / ("long" * 100)) == 2
    assert "too long" in capfd.readouterr().err


def test_a_scenario_file_among_records_is_named_as_one(kept: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["fuzz", "vllm==0.33.0", "--steps", "1", "--findings", str(kept.parent)]) == 2
    error = capfd.readouterr().err
    assert "kept.json is a scenario file, not a record: make one with kvproof record" in error


def test_wrong_options_lead_to_the_command_s_own_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["export", "--bogus"]) == 2
    assert "(kvproof export --help lists" in capfd.readouterr().err
