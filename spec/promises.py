"""What earlier requests promise to later lookups: followed from the events, for any subject.

A promise is due only while nothing of the prefix is lost. What is keyed is followed block by block at the end of every
step, so that a key that no block carries any more is noticed whoever took it (an eviction, a reset, a reallocation);
where a lookup falls short, the keys are looked at once more as they are at that moment. Whatever is not followed to its
end (a load from outside, a request that was cut short) promises nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from kvproof.spec.config import Config
from kvproof.spec.events import Forward, Lookup, Observation, Promised, Resume, StepEnd
from kvproof.spec.rules.reuse import Past, drops, matches, promised
from kvproof.spec.tracer import State, length_of
from kvproof.spec.view import View

T = TypeVar("T")

KeyName = tuple[int, State]
"""A group and what it may reuse a block as."""

MOST_REMEMBERED: Final = 64
"""Requests that are remembered: those whose lookup is longest ago go first."""


@dataclass
class _Life:
    """One request since its last lookup. ``at`` is how far it is computed, ``whole`` whether its prompt is, and that in
    plain sight; ``lost`` whether a key of its prefix went away since."""

    name: str
    states: Sequence[State]
    past: Past
    at: int = 0
    known: bool = True
    whole: bool = False
    lost: bool = False

    def has(self, state: State) -> bool:
        """Whether the state is one of this request's own prefixes."""
        length = length_of(state)
        return length < len(self.states) and self.states[length] == state

    def shared(self, states: Sequence[State]) -> int:
        """How many tokens the two have in common."""
        most = min(len(self.states), len(states))
        return bisect_left(range(1, most), True, key=lambda n: self.states[n] != states[n])


