"""What live assertions cost a scheduler: steps of a watched vLLM against an unwatched one, as ratios from one run.

    python bench/live.py [--release 0.33.0] [--running 1 64 256] [--blocks 1000 20000 200000]
                         [--block 528] [--out FILE]

Every side is a real scheduler of the release with its own requests and hashes, all of which decode; the model is made
up, so that nothing but scheduling is measured. Each side has a process of its own, forked from the same one, and they
take their steps turn and turn about (in one process, whoever comes later has its objects scattered over more memory,
which costs more than what is measured here): unwatched twice (the second, with the plug-in loaded and off, shows what
noise is), then each mode. Medians of single steps.

A block is as wide as vLLM makes it where attention and recurrent states share a pool (528 tokens for a model of the
size of Qwen3-Next-80B). With 16 tokens a block, one decoding request in eight takes a block in each step, and has to be
looked at.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvproof import plugin
from kvproof.impl.vllm.fetch import release_tree
from kvproof.impl.vllm.subject import VllmSubject
from kvproof.spec.config import Config, Group

OUTPUT = 100_000
ROUNDS, STEPS = 12, 8
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

    def run(self) -> None:
        self.pipe.send(self.steps)
        self.seconds += self.pipe.recv()

    def end(self) -> None:
        self.pipe.send(0)
        self.process.join()

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def serve(config: Config, mode: str, pipe: Connection) -> None:
    """What a side's process does."""
    watching = None
    if mode == "off":
        plugin.register()  # KVPROOF is not set: this must change nothing
    elif mode != "unwatched":
        from kvproof.impl.vllm.live.install import install

        watching = install(mode)  # type: ignore[arg-type]
    engine = decoding(config)
    gc.collect()
    gc.freeze()  # what is there stays: collections of it would fall on a few steps at random
    pipe.send([])
    while steps := pipe.recv():
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            engine.step()  # type: ignore[attr-defined]
            seconds.append(time.perf_counter() - began)
        pipe.send(seconds)
    if watching is not None and (watching.findings or watching.errors):
        raise SystemExit(f"not a healthy run: {watching.findings or watching.errors}")


def start(config: Config, mode: str) -> Side:
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=serve, args=(config, mode, theirs))
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


def measure(config: Config, full: bool) -> list[Side]:
    modes = ("unwatched", "off", "touched", "full") if full else ("unwatched", "off", "touched")
    sides = [start(config, mode) for mode in modes]
    for side in sides:
        side.run()
        side.seconds.clear()
    for _ in range(ROUNDS):
        for side in sides:
            side.run()
    for side in sides:
        side.end()
    if any(side.process.exitcode for side in sides):
        raise SystemExit("a side did not end well")
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", default="0.33.0")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000, 20_000, 200_000])
    parser.add_argument("--block", type=int, default=528, help="tokens in a block of either group")
    parser.add_argument("--no-full", action="store_true", help="leave out the mode that looks at everything")
    parser.add_argument("--out", type=Path, help="write the table there, too")
    options = parser.parse_args()
    if min(*options.running, *options.blocks, options.block) < 1:
        parser.error("sizes must be positive")
    if plugin.os.environ.get(plugin.MODE):
        parser.error(f"{plugin.MODE} is set: unset it, this measures without it first")
    VllmSubject(release_tree(options.release), f"vllm=={options.release}")
    lines = [f"vLLM {options.release}, blocks of {options.block}, µs a step, all decoding; in brackets: to unwatched"]
    print(lines[0], flush=True)
    for running in options.running:
        for blocks in options.blocks:
            # Sequences grow by a step each time: room for all of them, with the state blocks.
            longest = 2 * options.block + 512 + STEPS * (ROUNDS + 2)
            needed = running * (longest // options.block + 4) + 1
            if needed > blocks:
                lines.append(f"{running:5} running {blocks:8} blocks: too few blocks, {needed} are needed")
            else:
                sides = measure(configuration(running, blocks, options.block), not options.no_full)
                plain = sides[0].median
                cells = "  ".join(f"{s.name} {1e6 * s.median:.0f} ({s.median / plain:.2f})" for s in sides)
                lines.append(f"{running:5} running {blocks:8} blocks: {cells}")
            print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
