"""What live assertions cost a scheduler: steps of a watched vLLM against an unwatched one, as ratios from one run.

    python bench/live.py [--release 0.33.0] [--running 1 64 256] [--blocks 1000 20000 200000]
                         [--block 528] [--repeats 5] [--out FILE]

Every side is a real scheduler of the release with its own requests and hashes, all of which decode; the model is made
up, so that nothing but scheduling is measured. Each side has a process of its own, forked from the same one (in one
process, whoever comes later has its objects scattered over more memory, which costs more than what is measured here),
and all run on the same processor. Unwatched comes twice: the second, with the plug-in loaded and off, shows what noise
is. Then each mode of the plug-in.

What is measured is processor time: others on the machine don't count. But its clock changes by a half within a second.
So sides take turns of a few steps; what counts is a turn's median against that of the unwatched turn beside it, and of
these ratios the median over all turns. Where a process has its memory makes it faster or slower by some per cent for as
long as it lives: therefore all of this again with fresh processes, ``--repeats`` times, and what is printed is the
median of the repeats, and in brackets the lowest and the highest. The modes ``full`` (steps that look at everything)
and ``record`` (which writes all that happens) take part in the first two repeats only.

A block is as wide as vLLM makes it where attention and recurrent states share a pool (528 tokens for a model of the
size of Qwen3-Next-80B). With 16 tokens a block, one decoding request in eight takes a block in each step, and has to be
looked at.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvproof import plugin
from kvproof.impl.vllm.fetch import release_tree
from kvproof.impl.vllm.subject import VllmSubject
from kvproof.spec.config import Config, Group

OUTPUT = 100_000
ROUNDS, STEPS = 16, 8
"""Turns of each side, and steps a turn."""
SLOW = ("full", "record")
SLOW_REPEATS = 2
"""In so many repeats the slow modes take part."""
FORK = multiprocessing.get_context("fork")
FULL_STEPS = 1
"""Steps a round in the mode that looks at everything."""


@dataclass
class Side:
    """A watched or unwatched engine in a process of its own, that takes steps when told to."""

    name: str
    steps: int
    pipe: Connection
    process: Any
    seconds: list[float] = field(default_factory=list)
    """Of a step, by turn."""

    def run(self) -> None:
        """One turn."""
        self.pipe.send(self.steps)
        self.seconds.append(statistics.median(self.pipe.recv()))

    def end(self) -> None:
        self.pipe.send(0)
        self.process.join()

    def ratio(self, plain: Side) -> float:
        return statistics.median(own / other for own, other in zip(self.seconds, plain.seconds, strict=True))


def serve(config: Config, mode: str, folder: Path, pipe: Connection) -> None:
    """What a side's process does."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    watching = None
    if mode == "off":
        plugin.register()  # KVPROOF is not set: this must change nothing
    elif mode != "unwatched":
        from kvproof.impl.vllm.live.install import install
        from kvproof.impl.vllm.live.record import RecordTo

        watching = install(mode, record=RecordTo(folder) if mode == "record" else None)  # type: ignore[arg-type]
    engine = decoding(config)
    gc.collect()
    gc.freeze()  # what is there stays: collections of it would fall on a few steps at random
    pipe.send([])
    while steps := pipe.recv():
        seconds = []
        for _ in range(steps):
            began = time.thread_time()
            engine.step()  # type: ignore[attr-defined]
            seconds.append(time.thread_time() - began)
        pipe.send(seconds)
    if watching is not None and (watching.findings or watching.errors or watching.unwatched or not watching.engines):
        raise SystemExit(f"not a healthy run: {watching.summary()}")


def start(config: Config, mode: str, folder: Path) -> Side:
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=serve, args=(config, mode, folder, theirs))
    process.start()
    ours.recv()
    return Side(mode, FULL_STEPS if mode == "full" else STEPS, ours, process)


def configuration(running: int, blocks: int, block: int) -> Config:
    groups = (Group("full", block), Group("mamba", block))
    return Config(groups, blocks, hash_unit=block, step_tokens=max(256, block, 2 * block * min(running, 8)),
                  max_running=running, max_model_len=3 * block + 2048)  # fmt: skip


def decoding(config: Config) -> object:
    """An engine with as many requests as it may run, all of which decode."""
    from kvproof.impl.vllm.plain import PlainEngine

    engine = PlainEngine(config)
    for index in range(config.max_running):
        # All lengths of a block, evenly: as many requests cross into a new block in each step.
        first, length = 10_000 * (index + 1), 1 + config.scheduler_block + 7 * index % config.scheduler_block
        engine.submit(f"r{index}", range(first, first + length), OUTPUT)
    while any(request.num_output_tokens < 2 for request in engine.scheduler.requests.values()):
        engine.step()
    return engine


def measure(config: Config, modes: Sequence[str]) -> list[Side]:
    """One repeat: every mode in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        sides = [start(config, mode, Path(folder)) for mode in modes]
        for side in sides:
            side.run()
            side.seconds.clear()
        for _ in range(ROUNDS):
            for side in sides:  # always in this order: one that has two turns in a row finds its memory in the caches
                side.run()
        for side in sides:
            side.end()
    if any(side.process.exitcode for side in sides):
        raise SystemExit("a side did not end well")
    return sides


def cell(config: Config, repeats: int, slow: bool) -> str:
    """All repeats: by mode, the median of ratios, the lowest and the highest."""
    ratios: dict[str, list[float]] = {}
    plain = []
    for repeat in range(repeats):
        sides = measure(config, ("unwatched", "off", "touched", *(SLOW if slow and repeat < SLOW_REPEATS else ())))
        plain.append(statistics.median(sides[0].seconds))
        for side in sides[1:]:
            ratios.setdefault(side.name, []).append(side.ratio(sides[0]))
    told = [f"unwatched {1e6 * statistics.median(plain):.0f} µs"]
    told += [f"{name} {statistics.median(r):.2f} ({min(r):.2f}–{max(r):.2f})" for name, r in ratios.items()]
    return "  ".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", default="0.33.0")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000, 20_000, 200_000])
    parser.add_argument("--block", type=int, default=528, help="tokens in a block of either group")
    parser.add_argument("--repeats", type=int, default=5, help="how often with fresh processes")
    parser.add_argument("--no-slow", action="store_true", help=f"leave out the modes {' and '.join(SLOW)}")
    parser.add_argument("--out", type=Path, help="write the table there, too")
    options = parser.parse_args()
    if min(*options.running, *options.blocks, options.block, options.repeats) < 1:
        parser.error("sizes must be positive")
    if plugin.os.environ.get(plugin.MODE):
        parser.error(f"{plugin.MODE} is set: unset it, this measures without it first")
    VllmSubject(release_tree(options.release), f"vllm=={options.release}")
    lines = [f"vLLM {options.release}, blocks of {options.block}, all decoding; a step against an unwatched one: "
             f"median of {options.repeats} repeats (lowest–highest)"]  # fmt: skip
    print(lines[0], flush=True)
    for running in options.running:
        for blocks in options.blocks:
            # Sequences grow by a step each time: room for all of them, with the state blocks.
            longest = 2 * options.block + 512 + STEPS * (ROUNDS + 2)
            needed = running * (longest // options.block + 4) + 1
            if needed > blocks:
                lines.append(f"{running:5} running {blocks:8} blocks: too few blocks, {needed} are needed")
            else:
                told = cell(configuration(running, blocks, options.block), options.repeats, not options.no_slow)
                lines.append(f"{running:5} running {blocks:8} blocks: {told}")
            print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
