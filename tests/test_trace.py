"""Recorded traces: written by an engine that serves, judged afterwards."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvproof.impl.vllm.live.sequences import FRESH
from kvproof.trace.checking import check
from kvproof.trace.reader import arrange
from kvproof.trace.rebuilding import Result

sys.path.insert(0, str(Path(__file__).parent))
import insiders

sys.path.pop(0)

HERE = Path(__file__).parent
RECORDS = HERE.parent / "findings"
HEALTHY = "0.33.0"


def play(version: str, *arguments: str) -> Any:
    """One play in a process of its own."""
    done = insiders.run(version, HERE / "trace_plays.py", *arguments, KVPROOF="")
    assert done.returncode == 0, done.stderr[-2000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


def kvproof(*arguments: str | Path, on: str = "") -> subprocess.CompletedProcess[str]:
    """The command; ``on`` a release it is told to, where that has been imported."""
    if on:
        return insiders.run(on, HERE / "kvproof_program.py", *map(str, arguments), "--on", f"vllm=={on}")
    return subprocess.run([sys.executable, "-P", "-m", "kvproof", *map(str, arguments)], capture_output=True, text=True)


def checked(*files: Path) -> Result:
    return check(arrange(files))


def identities(result: Result) -> set[tuple[str, str]]:
    return {found.violation.identity for found in result.found}


def one_line_error(done: subprocess.CompletedProcess[str], *said: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    for part in said:
        assert part in done.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Healthy traffic, one trace by number of blocks and drafts."""
    folder = tmp_path_factory.mktemp("traces")
    assert play(HEALTHY, "healthy", str(folder), "256")["errors"] == []
    named = {}
    for path in sorted(folder.iterdir()):
        config = arrange([path])[0][0].config
        named[f"{config.num_blocks}/{config.speculative}/{config.hash_unit}"] = path
    assert len(named) == 5
    return named


# -- what is found --------------------------------------------------------------------------------------------------

SEEDS = {
    "0.26.0": ("slot-key-content-full-key-stale-0260.json", "full-key-stale"),
    "0.27.0": ("hit-only-recurrent-short-recurrent-short-refused.json", "recurrent-short-refused"),
    "0.30.0": (
        "admit-refused-though-fits-whole-sequence-gate-refuses-what-fits-mamba-with-parti.json",
        "whole-sequence-gate-refuses-what-fits-mamba-with-partial",
    ),
}
"""The seed faults, each on a release that has it: a record, and the cause that a driven engine shows by it."""


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("version", sorted(SEEDS))
def test_a_trace_shows_what_the_assertions_of_the_same_engine_show(version: str, tmp_path: Path) -> None:
    record, cause = SEEDS[version]
    scenario = json.loads((RECORDS / record).read_text(encoding="utf-8"))["scenario"]
    file, traces, known = tmp_path / "scenario.json", tmp_path / "traces", tmp_path / "known"
    file.write_text(json.dumps(scenario), encoding="utf-8")
    known.mkdir()
    answer = play(version, "record", str(file), str(traces))
    (trace,) = traces.iterdir()
    assert answer["errors"] == []
    live = {tuple(identity) for identity in answer["live"]}
    result = checked(trace)
    assert live
    assert identities(result) == live
    for found in result.found:
        if found.violation.invariant == "SLOT.key-content":
            assert found.since
            assert found.history
        assert found.line > 1

    recorded = kvproof("trace", "check", trace)
    assert recorded.returncode in (0, 3)
    assert "known: recorded" in recorded.stdout
    new = kvproof("trace", "check", trace, "--findings", known)
    assert new.returncode == 1
    assert f"line {result.found[0].line}" in new.stdout

    out = tmp_path / "cut.json"
    number = next(n for n, found in enumerate(result.found, 1) if found.violation.cause == cause)
    done = kvproof("trace", "cut", trace, "--finding", str(number), "--out", out, on=version)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"reproduced on vllm=={version}" in done.stdout
    again = kvproof("replay", out, on=version)
    assert again.returncode == 1
    assert cause in again.stdout


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.26.0", "0.30.0", "0.33.0"])
def test_random_traffic_shows_the_same_live_and_afterwards(version: str) -> None:
    answer = play(version, "differ", "500", "60", "256")
    assert answer["apart"] == []
    assert answer["events"] > 10_000
    if version != "0.33.0":
        assert answer["found"] > 10


