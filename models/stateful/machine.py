"""The state machine: its rules are the actions of a scenario, over a configuration drawn first.

One machine serves every subject and every release. It records what it does as data, so that whatever it meets is a
scenario that replays without Hypothesis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from hypothesis import reject
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvproof.models.stateful.drive import Run
from kvproof.models.stateful.strategies import Dice, Menu, Setup, dice, setups
from kvproof.spec.config import ConfigError
from kvproof.spec.scenario import Action

MOST_REQUESTS = 24


class Host(Protocol):
    """Who runs the machine: starts runs, and keeps what they found."""

    def open(self, setup: Setup) -> tuple[Setup, Run]:
        """Start a run; the setup comes back with defaults filled in. :class:`ConfigError` where the subject refuses."""

    def close(self, setup: Setup, run: Run) -> None:
        """The run is over: account for it."""


class CacheMachine(RuleBasedStateMachine):
    """Requests arrive and go, the engine steps, and (in some runs) somebody interferes."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host = host
        self.setup: Setup | None = None
        self.run: Run | None = None
        self.menu: Menu
        self.prompts: dict[str, Action] = {}
        self.crowded = False

    @initialize(setup=setups())
    def configure(self, setup: Setup) -> None:
        """An engine under the drawn configuration; one that can't be is discarded."""
        try:
            self.setup, self.run = self.host.open(setup)
        except ConfigError:
            reject()
        self.menu = Menu(self.setup)

    # -- what rules share ---------------------------------------------------------------------------------------------

    def _do(self, actions: Iterable[Action]) -> None:
        assert self.run is not None
        for action in actions:
            self.run.do(action)
        if self.run.over:  # whatever ended it: nothing more can come of this run
            reject()

    def _room(self) -> bool:
        return self.run is not None and len(self.prompts) < MOST_REQUESTS

    def _live(self) -> bool:
        return self.run is not None and bool(self.run.driven.live())

    def _forced(self) -> bool:
        return self.setup is not None and self.setup.forced

    def _target(self, dice: Dice) -> str:
        assert self.run is not None
        return dice.of(self.run.driven.live())

    def _submit(self, base: str, shared: int, length: int, dice: Dice) -> Action:
        """One more request. Without a base its tokens are all fresh. Takes up to ten dice."""
        length = max(1, min(length, self.menu.longest))
        shared = min(shared, length) if base else 0
        outputs, external = dice.of(self.menu.outputs), self.menu.external(dice, shared, length)
        action = Action(
            "submit",
            request=f"r{len(self.prompts) + 1}",
            base=base if shared else "",
            shared=shared,
            length=length,
            max_tokens=outputs,
            external=external,
            missing=self.menu.missing(dice, external),
            priority=self.menu.priority(dice),
            images=self.menu.images(dice, shared, length),
            unread=self.menu.unread(dice),
        )
        self.prompts[action.request] = action
        return action

    def _base(self, dice: Dice) -> str:
        """An earlier request, the newest first; empty where there is none."""
        names = list(self.prompts)
        index = dice.roll()
        return names[-1 - index % len(names)] if names else ""

    def _cut(self, base: str, dice: Dice) -> int:
        """A position in the base's prompt, near a block boundary: its end first."""
        index = dice.roll()
        if not base:
            return 0
        whole = self.prompts[base].length
        inner = [n for n in self.menu.lengths if n < whole]
        return [whole, *reversed(inner)][index % (len(inner) + 1)]

    def _end(self, base: str) -> int:
        """Where the base's conversation ends at the latest: its prompt and all that it may put out."""
        return self.prompts[base].length + self.prompts[base].max_tokens if base else 0

    # -- requests arrive ----------------------------------------------------------------------------------------------

    @precondition(_room)
    @rule(dice=dice(9))
    def fresh(self, dice: Dice) -> None:
        self._do([self._submit("", 0, dice.of(self.menu.prompts), dice)])

    @precondition(_room)
    @rule(dice=dice(11))
    def shared_prefix(self, dice: Dice) -> None:
        base = self._base(dice)
        shared = self._cut(base, dice)
        self._do([self._submit(base, shared, shared + dice.of(self.menu.extras), dice)])

    @precondition(_room)
    @rule(dice=dice(10))
    def follow_up(self, dice: Dice) -> None:
        """The next turn of a conversation: an earlier prompt, what was answered, and more."""
        base = self._base(dice)
        known = self._end(base)
        self._do([self._submit(base, known, known + dice.of(self.menu.extras), dice)])

    @precondition(_room)
    @rule(dice=dice(9))
    def identical(self, dice: Dice) -> None:
        base = self._base(dice)
        length = self.prompts[base].length if base else self.menu.block
        self._do([self._submit(base, length, length, dice)])

    @precondition(_room)
    @rule(dice=dice(40))
    def burst(self, dice: Dice) -> None:
        """Several at once, competing for one step: siblings, strangers, follow-ups or copies; then some steps."""
        actions = []
        kind = dice.pick("siblings", "strangers", "follow-ups", "copies")
        steps, count, base = dice.pick(0, 1, 2, 3, 4, 6, 8), dice.pick(2, 3, 4), self._base(dice)
        if kind != "strangers" and not base:
            actions.append(self._submit("", 0, dice.of(self.menu.prompts), dice))
            base = actions[0].request
        cut = self._cut(base, dice)
        for _ in range(count):
            if kind == "strangers":
                actions.append(self._submit("", 0, dice.of(self.menu.prompts), dice))
            elif kind == "siblings":
                actions.append(self._submit(base, cut, cut + dice.of(self.menu.extras), dice))
            elif kind == "follow-ups":
                known = self._end(base)
                actions.append(self._submit(base, known, known + dice.of(self.menu.extras), dice))
            else:
                length = self.prompts[base].length
                actions.append(self._submit(base, length, length, dice))
        if steps:
            actions.append(Action("step", times=steps))
        self._do(actions)

    @precondition(lambda self: self._room() and not self._live() and self.setup.pool != "tight")
    @rule(dice=dice(24))
    def resend(self, dice: Dice) -> None:
        """A prompt that was computed to its end comes again: the same, longer, or with its last tokens changed."""
        base = dice.pick(self._base(dice), "")
        actions = []
        if not base:
            first = self._submit("", 0, dice.of(self.menu.prompts), dice)
            first = self.prompts[first.request] = replace(first, max_tokens=dice.pick(1, 2), external=0, missing=0)
            actions.append(first)
            base = first.request
            actions.append(Action("step", times=2 + first.length // self.menu.chunk))
        whole = self.prompts[base].length
        for _ in range(dice.pick(1, 2)):
            more, less = dice.of(self.menu.extras), min(whole - 1, dice.of(self.menu.extras))
            shared, length = dice.pick((whole, whole), (whole, whole + more), (whole - less, whole - less + 1))
            actions.append(self._submit(base, shared, length, dice))
            actions.append(Action("step", times=dice.pick(1, 4)))
        self._do(actions)

    @precondition(lambda self: self._room() and self.setup.crowded and not self.crowded and self.menu.endless > 0)
    @rule(dice=dice(24))
    def beside(self, dice: Dice) -> None:
        """Somebody arrives while a few others generate on and on."""
        self.crowded = True
        actions, others = [], []
        for _ in range(dice.pick(2, 1, 3, 4)):
            other = self._submit("", 0, dice.pick(1, self.menu.unit), dice)
            other = self.prompts[other.request] = replace(other, max_tokens=self.menu.endless, external=0, missing=0)
            actions.append(other)
            others.append(other.request)
        actions.append(Action("step", times=2))
        actions.append(self._submit("", 0, dice.of(self.menu.prompts), dice))
        self._do([*actions, Action("step", times=dice.pick(60, 20)), *(Action("finish", name) for name in others)])

    @precondition(lambda self: self._room() and self.setup.config.connector == "async")
    @rule(dice=dice(22))
    def give_up(self, dice: Dice) -> None:
        """Somebody leaves while what the store has of the prompt is on its way, and somebody else needs blocks."""
        base = self._base(dice)
        cut = self._cut(base, dice)
        gone = self._submit(base, cut, cut + dice.of(self.menu.extras), dice)
        gone = self.prompts[gone.request] = replace(gone, external=gone.length, missing=0)
        leaves = Action(dice.pick("abort", "finish"), gone.request)
        other = self._submit("", 0, dice.of(self.menu.prompts), dice)
        self._do([gone, Action("step", times=dice.pick(1, 2)), leaves, other, Action("step", times=dice.pick(1, 4))])

    # -- the engine runs ----------------------------------------------------------------------------------------------

    @precondition(_live)
    @rule(dice=dice(1))
    def step(self, dice: Dice) -> None:
        self._do([Action("step", accept=dice.of(self.menu.accepts))])

    @precondition(_live)
    @rule(dice=dice(2))
    def steps(self, dice: Dice) -> None:
        self._do([Action("step", times=2 + dice.up_to(7), accept=dice.of(self.menu.accepts))])

    @precondition(_live)
    @rule(dice=dice(2))
    def run_on(self, dice: Dice) -> None:
        """Long enough for most of what runs to finish."""
        self._do([Action("step", times=10 + dice.up_to(20), accept=dice.of(self.menu.accepts))])

    # -- clients, models and operators --------------------------------------------------------------------------------

    @precondition(_live)
    @rule(dice=dice(1))
    def finish(self, dice: Dice) -> None:
        self._do([Action("finish", self._target(dice))])

    @precondition(_live)
    @rule(dice=dice(1))
    def abort(self, dice: Dice) -> None:
        self._do([Action("abort", self._target(dice))])

    @precondition(lambda self: self.setup is not None and self.setup.resets and bool(self.prompts))
    @rule(dice=dice(2))
    def reset(self, dice: Dice) -> None:
        self._do([Action("reset", running=dice.pick(False, False, True), store=dice.pick(False, False, True))])

    # -- from outside the scheduler -----------------------------------------------------------------------------------

    @precondition(lambda self: self._forced() and self._live())
    @rule(dice=dice(1))
    def preempt(self, dice: Dice) -> None:
        self._do([Action("preempt", self._target(dice))])

    @precondition(_forced)
    @rule(dice=dice(1))
    def evict(self, dice: Dice) -> None:
        self._do([Action("evict", times=dice.pick(0, 1, 2, 4))])

    @precondition(lambda self: not self._room() and not self._live())
    @rule()
    def rest(self) -> None:
        """Nobody is left, and nobody more may come. Hypothesis takes a machine that has no rule to go on with for
        broken."""

    # -- the end ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Drain what is still alive, so that leaks are seen; then hand the run over."""
        if self.run is None or self.setup is None:
            return
        run, self.run = self.run, None
        run.drain()
        self.host.close(self.setup, run)
