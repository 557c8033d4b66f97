"""Whole workloads with floats, held against runs without any cache: nobody may be able to tell that there is one.

A workload is a scenario like any other. While it runs the catalogue judges the tracers; beside that, every output of
every request must be the greedy token of a run without any cache, every logit behind it and every state under a key the
recomputed one within the model's tolerances. Neither look knows of the other: the floats would show a fault that the
tracers' own bookkeeping shares.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from kvproof.impl.reference.batch import Load, Row
from kvproof.impl.reference.device import Device, Watcher
from kvproof.impl.reference.engine import Engine
from kvproof.impl.reference.live import AssertingEngine, EngineStopped, Mode
from kvproof.impl.reference.memory import Memory
from kvproof.impl.reference.model import LOGITS_TOLERANCE, STATE_TOLERANCE, TorchModel
from kvproof.impl.reference.network import VOCABULARY
from kvproof.impl.reference.pool import CacheEvent, KeyName
from kvproof.impl.reference.request import Request
from kvproof.impl.reference.step import Outcome, Step
from kvproof.impl.reference.subject import Driver
from kvproof.invariants.monitor import InvariantBroken
from kvproof.spec.config import Config, Group
from kvproof.spec.events import Forward, Loaded, Observation, Resume, StepEnd
from kvproof.spec.scenario import Action, Scenario
from kvproof.spec.tracer import State, advance, length_of

FULL, RECURRENT = Group("full", 16), Group("mamba", 32)

CONFIGS: Final[Mapping[str, Config]] = {
    "whole blocks": Config((Group("full", 16), Group("mamba", 16)), 80, 16, 64, retention=None),
    "partial hits": Config((FULL, RECURRENT), 90, 8, 48),
    "window": Config((Group("full", 8), Group("window", 8, window=20), Group("mamba", 16)), 120, 8, 64),
    "checkpoints": Config((FULL, RECURRENT, RECURRENT), 120, 8, 96, checkpoint_blocks=1, checkpoint_alignment=8),
    "drafts": Config((FULL, RECURRENT), 100, 4, 64, speculative=3, eagle=True),
    "tight": Config((Group("full", 8), Group("mamba", 16)), 25, 4, 80, max_running=6, max_model_len=160, speculative=2,
                    eagle=True, full_sequence_must_fit=False),
    "sync store": Config((FULL, RECURRENT), 90, 8, 64, connector="sync", divergent_hits=True),
    "async store": Config((FULL, Group("window", 8, window=20), RECURRENT), 120, 8, 64, speculative=1, eagle=True,
                          connector="async", divergent_hits=True, load_steps=2),
}  # fmt: skip
"""One configuration for every mechanism that moves content about."""


# -- workloads --------------------------------------------------------------------------------------------------------


def draw(name: str, seed: int, requests: int = 10) -> Scenario:
    """A random workload under ``CONFIGS[name]``: fresh prompts, siblings and follow-ups that arrive while others run,
    some of which are ended, aborted or preempted; now and then the cache is cleared. The same again for the same
    arguments."""
    config, rng = CONFIGS[name], random.Random(f"{name} {seed}")
    block, unit, drafts = config.mamba_block, config.hash_unit, config.speculative
    actions: list[Action] = []
    prompts: list[Action] = []
    for number in range(1, requests + 1):
        near = rng.randrange(4) * block + rng.choice((0, 1, unit - 1, unit, unit + 1, block // 2, block - 1))
        shared, length, base = 0, max(1, near), None
        if prompts and rng.random() < 0.75:
            base = rng.choice(prompts[-4:])
            longest = base.length + base.max_tokens
            shared = rng.choice((longest, longest, base.length, base.length // unit * unit, base.length // 2))
            length = max(1, min(shared + rng.choice((1, unit, unit + 3, block + 1)), 5 * block))
        claimed = rng.choice((0, length, length, length // 2)) if config.connector != "none" else 0
        prompts.append(
            Action(
                "submit",
                f"r{number}",
                base.request if base is not None else "",
                min(shared, length),
                length,
                rng.choice((1, 2, drafts + 2, 7, block // 2)),
                claimed,
                rng.choice((0, 0, 1, block, claimed)) if claimed else 0,
            )
        )
        actions.append(prompts[-1])
        if rng.random() < 0.3:
            continue  # the next one arrives in the same moment
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            actions.append(Action("step", accept=_accepted(rng, drafts)))
        if rng.random() < 0.3:
            kind = rng.choice(("finish", "abort", "preempt", "reset", "evict"))
            actions += _interference(kind, rng.choice(prompts[-3:]).request, rng)
    actions += [Action("step", accept=_accepted(rng, drafts)) for _ in range(6)]
    return Scenario(config, tuple(actions), f"workload {name}, seed {seed}")


def _accepted(rng: random.Random, drafts: int) -> tuple[int, ...]:
    return tuple(rng.randint(0, drafts) for _ in range(rng.randint(1, 3))) if drafts else ()


def _interference(kind: str, request: str, rng: random.Random) -> list[Action]:
    match kind:
        case "finish" | "abort" | "preempt":
            return [Action(kind, request)]
        case "reset":
            return [Action("step", times=60), Action("reset")]  # it has no effect while blocks are in use
        case _:
            return [Action("evict", times=rng.choice((0, 3)))]


class PlainTeacher:
    """Proposes drafts of which the first are what a run without any cache would say, and the next is not."""

    def __init__(self, model: TorchModel) -> None:
        self.model = model
        self._following: dict[State, int] = {}

    def drafts(self, request: Request, right: int, count: int) -> Sequence[int]:
        tokens, state, drafts = list(request.tokens), request.states[-1], []
        for index in range(count):
            token = self._next(state, tokens) if index <= right else 0
            drafts.append(token if index < right else (token + 1) % VOCABULARY)
            tokens.append(drafts[-1])
            state = advance(state, drafts[-1])
        return drafts

    def _next(self, state: State, tokens: Sequence[int]) -> int:
        if state not in self._following:
            (self._following[state],) = self.model.run_plain(tokens, 1)
        return self._following[state]


# -- judging ----------------------------------------------------------------------------------------------------------


class Recording:
    """The model, keeping the logits that it chose by: ``logits`` maps a prefix to those after it."""

    def __init__(self, model: TorchModel) -> None:
        self.model = model
        self.logits: dict[State, Tensor] = {}

    def words(self, kind: str, block_size: int) -> int:
        return self.model.words(kind, block_size)

    def fill(self, load: Load, memory: Memory) -> None:
        self.model.fill(load, memory)

    def forward(self, rows: Sequence[Row], memory: Memory) -> list[list[int]]:
        logits = self.model.logits(rows, memory)
        chosen, answers = logits.argmax(-1).tolist(), []
        for row, kept in zip(rows, logits.cpu().split_with_sizes([row.outputs for row in rows]), strict=True):
            answers.append(chosen[: row.outputs])
            chosen = chosen[row.outputs :]
            self.logits.update(zip(row.states[len(row.states) - row.outputs :], kept, strict=True))
        return answers


class KeyedStates:
    """Compares what lies under the keys of recurrent groups with what a run without any cache has there."""

    def __init__(self, model: TorchModel, driver: Driver) -> None:
        self.model, self.driver = model, driver
        self.worst = 0.0
        self.compared = 0
        self._new: list[tuple[int, KeyName]] = []
        self._right: dict[State, dict[int, Tensor]] = {}
        driver.engine.subscribers.append(self._hear)

    def _hear(self, event: CacheEvent) -> None:
        if event.kind == "stored":
            self._new.append((event.block, event.key))

    def compare_new(self) -> None:
        """Those keyed since the last call, as far as they still are."""
        keys = self.driver.engine.scheduler.pool.keys
        new, self._new = self._new, []
        for block, key in new:
            if key in keys[block]:
                self._compare(block, key)

    def compare_all(self) -> None:
        """Every key that there is: what was right once must be right still."""
        for block, keys in enumerate(self.driver.engine.scheduler.pool.keys):
            for key in keys:
                self._compare(block, key)

    def _compare(self, block: int, key: KeyName) -> None:
        group, state = key
        config, memory = self.model.config, self.driver.engine.memory
        if config.groups[group].kind != "mamba":
            return
        if state not in self._right:
            self._right[state] = self.model.plain_states(self._tokens(state))
        right = self._right[state][group]
        found = memory.words[block, : len(right)].cpu()
        self.worst = max(self.worst, _difference(found, right))
        self.compared += 1

    def _tokens(self, state: State) -> list[int]:
        length = length_of(state)
        for request in self.driver.sequences.values():
            if length < len(request.states) and request.states[length] == state:
                return request.tokens[:length]
        raise LookupError("a key names a prefix that nobody sent")


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest; infinite where there is a NaN."""
    return float((one - other).abs().nan_to_num(nan=float("inf")).max()) if one.numel() else 0.0


