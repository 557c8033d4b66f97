"""Runs inside one release: a plain engine of its own, watched live.

``python tests/live_plays.py PLAY [ARGUMENTS]`` with the release on ``PYTHONPATH``. Prints one JSON object.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvproof import scenario_file
from kvproof.impl.vllm.drift import load, quiet, release
from kvproof.impl.vllm.live import overlay
from kvproof.impl.vllm.live.install import Installed, install
from kvproof.impl.vllm.plain import PlainEngine
from kvproof.impl.vllm.subject import VllmSubject
from kvproof.invariants.monitor import InvariantBroken, Monitor, RunSpoiled
from kvproof.models.stateful.strategies import Dice, Menu, Setup, draw_setup
from kvproof.spec.config import Config, ConfigError, Group
from kvproof.spec.scenario import Action, Scenario

HYBRID = Config((Group("full", 16), Group("mamba", 16)), num_blocks=200, hash_unit=16, step_tokens=64,
                max_running=4, max_model_len=1024, retention=None)  # fmt: skip


def serve(config: Config, actions: tuple[Action, ...]) -> PlainEngine:
    engine = PlainEngine(config)
    for action in actions:
        engine.apply(action)
    for _ in range(300):
        if engine.scheduler.requests:
            engine.step()
    for name in list(engine.scheduler.requests):
        engine.apply(Action("abort", name))
    for _ in range(3):
        if engine.scheduler.has_requests():
            engine.step()
    return engine


def told(watching: Installed) -> list[dict[str, Any]]:
    return [
        {
            "identity": list(found.violation.identity),
            "witness": found.violation.witness,
            "where": found.where,
            "since": found.since,
            "history": list(found.history),
            "known": found.known,
            "lines": found.lines(),
            "scenario": None if found.finding is None else scenario_file.to_data(found.finding.scenario, found.finding),
        }
        for found in watching.findings
    ]


def conversation() -> tuple[Action, ...]:
    """Plain traffic: prompts that share a beginning, follow-ups, several at once. Nobody looks for anything."""
    actions: list[Action] = []
    for i in range(6):
        actions += [
            Action("submit", f"a{i}", "a0" if i else "", 40 if i else 0, 90 + 7 * i, 20),
            Action("step", times=2),
        ]
    actions.append(Action("step", times=30))
    for i in range(6):
        actions += [Action("submit", f"b{i}", f"a{i}", 100 + 8 * i, 150 + 8 * i, 9), Action("step", times=3)]
    return (*actions, Action("step", times=40))


# -- plays ----------------------------------------------------------------------------------------------------------


def play(file: str, mode: str) -> dict[str, Any]:
    """A scenario, on a watched engine."""
    scenario = scenario_file.load(Path(file)).scenario
    watching = install("full" if mode == "full" else "touched")
    raised = ""
    try:
        serve(scenario.config, scenario.actions)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    return {"found": told(watching), "raised": raised, "errors": watching.errors}


def healthy(mode: str) -> dict[str, Any]:
    watching = install("full" if mode == "full" else "touched")
    for changes in ({}, {"speculative": 2, "eagle": True}, {"num_blocks": 40}, {"hash_unit": 4, "groups": (
        Group("full", 4), Group("window", 4, window=24), Group("mamba", 16))}):  # fmt: skip
        config = replace(HYBRID, **changes)
        if config.eagle:
            config = replace(config, groups=(Group("full", 16, drafter=True), Group("mamba", 16)))
        serve(config, conversation())
    return {"found": told(watching), "errors": watching.errors, "evaluations": watching.evaluations,
            "engines": watching.engines, "lacking": watching.not_applicable}  # fmt: skip


def differ(mode: str, first: str, count: str) -> dict[str, Any]:
    """Random scenarios: what the fuzzer's driver finds, and what a watched plain engine finds."""
    subject = VllmSubject(None, "vllm")
    apart, runs, steps, found = [], 0, 0, 0
    for seed in range(int(first), int(first) + int(count)):
        scenario = _scenario(random.Random(seed), subject)
        monitor = Monitor(stop=False)
        try:
            driven = subject.start(scenario.config, monitor)
        except ConfigError:
            continue
        try:
            for action in scenario.actions:
                driven.apply(action)
            driven.drain()
        except RunSpoiled:
            pass
        watching = install("full" if mode == "full" else "touched")
        raised = ""
        try:
            engine = serve(scenario.config, scenario.actions)
            steps += engine.scheduler.kv_cache_manager._kvproof._steps
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        watching.uninstall()
        unseen = {"ADMIT.stall", *watching.not_applicable}
        ours = {v.identity for v in monitor.violations if not {v.invariant, v.invariant.partition(".")[0]} & unseen}
        live = {f.violation.identity for f in watching.findings if f.violation.invariant != "ADMIT.stall"}
        runs += 1
        found += bool(ours)
        if ours - live or watching.errors or (raised and not any(i == "FLOW.no-crash" for i, _ in live)):
            apart.append([seed, sorted(ours - live), sorted(live - ours), raised, watching.errors])
        elif live - ours:
            apart.append([seed, [], sorted(live - ours), "", []])
    return {"apart": apart, "runs": runs, "steps": steps, "found": found}


