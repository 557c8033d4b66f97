"""Interrupts: whatever is going on, the command ends soon with 130 (or 1 for what it found), in words, and leaves no
process behind. Real processes get real signals; a toy engine stands for the release."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from toysubject import toy_command

sys.path.pop(0)

TOY = toy_command(0.1)
FUZZ = ("fuzz", "vllm==0.33.0", "--seed", "3", "--findings", "known")
LONG = ("--steps", "100000000", "--seconds", "60")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "known").mkdir()
    return tmp_path


@contextmanager
def running(program: str, *arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """In a process group of its own, which is killed in the end whatever happens."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program, *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"never said {words!r}")


def quiet(err: str) -> bool:
    return not any(word in err for word in ("Traceback", "Exception", "File "))


@pytest.mark.parametrize("workers", ["1", "5"])
@pytest.mark.parametrize(
    ("signals", "group"),
    [
        ([signal.SIGTERM], False),
        ([signal.SIGINT], False),
        ([signal.SIGINT, signal.SIGINT], False),
        ([signal.SIGTERM, signal.SIGTERM, signal.SIGTERM], False),
        ([signal.SIGTERM], True),  # what ends a whole job: the workers are told, too, before they are told again
        ([signal.SIGINT], True),
        ([signal.SIGHUP], True),  # the terminal is closed
    ],
)
@pytest.mark.parametrize("after", ["from seed", "steps in"])
def test_an_interrupt_ends_a_campaign_with_all_its_workers(
    place: Path, workers: str, signals: Sequence[signal.Signals], group: bool, after: str
) -> None:
    with running(TOY, "", *FUZZ, "--workers", workers, *LONG, cwd=place) as process:
        until(process, after)
        for number in signals:
            (os.killpg if group else os.kill)(process.pid, number)
        out, err = process.communicate()
        assert process.returncode == 130
        assert not group_lives(process.pid), "a worker is left"
    assert err.splitlines()[-1] == "kvproof: error: interrupted"
    assert quiet(err)
    if len(signals) == 1 and after == "steps in":
        assert out.endswith("interrupted=yes verdict=interrupted exit=130\n")
        assert float(out.rpartition(" seconds=")[2].split()[0]) < 60, "it went on to its own end"


@pytest.mark.parametrize("workers", ["1", "3"])
def test_what_was_found_before_two_interrupts_is_shown_and_kept(place: Path, workers: str) -> None:
    arguments = (*FUZZ, "--workers", workers, *LONG, "--json", "all.json")
    with running(TOY, "unaligned", *arguments, cwd=place) as process:
        until(process, "found SLOT.key-content")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        assert process.returncode == 1
    assert "exit=1\n" in out
    assert "kept in kvproof-findings/" in out
    assert list((place / "kvproof-findings").iterdir())
    assert (place / "all.json").exists()
    assert quiet(err)


def test_workers_end_without_their_parent(place: Path) -> None:
    with running(TOY, "", *FUZZ, "--workers", "3", *LONG, cwd=place) as process:
        until(process, "steps in")
        process.kill()
        killed = time.monotonic()
        process.wait()
        assert process.stdout is not None
        assert process.stdout.read() == "", "the pipe closes when the last of them has ended"
        assert time.monotonic() - killed < 50, "they went on to their own end"


def test_no_more_workers_are_started_than_there_are_steps_for(place: Path) -> None:
    with running(TOY, "", *FUZZ, "--workers", "64", "--steps", "120", cwd=place) as process:
        out, _ = process.communicate()
    with running(TOY, "", *FUZZ, "--workers", "3", "--steps", "120", cwd=place) as process:
        fewer, _ = process.communicate()
    assert out.splitlines()[-1].partition(" seconds=")[0] == fewer.splitlines()[-1].partition(" seconds=")[0]
    assert "steps=" in out


def test_workers_that_can_not_be_started_are_said(place: Path) -> None:
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n" + TOY
    with running(few, "", *FUZZ, "--workers", "64", "--steps", "4000", cwd=place) as process:
        out, _ = process.communicate()
        assert process.returncode == 3
    assert "of 64 workers could be started (Too many open files): use fewer" in out


INSIDE = """
import signal, sys, time
from kvproof import cli, engines, subjects
what = sys.argv[1]
class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
def app(**_):
    if what == "destructor":
        Dying()
        for _ in range(1000):
            time.sleep(0.01)
    if what == "error":
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RecursionError("an import went wrong")
    if what == "swallowed":
        def load(*_):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                pass
        engines.vllm_subject = load
        subjects.open_subject(subjects.Target("vllm@x", "checkout", ""), print)
cli.app = app
cli.main()
"""


@pytest.mark.parametrize("what", ["destructor", "error", "swallowed"])
def test_an_interrupt_is_not_lost_in_a_destructor_or_an_import(tmp_path: Path, what: str) -> None:
    with running(INSIDE, what, cwd=tmp_path) as process:
        _, err = process.communicate()
        assert process.returncode == 130
    assert err == "kvproof: error: interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_proofs(tmp_path: Path, number: signal.Signals) -> None:
    with running("from kvproof import cli; cli.main()", "prove", cwd=tmp_path) as process:
        until(process, ":")
        process.send_signal(number)
        out, err = process.communicate()
        assert process.returncode == 130
    assert out.endswith("interrupted=yes verdict=interrupted exit=130\n")
    assert " claims=0 " not in out, "what was settled is kept"
    assert err.splitlines()[-1] == "kvproof: error: interrupted"
    assert quiet(err)


EXPLORE = """
from dataclasses import replace
from kvproof import cli
from kvproof.models.explore import search
from kvproof.models.explore.scope import Prompt
from kvproof.models.explore.scopes import SCOPES
from kvproof.models.explore.shard import Shard
class Slow(Shard):
    def step_from(self, state):
        print("a step", file=sys.stderr, flush=True)
        time.sleep(0.2)
        return super().step_from(state)
import sys, time
if sys.argv.pop(1) == "slow":
    search.Shard = Slow
SCOPES["small"] = replace(SCOPES["tiny"], name="small", prompts=(Prompt(2),), requests=1)
cli.main()
"""


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_an_interrupt_ends_what_is_asked_about_liveness(tmp_path: Path, signals: Sequence[signal.Signals]) -> None:
    with running(EXPLORE, "slow", "explore", "small", cwd=tmp_path) as process:
        until(process, "a step")
        for number in signals:
            process.send_signal(number)
        out, err = process.communicate()
        assert process.returncode == 130
    assert err.count("a step") < 10, "it went on to its own end"
    assert "explored completely: 24 states" in " ".join(out.split())
    assert out.endswith("interrupted=yes verdict=interrupted exit=130\n")
    assert quiet(err)


def test_an_interrupt_while_a_fault_is_planted_is_no_survival(tmp_path: Path) -> None:
    with running(EXPLORE, "fast", "explore", "drafts", "--mutants", cwd=tmp_path) as process:
        until(process, "planting")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        assert process.returncode == 130
    assert "survived=0 interrupted=yes verdict=interrupted" in out
    assert quiet(err)


def test_a_worker_that_is_killed_costs_its_scope_alone(tmp_path: Path) -> None:
    arguments = ("explore", "small", "acceptance", "--workers", "2")
    with running(EXPLORE, "fast", *arguments, cwd=tmp_path) as process:
        until(process, "acceptance: depth 4")
        child = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        os.kill(child, signal.SIGKILL)
        out, err = process.communicate()
        assert process.returncode == 3
    assert "explored completely: 24 states" in " ".join(out.split())
    assert "scope acceptance: a process of the exploration was killed" in " ".join(out.split())
    assert quiet(err)
