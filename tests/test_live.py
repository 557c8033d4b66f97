"""Assertions inside a vLLM that serves: what they find, what they say, and what they never do."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from kvproof import engines, findings, scenario_file
from kvproof.spec.tracer import State

sys.path.insert(0, str(Path(__file__).parent))
import insiders

sys.path.pop(0)

HERE = Path(__file__).parent
RECORDS = HERE.parent / "findings"


def run(version: str, *arguments: str, **environment: str) -> Any:
    """One play in a process of its own."""
    done = insiders.run(version, HERE / "live_plays.py", *arguments, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


def identities(answer: Any) -> list[tuple[str, str]]:
    return [tuple(found["identity"]) for found in answer["found"]]


SEEDS = {
    "0.26.0": (
        "slot-key-content-full-key-stale-0260.json",
        {("SLOT.chunk-end", "chunk-ends-off-boundary"), ("SLOT.key-content", "full-key-stale")},
    ),
    "0.27.0": (
        "hit-only-recurrent-short-recurrent-short-refused.json",
        {("HIT.only-recurrent-short", "recurrent-short-refused")},
    ),
    "0.30.0": (
        "admit-refused-though-fits-whole-sequence-gate-refuses-what-fits-mamba-with-parti.json",
        {("ADMIT.refused-though-fits", "whole-sequence-gate-refuses-what-fits-mamba-with-partial")},
    ),
}
"""The seed faults S1, S2 and S3, each on a release that has it."""


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["touched", "full"])
@pytest.mark.parametrize("version", sorted(SEEDS))
def test_a_seed_fault_is_told_while_it_happens(version: str, mode: str, tmp_path: Path) -> None:
    file, expected = SEEDS[version]
    answer = run(version, "play", str(_bare(RECORDS / file, tmp_path)), mode)
    assert not answer["errors"]
    assert expected <= set(identities(answer))
    for found in answer["found"]:
        if tuple(found["identity"]) not in expected:
            continue
        assert found["where"].keys() & {"block", "request"}
        assert found["lines"][0].startswith(found["identity"][0])
        if found["identity"][0] == "SLOT.key-content":
            assert found["since"]
            assert found["where"].keys() >= {"block", "slot", "group", "request"}
            assert found["history"]
        _replays(found, version, tmp_path)


def _bare(record: Path, folder: Path) -> Path:
    """The record's scenario as a scenario file."""
    data = json.loads(record.read_text(encoding="utf-8"))["scenario"]
    path = folder / record.name
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def _replays(found: Any, version: str, folder: Path) -> None:
    """What was written down shows the same on a fresh engine."""
    path = folder / "told.json"
    path.write_text(json.dumps(found["scenario"]), encoding="utf-8")
    scenario_file.load(path)
    done = insiders.run(version, HERE / "kvproof_program.py", "replay", str(path), "--on", f"vllm=={version}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert found["identity"][0] in done.stdout
    assert found["identity"][1] in done.stdout


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["touched", "full"])
def test_a_healthy_engine_hears_nothing_but_is_judged(mode: str) -> None:
    answer = run("0.33.0", "healthy", mode)
    assert answer["found"] == []
    assert answer["errors"] == []
    assert answer["engines"] == 4
    judged = {name for name, count in answer["evaluations"].items() if count}
    missing = {
        entry.id
        for entry in engines.catalogue()
        if not answer["lacking"].keys() & {entry.id, entry.id.partition(".")[0]} and entry.id not in judged
    }
    # Nothing is deferred and asked twice with the same arguments in such a run.
    assert missing <= {"ADMIT.deferred", "ADMIT.dry-pure", "ADMIT.dry-real", "REF.queue-shape"} | (
        set() if mode == "full" else {"REF.double-free"}
    ), missing


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize(("version", "mode"), [("0.26.0", "full"), ("0.30.0", "touched"), ("0.33.0", "touched")])
def test_a_watched_engine_sees_what_the_fuzzer_sees(version: str, mode: str) -> None:
    answer = run(version, "differ", mode, "300", "60")
    assert answer["runs"] > 30
    assert answer["steps"] > 1000
    # The driver gives up sooner on engines that starve, so that live assertions may see more.
    assert [one for one in answer["apart"] if one[1] or one[3] or one[4]] == []
    assert len(answer["apart"]) <= 2, answer["apart"]


