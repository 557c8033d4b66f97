"""Filming a scenario so that a moment at which it breaks shows what a request held that ended in that very step.

By the end of a step such a request has given its tables back, and what is wrong is often in one of them.
"""

from __future__ import annotations

import dataclasses

from kvproof.models.stateful import film as filming
from kvproof.models.stateful.drive import Watcher, standard_watchers
from kvproof.models.stateful.film import Film, Frame, RequestShot, TableShot
from kvproof.models.stateful.replay import replay
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
    camera = _Camera(standard_watchers(subject)(frozenset(), False))
    played = replay(subject, scenario, watchers=lambda known, stops: camera, begins=camera.turn)
    return Film(tuple(camera.frames), camera.dropped, played.text)


class _Camera(filming._Camera):
    def __init__(self, judge: Watcher) -> None:
        super().__init__(judge)
        self._ran_as: dict[str, tuple[RequestShot | None, tuple[TableShot, ...]]] = {}

    def __call__(self, observation: Observation) -> None:
        if isinstance(observation.event, Forward):
            self._ran_as[observation.event.request] = _held(observation.view, observation.event.request)
        super().__call__(observation)

    def _shoot(self, event: Event, view: View, violations: tuple[Violation, ...]) -> None:
        super()._shoot(event, view, violations)
        if violations:
            self.frames[-1] = self._with_ended(self.frames[-1])
        if isinstance(event, StepEnd):
            self._ran_as = {}

    def _with_ended(self, frame: Frame) -> Frame:
        there = {request.name for request in frame.requests} | {table.request for table in frame.tables}
        ended = [held for name, held in self._ran_as.items() if name not in there]
        requests = (dataclasses.replace(request, status=ENDED) for request, _ in ended if request is not None)
        tables = (table for _, held in ended for table in held)
        return dataclasses.replace(frame, requests=(*frame.requests, *requests), tables=(*frame.tables, *tables))


def _held(view: View, name: str) -> tuple[RequestShot | None, tuple[TableShot, ...]]:
    found = view.requests().get(name)
    request = RequestShot(name, found.status, found.prompt, len(found.states) - 1, found.computed) if found else None
    tables = sorted((group, blocks) for (owner, group), blocks in view.tables().items() if owner == name)
    return request, tuple(TableShot(name, group, tuple(blocks)) for group, blocks in tables if blocks)
