"""What happened to a block lately: so that a finding names the call that broke a rule, not the one that noticed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from kvproof.spec.tracer import State, show

DEPTH = 12
"""Entries kept of one block."""

MOST_BLOCKS = 65_536
"""Blocks whose past is kept (some 2 kB each): in a larger pool those first noted longest ago are forgotten."""


class Entry(NamedTuple):
    """In which step, what (``taken``, ``held``, ``freed``, ``keyed``, ``unkeyed``, ``written``, ``copied``), by or for
    whom, and the content or key that it is about."""

    step: int
    what: str
    who: str
    state: State | None

    def line(self) -> str:
        about = f" {show(self.state)}" if self.state is not None else ""
        link = {"keyed": " as", "unkeyed": " as", "written": ":", "copied": ":"}.get(self.what, "") if about else ""
        verb = "no longer keyed" if self.what == "unkeyed" else self.what
        by = "" if self.what == "copied" else "by "
        return f"step {self.step}: {verb}{f' {by}{self.who}' if self.who else ''}{link}{about}"


class BlockHistory:
    """A ring of entries per block. ``step`` is the step that entries belong to from now on."""

    def __init__(self) -> None:
        self.step = 0
        self._rings: dict[int, deque[Entry]] = {}

    def note(self, block: int, what: str, who: str = "", state: State | None = None) -> None:
        ring = self._rings.get(block)
        if ring is None:
            if len(self._rings) >= MOST_BLOCKS:
                del self._rings[next(iter(self._rings))]
            ring = self._rings[block] = deque(maxlen=DEPTH)
        ring.append(Entry(self.step, what, who, state))

    def of(self, block: int) -> tuple[Entry, ...]:
        return tuple(self._rings.get(block, ()))

    def lines(self, block: int) -> Iterator[str]:
        return (entry.line() for entry in self.of(block))


def first_wrong(entries: tuple[Entry, ...], promised: State) -> Entry | None:
    """The write after which a block no longer held ``promised``: the first after the last right one.

    Where it never held it, that is the first write after it was keyed so, or the last one before: keys are noted when
    they are promised, and the step that is to keep the promise writes afterwards. ``None`` if the ring does not go back
    so far.
    """
    keyed = next((i for i in range(len(entries) - 1, -1, -1)
                  if entries[i].what == "keyed" and entries[i].state == promised), len(entries))  # fmt: skip
    writes = [i for i, entry in enumerate(entries) if entry.what in ("written", "copied")]
    right = [i for i in writes if entries[i].state == promised]
    if right:
        later = [i for i in writes if i > right[-1]]
        return entries[later[0]] if later else None
    after = [i for i in writes if i > keyed]
    before = [i for i in writes if i < keyed]
    return entries[after[0]] if after else entries[before[-1]] if before else None
