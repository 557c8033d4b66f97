"""What a search that is continued later keeps of its runs, and how a later one begins with it.

Kept are scenarios that reached something for the first time: an event more often than any run before it, an invariant
judged or broken where it had not been (:func:`reached`). A search that goes on runs them again, as the code under it
may have changed, and then variations of them, before it draws runs of its own as ever.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from kvproof.models.stateful.drive import Run
from kvproof.models.stateful.notes import Kept, Tally
from kvproof.models.stateful.search import Search
from kvproof.models.stateful.shrink import about_somebody, renamed
from kvproof.spec.config import Config, ConfigError
from kvproof.spec.finding import Finding
from kvproof.spec.scenario import Action, Scenario

SHARE_AGAIN: Final = 4
"""What was kept earlier is run again for one so many-th of a budget at most."""

SHARE_VARIED: Final = 10
"""Variations end when this part of the budget is spent. Runs that are drawn find more: eight runs of 1000 steps in a
row on vLLM 0.27.0 found 145 kinds of violations from four seeds together, and with a quarter for variations 137."""

MOST_KEPT_ACTIONS: Final = 120
"""Longer runs are not kept: variations of them cost more than runs that are drawn."""

AGAIN: Final = "kept scenario run again"
VARIED: Final = "variation of a kept scenario"


@dataclass(frozen=True)
class Corpus:
    """What a search begins with. ``again`` are scenarios to run as they are, ``varied`` such to vary; ``reached`` is
    what runs before it reached."""

    again: tuple[Scenario, ...] = ()
    varied: tuple[Scenario, ...] = ()
    reached: frozenset[str] = frozenset()

    def share(self, worker: int, workers: int) -> Corpus:
        """One worker's part."""
        return replace(self, again=self.again[worker::workers], varied=self.varied[worker::workers])


class Journal(Protocol):
    """Who writes down how a search goes, so that it can be continued. Called in the process that leads it."""

    @property
    def corpus(self) -> Corpus: ...

    def kept(self, one: Kept, /) -> None:
        """A scenario reached something new."""

    def found(self, finding: Finding, small: bool, /) -> None:
        """Something broke. It comes once more when its scenario has been made small."""

    def went(self, steps: int, examples: int, /) -> None:
        """How far all workers are, every now and then."""


def reached(run: Run) -> frozenset[str]:
    """What a run reached, each with every feature that its configuration has on: how often an event happened (in powers
    of two), which invariants had something to judge, and what broke."""
    what = [f"{name} x{_power(count)}" for name, count in run.events.items()]
    what += [f"judged {name}" for name, count in run.watcher.evaluations.items() if count]
    what += [f"broken {' '.join(violation.identity)}" for violation in run.watcher.violations]
    return frozenset(f"{feature}: {one}" for feature in _features(run.config) for one in what)


def _power(count: int) -> int:
    return 1 << min(int(math.log2(count)), 7) if count else 0


def _features(config: Config) -> Iterator[str]:
    yield "any"
    yield from (group.kind for group in config.groups if group.kind != "full")
    on = {
        f"connector {config.connector}": config.connector != "none",
        "drafts": config.speculative > 0,
        "EAGLE": config.eagle,
        "checkpoints": config.checkpoint_blocks > 0,
        "partial hits": config.partial_hits,
        "asynchronous": config.async_scheduling,
        "divergent hits": config.divergent_hits,
        "priorities": config.policy == "priority",
        "images": config.image_tokens > 0,
    }
    yield from (name for name, is_on in on.items() if is_on)


class Continued(Search):
    """A search that begins with ``corpus`` and keeps what reaches something new."""

    def __init__(self, *, corpus: Corpus, **given: Any) -> None:
        super().__init__(**given)
        self._corpus = corpus
        self._reached = set(corpus.reached)

    def search(self) -> Tally:
        try:
            self._begin()
        except KeyboardInterrupt:
            self.tally.interrupted = True
        return self.tally if self.tally.interrupted or self.tally.errors else super().search()

    def account(self, run: Run) -> None:
        new = reached(run) - self._reached
        if new and not run.error and 0 < len(run.actions) <= MOST_KEPT_ACTIONS:
            self._reached |= new
            self.tally.kept.append(Kept(Scenario(run.config, tuple(run.actions)), tuple(sorted(new))))
        super().account(run)

    def _begin(self) -> None:
        """What was kept, each once, and variations of it, until their shares are used up."""
        name = f"{self._notebook.seed}/{self._worker}/corpus".encode()
        dice = random.Random(hashlib.sha256(name).digest())
        again = list(self._corpus.again)
        varied = [scenario for scenario in self._corpus.varied if scenario.actions]
        dice.shuffle(again)
        for scenario in again:
            if self._spent_on_it(SHARE_AGAIN):
                return
            self._play(scenario, AGAIN)
        refused = 0
        while varied and refused < len(varied) and not self._spent_on_it(SHARE_VARIED):
            refused = 0 if self._play(variation(dice, varied), VARIED) else refused + 1

    def _spent_on_it(self, share: int) -> bool:
        late = self._seconds is not None and self._notebook.elapsed() >= self._seconds / share
        return late or self.tally.steps >= self._steps / share or bool(self.tally.errors)

    def _play(self, scenario: Scenario, what: str) -> bool:
        """False where the subject refuses the configuration."""
        self.tally.coverage[what] += 1
        try:
            scenario.config.check()
            run = Run(self._subject, scenario.config, self._watchers(self._notebook.known, True))
        except ConfigError:
            self.tally.coverage[f"{what} (refused)"] += 1
            return False
        for action in scenario.actions:
            run.do(action)
        run.drain()
        self.account(run)
        return True


