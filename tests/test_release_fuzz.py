"""Real releases: what is recorded replays where it is recorded, is gone where it is fixed, and nothing new shows.

One process per release, since a release is imported once. The fuzz is bounded by steps, so that it repeats.
"""

from __future__ import annotations

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

sys.path.insert(0, str(Path(__file__).parent))
import insiders

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

REPLAY = """
import json, sys
from kvproof import findings, subjects
from kvproof.models.stateful.replay import replay
from kvproof.spec.config import ConfigError
from kvproof.spec.scenario import Scenario
subject = subjects.open_subject(subjects.parse("vllm==" + sys.argv[1]), lambda line: None)
shown = []
for record in findings.load():
    identities = []
    if record.scenario is not None:
        try:
            seen = replay(subject, Scenario.from_dict(record.scenario))
            identities = sorted({violation.identity for violation in seen.violations})
        except ConfigError:
            pass
    shown.append(identities)
print(json.dumps(shown))
"""


def shown_on(release: str, cache: dict[str, list[set[tuple[str, str]]]] = {}) -> list[set[tuple[str, str]]]:  # noqa: B006
    """Per record, the identities that its scenario shows on ``release``."""
    if release not in cache:
        done = insiders.run(release, REPLAY, release)
        assert done.returncode == 0, done.stderr[-3000:]
        cache[release] = [{(i, c) for i, c in found} for found in json.loads(done.stdout.splitlines()[-1])]
    return cache[release]


@pytest.mark.parametrize("release", RELEASES)
def test_what_is_recorded_for_a_release_replays_on_it(release: str) -> None:
    known = findings.known_for(RECORDS, release).records
    assert known, f"nothing is recorded for {release}"
    shown = shown_on(release)
    for record, identities in zip(RECORDS, shown, strict=True):
        if record in known:
            assert record.identity in identities, f"{record.identity} does not replay on {release}"


@pytest.mark.parametrize(("faulty", "fixed", "invariant", "cause"), SEEDS)
def test_a_seed_fault_is_gone_on_the_first_fixed_release(faulty: str, fixed: str, invariant: str, cause: str) -> None:
    identity = (invariant, cause)
    index = next(i for i, record in enumerate(RECORDS) if record.identity == identity and faulty in record.releases)
    assert identity in shown_on(faulty)[index]
    assert identity not in shown_on(fixed)[index]


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
