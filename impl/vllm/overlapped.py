"""Asynchronous scheduling: the next step is scheduled before the scheduler has heard what came of the one that runs.

As in an engine, two steps are in flight, and they run in the order in which they were scheduled. The device is taken to
be slow: a step runs when its outcome is waited for, after the next one has been scheduled and the loads that go with
that have been submitted, which no queue orders against it. That shows blocks that are given away too early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from kvproof.impl.vllm.device import CheckpointRule
from kvproof.impl.vllm.driver import Batch, Driver, propose
from kvproof.impl.vllm.rows import Load
from kvproof.spec.config import Config
from kvproof.spec.subject import Observer
from kvproof.spec.tracer import State, advance

IN_FLIGHT = 2
"""Steps that an engine has in flight with asynchronous scheduling."""


class OverlappedDriver(Driver):
    """A real asynchronous scheduler and its device oracle."""

    def __init__(self, config: Config, observer: Observer | None, checkpoint_rule: CheckpointRule | None) -> None:
        super().__init__(config, observer, checkpoint_rule)
        self._queue: deque[Batch] = deque()
        self._admissions: dict[str, int] = {}
        """How often each request was admitted: what an earlier admission samples is not the request's any more."""
        self.device.propose = propose

    def _step(self, accept: Sequence[int]) -> None:
        self.steps += 1
        if self.scheduler.has_requests() or self.store.sending:
            batch = self._launch(accept)
            self._queue.append(batch)
            more = batch.output.total_num_scheduled_tokens > 0 or self.scheduler.has_requests()
            if len(self._queue) < IN_FLIGHT and more:
                return
        if self._queue:
            self._complete(self._queue.popleft())

    @property
    def _at_rest(self) -> bool:
        return not self._queue and super()._at_rest

    def _launch(self, accept: Sequence[int]) -> Batch:
        batch = super()._launch(accept)
        for flight in self.store.asked:
            self.device.load(flight.load)
        batch.flights, self.store.asked = self.store.asked, []
        if self.hand_over is not None:
            batch.offered, self.hand_over.offered = self.hand_over.offered, []
        output = batch.output
        resumed = (new.req_id for new in output.scheduled_new_reqs), output.scheduled_cached_reqs.resumed_req_ids
        for names in resumed:
            for name in names:
                self._admissions[name] = self._admissions.get(name, 0) + 1
                self._cut(name)
        batch.admissions = {name: self._admissions[name] for name in output.num_scheduled_tokens}
        return batch

    def _cut(self, name: str) -> None:
        """The request starts over with what the scheduler has of it: what else was sampled is thrown away."""
        log, known = self._view.sequences[name], self._requests[name].num_tokens
        if len(log.tokens) > known:
            log.tokens, log.states = log.tokens[:known], log.states[: known + 1]
            self.store.states[name] = log.states

    def _complete(self, batch: Batch) -> None:
        for flight in batch.flights:
            flight.begun = True
        if self.hand_over is not None:
            self.hand_over.offered = batch.offered
        super()._complete(batch)
        self._take_back(batch)

    def _take_back(self, batch: Batch) -> None:
        """The scheduler has heard that loads failed: it does not take what those rows sampled, and computes again what
        came of them, the rows that are on their way included."""
        for name in self.device.failed:
            launched = [later for later in self._queue if later.admissions.get(name) == batch.admissions[name]]
            for later in launched:
                later.void[name] = name not in self.scheduler.requests
            if not launched and batch.admissions[name] == self._admissions[name]:
                self._cut(name)
        # Where a failed load ends requests, those fail as well that the next step admitted onto what it was to bring:
        # they were answered with an error, and nobody takes what their rows, which are on their way, sample. What those
        # write is judged by who reads it, and by the keys that are left on it. Where loads are repeated, it is taken.
        for later in self._queue:
            later.void.update((name, True) for name in later.admissions if self._failed(name))

    def _failed(self, name: str) -> bool:
        """Whether the request was answered with an error: nothing but a failed load does that here."""
        return bool(self._requests[name].status.name == "FINISHED_ERROR")

    def _land(self, arrived: Sequence[Load]) -> None:
        """They were there at once: nothing orders a transfer against the steps in flight."""

    def _launched(self) -> Collection[str]:
        return {name for batch in self._queue for name in batch.output.num_scheduled_tokens}

    def _spoils(self, block: int) -> Sequence[State]:
        # Who owns it now, and will key it in a step that has not run, writes it then.
        return () if self._view.pending(block) else super()._spoils(block)

    def _sampled(self, batch: Batch, tokens: dict[str, list[int]]) -> None:
        for name, sampled in tokens.items():
            if batch.admissions[name] != self._admissions[name]:
                continue
            log = self._view.sequences[name]
            for token in sampled:
                log.tokens.append(token)
                log.states.append(advance(log.states[-1], token))
                self._view.known.setdefault(log.states[-1], log.states)

    def _draft(self, output: object, tokens: dict[str, list[int]]) -> None:
        """Drafts stay on the device."""
