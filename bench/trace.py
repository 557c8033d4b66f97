"""What a recorded trace costs: to write, and to hold to the specification afterwards, at two lengths.

    python bench/trace.py [--release 0.33.0] [--rounds 20] [--factor 4] [--repeat 3]

A plain engine of the release serves conversations, unwatched and recorded, turn and turn about; then the trace is
checked. With a trace that is ``factor`` times as long the events per second must stay what they were. Times are of the
processor, and the best of ``repeat`` runs: whatever else the machine does only ever adds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from kvproof.impl.vllm.drift import quiet
from kvproof.impl.vllm.fetch import release_tree
from kvproof.impl.vllm.live.install import install
from kvproof.impl.vllm.live.record import RecordTo
from kvproof.impl.vllm.plain import PlainEngine
from kvproof.impl.vllm.subject import VllmSubject
from kvproof.spec.config import Config, Group
from kvproof.spec.scenario import Action
from kvproof.trace.checking import check
from kvproof.trace.reader import arrange

CONFIG = Config((Group("full", 16), Group("mamba", 16)), num_blocks=2000, hash_unit=16, step_tokens=512,
                max_running=8, max_model_len=4096, retention=None)  # fmt: skip
TOGETHER = 8
TURNS = 6


def serve(rounds: int) -> tuple[int, float]:
    """Conversations of :data:`TURNS` turns, :data:`TOGETHER` at once. Steps, and seconds of the processor."""
    engine = PlainEngine(CONFIG)
    steps, began = 0, time.process_time()
    for turn in range(rounds):
        for i in range(TOGETHER):
            base = f"c{turn - 1}-{i}" if turn % TURNS else ""
            shared = 300 + 100 * (turn % TURNS) if base else 0
            engine.apply(Action("submit", f"c{turn}-{i}", base, shared, shared + 120 + 7 * i, 60))
        while engine.scheduler.requests:
            engine.step()
            steps += 1
        engine.step()
        # Whoever drives it remembers every request; only the last turn's are ever gone on from.
        engine._requests = {name: one for name, one in engine._requests.items() if name.startswith(f"c{turn}-")}
    return steps, time.process_time() - began


def recorded(rounds: int, folder: Path) -> tuple[int, float]:
    watching = install("record", record=RecordTo(folder, 100_000))
    try:
        return serve(rounds)
    finally:
        watching.uninstall()
        assert not watching.errors, watching.errors


def checked(file: Path, repeat: int) -> tuple[int, float]:
    """Events, and the best rate per second."""
    best, events = 0.0, 0
    for _ in range(repeat):
        began = time.process_time()
        result = check(arrange([file]))
        events = result.events
        assert not result.found
        best = max(best, events / (time.process_time() - began))
    return events, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", default="0.33.0")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    VllmSubject(release_tree(options.release), options.release)
    quiet()
    rates = []
    print(f"{'events':>9}{'steps':>8}{'bytes/step':>12}{'events/s':>10}")
    with tempfile.TemporaryDirectory() as folder:
        plain = record = float("inf")
        for _ in range(options.repeat):
            steps, seconds = serve(options.rounds)
            plain = min(plain, seconds / steps)
            steps, seconds = recorded(options.rounds, Path(folder, "short"))
            record = min(record, seconds / steps)
        recorded(options.rounds * options.factor, Path(folder, "long"))
        for name in ("short", "long"):
            file = sorted(Path(folder, name).iterdir())[0]
            events, rate = checked(file, options.repeat)
            steps = check(arrange([file])).steps
            rates.append(rate)
            print(f"{events:9}{steps:8}{file.stat().st_size / steps:12.0f}{rate:10.0f}", flush=True)
    print(f"a step takes {1e6 * plain:.0f} µs of the processor, recorded {1e6 * record:.0f} µs")
    print(
        f"kvproof: bench trace vllm=={options.release} events/s={rates[0]:.0f} at_{options.factor}x={rates[1]:.0f} "
        f"ratio={rates[1] / rates[0]:.2f} recording={record / plain:.2f}x"
    )


if __name__ == "__main__":
    main()
