"""A search on a local Ray cluster finds what forked workers find, and losing a worker loses nothing."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from kvproof import fuzzing, spread, subjects
from kvproof.errors import UsageError
from kvproof.models.stateful import campaign
from kvproof.models.stateful.campaign import Campaign

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.release]

SUBJECT = "vllm==0.30.0"
STEPS = 120


def on_ray(killed: Path | None = None) -> Campaign:
    """A campaign on two Ray workers; with ``killed`` the first process that says it works is killed, once."""
    subject = subjects.open_subject(subjects.parse(SUBJECT), print)

    class Mailbox(spread._Mailbox):
        def post(self, worker: int, kind: str, value: object) -> None:
            if kind == "process" and killed is not None and not killed.exists():
                killed.touch()
                threading.Timer(4.0, os.kill, (int(str(value)), signal.SIGKILL)).start()
            super().post(worker, kind, value)

    right, spread._Mailbox = spread._Mailbox, Mailbox  # type: ignore[misc]
    try:
        with spread.ray_workers("local", SUBJECT, 2, print) as workers:
            found = campaign.run(subject, seed=3, steps=STEPS, workers=2, spread=workers)
    finally:
        spread._Mailbox = right  # type: ignore[misc]
    return found


def identities(found: Campaign) -> set[tuple[str, str]]:
    return {finding.violation.identity for finding in found.findings}


def test_ray_finds_what_forked_workers_find(tmp_path: Path) -> None:
    subject = subjects.open_subject(subjects.parse(SUBJECT), print)
    here = campaign.run(subject, seed=3, steps=STEPS, workers=2)
    there = on_ray()
    assert there.errors == ()
    assert identities(here)
    assert {f.violation.identity: f.scenario for f in there.findings} == {
        f.violation.identity: f.scenario for f in here.findings
    }
    assert (there.steps, there.examples) == (here.steps, here.examples)
    killed = on_ray(killed=tmp_path / "killed")
    assert (tmp_path / "killed").exists()
    assert killed.errors == ()
    assert identities(killed) == identities(here)


def test_workers_on_ray_share_a_campaign(tmp_path: Path) -> None:
    def run(known: Path | None = None) -> fuzzing.FuzzRecord:
        options = fuzzing.Options(3, STEPS, None, 2, tmp_path / "unused", known, "local", tmp_path / "c")
        return fuzzing.fuzz(subjects.parse(SUBJECT), options, print)

    (tmp_path / "none").mkdir()
    first = run(tmp_path / "none")
    assert first.errors == []
    assert first.findings
    assert len(list((tmp_path / "c/findings").glob("*.json"))) == len(first.findings)
    assert first.totals is not None
    assert first.totals.kept > 0
    second = run(tmp_path / "none")
    assert second.seed == first.seed + 1
    assert len(second.earlier) == len(first.findings)
    assert second.totals is not None
    assert second.totals.steps == first.steps + second.steps


@pytest.mark.parametrize("address", ["127.0.0.1:1", "a..b:1", "localhost:\u00b2", "localhost:-1", "localhost:99999"])
def test_a_cluster_that_does_not_answer_is_said_in_a_line(tmp_path: Path, address: str) -> None:
    options = fuzzing.Options(1, 100, None, 1, tmp_path, None, address)
    with pytest.raises(UsageError, match=f"no Ray cluster at {address}"):
        fuzzing.fuzz(subjects.parse("spec"), options, print)
