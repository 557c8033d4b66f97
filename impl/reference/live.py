"""Live assertions: an engine that judges itself by the catalogue while it serves, and stops where it breaks.

``off`` judges nothing and pays nothing. ``touched`` judges each step by what it touched, at a cost that does not depend
on the size of the pool. ``full`` looks at the whole state after every step, asks every question twice, and re-reads
everything that a step attends to. All three take the same decisions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, SupportsIndex, get_args

import torch

from kvproof.impl.reference.batch import Model
from kvproof.impl.reference.engine import Engine, crash_of
from kvproof.impl.reference.record import Record
from kvproof.impl.reference.request import Request
from kvproof.impl.reference.scheduler import Drafter
from kvproof.invariants.monitor import InvariantBroken, Monitor
from kvproof.spec.config import Config
from kvproof.spec.events import StepEnd
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.promises import promising
from kvproof.spec.scenario import Action, Scenario

Mode = Literal["off", "touched", "full"]


class EngineStopped(Exception):
    """An invariant broke, or the engine raised (``FLOW.no-crash``, with the exception as ``__cause__``). ``finding``
    names it, and has the scenario that makes it happen again.

    Where more happened than a scenario may hold, the scenario is the beginning of it (its note says so, and the
    finding's ``action`` is -1) and need not reproduce anything. That is so where there are, of
    :mod:`kvproof.spec.scenario` and :mod:`kvproof.impl.reference.record`:

    - more than ``MOST_ACTIONS`` actions; steps that are alike are one, up to ``MOST_STEPS`` of them;
    - more than ``MOST_PROMPT_TOKENS`` tokens in all prompts, each rounded up to whole blocks;
    - more than ``MOST_PREFIXES`` prefixes of all sequences, prompts and outputs;
    - more than ``MOST_ACCEPTED`` requests in one step, up to the last that drafts were asked for, or ``MOST_ENTRIES``
      in all steps; a step counts one if as many drafts were accepted of each;
    - more than ``MOST_STEPS`` blocks evicted at once that are not all.

    A scenario's drafts are always as many as the engine asks for: a drafter that offered fewer is told as one whose
    further drafts were wrong. That makes rows longer; where the step or the pool has no room for that, the scenario may
    take another way from there on.
    """

    def __init__(self, finding: Finding) -> None:
        broken = finding.violation
        super().__init__(f"{broken.invariant} ({broken.cause}): {broken.witness}")
        self.finding = finding


class AssertingEngine(Engine):
    """An :class:`Engine` that asserts the catalogue. Everything done to it is recorded as a scenario's actions.

    Raises ``ValueError`` for a mode that there is not.
    """

    def __init__(
        self, config: Config, model: Model, mode: Mode = "touched", *, device: torch.device | str = "cpu"
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"there is no mode {mode!r}: use one of {', '.join(get_args(Mode))}")
        self.mode: Mode = mode
        self.monitor = Monitor(stop=True)
        observer = None if mode == "off" else promising(config, self.monitor)
        super().__init__(config, model, observer, whole=mode == "full", device=device)
        self.record = None if mode == "off" else Record(config)

    # -- what is done to it, recorded once it was ---------------------------------------------------------------------

    def submit(
        self, name: str, prompt: Iterable[SupportsIndex], max_tokens: int, claimed: int = 0, missing: int = 0
    ) -> Request:
        request = super().submit(name, prompt, max_tokens, claimed, missing)
        if self.record is not None:
            self.record.submitted(request)
        return request

    def finish(self, name: str) -> None:
        super().finish(name)
        self._note(Action("finish", name))

    def abort(self, name: str) -> None:
        super().abort(name)
        self._note(Action("abort", name))

    def reset(self) -> bool:
        done = super().reset()
        self._note(Action("reset"))
        return done

    def evict(self, count: int) -> None:
        super().evict(count)
        if self.record is not None:
            self.record.evicted(count, len(self.scheduler.pool.free))

    def preempt(self, name: str) -> bool:
        done = super().preempt(name)
        if done:
            self._note(Action("preempt", name))
        return done

    def step(self, drafter: Drafter = lambda request, count: ()) -> StepEnd:
        """One step, judged. Raises :class:`EngineStopped`; the engine must not be used after that. What ``drafter``
        raises is raised as it is."""
        if self.record is None:
            return super().step(drafter)
        try:
            end = super().step(drafter)
        except InvariantBroken as broken:
            self.record.stepped(self.accepted)
            raise self._stopped(broken.violation) from None
        except Exception as error:
            if error is self.raised or error is self._drafter_raised:
                raise  # a checker's mistake, or the caller's
            self.record.stepped(self.accepted)
            raise self._crashed(error) from error
        self.record.stepped(self.accepted)
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

    @property
    def actions(self) -> list[Action]:
        return [] if self.record is None else self.record.actions

    def scenario(self) -> Scenario:
        """What happened so far. Prompts appear by what they share with earlier ones, not by their tokens."""
        return (self.record or Record(self.config)).scenario()

    def _note(self, action: Action) -> None:
        if self.record is not None:
            self.record.add(action)

    def _crashed(self, error: Exception) -> EngineStopped:
        """The engine itself raised."""
        try:
            self._emit(crash_of(error))
        except InvariantBroken as broken:
            return self._stopped(broken.violation)
        raise error  # nobody minds

    def _stopped(self, violation: Violation) -> EngineStopped:
        if self.raised is None:
            self.raised = InvariantBroken(violation)
        record = self.record or Record(self.config)
        action = -1 if record.ended else len(record.actions) - 1
        return EngineStopped(Finding(violation, "reference", record.scenario(), action))
