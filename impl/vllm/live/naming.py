"""Names of prefixes: what a real request's tokens, and the cache's own hashes, are called by the specification.

A key of a serving engine is a hash that says nothing of itself. Every request carries the hashes of its own prefixes
(one per hash unit), so what a key stands for is known as soon as a request that has that prefix was seen. Keys of
requests that were never seen have no name: they are left out, not guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from kvproof.spec.tracer import LENGTH_BITS, State, advance, length_of

_SEEDS = 1 << 40
SPARE = 50_000
"""How many more names than are in use are kept before the rest are thrown away."""


class Log:
    """One request's prefixes: ``states[n]`` after its first n tokens. ``hashed`` of its hashes have a name."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.states: list[State] = [_seed(request)]
        self.last = -1
        self.hashed = 0
        self.features = _features(request)
        # Prompts given as embeddings have no tokens that could tell them apart.
        self.opaque = getattr(request, "prompt_embeds", None) is not None

    def follow(self) -> None:
        """Take in the tokens that the request has by now."""
        request, states = self.request, self.states
        total, known = int(request.num_tokens), len(states) - 1
        if known > total or (known and request.all_token_ids[known - 1] != self.last):
            # A session went on from an earlier point: others keep the list as it was.
            self.states = states = states[:1]
            known = self.hashed = 0
        if known == total:
            return
        state, features = states[-1], self.features
        for position, token in enumerate(request.all_token_ids[known:total], known):
            word = token if position not in features else hash((token, features[position])) % _SEEDS
            state = advance(state, word)
            states.append(state)
        self.last = request.all_token_ids[total - 1]


def _seed(request: Any) -> State:
    """The empty prefix of a request: with another adapter or salt the same tokens lead to other states."""
    lora = getattr(request, "lora_request", None)
    apart = (getattr(lora, "lora_name", None) or getattr(lora, "name", None), getattr(request, "cache_salt", None))
    return State(0) if apart == (None, None) else State(1 + hash(apart) % _SEEDS << LENGTH_BITS)


def _features(request: Any) -> dict[int, str]:
    """Where images and the like begin, and what they are: their placeholder tokens look all the same."""
    found = {}
    for feature in getattr(request, "mm_features", None) or ():
        found[int(feature.mm_position.offset)] = str(feature.identifier)
    return found


class Names:
    """The prefixes of all requests seen, by the cache's hashes and back. ``unit`` is the hash unit in tokens."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.logs: dict[str, Log] = {}
        self._states: dict[bytes, State] = {}
        self._hashes: dict[State, list[bytes]] = {}
        self._ways: dict[State, Sequence[State]] = {}
        self._limit = SPARE

    def learn(self, request: Any) -> Log:
        """The log of ``request``, up to the tokens and hashes that it has now."""
        log = self.logs.get(request.request_id)
        if log is None or log.request is not request:
            log = self.logs[request.request_id] = Log(request)
        log.follow()
        hashes, unit = request.block_hashes, self.unit
        if log.hashed > len(hashes):
            log.hashed = 0
        if log.hashed < len(hashes) and not log.opaque:
            states = log.states
            for index in range(log.hashed, min(len(hashes), (len(states) - 1) // unit)):
                state = states[(index + 1) * unit]
                name = bytes(hashes[index])
                if name not in self._states:
                    self._states[name] = state
                    self._hashes.setdefault(state, []).append(name)
                self._ways.setdefault(state, states)
                log.hashed = index + 1
        return log

    def forget(self, request: str) -> None:
        """The request is gone. What it left in the cache keeps its name."""
        self.logs.pop(request, None)

    def state(self, raw: bytes) -> State | None:
        """What a key (a hash and the four bytes of a group) stands for."""
        return self._states.get(raw[:-4])

    def hashes(self, state: State) -> Sequence[bytes]:
        """The cache's names for a prefix: more than one where a hash covers tokens after the boundary, too."""
        return self._hashes.get(state, ())

    def way(self, state: State) -> Sequence[State] | None:
        """The states that lead to ``state``, itself included, or ``None`` for one that nobody had."""
        length = length_of(state)
        states = self._ways.get(state)
        if states is None:
            logs = self.logs.values()
            states = next((g.states for g in logs if length < len(g.states) and g.states[length] == state), None)
        return None if states is None else states[1 : length + 1]

    def tidy(self, used: Collection[bytes]) -> None:
        """Throw away the names of keys that are neither ``used`` (raw keys of the cache) nor of a known request."""
        if len(self._states) <= self._limit:
            return
        keep = {raw[:-4] for raw in used}
        for log in self.logs.values():
            keep.update(bytes(h) for h in log.request.block_hashes)
        self._states = {name: state for name, state in self._states.items() if name in keep}
        self._hashes = {}
        for name, state in self._states.items():
            self._hashes.setdefault(state, []).append(name)
        left = self._hashes.keys()
        self._ways = {state: way for state, way in self._ways.items() if state in left}
        self._limit = 2 * len(self._states) + SPARE
