"""Seconds to the first detection of the seed faults, by the one generator, from seeds that the commit decides.

    python bench/detect.py [--seeds 5] [--seconds 120] [--only S1 S2 S3]

Each (fault, seed) is one run of ``kvproof fuzz`` with the command line of every release. Seeds are the first bytes of
SHA-256 of the commit hash and a counter, so they can't be picked; all are printed, misses too. A detection counts when
the run names an invariant and a cause that show the fault, and its reduced scenario has at most 10 actions. A fault
that shows in two ways (S3: the estimate, and the refusal that users saw) is counted for each. Seconds are those of the
campaign: importing the release is not in them.
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
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A seed fault as one kind of finding shows it: the release that shipped it, and the invariants and causes.

    A cause that starts with ``*`` stands for all that end so.
    """

    name: str
    shows: str
    release: str
    identities: frozenset[tuple[str, str]]

    def shown_by(self, invariant: str, cause: str) -> bool:
        return any(
            invariant == wanted and (cause.endswith(end[1:]) if end.startswith("*") else cause == end)
            for wanted, end in self.identities
        )


FAULTS = (
    Fault(
        "S1",
        "chunks and keys",
        "0.26.0",
        frozenset(
            {
                ("SLOT.chunk-end", "chunk-ends-off-boundary"),
                ("SLOT.chunk-end", "chunk-crosses-boundary"),
                ("SLOT.key-content", "full-key-stale"),
            }
        ),
    ),
    Fault("S2", "cut", "0.27.0", frozenset({("HIT.only-recurrent-short", "recurrent-short-refused")})),
    Fault("S3", "estimate", "0.30.0", frozenset({("ADMIT.mamba-bound", "estimate-beyond-bound")})),
    Fault("S3", "refusal", "0.30.0", frozenset({("ADMIT.refused-though-fits", "*-with-checkpoint")})),
)
NAMES = tuple(dict.fromkeys(fault.name for fault in FAULTS))


def commit() -> str:
    """The hash of the commit checked out here."""
    here = Path(__file__).parent
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=here, check=True, capture_output=True, text=True
    ).stdout.strip()


def seed_of(revision: str, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{revision}/{index}".encode()).digest()[:4], "big")


def fuzz(release: str, seed: int, seconds: float, folder: Path) -> list[dict[str, Any]]:
    """The findings of one run that knows of none, each with the seconds after which it was ``seen``."""
    record = folder / f"{release}-{seed}.json"
    empty = folder / "none"
    empty.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "kvproof", "fuzz", f"vllm=={release}", "--seed", str(seed)]
    command += ["--seconds", str(seconds), "--json", str(record), "--out", str(folder / f"{release}-{seed}")]
    command += ["--findings", str(empty)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if not record.exists():
        raise SystemExit(f"kvproof fuzz vllm=={release} gave no result (exit code {done.returncode}): {done.stderr}")
    findings: list[dict[str, Any]] = json.loads(record.read_text())["findings"]
    return findings


def detected(fault: Fault, findings: list[dict[str, Any]]) -> tuple[float | None, int]:
    """Seconds to the first detection (``None``: missed) and the actions of the smallest scenario that shows it."""
    shown = [f for f in findings if fault.shown_by(f["finding"]["invariant"], f["finding"]["cause"])]
    if not shown:
        return None, 0
    return min(f["seen"] for f in shown), min(len(f["finding"]["scenario"]["actions"]) for f in shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    options = parser.parse_args()
    revision = commit()
    seeds = [seed_of(revision, index) for index in range(options.seeds)]
    print(f"commit {revision[:12]}, seeds {', '.join(map(str, seeds))}, {options.seconds:.0f} s each")
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            if name not in options.only:
                continue
            faults = [fault for fault in FAULTS if fault.name == name]
            release = faults[0].release
            times: dict[Fault, list[float]] = {fault: [] for fault in faults}
            for seed in seeds:
                findings = fuzz(release, seed, options.seconds, Path(folder))
                for fault in faults:
                    at, actions = detected(fault, findings)
                    small = at is not None and actions <= 10
                    missed += not small
                    if at is not None:
                        times[fault].append(at)
                    what = "missed" if at is None else f"{at:6.1f} s, {actions} actions"
                    many = " (too many)" if at is not None and not small else ""
                    print(f"{name} vllm=={release} seed {seed:>10} {fault.shows}: {what}{many}", flush=True)
            for fault, seen in times.items():
                told = f"found by {len(seen)} of {len(seeds)} seeds"
                if seen:
                    told += f", median {statistics.median(seen):.1f} s, range {min(seen):.1f}-{max(seen):.1f} s"
                print(f"{name} vllm=={release} {fault.shows}: {told}", flush=True)
    print(f"kvproof: bench detect missed={missed}")


if __name__ == "__main__":
    main()