@pytest.mark.release
@pytest.mark.slow
def test_files_that_begin_amid_a_run_show_nothing_that_was_not_there() -> None:
    answer = play("0.33.0", "differ", "400", "60", "0.04")
    assert answer["parts"] > 100
    assert [one for one in answer["apart"] if one[2] or one[3]] == []


@pytest.mark.release
@pytest.mark.slow
def test_healthy_traffic_shows_nothing_and_is_judged(plain: dict[str, Path]) -> None:
    for path in plain.values():
        result = checked(path)
        assert not result.found
        assert not result.notes
        for rule in ("SLOT.key-content", "SLOT.running-state", "HIT.promises", "REF.references", "ADMIT.exact",
                     "REF.drained", "HIT.resume-boundary"):  # fmt: skip
            assert result.evaluations[rule] > 0, rule
    drafts = checked(plain["200/2/16"])
    assert drafts.coverage["drafts accepted"] > 0
    tight = checked(plain["24/0/16"])
    assert tight.coverage["preemption"] >= tight.coverage["return after preemption"] > 0
    assert tight.coverage["eviction"] > 0
    done = kvproof("trace", "check", plain["200/0/16"])
    assert done.returncode == 0
    assert re.search(r"reset of the cache +never", done.stdout)
    assert "drafts accepted" not in done.stdout, "this engine has none"
    assert re.search(r"ADMIT.deferred +not exercised", done.stdout)


# -- what is written ------------------------------------------------------------------------------------------------


@pytest.mark.release
@pytest.mark.slow
def test_no_token_is_written_and_no_two_files_number_alike(plain: dict[str, Path], tmp_path: Path) -> None:
    text = plain["200/0/16"].read_text(encoding="utf-8")
    numbers = {int(number) for number in re.findall(r"\d+", text.partition("\n")[2])}
    # The engine's prompts are made of some numbers above 100000, its answers of some above 1000000000. What is written
    # instead has 40 bits: one in half a million falls there by chance.
    assert not {n for n in numbers if 90_000 <= n <= 3_000_000 or 1_000_000_000 <= n <= 1_000_100_000}
    assert play(HEALTHY, "healthy", str(tmp_path), "256")["errors"] == []
    first = [line for line in text.splitlines() if line.startswith('["ran"') and "," in line[9:]]
    for other in tmp_path.iterdir():
        digests = set(re.findall(r"\d{10,}", other.read_text(encoding="utf-8")))
        digests = {digest for digest in digests if int(digest) < FRESH}
        assert digests
        assert not digests & {d for d in re.findall(r"\d{10,}", "".join(first)) if int(d) < FRESH}


@pytest.mark.release
@pytest.mark.slow
def test_a_trace_stays_below_its_bound_and_each_file_can_be_checked(tmp_path: Path) -> None:
    assert play(HEALTHY, "long", str(tmp_path), "16", "0.8", "300")["errors"] == []
    files = sorted(tmp_path.iterdir())
    assert [path.suffix for path in files] == [".jsonl", ".1", ".2", ".3"]
    assert sum(path.stat().st_size for path in files) < 850_000
    together = checked(*files)
    assert not together.found
    assert len(together.notes) == 1, "only the first file has a beginning that is not known"
    alone = [checked(path) for path in files]
    for result in alone:
        assert not result.found
        assert result.evaluations["SLOT.key-content"] > 0
    snapshots = sum(result.events for result in alone) - together.events
    assert 0 < snapshots < together.events


@pytest.mark.release
@pytest.mark.slow
def test_a_disk_that_is_full_ends_the_recording_and_not_the_engine(tmp_path: Path) -> None:
    answer = play(HEALTHY, "full_disk", str(tmp_path), "20000")
    assert answer["raised"] == ""
    assert any("the recording ends here" in error for error in answer["errors"])
    (path,) = tmp_path.iterdir()
    result = checked(path)
    assert not result.notes, "no line is torn"
    assert not result.found
    assert result.steps > 3


