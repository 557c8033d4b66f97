"""Scenarios on real releases: one process per release and set of scenarios, since a release is imported once."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from kvproof.spec.scenario import Scenario

PLAY = """
import json, sys
from kvproof import subjects
from kvproof.models.stateful.replay import replay
from kvproof.scenario_file import parse
release, spoil, plays = json.load(sys.stdin)
subject = subjects.open_subject(subjects.parse("vllm==" + release), lambda line: None)
exec(spoil)
seen = {}
for name, data in plays.items():
    played = replay(subject, parse(data).scenario)
    assert not played.error, played.error
    seen[name] = [sorted({v.identity for v in played.violations}), dict(played.evaluations), played.text]
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
    asked = json.dumps([release, spoil, json.loads(plays)])
    done = subprocess.run([sys.executable, "-c", PLAY], input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    return {
        name: Seen(frozenset((i, c) for i, c in broken), judged, text)
        for name, (broken, judged, text) in answers.items()
    }
