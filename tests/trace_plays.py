"""Runs inside one release: a plain engine of its own, recorded.

``python tests/trace_plays.py PLAY [ARGUMENTS]`` with the release on ``PYTHONPATH``. Prints one JSON object.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import live_plays

from kvproof import scenario_file
from kvproof.impl.vllm.drift import quiet
from kvproof.impl.vllm.live.install import install
from kvproof.impl.vllm.live.record import RecordTo
from kvproof.impl.vllm.live.tracefile import FILES
from kvproof.impl.vllm.plain import PlainEngine
from kvproof.impl.vllm.subject import VllmSubject
from kvproof.spec.config import Config, Group
from kvproof.spec.scenario import Action
from kvproof.trace.checking import check
from kvproof.trace.reader import arrange


def _recorded(folder: Path, config: Config, actions: tuple[Action, ...], megabytes: float = 256) -> tuple[Any, str]:
    """Serve, and record it in ``folder``. What the engine raised, too."""
    watching = install("record", record=RecordTo(folder, megabytes))
    raised = ""
    try:
        live_plays.serve(config, actions)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    watching.uninstall()
    return watching, raised


def record(file: str, folder: str) -> dict[str, Any]:
    """A scenario, recorded; and what the assertions that look at everything find in the same."""
    scenario = scenario_file.load(Path(file)).scenario
    watching, raised = _recorded(Path(folder), scenario.config, scenario.actions)
    live = live_plays.play(file, "full")
    return {"errors": watching.errors, "raised": raised, "live": [found["identity"] for found in live["found"]]}


VARIETY: tuple[dict[str, Any], ...] = (
    {},
    {"speculative": 2, "eagle": True, "groups": (Group("full", 16, drafter=True), Group("mamba", 16))},
    {"num_blocks": 24, "full_sequence_must_fit": False},
    {"num_blocks": 700},
    {"hash_unit": 4, "groups": (Group("full", 4), Group("window", 4, window=24), Group("mamba", 16))},
)


def healthy(folder: str, megabytes: str) -> dict[str, Any]:
    """Plain traffic on several engines, one trace each."""
    errors: list[str] = []
    for changes in VARIETY:
        watching, raised = _recorded(
            Path(folder), replace(live_plays.HYBRID, **changes), live_plays.conversation(), float(megabytes)
        )
        errors += [*watching.errors, *filter(None, [raised])]
    return {"errors": errors}


def differ(first: str, count: str, megabytes: str) -> dict[str, Any]:
    """Random scenarios: what live assertions find, and what is found in a trace of the same afterwards."""
    subject = VllmSubject(None, "vllm")
    apart, found, events, parts = [], 0, 0, 0
    for seed in range(int(first), int(first) + int(count)):
        scenario = live_plays._scenario(random.Random(seed), subject)
        watching = install("touched")
        raised = ""
        try:
            live_plays.serve(scenario.config, scenario.actions)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        watching.uninstall()
        live = {one.violation.identity for one in watching.findings}
        with tempfile.TemporaryDirectory() as folder:
            recording, again = _recorded(Path(folder), scenario.config, scenario.actions, float(megabytes))
            files = sorted(Path(folder).iterdir())
            try:
                result = check(arrange(files))
            except Exception as error:
                apart.append([seed, str(error), [], recording.errors])
                continue
            parts += len(files)
        later = {one.violation.identity for one in result.found}
        found += bool(live)
        events += result.events
        if live != later or recording.errors or raised != again:
            apart.append([seed, sorted(live - later), sorted(later - live), recording.errors, raised, again])
    return {"apart": apart, "found": found, "events": events, "parts": parts}


def long(folder: str, rounds: str, megabytes: str = "256", blocks: str = "2000") -> dict[str, Any]:
    """Conversations, one after another: each round goes on from the one before, with some fresh."""
    config = replace(live_plays.HYBRID, num_blocks=int(blocks), max_running=8, step_tokens=512, max_model_len=4096)
    watching = install("record", record=RecordTo(Path(folder), float(megabytes)))
    engine = PlainEngine(config)
    count = 0
    for round_ in range(int(rounds)):
        for i in range(8):
            base = f"c{round_ - 1}-{i}" if round_ % 6 else ""
            shared = 300 + 100 * (round_ % 6) if base else 0
            engine.apply(Action("submit", f"c{round_}-{i}", base, shared, shared + 120 + 7 * i, 60))
        while engine.scheduler.requests:
            engine.step()
            count += 1
        engine.step()
        engine._requests = {name: one for name, one in engine._requests.items() if name.startswith(f"c{round_}-")}
    watching.uninstall()
    return {"errors": watching.errors, "steps": count, "files": FILES}


def twice(folder: str) -> dict[str, Any]:
    """The same prompt twice, shorter than a hash unit, which its answer then fills."""
    config = Config((Group("full", 32), Group("mamba", 32)), 40, hash_unit=32, step_tokens=64, max_model_len=256)
    ask = [Action("submit", "a", length=31, max_tokens=4), Action("step", times=6),
           Action("submit", "b", base="a", shared=31, length=31, max_tokens=4), Action("step", times=6)]  # fmt: skip
    recording, raised = _recorded(Path(folder), config, tuple(ask))
    return {"errors": recording.errors, "raised": raised}


def full_disk(folder: str, most: str) -> dict[str, Any]:
    """No file of this process may become larger than ``most`` bytes: what can't be written ends the recording."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(most), int(most)))
    watching, raised = _recorded(Path(folder), live_plays.HYBRID, live_plays.conversation())
    return {"errors": watching.errors, "raised": raised}


def plugged(megabytes: str, folder: str) -> dict[str, Any]:
    """The plug-in as vLLM calls it."""
    from kvproof import plugin

    plugin.os.environ.update(KVPROOF="record", KVPROOF_DIR=folder, KVPROOF_TRACE_MB=megabytes)
    plugin.register()
    live_plays.serve(live_plays.HYBRID, live_plays.conversation())
    files = sorted(str(path) for path in Path(folder).iterdir()) if Path(folder).exists() else []
    return {"on": plugin.installed is not None, "files": files}


if __name__ == "__main__":
    quiet()
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
