"""What a second worker is worth: a release fuzzed by two workers at once, against the same two one after the other.

    python bench/workers.py [vllm==0.33.0] [--workers 2] [--steps 6000] [--pairs 5] [--out FILE]

Both sides do the very same: the same seed gives each worker the same share of steps, hence the same runs of the same
engines, in a process forked for it. So the ratio says what doing it at once is worth, and not what the runs happened to
be. Sides take turns at being first, and what counts is the median of the pairs' ratios. The release is imported before,
what is recorded for it is known (nothing has to be made small), and neither is in the time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvproof import findings, subjects
from kvproof.models.stateful import campaign
from kvproof.models.stateful.campaign import Campaign, Task
from kvproof.models.stateful.notes import Report, Tally
from kvproof.models.stateful.workers import Interrupts, Tick, run_workers
from kvproof.options import cores
from kvproof.spec.subject import Subject


def one_by_one(subject: Subject) -> campaign.Spread:
    """The same tasks, each in a process of its own as ever, but only one at a time."""

    def spread(tasks: Sequence[Task], found: Report, tick: Tick, interrupts: Interrupts) -> list[Tally]:
        tallies: list[Tally] = []
        for task in tasks:
            tallies += run_workers(
                1,
                lambda _, report, tell, check, task=task: campaign.do(  # type: ignore[misc]
                    task, subject, report, tell, check, began=time.monotonic()
                ),
                found,
                tick,
                interrupts,
            )
        return tallies

    return spread


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", nargs="?", default=f"vllm=={subjects.NEWEST}")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6000, help="of all workers together, in each half of a pair")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the table there, too")
    options = parser.parse_args()
    if options.workers < 2 or options.pairs < 1 or options.steps < options.workers * campaign.STEPS_A_WORKER:
        parser.error(f"there must be a pair, two workers, and {campaign.STEPS_A_WORKER} steps for each of them")
    if options.workers > cores():
        parser.error(f"{options.workers} workers on {cores()} cores measure nothing but waiting")
    target = subjects.parse(options.subject)
    subject = subjects.open_subject(target, lambda line: print(line, file=sys.stderr))
    known = findings.known_for(findings.load(None), target.release).identities
    apart = one_by_one(subject)

    def run(seed: int, at_once: bool) -> Campaign:
        return campaign.run(subject, seed=seed, steps=options.steps, workers=options.workers, known=known,
                            spread=None if at_once else apart)  # fmt: skip

    run(0, at_once=True)  # what is imported and compiled late is there from now on
    lines = [
        f"{target.text}, {os.cpu_count()} cores, {options.workers} workers, {options.steps} steps a half",
        f"{'steps':>7}{'one by one':>14}{'at once':>12}{'ratio':>8}   (steps a second)",
    ]
    ratios: list[float] = []
    wrong: list[str] = []
    for pair in range(options.pairs):
        first = bool(pair % 2)
        done = {at_once: run(pair + 1, at_once) for at_once in (first, not first)}
        rates = {at_once: half.steps / half.searched for at_once, half in done.items()}
        ratios.append(rates[True] / rates[False])
        lines.append(f"{done[True].steps:7}{rates[False]:14.0f}{rates[True]:12.0f}{ratios[-1]:8.2f}")
        wrong += [*done[True].errors, *done[False].errors]
        if done[True].steps != done[False].steps:
            wrong.append(f"not the same work: {done[True].steps} and {done[False].steps} steps")
    lines.append(
        f"kvproof: bench workers {target.text} workers={options.workers} ratio={statistics.median(ratios):.2f} "
        f"(median of {len(ratios)}, {min(ratios):.2f} to {max(ratios):.2f})"
    )
    lines += [f"wrong: {line}" for line in wrong]
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