def _scenario(rng: random.Random, subject: VllmSubject) -> Scenario:
    setup: Setup
    while True:
        setup = draw_setup(Dice(rng.randbytes(40)))
        setup = setup.in_order()
        config = replace(setup.config, connector="none", divergent_hits=False, load_steps=1, offload_blocks=0,
                         cache_events=False)  # fmt: skip
        setup = replace(setup, config=config, forced=False, unreliable=False).resolved(subject.default_retention)
        if release().version < (0, 30):
            setup = setup.without_checkpoints()
        if setup.config.problem() is None:
            break
    dice, menu = Dice(rng.randbytes(4000)), Menu(setup)
    actions: list[Action] = []
    names: list[str] = []
    for _ in range(rng.randrange(4, 40)):
        kind = dice.pick("submit", "submit", "step", "step", "step", "finish", "abort", "step")
        if kind == "submit":
            base = dice.of(names) if names and dice.pick(0, 1, 1) else ""
            shared = dice.of(menu.lengths) if base else 0
            length = shared + dice.of(menu.extras) if base else dice.of(menu.prompts)
            names.append(f"r{len(names) + 1}")
            actions.append(Action("submit", names[-1], base, shared, length, dice.of(menu.outputs)))
        elif kind == "step":
            actions.append(Action("step", times=1 + dice.up_to(5), accept=dice.of(menu.accepts)))
        elif names:
            actions.append(Action(kind, dice.of(names)))
    return Scenario(setup.config, tuple(actions))


def stopped(file: str) -> dict[str, Any]:
    """Reaction ``raise``: the engine stops in the call that broke the rule; what is known does not stop it."""
    scenario = scenario_file.load(Path(file)).scenario
    first = install("touched", "log")
    serve(scenario.config, scenario.actions)
    first.uninstall()
    watching = install("touched", "raise")
    raised = ""
    try:
        serve(scenario.config, scenario.actions)
    except InvariantBroken as broken:
        raised = broken.violation.invariant
    watching.uninstall()
    known = install("touched", "raise", known=[found.violation.identity for found in first.findings])
    serve(scenario.config, scenario.actions)
    return {"raised": raised, "stopped after": len(watching.findings), "known": [f.known for f in known.findings]}


def broken_hook() -> dict[str, Any]:
    """An error inside kvproof: the engine goes on, and is judged no more."""
    from kvproof.impl.vllm.live import engine as live

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("a fault of ours")

    live.Watched._note = fail  # type: ignore[method-assign]
    watching = install()
    served = serve(HYBRID, conversation())
    return {"errors": watching.errors, "found": told(watching), "left": len(served.scheduler.requests),
            "steps": served.scheduler.kv_cache_manager._kvproof._steps}  # fmt: skip


def broken_inside(where: str) -> dict[str, Any]:
    """A part of ours that fails, wherever it is called from: the engine goes on."""
    module, cls, name = where.split(":")

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a fault of ours")

    part = getattr(importlib.import_module(f"kvproof.impl.vllm.live.{module}"), cls)
    watching = install("full", on_miss=lambda miss: None)
    engine = PlainEngine(HYBRID)
    setattr(part, name, fail)
    statuses = load("vllm.v1.request").RequestStatus
    engine.submit("a", range(90), 5)
    engine.submit("b", range(500, 560), 4)
    engine.step()
    engine.step()
    engine.scheduler.reset_prefix_cache()
    engine.scheduler.finish_requests("a", statuses.FINISHED_ABORTED)
    for _ in range(12):
        engine.step()
    engine.scheduler.reset_prefix_cache()
    return {"errors": watching.errors, "left": len(engine.scheduler.requests), "found": told(watching)}