def variation(dice: random.Random, scenarios: Sequence[Scenario]) -> Scenario:
    """One of ``scenarios`` (which have actions) with one to three things changed. A subject may refuse it."""
    scenario = dice.choice(scenarios)
    for _ in range(dice.choice((1, 1, 2, 3))):
        change: Callable[[random.Random, Scenario], Scenario] = dice.choice(
            (_other_sizes, _other_numbers, _other_numbers, _without_one, _one_twice, _more_steps)
        )
        changed = _sound(change(dice, scenario))
        if changed.actions:  # who was submitted may be what was left out: then the others are about nobody
            scenario = changed
    return _followed_by(scenario, dice.choice(scenarios)) if dice.random() < 0.25 else scenario


def _sound(scenario: Scenario) -> Scenario:
    """The same without what would be refused where it is read: names of nobody, prefixes that can't be, and length."""
    return replace(scenario, actions=tuple(about_somebody(scenario.actions[:MOST_KEPT_ACTIONS]))).trimmed()


def _other_sizes(dice: random.Random, scenario: Scenario) -> Scenario:
    """Another pool, budget or retention."""
    config = scenario.config
    block = config.scheduler_block
    changes: list[dict[str, Any]] = [
        {"num_blocks": max(config.smallest_pool(), config.num_blocks + dice.choice((-2, -1, 1, 2)))},
        {"step_tokens": max(config.speculative + 1, config.step_tokens + dice.choice((-block, -1, 1, block)))},
        {"step_tokens": max(config.speculative + 1, dice.choice((block - 1, block, block + 1, 2 * block)))},
        {"retention": dice.choice((None, 0, block, 2 * block))},
        {"max_running": dice.choice((2, 4, 8))},
    ]
    return replace(scenario, config=replace(config, **dice.choice(changes)))


def _other_numbers(dice: random.Random, scenario: Scenario) -> Scenario:
    """One request a token, a unit or a block longer or shorter, or with another shared prefix or output."""
    places = [i for i, action in enumerate(scenario.actions) if action.kind == "submit"]
    if not places:
        return scenario
    place = dice.choice(places)
    action, config = scenario.actions[place], scenario.config
    by = dice.choice((1, config.hash_unit, config.scheduler_block)) * dice.choice((-1, 1))
    length = max(1, min(action.length + by, config.max_model_len - 1))
    changes = [
        {"length": length, "external": min(action.external, length), "images": ()},
        {"shared": max(1, action.shared + by)} if action.base else {"length": length, "images": ()},
        {"max_tokens": max(1, action.max_tokens + by)},
    ]
    changed = replace(action, **dice.choice(changes))
    external = min(changed.external, changed.length)
    changed = replace(changed, external=external, missing=min(changed.missing, external))
    return _with(scenario, place, place + 1, (changed,))


def _without_one(dice: random.Random, scenario: Scenario) -> Scenario:
    place = dice.randrange(len(scenario.actions))
    return _with(scenario, place, place + 1, ()) if len(scenario.actions) > 1 else scenario


def _one_twice(dice: random.Random, scenario: Scenario) -> Scenario:
    """Something is done once more: a request comes again under another name."""
    place = dice.randrange(len(scenario.actions))
    action = scenario.actions[place]
    if action.kind == "submit":
        action = replace(action, base=action.request, shared=action.length, request=_new_name(scenario))
    return _with(scenario, place + 1, place + 1, (action,))


def _more_steps(dice: random.Random, scenario: Scenario) -> Scenario:
    place = dice.randrange(len(scenario.actions) + 1)
    return _with(scenario, place, place, (Action("step", times=dice.choice((1, 2, 5))),))


def _followed_by(first: Scenario, second: Scenario) -> Scenario:
    """What happens in ``second`` happens after ``first``, to others, and under the first's configuration."""
    names = {action.request for action in first.actions}
    new = {a.request: f"{a.request}b" for a in second.actions if a.kind == "submit"}
    if names & set(new.values()):
        return first
    longest = first.config.max_model_len - 1
    more = tuple(
        replace(a, request=new.get(a.request, ""), base=new.get(a.base, ""), external=0, missing=0, images=())
        for a in second.actions
        if a.length <= longest
    )
    return _sound(renamed(replace(first, actions=(*first.actions, *about_somebody(more)))))


def _new_name(scenario: Scenario) -> str:
    names = {action.request for action in scenario.actions}
    return next(name for name in (f"r{i}" for i in range(1, len(names) + 2)) if name not in names)


def _with(scenario: Scenario, start: int, end: int, actions: Iterable[Action]) -> Scenario:
    return replace(scenario, actions=(*scenario.actions[:start], *actions, *scenario.actions[end:]))
