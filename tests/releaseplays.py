"""Scenarios on real releases: one process per release, which imports it once and forks for each set of scenarios.

So what a test does to a release stays in a process of its own.
"""

from __future__ import annotations

import atexit
import functools
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from kvproof.spec.scenario import Scenario

SERVE = """
import json, os, sys, traceback
from kvproof import subjects
from kvproof.models.stateful.replay import replay
from kvproof.scenario_file import parse

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
subject = subjects.open_subject(subjects.parse("vllm==" + sys.argv[1]), lambda line: None)


def played(spoil, plays):
    exec(spoil, {})
    seen = {}
    for name, data in plays.items():
        one = replay(subject, parse(data).scenario)
        assert not one.error, f"{name}: {one.error}"
        seen[name] = [sorted({v.identity for v in one.violations}), dict(one.evaluations), one.text]
    return seen


for line in sys.stdin:
    child = os.fork()
    if not child:
        try:
            answer = played(*json.loads(line))
        except BaseException:
            answer = traceback.format_exc()
        print(json.dumps(answer), file=answers, flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(json.dumps("the process died"), file=answers, flush=True)
"""
KEPT = 4
"""Releases that stay imported, the last ones asked: each takes half a gigabyte."""

_servers: dict[str, subprocess.Popen[str]] = {}


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
    server = _server(release)
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps([spoil, json.loads(plays)]), file=server.stdin, flush=True)
    said = server.stdout.readline()
    assert said, f"vLLM {release} did not start (exit code {server.wait()})"
    answers = json.loads(said)
    assert not isinstance(answers, str), answers
    return {
        name: Seen(frozenset((i, c) for i, c in broken), judged, text)
        for name, (broken, judged, text) in answers.items()
    }


def _server(release: str) -> subprocess.Popen[str]:
    server = _servers.pop(release, None)
    while len(_servers) >= KEPT:
        _stop(next(iter(_servers)))
    if server is None:
        command = [sys.executable, "-c", SERVE, release]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    _servers[release] = server
    return server


def _stop(release: str) -> None:
    server = _servers.pop(release)
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


@atexit.register
def _stop_all() -> None:
    for release in list(_servers):
        _stop(release)
