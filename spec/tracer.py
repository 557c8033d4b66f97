"""The tracer: an exact, cheap stand-in for recurrent state and keys.

A recurrent layer folds the prefix into one state. So does the tracer: an integer recurrence over the tokens, a rolling
hash packed together with the length it stands for. Two states are equal exactly when their prefixes are (up to a
40-bit collision, which can hide a fault but never invent one, since keys are made from the same integers).

The packed integer fits in a signed 64-bit word, so that a torch tensor can carry it beside the float state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NewType

State = NewType("State", int)
"""A prefix: rolling hash and length, packed. ``EMPTY`` is the state after no token."""

LENGTH_BITS: Final = 22
_MODULUS: Final = (1 << 40) - 87  # the largest prime below 2**40
_FACTOR: Final = 6364136223
EMPTY: Final = State(0)


def advance(state: State, token: int) -> State:
    """The state after one more token. Tokens are non-negative integers of any size."""
    digest = state >> LENGTH_BITS
    length = (state & ((1 << LENGTH_BITS) - 1)) + 1
    return State((((digest * _FACTOR + token + 1) % _MODULUS) << LENGTH_BITS) | length)


def length_of(state: State) -> int:
    """How many tokens the state stands for."""
    return state & ((1 << LENGTH_BITS) - 1)


def states_of(tokens: Iterable[int]) -> list[State]:
    """The states after 0, 1, … n tokens: ``states_of(tokens)[n]`` is the state after the first n."""
    states = [EMPTY]
    for token in tokens:
        states.append(advance(states[-1], token))
    return states


def show(state: State | None) -> str:
    """A state as people read it: ``state@48#1a2b``; ``nothing`` where nothing was ever written."""
    if state is None:
        return "nothing"
    return f"state@{length_of(state)}#{(state >> LENGTH_BITS) & 0xFFFF:04x}"


def encode_key(state: State, beyond: State = EMPTY) -> bytes:
    """The 32-byte prefix hash that stands for a state, decodable by :func:`decode_key` without a registry.

    ``beyond`` is the state after the few tokens past the boundary that some caches hash as well (to prove the boundary
    token of a drafter); it makes keys differ where those tokens do, and is not part of what the key promises.
    """
    return int(beyond).to_bytes(24, "big") + int(state).to_bytes(8, "big")


def decode_key(key: bytes) -> State:
    """The state a 32-byte prefix hash (anything after it is ignored) stands for."""
    return State(int.from_bytes(key[24:32], "big"))
