"""What happened to an engine, kept as a scenario's actions while a scenario can hold it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvproof.impl.reference.request import Request, Status
from kvproof.spec.config import Config
from kvproof.spec.scenario import (
    MOST_ACCEPTED,
    MOST_ACTIONS,
    MOST_PROMPT_TOKENS,
    MOST_STEPS,
    Action,
    Scenario,
)
from kvproof.spec.tracer import State

MOST_PREFIXES: Final = 1 << 20
"""The most prefixes, of all sequences together, among which a record looks for what a new prompt shares."""

MOST_ENTRIES: Final = 1 << 18
"""The most entries of all ``accept`` together."""


class Record:
    """The actions so far. ``ended``: something happened that a scenario can't hold any more (a bound of
    :mod:`kvproof.spec.scenario`, :data:`MOST_PREFIXES` or :data:`MOST_ENTRIES`); what is there is the beginning."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.actions: list[Action] = []
        self.ended = False
        self._owners: dict[State, str] = {}
        """Who was the first to have a prefix."""
        self._growing: list[Request] = []
        self._block = max(group.block_size for group in config.groups)
        self._prompts = 0
        self._entries = 0

    def scenario(self) -> Scenario:
        note = "recorded by a live engine"
        return Scenario(self.config, tuple(self.actions), f"{note}: the beginning" if self.ended else note)

    def add(self, action: Action) -> None:
        if not self.ended:
            if len(self.actions) < MOST_ACTIONS:
                self.actions.append(action)
            else:
                self._end()

    def submitted(self, request: Request) -> None:
        """A request has come. Its prompt is told by what it shares with earlier ones, not by its tokens."""
        if self.ended:
            return
        self._catch_up()
        self._prompts += -(-request.known // self._block) * self._block
        if self._prompts > MOST_PROMPT_TOKENS or len(self._owners) > MOST_PREFIXES:
            self._end()
            return
        shared = next((n for n in range(request.known, 0, -1) if request.states[n] in self._owners), 0)
        base = self._owners[request.states[shared]] if shared else ""
        self.add(
            Action("submit", request.name, base, shared, request.known, request.max_tokens, request.claimed,
                   request.missing)
        )  # fmt: skip
        self._growing.append(request)

    def evicted(self, count: int, free: int) -> None:
        """The first ``count`` of ``free`` free blocks (0: all) lost their keys."""
        times = 0 if count >= free else count
        if times > MOST_STEPS:
            self._end()  # twice half of them is not the same: the first ones would be met again
        else:
            self.add(Action("evict", times=times))

    def stepped(self, accepted: tuple[int, ...]) -> None:
        """A step, in which so many drafts were accepted, request by request. Steps that are alike become one action."""
        if self.ended:
            return
        accept = accepted[:1] if len(set(accepted)) == 1 else accepted
        before = self.actions[-1] if self.actions else None
        if before is not None and before.kind == "step" and before.accept == accept and before.times < MOST_STEPS:
            self.actions[-1] = replace(before, times=before.times + 1)
            return
        self._entries += len(accept)
        if len(accept) > MOST_ACCEPTED or self._entries > MOST_ENTRIES:
            self._end()
        else:
            self.add(Action("step", accept=accept))

    def _end(self) -> None:
        self.ended = True
        self._owners.clear()
        self._growing.clear()

    def _catch_up(self) -> None:
        """Remember whose prefixes are whose, as far as requests have come since the last one was submitted."""
        for request in self._growing:
            for state in reversed(request.states[1:]):
                if state in self._owners:
                    break  # and so are those that lead to it
                self._owners[state] = request.name
        self._growing = [request for request in self._growing if request.status is not Status.FINISHED]