@dataclass
class Promises:
    """Call it with every observation of one run, in order: lookups come back with what they were promised."""

    config: Config
    lives: dict[str, _Life] = field(default_factory=dict)
    done: dict[str, _Life] = field(default_factory=dict)
    _prompts: dict[str, int] = field(default_factory=dict)
    _keys: dict[int, frozenset[KeyName]] = field(default_factory=dict)
    _blocks: dict[KeyName, set[int]] = field(default_factory=dict)

    def __call__(self, observation: Observation) -> Observation:
        event = observation.event
        match event:
            case Lookup():
                found = self._promised(event, observation.view)
                self._looked_up(event)
                if found is not None:
                    return Observation(replace(event, promised=found), observation.view)
            case Resume():
                self._resumed(event)
            case Forward():
                self._ran(event)
            case StepEnd():
                self._settle(observation.view)
            case _:
                pass
        return observation

    # -- what requests do ---------------------------------------------------------------------------------------------

    def _looked_up(self, event: Lookup) -> None:
        """A request is about to be computed from its beginning: what it did before its blocks were taken is over."""
        tokens = len(event.states) - 1
        prompt = _remember(self._prompts, event.request, self._prompts.get(event.request, tokens))
        life = _Life(event.request, event.states, Past(prompt), known=tokens == prompt)
        _remember(self.lives, event.request, life)

    def _resumed(self, event: Resume) -> None:
        life = self.lives.get(event.request)
        if life is not None:
            life.at = life.past.start = event.local
            life.known = life.known and not event.external

    def _ran(self, event: Forward) -> None:
        life = self.lives.get(event.request)
        if life is None or life.whole or not life.known:
            return
        life.known = event.start == life.at
        life.at = event.start + event.tokens - event.drafts
        life.past.ends.append(life.at)

    # -- what is kept -------------------------------------------------------------------------------------------------

    def _settle(self, view: View) -> None:
        """A step is over: what it keyed is there, what it lost is gone, and who was prefilled counts from now on."""
        gone = self._follow(view, view.touched())
        for lives in (self.lives, self.done):
            for life in lives.values():
                life.lost = life.lost or any(life.has(state) for _, state in gone)
        for name, life in list(self.lives.items()):
            life.whole = life.whole or (life.known and life.at >= life.past.prompt)
            if life.whole or not life.known or life.lost:
                del self.lives[name]
            if life.whole and life.known and not life.lost:
                _remember(self.done, name, life)
        for name in [name for name, life in self.done.items() if life.lost]:
            del self.done[name]

    def _follow(self, view: View, blocks: Collection[int]) -> list[KeyName]:
        """Note what these blocks are keyed as now, and return the keys that are lost: a key that went from one block to
        another is not."""
        had: dict[KeyName, int] = {}
        for block in blocks:
            before = self._keys.get(block, frozenset())
            after = frozenset((key.group, key.state) for key in view.keys(block))
            for key in before ^ after:
                carriers = self._blocks.setdefault(key, set())
                had.setdefault(key, len(carriers))
                (carriers.add if key in after else carriers.discard)(block)
            self._keys[block] = after
        lost = []
        for key, count in had.items():
            left = len(self._blocks[key])
            if left < count and (not left or self._one_of_a_kind):
                lost.append(key)
            if not left:
                del self._blocks[key]
        return lost

    @property
    def _one_of_a_kind(self) -> bool:
        """Whether two blocks that hold the same state may still differ in what finds them.

        With a drafter a subject may look a block up by the token after it, too (vLLM 0.33.0 hashes that in), which the
        state doesn't tell: there each block's key that is lost counts.
        """
        return self.config.eagle

    def _still_there(self, life: _Life, view: View) -> bool:
        """Whether every key of the life's prefix that there was is there now, in the middle of a step."""
        enough = all if self._one_of_a_kind else any
        moved = []
        for position in range(self.config.hash_unit, life.past.prompt + 1, self.config.hash_unit):
            for group in range(len(self.config.groups)):
                name = (group, life.states[position])
                carried = [
                    any((key.group, key.state) == name for key in view.keys(block))
                    for block in self._blocks.get(name, ())
                ]
                if carried and not enough(carried):
                    moved.append(name)
        if not moved or self._one_of_a_kind:
            return not moved
        there = view.lookup_map()
        return all(there.get(name) for name in moved)

    # -- what that promises -------------------------------------------------------------------------------------------

    def _promised(self, event: Lookup, view: View) -> Promised | None:
        """The most that is promised to this lookup; nothing where its answer is not the last word.

        A promise that is not kept is told only once it is sure that nothing was lost since the last step.
        """
        if event.diverged:
            return None
        total = len(event.states) - 1
        candidates = []
        for life in self.done.values():
            shared = life.shared(event.states)
            if shared < self.config.hash_unit:
                continue  # the quick answer for most: nothing shorter than a unit is found
            tokens = promised(self.config, life.past, shared, total)
            if 0 < tokens <= event.limit:
                candidates.append((tokens, life, shared))
        for tokens, life, shared in sorted(candidates, key=lambda found: -found[0]):
            resend = shared == total == life.past.prompt
            if event.tokens >= tokens:
                return Promised(tokens, life.name, resend)
            if self._still_there(life, view):
                return Promised(tokens, life.name, resend, *self._lacking(life, event, tokens, shared, view))
        return None

    def _lacking(self, life: _Life, event: Lookup, tokens: int, shared: int, view: View) -> tuple[str, int]:
        """Which group has not what a hit of ``tokens`` takes, and why, as a slug; (…, −1): each of them has it."""
        there = view.lookup_map()
        for index, group in enumerate(self.config.groups):
            needed = [*_needed(self.config, index, life.past, tokens, shared)]
            if all(there.get((index, event.states[position])) for position in needed):
                continue
            if group.kind != "mamba":
                return f"{group.kind}-not-kept", index
            ended = tokens in life.past.ends
            where = "tail" if tokens % self.config.scheduler_block else "boundary"
            return f"{where}-state-not-kept" if ended else f"no-chunk-ended-at-{where}", index
        if any(group.kind == "window" and group.window == 1 for group in self.config.groups):
            return "window-of-one-token", -1  # it needs no block at all, so that none can be missing
        if len(self.config.groups) == 1:
            return "lookup-of-one-group-passes-over", -1
        if any(group.kind == "window" and group.window > tokens for group in self.config.groups):
            return "lookup-passes-over-short-of-a-window", -1  # what such a window needs goes back to the beginning
        return "lookup-passes-over", -1


def _needed(config: Config, index: int, past: Past, tokens: int, shared: int) -> Iterator[int]:
    """The positions whose keys group ``index`` needs for a hit of ``tokens``."""
    group = config.groups[index]
    size, dropped = group.block_size, drops(config, group)
    if group.kind == "mamba":
        yield tokens
        return
    first = group.first_read(tokens) // size
    proof = tokens + dropped
    if group.kind == "full":
        proof = min(proof, matches(config, group, past.prompt, min(shared, past.prompt)))
    yield from range((first + 1) * size, proof + 1, size)
    if group.kind == "full" and proof % size and proof // size * size + size > shared:
        yield proof


def _remember(kept: dict[str, T], name: str, value: T) -> T:
    """Put it last, and let go of what is oldest where that is too much."""
    kept.pop(name, None)
    kept[name] = value
    if len(kept) > MOST_REMEMBERED:
        del kept[next(iter(kept))]
    return value


def promising(config: Config, observer: Callable[[Observation], None]) -> Callable[[Observation], None]:
    """``observer``, told with every lookup what it was promised."""
    promises = Promises(config)
    return lambda observation: observer(promises(observation))
