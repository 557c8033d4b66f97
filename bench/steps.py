"""Steps per second through a real scheduler, with and without judging them: one ratio from one run.

    python bench/steps.py vllm==0.33.0 [--steps 20000] [--seed 1]

Both sides run the same scenarios, drawn by the campaign's own generator, turn and turn about in small batches, so that
whatever else the machine does falls on both. "Without" means that nobody looks: the device oracle and the scheduler
run, and no observation is judged.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator

from kvproof import subjects
from kvproof.invariants.catalogue import CATALOGUE
from kvproof.invariants.monitor import Monitor
from kvproof.models.stateful.strategies import Dice, Menu, Setup, draw_setup
from kvproof.spec.config import ConfigError
from kvproof.spec.scenario import Action, Scenario
from kvproof.spec.subject import Observer, Subject

BATCH = 20


def scenarios(subject: Subject, seed: int) -> Iterator[Scenario]:
    """Configurations of the campaign's generator, each with a plain conversation over shared prefixes."""
    rng = random.Random(seed)
    while True:
        setup: Setup = draw_setup(Dice(rng.randbytes(40))).resolved(
            getattr(subject, "default_retention", lambda eagle: 0)
        )
        try:
            subject.start(setup.config, None)
        except ConfigError:
            continue
        menu, actions = Menu(setup), []
        for i in range(8):
            length = min(rng.choice(menu.lengths), menu.longest)
            base = f"r{rng.randrange(i)}" if i and rng.random() < 0.7 else ""
            shared = rng.choice([length, length - 1, length // 2]) if base else 0
            actions.append(Action("submit", f"r{i}", base, shared, length, rng.choice(menu.outputs)))
            actions.append(Action("step", times=rng.randint(1, 6), accept=(rng.randint(0, 3), rng.randint(0, 3))))
        yield Scenario(setup.config, tuple(actions))


def run(subject: Subject, scenario: Scenario, observer: Observer | None) -> tuple[int, float]:
    driven = subject.start(scenario.config, observer)
    began = time.perf_counter()
    for action in scenario.actions:
        driven.apply(action)
    driven.drain()
    return driven.steps, time.perf_counter() - began  # type: ignore[attr-defined]


class Counting(Monitor):
    """Judges everything and stops for nothing, so that both sides take the same steps."""

    def _decide(self, broken: object) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", nargs="?", default=f"vllm=={subjects.NEWEST}")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    subject = subjects.open_subject(subjects.parse(options.subject), print)
    steps = {"bare": 0, "judged": 0}
    seconds = {"bare": 0.0, "judged": 0.0}
    source, done = scenarios(subject, options.seed), 0
    while done < options.steps:
        batch = [next(source) for _ in range(BATCH)]
        for side in ("bare", "judged"):
            for scenario in batch:
                taken, spent = run(subject, scenario, Counting(CATALOGUE) if side == "judged" else None)
                steps[side] += taken
                seconds[side] += spent
        done = steps["judged"]
    rate = {side: steps[side] / seconds[side] for side in steps}
    per_step = {side: seconds[side] / steps[side] for side in steps}
    share = 1 - per_step["bare"] / per_step["judged"]
    print(f"{'':24}{'steps':>8}{'steps/s':>10}{'µs/step':>10}")
    for side, name in (("bare", "scheduler + oracle"), ("judged", "with every invariant")):
        print(f"{name:24}{steps[side]:8}{rate[side]:10.0f}{1e6 * per_step[side]:10.0f}")
    print(
        f"kvproof: bench steps {subject.name} invariants take {share:.0%} of a step, "
        f"ratio {rate['bare'] / rate['judged']:.2f}"
    )


if __name__ == "__main__":
    main()
