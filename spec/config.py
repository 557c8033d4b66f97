"""The configuration of one hybrid cache, small enough to print and complete enough to replay.

A configuration that vLLM's own validation would reject is rejected here too (:meth:`Config.problem`), so that nothing
found by driving one is an artefact of an impossible set-up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

GroupKind = Literal["full", "window", "mamba", "chunked"]
ConnectorKind = Literal["none", "sync", "async", "offload"]
LoadReport = Literal["request", "block"]
LoadFailure = Literal["recompute", "fail"]
OfferEnd = Literal["block", "unit", "prompt"]
Policy = Literal["fcfs", "priority"]
HostPolicy = Literal["lru", "arc"]

MOST_TOKENS: Final = 1_048_576
"""The longest sequence. Engines are driven on plain Python objects, one per token and one per block (300 bytes each):
far beyond this the machine would give up before the engine does."""

MOST_BLOCKS: Final = 1_048_576
MOST_TOKENS_A_BLOCK: Final = 65_536
MOST_GROUPS: Final = 32
BOUNDS: Final[Mapping[str, int]] = {
    "num_blocks": MOST_BLOCKS,
    "hash_unit": MOST_TOKENS_A_BLOCK,
    "step_tokens": MOST_TOKENS,
    "max_running": 16_384,
    "max_model_len": MOST_TOKENS,
    "speculative": 1_024,
    "checkpoint_alignment": MOST_TOKENS,
    "retention": MOST_TOKENS,
    "long_prefill_threshold": MOST_TOKENS,
    "load_steps": 1_024,
    "image_tokens": MOST_TOKENS,
    "offload_blocks": MOST_BLOCKS,
    "offload_after": 1_024,
    "offer_delay": 1_024,
    "send_steps": 1_024,
    "draft_modules": 1_024,
    "watermark": MOST_BLOCKS,
}
"""The largest value of each number in a configuration."""

GROUP_BOUNDS: Final[Mapping[str, int]] = {"block_size": MOST_TOKENS_A_BLOCK, "window": MOST_TOKENS}


class ConfigError(ValueError):
    """A configuration that no engine could run. The message says what to change."""


@dataclass(frozen=True)
class Group:
    """Layers that share one cache kind and one block table.

    ``block_size`` is in tokens. ``window`` is the sliding window in tokens (kind ``window``), or the length of the
    chunks that attention stays within (kind ``chunked``: chunked local attention). ``drafter`` marks the group that
    holds the EAGLE/MTP draft layers and therefore drops one unit of each hit.
    """

    kind: GroupKind
    block_size: int
    window: int = 0
    drafter: bool = False

    def first_read(self, position: int) -> int:
        """The first position whose keys and values the token at ``position`` attends to; 0 for recurrent groups."""
        if self.kind == "window":
            return max(0, position - self.window + 1)
        return position // self.window * self.window if self.kind == "chunked" else 0

    @property
    def recycles(self) -> bool:
        """Whether attention leaves positions behind for good, so that their blocks are given back."""
        return self.kind in ("window", "chunked")


@dataclass(frozen=True)
class Config:
    """One engine. Sizes are in tokens unless the name says blocks; :data:`BOUNDS` has the largest of each.

    ``num_blocks`` counts the null block. ``retention`` is the retention interval: ``None`` keys every boundary, ``0``
    only replay boundaries, ``k`` one per k tokens. ``speculative`` is K. ``checkpoint_alignment`` 0 means that the
    attention backend exports no prefill checkpoint. ``load_steps`` is how many steps an asynchronous load takes, or any
    transfer of offloading.

    ``load_report`` is how a store that failed says so: which ``request``, where the engine listens to that, or which
    ``block``. ``load_failure`` is what the engine makes of it: the request goes on from what it has, or it is failed.
    ``offers`` is where a store's offers end: with a scheduler ``block``, with a hash ``unit``, or with the ``prompt``
    that another engine has prefilled for it, once (recurrent states: a token before).

    ``policy`` is who is served first: in order of arrival (``fcfs``), or by the requests' own ``priority``.
    ``image_tokens`` is how many tokens an image takes (0: a text-only model). An encoder makes them of the whole image
    before any is computed, and handles as many in a step as there are tokens in it, or one image where that is more.

    ``connector`` is a store that holds what the requests say (``sync``, ``async``), or the engine's own offloading to
    host memory (``offload``), which holds what it stored: ``offload_blocks`` of it at most (0: it is never full).

    ``offload_policy`` is how host memory chooses what to give up, ``offload_outputs`` whether it is given what requests
    put out and not their prompts alone, and ``offload_after`` how often something must have been asked for before it is
    stored (0: it is stored at once).

    ``cache_events``: the cache announces what it stores and removes, for routers that mirror it.

    ``offer_delay`` is how often a store answers "ask again" before it says what it holds of a request. ``send_steps``
    is how many steps a store keeps the blocks of a request that has ended, to send them away.

    ``junction_state``: a recurrent state is kept where a shared prefix was found to end, also inside a block.
    ``lookahead_keys``: with EAGLE, keys may cover the tokens after their boundary (where the engine can do that).
    ``draft_modules`` is how many modules MTP drafts with, each of which reads one token further ahead.
    ``watermark`` is how many blocks are left free when others run and one more request is admitted.
    """

    groups: tuple[Group, ...]
    num_blocks: int
    hash_unit: int
    step_tokens: int
    max_running: int = 8
    max_model_len: int = 1024
    speculative: int = 0
    eagle: bool = False
    checkpoint_blocks: int = 0
    checkpoint_alignment: int = 0
    retention: int | None = 0
    long_prefill_threshold: int = 0
    full_sequence_must_fit: bool = True
    connector: ConnectorKind = "none"
    divergent_hits: bool = False
    load_steps: int = 1
    async_scheduling: bool = False
    load_report: LoadReport = "request"
    load_failure: LoadFailure = "recompute"
    offers: OfferEnd = "block"
    policy: Policy = "fcfs"
    image_tokens: int = 0
    offload_blocks: int = 0
    cache_events: bool = False
    offload_policy: HostPolicy = "lru"
    offload_outputs: bool = False
    offload_after: int = 0
    offer_delay: int = 0
    send_steps: int = 0
    junction_state: bool = False
    lookahead_keys: bool = True
    draft_modules: int = 1
    watermark: int = 0

    @cached_property
    def scheduler_block(self) -> int:
        """The least common multiple of the groups' block sizes: what hits align to unless partial hits are on."""
        return math.lcm(*(group.block_size for group in self.groups))

    @cached_property
    def mamba_block(self) -> int:
        """The block size of the recurrent groups, or 0 where there is none."""
        return next((g.block_size for g in self.groups if g.kind == "mamba"), 0)

    @cached_property
    def partial_hits(self) -> bool:
        """Whether hits may end inside a block: the unit is finer than the recurrent block, and no group forbids it."""
        return self.hash_unit < self.mamba_block and not any(
            g.kind == "window" and g.block_size != self.hash_unit for g in self.groups
        )

    def usual(self) -> Config:
        """The same without what few engines have, or few users turn on."""
        return replace(self, **{name: getattr(_PLAIN, name) for name in RARE})

    def problem(self) -> str | None:
        """Why no engine could run this, or why it is too large to be driven, with the way out; ``None`` if neither."""
        if not self.groups:
            return "no groups: name at least one cache group"
        excess = self._excess()
        if excess is not None:
            return excess
        for index, group in enumerate(self.groups):
            if group.block_size <= 0:
                return f"group {index} has block size {group.block_size}: make it positive"
            if self.hash_unit <= 0 or group.block_size % self.hash_unit:
                return (
                    f"hash unit {self.hash_unit} does not divide block {group.block_size} of group {index}: "
                    "use a divisor"
                )
            if group.recycles and group.window <= 0:
                return f"group {index} is a {group.kind} group with window {group.window}: make it positive"
            if not group.recycles and group.window:
                return f"group {index} is a {group.kind} group with window {group.window}: only window groups have one"
            if group.kind == "chunked" and group.window % group.block_size:
                return (
                    f"chunks of {group.window} tokens in group {index} are no whole blocks of {group.block_size}: "
                    "use a multiple"
                )
        if self.scheduler_block > MOST_TOKENS:
            return f"the groups' block sizes have no common multiple up to {MOST_TOKENS}: use powers of two"
        if any(group.kind == "chunked" for group in self.groups):
            if self.eagle:
                return "EAGLE with chunked local attention: engines refuse it; set eagle to false"
            if len({self.hash_unit, *(group.block_size for group in self.groups)}) > 1:
                return "chunked local attention beside other block sizes: give all groups and the hash unit the same"
        mamba_blocks = {g.block_size for g in self.groups if g.kind == "mamba"}
        if len(mamba_blocks) > 1:
            return f"recurrent groups with different blocks {sorted(mamba_blocks)}: align mode has one"
        if mamba_blocks and self.scheduler_block != self.mamba_block:
            return (
                f"scheduler block {self.scheduler_block} differs from the recurrent block {self.mamba_block}: "
                "in align mode every block size must divide the recurrent one"
            )
        if min(self.step_tokens, self.max_running, self.max_model_len) <= 0:
            return "step_tokens, max_running and max_model_len must be positive"
        if self.image_tokens < 0:
            return f"image_tokens {self.image_tokens} must not be negative"
        if self.offers != "block" and self.connector != "async":
            return f"offers that end with a {self.offers} come from asynchronous stores: set connector to async"
        if self.speculative < 0 or self.load_steps < 1 or self.long_prefill_threshold < 0:
            return "speculative and long_prefill_threshold must not be negative; load_steps must be at least 1"
        if self.mamba_block and self.mamba_block <= self.speculative:
            return (
                f"a recurrent block of {self.mamba_block} tokens does not hold one step of {self.speculative} drafts: "
                "recurrent blocks are far larger than that"
            )
        if self.eagle and self.speculative == 0:
            return "EAGLE without draft tokens: set speculative to at least 1 or eagle to false"
        if self.step_tokens <= self.speculative:
            return (
                f"step limit {self.step_tokens} does not hold one token and {self.speculative} drafts: "
                "raise step_tokens"
            )
        if self.retention is not None and (self.retention < 0 or self.retention % self.scheduler_block):
            return f"retention {self.retention} must be 0 or a multiple of the scheduler block {self.scheduler_block}"
        if (self.offer_delay or self.send_steps) and self.connector not in ("sync", "async"):
            return "only a store delays offers or sends: set offer_delay and send_steps to 0, or connector to async"
        if (self.offload_policy, self.offload_outputs, self.offload_after) != ("lru", False, 0) and (
            self.connector != "offload"
        ):
            return "how host memory is used says nothing without it: set connector to offload"
        if min(self.offload_after, self.offer_delay, self.send_steps, self.watermark) < 0 or self.draft_modules < 1:
            return (
                "offload_after, offer_delay, send_steps and watermark must not be negative; "
                "draft_modules must be at least 1"
            )
        if self.draft_modules > 1 and not self.eagle:
            return "several draft modules are MTP's: set eagle to true, or draft_modules to 1"
        if self.connector == "offload" and self.divergent_hits:
            return "hits that diverge are not for offloading: set divergent_hits to false"
        if self.checkpoint_blocks not in (0, 1):
            return f"checkpoint_blocks {self.checkpoint_blocks}: engines reserve 0 or 1"
        if self.checkpoint_alignment < 0:
            return "checkpoint_alignment must not be negative"
        if self.checkpoint_blocks and self.checkpoint_alignment <= 0:
            return "checkpoint_blocks without checkpoint_alignment: set the alignment of the exporting kernel"
        smallest = self.smallest_pool()
        if self.num_blocks < smallest:
            return f"pool of {self.num_blocks} blocks is too small for one request: use at least {smallest}"
        return None

    def _excess(self) -> str | None:
        """Which number is above its bound."""
        if len(self.groups) > MOST_GROUPS:
            return f"{len(self.groups)} groups: at most {MOST_GROUPS} are driven"
        for index, group in enumerate(self.groups):
            for name, most in GROUP_BOUNDS.items():
                if getattr(group, name) > most:
                    return f"{name} of group {index} is {getattr(group, name)}: at most {most} is driven"
        for name, most in BOUNDS.items():
            if (getattr(self, name) or 0) > most:
                return f"{name} is {getattr(self, name)}: at most {most} is driven"
        return None

    def check(self) -> Config:
        """This configuration, or :class:`ConfigError` with the reason."""
        reason = self.problem()
        if reason is not None:
            raise ConfigError(f"impossible configuration: {reason}")
        return self

    def smallest_pool(self) -> int:
        """Blocks (the null block included) without which even a one-token request can't run."""
        return 1 + sum(1 + (self.speculative if g.kind == "mamba" else 0) for g in self.groups)


RARE: Final = (
    "offload_policy",
    "offload_outputs",
    "offload_after",
    "offer_delay",
    "send_steps",
    "junction_state",
    "lookahead_keys",
    "draft_modules",
    "watermark",
)
"""What :meth:`Config.usual` puts back: no other subject than vLLM has any of it."""

_PLAIN: Final = Config(groups=(), num_blocks=0, hash_unit=0, step_tokens=0)
