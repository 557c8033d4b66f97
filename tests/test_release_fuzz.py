"""Real releases: what is recorded replays where it is recorded, is gone where it is fixed, and nothing new shows.

One process per release, since a release is imported once. The fuzz is bounded by steps, so that it repeats.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvproof import findings, subjects
from kvproof.review.status import RELEASES
from kvproof.spec.scenario import Scenario

sys.path.insert(0, str(Path(__file__).parent))
from releaseplays import play

sys.path.pop(0)

pytestmark = [pytest.mark.release, pytest.mark.slow]

RECORDS = findings.load()
FOLDER = Path(__file__).parent.parent / "findings"

SEEDS = (
    ("0.26.0", "0.27.0", "SLOT.chunk-end", "chunk-ends-off-boundary"),
    ("0.27.0", "0.28.0", "HIT.only-recurrent-short", "recurrent-short-refused"),
    ("0.30.0", "0.31.0", "ADMIT.mamba-bound", "estimate-beyond-bound"),
    ("0.30.0", "0.31.0", "ADMIT.refused-though-fits", "whole-sequence-gate-refuses-what-fits-mamba-with-checkpoint"),
)
"""Faulty release, first fixed one, invariant and cause: PR 51113, PR 51468, and PR 57050 twice."""


def place(faulty: str, invariant: str, cause: str) -> int:
    """Which record is of that, on that release."""
    wanted = (record.identity == (invariant, cause) and faulty in record.releases for record in RECORDS)
    return next(itertools.compress(itertools.count(), wanted))


@functools.cache
def shown_on(release: str) -> dict[int, frozenset[tuple[str, str]]]:
    """What scenarios show on ``release``, by record: of those known there, and of seed faults that are fixed there."""
    known = findings.known_for(RECORDS, release).records
    asked = {number for number, record in enumerate(RECORDS) if record in known}
    asked |= {place(faulty, *identity) for faulty, fixed, *identity in SEEDS if fixed == release}
    scenarios = {number: RECORDS[number].scenario for number in asked}
    plays = {str(number): Scenario.from_dict(data) for number, data in scenarios.items() if data is not None}
    return {int(number): seen.broken for number, seen in play(release, plays).items()}


@pytest.mark.parametrize("release", RELEASES)
def test_what_is_recorded_for_a_release_replays_on_it(release: str) -> None:
    known = findings.known_for(RECORDS, release).records
    assert known, f"nothing is recorded for {release}"
    shown = shown_on(release)
    for number, record in enumerate(RECORDS):
        if record in known:
            assert record.identity in shown[number], f"{record.identity} does not replay on {release}"


@pytest.mark.parametrize(("faulty", "fixed", "invariant", "cause"), SEEDS)
def test_a_seed_fault_is_gone_on_the_first_fixed_release(faulty: str, fixed: str, invariant: str, cause: str) -> None:
    number = place(faulty, invariant, cause)
    assert (invariant, cause) in shown_on(faulty)[number]
    assert (invariant, cause) not in shown_on(fixed)[number]


def fuzz(release: str, folder: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    record = folder / "fuzz.json"
    command = [sys.executable, "-m", "kvproof", "fuzz", f"vllm=={release}", "--json", str(record)]
    command += ["--out", str(folder / "found"), "--workers", "2", *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})
    assert record.exists(), done.stderr
    return done.returncode, json.loads(record.read_text()), done.stdout


def test_a_bounded_fuzz_of_the_newest_release_shows_nothing_new(tmp_path: Path) -> None:
    code, record, printed = fuzz(subjects.NEWEST, tmp_path, "--seed", "1", "--steps", "12000")
    assert [f["finding"]["cause"] for f in record["findings"]] == []
    assert not record["errors"]
    assert record["steps"] >= 12_000
    assert code == 0, printed


@pytest.mark.parametrize("seed", SEEDS[:3], ids=lambda seed: seed[0])
def test_the_one_generator_finds_the_seed_fault_that_it_does_not_know(
    seed: tuple[str, str, str, str], tmp_path: Path
) -> None:
    """Everything else that is recorded is known, so that the time goes into the search and not into reducing that."""
    release, _, invariant, _ = seed
    others = tmp_path / "others"
    others.mkdir()
    for path in FOLDER.glob("*.json"):
        if json.loads(path.read_text(encoding="utf-8"))["invariant"] != invariant:
            shutil.copy(path, others)
    code, record, printed = fuzz(release, tmp_path, "--seed", "2", "--steps", "12000", "--findings", str(others))
    found = [f["finding"] for f in record["findings"] if f["finding"]["invariant"] == invariant]
    assert found, printed
    assert min(len(f["scenario"]["actions"]) for f in found) <= 10
    assert code == 1