@pytest.mark.release
@pytest.mark.slow
def test_the_plug_in_records(tmp_path: Path) -> None:
    answer = play(HEALTHY, "plugged", "16", str(tmp_path / "new"))
    assert answer["on"]
    assert "recording to" in answer["stderr"]
    assert not checked(*map(Path, answer["files"])).found
    answer = play(HEALTHY, "plugged", "much", str(tmp_path / "none"))
    assert not answer["on"]
    assert answer["files"] == []
    assert "KVPROOF_TRACE_MB='much' means nothing" in answer["stderr"]


# -- damage ---------------------------------------------------------------------------------------------------------


def changed(path: Path, folder: Path, change: Callable[[list[str]], Any]) -> Path:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    change(lines)
    other = folder / "changed.jsonl"
    other.write_text("".join(lines), encoding="utf-8")
    return other


def nth(lines: list[str], name: str, number: int = 0) -> int:
    return [i for i, line in enumerate(lines) if line.startswith(f'["{name}"')][number]


def other_key(lines: list[str]) -> None:
    at = nth(lines, "key", 3)
    key = json.loads(lines[at])
    key[4] -= 16  # the block is a key for fewer tokens than it holds
    lines[at] = json.dumps(key) + "\n"


def foreign_key(lines: list[str]) -> None:
    keys = [(at, json.loads(line)) for at, line in enumerate(lines) if line.startswith('["key"')]
    at, key = next((at, key) for at, key in keys if key[3] == 1 and key[4] == 64)  # they share 40 tokens
    key[3] = 0
    lines[at] = json.dumps(key) + "\n"


def held_once_more(lines: list[str]) -> None:
    lines.insert(nth(lines, "end", 4), '["hold",1,0,7]\n')


MUTATIONS: dict[str, tuple[Callable[[list[str]], Any], str]] = {
    "a key says other tokens": (other_key, "SLOT."),
    "a key is of another sequence": (foreign_key, "SLOT."),
    "a block is never freed": (lambda lines: lines.pop(nth(lines, "free", 5)), "REF."),
    "a block is held once more": (held_once_more, "REF.references"),
    "a key is lost": (lambda lines: lines.pop(nth(lines, "key", 2)), "HIT.promises"),
}


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MUTATIONS))
@pytest.mark.parametrize("pool", ["200/0/16", "700/0/16"])
def test_a_trace_that_says_otherwise_is_noticed(name: str, pool: str, plain: dict[str, Path], tmp_path: Path) -> None:
    change, expected = MUTATIONS[name]
    result = checked(changed(plain[pool], tmp_path, change))
    assert any(rule.startswith(expected) for rule, _ in identities(result)), identities(result)


