"""A scheduler's output as a trace has it, in the shape that the shadow of the device takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

_REJECTED: Final = 1 << 62
"""Stands for a draft that was rejected: which token it was, the trace does not say."""


class _Copy(NamedTuple):
    src_block_id: int
    dst_block_id: int


class Output:
    """One step's. ``drafts`` are how many each request had, ``visited`` those whose rows have to be looked at."""

    def __init__(
        self,
        finished: list[str],
        preempted: list[str],
        zeroed: list[int],
        copies: Sequence[Any],
        exports: Sequence[Any],
    ) -> None:
        self.finished_req_ids = finished
        self.preempted_req_ids = preempted
        self.new_block_ids_to_zero = zeroed
        self.kv_cache_block_copies = [_Copy(source, target) for source, target in copies]
        self.exports = exports
        self.scheduled_new_reqs: list[Any] = []
        self.scheduled_cached_reqs = SimpleNamespace(
            req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
        )
        self.num_scheduled_tokens: dict[str, int] = {}
        self.scheduled_spec_decode_tokens: dict[str, list[int]] = {}
        self.tokens: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.drafts: dict[str, int] = {}
        self.visited: set[str] = set()

    def new(self, name: str, computed: int, blocks: Any) -> None:
        self.scheduled_new_reqs.append(SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=blocks))

    def cached(self, name: str, computed: int, blocks: Any, resumed: bool) -> None:
        cached = self.scheduled_cached_reqs
        cached.req_ids.append(name)
        cached.num_computed_tokens.append(computed)
        cached.new_block_ids.append(blocks)
        if resumed:
            cached.resumed_req_ids.add(name)

    def guess(self, sampled: Mapping[str, Sequence[int]]) -> None:
        """The drafts, as far as what was sampled tells: what was accepted is there, the rest is nothing known."""
        for name, count in self.drafts.items():
            known = list(sampled.get(name, ())[:-1])[:count]
            self.scheduled_spec_decode_tokens[name] = [*known, *range(_REJECTED, _REJECTED + count - len(known))]
