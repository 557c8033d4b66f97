"""Conformance: two subjects, one scenario, step by step the same decisions.

What is compared after every step: who was scheduled, from where to where; what every lookup answered, in order; how
many blocks are free; and which keys there are, in the order in which their blocks would be taken. Names of blocks are
not compared: two caches may number theirs as they like.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from kvproof.models.stateful.strategies import Dice, Menu, Retention, draw_setup
from kvproof.spec.events import Crash, Event, Forward, Lookup, Observation, StepEnd
from kvproof.spec.machine.sizes import beyond
from kvproof.spec.scenario import Action, Scenario
from kvproof.spec.subject import Subject
from kvproof.spec.tracer import length_of
from kvproof.spec.view import View


@dataclass(frozen=True)
class Digest:
    """One step as it is compared."""

    ran: tuple[tuple[str, int, int, int], ...] = ()
    hits: tuple[tuple[str, int], ...] = ()
    free: int = 0
    keys: tuple[tuple[int, int, int], ...] = ()
    queue: tuple[tuple[tuple[int, int], ...], ...] = ()
    waiting: tuple[str, ...] = ()

    def differences(self, other: Digest) -> list[str]:
        """Which parts differ, each with both sides."""
        return [
            f"{name}: {getattr(self, name)} against {getattr(other, name)}"
            for name in ("ran", "hits", "waiting", "free", "keys", "queue")
            if getattr(self, name) != getattr(other, name)
        ]


@dataclass
class Trace:
    """An observer that keeps what is compared."""

    steps: list[Digest] = field(default_factory=list)
    crashed: str = ""
    _ran: list[tuple[str, int, int, int]] = field(default_factory=list)
    _hits: list[tuple[str, int]] = field(default_factory=list)

    def __call__(self, observation: Observation) -> None:
        event: Event = observation.event
        if isinstance(event, Forward):
            self._ran.append((event.request, event.start, event.tokens, event.drafts))
        elif isinstance(event, Lookup):
            hit = (event.request, event.tokens)
            if hit not in self._hits[-1:]:  # a cache may ask itself once more
                self._hits.append(hit)
        elif isinstance(event, Crash):
            self.crashed = f"{event.location}: {event.error}"
        elif isinstance(event, StepEnd):
            self._step(event, observation.view)

    def _step(self, event: StepEnd, view: View) -> None:
        keys: Counter[tuple[int, int]] = Counter()
        for (group, state), blocks in view.lookup_map().items():
            keys[group, int(state)] += len(blocks)
        queue = tuple(tuple(sorted((k.group, length_of(k.state)) for k in view.keys(b))) for b in view.free_queue())
        self.steps.append(
            Digest(
                tuple(self._ran), tuple(self._hits), view.free_count(),
                tuple(sorted((group, state, n) for (group, state), n in keys.items())), queue, event.waiting,
            )
        )  # fmt: skip
        if not (self._ran or self._hits or event.waiting or event.running):
            self.steps.pop()  # an engine may take a step to say goodbye to the last request; nothing can come of it
        self._ran, self._hits = [], []


@dataclass(frozen=True)
class Divergence:
    """Where two traces part: the step (from 1), and how."""

    step: int
    differences: Sequence[str]


def compare(left: Subject, right: Subject, scenario: Scenario) -> tuple[int, Divergence | None]:
    """Run both. Answers how many steps agreed, and where they part, if they do."""
    traces = []
    for subject in (left, right):
        trace = Trace()
        driven = subject.start(scenario.config, trace)
        for action in scenario.actions:
            driven.apply(action)
            if trace.crashed:
                break
        traces.append(trace)
    for index, (ours, theirs) in enumerate(zip(traces[0].steps, traces[1].steps, strict=False)):
        differences = ours.differences(theirs)
        if differences:
            return index, Divergence(index + 1, differences)
    steps = min(len(trace.steps) for trace in traces)
    if bool(traces[0].crashed) != bool(traces[1].crashed):
        return steps, Divergence(steps + 1, [f"crash: {traces[0].crashed!r} against {traces[1].crashed!r}"])
    if len(traces[0].steps) != len(traces[1].steps):
        return steps, Divergence(steps + 1, [f"steps: {len(traces[0].steps)} against {len(traces[1].steps)}"])
    return steps, None


def draw(seed: int, default_retention: Retention) -> Scenario:
    """One scenario that a machine and an engine can both run, by its seed: configuration, conversations, interference.

    Drawn from the fuzzer's menus. A store keeps what it promises here: losing it is not part of how releases are
    driven.
    """
    random = Random(seed)
    while True:
        setup = draw_setup(Dice(random.randbytes(40))).plain().resolved(default_retention)
        if setup.config.problem() is None and not beyond(setup.config):
            break
    dice, menu = Dice(random.randbytes(4000)), Menu(setup)
    kinds = ["submit", "submit", "step", "step", "step", "finish", "abort"]
    kinds += ["reset"] if setup.resets else []
    kinds += ["preempt", "evict"] if setup.forced else []
    actions: list[Action] = []
    names: list[str] = []
    for _ in range(random.randrange(4, 40)):
        kind = dice.of(kinds)
        if kind == "submit":
            actions.append(_submission(dice, menu, names))
            names.append(actions[-1].request)
        elif kind == "step":
            actions.append(Action("step", times=1 + dice.up_to(5), accept=dice.of(menu.accepts)))
        elif kind == "evict":
            actions.append(Action("evict", times=dice.up_to(3)))
        elif kind == "reset":
            actions.append(Action("reset"))
        elif names:
            actions.append(Action(kind, dice.of(names)))  # type: ignore[arg-type]
    return Scenario(setup.config, tuple(actions), note=f"conformance scenario {seed}")


def widened(scenario: Scenario, seed: int) -> Scenario:
    """The same with what releases are not driven with: limits of a few tokens, and a store that loses what it promised.

    Drawn by ``seed``. Only the limits change of the configuration.
    """
    random, config = Random(f"widened {seed}"), scenario.config
    while True:
        wide = replace(
            config,
            max_model_len=random.choice((config.max_model_len, 17, 33, 64)),
            long_prefill_threshold=random.choice((config.long_prefill_threshold, 0, 1, 2, 5)),
            step_tokens=random.choice((config.step_tokens, config.step_tokens, config.speculative + 1, 9)),
        )
        if wide.problem() is None:
            break
    actions = tuple(
        replace(action, missing=random.choice((0, 0, 1, action.external // 2, action.external)))
        if action.external
        else action
        for action in scenario.actions
    )
    return replace(scenario, config=wide, actions=actions, note=f"{scenario.note}, widened")


def _submission(dice: Dice, menu: Menu, names: Sequence[str]) -> Action:
    base = dice.of(names) if names and dice.pick(False, True, True) else ""
    shared = dice.of(menu.lengths) if base else 0
    length = shared + dice.of(menu.extras) if base else dice.of(menu.prompts)
    return Action("submit", f"r{len(names) + 1}", base, shared, length, dice.of(menu.outputs),
                  external=menu.external(dice, shared, length))  # fmt: skip
