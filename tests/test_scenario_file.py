"""Scenario files: a round trip loses nothing, and whatever is wrong with one is said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvproof import scenario_file
from kvproof.spec.config import BOUNDS, Config, Group
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
    Violation("SLOT.key-content", "wrong-state", "slot 0 holds [nothing]", (("slot", 0),)), "vllm", SCENARIO, 3, "7"
)


def data(**changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(SCENARIO.to_dict())), **changes}


def test_half_a_character_does_not_cost_the_rest() -> None:
    assert scenario_file.encoded({"a": "x\udcff", "n": 1}) == b'{"a": "x?", "n": 1}'


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
    record = {
        "invariant": "SLOT.key-content",
        "cause": "wrong-state",
        "releases": ["0.26.0"],
        "scenario": SCENARIO.to_dict(),
    }
    loaded = scenario_file.parse(record)
    assert loaded.scenario == SCENARIO
    assert loaded.finding is not None
    assert loaded.finding.identity == ("SLOT.key-content", "wrong-state")


@pytest.mark.parametrize("signs", [5, "x", [5], {"cause": "c"}, None])
def test_a_fault_whose_signs_are_something_else_is_refused(tmp_path: Path, signs: Any) -> None:
    file = tmp_path / "z01.json"
    file.write_text(json.dumps({"kvproof_fault": 1, "signs": signs, "scenario": data()}))
    with pytest.raises(ScenarioError, match=r"z01\.json: Expected .*, got .* - at \$\.signs"):
        scenario_file.load(file)


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
        (data(kvproof_scenario=2), "written by a newer kvproof: version 2, this one reads up to 1: upgrade kvproof"),
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
        (changed("config.num_blocks", 10**12), "num_blocks is 1000000000000: at most 1048576 is driven"),
        (changed("config.max_model_len", 2**20 + 1), "max_model_len is 1048577: at most 1048576 is driven"),
        (changed("config.step_tokens", 2**30), "step_tokens is 1073741824: at most 1048576 is driven"),
        (changed("config.hash_unit", 2**17), "hash_unit is 131072: at most 65536 is driven"),
        (changed("config.max_running", 10**6), "max_running is 1000000: at most 16384 is driven"),
        (changed("config.speculative", 5000), "speculative is 5000: at most 1024 is driven"),
        (changed("config.load_steps", 10**9), "load_steps is 1000000000: at most 1024 is driven"),
        (changed("config.retention", 2**40), "retention is 1099511627776: at most 1048576 is driven"),
        (changed("config.long_prefill_threshold", 2**40), "long_prefill_threshold is 1099511627776: at most"),
        (changed("config.checkpoint_alignment", 2**40), "checkpoint_alignment is 1099511627776: at most"),
        (changed("config.checkpoint_alignment", -4), "checkpoint_alignment must not be negative"),
        (changed("config.groups.1.block_size", 2**17), "block_size of group 1 is 131072: at most 65536 is driven"),
        (changed("config.groups.2.window", 2**21), "window of group 2 is 2097152: at most 1048576 is driven"),
        (changed("config.groups.0.window", 8), "group 0 is a full group with window 8: only window groups have one"),
        (changed("config.groups", [{"kind": "full", "block_size": 16}] * 33), "33 groups: at most 32 are driven"),
        (
            changed("config.groups", [{"kind": "full", "block_size": 16 * n} for n in (61, 67, 71, 73)]),
            "the groups' block sizes have no common multiple up to 1048576",
        ),
        (changed("actions.0.length", 10**9), "action 1 (submit): length is 1000000000: at most 1048576"),
        (changed("actions.0.length", 1024), "length is 1024: engines refuse a prompt that leaves no room for a token"),
        (changed("actions.0.max_tokens", 10**9), "max_tokens is 1000000000: at most 1048576"),
        (changed("actions.1.times", 10**9), "action 2 (step): times is 1000000000: at most 65536"),
        (changed("actions.1.accept", [1] * 2000), "accept has 2000 entries: at most 1024"),
        (changed("actions.1.accept", [10**9]), "accept has 1000000000: numbers must not be negative, and at most 1024"),
        (changed("actions.2.external", 10**9), "external is 1000000000: at most 1048576"),
        (changed("actions.2.shared", 55), "shared is 55: r1 has at most 54 tokens, its prompt and its output"),
        (
            changed("actions.0.request", "r1\n2"),
            "request 'r1\\n2': a name has at most 100 characters, all of them print",
        ),
        (changed("actions.0.request", "\x1b[2J"), "request '\\x1b[2J': a name has"),
        (changed("actions.0.request", "\ud800"), "request '\\ud800': a name has"),
        (changed("actions.0.request", "r" * 101), "a name has at most 100 characters"),
        (data(actions=[{"kind": "step"}] * 10_001), "it has 10001 actions: at most 10000 are run"),
        (data(finding={"invariant": "A"}), "missing required field cause - at $.finding"),
        (data(finding={"invariant": "A.b", "cause": "c"}), "there is no invariant 'A.b' (of a newer kvproof?"),
        (
            data(finding={"invariant": "SLOT.key-content", "cause": "c", "action": 7}),
            "its finding is at action 7, counted from 0: it has 6 actions",
        ),
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


def test_the_bounds_themselves_are_fine() -> None:
    groups = (Group("full", 65_536), Group("mamba", 65_536), Group("window", 65_536, window=2**20))
    bounds = {name: most for name, most in BOUNDS.items() if name != "long_prefill_threshold"}
    for own in (
        {"connector": "async", "offload_after": 0},
        {"connector": "offload", "offer_delay": 0, "send_steps": 0},
    ):
        config = Config(groups=groups, **{**bounds, "eagle": True, **own})  # type: ignore[arg-type]
        assert config.problem() is None
    actions = (Action("submit", "r1", length=2**20 - 1, max_tokens=2**20), Action("step", times=65_536))
    assert scenario_file.parse(Scenario(config, actions).to_dict()).scenario.actions == actions


def test_all_prompts_together_are_bounded_in_whole_blocks() -> None:
    submits = [Action("submit", f"r{n}", length=1, max_tokens=1) for n in range(65)]
    config = Config(groups=(Group("full", 65_536),), num_blocks=9, hash_unit=16, step_tokens=64)
    assert scenario_file.parse(Scenario(config, tuple(submits[:64])).to_dict())
    with pytest.raises(
        ScenarioError, match=r"action 65 \(submit\): the prompts have more than 4194304 tokens together"
    ):
        scenario_file.parse(Scenario(config, tuple(submits)).to_dict())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it is not JSON: it is empty"),
        (b" \n", "it is not JSON: it is empty"),
        (b"\xef\xbb\xbf", "it is not JSON: it is empty"),
        (b"{", "it is not JSON: Expecting property name"),
        (b"\xff\xfe", "it is not JSON: not UTF-8 text (byte 1): save it as UTF-8"),
        (b"hello", "it is not JSON: Expecting value"),
        (b"[" * 100_000, "it is not a kvproof scenario: nested too deeply"),
        (b'{"a":' * 5_000, "it is not a kvproof scenario: nested too deeply"),
        (b'{"config": 1, "config": 1}', "'config' is there twice in one object: keep one of them"),
        (b'{"kvproof_scenario": 1, "x": [{"b": 1, "c": 2, "b": 1}]}', "'b' is there twice"),
        (
            b'{"kvproof_scenario": ' + b"9" * 5000 + b"}",
            "a number of 5000 digits (999999999999999999\u2026): no field takes",
        ),
        (b'{"kvproof_scenario": NaN}', "NaN is no number that a field takes"),
        (b'{"kvproof_scenario": 1e999}', "1e999 is no number that a field takes"),
        (b" " * 16_000_001, "not a kvproof scenario: larger than 16 MB"),
    ],
)
def test_what_is_no_strict_json_is_said(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    with pytest.raises(ScenarioError) as caught:
        scenario_file.load(file)
    assert str(caught.value).startswith(f"{file}: {says}")
    assert "\n" not in str(caught.value)


def test_a_deep_value_is_refused_wherever_it_is(tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    for depth in (100, 300, 500, 900):
        deep = "[" * depth + "]" * depth
        file.write_text(json.dumps(data(note="here")).replace('"here"', deep))
        with pytest.raises(ScenarioError, match=r"Expected str, got array|nested too deeply"):
            scenario_file.load(file)
        file.write_text(f'{{"invariant": {deep}, "cause": "c", "scenario": {{"actions": {deep}}}}}')
        with pytest.raises(ScenarioError):
            scenario_file.load(file)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps(data()), encoding="utf-8-sig")
    assert scenario_file.load(file).scenario == SCENARIO


def test_a_missing_file_or_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="can't read"):
        scenario_file.load(tmp_path / "none.json")
    with pytest.raises(ScenarioError, match="can't read"):
        scenario_file.load(tmp_path)
    with pytest.raises(ScenarioError, match="larger than 16 MB"):
        scenario_file.load(Path("/dev/zero"))


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
