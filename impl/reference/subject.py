"""The reference engine as a subject: actions in, observations out, by the same machine that drives vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from kvproof.impl.reference.batch import Model
from kvproof.impl.reference.engine import Engine, crash_of
from kvproof.impl.reference.null_model import FIRST_OUTPUT, OUTPUTS, NullModel
from kvproof.impl.reference.request import Request
from kvproof.impl.reference.view import ReferenceView
from kvproof.spec.config import RARE, Config, ConfigError
from kvproof.spec.events import Drained
from kvproof.spec.scenario import Action
from kvproof.spec.subject import Observer
from kvproof.spec.tracer import LENGTH_BITS, advance

DRAIN_STEPS = 400
"""After so many steps a drain goes on only to see whether anything still comes of it, at most four times as long."""


class Teacher(Protocol):
    """Knows what the model will say: it proposes drafts of which a wanted number is right."""

    def drafts(self, request: Request, right: int, count: int) -> Sequence[int]: ...


class NullTeacher:
    """Knows what :class:`NullModel` says: a function of the prefix."""

    def drafts(self, request: Request, right: int, count: int) -> Sequence[int]:
        state, drafts = request.states[-1], []
        for index in range(count):
            token = FIRST_OUTPUT + (state >> LENGTH_BITS) % OUTPUTS
            drafts.append(token if index < right else token + OUTPUTS)
            state = advance(state, drafts[-1])
        return drafts


class Driver:
    """One reference engine. Implements :class:`kvproof.spec.subject.Driven`."""

    def __init__(self, engine: Engine, teacher: Teacher) -> None:
        self.engine, self.teacher = engine, teacher
        self.config = engine.config
        self.dead = False
        self.sequences: dict[str, Request] = {}

    @property
    def view(self) -> ReferenceView:
        return self.engine.view

    def live(self) -> tuple[str, ...]:
        return tuple(self.engine.scheduler.requests) if not self.dead else ()

    def apply(self, action: Action) -> bool:
        if self.dead or action.rare:
            return False
        try:
            return self._apply(action)
        except Exception as error:
            return self._stopped(error)

    def _apply(self, action: Action) -> bool:
        engine, name = self.engine, action.request
        match action.kind:
            case "submit":
                return self._submit(action)
            case "step":
                for _ in range(action.times):
                    if engine.at_rest:
                        break
                    self._step(action.accept)
                return True
            case "reset":
                return engine.reset()
            case "evict":
                engine.evict(action.times)
                return True
            case _ if name not in engine.scheduler.requests:
                return False
            case "finish":
                engine.finish(name)
            case "abort":
                engine.abort(name)
            case "preempt":
                return engine.preempt(name)
        return True

    def _submit(self, action: Action) -> bool:
        if action.request in self.sequences:
            return False
        base = self.sequences.get(action.base)
        shared = base.tokens[: min(action.shared, action.length)] if base is not None else []
        first = (len(self.sequences) + 1) * 100_000
        prompt = [*shared, *range(first, first + action.length - len(shared))][: self.config.max_model_len - 1]
        if not prompt:
            return False
        outputs = min(action.max_tokens, self.config.max_model_len - len(prompt))
        self.sequences[action.request] = self.engine.submit(
            action.request, prompt, outputs, action.external, action.missing
        )
        return True

    def _step(self, accept: Sequence[int]) -> None:
        def drafter(request: Request, count: int) -> Sequence[int]:
            step = self.engine.scheduler.in_flight
            place = len(step.rows) if step is not None else 0  # requests are counted as they are scheduled
            right = accept[place % len(accept)] if accept else count
            return self.teacher.drafts(request, min(right, count), count)

        self.engine.step(drafter)

    def drain(self) -> None:
        """Finish what can finish, abort what can't, let what is in flight arrive, and judge what is left."""
        if self.dead:
            return
        engine = self.engine
        try:
            steps = 0
            while engine.scheduler.requests and not engine.progress.stalled:
                if steps >= DRAIN_STEPS * (4 if engine.progress.fruitless else 1):
                    break
                self._step(())
                steps += 1
            for name in list(engine.scheduler.requests):
                engine.abort(name)
            while engine.scheduler.store.flying:
                self._step(())
            engine.view.step_has_run(engine.device.written)
            engine._emit(Drained())
        except Exception as error:
            self._stopped(error)

    def _stopped(self, error: Exception) -> bool:
        self.dead = True
        if self.engine.raised is not None:
            raise self.engine.raised from None
        try:
            self.engine._emit(crash_of(error))
        except BaseException:
            assert self.engine.raised is not None
            raise self.engine.raised from None
        return True


class ReferenceSubject:
    """The reference engine on a model that only follows the tracers: what is under test is the cache."""

    name = "reference"

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def families(self) -> frozenset[str]:
        return frozenset({"SLOT", "ADMIT", "REF", "HIT", "TAIL", "EXT", "EVENT", "FLOW", "REUSE"})

    def lacking(self) -> Mapping[str, str]:
        """Keys appear only after the forward that makes their content, so that no hit has to wait for one; and fresh
        blocks are wiped before anything is loaded into them, in this order.
        """
        return {
            "ADMIT.deferred": "no key is registered before its content is there",
            "EXT.zero-spares-load": "a load begins when its blocks have been wiped",
            "EXT.rest-wiped": "its stores offer whole blocks",
            "ADMIT.preemption-frees": "it is not asked what each preemption frees",
            "ADMIT.starved": "it serves in order, and is not asked how long who comes later has waited",
            "ADMIT.startup": "it starts with any pool",
            "EVENT.stored-well-formed": "its events name keys, and list no tokens",
            "EVENT.removed-is-gone": "its events name blocks, each of which has its own keys",
            "EVENT.counters": "it counts nothing",
            **dict.fromkeys(
                ("EXT.offload-content", "EXT.offload-offers", "EXT.offload-serves"), "it has no store of its own"
            ),
        }

    def default_retention(self, eagle: bool) -> int | None:
        """What users get who set nothing: replay boundaries only."""
        return 0

    def model(self, config: Config) -> tuple[Model, Teacher]:
        return NullModel(), NullTeacher()

    def start(self, config: Config, observer: Observer | None) -> Driver:
        config.check()
        if config.image_tokens:
            raise ConfigError("the reference engine serves text: set image_tokens to 0")
        if config.load_failure != "recompute":
            raise ConfigError("the reference engine goes on from what it has: set load_failure to recompute")
        if config.policy != "fcfs" or config.offers != "block":
            raise ConfigError("the reference engine serves in order and loads blocks: set policy fcfs, offers block")
        if config != config.usual():
            raise ConfigError(f"the reference engine has none of {', '.join(RARE)}: leave them out")
        if config.async_scheduling:
            raise ConfigError("the reference engine completes a step before the next: set async_scheduling to false")
        if any(group.kind == "chunked" for group in config.groups):
            raise ConfigError("the reference engine has no chunked local attention: use window groups")
        if config.connector == "offload":
            raise ConfigError("the reference engine has no host memory to offload to: set connector to async or sync")
        model, teacher = self.model(config)
        return Driver(Engine(config, model, observer, device=self.device), teacher)
