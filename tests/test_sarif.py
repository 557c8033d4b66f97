"""SARIF: what becomes a result, with the scenario as its code flow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvproof import scenario_file
from kvproof.invariants.catalogue import by_id
from kvproof.report import Report, Row
from kvproof.sarif import sarif
from kvproof.spec.config import Config, Group
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.scenario import Action, Scenario

SCENARIO = Scenario(
    Config((Group("full", 4), Group("mamba", 8)), 20, 4, 12),
    (Action("submit", "a", length=20, max_tokens=4), Action("step", times=2), Action("abort", "a")),
)
VIOLATION = Violation("REF.references", "count-exceeds-holders", "block 3 has 2 references and 1 holder")


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.chdir(tmp_path)
    finding = Finding(VIOLATION, "vllm==0.33.0", SCENARIO, 2)
    scenario_file.save(Path("kept/found.json"), SCENARIO, finding)
    report = Report("fuzz", "vllm==0.33.0")
    data = {**finding.to_dict(), "file": "kept/found.json"}
    report.rows = [
        Row("invariant", "REF.queue", "fuzzed, holds", "pass"),
        Row("invariant", "REF.references", "broken", "fail"),
        Row("finding", "REF.references count-exceeds-holders", "new", "fail", VIOLATION.witness, data=data),
        Row("finding", "SLOT.key-content full-key-stale", "known", "info", "on record"),
        Row("invariant", "TAIL.one-hold", "undetermined", "undetermined", "never exercised"),
    ]
    made = json.loads(sarif(report))
    assert made["version"] == "2.1.0"
    (run,) = made["runs"]
    return run


def test_what_holds_is_no_result(result: dict) -> None:
    told = [(one["ruleId"], one["level"], one["baselineState"]) for one in result["results"]]
    assert told == [
        ("REF.references", "error", "new"),
        ("SLOT.key-content", "note", "unchanged"),
        ("TAIL.one-hold", "warning", "unchanged"),
    ]
    rules = {rule["id"]: rule for rule in result["tool"]["driver"]["rules"]}
    assert rules.keys() == {rule for rule, _, _ in told}
    assert rules["REF.references"]["shortDescription"]["text"] == by_id("REF.references").statement


def test_the_scenario_is_the_code_flow_at_the_lines_of_its_file(result: dict) -> None:
    (flow,) = result["results"][0]["codeFlows"]
    steps = [step["location"] for step in flow["threadFlows"][0]["locations"]]
    assert [step["message"]["text"] for step in steps][:2] == [str(action) for action in SCENARIO.actions[:2]]
    assert VIOLATION.witness in steps[-1]["message"]["text"]
    lines = Path("kept/found.json").read_text().splitlines()
    for step, action in zip(steps, SCENARIO.actions, strict=True):
        place = step["physicalLocation"]
        assert place["artifactLocation"]["uri"] == "kept/found.json"
        assert f'"kind": "{action.kind}"' in lines[place["region"]["startLine"] - 1]


@pytest.mark.parametrize(
    ("file", "uri"),
    [
        ("kept/a b#c%41?é.json", "kept/a%20b%23c%2541%3F%C3%A9.json"),
        ("a:b.json", "a%3Ab.json"),
        ("../x.json", "../x.json"),
        ("/tmp/a b\udcff\n.json", "file:///tmp/a%20b%FF%0A.json"),
    ],
)
def test_the_name_of_a_file_is_a_proper_uri_whatever_it_is(file: str, uri: str) -> None:
    report = Report("fuzz", "spec")
    report.rows = [Row("finding", "REF.references x", "new", "fail", data={"file": file})]
    (run,) = json.loads(sarif(report))["runs"]
    assert run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == uri


def test_every_location_names_a_file_and_a_line(result: dict) -> None:
    """Hosts refuse results that are nowhere."""
    for one in result["results"]:
        (place,) = one["locations"]
        assert place["physicalLocation"]["artifactLocation"]["uri"]
        assert place["physicalLocation"]["region"]["startLine"] >= 1
        assert one["partialFingerprints"]
