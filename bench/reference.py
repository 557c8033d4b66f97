"""What the reference engine and its live assertions cost: ratios from one run.

    python bench/reference.py [--running 64] [--blocks 20000] [--layers 2] [--rounds 8] [--out FILE]

First with floats: decode steps of the tiny hybrid model through the paged engine, with assertions off, touched and
full, beside the same network in transformers with its own cache (one batch, no paging, no scheduler) and without any
cache (one sequence, every token anew). Then without floats, so that nothing but bookkeeping is left, on a small pool
and a large one.

All sides stand at the same position of the same sequences and take their steps turn and turn about, so that whatever
else the machine does falls on all of them. One thread: matrices this small gain nothing from a second one.

An interrupt prints the figures so far (exit code 130).
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch, whose import takes seconds: nothing is measured yet that could be printed
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import torch

from kvproof.errors import UsageError, require_file
from kvproof.impl.reference.batch import Model
from kvproof.impl.reference.live import AssertingEngine, Mode
from kvproof.impl.reference.model import TorchModel, build
from kvproof.impl.reference.network import vocabulary_row
from kvproof.impl.reference.null_model import NullModel
from kvproof.spec.config import Config, ConfigError, Group
from kvproof.spec.rules.blocks import peak_blocks

PROMPT = 64
MODES: tuple[Mode, ...] = ("off", "touched", "full")
STEPS = {"full": 2}
"""Steps a round, 8 unless named: full looks at the whole pool in each."""

SMALL_POOL = 2_000


@dataclass
class Side:
    """Something that takes a step for ``rows`` sequences at a time; ``seconds`` of each of its steps."""

    name: str
    step: Callable[[], None]
    rows: int
    steps: int = 8
    seconds: list[float] = field(default_factory=list)

    def run(self) -> None:
        for _ in range(self.steps):
            began = time.perf_counter()
            self.step()
            self.seconds.append(time.perf_counter() - began)

    @property
    def step_time(self) -> float:
        return statistics.median(self.seconds or [math.nan])  # none yet, where an interrupt came before its turn


def prompts(running: int) -> list[list[int]]:
    return [list(range(1_000 * (i + 1), 1_000 * (i + 1) + PROMPT)) for i in range(running)]


def decoding(config: Config, model: Model, mode: Mode) -> AssertingEngine:
    """An engine with as many requests as it may run, all of which decode."""
    engine = AssertingEngine(config, model, mode)
    for index, prompt in enumerate(prompts(config.max_running)):
        engine.submit(f"r{index}", prompt, config.max_model_len)
    while any(request.outputs < 2 for request in engine.scheduler.requests.values()):
        engine.step()
    return engine


def batched(model: TorchModel, running: int, said: list[list[int]]) -> Callable[[], None]:
    """The network of transformers with its own cache, as far as :func:`decoding` takes an engine.

    ``said`` collects what it says, step by step.
    """
    from kvproof.impl.reference.network import _plain_operators

    causal = {"full_attention": None, "linear_attention": None}
    cache: Any = None
    ids, position = torch.tensor(prompts(running)), 0

    def step() -> None:
        nonlocal cache, ids, position
        positions = torch.arange(position, position + ids.shape[1])[None].expand(len(ids), -1)
        with torch.inference_mode(), _plain_operators():
            answer = model.network(
                vocabulary_row(ids, model.shape.vocabulary),
                attention_mask=causal,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
        cache, position = answer.past_key_values, position + ids.shape[1]
        ids = answer.logits[:, -1:].argmax(-1)
        said.append(ids[:, 0].tolist())

    step()
    step()
    return step


def uncached(model: TorchModel) -> Callable[[], None]:
    sequence = prompts(1)[0]

    def step() -> None:
        sequence.extend(model.run_plain(sequence, 1))

    return step


def take_turns(sides: Sequence[Side], rounds: int) -> bool:
    """So many rounds. False if an interrupt ended them: then the sides keep the steps that they had finished."""
    try:
        for side in sides:
            side.step()  # caches and allocators warm
        for number in range(rounds):
            for side in sides:
                side.run()
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return False
    return True


def with_floats(options: argparse.Namespace) -> tuple[list[str], bool]:
    """The table, and whether it is whole."""
    running, blocks = options.running, options.blocks
    config = configuration(blocks, running, options.rounds)
    model = build(config, 0, torch.device("cpu"), options.layers)
    engines = {mode: decoding(config, model, mode) for mode in MODES}
    said: list[list[int]] = []
    own = Side("transformers, own cache, one batch", batched(model, running, said), running)
    sides = [
        Side("transformers, no cache, one sequence", uncached(model), 1, 2),
        own,
        *(Side(f"engine, assertions {m}", e.step, running, STEPS.get(m, 8)) for m, e in engines.items()),  # type: ignore
    ]
    whole = take_turns(sides, options.rounds)
    if whole:
        check_outputs(model, engines["off"], said)
    off = sides[2].step_time
    lines = [
        f"{running} running requests, {blocks} blocks, {options.layers} × (full attention, gated delta rule)",
        f"{'':40}{'tokens/s':>10}{'ms/step':>10}{'to own cache':>14}{'to off':>8}",
    ]
    for side in (side for side in sides if side.seconds):
        # Per token: a step of the uncached side serves one sequence.
        ratio = side.step_time / side.rows / (own.step_time / own.rows)
        to_off = side.step_time / side.rows / (off / running)
        lines.append(
            f"{side.name:40}{side.rows / side.step_time:10.0f}{1e3 * side.step_time:10.2f}{ratio:14.2f}{to_off:8.3f}"
        )
    return lines, whole


def check_outputs(model: TorchModel, engine: AssertingEngine, said: list[list[int]]) -> None:
    """Figures of two sides that do not do the same are worth nothing."""
    for index, request in enumerate(engine.scheduler.requests.values()):
        prompt, outputs = request.tokens[:PROMPT], request.tokens[PROMPT:]
        for who, theirs in (("the engine", outputs), ("transformers", [tokens[index] for tokens in said])):
            if model.first_wrong(prompt, theirs) is not None:
                raise SystemExit(f"{who} does not say what a run without a cache does: {request.name}")


def without_floats(options: argparse.Namespace) -> tuple[list[str], bool]:
    """The table, and whether it is whole."""
    running = options.running
    sides, pools = [], (SMALL_POOL, options.blocks)
    for mode in MODES:
        for blocks in pools:
            engine = decoding(configuration(blocks, running, options.rounds), NullModel(), mode)
            sides.append(Side(mode, engine.step, running, STEPS.get(mode, 8)))  # type: ignore[arg-type]
    whole = take_turns(sides, options.rounds)
    lines = [
        f"{running} running requests, no floats: µs a step",
        f"{'':40}{f'{pools[0]} blocks':>14}{f'{pools[1]} blocks':>14}{'ratio':>8}",
    ]
    for small, large in zip(sides[::2], sides[1::2], strict=True):
        if not (small.seconds and large.seconds):
            continue
        a, b = 1e6 * small.step_time, 1e6 * large.step_time
        lines.append(f"{f'engine, assertions {small.name}':40}{a:14.0f}{b:14.0f}{b / a:8.2f}")
    return lines, whole


def configuration(blocks: int, running: int, rounds: int) -> Config:
    """Sequences are as long as the sides get in so many rounds, and a little longer."""
    return Config(
        (Group("full", 16), Group("mamba", 64)),
        blocks,
        hash_unit=16,
        step_tokens=PROMPT * running,
        max_running=running,
        max_model_len=PROMPT + 8 * (rounds + 2),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--layers", type=int, default=2, help="layers of each group")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, help="write the tables there, too")
    options = parser.parse_args()
    if min(options.running, options.blocks, options.layers, options.rounds) < 1:
        parser.error("sizes must be positive")
    config = configuration(options.blocks, options.running, options.rounds)
    try:
        for blocks in (SMALL_POOL, options.blocks):
            configuration(blocks, options.running, options.rounds).check()
        if options.out is not None:
            require_file(options.out, "the tables")
    except (ConfigError, UsageError) as error:
        parser.error(str(error))
    needed = options.running * peak_blocks(config, config.max_model_len)
    if needed >= min(SMALL_POOL, options.blocks):
        parser.error(f"that takes {needed} blocks, in pools of {SMALL_POOL} and {options.blocks}: "
                     "use fewer --rounds or --running")  # fmt: skip
    torch.set_num_threads(1)
    lines: list[str] = []
    whole = True
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for part in (with_floats, without_floats):
            if whole:
                table, whole = part(options)
                lines += ["", *table] if lines else table
    except KeyboardInterrupt:  # while engines were prepared
        whole = False
    if lines:
        print("\n".join(lines))
    if not whole:
        print("interrupted: the figures are those so far, and not all outputs were compared", file=sys.stderr)
        return 130
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
