"""The whole check of the reference engine on a GPU, beside the same on the CPU.

    python bench/gpu.py [--device cuda] [--seeds 5] [--rounds 4]

Runs the workloads of ``kvproof.impl.reference.flow`` with every tensor of the engine on the device: outputs, logits and
states under keys are held against recomputation, which stays on the CPU whatever the device is, and the catalogue
judges the tracers, which move with the blocks. Then tokens per second of the engine's decode steps, on the device and
on the CPU, turn and turn about. Exit code 0: all is right; 1: something is not; 2: there is no such device; 130:
interrupted, after what was measured so far was printed.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence

if __name__ == "__main__":  # before torch, whose import takes seconds: nothing is measured yet that could be printed
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import torch

from kvproof.impl.reference import flow, kernels
from kvproof.impl.reference.live import AssertingEngine
from kvproof.impl.reference.model import LOGITS_TOLERANCE, STATE_TOLERANCE, build
from kvproof.spec.config import Config, Group

CPU = torch.device("cpu")
RUNNING, PROMPT, STEPS = 64, 64, 16
LONGEST_REASON = 160


def missing(device: torch.device) -> str | None:
    """Why nothing can run on ``device``; ``None`` if it can."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return "no GPU is there: torch sees no CUDA device; --device cpu runs the same on the CPU"
    try:
        torch.zeros(1, device=device).tolist()  # read back: some devices take everything and hold nothing
    except Exception as error:  # what a backend raises that is not there or not built in is its own
        return f"nothing runs on {device}: {first_line(error)}; --device cpu runs the same on the CPU"
    return None


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:LONGEST_REASON].rstrip()


def describe(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device}, torch {torch.__version__}"
    recurrence = "fla's fused kernel" if kernels._fla() is not None else "torch operators"
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, recurrence by {recurrence}"


def check(device: torch.device, seeds: int) -> bool:
    """Every workload on ``device``, a line each, as far as it got. Whether all of them are right."""
    print(
        f"{'workload':14}{'requests':>9}{'outputs':>9}{'steps':>7}{'states':>8}{'worst':>10}{'logits':>8}{'worst':>10}"
    )
    right, happened = True, Counter[str]()
    for name, config in flow.CONFIGS.items():
        model, total = build(config, 0, device), flow.Flow()
        try:
            for seed in range(seeds):
                found = flow.run(flow.draw(name, seed), model)
                for wrong in found.wrong:
                    print(f"  {name}, seed {seed}: {wrong}", flush=True)
                right = right and not found.wrong
                happened += found.happened
                total.requests += found.requests
                total.outputs += found.outputs
                total.steps += found.steps
                total.states += found.states
                total.positions += found.positions
                total.state, total.logits = max(total.state, found.state), max(total.logits, found.logits)
        finally:
            if total.requests:
                print(
                    f"{name:14}{total.requests:9}{total.outputs:9}{total.steps:7}{total.states:8}{total.state:10.1e}"
                    f"{total.positions:8}{total.logits:10.1e}",
                    flush=True,
                )
    verdict = "nothing is wrong" if right else "what is wrong is said above"
    print(f"tolerances: states {STATE_TOLERANCE:.0e}, logits {LOGITS_TOLERANCE:.0e}; {verdict}")
    print("met with: " + ", ".join(f"{what} {count}" for what, count in sorted(happened.items()) if count))
    return right


def control(device: torch.device, tries: int = 10) -> bool:
    """Zero the state that a request resumes from: its outputs must change, or the check above says little."""
    model = build(flow.CONFIGS["partial hits"], 0, device)
    changed = sum(flow.zeroing_shows(model, seed) for seed in range(tries))
    print(f"control: with the state it resumes from zeroed, a request's outputs change in {changed} of {tries} tries")
    return changed > 0.8 * tries


def decode(devices: Sequence[torch.device], rounds: int, rates: Sequence[list[float]]) -> None:
    """Tokens a second of decode steps with 64 running requests, assertions off: one for each device and round.

    They are added to ``rates`` as they are measured.
    """
    config = Config((Group("full", 16), Group("mamba", 64)), 2_000, 16, PROMPT * RUNNING, max_running=RUNNING)
    engines = [AssertingEngine(config, build(config, 0, d, layers=2), "off", device=d) for d in devices]
    for engine in engines:
        for index in range(RUNNING):
            engine.submit(f"r{index}", range(1_000 * index, 1_000 * index + PROMPT), config.max_model_len)
        while any(request.outputs < 2 for request in engine.scheduler.requests.values()):
            engine.step()
    for number in range(rounds + 1):  # the first one warms up
        for engine, seen in zip(engines, rates, strict=True):
            began = time.perf_counter()
            for _ in range(STEPS):
                engine.step()  # reads its tokens back, and so waits for the device
            if number:
                seen.append(RUNNING * STEPS / (time.perf_counter() - began))
        if number:
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)


def show_rates(devices: Sequence[torch.device], rates: Sequence[list[float]]) -> None:
    for device, seen in zip(devices, rates, strict=True):
        if seen:
            rate, of_cpu = statistics.median(seen), statistics.median(seen) / statistics.median(rates[0])
            where = "one CPU thread" if device.type == "cpu" else str(device)
            print(f"decode, {RUNNING} running requests: {rate:.0f} tokens/s on {where}, {of_cpu:.2f} of the CPU's")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seeds", type=int, default=5, help="workloads for each configuration")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of decode steps that are timed")
    options = parser.parse_args()
    if min(options.seeds, options.rounds) < 1:
        parser.error("--seeds and --rounds must be at least 1")
    try:
        device = torch.device(options.device)
    except RuntimeError as error:
        parser.error(f"unknown device {options.device!r}: {first_line(error)}")
    reason = missing(device)
    if reason is not None:
        parser.error(reason)
    torch.set_num_threads(1)  # matrices this small gain nothing from a second one
    devices = [CPU] if device.type == "cpu" else [CPU, device]
    rates: list[list[float]] = [[] for _ in devices]
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print(describe(device))
        right = check(device, options.seeds)
        right = control(device) and right
        decode(devices, options.rounds, rates)
    except KeyboardInterrupt:
        show_rates(devices, rates)
        print("interrupted: the figures are those so far", file=sys.stderr)
        return 130
    show_rates(devices, rates)
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
