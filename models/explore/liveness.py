"""Liveness: from every state, steps alone bring every request to its end.

Fairness is that steps go on being taken, that loads arrive, and that nobody interferes any more. Then nothing but the
engine decides, apart from what the model says to drafts, and there any answer is possible. So a request that may never
finish is a way round in the graph of steps: a state with a request from which steps lead back to it.

Nothing is promised to a request that may need more blocks than there are (its peak, an upper bound, is above the pool):
a way round with such a request in it is counted apart, and is no fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Stepper(Protocol):
    def step_from(self, state: bytes) -> Sequence[bytes]:
        """Where a step leads from a state; empty where nobody is there."""

    def fits(self, state: bytes) -> bool:
        """Whether each request of a state fits the pool, alone in it."""


@dataclass(frozen=True)
class Livelock:
    """States that steps lead round for ever, in order. ``fits``: each of their requests fits the pool."""

    states: tuple[bytes, ...]
    fits: bool


def livelocks(
    stepper: Stepper, states: Sequence[bytes], pause: Callable[[], None] = lambda: None
) -> Iterator[Livelock]:
    """Ways round in the graph of steps over all ``states``, as they are found. Walks every state once, and calls
    ``pause`` between two."""
    fine: set[bytes] = set()
    for start in states:
        if start not in fine:
            yield from _walk(stepper, start, fine, {}, pause)


def _walk(
    stepper: Stepper, start: bytes, fine: set[bytes], path: dict[bytes, int], pause: Callable[[], None]
) -> Iterator[Livelock]:
    stack: list[tuple[bytes, list[bytes]]] = [(start, list(stepper.step_from(start)))]
    path[start] = 0
    while stack:
        pause()
        state, ahead = stack[-1]
        if not ahead:
            stack.pop()
            del path[state]
            fine.add(state)
            continue
        after = ahead.pop()
        if after in fine:
            continue
        if after in path:
            states = _round(path, after)
            yield Livelock(states, all(stepper.fits(state) for state in states))
            continue
        path[after] = len(stack)
        stack.append((after, list(stepper.step_from(after))))


def _round(path: Mapping[bytes, int], first: bytes) -> tuple[bytes, ...]:
    return tuple(state for state, place in sorted(path.items(), key=lambda item: item[1]) if place >= path[first])
