"""Scenarios on real releases, each set of them in a process of its own: what a test does to a release stays there."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvproof.spec.scenario import Scenario

sys.path.insert(0, str(Path(__file__).parent))
import insiders

sys.path.pop(0)

PLAY = """
import json, sys
from kvproof import subjects
from kvproof.models.stateful.replay import replay
from kvproof.scenario_file import parse

spoil, plays = json.load(sys.stdin)
subject = subjects.open_subject(subjects.parse("vllm==" + sys.argv[1]), lambda line: None)
exec(spoil, {})
seen = {}
for name, data in plays.items():
    one = replay(subject, parse(data).scenario)
    assert not one.error, f"{name}: {one.error}"
    seen[name] = [sorted({v.identity for v in one.violations}), dict(one.evaluations), one.text]
print(json.dumps(seen))
"""


@dataclass(frozen=True)
class Seen:
    """What one scenario showed: identities of violations, how often each rule was judged, and the timeline."""

    broken: frozenset[tuple[str, str]]
    judged: Mapping[str, int]
    text: str

    def ids(self) -> set[str]:
        return {invariant for invariant, _ in self.broken}


def play(release: str, scenarios: Mapping[str, Scenario], spoil: str = "") -> dict[str, Seen]:
    """All ``scenarios`` on ``release``, after ``spoil`` was done to it (Python source). Remembered."""
    return _play(release, json.dumps({name: one.to_dict() for name, one in scenarios.items()}), spoil)


@functools.cache
def _play(release: str, plays: str, spoil: str) -> dict[str, Seen]:
    done = insiders.run(release, PLAY, release, given=json.dumps([spoil, json.loads(plays)]))
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    return {
        name: Seen(frozenset((i, c) for i, c in broken), judged, text)
        for name, (broken, judged, text) in answers.items()
    }
