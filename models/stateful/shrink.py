"""Making a scenario small, as data: fewer actions first, then fewer tokens, then a plainer configuration.

Hypothesis shrinks the choices it made; this shrinks what they came to, which goes further (two runs of steps become
one, a sibling becomes a stranger, a whole configuration halves). Every candidate is run, and kept only if the very same
finding shows again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from kvproof.spec.config import Config, Group
from kvproof.spec.scenario import Action, Scenario

Reproduces = Callable[[Scenario, bool], int | None]
"""Index of the action during which a candidate shows the finding, or ``None``.

With the second argument the engine is drained at the end, and the number of actions stands for that.
"""

Size = tuple[int, ...]

DRAINING_STEPS = 200
SMALLEST_BLOCK = 4
"""Smaller blocks would make for smaller numbers, but not for a scenario that is easier to read."""

_PLAIN = Config(groups=(), num_blocks=0, hash_unit=0, step_tokens=0)
_OF_STORES: dict[str, Any] = {
    name: getattr(_PLAIN, name)
    for name in (
        "load_steps",
        "offers",
        "offer_delay",
        "send_steps",
        "offload_blocks",
        "offload_policy",
        "offload_outputs",
        "offload_after",
    )
}
_SIZES = frozenset({"groups", "num_blocks", "hash_unit", "step_tokens"})


def size(scenario: Scenario) -> Size:
    """What small means, most important first: forced actions, actions, requests, extras, steps, tokens, block sizes."""
    actions, config = scenario.actions, scenario.config
    extras = sum(
        getattr(config, f.name) != getattr(_PLAIN, f.name) for f in dataclasses.fields(Config) if f.name not in _SIZES
    )
    sizes = [g.block_size for g in config.groups]
    tokens = sum(
        a.length
        + a.max_tokens
        + a.external
        + a.missing
        + a.priority
        + len(a.images)
        + (a.shared if a.base else 0)
        + a.unread
        + a.running
        + a.store
        for a in actions
    )
    return (
        sum(a.forced for a in actions),
        len(actions),
        sum(a.kind == "submit" for a in actions),
        len(config.groups),
        extras
        + sum(g.drafter for g in config.groups)
        + len({config.hash_unit, *(g.block_size for g in config.groups)}),
        sum(a.times for a in actions if a.kind == "step"),
        tokens + sum(len(a.accept) for a in actions),
        sum(bool(a.base) for a in actions),
        sum(sizes) + sum(g.window for g in config.groups) + config.hash_unit,
        config.num_blocks,
        config.step_tokens + config.speculative + config.checkpoint_alignment + config.load_steps,
    )


class _Spent(Exception):
    """The attempts are used up."""


class Reducer:
    """Reduces one scenario. ``best`` is the smallest so far, ``action`` the index of the action that shows the finding.

    At most ``attempts`` candidates are run. Each that is kept is strictly smaller by :func:`size`, so it terminates.
    """

    def __init__(self, scenario: Scenario, reproduces: Reproduces, attempts: int) -> None:
        self.best, self.action = scenario, -1
        self.used, self.attempts = 0, attempts
        self.reproduced: bool | None = None
        self._may_drain = True
        self._reproduces = reproduces
        self._tried: set[Scenario] = {scenario}
        self._stop: Callable[[], bool] = bool

    def reduce(self, stop: Callable[[], bool] = bool) -> Scenario:
        """The smallest scenario found. ``stop`` is asked before each attempt.

        The scenario itself is tried first; where it doesn't show the finding, it comes back as it is and ``action``
        stays −1. May be interrupted at any point: ``best`` and ``action`` always belong together.
        """
        self._stop = stop
        action = self._reproduces(self.best, True)
        self.used, self.reproduced = 1, action is not None
        if action is None:
            return self.best
        self._keep(self.best, action)
        with contextlib.suppress(_Spent):
            self._step_instead_of_draining()
            self._passes()
        named = renamed(self.best)
        if named != self.best and self._reproduces(named, self._may_drain) == self.action:
            self.best = named
        return self.best

    def _keep(self, scenario: Scenario, action: int) -> None:
        """Everything after the action that shows the finding is dropped at once."""
        self.best, self.action = replace(scenario, actions=scenario.actions[: action + 1]), action

    def _step_instead_of_draining(self) -> None:
        """What shows only while the engine drains may be a matter of time: then say so, as steps."""
        self._may_drain = self.action == len(self.best.actions)
        if not self._may_drain:
            return
        longer = replace(self.best, actions=(*self.best.actions, Action("step", times=DRAINING_STEPS)))
        action = self._reproduces(longer, False)
        if action is not None:
            self._keep(longer, action)
            self._may_drain = False
            self._each(_fewer_steps)

    def _try(self, candidate: Scenario) -> bool:
        if candidate in self._tried or not size(candidate) < size(self.best) or candidate.config.problem() is not None:
            return False
        if self.used >= self.attempts or self._stop():
            raise _Spent
        self._tried.add(candidate)
        self.used += 1
        action = self._reproduces(candidate, self._may_drain)
        if action is None:
            return False
        self._keep(candidate, action)
        return True

    def _passes(self) -> None:
        while True:
            before = self.best
            self._delete()
            self._merge()
            self._each(_plainer)
            self._each(_smaller_actions)
            self._delete()
            self._each(_scaled)
            self._each(_smaller_config)
            if self.best == before:
                break

    def _each(self, candidates: Callable[[Scenario], Iterator[Scenario]]) -> None:
        """Go through the candidates; after a success go on, at the same place, with those of the new best."""
        index = 0
        while (candidate := next(itertools.islice(candidates(self.best), index, None), None)) is not None:
            index += not self._try(candidate)

    def _delete(self) -> None:
        """Runs of actions, half of them first, then ever fewer."""
        length = max(1, len(self.best.actions) // 2)
        while length:
            start = len(self.best.actions) - length
            while start >= 0:
                actions = self.best.actions
                self._try(self._with(actions[:start] + actions[start + length :]))
                start = min(start - length, len(self.best.actions) - length)
            length //= 2

    def _merge(self) -> None:
        """Two runs of steps, next to each other or with actions between them, become one."""
        index = 0
        while index < len(self.best.actions):
            actions = self.best.actions
            later = [j for j in range(index + 1, len(actions)) if actions[j].kind == "step"]
            merged = False
            if actions[index].kind == "step":
                for j in later[:2]:
                    first, second = actions[index], actions[j]
                    rest = actions[index + 1 : j] + actions[j + 1 :]
                    for accept in dict.fromkeys((first.accept, second.accept)):
                        joined = replace(first, times=first.times + second.times, accept=accept)
                        between = actions[index + 1 : j]
                        options = (
                            (*actions[:index], joined, *rest),
                            (*actions[:index], *between, joined, *actions[j + 1 :]),
                        )
                        if any(self._try(self._with(option)) for option in options):
                            merged = True
                            break
                    if merged:
                        break
            index += not merged

    def _with(self, actions: tuple[Action, ...]) -> Scenario:
        return replace(self.best, actions=tuple(about_somebody(actions)))


def about_somebody(actions: Iterable[Action]) -> Iterator[Action]:
    """The same without what is done to requests that never came, and without prefixes of those: a scenario that names
    somebody unknown is refused where it is read."""
    names: set[str] = set()
    for action in actions:
        if action.kind == "submit":
            names.add(action.request)
            yield action if action.base in names else replace(action, base="", shared=0)
        elif not action.request or action.request in names:
            yield action


def _lower(value: int, least: int) -> Iterator[int]:
    """Values below ``value``, the smallest first, then by halving the distance, then one less."""
    if value <= least:
        return
    yield least
    step = value - least
    while step > 1:
        step //= 2
        yield value - step
    if value - 1 > least:
        yield value - 1


def _fewer_steps(scenario: Scenario) -> Iterator[Scenario]:
    """The last action with fewer steps."""
    *before, last = scenario.actions
    for times in _lower(last.times, 1):
        yield replace(scenario, actions=(*before, replace(last, times=times)))


def _smaller_actions(scenario: Scenario) -> Iterator[Scenario]:
    """One action with smaller numbers, or with less to it."""
    block = scenario.config.scheduler_block
    for index, action in enumerate(scenario.actions):
        changes: list[dict[str, Any]] = []
        if action.kind == "submit":
            if action.base:
                changes.append({"base": "", "shared": 0})
                if action.shared > action.length:
                    changes.append({"shared": action.length})
                changes += [{"shared": n} for n in _lower(action.shared, 1)]
                changes += [
                    {"shared": action.shared - d, "length": action.length - d}
                    for d in (4 * block, block, scenario.config.hash_unit)
                    if action.shared > d and action.length > d
                ]
            changes += [{"external": n} for n in _lower(action.external, 0)]
            changes += [{"missing": n} for n in _lower(action.missing, 0)]
            changes += [{"priority": n} for n in _lower(action.priority, 0)]
            changes += [{"unread": False}] * action.unread
            changes += [{"images": action.images[:i] + action.images[i + 1 :]} for i in range(len(action.images))]
            changes += [{"max_tokens": n} for n in _lower(action.max_tokens, 1)]
            changes += [{"length": action.length - d} for d in (4 * block, block) if action.length > d]
            changes += [{"length": n} for n in _lower(action.length, 1)]
        elif action.kind == "reset":
            changes += [{"store": False}] * action.store + [{"running": False}] * action.running
        elif action.kind in ("step", "evict"):
            changes += [{"times": n} for n in _lower(action.times, 1)]
            if action.accept:
                changes += [{"accept": ()}, {"accept": action.accept[:1]}]
                changes += [{"accept": tuple(max(0, a - 1) for a in action.accept)}]
        for change in changes:
            smaller = replace(action, **change)
            actions = (*scenario.actions[:index], smaller, *scenario.actions[index + 1 :])
            yield replace(scenario, actions=actions)


def _plainer(scenario: Scenario) -> Iterator[Scenario]:
    """The configuration without one of its extras or groups."""
    config = scenario.config
    undrafted = tuple(replace(g, drafter=False) for g in config.groups)
    changes: list[dict[str, Any]] = [
        {"speculative": 0, "eagle": False, "draft_modules": 1, "groups": undrafted},
        {"eagle": False, "draft_modules": 1},
        {"groups": undrafted},
        {**_OF_STORES, "connector": "none", "divergent_hits": False},
        {**_OF_STORES, "connector": "sync"},
        {"checkpoint_blocks": 0, "checkpoint_alignment": 0},
    ]
    changes += [{f.name: getattr(_PLAIN, f.name)} for f in dataclasses.fields(Config) if f.name not in _SIZES]
    groups = config.groups
    changes += [{"groups": groups[:i] + groups[i + 1 :]} for i in range(len(groups))]
    if config.speculative > 1:
        changes.append({"speculative": 1})
    # One block size for all, and hits of whole blocks only.
    for block in dict.fromkeys((config.scheduler_block, min(g.block_size for g in groups))):
        same = tuple(replace(g, block_size=block) for g in groups)
        changes += [{"groups": same}, {"groups": same, "hash_unit": block}]
    changes.append({"hash_unit": math.gcd(*(g.block_size for g in groups))})
    for change in changes:
        plainer = replace(config, **change)
        # Few caches are without full attention: one that has it keeps it.
        if any(group.kind == "full" for group in plainer.groups) or not any(g.kind == "full" for g in groups):
            yield replace(scenario, config=plainer)


def _smaller_config(scenario: Scenario) -> Iterator[Scenario]:
    """Smaller pools and budgets, and simpler block sizes, one at a time."""
    config = scenario.config
    changes: list[dict[str, Any]] = [{"num_blocks": n} for n in _lower(config.num_blocks, config.smallest_pool())]
    changes += [{"step_tokens": n} for n in _lower(config.step_tokens, config.speculative + 1)]
    for i, group in enumerate(config.groups):
        for smaller in (
            replace(group, block_size=group.block_size // 2),
            replace(group, window=-(-group.window // 2)),
        ):
            if smaller != group and smaller.block_size >= min(SMALLEST_BLOCK, group.block_size):
                changes.append({"groups": (*config.groups[:i], smaller, *config.groups[i + 1 :])})
    if config.checkpoint_alignment > config.hash_unit:
        changes.append({"checkpoint_alignment": config.hash_unit})
    for change in changes:
        yield replace(scenario, config=replace(config, **change))


def _scaled(scenario: Scenario) -> Iterator[Scenario]:
    """Every size in tokens halved, so that all proportions stay."""

    def half(value: int) -> int:
        return -(-value // 2)

    config = scenario.config
    sizes = [g.block_size for g in config.groups]
    if any(s % 2 for s in (*sizes, config.hash_unit)) or min(sizes) < 2 * SMALLEST_BLOCK:
        return
    groups: tuple[Group, ...] = tuple(
        replace(g, block_size=g.block_size // 2, window=half(g.window)) for g in config.groups
    )
    for step_tokens in dict.fromkeys((half(config.step_tokens), config.step_tokens // 2)):
        smaller = replace(
            config,
            groups=groups,
            hash_unit=config.hash_unit // 2,
            step_tokens=max(step_tokens, config.speculative + 1),
            checkpoint_alignment=half(config.checkpoint_alignment),
            long_prefill_threshold=half(config.long_prefill_threshold),
            retention=config.retention // 2 if config.retention else config.retention,
        )
        actions = tuple(
            replace(
                a,
                length=half(a.length),
                shared=half(a.shared),
                external=half(a.external),
                missing=half(a.missing),
                max_tokens=half(a.max_tokens),
            )
            for a in scenario.actions
        )
        yield replace(scenario, config=smaller, actions=actions)


def renamed(scenario: Scenario) -> Scenario:
    """The same with its requests called r1, r2, … in the order they arrive."""
    names: dict[str, str] = {}
    for action in scenario.actions:
        if action.kind == "submit":
            names.setdefault(action.request, f"r{len(names) + 1}")
    actions = tuple(
        replace(a, request=names.get(a.request, a.request), base=names.get(a.base, a.base)) for a in scenario.actions
    )
    return replace(scenario, actions=actions)
