"""A trace as a scenario: what clients, the operator and the model did, until a finding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvproof.spec.config import Config
from kvproof.spec.scenario import MOST_ACTIONS, Action, Scenario


class Telling:
    """``whole`` tells whether everything since the engine's start is in :meth:`scenario`.

    Where it can't be, :meth:`since_idle` has what happened since nothing ran: of what the cache held then, nothing.
    Both are bounded by what a scenario may have.
    """

    def __init__(self, config: Config, from_start: bool) -> None:
        self.config = config
        self.whole = from_start
        self._all: list[Action] = []
        self._recent: list[Action] | None = None if from_start else []
        self._names: dict[int, str] = {}
        self._submits: dict[int, Action] = {}
        self._count = 0
        self._steps = 0
        self._accept: tuple[int, ...] = ()
        self._store: dict[str, Any] = {}

    def submitted(self, r: int, base: int, shared: int, prompt: int, most: int) -> None:
        self._count += 1
        name = self._names[r] = f"r{self._count}"
        origin = self._names.get(base, "")
        if shared and not origin:
            self.whole = False  # it goes on from a session, whose earlier turns no action tells
        action = Action("submit", name, origin, shared if origin else 0, prompt, most)
        self._submits[r] = action
        self._add(action)

    def offered(self, r: int, depth: int, asynchronous: bool, divergent: bool) -> None:
        action = self._submits.get(r)
        if action is None:
            return
        self._store = {"connector": "async" if asynchronous else "sync", "divergent_hits": divergent}
        more = replace(action, external=max(action.external, min(depth, action.length)))
        self._submits[r] = more
        for actions in (self._all, self._recent or []):
            if action in actions:
                actions[actions.index(action)] = more

    def gone(self, r: int, stopped: bool) -> None:
        self._submits.pop(r, None)
        if stopped and r in self._names:
            self._add(Action("finish", self._names[r]))

    def aborted(self, r: int) -> None:
        self._submits.pop(r, None)
        if r in self._names:
            self._add(Action("abort", self._names[r]))

    def forgotten(self, numbers: list[int]) -> None:
        for number in numbers:
            self._names.pop(number, None)

    def reset(self) -> None:
        self._add(Action("reset"))

    def stepped(self, accept: tuple[int, ...] = ()) -> None:
        if accept != self._accept:
            self._close()
            self._accept = accept
        self._steps += 1

    def _close(self) -> None:
        """Steps that are alike are one action."""
        if self._steps:
            steps, self._steps = Action("step", times=self._steps, accept=self._accept), 0
            self._add(steps)

    def idle(self) -> None:
        """Nothing runs: a scenario may begin here."""
        self._close()
        self._recent = []

    def scenario(self) -> Scenario:
        self._close()
        return self._made(self._all, "recorded by a live engine")

    def since_idle(self) -> Scenario | None:
        """``None`` where nothing was idle before, or not lately enough."""
        self._close()
        if self._recent is None or len(self._recent) >= MOST_ACTIONS:
            return None
        return self._made(self._recent, "recorded by a live engine, since it was idle last")

    def _made(self, actions: list[Action], note: str) -> Scenario:
        submitted: set[str] = set()
        kept = []
        for action in actions:
            if action.kind == "submit":
                if action.base not in submitted:
                    action = replace(action, base="", shared=0)
                submitted.add(action.request)
            elif action.request and action.request not in submitted:
                continue
            kept.append(action)
        return Scenario(replace(self.config, **self._store), tuple(kept), note).trimmed()

    def _add(self, action: Action) -> None:
        self._close()
        self._append(self._all, action)
        if self._recent is not None:
            self._append(self._recent, action)

    def _append(self, actions: list[Action], action: Action) -> None:
        if len(actions) < MOST_ACTIONS:
            actions.append(action)
        elif actions is self._all:
            self.whole = False
