"""The device oracle held against the worker functions of real releases, so that it is not itself what is under test.

Per release one process runs random histories twice: on CPU tensors with the release's own bookkeeping, copy kernels
and state indices, and on tracers with the oracle. They must agree in every block, every read and every accepted count.
Beside the oracle run copies of it with one planted fault each, which must be caught. Held, too, is what was learnt:

- The V1 runner forgets how many drafts were accepted when a request sits out a step (its row of the persistent batch is
  dropped, and a new row starts at 1), so it goes on from the state of the first draft. The oracle mirrors V2.
- Up to 0.27 the V2 kernel that saves a crossed boundary resets the accepted count that its other programs still read.
  What is copied depends on their order there; the oracle has what was meant: all of them read first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvproof import subjects

RELEASES = ("0.26.0", "0.30.0", subjects.NEWEST)
EPISODES = 12
PROGRAM = Path(__file__).with_name("calibration_program.py")
PLANTED = ("IgnoresShift", "KeepsWindow", "NeverResets", "OneColumnOn", "SavesNoBoundary")

pytestmark = [pytest.mark.release, pytest.mark.slow]


Inside = Callable[..., dict[str, Any]]


def _calibrated(inside: Inside, version: str) -> dict[str, Any]:
    return inside(version, PROGRAM, "1", str(EPISODES), first=True)


@pytest.fixture(params=RELEASES)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def calibrated(inside: Inside, version: str) -> dict[str, Any]:
    return dict(_calibrated(inside, version)["tallies"])


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _agrees(tally: dict[str, Any], device: str = "Device") -> None:
    assert tally["cases"] > 0
    assert tally["differing"][device] == 0, tally["first"][device]


def _catches(tally: dict[str, Any], planted: str) -> None:
    assert tally["differing"][planted] > 0, f"{planted} went unnoticed in {tally['cases']} cases"


def test_block_copies_gather_before_they_scatter(calibrated: dict[str, Any]) -> None:
    tally = calibrated["block copies"]
    assert tally["seen"]["chain"] > 0
    _agrees(tally)
    _catches(tally, "CopiesOneByOne")


def test_checkpoints_go_where_the_release_exports_them(version: str, calibrated: dict[str, Any]) -> None:
    if _number(version) < (0, 30):
        assert "checkpoints" not in calibrated, "this release exports none"
        return
    tally = calibrated["checkpoints"]
    assert min(tally["seen"]["exported"], tally["seen"]["declined"]) > 0
    _agrees(tally)
    _catches(tally, "ExportsOneColumnOn")


@pytest.mark.parametrize("runner", ["V2", "V2, backwards", "V1", "V1, fused"])
def test_moves_reads_and_boundaries(version: str, runner: str, calibrated: dict[str, Any]) -> None:
    """V2 with requests that sit out steps and restart; V1 without the former. Programs of a grid in either order."""
    if runner == "V1, fused" and _number(version) < (0, 27):
        assert runner not in calibrated
        return
    tally = calibrated[runner]
    for met in ("restart", "draft accepted", "read past the first draft"):
        assert tally["seen"][met] > 0, met
    if runner == "V2" and _number(version) < (0, 28):
        assert tally["differing"]["Device"] > 0, "the kernel's race is gone: the note in this module is out of date"
        return
    _agrees(tally)
    for planted in PLANTED:
        _catches(tally, planted)


def test_only_v1_forgets_what_was_accepted(version: str, calibrated: dict[str, Any]) -> None:
    forgets = "ForgetsSittingOut"
    _catches(calibrated["V1, sitting out"], "Device")
    _agrees(calibrated["V1, sitting out"], forgets)
    if _number(version) >= (0, 28):
        _catches(calibrated["V2"], forgets)


def test_the_release_s_kernels_were_run(inside: Inside, version: str) -> None:
    launches = _calibrated(inside, version)["launches"]
    wanted = {
        "postprocess_mamba_fused_kernel",
        "preprocess_mamba_align_fused_kernel",
        "precopy_mamba_align_fused_kernel",
        "batch_memcpy_kernel",
    }
    if _number(version) >= (0, 29):
        wanted.add("get_aligned_state_indices_multi_group_kernel")
    assert {name for name in wanted if not launches.get(name)} == set()
