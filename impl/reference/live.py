"""Live assertions: an engine that judges itself by the catalogue while it serves, and stops where it breaks.

``off`` judges nothing and pays nothing. ``touched`` judges each step by what it touched, at a cost that does not depend
on the size of the pool. ``full`` looks at the whole state after every step, asks every question twice, and re-reads
everything that a step attends to. All three take the same decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from kvproof.impl.reference.batch import Model
from kvproof.impl.reference.engine import Engine
from kvproof.impl.reference.request import Request
from kvproof.impl.reference.scheduler import Drafter
from kvproof.invariants.monitor import InvariantBroken, Monitor
from kvproof.spec.config import Config
from kvproof.spec.events import StepEnd
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.scenario import MOST_ACTIONS, Action, Scenario
from kvproof.spec.tracer import State

Mode = Literal["off", "touched", "full"]


class EngineStopped(Exception):
    """An invariant broke. ``finding`` names it, and has the scenario that makes it happen again.

    Where more happened than a scenario may hold (:data:`kvproof.spec.scenario.MOST_ACTIONS`), the scenario is the
    beginning of it and need not reproduce anything.
    """

    def __init__(self, finding: Finding) -> None:
        broken = finding.violation
        super().__init__(f"{broken.invariant} ({broken.cause}): {broken.witness}")
        self.finding = finding


class AssertingEngine(Engine):
    """An :class:`Engine` that asserts the catalogue. Everything done to it is recorded as a scenario's actions."""

    def __init__(
        self, config: Config, model: Model, mode: Mode = "touched", *, device: torch.device | str = "cpu"
    ) -> None:
        self.mode: Mode = mode
        self.monitor = Monitor(stop=True)
        self.actions: list[Action] = []
        self._owners: dict[State, str] = {}
        self._growing: list[Request] = []
        observer = None if mode == "off" else self.monitor
        super().__init__(config, model, observer, whole=mode == "full", device=device)

    # -- what is done to it, recorded ---------------------------------------------------------------------------------

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int, claimed: int = 0, missing: int = 0) -> Request:
        request = super().submit(name, prompt, max_tokens, claimed, missing)
        if self.observer is not None:
            self._catch_up()
            shared = next((n for n in range(request.known, 0, -1) if request.states[n] in self._owners), 0)
            base = self._owners[request.states[shared]] if shared else ""
            self._record(
                Action("submit", name, base, shared, request.known, request.max_tokens, request.claimed, missing)
            )
            self._growing.append(request)
        return request

    def finish(self, name: str) -> None:
        self._record(Action("finish", name))
        super().finish(name)

    def abort(self, name: str) -> None:
        self._record(Action("abort", name))
        super().abort(name)

    def reset(self) -> bool:
        self._record(Action("reset"))
        return super().reset()

    def evict(self, count: int) -> None:
        self._record(Action("evict", times=count))
        super().evict(count)

    def preempt(self, name: str) -> bool:
        self._record(Action("preempt", name))
        return super().preempt(name)

    def step(self, drafter: Drafter = lambda request, count: ()) -> StepEnd:
        """One step, judged. Raises :class:`EngineStopped`; the engine must not be used after that."""
        if self.observer is None:
            return super().step(drafter)
        self._record(Action("step"))
        try:
            end = super().step(drafter)
        except InvariantBroken as broken:
            raise self._stopped(broken.violation) from None
        self._accepted()
        if self.mode == "full":
            self.audit()
        return end

    def audit(self) -> None:
        """Judge the whole state now. Raises :class:`EngineStopped` with the first thing that is wrong."""
        pool_in_use = self.scheduler.requests or self.scheduler.store.flying
        for violation in self.monitor.audit(self.view):
            if not (pool_in_use and violation.invariant == "REF.drained"):
                raise self._stopped(violation)

    # -- the scenario -------------------------------------------------------------------------------------------------

    def scenario(self) -> Scenario:
        """What happened so far. Prompts appear by what they share with earlier ones, not by their tokens."""
        return Scenario(self.config, tuple(self.actions), "recorded by a live engine")

    def _record(self, action: Action) -> None:
        if self.observer is None or len(self.actions) >= MOST_ACTIONS:
            return
        self.actions.append(action)

    def _accepted(self) -> None:
        """The step just recorded accepted these drafts; steps that are alike become one action."""
        if self.actions[-1].kind != "step":
            return
        last = replace(self.actions.pop(), accept=self.accepted)
        before = self.actions[-1] if self.actions else None
        if before is not None and before.kind == "step" and before.accept == last.accept:
            self.actions[-1] = replace(before, times=before.times + 1)
        else:
            self.actions.append(last)

    def _catch_up(self) -> None:
        """Remember whose prefixes are whose, as far as requests have come since the last one was submitted."""
        for request in self._growing:
            for state in reversed(request.states[1:]):
                if state in self._owners:
                    break  # and so are those that lead to it
                self._owners[state] = request.name
        self._growing = [request for request in self._growing if request.name in self.scheduler.requests]

    def _stopped(self, violation: Violation) -> EngineStopped:
        scenario = self.scenario()
        return EngineStopped(Finding(violation, "reference", scenario, len(scenario.actions) - 1))
