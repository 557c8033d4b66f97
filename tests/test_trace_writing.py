"""What a recorded trace is written with: numbers in the place of tokens, and files that stay whole."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvproof.impl.vllm.live.sequences import FRESH, Sequences
from kvproof.impl.vllm.live.tracefile import TraceFile


def request(name: str, tokens: list[int], unit: int = 4) -> Any:
    made = SimpleNamespace(request_id=name, all_token_ids=tokens, block_hashes=[])
    rehash(made, unit)
    return made


def rehash(made: Any, unit: int = 4) -> None:
    made.num_tokens = len(made.all_token_ids)
    whole = range(len(made.block_hashes) + 1, made.num_tokens // unit + 1)
    made.block_hashes += [repr(made.all_token_ids[: n * unit]).encode() for n in whole]


def test_numbers_are_equal_exactly_where_prefixes_are() -> None:
    told: list[tuple[Any, ...]] = []
    sequences = Sequences(4, lambda *line: told.append(line))
    first = sequences.learn(request("a", [1, 2, 3, 4, 5, 6, 7]))
    second = sequences.learn(request("b", [1, 2, 3, 4, 5, 9, 9, 9]))
    assert told == [("seq", 0, "a", -1, 0, 7), ("seq", 1, "b", 0, 5, 8)]
    assert first.said[:5] == second.said[:5]
    assert not set(first.said[5:]) & set(second.said[5:])
    assert len(set(second.said)) == 8, "the same token elsewhere has another number"


def test_an_answer_that_somebody_asks_with_has_the_numbers_of_his_prompt() -> None:
    sequences = Sequences(4, lambda *line: None)
    early = sequences.learn(request("early", [1, 2, 3, 4, 5]))
    asked = sequences.learn(request("asked", [1, 2, 3, 4, 5, 6, 7, 8]))
    late = sequences.learn(request("late", [1, 2, 3, 4, 5]))
    for sequence in (early, late):
        assert sequences.sampled(sequence, [6, 7], True) == list(asked.said[5:7])
        assert sequences.sampled(sequence, [8, 9], False)[0] == asked.said[7]
    own = [sequences.sampled(sequence, [70], True) for sequence in (early, late)]
    assert own[0] == own[1]
    assert own[0][0] < FRESH
    apart = sequences.learn(request("apart", [5, 2, 3, 4, 5, 6, 7, 70]))
    assert apart.said[7] != own[0][0]


def test_prompts_shorter_than_a_hash_unit_that_agree_are_known_to() -> None:
    told: list[tuple[Any, ...]] = []
    sequences = Sequences(8, lambda *line: told.append(line))
    first = sequences.learn(request("a", [1, 2, 3, 4, 5, 6, 7], unit=8))
    apart = sequences.learn(request("b", [1, 2, 3, 9, 5, 6, 7], unit=8))
    again = sequences.learn(request("c", [1, 2, 3, 4, 5, 6, 7], unit=8))
    assert told[1:] == [("seq", 1, "b", 0, 3, 7), ("seq", 2, "c", 0, 7, 7)]
    answers = [sequences.sampled(sequence, [8, 9], True) for sequence in (first, apart, again)]
    assert answers[0] == answers[2]
    assert not set(answers[0]) & set(answers[1])


def test_the_one_that_agrees_most_is_the_base_also_beyond_the_last_hash() -> None:
    told: list[tuple[Any, ...]] = []
    sequences = Sequences(4, lambda *line: told.append(line))
    system = [1, 2, 3, 4]
    sequences.learn(request("a", [*system, 5, 6, 7]))
    near = sequences.learn(request("b", [*system, 8, 8, 8]))
    again = sequences.learn(request("c", [*system, 8, 8, 8]))
    assert told[2] == ("seq", 2, "c", 1, 7, 7)
    assert sequences.sampled(near, [3], True) == sequences.sampled(again, [3], True)
    sequences.forget("b")
    sequences._limit = 0
    sequences.tidy([])
    sequences.learn(request("d", [*system, 8, 8]))
    assert told[-1] == ("seq", 3, "d", 2, 6, 6)


def test_what_the_cache_has_nothing_of_is_forgotten() -> None:
    told: list[tuple[Any, ...]] = []
    sequences = Sequences(4, lambda *line: told.append(line))
    sequences._limit = 10
    kept, dropped = request("kept", [1, 2, 3, 4]), request("dropped", [5, 6, 7, 8])
    for one in (kept, dropped):
        sequences.learn(one)
        sequences.forget(one.request_id)
    sequences.tidy([kept.block_hashes[0] + bytes(4)])
    assert told[-1] == ("forget", [1]) or told[-1][0] == "seq"
    sequences._limit = 5
    sequences.tidy([kept.block_hashes[0] + bytes(4)])
    assert told[-1] == ("forget", [1])
    assert sequences.state(kept.block_hashes[0] + bytes(4))[:3] == (0, 4, 0)
    assert sequences.state(dropped.block_hashes[0] + bytes(4))[0] == -1


def test_a_file_never_has_half_a_line_and_begins_with_its_header(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    file = TraceFile(path, 4_000, {"subject": "none"}, lambda: [["snapshot", 1]])
    for step in range(500):
        file.write([["end", step, 0, 0, []]])
    file.close()
    parts = [path, *(Path(f"{path}.{n}") for n in (1, 2, 3))]
    heads = [json.loads(part.read_text(encoding="utf-8").splitlines()[0]) for part in parts]
    assert [head["part"] for head in heads] == list(range(heads[0]["part"], heads[0]["part"] - 4, -1))
    assert len({head["run"] for head in heads}) == 1
    lines = [line for part in reversed(parts) for line in part.read_text(encoding="utf-8").splitlines()]
    steps = [json.loads(line)[1] for line in lines if line.startswith('["end"')]
    assert steps == list(range(steps[0], 500))
    assert sum(part.stat().st_size for part in parts) < 5_000
    assert path.stat().st_mode & 0o077 == 0, "for nobody else to read"
    with pytest.raises(FileExistsError):
        TraceFile(path, 4_000, {}, lambda: [])