def as_they_are_called(mode: str) -> dict[str, Any]:
    """Methods take what vLLM's do, by place and by name, and classes that mind being extended are left alone."""
    scheduler = load("vllm.v1.core.sched.scheduler").Scheduler

    class Named(scheduler):  # type: ignore[misc,valid-type]
        def __init_subclass__(cls, *, name: str, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)

    class Other(Named, name="other"):  # type: ignore[misc,valid-type]
        def add_request(self, request: Any, extra: int = 0) -> Any:
            self.extra = extra
            return super().add_request(request)

    class Plain(scheduler):  # type: ignore[misc,valid-type]
        def add_request(self, request: Any, extra: int = 0) -> Any:
            self.extra = extra
            return super().add_request(request)

    watching = install(mode)  # type: ignore[arg-type]
    twice = ""
    try:
        install("touched")
    except ValueError as error:
        twice = str(error)
    statuses = load("vllm.v1.request").RequestStatus
    engine = PlainEngine(HYBRID)
    for name in "ab":
        engine.submit(name, range(60 * ord(name), 60 * ord(name) + 60), 6)
    engine.scheduler.finish_requests([], statuses.FINISHED_ABORTED)
    engine.scheduler.finish_requests(set(), finished_status=statuses.FINISHED_ABORTED)
    here = len(engine.scheduler.requests)
    request = engine.scheduler.requests["a"]
    update = engine.scheduler.update_from_output
    engine.scheduler.update_from_output = lambda output, answer: update(
        scheduler_output=output, model_runner_output=answer
    )
    split = engine.scheduler._mamba_block_aligned_split
    answers = [split(request, 20), split(request=request, num_new_tokens=20),
               split(request, 20, num_new_local_computed_tokens=0)]  # fmt: skip
    remaining = engine.scheduler._request_remaining_blocks(request=request)
    for _ in range(12):
        engine.step()
    classes = [cls.__init_subclass__ is not None and cls for cls in (Other, Plain)]
    alone = [overlay.extensible(cls) for cls in classes]
    return {"here": here, "answers": len(set(answers)), "remaining": remaining > 0, "twice": twice, "alone": alone,
            "left": len(engine.scheduler.requests), "errors": watching.errors, "found": told(watching)}  # fmt: skip


def untouched() -> dict[str, Any]:
    """What is patched without ``KVPROOF``, with it, and after :meth:`Installed.uninstall`."""
    from kvproof import plugin

    classes = [load("vllm.v1.core.sched.scheduler").Scheduler, load("vllm.v1.core.kv_cache_manager").KVCacheManager]
    before = [cls.__init__ for cls in classes]
    plugin.register()
    inert = [cls.__init__ for cls in classes] == before and plugin.installed is None
    engine = PlainEngine(HYBRID)
    plain = not {"schedule", "update_from_output"} & engine.scheduler.__dict__.keys()
    watching = install()
    patched = all(cls.__init__ is not init for cls, init in zip(classes, before, strict=True))
    first, second = PlainEngine(HYBRID), PlainEngine(HYBRID)
    watching.uninstall()
    after = PlainEngine(HYBRID)
    for number in range(3):
        for one in (first, second, after):
            one.submit(f"r{number}", range(100 * number, 100 * number + 40), 8)
            one.step()
    counted = [one.scheduler.kv_cache_manager._kvproof._steps for one in (first, second)]
    managers = [one.scheduler.kv_cache_manager for one in (engine, after)]
    parts = [part for manager in managers for part in (manager, manager.coordinator, manager.block_pool)]
    return {
        "inert": inert and plain,
        "patched": patched,
        "restored": [cls.__init__ for cls in classes] == before,
        "plain after": not any("kvproof" in name for part in parts for name in dir(type(part))),
        "still watched": counted == [3, 3] and bool(watching.evaluations),
        "errors": watching.errors + told(watching),
    }


def plugged(file: str) -> dict[str, Any]:
    """The plug-in as vLLM calls it, with the environment of the caller, in a folder of its own."""
    from kvproof import plugin

    scenario = scenario_file.load(Path(file)).scenario
    with tempfile.TemporaryDirectory() as folder:
        plugin.os.environ.setdefault("KVPROOF_DIR", folder)
        plugin.register()
        plugin.register()
        serve(scenario.config, scenario.actions)
        written = {path.name: path.read_text(encoding="utf-8") for path in Path(folder).iterdir()}
    return {"on": plugin.installed is not None, "files": written,
            "found": told(plugin.installed) if plugin.installed else []}  # fmt: skip


if __name__ == "__main__":
    quiet()
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
