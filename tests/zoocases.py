"""Faults of the zoo as data, and what stands for the releases that replay them and for the searches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvproof import fuzzing
from kvproof.spec.scenario import Scenario
from kvproof.zoo.fault import Fault
from kvproof.zoo.replays import Shown

SCENARIO = {
    "kvproof_scenario": 1,
    "config": {
        "groups": [{"kind": "full", "block_size": 4}, {"kind": "mamba", "block_size": 4}],
        "num_blocks": 9,
        "hash_unit": 4,
        "step_tokens": 8,
    },
    "actions": [{"kind": "submit", "request": "r1", "length": 5, "max_tokens": 1}, {"kind": "step"}],
}
PAIR: dict[str, Any] = {
    "kvproof_fault": 1,
    "id": "Z01",
    "title": "it breaks",
    "class": "pair",
    "references": ["PR 1"],
    "where": "a.py",
    "explanation": "why",
    "wrong": ["0.26.0", "0.27.0"],
    "right": ["0.25.1", "0.28.0", "0.29.0"],
    "signs": [{"invariant": "SLOT.chunk-end", "cause": "off"}],
    "scenario": SCENARIO,
}
LEFT = {key: value for key, value in PAIR.items() if key not in ("wrong", "right", "signs", "scenario")}
OFF = Shown(seen=[("SLOT.chunk-end", "off", "ends at 5")])


def fault(**changes: Any) -> Fault:
    return msgspec.convert({**PAIR, **changes}, Fault)


def put(folder: Path, data: Mapping[str, Any]) -> Path:
    file = folder / f"{data['id'].lower()}.json"
    file.write_text(json.dumps(data))
    return file


@dataclass
class Releases:
    """Stands for the processes that replay: what a scenario shows on a release, and which were asked."""

    shows: dict[str, Shown] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def replay_all(self, release: str, scenarios: Mapping[str, Scenario], _: Any) -> Iterator[tuple[str, Shown]]:
        if scenarios:
            self.asked.append(release)
        for name in scenarios:
            if release == "interrupt":
                raise KeyboardInterrupt
            yield name, self.shows.get(release, Shown())


def record(*findings: tuple[str, str, float], seconds: float = 60) -> fuzzing.FuzzRecord:
    found = [
        fuzzing.NewFinding({"invariant": i, "cause": c, "scenario": SCENARIO, "witness": "w", "action": 1}, "", seen)
        for i, c, seen in findings
    ]
    return fuzzing.FuzzRecord("vllm==0.27.0", "0.27.0", 1, 10, 1, seconds, False, [], {}, {}, found, [], [])


@dataclass
class Searches:
    finds: dict[float, fuzzing.FuzzRecord] = field(default_factory=dict)
    made: list[tuple[str, float]] = field(default_factory=list)

    def search(self, release: str, seed: int, seconds: float, workers: int, _: Any) -> fuzzing.FuzzRecord:
        self.made.append((release, seconds))
        return self.finds.get(seconds, record())
