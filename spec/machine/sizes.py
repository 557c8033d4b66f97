"""The rules, asked with numbers: where a chunk ends, what is worth a key, what a step takes.

All of it is :mod:`kvproof.spec.rules`; here the numbers are put in, and answers are remembered, since in a small world
the same few questions are asked over and over.
"""

from __future__ import annotations

from functools import lru_cache

from kvproof.spec.config import RARE, Config, ConfigError
from kvproof.spec.machine.dialect import SPECIFICATION, Dialect, split_before_51113
from kvproof.spec.radix import Position, Radix
from kvproof.spec.rules.checkpoint import checkpoint_position
from kvproof.spec.rules.chunk import Prefill, declared_stops, split


def ceil(tokens: int, block: int) -> int:
    """How many blocks hold ``tokens`` tokens."""
    return -(-tokens // block)


@lru_cache(maxsize=1 << 16)
def _reusable(block: int, unit: int, tokens: int, whole_blocks: bool) -> int:
    position = checkpoint_position(Position.on(tokens, Radix.of(block, unit)), False, whole_blocks)
    return int(position.value())


@lru_cache(maxsize=1 << 16)
def _chunk(
    block: int,
    unit: int,
    start: int,
    offered: int,
    prefill_end: int,
    prompt: int,
    stops: tuple[int, int, int],
    fits: bool,
    inside: bool,
) -> tuple[int, tuple[int, ...]]:
    radix = Radix.of(block, unit)
    last_cacheable, tail, junction = stops
    case = Prefill(
        start=Position.on(start, radix),
        offered=Position.on(offered, radix),
        prefill_end=Position.on(prefill_end, radix),
        prompt=Position.on(prompt, radix),
        last_cacheable=Position.on(last_cacheable, radix),
        tail=Position.on(tail, radix),
        junction=Position.on(junction, radix),
        fits=fits,
        exports=False,
        junction_inside=inside,
    )
    declared = sorted({int(stop.value()) for stop in declared_stops(case)} - {start})
    return int(split(case).value()), tuple(declared)


class Sizes:
    """The rules under one configuration.

    Raises :class:`kvproof.spec.config.ConfigError` for what the machine does not describe: windows, EAGLE, prefill
    checkpoints, overlapping steps, caches without a recurrent or without a full-attention group, and full-attention
    groups of different block sizes.
    """

    def __init__(self, config: Config, dialect: Dialect = SPECIFICATION) -> None:
        config.check()
        reason = beyond(config)
        if reason:
            raise ConfigError(reason)
        self.config = config
        self.dialect = dialect
        self.recurrent = [i for i, group in enumerate(config.groups) if group.kind == "mamba"]
        self.attention = [i for i, group in enumerate(config.groups) if group.kind == "full"]
        self.block = config.mamba_block
        self.unit = config.hash_unit
        self.slot = config.groups[self.attention[0]].block_size
        self.grain = config.hash_unit if config.partial_hits else config.scheduler_block
        threshold = config.long_prefill_threshold
        self.limit = min(config.step_tokens, threshold) if threshold else config.step_tokens

    def decoding_blocks(self) -> int:
        """Attention blocks that one decoding step with drafts may take."""
        rows = 1 + self.config.speculative if self.config.speculative else 0
        if not rows or not self.dialect.reserves_decoding:
            return 0
        if not self.dialect.reserves_slots:
            return ceil(rows, self.config.scheduler_block)
        return sum(ceil(rows, self.config.groups[group].block_size) for group in self.attention)

    def tail(self, prompt: int) -> int:
        """The last position of a prompt from which the same prompt can be resumed, in hash units; 0: none."""
        return _reusable(self.block, self.unit, prompt + (not self.dialect.leaves_token), False)

    def cut(
        self,
        start: int,
        offered: int,
        prefill_end: int,
        prompt: int,
        known: int,
        junction: int,
        declared: tuple[int, int] | None = None,
    ) -> tuple[int, tuple[int, ...]]:
        """Where a chunk ends that the budget would let end at ``offered`` (``start``: not in this step), and the
        positions beyond ``start`` at which it is made to end, block boundaries aside. ``declared`` are the last block's
        end and the tail that were declared on admission (none: they follow from the prompt)."""
        if declared is not None:
            (last, tail), prompt = declared, known
        else:
            last = _reusable(self.block, self.unit, known + (not self.dialect.leaves_token), True)
            tail = self.tail(prompt) if self.config.partial_hits else 0
        if not self.dialect.stops_in_every_block:
            return split_before_51113(self.block, start, offered, last, tail, prompt, junction), (last, tail)
        fits = self.block <= self.limit
        inside = self.config.partial_hits and not self.dialect.steps_to_junction
        return _chunk(self.block, self.unit, start, offered, prefill_end, prompt, (last, tail, junction), fits, inside)

    def kept(self, column: int, prompt: int, junction: int) -> bool:
        """Whether the state at this column's end is worth a key under the retention interval."""
        interval = self.config.retention
        if interval is None or (interval and interval <= self.block):
            return True
        if interval and (column + 1) * self.block % interval == 0:
            return True
        wanted = {(position // self.grain * self.grain) // self.block - 1 for position in (prompt - 1, junction)
                  if position}  # fmt: skip
        return column in wanted


def beyond(config: Config) -> str:
    """Why the machine does not describe this configuration; empty if it does."""
    kinds = {group.kind for group in config.groups}
    if kinds & {"window", "chunked"}:
        return "the abstract machine has no sliding windows yet: leave out window and chunk groups"
    if kinds != {"full", "mamba"}:
        return "the abstract machine describes hybrids: give it a full-attention and a recurrent group"
    if len({group.block_size for group in config.groups if group.kind == "full"}) > 1:
        return "the abstract machine has one block size for full attention: give its groups the same"
    if config.eagle or any(group.drafter for group in config.groups):
        return "the abstract machine has no draft layers yet: set eagle to false and mark no drafter"
    if config.checkpoint_blocks:
        return "the abstract machine exports no prefill checkpoints yet: set checkpoint_blocks to 0"
    if config.connector == "offload":
        return "the abstract machine has no host memory to offload to: set connector to async or sync"
    if config.image_tokens:
        return "the abstract machine serves text: set image_tokens to 0"
    if config.load_failure != "recompute":
        return "the abstract machine goes on from what it has: set load_failure to recompute"
    if config.policy != "fcfs":
        return "the abstract machine serves in order of arrival: set policy to fcfs"
    if config.offers != "block":
        return "the abstract machine's stores offer whole blocks: set offers to block"
    if config != config.usual():
        return f"the abstract machine has none of {', '.join(RARE)}: leave them out"
    if config.async_scheduling:
        return "the abstract machine completes a step before the next: set async_scheduling to false"
    return ""
