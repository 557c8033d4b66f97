"""What the commands are given instead of the real checkers, so that their own doings can be tested in no time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvproof import engines
from kvproof.spec.config import Config, Group
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.scenario import Action, Scenario

SCENARIO = Scenario(
    Config(groups=(Group("full", 16), Group("mamba", 32)), num_blocks=40, hash_unit=16, step_tokens=64),
    (Action("submit", "r1", length=50, max_tokens=4), Action("step")),
)
VIOLATION = Violation("SLOT.full", "wrong-state", "block 3 [slot 0] holds state@5", (("slot", 0),))
FINDING = Finding(VIOLATION, "vllm==0.33.0", SCENARIO, 1, "7")


@dataclass(frozen=True)
class FakeClaim:
    id: str = "slot.ends"
    statement: str = "a chunk ends on a boundary"
    scope: str = "all sizes"
    premises: tuple[str, ...] = ("the block is positive",)
    verdict: str = "proved"
    expected: str = "proved"
    seconds: float = 0.01
    second_solver: str = "proved"
    premises_satisfiable: bool = True
    counterexample: str = ""
    note: str = ""
    mutant_of: str = ""


@dataclass(frozen=True)
class FakeEntry:
    id: str
    family: str
    statement: str = "it holds"


@dataclass(frozen=True)
class FakeCampaign:
    findings: tuple[Finding, ...] = ()
    evaluations: dict[str, int] = field(default_factory=lambda: {"SLOT.full": 5, "REF.count": 9})
    steps: int = 1000
    examples: int = 10
    seconds: float = 1.5
    coverage: dict[str, int] = field(default_factory=dict)
    seed: int = 7
    interrupted: bool = False
    first_seen: dict[tuple[str, str], float] = field(default_factory=dict)
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class FakeReplay:
    violations: tuple[Violation, ...] = ()
    evaluations: dict[str, int] = field(default_factory=lambda: {"SLOT.full": 5})
    steps: int = 2
    text: str = "step 1: nothing [special] happens"
    error: str = ""
    spoiled: bool = False
    follows: frozenset[tuple[str, str]] = frozenset()


class FakeSubject:
    name = "vllm"

    def families(self) -> frozenset[str]:
        return frozenset({"SLOT", "REF"})

    def lacking(self) -> Mapping[str, str]:
        return {}


def explored(name: str) -> SimpleNamespace:
    """A small world that was visited whole, and nothing broke."""
    return SimpleNamespace(
        scope=SimpleNamespace(name=name), words=lambda: "explored completely: 3 states, 2 moves deep", states=3,
        transitions=4, depth=2, widest=1, seconds=0.5, complete=True, evaluations=Counter({"SLOT.full": 2}),
        taken=Counter(), broken=[], livelocks=[], cramped=0, promised=2, live=True, interrupted=False, unsaved="",
    )  # fmt: skip


class Engines:
    """What the commands are given instead of the real checkers. Anything that is an exception is raised."""

    def __init__(self) -> None:
        self.claims: Any = [
            FakeClaim(),
            FakeClaim(
                "slot.ends/old",
                verdict="refuted",
                expected="refuted",
                second_solver="refuted",
                counterexample="at 7 tokens",
                mutant_of="slot.ends",
            ),
        ]
        self.campaign: Any = FakeCampaign()
        self.replay: Any = FakeReplay()
        self.subject: Any = FakeSubject()
        self.export: Any = "def test_it():\n    pass\n"
        self.given: tuple[Any, ...] = ()
        self.known: frozenset[tuple[str, str]] = frozenset()

    def answer(self, value: Any) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    def export_given(self, *given: Any) -> str:
        self.given = given
        return str(self.answer(self.export))

    def load(self, module: str, name: str) -> Any:
        def run(*_: Any, **options: Any) -> Any:
            self.known = options["known"]
            return self.answer(self.campaign)

        entries = (FakeEntry("SLOT.full", "SLOT"), FakeEntry("REF.count", "REF"), FakeEntry("TAIL.hold", "TAIL"))
        parts: dict[str, Any] = {
            "kvproof.models.smt.prove": lambda *_: self.answer(self.claims),
            "kvproof.invariants.catalogue.CATALOGUE": entries,
            "kvproof.models.stateful.campaign.run": run,
            "kvproof.models.stateful.replay.replay": lambda *_: self.answer(self.replay),
            "kvproof.impl.vllm.subject.VllmSubject": lambda *_: self.answer(self.subject),
            "kvproof.models.explore.scopes.SCOPES": {n: SimpleNamespace(name=n) for n in ("tiny", "at-once")},
            "kvproof.models.explore.search.explore": lambda scope, **_: explored(scope.name),
            "kvproof.spec.machine.subject.MachineSubject": lambda *_: self.answer(self.subject),
            "kvproof.kvexport.export_pytest": lambda *given: self.export_given(*given),
            "kvproof.kvexport.export_text": lambda *given: self.export_given(*given),
        }
        return parts[f"{module}.{name}"]


def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engines:
    """The fakes in place of the checkers, in a folder of the test's own that has an empty folder ``known``."""
    made = Engines()
    monkeypatch.setattr(engines, "load", made.load)
    monkeypatch.setattr("kvproof.impl.vllm.fetch.release_tree", lambda *_, **__: tmp_path)
    monkeypatch.delenv("KVPROOF_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "known").mkdir()
    return made


def record(folder: Path, **changes: Any) -> None:
    data = {
        "invariant": "SLOT.full",
        "cause": "wrong-state",
        "releases": ["0.33.0"],
        "status": "confirmed",
        "reference": "PR 1",
        "reasoning": "seen",
        "scenario": SCENARIO.to_dict(),
    }
    (folder / "known").mkdir(exist_ok=True)
    (folder / "known" / "a.json").write_text(json.dumps({**data, **changes}))


FUZZ = ("fuzz", "vllm==0.33.0", "--seed", "7", "--workers", "1", "--findings", "known")


def line(out: str) -> str:
    return [text for text in out.splitlines() if text.startswith("kvproof: ")][-1]


def command(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvproof", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
