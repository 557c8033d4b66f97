"""What a recording says of tokens: which sequences begin alike, and nothing else.

A token of the file is a number that is the same exactly where the token and all before it are the same (up to a
collision of 40 bits). A token that a prompt brings gets a number that says whose and where it is first; a token that
the model brings, a digest of its whole prefix under a key that is drawn for each file and kept nowhere. The same word
in another place has another number, so that no letter, word or frequency of the text can be told from the file. What it
does tell: lengths, and how far two sequences agree. That is found by the cache's own hashes, and token by token among
those that agree up to the last of them.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Collection
from hashlib import blake2b
from typing import Any, Final

from kvproof.impl.vllm.live.naming import _features, _seed

FRESH: Final = 1 << 41
"""Numbers from here on are of prompts: ``FRESH + (sequence << 23) + position``. Below are digests."""

POSITION_BITS: Final = 23
KEPT_TOKENS: Final = 500_000
"""The most tokens of sequences that are over that are remembered though the cache has nothing of them."""


class Sequence:
    """One request's tokens as far as they were recorded; ``said`` are their numbers in the file."""

    __slots__ = ("ahead", "asked", "digest", "hashed", "number", "opaque", "over", "request", "said", "seed", "tokens")

    def __init__(self, number: int, request: Any, salt: bytes) -> None:
        self.number, self.request = number, request
        self.opaque = getattr(request, "prompt_embeds", None) is not None
        self.tokens = array("q", bytes(8 * int(request.num_tokens)) if self.opaque else request.all_token_ids)
        self.seed = (_seed(request), tuple(sorted(_features(request).items())), number if self.opaque else -1)
        self.digest = blake2b(repr(self.seed).encode(), digest_size=5, key=salt)
        self.digest.update(self.tokens.tobytes())
        self.said = array("q")
        self.hashed = 0
        self.over = False
        self.asked: tuple[list[int], list[int], Any, list[Sequence]] | None = None
        self.ahead: list[Sequence] = []
        """Sequences that go on where this one ends: its next tokens may be theirs."""

    def __len__(self) -> int:
        return len(self.tokens)

    def begins_with(self, said: array[int]) -> None:
        """Its first tokens have these numbers; the others are fresh."""
        first = FRESH + (self.number << POSITION_BITS)
        self.said = said + array("q", range(first + len(said), first + len(self)))

    def runs(self) -> list[list[int]]:
        """``said``, shorter: numbers that count up are written as the first and how many."""
        found: list[list[int]] = []
        for number in self.said:
            if found and number >= FRESH and number == found[-1][0] + found[-1][1]:
                found[-1][1] += 1
            else:
                found.append([number, 1])
        return found


