"""Fuzz throughput on two workers against one: steps a second of the search, turn and turn about, median of the pairs.

    python bench/workers.py [vllm==0.33.0] [--steps 6000] [--pairs 5] [--out FILE]

What is recorded for the release is known, so that nothing has to be made small. Workers are forked from a process that
has imported the release; importing is in neither time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

from kvproof import findings, subjects
from kvproof.models.stateful import campaign


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", nargs="?", default=f"vllm=={subjects.NEWEST}")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the table there, too")
    options = parser.parse_args()
    if min(options.steps, options.pairs) < 1:
        parser.error("there must be a step and a pair")
    target = subjects.parse(options.subject)
    subject = subjects.open_subject(target, lambda line: print(line, file=sys.stderr))
    known = findings.known_for(findings.load(None), target.release).identities

    def rate(workers: int, seed: int) -> float:
        done = campaign.run(subject, seed=seed, steps=options.steps, workers=workers, known=known)
        return done.steps / done.searched

    lines = [f"{target.text}, {os.cpu_count()} cores, {options.steps} steps each", f"{'one':>9}{'two':>9}  ratio"]
    ratios = []
    for pair in range(options.pairs):
        one, two = rate(1, pair), rate(2, pair)
        ratios.append(two / one)
        lines.append(f"{one:9.0f}{two:9.0f}  {two / one:.2f}")
    lines.append(
        f"kvproof: bench workers {target.text} ratio={statistics.median(ratios):.2f} (median of {len(ratios)})"
    )
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