@pytest.mark.release
@pytest.mark.slow
def test_raise_stops_the_engine_unless_the_fault_is_known(tmp_path: Path) -> None:
    answer = run("0.26.0", "stopped", str(_bare(RECORDS / SEEDS["0.26.0"][0], tmp_path)))
    assert answer["raised"] == "SLOT.chunk-end"
    assert answer["known"]
    assert all(answer["known"])


@pytest.mark.release
@pytest.mark.slow
def test_an_error_in_the_assertions_does_not_touch_the_engine() -> None:
    answer = run("0.33.0", "broken_hook")
    assert len(answer["errors"]) == 1
    assert "a fault of ours" in answer["errors"][0]
    assert answer["found"] == []
    assert answer["left"] == 0
    assert answer["steps"] > 30


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    ["naming:Names:learn", "blockhistory:BlockHistory:note", "story:Story:aborted", "story:Story:reset",
     "keyhistory:KeyHistory:step_starts", "holdings:Holdings:follow"],
)  # fmt: skip
def test_whatever_fails_inside_the_engine_goes_on(where: str) -> None:
    seen = run("0.33.0", "broken_inside", where)
    assert seen["left"] == 0
    assert seen["errors"]
    assert all("a fault of ours" in text for text in seen["errors"])
    assert seen["found"] == []


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["touched", "full"])
def test_methods_are_called_as_ever(mode: str) -> None:
    seen = run("0.33.0", "as_they_are_called", mode)
    assert seen["here"] == 2, "an empty list ends nobody"
    assert (seen["answers"], seen["remaining"]) == (1, True)
    assert "uninstall them first" in seen["twice"]
    assert seen["alone"] == [False, True]
    assert (seen["left"], seen["errors"], seen["found"]) == (0, [], [])


@pytest.mark.release
@pytest.mark.slow
def test_nothing_is_patched_unless_asked_for() -> None:
    answer = run("0.33.0", "untouched", KVPROOF="")
    assert answer["inert"]
    assert answer["patched"]
    assert answer["restored"]
    assert answer["plain after"]
    assert answer["still watched"]
    assert answer["errors"] == []


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("reaction", ["log", "dump"])
def test_the_plug_in_says_what_broke_and_leaves_a_file(reaction: str, tmp_path: Path) -> None:
    file = str(_bare(RECORDS / SEEDS["0.26.0"][0], tmp_path))
    answer = run("0.26.0", "plugged", file, KVPROOF="touched", KVPROOF_REACTION=reaction)
    assert answer["on"]
    assert all(found["known"] for found in answer["found"])
    scenarios = [name for name in answer["files"] if name.endswith(".json")]
    assert len(scenarios) == len(answer["found"])
    if reaction == "log":
        assert "first corrupting write: step" in answer["stderr"]
        assert "replay: kvproof replay" in answer["stderr"]
    else:
        texts = [text for name, text in answer["files"].items() if name.endswith(".txt")]
        assert any("first corrupting write: step" in text for text in texts)
        assert "first corrupting write" not in answer["stderr"]


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"KVPROOF": "fulll"}, "KVPROOF='fulll' means nothing: use one of touched, full"),
        ({"KVPROOF": "full", "KVPROOF_REACTION": "panic"}, "use one of raise, log, dump"),
    ],
)
def test_a_setting_that_means_nothing_is_said_and_the_server_starts(
    settings: dict[str, str], said: str, tmp_path: Path
) -> None:
    answer = run("0.26.0", "plugged", str(_bare(RECORDS / SEEDS["0.26.0"][0], tmp_path)), **settings)
    assert not answer["on"]
    assert said in answer["stderr"]
    assert "Traceback" not in answer["stderr"]


def test_the_first_corrupting_write_is_the_first_after_the_last_right_one() -> None:
    from kvproof.impl.vllm.live.blockhistory import BlockHistory, first_wrong

    right, wrong, worse = State(1 << 22 | 16), State(2 << 22 | 17), State(3 << 22 | 18)
    history = BlockHistory()
    for step, (what, state) in enumerate(
        [("taken", None), ("keyed", right), ("written", right), ("written", wrong), ("written", worse)], 1
    ):
        history.step = step
        history.note(5, what, "r1", state)
    found = first_wrong(history.of(5), right)
    assert found is not None
    assert found.step == 4
    assert found.line() == "step 4: written by r1: state@17#0002"
    assert first_wrong(history.of(5)[:3], right) is None
    never = BlockHistory()
    never.note(5, "keyed", "r1", right)
    never.note(5, "written", "r1", wrong)
    never.note(5, "written", "r1", worse)
    found = first_wrong(never.of(5), right)
    assert found is not None
    assert found.state == wrong


