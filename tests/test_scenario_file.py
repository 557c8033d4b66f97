"""Scenario files: a round trip loses nothing, and whatever is wrong with one is said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvproof import scenario_file
from kvproof.spec.config import Config, Group
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.scenario import Action, Scenario, ScenarioError

SCENARIO = Scenario(
    Config(
        groups=(Group("full", 16), Group("mamba", 32), Group("window", 16, window=40)),
        num_blocks=40,
        hash_unit=16,
        step_tokens=64,
        speculative=2,
        retention=None,
    ),
    (
        Action("submit", "r1", length=50, max_tokens=4),
        Action("step", times=2, accept=(1, 0)),
        Action("submit", "r2", base="r1", shared=32, length=60, max_tokens=1, external=16),
        Action("finish", "r1"),
        Action("evict", times=0),
        Action("reset"),
    ),
    note="two turns",
)
FINDING = Finding(
    Violation("SLOT.key", "wrong-state", "slot 0 holds [nothing]", (("slot", 0),)), "vllm", SCENARIO, 3, "7"
)


def data(**changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(SCENARIO.to_dict())), **changes}


def test_a_scenario_comes_back_the_same(tmp_path: Path) -> None:
    file = tmp_path / "deeper" / "s.json"
    scenario_file.save(file, SCENARIO)
    assert scenario_file.load(file) == scenario_file.ScenarioFile(SCENARIO)
    assert [path.name for path in file.parent.iterdir()] == ["s.json"]


def test_a_finding_file_is_a_scenario_file_that_says_what_broke(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    scenario_file.save(file, SCENARIO, FINDING)
    loaded = scenario_file.load(file)
    assert loaded.scenario == SCENARIO
    assert loaded.finding is not None
    assert loaded.finding.identity == FINDING.violation.identity
    assert (loaded.finding.action, loaded.finding.seed, loaded.finding.where) == (3, "7", {"slot": 0})


def test_a_known_finding_is_read_by_its_scenario() -> None:
    record = {"invariant": "SLOT.key", "cause": "wrong-state", "releases": ["0.26.0"], "scenario": SCENARIO.to_dict()}
    loaded = scenario_file.parse(record)
    assert loaded.scenario == SCENARIO
    assert loaded.finding is not None
    assert loaded.finding.identity == ("SLOT.key", "wrong-state")


def changed(path: str, value: Any) -> dict[str, Any]:
    """The good scenario with one value changed; ``path`` leads there, and ``...`` removes it."""
    result = data()
    place: Any = result
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in way:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return result


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([], "expected a JSON object"),
        ({}, "no 'kvproof_scenario' field"),
        (data(kvproof_scenario=2), "written by a newer kvproof: version 2, this one reads up to 1"),
        (data(kvproof_scenario=0), "expected a version number"),
        (data(kvproof_scenario=True), "expected a version number"),
        (data(kvproof_scenario="1"), "expected a version number"),
        (data(extra=1), "unknown field extra"),
        (changed("config.num_blocks", "many"), "Expected int, got str - at $.config.num_blocks"),
        (changed("config.num_blocks", 4.5), "Expected int, got float"),
        (changed("config.eagle", 1), "Expected bool, got int"),
        (changed("config.num_blocks", ...), "missing required field num_blocks"),
        (changed("config.colour", "red"), "unknown field colour"),
        (changed("config.groups.0.kind", "ring"), "Invalid enum value 'ring'"),
        (changed("config.groups.0.size", 3), "unknown field size"),
        (changed("actions.0.kind", "jump"), "Invalid enum value 'jump'"),
        (changed("actions.1.accept", "all"), "Expected array, got str"),
        (changed("actions.0.speed", 3), "unknown field speed"),
        (changed("config.hash_unit", 7), "impossible configuration: hash unit 7 does not divide block 16"),
        (changed("config.num_blocks", 2), "too small for one request"),
        (changed("config.step_tokens", -5), "impossible configuration"),
        (changed("actions.3.request", "r9"), "action 4 (finish): request 'r9' was never submitted before"),
        (changed("actions.2.base", "r9"), "action 3 (submit): base 'r9' was never submitted before"),
        (changed("actions.2.base", "r2"), "base 'r2' was never submitted before"),
        (changed("actions.2.base", ""), "shared tokens without a base"),
        (changed("actions.2.request", "r1"), "'r1' was submitted before"),
        (changed("actions.0.request", ""), "names no request"),
        (changed("actions.0.length", 0), "at least 1"),
        (changed("actions.1.accept", [-1]), "must not be negative"),
        (changed("actions.1.times", 0), "times must be at least 1"),
        (data(finding={"invariant": "A"}), "missing required field cause - at $.finding"),
        (data(finding={"invariant": "A", "cause": "b", "mood": 1}), "unknown field mood"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, bad: Any, says: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(bad))
    with pytest.raises(ScenarioError) as caught:
        scenario_file.load(file)
    message = str(caught.value)
    assert says in message
    assert message.startswith(f"{file}: ")
    assert "\n" not in message


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"hello"])
def test_what_is_not_json_is_said(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    with pytest.raises(ScenarioError, match="is not JSON"):
        scenario_file.load(file)


def test_a_missing_file_or_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="can't read"):
        scenario_file.load(tmp_path / "none.json")
    with pytest.raises(ScenarioError, match="can't read"):
        scenario_file.load(tmp_path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "s.json"
    scenario_file.save(file, SCENARIO)
    before = file.read_bytes()

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        scenario_file.save(file, SCENARIO, FINDING)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["s.json"]