class Sequences:
    """All sequences that matter, by number and by request; what the pool's hooks ask for names.

    ``tell`` gets the lines to be written. ``kept`` is how many tokens of sequences that are over may be remembered
    though the cache has nothing of them.
    """

    def __init__(self, unit: int, tell: Callable[..., None], kept: int = KEPT_TOKENS) -> None:
        self.unit, self.tell = unit, tell
        self.salt = secrets.token_bytes(32)
        self.live: dict[str, Sequence] = {}
        self.all: dict[int, Sequence] = {}
        self._names: dict[bytes, tuple[int, int]] = {}
        self._having: dict[bytes, list[int]] = {}
        """A hash to the sequences that have the prefix it is of."""
        self._begun: dict[bytes, list[int]] = {}
        """A seed to the sequences that were begun with it."""
        self._next = 0
        self._spare = 0
        self._kept = self._limit = kept

    def number(self, request: str) -> int:
        sequence = self.live.get(request)
        return -1 if sequence is None else sequence.number

    # -- what hooks ask -----------------------------------------------------------------------------------------------

    def learn(self, request: Any) -> Sequence:
        """The sequence of ``request``, with all tokens and hashes that it has now."""
        sequence = self.live.get(request.request_id)
        if sequence is None or sequence.request is not request:
            return self._begin(request)
        if sequence.opaque:
            return sequence
        total, known = int(request.num_tokens), len(sequence)
        if total < known or (known and request.all_token_ids[known - 1] != sequence.tokens[-1]):
            return self._begin(request)  # a session goes on from an earlier point
        if total > known:
            self.tell("grow", sequence.number, self.sampled(sequence, list(request.all_token_ids[known:total]), True))
        hashes = request.block_hashes
        if sequence.hashed != len(hashes):
            self._index(sequence)
        return sequence

    def state(self, raw: bytes) -> tuple[int, int, int, bytes]:
        """What a key stands for: sequence (−1: nobody had that prefix), tokens and group; and the key itself."""
        number, tokens = self._names.get(raw[:-4], (-1, 0))
        return number, tokens, int.from_bytes(raw[-4:], "big"), raw

    def forget(self, request: str) -> None:
        sequence = self.live.pop(request, None)
        if sequence is not None:
            self._over(sequence)

    def tidy(self, used: Collection[bytes]) -> None:
        """Drop what is over and of which the cache (``used`` are its raw keys) has nothing."""
        if self._spare <= self._limit:
            return
        needed = {self._names[raw[:-4]][0] for raw in used if raw[:-4] in self._names}
        dropped = [number for number, one in self.all.items() if one.over and number not in needed]
        for number in dropped:
            del self.all[number]
        self._names = {name: where for name, where in self._names.items() if where[0] in self.all}
        self._begun = _only(self._begun, self.all)
        # Those that live are indexed anew.
        self._having = _only(self._having, {number for number, one in self.all.items() if one.over})
        for sequence in self.live.values():
            sequence.ahead = [one for one in sequence.ahead if one.number in self.all]
            sequence.hashed = 0
            self._index(sequence)
        self._spare = sum(len(one) + 1 for one in self.all.values() if one.over)
        self._limit = 2 * self._spare + self._kept
        self.tell("forget", dropped)

    # -- tokens -------------------------------------------------------------------------------------------------------

    def sampled(self, sequence: Sequence, tokens: list[int], keep: bool) -> list[int]:
        """The numbers of the ``tokens`` that follow on ``sequence``; ``keep`` them as its own.

        What was asked last is remembered: as a rule the tokens that a step samples are then kept.
        """
        asked = sequence.asked
        sequence.asked = None
        if asked is None or not keep or asked[0] != tokens:
            asked = self._numbered(sequence, tokens)
        if not keep:
            sequence.asked = asked
            return asked[1]
        _, numbers, sequence.digest, sequence.ahead = asked
        sequence.tokens.extend(tokens)
        sequence.said.extend(numbers)
        return numbers

    @staticmethod
    def _numbered(sequence: Sequence, tokens: list[int]) -> tuple[list[int], list[int], Any, list[Sequence]]:
        """The tokens, their numbers, and the digest and who is ahead after them."""
        digest = sequence.digest.copy()
        ahead, position = sequence.ahead, len(sequence)
        numbers: list[int] = []
        for token in tokens:
            digest.update(token.to_bytes(8, "little", signed=True))
            number = None
            if ahead:
                ahead = [one for one in ahead if len(one) > position and one.tokens[position] == token]
                number = ahead[0].said[position] if ahead else None
            numbers.append(int.from_bytes(digest.digest(), "big") if number is None else number)
            position += 1
        return tokens, numbers, digest, ahead

    # -- sequences ----------------------------------------------------------------------------------------------------

    def _begin(self, request: Any) -> Sequence:
        before = self.live.get(request.request_id)
        if before is not None:
            self._over(before)
        for other in self.live.values():
            if other.hashed != len(other.request.block_hashes):
                self._index(other)
        sequence = Sequence(self._next, request, self.salt)
        self._next += 1
        base, shared = self._shared(sequence)
        length = int(request.num_tokens)
        sequence.begins_with(base.said[:shared] if base is not None else array("q"))
        self._meet(sequence, shared == length)
        self.live[request.request_id] = self.all[sequence.number] = sequence
        self._begun.setdefault(_root(sequence), []).append(sequence.number)
        self._index(sequence)
        self.tell("seq", sequence.number, request.request_id, -1 if base is None else base.number, shared, length)
        return sequence

    def _shared(self, sequence: Sequence) -> tuple[Sequence | None, int]:
        """The sequence that has most of this one's beginning, and how many tokens of it."""
        if sequence.opaque:
            return None, 0
        hashes = sequence.request.block_hashes
        depth = next((n for n in range(len(hashes), 0, -1) if bytes(hashes[n - 1]) in self._names), 0)
        base: Sequence | None = None
        start = best = depth * self.unit
        alike = self._begun.get(_root(sequence), [])
        if depth:
            name = bytes(hashes[depth - 1])
            base, alike = self.all[self._names[name][0]], self._having.get(name, [])
        for number in alike:
            other = self.all.get(number)
            if other is not None and other.seed == sequence.seed:
                agreed = _agreed(sequence.tokens, other.tokens, start)
                if agreed > best:
                    base, best = other, agreed
        return base, best

    def _meet(self, sequence: Sequence, known: bool) -> None:
        """Note who may come to repeat what somebody else's prompt has."""
        ours, seed = sequence.tokens, sequence.seed
        for other in self.live.values():
            if _goes_on(ours, other.tokens) and other.seed == seed:
                other.ahead = [*other.ahead, sequence]
                other.asked = None
        if known:
            sequence.ahead = [o for o in self.all.values() if _goes_on(o.tokens, ours) and o.seed == seed]

    def _index(self, sequence: Sequence) -> None:
        """Give names to the hashes that came since the last time."""
        hashes = sequence.request.block_hashes
        if sequence.opaque:
            return
        if sequence.hashed > len(hashes):
            sequence.hashed = 0
        for index in range(sequence.hashed, min(len(hashes), len(sequence) // self.unit)):
            name = bytes(hashes[index])
            self._names.setdefault(name, (sequence.number, (index + 1) * self.unit))
            self._having.setdefault(name, []).append(sequence.number)
            sequence.hashed = index + 1

    def _over(self, sequence: Sequence) -> None:
        if sequence.hashed != len(sequence.request.block_hashes):
            self._index(sequence)
        sequence.over, sequence.request, sequence.ahead, sequence.asked = True, None, [], None
        self._spare += len(sequence) + 1


def _root(sequence: Sequence) -> bytes:
    """What all sequences that may agree at all have in common."""
    return repr(sequence.seed).encode()


def _only(numbers: dict[bytes, list[int]], kept: Collection[int]) -> dict[bytes, list[int]]:
    left = ((name, [number for number in some if number in kept]) for name, some in numbers.items())
    return {name: some for name, some in left if some}


def _agreed(ours: Any, theirs: Any, start: int) -> int:
    """How many tokens agree, of which the first ``start`` are known to."""
    low, high = start, min(len(ours), len(theirs))
    near = min(high, start + 4)  # most that part do so at once
    if ours[start:near] != theirs[start:near]:
        return next(place for place in range(start, near) if ours[place] != theirs[place])
    while low < high:  # the longest run that agrees, by halves: slices are compared at once
        middle = (low + high + 1) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _goes_on(longer: Any, shorter: Any) -> bool:
    end = len(shorter)
    return 0 < end < len(longer) and longer[end - 1] == shorter[-1] and longer[:end] == shorter