@pytest.mark.release
@pytest.mark.slow
def test_a_torn_last_line_is_left_out_with_a_note(plain: dict[str, Path], tmp_path: Path) -> None:
    whole = plain["200/0/16"].read_bytes()
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(whole[: len(whole) * 2 // 3 - 3])
    if torn.read_bytes().endswith(b"\n"):
        torn.write_bytes(torn.read_bytes()[:-2])
    result = checked(torn)
    assert not result.found
    assert len(result.notes) == 1
    assert "torn" in result.notes[0]
    done = kvproof("trace", "check", torn)
    assert done.returncode == 0
    assert "the last line is torn" in " ".join(done.stdout.split())


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('["key",1,0,\n', "not JSON"),
        ("garbage\n", "not JSON"),
        ("[" * 100_000 + "\n", "not JSON"),
        ('{"a":1}\n', "it is no event"),
        ('["dance",1]\n', "there is no event 'dance'"),
        ('["free",99999,0,0]\n', "free does not fit what came before"),
        ('["key",3,0,99,16,0,16,-1]\n', "key does not fit what came before"),
        ('["end"]\n', "end does not fit what came before"),
        ('["ran",1,[[77,[5]]]]\n', "ran does not fit what came before"),
    ],
)
def test_a_damaged_line_is_one_line_of_error(line: str, said: str, plain: dict[str, Path], tmp_path: Path) -> None:
    at = 20
    file = changed(plain["200/0/16"], tmp_path, lambda lines: lines.insert(at - 1, line))
    one_line_error(kvproof("trace", "check", file), f"line {at} is damaged", said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b"\x00\x01\xff", "not a kvproof trace"),
        (b'{"kvproof_scenario":1}\n', "KVPROOF=record writes one"),
        (b'{"kvproof_trace":2}\n', "schema 2, this kvproof reads 1: upgrade kvproof"),
        (b'{"kvproof_trace":0}\n', "schema 0"),
        (b'{"kvproof_trace":1,"run":"x"}\n', "its header is damaged"),
        (b"[1]\n", "not a kvproof trace"),
        (b"[" * 100_000 + b"\n", "not a kvproof trace"),
        (b"\x1f\x8b\x08\x00\n", "gunzip it first"),
    ],
)
def test_what_is_no_trace_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "file.jsonl"
    file.write_bytes(content)
    for command in (["trace", "check"], ["trace", "cut", "--finding", "1"], ["why"]):
        one_line_error(kvproof(*command, file), said, "file.jsonl")
    one_line_error(kvproof("trace", "check", tmp_path / "none"), "can't read")


# -- short hits, and cutting ----------------------------------------------------------------------------------------


@pytest.mark.release
@pytest.mark.slow
def test_short_hits_are_summed_up(plain: dict[str, Path], tmp_path: Path) -> None:
    done = kvproof("why", plain["200/0/16"])
    assert done.returncode == 0
    assert "mamba, unique-part: 1 lookups fell short by 32 tokens in all" in done.stdout
    assert "a1's lookup of 97 tokens answers 0" in done.stdout
    assert "  a1: 32 of 97 tokens (mamba, unique-part)" in done.stdout
    assert done.stdout.splitlines()[-1] == "kvproof: why requests=12 short=1 lost=32 exit=0"
    one_line_error(
        kvproof("why", changed(plain["200/0/16"], tmp_path, lambda lines: lines.insert(5, '["miss",0,{}]\n'))), "line 6"
    )


@pytest.mark.release
@pytest.mark.slow
def test_a_finding_that_is_not_there_can_not_be_cut(plain: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "cut.json"
    one_line_error(
        kvproof("trace", "cut", plain["200/0/16"], "--finding", "1", "--out", out),
        "there is no finding 1",
        "no finding",
    )
    assert not out.exists()


@pytest.mark.release
@pytest.mark.slow
def test_a_scenario_of_a_trace_says_where_it_begins(plain: dict[str, Path], tmp_path: Path) -> None:
    file = changed(plain["200/0/16"], tmp_path, foreign_key)
    out = tmp_path / "cut.json"
    done = kvproof("trace", "cut", file, "--finding", "1", "--out", out)
    assert done.returncode == 0
    assert "since the engine's start" in done.stdout
    assert "not tried; kvproof replay" in done.stdout
    actions = json.loads(out.read_text(encoding="utf-8"))["actions"]
    assert [a["request"] for a in actions if a["kind"] == "submit"] == ["r1", "r2"]
    assert actions[2] == {"kind": "submit", "request": "r2", "base": "r1", "shared": 40, "length": 97, "max_tokens": 20}
    done = kvproof("trace", "cut", file, "--finding", "1", "--out", out, on=HEALTHY)
    assert done.returncode == 3
    assert f"not reproduced on vllm=={HEALTHY}" in done.stdout


@pytest.mark.release
@pytest.mark.slow
def test_a_short_prompt_sent_twice_is_no_finding(tmp_path: Path) -> None:
    assert play(HEALTHY, "twice", str(tmp_path)) == {"errors": [], "raised": "", "stderr": ""}
    result = checked(*tmp_path.iterdir())
    assert not result.found
    assert result.evaluations["SLOT.exclusive-write"]
