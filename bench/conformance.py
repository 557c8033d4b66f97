"""The abstract machine against releases of vLLM and the reference engine, step by step on the same scenarios.

    python bench/conformance.py [--release 0.33.0 reference ...] [--scenarios 1000] [--seed 0] [--out FILE]

Each is driven in a process of its own, and the machine beside it in its dialect: the switches that are off are the
named differences, what is printed as apart is one that has no name yet. After every step the two are
compared in who ran, from where to where, what every lookup answered, who waits, how many blocks are free, which keys
there are, and in which order blocks would be taken (:mod:`kvproof.models.conformance`). The scenarios are numbered from
the seed on, and the same for everybody who asks. The reference engine runs each scenario a second time with limits of a
few tokens and a store that loses what it promised.

Before 0.27 a store is left out: there a lookup with one takes the deepest of the groups' answers, and the engine
resumes where no group may have a state.

Exit code 0: nothing is apart; 1: something is; 2: the command can't be understood.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvproof.impl.reference.subject import ReferenceSubject
from kvproof.impl.vllm.drift import quiet
from kvproof.impl.vllm.fetch import release_tree
from kvproof.impl.vllm.subject import VllmSubject
from kvproof.models.conformance import compare, draw, widened
from kvproof.review.status import RELEASES
from kvproof.spec.config import ConfigError
from kvproof.spec.machine.dialect import REFERENCE, SPECIFICATION, SWITCHES, Dialect, dialect_of
from kvproof.spec.machine.subject import MachineSubject
from kvproof.spec.scenario import Scenario
from kvproof.spec.subject import Subject

ENGINE = "reference"
WITHOUT_STORE = (0, 27)


def numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def scenarios(seed: int, subject: Subject, name: str) -> list[Scenario]:
    drawn = draw(seed, subject.default_retention)
    if name == ENGINE:
        return [drawn, widened(drawn, seed)]
    if numbers(name) >= WITHOUT_STORE:
        return [drawn]
    return [replace(drawn, config=replace(drawn.config, connector="none", divergent_hits=False, load_steps=1))]


def subjects(name: str) -> tuple[MachineSubject, Subject]:
    """The machine in the dialect of a release, or of the reference engine, and what it is held to."""
    if name == ENGINE:
        # Its model says the same after a rejected draft as without one.
        return MachineSubject(REFERENCE, branches=False), ReferenceSubject()
    return MachineSubject(dialect_of(numbers(name))), VllmSubject(release_tree(name), f"vllm=={name}")


def off(dialect: Dialect) -> list[str]:
    """The switches in which a dialect is not the specification."""
    return [name for name in SWITCHES if getattr(dialect, name) != getattr(SPECIFICATION, name)]


def measure(release: str, seed: int, count: int) -> dict[str, Any]:
    """One release, or the reference engine, in this process."""
    machine, subject = subjects(release)
    quiet()
    found: Counter[str] = Counter()
    apart = []
    began = time.perf_counter()
    for number in range(seed, seed + count):
        for scenario in scenarios(number, subject, release):
            try:
                steps, parted = compare(machine, subject, scenario)
            except ConfigError:
                found["refused"] += 1
                continue
            found["run"] += 1
            found["steps"] += steps
            if parted is not None:
                apart.append({"seed": number, "step": parted.step, "differences": list(parted.differences)})
    return {"release": release, "seconds": time.perf_counter() - began, **found, "apart": apart,
            "off": off(machine.dialect)}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", nargs="+", default=[*reversed(RELEASES), ENGINE])
    parser.add_argument("--scenarios", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the table there, too")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scenarios < 1 or options.seed < 0:
        parser.error("there must be a scenario, and seeds are numbers from 0 on")
    if options.inside:
        print(json.dumps(measure(options.release[0], options.seed, options.scenarios)))
        return 0
    lines = [f"{'release':10}{'scenarios':>10}{'refused':>9}{'steps':>9}{'apart':>7}{'seconds':>9}  named differences"]
    print(lines[0], flush=True)
    wrong = False
    for release in options.release:
        command = [sys.executable, __file__, "--inside", "--release", release]
        command += ["--scenarios", str(options.scenarios), "--seed", str(options.seed)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            print(f"{release}: no result (exit code {done.returncode})\n{done.stderr[-2000:]}", file=sys.stderr)
            wrong = True
            continue
        one = json.loads(done.stdout.splitlines()[-1])
        wrong = wrong or bool(one["apart"])
        counts = f"{one.get('run', 0):10}{one.get('refused', 0):9}{one.get('steps', 0):9}{len(one['apart']):7}"
        lines.append(f"{release:10}{counts}{one['seconds']:9.0f}  {len(one['off'])}: {', '.join(one['off'])}")
        print(lines[-1], flush=True)
        for parted in one["apart"][:5]:
            text = f"    seed {parted['seed']}, step {parted['step']}: {'; '.join(parted['differences'])[:300]}"
            lines.append(text)
            print(text, flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
