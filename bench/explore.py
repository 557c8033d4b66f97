"""How fast small worlds are explored: interpreted, compiled and generated, in one process and in two.

    python bench/explore.py [--scope acceptance] [--states 20000] [--repeat 5] [--compiled] [--generated] [--out FILE]

Distinct states per second, by the clock, with nobody judging (what is measured is the search), and with the catalogue
judging every move. Two processes against one as the median of ``repeat`` pairs, turn and turn about.

``--compiled``: the same sources, unchanged, are compiled by mypyc (which comes with mypy) into a temporary folder, and
explored there by a process of its own. Nothing is written twice, and still it is checked: both must have visited the
same states, compared byte by byte. It takes a C compiler and a minute.

``--generated``: the same sources, translated to C++ for the scope (:mod:`kvproof.models.explore.native`), with nobody
judging, and two threads in place of two processes. They, too, must have visited the same states. The seconds that
reading, translating and compiling take are told apart. Then a larger world, with more than a million states: how long
it takes and how much memory, and two threads against one. It takes a C++ compiler.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvproof.models.explore.native.explorer import Search, digest_of, explore_native
from kvproof.models.explore.scope import Scope
from kvproof.models.explore.scopes import SCOPES
from kvproof.models.explore.search import explore
from kvproof.models.explore.shard import Shard

ROOT = Path(__file__).parents[1]
SOURCES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "spec",
    "invariants",
    "models",
    "impl",
    "kvproof",
    "findings",
    "zoo",
)
COMPILED = (
    "spec/tracer", "spec/logic", "spec/radix", "spec/rules/blocks", "spec/rules/hits", "spec/rules/checkpoint",
    "spec/rules/chunk", "spec/machine/world", "spec/machine/pool", "spec/machine/lookup", "spec/machine/blocks",
    "spec/machine/unmoved", "spec/machine/schedule", "spec/machine/sizes", "spec/machine/device",
    "spec/machine/machine", "spec/machine/dialect", "models/explore/encoding", "models/explore/scope",
    "models/explore/shard",
)  # fmt: skip

LARGER = replace(SCOPES["acceptance"], name="nine blocks", config=replace(SCOPES["acceptance"].config, num_blocks=9))
"""``acceptance`` with nine blocks in place of seven: 1 310 878 states."""


def one(scope: str, most: int, workers: int = 1, judged: bool = False) -> dict[str, Any]:
    """One exploration: states, moves, and how many states a second."""
    began = time.perf_counter()
    done = explore(SCOPES[scope], judged=judged, workers=workers, most=most, liveness=False)
    seconds = time.perf_counter() - began
    return {"states": done.states, "moves": done.transitions, "depth": done.depth, "a second": done.states / seconds}


def digest(scope: str, most: int) -> str:
    """What names the set of states that are visited."""
    shard = Shard(SCOPES[scope], judged=False)
    shard.start()
    while shard.frontier and len(shard.states) < most:
        shard.level()
    return digest_of(shard.states)


def inside(scope: str, most: int, repeat: int) -> dict[str, Any]:
    """What is measured in one process, compiled or not."""
    singles, pairs = [], []
    for _ in range(repeat):
        alone, together = one(scope, most), one(scope, most, workers=2)
        singles.append(alone)
        pairs.append(together["a second"] / alone["a second"])
    best = statistics.median(single["a second"] for single in singles)
    return {
        **singles[0],
        "a second": best,
        "judged": one(scope, most, judged=True)["a second"],
        "two processes": statistics.median(pairs),
        "pairs": sorted(pairs),
        "digest": digest(scope, most),
    }


def paired(scope: Scope, most: int, repeat: int) -> tuple[list[Any], list[float]]:
    """Explorations by what was generated, and how much faster each was with two threads."""
    singles, pairs = [], []
    for _ in range(repeat):
        alone, together = (explore_native(scope, most=most, workers=workers, keep=False) for workers in (1, 2))
        singles.append(alone)
        pairs.append(alone.seconds / together.seconds)
    return singles, sorted(pairs)


def generated(scope: str, most: int, repeat: int, million: int) -> dict[str, Any]:
    """What is measured of the generated explorer. ``million`` is how many states of the larger world are visited."""
    began = time.perf_counter()
    Search(SCOPES[scope], 1, True).close()
    making = time.perf_counter() - began
    found = explore_native(SCOPES[scope], most=most).digest
    singles, pairs = paired(SCOPES[scope], most, repeat)
    Search(LARGER, 1, True).close()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    larger = explore_native(LARGER, most=million, keep=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "states": singles[0].states,
        "moves": singles[0].transitions,
        "depth": singles[0].depth,
        "a second": statistics.median(one.states / one.seconds for one in singles),
        "two processes": statistics.median(pairs),
        "pairs": pairs,
        "digest": found,
        "making": making,
        "larger": {
            "states": larger.states,
            "depth": larger.depth,
            "complete": larger.complete,
            "seconds": larger.seconds,
            "megabytes": peak / 1024,
            "before": before / 1024,
            "pairs": paired(LARGER, million, repeat)[1],
        },
    }


def compiled(folder: Path) -> Path:
    """The package, its inner part compiled. Raises ``SystemExit`` where that can't be done."""
    mypyc = Path(sys.executable).with_name("mypyc")
    if not mypyc.exists() or shutil.which("cc") is None:
        raise SystemExit("compiling needs mypyc (pip install mypy) and a C compiler (cc): leave out --compiled")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    target = folder / "compiled"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", target, source], check=True)
    modules = [f"kvproof/{name}.py" for name in COMPILED]
    done = subprocess.run([mypyc, *modules], cwd=target, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"mypyc: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return target


def apart(options: argparse.Namespace, path: Path | None, how: str = "python") -> dict[str, Any]:
    """:func:`inside` or :func:`generated`, in a process that imports the package from ``path``."""
    command = [sys.executable, "-P", __file__, "--inside", how, "--scope", options.scope,
               "--states", str(options.states), "--larger", str(options.larger)]  # fmt: skip
    environ = {**os.environ, **({"PYTHONPATH": str(path)} if path is not None else {})}
    done = subprocess.run([*command, "--repeat", str(options.repeat)], check=False, capture_output=True, text=True,
                          env=environ)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"no result (exit code {done.returncode})\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _span(pairs: list[float]) -> str:
    return f"({pairs[0]:.2f}-{pairs[-1]:.2f})"


def _larger(found: dict[str, Any]) -> list[str]:
    """What is told of the generated explorer besides its row."""
    larger = found["larger"]
    how = "explored completely" if larger["complete"] else f"explored to depth {larger['depth']}"
    return [
        f"read, translated and compiled in {found['making']:.0f} s (compiled code is kept)",
        f"{LARGER.name}, generated: {larger['states']} states, {how}, in {larger['seconds']:.1f} s "
        f"({larger['states'] / larger['seconds']:.0f} states/s)",
        f"there the process took {larger['megabytes']:.0f} MB, of which {larger['before']:.0f} MB before; "
        f"two threads against one: {statistics.median(larger['pairs']):.2f} {_span(larger['pairs'])}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scope", choices=SCOPES, default="acceptance")
    parser.add_argument("--states", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--generated", action="store_true")
    parser.add_argument("--larger", type=int, default=2_000_000, help="states of the larger world that are visited")
    parser.add_argument("--out", type=Path, help="write the table there, too")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.states, options.repeat) < 1:
        parser.error("there must be a state and a repeat")
    if options.inside == "generated":
        print(json.dumps(generated(options.scope, options.states, options.repeat, options.larger)))
        return 0
    if options.inside:
        result = inside(options.scope, options.states, options.repeat)
        native = importlib.util.find_spec("kvproof.spec.machine.world")
        origin = str(native.origin) if native is not None else ""
        print(json.dumps({**result, "native": not origin.endswith(".py")}))
        return 0
    lines = [f"scope {options.scope}, {os.cpu_count()} cores", f"{'':14}{'states':>9}{'moves':>10}{'depth':>7}"
             f"{'states/s':>10}{'judged':>9}  two processes against one"]  # fmt: skip
    results = {"interpreted": apart(options, None)}
    with tempfile.TemporaryDirectory() as folder:
        if options.compiled:
            results["compiled"] = apart(options, compiled(Path(folder)))
    if options.generated:
        results["generated"] = apart(options, None, "generated")
    for name, found in results.items():
        judged = f"{found['judged']:9.0f}" if "judged" in found else f"{'-':>9}"
        lines.append(f"{name:14}{found['states']:9}{found['moves']:10}{found['depth']:7}{found['a second']:10.0f}"
                     f"{judged}  {found['two processes']:.2f} {_span(found['pairs'])}")  # fmt: skip
    slow = results["interpreted"]
    for name, fast in results.items():
        if name == "interpreted":
            continue
        same = fast["digest"] == slow["digest"] and fast.get("native", True) and not slow["native"]
        lines.append(f"{name} against interpreted: {fast['a second'] / slow['a second']:.1f} times as fast, "
                     + ("the same states, byte by byte" if same else "NOT THE SAME STATES"))  # fmt: skip
    if options.generated:
        lines += _larger(results["generated"])
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if any("NOT THE SAME" in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
