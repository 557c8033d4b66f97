"""Runs the Promela model: ``spin -a`` makes a verifier of it in C, ``gcc`` compiles that, and it visits every state."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kvproof.models.explore.scope import Scope
from kvproof.models.promela.worlds import definitions

MODEL = Path(__file__).with_name("cache.pml")
DEEPEST = 1_000_000
"""The longest path, in moves. One that is longer is said, and nothing is claimed then."""


@dataclass(frozen=True)
class Mutant:
    """A fault planted in the model: the macro that plants it, and a world in which it changes what can be reached."""

    macro: str
    statement: str
    world: str = "inside"


MUTANTS = (
    Mutant("MUTANT_FRONT", "blocks that have a key go to the front of the free queue, too"),
    Mutant("MUTANT_JUNCTION", "no stop is made where others' prefix ends"),
    Mutant("MUTANT_GATE", "requests enter without room for all of them"),
    Mutant("MUTANT_OLDEST", "the oldest request gives way", "whole"),
    Mutant("MUTANT_HASTE", "nobody waits for what the same step makes"),
    Mutant("MUTANT_COPY", "a shared tail is taken over without its content"),
    Mutant("MUTANT_DROP", "the key of a tail that is written on is dropped"),
)


class SpinError(RuntimeError):
    """Spin, gcc or the verifier is missing or failed. The message is one line with a way out."""


@dataclass(frozen=True)
class Visit:
    """What the verifier saw: every state in words, how many it stored, and how long it took without printing them.

    ``transitions`` are those between states. ``error`` is the assertion that failed first, empty where none did.
    """

    states: frozenset[str]
    stored: int
    transitions: int
    error: str
    seconds: float

    @property
    def rate(self) -> float:
        """Distinct states per second."""
        return self.stored / self.seconds


def missing() -> str:
    """Which program is not installed, with a way out; empty where all are."""
    absent = " and ".join(program for program in ("spin", "gcc") if shutil.which(program) is None)
    return (
        f"{absent} not found: install with the system's packages (Debian: apt-get install spin gcc)" if absent else ""
    )


def visit(scope: Scope, mutant: str = "", *, asserts: bool = True, timed: bool = False) -> Visit:
    """Visit every state of ``scope``, in the model with the macro ``mutant``. ``timed``: once more, without printing.

    With ``asserts`` the visit ends where an assertion of the model fails; otherwise none is looked at.

    Raises :class:`SpinError`, and :class:`ValueError` for worlds that the model does not have.
    """
    reason = missing()
    if reason:
        raise SpinError(reason)
    macros = [f"-D{name}={value}" for name, value in definitions(scope).items()]
    macros += [f"-D{mutant}"] if mutant else []
    with tempfile.TemporaryDirectory(prefix="kvproof-spin-") as folder:
        out, _ = _verify(Path(folder), macros, asserts)
        stored, transitions = _count(out, "states, stored"), _count(out, "transitions")
        seconds = 0.0
        if timed:
            again, seconds = _verify(Path(folder), [*macros, "-DQUIET"], asserts, "-O2")
            if _count(again, "states, stored") != stored:
                raise SpinError("two runs of the verifier differ: report this with the version of spin")
    states = frozenset(line for line in out.splitlines() if "; 1 ref " in line)
    error = next((line for line in out.splitlines() if line.startswith("pan:1: ")), "")
    # Pan's first state is the one before the cache is set up; it counts that, and setting it up, among the transitions.
    return Visit(states, stored - 1, transitions - 2, error, seconds)


def _verify(folder: Path, macros: list[str], asserts: bool, optimise: str = "-O0") -> tuple[str, float]:
    _run(folder, "spin", *macros, "-a", str(MODEL))
    _run(folder, "gcc", optimise, "-w", "-DSAFETY", "-DNOREDUCE", "-o", "pan", "pan.c")
    began = time.perf_counter()
    out = _run(folder, "./pan", f"-m{DEEPEST}", "-w20", *([] if asserts else ["-A"]))
    seconds = time.perf_counter() - began
    if "max search depth too small" in out or "out of memory" in out:
        raise SpinError(f"the verifier ran out of memory, or a path has over {DEEPEST} moves: visit a smaller world")
    return out, seconds


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
        raise SpinError(f"{command[0]} failed with status {done.returncode} and said `{said[0]}`: "
                        "the model is written for spin 6.5")  # fmt: skip
    return done.stdout


def _count(out: str, what: str) -> int:
    found = re.search(rf"^\s*(\d+) {what}", out, re.MULTILINE)
    if found is None:
        raise SpinError(f"the verifier did not say how many {what} there are: the model is written for spin 6.5")
    return int(found[1])