def test_the_past_of_a_large_pool_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvproof.impl.vllm.live import blockhistory

    monkeypatch.setattr(blockhistory, "MOST_BLOCKS", 3)
    history = blockhistory.BlockHistory()
    for block in (1, 2, 3, 1, 4):
        for _ in range(2 * blockhistory.DEPTH):
            history.note(block, "taken", "r1")
    assert history.of(1) == ()
    assert [len(history.of(block)) for block in (2, 3, 4)] == [blockhistory.DEPTH] * 3


def test_records_name_what_the_plug_in_takes_for_known() -> None:
    known = findings.known_for(findings.load(), "0.33.0").identities
    assert ("SLOT.key-content", "full-key-stale") in known


class _Pool:
    """Something to lay methods over."""

    def __init__(self, size: int) -> None:
        self.size = size

    def take(self, count: int, *, of: int = 0, **more: int) -> int:
        return self.size - count - of - sum(more.values())


class _OtherPool(_Pool):
    pass


def test_methods_are_laid_over_one_object_and_over_no_other() -> None:
    from kvproof.impl.vllm.live.overlay import lay_from_birth, wrap

    undo: list[Any] = []
    lay_from_birth(_Pool, undo)
    born, untouched, derived = _Pool(10), _Pool(20), _OtherPool(30)
    undo.pop()()
    late = _Pool(40)
    assert type(late) is _Pool
    assert isinstance(derived, _OtherPool)
    heard: list[Any] = []

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        heard.append(original.__self__.size)
        return original(*args, **kwargs)

    for pool in (born, derived, late):
        wrap(pool, "take", around, undo)
        wrap(pool, "nothing of that name", around, undo)
    assert [pool.take(1) for pool in (born, untouched, derived, late)] == [9, 19, 29, 39]
    assert heard == [10, 30, 40]
    assert vars(born) == {"size": 10}
    for take_off in undo:
        take_off()
    assert [pool.take(1) for pool in (born, untouched, derived, late)] == [9, 19, 29, 39]
    assert len(heard) == 3


def test_a_method_set_on_the_object_is_wrapped_there() -> None:
    from kvproof.impl.vllm.live.overlay import wrap

    undo: list[Any] = []
    pool = _Pool(10)
    own = pool.take = lambda count: -count  # type: ignore[method-assign,assignment,misc]
    wrap(pool, "take", lambda original, count: 100 + original(count), undo)
    assert pool.take(1) == 99
    undo.pop()()
    assert pool.take is own


@pytest.mark.parametrize("born", [True, False])
def test_what_is_copied_or_pickled_is_plain_and_not_watched(born: bool) -> None:
    from kvproof.impl.vllm.live.overlay import lay_from_birth, wrap

    undo: list[Any] = []
    if born:
        lay_from_birth(_Pool, undo)
    pool = _Pool(10)
    for take_off in undo:
        take_off()
    wrap(pool, "take", lambda original, count: 0, [])
    assert pool.take(1) == 0
    for other in (copy.copy(pool), copy.deepcopy(pool), pickle.loads(pickle.dumps(pool))):
        assert type(other) is _Pool
        other.size = 5
        assert other.take(1) == 4


def test_a_method_is_listened_to_behind_its_own_parameters() -> None:
    from types import SimpleNamespace

    from kvproof.impl.vllm.live.overlay import listening

    heard: list[Any] = []
    hooks = SimpleNamespace(changes=0)
    take = listening(
        _Pool(10).take, hooks, "answer < limit.least or hooks.changes != before",
        lambda answer, given: heard.append((answer, given)), limit=SimpleNamespace(least=5),
    )  # fmt: skip
    assert take(1) == take(count=1) == 9
    assert heard == []
    assert take(1, of=2, more=3) == 4
    assert heard == [(4, {"count": 1, "of": 2, "more": 3})]
    with pytest.raises(TypeError):
        take(1, 2)
    with pytest.raises(TypeError):
        take()


def test_a_stand_in_is_what_it_stands_for_but_for_its_answers() -> None:
    from kvproof.impl.vllm.live.calls import StandIn

    pool = _OtherPool(10)
    stand_in: Any = StandIn(pool, {"take": lambda count: -count})
    assert isinstance(stand_in, _OtherPool)
    assert stand_in.__class__ is _OtherPool
    assert (stand_in.take(1), pool.take(1)) == (-1, 9)
    stand_in.size = 20
    assert (stand_in.size, pool.size) == (20, 20)
    assert not hasattr(stand_in, "nothing of that name")
