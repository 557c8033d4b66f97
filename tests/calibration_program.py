"""Runs inside one release: the device oracle beside the release's own worker functions, on random histories.

``python tests/calibration_program.py SEED EPISODES`` with the release on ``PYTHONPATH``. Prints one JSON object: per
comparison and per device, how many cases there were, how many of them differed, and the first difference. Beside the
oracle run oracles with one planted fault each.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from calibration_blocks import checkpoints, copies
from calibration_faults import MOVES, ForgetsSittingOut
from calibration_found import Tally
from calibration_moves import Episode
from calibration_worker import Memory, Release, WorkerV1, WorkerV2

from kvproof.impl.vllm.device import Device


def main(seed: int, episodes: int) -> None:
    release = Release()

    def moves(
        make: Callable[[Release, Memory], Any], devices: Sequence[type[Device]], sit_out: bool, backwards: bool = False
    ) -> Tally:
        tally = Tally()
        release.language.backwards = backwards
        for number in range(seed * 1000, seed * 1000 + episodes):
            Episode(release, make, devices, number, sit_out, tally).run()
        release.language.backwards = False
        return tally

    tallies = {
        "block copies": copies(release, seed),
        "checkpoints": checkpoints(release, seed),
        "V2": moves(WorkerV2, (*MOVES, ForgetsSittingOut), sit_out=True),
        "V2, backwards": moves(WorkerV2, MOVES, sit_out=True, backwards=True),
        "V1": moves(WorkerV1, MOVES, sit_out=False),
        "V1, sitting out": moves(WorkerV1, (Device, ForgetsSittingOut), sit_out=True),
    }
    if "align_ctx" in release.copies.preprocess_mamba.__code__.co_varnames:
        tallies["V1, fused"] = moves(functools.partial(WorkerV1, fused=True), MOVES, sit_out=False)
    launches = {name: kernel.launches for name, kernel in release.kernels.items()}
    found = {name: vars(tally) for name, tally in tallies.items() if tally is not None}
    print(json.dumps({"tallies": found, "launches": launches}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
