"""What was done to a live engine, as a scenario: the file that makes a finding happen again.

Requests get short names, prompts are told by what they share with earlier sequences, and output is not told at all: a
replay makes up its own. Steps that are alike become one action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvproof.impl.vllm.live.naming import Log
from kvproof.spec.config import Config
from kvproof.spec.scenario import MOST_ACTIONS, Action, Scenario
from kvproof.spec.tracer import State

KEPT_STATES = 1_000_000
"""How many prefixes are remembered, to tell what a later prompt shares with an earlier one."""


class Story:
    """``whole`` tells whether everything since the engine's start is in it; if not, a replay need not show anything."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.actions: list[Action] = []
        """Up to the steps that are still being counted."""
        self.whole = True
        self._names: dict[str, str] = {}
        self._owners: dict[State, str] = {}
        self._growing: dict[str, Log] = {}
        self._submits: dict[str, int] = {}
        self._store: dict[str, Any] = {}
        self._steps = 0
        self._accept: tuple[int, ...] = ()

    def submitted(self, request: Any, log: Log) -> None:
        for name in list(self._growing):
            self._own(name, self._growing[name])
        states = log.states
        shared = next((n for n in range(len(states) - 1, 0, -1) if states[n] in self._owners), 0)
        name = self._names[request.request_id] = f"r{len(self._names) + 1}"
        base = self._owners[states[shared]] if shared else ""
        prompt = int(request.num_prompt_tokens)
        self._add(Action("submit", name, base, shared, prompt, max(1, int(request.max_tokens or 1))))
        self._growing[name] = log
        self._submits[request.request_id] = len(self.actions) - 1

    def offered(self, request: str, depth: int, asynchronous: bool, divergent: bool) -> None:
        """An external store says that it holds the first ``depth`` tokens of a request's prompt."""
        index = self._submits.get(request)
        if index is None or not self.whole:
            return
        self._store = {"connector": "async" if asynchronous else "sync", "divergent_hits": divergent}
        action = self.actions[index]
        self.actions[index] = replace(action, external=max(action.external, min(depth, action.length)))

    def ended(self, request: str, stopped: bool) -> None:
        """A request is gone; ``stopped`` by the model's own last token in the step that is about to be told."""
        name = self._names.get(request, "")
        log = self._growing.pop(name, None)
        self._submits.pop(request, None)
        if log is not None:
            self._own(name, log)
        if stopped and name:
            self._add(Action("finish", name))

    def aborted(self, request: str) -> None:
        if request in self._names:
            self._add(Action("abort", self._names[request]))

    def reset(self) -> None:
        self._add(Action("reset"))

    def stepped(self, accepted: Sequence[int]) -> None:
        """One engine step; ``accepted`` drafts for each scheduled request, empty where there are no drafts."""
        accept = tuple(accepted)
        if self._steps and accept == self._accept:
            self._steps += 1
        else:
            self._tell_steps()
            self._steps, self._accept = 1, accept

    def scenario(self) -> Scenario:
        self._tell_steps()
        return Scenario(replace(self.config, **self._store), tuple(self.actions), "recorded by a live engine")

    def _tell_steps(self) -> None:
        """The steps since the last action, as one."""
        if self._steps:
            steps, self._steps = self._steps, 0
            self._add(Action("step", times=steps, accept=self._accept))

    def _add(self, action: Action) -> None:
        self._tell_steps()
        if len(self.actions) < MOST_ACTIONS and len(self._owners) < KEPT_STATES:
            self.actions.append(action)
        else:
            self.whole = False

    def _own(self, name: str, log: Log) -> None:
        for state in reversed(log.states[1:]):
            if state in self._owners:
                break
            self._owners[state] = name
