"""What of an exploration is saved: it goes on where it was stopped, and a file that is not of it is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvproof.models.explore import saved, search
from kvproof.models.explore.mutants import MUTANTS
from kvproof.models.explore.scope import Prompt
from kvproof.models.explore.scopes import SCOPES
from kvproof.models.explore.search import Explored, explore
from kvproof.models.explore.shard import Shard

SMALL = replace(SCOPES["tiny"], name="small", prompts=(Prompt(2),), requests=1)
"""One request at a time: explored in no time, for tests that are about something else."""


@pytest.fixture(scope="module")
def tiny() -> Explored:
    return explore(SCOPES["tiny"])


@pytest.mark.parametrize("stop", ["bound", "interrupt"])
def test_an_exploration_that_was_stopped_goes_on(tmp_path: Path, tiny: Explored, stop: str) -> None:
    file = tmp_path / "tiny.states"
    pauses = iter(range(12))

    def pause() -> None:
        if stop == "interrupt" and next(pauses, None) is None:
            raise KeyboardInterrupt

    first = explore(SCOPES["tiny"], most=100 if stop == "bound" else 10_000, save=file, pause=pause)
    assert not first.complete
    assert first.interrupted == (stop == "interrupt")
    second = explore(SCOPES["tiny"], save=file)
    assert second.complete
    assert (second.states, second.depth) == (tiny.states, tiny.depth)
    assert (second.transitions, second.taken) == (tiny.transitions, tiny.taken)
    assert second.evaluations == tiny.evaluations
    third = explore(SCOPES["tiny"], save=file)  # nothing is left to do
    assert (third.complete, third.states, third.depth) == (True, tiny.states, tiny.depth)


def test_an_interrupt_from_nowhere_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(50))

    def look_at(self: Any, index: int, outbox: Any, right: Any = Shard._look_at) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt
        right(self, index, outbox)

    monkeypatch.setattr(Shard, "_look_at", look_at)
    done = explore(SCOPES["tiny"], save=tmp_path / "tiny.states")
    assert done.interrupted
    assert done.states > 10
    assert not (tmp_path / "tiny.states").exists()


def test_what_broke_is_not_saved(tmp_path: Path) -> None:
    mutant = next(one for one in MUTANTS if one.id == "states-leaked")
    with mutant.planted():
        assert explore(mutant.world(), save=tmp_path / "x").broken
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: b"garbage", "it holds no exploration"),
        (lambda data: b"", "it holds no exploration"),
        (lambda data: b"[" * 1_000_000, "it holds no exploration"),
        (lambda data: data[:-5], "it is damaged"),
        (lambda data: data + b"x", "it is damaged"),
        (lambda data: data.replace(b'"kvproof_states": 2', b'"kvproof_states": 9'), "not written by this kvproof"),
    ],
)
def test_a_damaged_file_is_refused_with_a_way_out(tmp_path: Path, spoil: Any, says: str) -> None:
    file = tmp_path / "x"
    explore(SMALL, save=file)
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(ValueError, match=says) as refused:
        explore(SMALL, save=file)
    assert "remove it" in str(refused.value)


def test_no_bit_of_a_file_can_be_another(tmp_path: Path) -> None:
    file = tmp_path / "x"
    explore(SMALL, save=file)
    right = file.read_bytes()
    for place in range(0, len(right), 3):
        file.write_bytes(right[:place] + bytes([right[place] ^ 1]) + right[place + 1 :])
        with pytest.raises(ValueError, match="remove it"):
            saved.load(file, Shard(SMALL))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(ValueError, match="it is no regular file: name another folder"):
        explore(SMALL, save=tmp_path / "x")


def test_every_process_tells_alike_what_a_file_is_of() -> None:
    program = "from kvproof.models.explore import saved, scopes; print(*map(saved.fingerprint, scopes.SCOPES.values()))"
    told = {
        subprocess.run([sys.executable, "-P", "-c", program], env={**os.environ, "PYTHONHASHSEED": seed},
                       capture_output=True, check=True, text=True).stdout
        for seed in "123"
    }  # fmt: skip
    assert len(told) == 1


def test_a_file_that_other_code_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(saved, "DECIDING", ("elsewhere.a",))
    monkeypatch.setattr(saved, "code", saved.code.__wrapped__)
    explore(SMALL, save=tmp_path / "x")
    assert explore(SMALL, save=tmp_path / "x").complete
    (folder / "a.py").write_text("x = 2\n")
    with pytest.raises(ValueError, match="other code judged what is in it: remove it"):
        explore(SMALL, save=tmp_path / "x")


@pytest.mark.parametrize("failures", [3, 10**6])
def test_a_full_disk_does_not_end_an_exploration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    left = iter(range(failures))

    def save(*given: Any, right: Any = saved.save) -> None:
        if next(left, None) is not None:
            raise OSError(28, "No space left on device")
        right(*given)

    monkeypatch.setattr(saved, "save", save)
    monkeypatch.setattr(search, "SAVE_EVERY", 0.0)
    told: list[str] = []
    done = explore(SMALL, save=tmp_path / "x", progress=told.append)
    assert done.complete
    says = f"can't save what was visited in {tmp_path / 'x'}: No space left on device: free some room there"
    assert told.count(says) >= 3
    assert done.unsaved == ("" if failures == 3 else says)
    assert (tmp_path / "x").exists() == (failures == 3)


def test_a_file_of_another_scope_is_refused(tmp_path: Path) -> None:
    explore(SCOPES["at-once"], save=tmp_path / "x")
    with pytest.raises(ValueError, match="it is of scope at-once as it was then, and not of tiny as it is now"):
        explore(SCOPES["tiny"], save=tmp_path / "x")
    with pytest.raises(ValueError, match="as it is now"):
        explore(replace(SCOPES["at-once"], outputs=2), save=tmp_path / "x")