@dataclass
class Flow:
    """What a workload did. ``wrong`` says in words what was not right: nothing, if the cache is.

    ``state`` and ``logits`` are the largest differences from recomputation, over ``states`` keyed blocks looked at and
    ``positions`` outputs. ``happened`` counts what the workload met with, where the engine was observed.
    """

    wrong: list[str] = field(default_factory=list)
    requests: int = 0
    outputs: int = 0
    steps: int = 0
    states: int = 0
    state: float = 0.0
    positions: int = 0
    logits: float = 0.0
    happened: Counter[str] = field(default_factory=Counter)


def run(
    scenario: Scenario,
    model: TorchModel,
    mode: Mode = "full",
    plant: Callable[[Engine], None] | None = None,
) -> Flow:
    """Run ``scenario`` on ``model`` (of the same configuration), drain it, and hold everything against recomputation.

    ``plant`` may make the engine faulty before its first step.
    """
    flow, recording = Flow(), Recording(model)
    engine = AssertingEngine(scenario.config, recording, mode, device=model.device)
    if plant is not None:
        plant(engine)
    driver = Driver(engine, PlainTeacher(model))
    states = KeyedStates(model, driver)
    if engine.observer is not None:
        engine.observer = _Tap(engine, flow.happened)
    try:
        for action in scenario.actions:
            applied = driver.apply(action)
            flow.happened[action.kind] += applied
            flow.happened["follow-up or sibling"] += applied and bool(action.base)
            states.compare_new()
        driver.drain()
        states.compare_all()
    except InvariantBroken as broken:
        flow.wrong.append(str(broken))
    except EngineStopped as stopped:
        flow.wrong.append(str(stopped))
    flow.steps = engine.scheduler.steps
    flow.states, flow.state = states.compared, states.worst
    if flow.state >= STATE_TOLERANCE:
        flow.wrong.append(f"a keyed state differs by {flow.state:.1e} from its recomputation")
    for request in driver.sequences.values():
        _judge(request, model, recording, flow)
    return flow


