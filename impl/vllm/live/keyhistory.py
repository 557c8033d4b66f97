"""What a cache no longer shows: keys that were there once, and the prompts that asked before.

Both are bounded. Keys that are registered now are in the pool itself; what costs memory here is only what is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

START_STEP: Final = 16
"""Tokens between two digests of a prompt's first block, where there is no prefix hash yet. vLLM's default block."""


class Gone(NamedTuple):
    """A key that was there. ``kept`` is the step in which it was registered (-1: before anything was watched)."""

    kept: int
    gone: int


@dataclass
class Prompt:
    """A prompt as it was looked up: its name, its length in tokens, and where others can recognise it.

    ``marks`` holds the prefix hashes at the positions where a state of it may be kept: its block boundaries, its last
    units, and the junction, once one was noted. ``start`` holds a digest after each :data:`START_STEP` tokens of its
    first block.
    """

    name: str
    tokens: int
    marks: dict[int, bytes] = field(default_factory=dict)
    start: tuple[int, ...] = ()
    junction: int = 0


class KeyHistory:
    """Fed by hooks: :meth:`step_starts` before each schedule, :meth:`registered` and :meth:`removed` per key.

    A key on several blocks is registered and removed once per block; ask the pool first whether it is still there.
    A key that was registered and removed within one step was overwritten before anybody could use it, and counts as
    never kept. At most ``keys`` keys and ``prompts`` positions in prompts are remembered (roughly 300 bytes each).
    """

    def __init__(self, keys: int = 65_536, prompts: int = 65_536) -> None:
        self.step = 0
        self.forgot = False
        """Whether a key that is gone had to be forgotten: from then on "never kept" may be "kept long ago"."""
        self._keys, self._prompts = max(1, keys), max(1, prompts)
        self._live: dict[tuple[int, bytes], int] = {}
        self._gone: dict[tuple[int, bytes], Gone] = {}
        self._index: dict[bytes | int, tuple[Prompt, Prompt | None]] = {}

    # -- keys ---------------------------------------------------------------------------------------------------------

    def step_starts(self) -> None:
        self.step += 1

    def registered(self, group: int, hash: bytes) -> None:
        """``hash`` (without the group id that vLLM appends) is now a key of ``group``."""
        key = (group, hash)
        self._gone.pop(key, None)
        self._live.pop(key, None)
        self._live[key] = self.step
        if len(self._live) > self._keys:
            del self._live[next(iter(self._live))]

    def removed(self, group: int, hash: bytes) -> None:
        """A block lost this key: it was evicted, overwritten, or the key moves to another block."""
        key = (group, hash)
        before = self._gone.pop(key, None)
        kept = self._live.pop(key, -1 if before is None else before.kept)
        if kept == self.step:
            return
        self._gone[key] = Gone(kept, self.step)
        if len(self._gone) > self._keys:
            del self._gone[next(iter(self._gone))]
            self.forgot = True

    def cleared(self) -> None:
        """The whole cache was reset: nothing that was kept or asked before says anything about it any more."""
        self._live.clear()
        self._gone.clear()
        self._index.clear()
        self.forgot = False

    def gone(self, group: int, hash: bytes) -> Gone | None:
        """When a key that is not in the pool was there; ``None`` if it never was, or if that is forgotten."""
        return self._gone.get((group, hash))

    def __len__(self) -> int:
        return len(self._live) + len(self._gone) + len(self._index)

    # -- prompts ------------------------------------------------------------------------------------------------------

    def asked(self, prompt: Prompt) -> None:
        """Remembers ``prompt`` for those that come later. A waiting request asks again and again: that counts once."""
        keys: list[bytes | int] = [*prompt.start, *prompt.marks.values()]
        for key in keys:
            before = self._index.pop(key, None)
            if before is None:
                self._index[key] = (prompt, None)
            else:
                other = before[0] if before[0].name != prompt.name else before[1]
                self._index[key] = (prompt, other)
            if len(self._index) > self._prompts:
                del self._index[next(iter(self._index))]

    def earlier(self, keys: Iterable[bytes | int], name: str) -> tuple[int, Prompt] | None:
        """The first of ``keys`` that another prompt than ``name`` asked with, by its number, and the latest such."""
        for number, key in enumerate(keys):
            found = self._index.get(key)
            if found is None:
                continue
            prompt = found[0] if found[0].name != name else found[1]
            if prompt is not None:
                return number, prompt
        return None


def digests(tokens: Sequence[int], seed: Any) -> tuple[int, ...]:
    """A digest after each :data:`START_STEP` tokens. ``seed`` is what must be equal besides the tokens."""
    found = []
    digest = hash(seed)
    for end in range(START_STEP, len(tokens) + 1, START_STEP):
        digest = hash((digest, *tokens[end - START_STEP : end]))
        found.append(digest)
    return tuple(found)


def marks(hashes: Sequence[bytes], unit: int, block: int, tokens: int) -> Mapping[int, bytes]:
    """The positions of a prompt of ``tokens`` at which its states may be kept, with its prefix hashes there."""
    last = tokens // unit * unit
    ends = {unit, last - unit, last, (tokens - 1) // unit * unit, *range(block, tokens + 1, block)}
    return {end: hashes[end // unit - 1] for end in sorted(ends) if unit <= end <= len(hashes) * unit}
