"""Seconds to the first detection of the seed faults, by the one generator, from seeds that the commit decides.

    python bench/detect.py [--seeds 5] [--seconds 180] [--only S1 S2 S3]

Each (fault, seed) is one run of ``kvproof fuzz`` with the command line of every release. Seeds are the first bytes of
SHA-256 of the commit hash and a counter, so they can't be picked; all are printed, misses too. A detection counts when
the run names the invariant and the cause of the fault, and its reduced scenario has at most 10 actions. Seconds are
those of the campaign: importing the release is not in them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """A seed fault: the release that shipped it, and the findings (invariant and cause) that show it."""

    name: str
    release: str
    fixed: str
    identities: frozenset[tuple[str, str]]


FAULTS = (
    Fault(
        "S1",
        "0.26.0",
        "0.27.0",
        frozenset({("SLOT.chunk-end", "chunk-ends-off-boundary"), ("SLOT.chunk-end", "chunk-crosses-boundary")}),
    ),
    Fault("S2", "0.27.0", "0.28.0", frozenset({("HIT.only-recurrent-short", "recurrent-short-refused")})),
    Fault("S3", "0.30.0", "0.31.0", frozenset({("ADMIT.mamba-bound", "estimate-beyond-bound")})),
)


def commit() -> str:
    """The hash of the commit checked out here."""
    here = Path(__file__).parent
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=here, check=True, capture_output=True, text=True
    ).stdout.strip()


def seed_of(revision: str, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{revision}/{index}".encode()).digest()[:4], "big")


def detect(fault: Fault, seed: int, seconds: float, folder: Path) -> tuple[float | None, int]:
    """Seconds to the first detection (``None``: missed) and the actions of the smallest scenario that shows it."""
    record = folder / f"{fault.name}-{seed}.json"
    empty = folder / "none"
    empty.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "kvproof", "fuzz", f"vllm=={fault.release}", "--seed", str(seed)]
    command += ["--seconds", str(seconds), "--json", str(record), "--out", str(folder / f"{fault.name}-{seed}")]
    command += ["--findings", str(empty)]
    subprocess.run(command, check=False, capture_output=True)
    data = json.loads(record.read_text())
    shown = [f for f in data["findings"] if (f["finding"]["invariant"], f["finding"]["cause"]) in fault.identities]
    if not shown:
        return None, 0
    return min(f["seen"] for f in shown), min(len(f["finding"]["scenario"]["actions"]) for f in shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--only", nargs="*", default=[fault.name for fault in FAULTS])
    options = parser.parse_args()
    revision = commit()
    seeds = [seed_of(revision, index) for index in range(options.seeds)]
    print(f"commit {revision[:12]}, seeds {', '.join(map(str, seeds))}, {options.seconds:.0f} s each")
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for fault in FAULTS:
            if fault.name not in options.only:
                continue
            times: list[float] = []
            for seed in seeds:
                at, actions = detect(fault, seed, options.seconds, Path(folder))
                small = at is not None and actions <= 10
                missed += not small
                if at is not None:
                    times.append(at)
                what = "missed" if at is None else f"{at:6.1f} s, {actions} actions{'' if small else ' (too many)'}"
                print(f"{fault.name} vllm=={fault.release} seed {seed:>10}: {what}", flush=True)
            if times:
                middle = statistics.median(times)
                print(
                    f"{fault.name} vllm=={fault.release}: found by {len(times)} of {len(seeds)} seeds, "
                    f"median {middle:.1f} s, range {min(times):.1f}-{max(times):.1f} s",
                    flush=True,
                )
    print(f"kvproof: bench detect missed={missed}")


if __name__ == "__main__":
    main()