def _judge(request: Request, model: TorchModel, recording: Recording, flow: Flow) -> None:
    """One request's outputs, and the logits that they were chosen by."""
    prompt, outputs = request.tokens[: request.prompt], request.tokens[request.prompt :]
    if request.finishing and outputs[-1:] == [Device.EOS]:
        outputs = outputs[:-1]  # said by whoever ended the request, not by the model
    flow.requests += 1
    flow.outputs += len(outputs)
    if not outputs:
        return
    wrong = model.first_wrong(prompt, outputs)
    if wrong is not None:
        flow.wrong.append(f"{request.name}: output {wrong} of {len(outputs)} is not the greedy token")
    plain = model.plain_logits([*prompt, *outputs[:-1]])
    for length in range(len(prompt), len(plain) + 1):
        found = recording.logits.get(request.states[length])
        if found is None:
            flow.wrong.append(f"{request.name}: nothing was computed after {length} tokens, yet an output is there")
            continue
        flow.positions += 1
        difference = _difference(found, plain[length - 1])
        flow.logits = max(flow.logits, difference)
        if difference >= LOGITS_TOLERANCE:
            flow.wrong.append(f"{request.name}: the logits after {length} tokens differ by {difference:.1e}")
            return


class _Tap:
    """Counts what a workload meets with, on the way to whoever judges."""

    def __init__(self, engine: Engine, happened: Counter[str]) -> None:
        assert engine.observer is not None
        self._judge, self._config, self._happened = engine.observer, engine.config, happened
        self._engine = engine
        self._running: tuple[str, ...] = ()

    def __call__(self, observation: Observation) -> None:
        event, happened = observation.event, self._happened
        match event:
            case Resume():
                happened["resumed"] += event.local > 0
                happened["resumed inside a block"] += event.local % self._config.scheduler_block > 0
                happened["resumed from a store"] += event.external > 0
                happened["diverged"] += event.diverged and event.external > 0
            case Forward():
                happened["drafts"] += event.drafts
            case Loaded():
                happened["loads that fell short"] += event.received < event.claimed
            case StepEnd():
                happened["drafts accepted"] += sum(self._engine.accepted)
                happened["preempted"] += len(set(self._running) & set(event.waiting))
                self._running = event.running
            case _:
                pass
        self._judge(observation)


# -- the control ------------------------------------------------------------------------------------------------------


def zeroing_shows(model: TorchModel, seed: int) -> bool:
    """Whether an output of a request changes if the state that it resumes from is zeroed in its block.

    A check on outputs is worth as much as they depend on what is cached. ``model`` needs a recurrent group.
    """
    rng = random.Random(seed)
    engine = AssertingEngine(model.config, model, "off", device=model.device)
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(2 * model.config.mamba_block, 100))]
    engine.submit("first", prompt, 1)
    while engine.scheduler.requests:
        engine.step()
    more = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 12))]
    request = engine.submit("second", [*prompt, *more], 8)
    execute = engine.device.execute
    resumed: list[int] = []

    def zeroed(step: Step, watch: Watcher | None) -> dict[str, Outcome | None]:
        if not resumed:
            resumed.extend(block for part in step.rows for block in part.row.state if block)
            engine.memory.words[resumed] = 0.0
        return execute(step, watch)

    engine.device.execute = zeroed  # type: ignore[method-assign]
    while engine.scheduler.requests:
        engine.step()
    if not resumed:
        raise LookupError(f"seed {seed}: the second request resumes from nothing")
    return model.first_wrong(request.tokens[: request.prompt], request.tokens[request.prompt :]) is not None
