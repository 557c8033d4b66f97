"""Streams that are full, closed or no longer read: progress is a courtesy, results that nobody gets are an error."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvproof import scenario_file

sys.path.insert(0, str(Path(__file__).parent))
from fakeengines import SCENARIO
from toysubject import toy_command

sys.path.pop(0)

KVPROOF = (sys.executable, "-P", "-m", "kvproof")
FUZZ = ("fuzz", "reference", "--seed", "1", "--findings", "known")
TOY = toy_command(0)
STREAMS = {"full": ">/dev/full", "closed": ">&-", "unread": "> >(:)"}


def shell(streams: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command with its streams as ``streams`` says in the words of a shell; what is left of them is captured."""
    (cwd / "known").mkdir(exist_ok=True)
    return subprocess.run(
        ["bash", "-c", f'exec "$@" {streams}', "bash", *arguments], cwd=cwd, capture_output=True, text=True
    )


def told(out: str) -> str:
    """The result line without the time that it took."""
    return re.sub(r" seconds=\S+", "", out.splitlines()[-1])


# -- progress ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", STREAMS)
@pytest.mark.parametrize(("workers", "steps"), [("1", "60"), ("2", "120")])
def test_progress_that_can_not_be_written_changes_no_run(tmp_path: Path, how: str, workers: str, steps: str) -> None:
    command = (sys.executable, "-P", "-c", TOY, "", *FUZZ, "--workers", workers, "--steps", steps)
    heard = shell("", *command, cwd=tmp_path)
    unheard = shell(f"2{STREAMS[how]}", *command, "--json", "all.json", cwd=tmp_path)
    assert (unheard.returncode, told(unheard.stdout)) == (heard.returncode, told(heard.stdout))
    assert heard.returncode in (0, 3), "three: so few steps leave invariants undetermined"
    assert json.loads((tmp_path / "all.json").read_text())["steps"] >= int(steps)


@pytest.mark.parametrize("how", STREAMS)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_findings_are_kept_and_shown_where_progress_can_not_be_written(tmp_path: Path, how: str, workers: str) -> None:
    command = (
        sys.executable,
        "-P",
        "-c",
        TOY,
        "unaligned",
        *FUZZ,
        "--workers",
        workers,
        "--steps",
        "3000",
        "--json",
        "all.json",
    )
    done = shell(f"2{STREAMS[how]}", *command, cwd=tmp_path)
    assert done.returncode == 1
    assert "SLOT.key-content" in done.stdout
    assert json.loads((tmp_path / "all.json").read_text())["findings"]
    assert list((tmp_path / "kvproof-findings").iterdir())


@pytest.mark.parametrize("how", STREAMS)
def test_an_error_that_can_not_be_written_keeps_its_exit_code(tmp_path: Path, how: str) -> None:
    done = shell(f"2{STREAMS[how]}", *KVPROOF, "fuzz", "nonsense", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")


def test_what_a_stopped_reader_misses_is_only_progress(tmp_path: Path) -> None:
    """The first line is read, so that the pipe breaks amid the search and not before it."""
    command = (sys.executable, "-P", "-c", TOY, "", *FUZZ, "--workers", "1", "--steps", "60")
    heard = shell("", *command, cwd=tmp_path)
    unheard = shell("2> >(head -1 >&2)", *command, cwd=tmp_path)
    assert (unheard.returncode, told(unheard.stdout)) == (heard.returncode, told(heard.stdout))


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "says"), [("full", "No space left on device"), ("closed", "it is closed")])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_results_that_can_not_be_written_are_one_line_and_cost_no_file(
    tmp_path: Path, how: str, says: str, unbuffered: str
) -> None:
    scenario_file.save(tmp_path / "s.json", SCENARIO)
    commands: list[tuple[str, ...]] = [
        (*FUZZ, "--workers", "1", "--steps", "20", "--report", "r"),
        ("replay", "s.json", "--on", "reference", "--report", "r"),
        ("export", "s.json", "--as", "text"),
        ("--version",),
    ]
    for arguments in commands:
        streams = f"{STREAMS[how]}"
        done = shell(streams, "env", f"PYTHONUNBUFFERED={unbuffered}", *KVPROOF, *arguments, cwd=tmp_path)
        assert done.returncode == 2, arguments
        assert done.stderr.splitlines()[-1] == f"kvproof: error: can't write to standard output: {says}"
        assert "Traceback" not in done.stderr
    assert {file.name for file in (tmp_path / "r").iterdir()} >= {"fuzz.json", "replay.json"}


def test_with_all_streams_closed_no_file_gets_their_numbers(tmp_path: Path) -> None:
    done = shell("<&- >&- 2>&-", *KVPROOF, *FUZZ, "--workers", "2", "--steps", "120", "--json", "a.json", cwd=tmp_path)
    assert done.returncode == 2
    assert json.loads((tmp_path / "a.json").read_text())["steps"] >= 120


# -- interrupts before there is anything to interrupt -----------------------------------------------------------------

IMPORTING = """
import importlib.metadata, runpy, signal, sys
kept, number = sys.argv[1], int(sys.argv[2])
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == kept:
            signal.raise_signal(number)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["kvproof", "mutants", "--only", ""]
(script,) = importlib.metadata.entry_points(group="console_scripts", name="kvproof")
if sys.stdin.read() == "script":
    script.load()()
else:
    runpy.run_module("kvproof", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["kvproof.cli", "typer", "msgspec", "rich", "kvproof.mutating"])
@pytest.mark.parametrize("start", ["script", "module"])
def test_an_interrupt_amid_the_first_imports_is_one_line(number: int, module: str, start: str) -> None:
    command = [sys.executable, "-P", "-c", IMPORTING, module, str(int(number))]
    done = subprocess.run(command, input=start, capture_output=True, text=True, env={**os.environ, "KVPROOF_DEBUG": ""})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvproof: error: interrupted\n")


def test_importing_kvproof_leaves_signals_alone() -> None:
    program = (
        "import signal; before = [signal.getsignal(n) for n in signal.valid_signals()]\n"
        "import kvproof.invariants, kvproof.__main__, kvproof.cli\n"
        "assert before == [signal.getsignal(n) for n in signal.valid_signals()]"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
