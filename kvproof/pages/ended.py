"""Filming a scenario so that a moment at which it breaks shows what a request held that ended in that very step.

By the end of a step such a request has given its tables back, and what is wrong is often in one of them.
"""

from __future__ import annotations

from dataclasses import replace

from kvproof.models.stateful import film as filming
from kvproof.models.stateful.drive import Watcher
from kvproof.models.stateful.film import Camera, Film, Frame, RequestShot, TableShot, request_shots, table_shots
from kvproof.spec.events import Event, Forward, Observation, StepEnd
from kvproof.spec.finding import Violation
from kvproof.spec.scenario import Scenario
from kvproof.spec.subject import Subject
from kvproof.spec.view import View

__all__ = ["ENDED", "film"]

ENDED = "ended in this step, shown as while it ran"
"""The status of a request that holds nothing any more."""


def film(subject: Subject, scenario: Scenario) -> Film:
    """As :func:`kvproof.models.stateful.film.film`, with what has :data:`ENDED` in the frames that have violations."""
    return filming.film(subject, scenario, _Remembering)


class _Remembering(Camera):
    """Of each request that runs in the step, it keeps what it held when it did."""

    def __init__(self, judge: Watcher) -> None:
        super().__init__(judge)
        self._ran_as: dict[str, tuple[list[RequestShot], list[TableShot]]] = {}

    def __call__(self, observation: Observation) -> None:
        if isinstance(observation.event, Forward):
            self._ran_as[observation.event.request] = _held(observation.view, observation.event.request)
        super().__call__(observation)

    def shot(self, event: Event, view: View, violations: tuple[Violation, ...]) -> Frame:
        frame = super().shot(event, view, violations)
        if violations:
            frame = self._with_ended(frame)
        if isinstance(event, StepEnd):
            self._ran_as = {}
        return frame

    def _with_ended(self, frame: Frame) -> Frame:
        there = {request.name for request in frame.requests} | {table.request for table in frame.tables}
        ended = [held for name, held in self._ran_as.items() if name not in there]
        requests = (replace(request, status=ENDED) for held, _ in ended for request in held)
        tables = (table for _, held in ended for table in held)
        return replace(frame, requests=(*frame.requests, *requests), tables=(*frame.tables, *tables))


def _held(view: View, name: str) -> tuple[list[RequestShot], list[TableShot]]:
    requests = [request for request in request_shots(view) if request.name == name]
    return requests, [table for table in table_shots(view) if table.request == name]
