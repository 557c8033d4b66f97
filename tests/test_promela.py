"""The model in Promela, run by spin, and the abstract machine reach the same states, until one of the two is wrong."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvproof.models.explore.mutants import MUTANTS as MACHINE_MUTANTS
from kvproof.models.explore.scope import Prompt
from kvproof.models.promela.projection import Visited, visited
from kvproof.models.promela.spin import MUTANTS, Mutant, SpinError, Visit, missing, visit
from kvproof.models.promela.worlds import WORLDS, definitions
from kvproof.spec.config import Group
from kvproof.spec.machine.dialect import Dialect

BENCH = Path(__file__).parent.parent / "bench" / "spin.py"
needs_spin = pytest.mark.skipif(bool(missing()), reason=missing())
INSIDE = WORLDS["inside"]
QUICK = ("inside", "alone")


@functools.cache
def by_spin(name: str) -> Visit:
    return visit(WORLDS[name])


@functools.cache
def by_us(name: str) -> Visited:
    return visited(WORLDS[name])


# -- the same states ---------------------------------------------------------------------------------------------------


@needs_spin
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in WORLDS if name != "roomy"],
)
def test_both_reach_the_same_states_by_as_many_moves(name: str) -> None:
    theirs, ours = by_spin(name), by_us(name)
    assert not theirs.error
    assert theirs.states == ours.states
    assert theirs.stored == ours.stored == len(ours.states)  # states that differ are told in different words
    assert theirs.transitions == ours.transitions


@pytest.mark.parametrize(
    ("name", "shows"),
    [
        ("inside", "runs 1/3 at 2 junction 0 prefilling grown"),  # a prefill in two steps
        ("inside", "waits 1/3 at 0 junction 0 preempted"),
        ("inside", "partial 0:"),  # its state was keyed inside the block
        ("inside", "key 0.2 key 0.1"),  # a block found as itself and as what lies inside
        ("inside", "key 1.1 in "),  # two blocks with one key
        ("wide", "junction 1"),  # attention reached beyond the states
        ("alone", "retired 1"),  # a state was given back
        pytest.param("shared", "ref 2", marks=pytest.mark.slow),  # two requests count on it
    ],
)
def test_the_worlds_have_what_matters(name: str, shows: str) -> None:
    assert len(by_us(name).states) > 1000
    assert any(shows in state for state in by_us(name).states)


# -- what is wrong shows -----------------------------------------------------------------------------------------------


@needs_spin
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(one, marks=[pytest.mark.slow] if place > 1 else [], id=one.macro)
     for place, one in enumerate(MUTANTS)],
)  # fmt: skip
def test_a_fault_in_the_model_makes_the_sets_unequal(mutant: Mutant) -> None:
    assert visit(WORLDS[mutant.world], mutant.macro, asserts=False).states != by_us(mutant.world).states


@needs_spin
def test_what_a_row_reads_is_asserted_in_the_model() -> None:
    assert "assertion violated" in visit(INSIDE, "MUTANT_COPY").error


@needs_spin
def test_a_fault_in_the_machine_makes_the_sets_unequal() -> None:
    with next(one for one in MACHINE_MUTANTS if one.id == "states-leaked").planted():
        wrong = visited(INSIDE)
    assert wrong.states != by_spin("inside").states


# -- what can't be done is said ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"config": replace(INSIDE.config, groups=(Group("mamba", 2), Group("full", 2)))}, "groups other than one"),
        ({"config": replace(INSIDE.config, speculative=1)}, "drafts, a store"),
        ({"config": replace(INSIDE.config, retention=None)}, "a retention interval"),
        ({"prompts": (Prompt(2),)}, "prompts other than two"),
        ({"prompts": (Prompt(2), Prompt(3, 0, 3)), "outputs": 2}, "prompts other than two"),
        ({"moves": frozenset({"finish"})}, "moves other than"),
        ({"dialect": Dialect(leaves_token=False)}, "dialect"),
        ({"requests": 3}, "more requests than two"),
        ({"outputs": 9, "config": replace(INSIDE.config, max_model_len=9)}, "more columns than four"),
        ({"config": replace(INSIDE.config, num_blocks=9)}, "more blocks than eight"),
    ],
)
def test_a_world_that_the_model_does_not_have_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        definitions(replace(INSIDE, **change))


def test_without_spin_there_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SpinError, match=r"^spin and gcc not found: install .*apt-get install spin gcc\)$"):
        visit(INSIDE)
    done = subprocess.run([sys.executable, "-P", BENCH, "inside"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("spin.py: error: spin and gcc not found: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere",), "there is no world 'nowhere': use inside, "),
        (("--out", "/"), "can't write the table to /: name a"),
    ],
)
def test_wrong_options_are_one_line(arguments: tuple[str, ...], says: str) -> None:
    done = subprocess.run([sys.executable, "-P", BENCH, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr.splitlines()[-1]


@needs_spin
@pytest.mark.slow
def test_the_bench_compares_and_gives_a_ratio(tmp_path: Path) -> None:
    table = tmp_path / "spin.txt"
    command = [sys.executable, "-P", BENCH, "alone", "--out", table]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout == table.read_text()
    assert done.stdout.splitlines()[-2].endswith("the same")
    assert done.stdout.splitlines()[-1] == "kvproof: bench spin worlds=1 same"
