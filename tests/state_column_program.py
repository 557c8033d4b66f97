"""Runs inside one release: where its worker looks for the state of a request that resumes.

``python tests/state_column_program.py`` with the release on ``PYTHONPATH``. Prints, for each (configured block,
recurrent block, tokens computed), the column of the recurrent block table that the V2 runner's model state starts from.
"""

from __future__ import annotations

import json

from calibration_worker import Memory, Release, WorkerV2

CASES = ((16, 16, 32), (16, 16, 33), (4, 16, 16), (4, 16, 48), (8, 16, 48), (128, 2176, 99_968))
"""Attention and recurrent blocks of one size, and attention blocks that are smaller."""


def column(release: Release, configured: int, recurrent: int, computed: int) -> int:
    worker = WorkerV2(release, Memory(release, recurrent, drafts=0, blocks=4, columns=3))
    worker.state.cache_config.block_size = configured
    worker.admit("r1", computed, [[1, 2, 3], [1, 2, 3]])
    return int(worker.state._mamba_state_idx_gpu[worker.slots["r1"]])


if __name__ == "__main__":
    built = Release()
    print(json.dumps([[*case, column(built, *case)] for case in CASES]))
