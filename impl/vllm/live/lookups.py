"""Lookups that end short, explained as they happen and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvproof.impl.vllm.live.counters import ShortHits
from kvproof.impl.vllm.live.keyhistory import KeyHistory
from kvproof.impl.vllm.live.why import Miss, explain


class Lookups:
    """``tell`` hears of each request's first lookup that fell short."""

    def __init__(self, manager: Any, tell: Callable[[Miss], None]) -> None:
        self.manager, self.tell = manager, tell
        self.history = KeyHistory()
        self.counts = ShortHits()

    def key(self, registered: bool, raw: bytes) -> None:
        """A block got the key ``raw`` (a hash and the four bytes of a group), or lost it."""
        group, name = int.from_bytes(raw[-4:], "big"), raw[:-4]
        if registered:
            self.history.registered(group, name)
        else:
            self.history.removed(group, name)

    def looked_up(self, request: Any, tokens: int) -> None:
        """A lookup was answered with ``tokens``."""
        miss = explain(self.manager, request, tokens, self.history)
        if miss is not None and self.counts.add(miss):
            self.tell(miss)
