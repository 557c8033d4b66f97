"""The benches answer wrong options in one line, and an interrupt with what they have measured so far."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"


def bench(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", BENCH / name, *arguments], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("gpu.py", ("--device", "meta"), "nothing runs on meta: "),
        ("gpu.py", ("--device", "hpu"), "nothing runs on hpu: "),
        ("gpu.py", ("--device", "mps:9"), "nothing runs on mps:9: "),
        ("gpu.py", ("--device", "nonsense"), "unknown device 'nonsense': "),
        ("gpu.py", ("--device", "cpu", "--seeds", "0"), "--seeds and --rounds must be at least 1"),
        ("gpu.py", ("--device", "cpu", "--seeds", "-3"), "--seeds and --rounds must be at least 1"),
        ("gpu.py", ("--device", "cpu", "--rounds", "-1"), "--seeds and --rounds must be at least 1"),
        (
            "reference.py",
            ("--running", "1", "--blocks", "99999999", "--rounds", "1"),
            "num_blocks is 99999999: at most",
        ),
        ("reference.py", ("--out", "/proc/x/y"), "can't write the tables to /proc/x/y: nothing can be made in /proc"),
        ("reference.py", ("--out", "/"), "can't write the tables to /: it is a folder"),
    ],
)
def test_wrong_options_are_one_line(name: str, arguments: tuple[str, ...], says: str) -> None:
    done = bench(name, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{name}: error: ")
    assert says in last
    assert len(last) < 300
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "shows"),
    [
        ("gpu.py", ("--device", "cpu", "--seeds", "1", "--rounds", "1000000"), "decode, 64 running requests: "),
        ("reference.py", ("--running", "1", "--layers", "1", "--rounds", "2000"), "engine, assertions full  "),
    ],
)
def test_an_interrupt_shows_what_was_measured(name: str, arguments: tuple[str, ...], shows: str) -> None:
    command = [sys.executable, "-P", BENCH / name, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any(line.startswith("round 1 of ") for line in process.stderr)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130
    assert shows in out
    assert "interrupted: the figures are those so far" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_an_interrupt_amid_the_check_of_a_device_is_no_trace() -> None:
    command = [sys.executable, "-P", "-u", BENCH / "gpu.py", "--device", "cpu", "--seeds", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("workload") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert (process.returncode, err) == (130, "interrupted: the figures are those so far\n")


IMPORTING = """
import runpy, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("name", ["gpu.py", "reference.py"])
def test_an_interrupt_amid_the_imports_is_no_trace(name: str) -> None:
    command = [sys.executable, "-P", "-c", IMPORTING, str(BENCH / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
