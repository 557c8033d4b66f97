"""What a fuzzer draws: configurations, and the menus that its actions choose from.

Uniform sampling finds little here. A fault needs a chunk that ends one token off a boundary, a pool that holds all but
two of the blocks, a hit that stops inside a block. So sizes are small, lengths lie within a unit or a token of a
boundary, budgets lie just below, at or above a block, and pools come in three classes. A pool within two blocks of
what fits is a class of its own: mixed into ordinary runs it would drown everything else in refusals.

Everything is ordered simple first, since that is where Hypothesis shrinks to: one attention and one recurrent group
with blocks of 4, a roomy pool, no drafts, no connector, nothing forced.

A choice costs Hypothesis 50 µs and more, as much as a good part of an engine step. So a whole configuration, or all
that one action needs, is a single draw of bytes (:class:`Dice`), each of which picks from a menu and shrinks to its
first entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from kvproof.spec.config import Config, Group, LoadReport
from kvproof.spec.rules.blocks import peak_blocks

T = TypeVar("T")

Retention = Callable[[bool], int | None]
"""The retention interval that the subject's users get when they set none, given whether EAGLE is on."""

Limit = Callable[[Config], int]
"""The smallest pool that the subject would start with under a configuration; 0: it has no such limit."""

Pool = Literal["roomy", "pressed", "tight", "exact"]
"""``roomy`` holds several of the longest requests, ``pressed`` one or two (so that others are evicted and preempted),
``tight`` one, give or take two blocks. ``exact`` is the smallest pool that the subject itself would start with, and the
longest request about as long as the model allows."""

_SHAPES: Sequence[tuple[str, ...]] = (
    ("full", "mamba"),
    ("full", "mamba"),
    ("full", "mamba"),
    ("full", "mamba", "mamba"),
    ("full", "window", "mamba"),
    ("full", "mamba", "window"),
    ("full", "window"),
    ("full",),
    ("full", "chunked"),
)
_OTHER_SHAPES: Sequence[tuple[str, ...]] = (
    ("full", "window", "window"),
    ("full", "full"),
    ("full", "full", "mamba"),
    ("window",),
    ("mamba",),
    ("window", "mamba"),
    ("full", "window", "chunked"),
)
"""What fewer models are made of."""

_LARGEST_BLOCK = 32


@dataclass(frozen=True)
class Setup:
    """One run before its first action.

    ``reach`` is the longest prompt in scheduler blocks. ``by_default`` says that retention is left to the subject's own
    default. ``resets`` lets the operator clear the cache (in most runs nobody does: it undoes what a run built up).
    ``forced`` allows actions that come from outside the scheduler. ``unreliable``: the store may lose what it promised.
    ``crowded``: some generate on and on while others arrive, which takes many steps. ``unread``: of some requests
    nothing may be read from a cache.
    """

    config: Config
    reach: int
    pool: Pool = "roomy"
    by_default: bool = True
    resets: bool = False
    forced: bool = False
    unreliable: bool = False
    crowded: bool = False
    unread: bool = False

    def resolved(self, default_retention: Retention) -> Setup:
        """The same with the subject's own retention where none was chosen."""
        if not self.by_default:
            return self
        return replace(self, config=replace(self.config, retention=default_retention(self.config.eagle)))

    def usual(self) -> Setup:
        """The same for a subject that has nothing that is rare."""
        return replace(self, config=self.config.usual())

    def plain(self) -> Setup:
        """The same for a subject that knows full attention and recurrent states, and no draft layers."""
        config = self.usual().without_checkpoints().in_order().config
        if config.connector == "offload":
            config = replace(config, connector="async", offload_blocks=0)
        groups = tuple(replace(group, drafter=False) for group in config.groups if not group.recycles)
        return replace(self, config=replace(config, groups=groups, eagle=False))

    def at_limit(self, limit: Limit) -> Setup:
        """The same in the smallest pool that the subject would start with, where that is what was drawn."""
        blocks = limit(self.config) if self.pool == "exact" else 0
        return self if not blocks else replace(self, config=replace(self.config, num_blocks=blocks))

    def in_order(self) -> Setup:
        """The same for a subject that takes one step after the other and serves text in order of arrival, from stores
        that hold whole blocks.
        """
        simple = replace(self.config, policy="fcfs", offers="block", load_failure="recompute", image_tokens=0)
        return replace(self, config=replace(simple, async_scheduling=False))

    def without_checkpoints(self) -> Setup:
        """The same for a subject that exports no prefill checkpoints."""
        return replace(self, config=replace(self.config, checkpoint_blocks=0, checkpoint_alignment=0))


class Dice:
    """Bytes that were drawn, used up one by one. When they run out every choice is the first."""

    def __init__(self, rolled: bytes) -> None:
        self._left = iter(rolled)

    def roll(self) -> int:
        return next(self._left, 0)

    def pick(self, *values: Any) -> Any:
        return values[self.roll() % len(values)]

    def up_to(self, most: int) -> int:
        """A number from 0 to ``most`` (at most 255)."""
        return self.roll() % (most + 1)

    def of(self, values: Sequence[T]) -> T:
        return values[self.roll() % len(values)]


def dice(count: int) -> SearchStrategy[Dice]:
    """``count`` bytes in one draw."""
    return st.binary(min_size=count, max_size=count).map(Dice)


def setups() -> SearchStrategy[Setup]:
    """Configurations and their class. Those that no engine could run are left to the subject to refuse."""
    return dice(72).map(draw_setup)


def draw_setup(dice: Dice) -> Setup:
    pick = dice.pick
    forced = pick(False, False, False, False, True)
    resets = pick(False, False, True)
    pool: Pool = pick("roomy", "roomy", "pressed", "pressed", "tight")
    kinds = pick(*_SHAPES, *_SHAPES, *_SHAPES, *_OTHER_SHAPES)
    attention = pick(4, 4, 8, 16, 2)
    ratio = pick(1, 1, 2, 4) if "mamba" in kinds else 1
    block = min(attention * ratio, _LARGEST_BLOCK)
    unit = attention if "chunked" in kinds else max(1, attention // pick(1, 2, 4))
    if len(kinds) == 1:  # engines have nothing finer where there is one group
        unit = block
    if kinds == ("full", "full"):  # groups of one kind and size are one
        unit = attention // 2
    speculative = min(pick(0, 0, 1, 2, 3), block - 1)  # a block holds a whole step
    eagle = speculative > 0 and "chunked" not in kinds and kinds != ("mamba",) and pick(True, True, False)
    groups = _groups(kinds, attention, block, unit, eagle, pick)
    checkpoint = "mamba" in kinds and pick(False, True)
    connector = pick("none", "none", "async", "sync", "async")
    reach = pick(3, 2, 6, 12, 9)
    retention = pick("default", "default", "default", None, 0, 1, 2)
    config = Config(
        groups=groups,
        num_blocks=1,
        hash_unit=unit,
        step_tokens=max(_budget(block, reach, pick), speculative + 1),
        max_running=pick(8, 4, 2),
        speculative=speculative,
        eagle=eagle,
        checkpoint_blocks=int(checkpoint),
        checkpoint_alignment=unit * pick(1, 2) if checkpoint else 0,
        retention=retention * block if isinstance(retention, int) else None,
        long_prefill_threshold=pick(0, 0, 0, 0, block, block + unit),
        full_sequence_must_fit=pick(True, True, True, False),
        connector=connector,
        divergent_hits=connector != "none" and pick(False, True),
        load_steps=pick(1, 2, 3) if connector == "async" else 1,
    )
    one = peak_blocks(config, reach * block + block)
    blocks = {"roomy": 3 * one, "pressed": one + dice.up_to(min(one, 255)), "tight": one + pick(0, 1, -1, 2, -2)}[pool]
    config = replace(config, num_blocks=max(1 + blocks, config.smallest_pool()))
    # Of a failed load a recurrent state alone has nothing left, which no engine tells from blocks that can go on.
    unreliable = connector != "none" and pick(False, True) and kinds != ("mamba",)
    if connector == "async" and pick(False, False, True):  # what is stored is asked for once the cache has lost it
        config = replace(config, connector="offload", divergent_hits=False, offload_blocks=pick(0, 0, one))
        resets, unreliable = True, False
    config = replace(config, cache_events=pick(False, False, False, True))
    if pick(*[False] * 7, True):
        longest = reach * block + pick(0, 1, unit, block, block - 1)
        pool, blocks = "exact", peak_blocks(config, longest)
        config = replace(config, max_model_len=max(longest, 2), num_blocks=max(1 + blocks, config.smallest_pool()))
    config = _served(config, unreliable, pick)
    crowded = pick(False, True)
    config = _rarely(config, pick)
    unread = pick(*[False] * 7, True)
    return Setup(config, reach, pool, retention == "default", resets, forced, unreliable, crowded, unread)


def _served(config: Config, unreliable: bool, pick: Callable[..., Any]) -> Config:
    """Who is served first, what a store offers and how it fails, and what else than text there is."""
    if config.connector == "async":
        config = replace(config, offers=pick("block", "block", "prompt", "unit"))
    if unreliable:
        failure = pick("recompute", "recompute", "recompute", "fail")
        # Failed blocks are understood by every engine where there is one group, and there alone.
        report: LoadReport = "block" if len(config.groups) == 1 and pick(True, False) else "request"
        config = replace(config, load_failure=failure, load_report=report)
    images = config.scheduler_block * 3 // 4 if pick(False, False, False, True) else 0
    policy = pick("fcfs", "fcfs", "fcfs", "priority")
    overlapped = pick(False, False, False, True)
    return replace(config, policy=policy, image_tokens=images, async_scheduling=overlapped)


def _rarely(config: Config, pick: Callable[..., Any]) -> Config:
    """What few engines have and few users turn on: each in a few runs, where it means anything."""
    if config.connector in ("sync", "async"):
        config = replace(config, offer_delay=pick(0, 0, 0, 1, 2), send_steps=pick(0, 0, 0, 1, 4))
    if config.connector == "offload":
        config = replace(
            config,
            offload_policy=pick("lru", "lru", "arc"),
            offload_outputs=pick(False, False, True),
            offload_after=pick(0, 0, 0, 2),
        )
    if config.eagle:
        config = replace(
            config,
            junction_state=config.partial_hits and pick(False, True),
            lookahead_keys=config.connector != "none" or pick(True, True, False),
        )
    return replace(config, watermark=pick(0, 0, 0, 0, 0, 1, 2))


def _groups(
    kinds: Sequence[str], attention: int, block: int, unit: int, eagle: bool, pick: Callable[..., Any]
) -> tuple[Group, ...]:
    # Draft layers share the full-attention group, or sit in a window group of their own; rarely nobody is marked.
    drafter = "full" if "full" in kinds and kinds[-1] != "window" else "window"
    marked = eagle and pick(True, True, True, False)
    groups: list[Group] = []
    for kind in kinds:
        if kind == "window":
            size = unit if pick(True, False) else attention
            groups.append(
                Group("window", size, window=size * pick(2, 1, 3, 8) + pick(0, 1), drafter=marked and drafter == kind)
            )
        elif kind == "chunked":
            groups.append(Group("chunked", attention, window=attention * pick(2, 1, 3, 4)))
        elif kind == "mamba":
            groups.append(Group("mamba", block))
        else:
            first = not any(group.kind == "full" for group in groups)
            groups.append(Group("full", attention if first else unit, drafter=marked and drafter == kind and first))
    return tuple(groups)


def _budget(block: int, reach: int, pick: Callable[..., Any]) -> int:
    """Tokens a step: everything at once, or just below, at and just above one block or a few."""
    tokens: int = pick(
        (reach + 1) * block,
        2 * block,
        block,
        block + 1,
        block - 1,
        2 * block - 1,
        2 * block + 1,
        block + block // 2,
        3 * block + 1,
        block // 2,
    )
    return max(tokens, 1)


@dataclass(frozen=True)
class Menu:
    """What actions choose from under one configuration."""

    setup: Setup

    @property
    def block(self) -> int:
        return self.setup.config.scheduler_block

    @property
    def unit(self) -> int:
        return self.setup.config.hash_unit

    @property
    def longest(self) -> int:
        return min(self.setup.reach * self.block, self.setup.config.max_model_len - 1)

    @property
    def chunk(self) -> int:
        """About how many tokens a step computes of a prompt that is alone."""
        return max(1, min(self.block, self.setup.config.step_tokens))

    @cached_property
    def _near(self) -> list[int]:
        """Offsets from a block boundary: none, a token, a unit, and a token off a unit, on both sides."""
        unit, half = self.unit, self.block // 2
        return sorted({0, 1, -1, unit, -unit, unit - 1, unit + 1, 1 - unit, half}, key=lambda d: (abs(d), d))

    @cached_property
    def lengths(self) -> list[int]:
        """Token counts near every block boundary up to the longest prompt, shortest first."""
        near = {q * self.block + d for q in range(self.setup.reach + 1) for d in self._near}
        return sorted(n for n in near if 1 <= n <= self.longest)

    @cached_property
    def prompts(self) -> list[int]:
        """Lengths of prompts: any of :attr:`lengths`, and as often one of the longest third. Only a long prompt presses
        a pool that was made for one."""
        longest = self.lengths[-max(1, len(self.lengths) // 3) :]
        return self.lengths + longest * 2

    @cached_property
    def extras(self) -> list[int]:
        """How many tokens a follow-up or a sibling adds."""
        block, unit = self.block, self.unit
        return [1, unit, block, block + 1, max(1, block - 1), 2 * block, unit + 1, 4 * block, 3 * block + unit]

    @cached_property
    def outputs(self) -> list[int]:
        """How many tokens a request may put out."""
        return [1, 2, self.setup.config.speculative + 2, self.unit + 1, self.block, self.block + 1, 2 * self.block]

    @property
    def endless(self) -> int:
        """More tokens than anybody who is merely late would wait for."""
        return min(160, self.setup.config.max_model_len - self.longest - 1)

    def images(self, dice: Dice, shared: int, length: int) -> tuple[int, ...]:
        """Where images begin after the ``shared`` tokens: nowhere, or one after the other from near a boundary on."""
        size = self.setup.config.image_tokens
        if not size:
            return ()
        count, first = dice.up_to(3), shared + dice.of([0, self.block, self.unit, self.block // 2])
        return tuple(at for at in range(first, first + count * size, size) if at + size <= length)

    def priority(self, dice: Dice) -> int:
        """Whom a request goes before: the later the larger."""
        return dice.up_to(2) if self.setup.config.policy == "priority" else 0

    def unread(self, dice: Dice) -> bool:
        """Whether nothing of a request may be read from a cache."""
        return self.setup.unread and bool(dice.pick(False, False, True))

    @cached_property
    def accepts(self) -> list[tuple[int, ...]]:
        """Accepted drafts per running request, cycled: all, none, some, and requests that differ."""
        k = self.setup.config.speculative
        return [(), (0,), (k,), (1,), (0, k), (k, 0, 1), (1, k)] if k else [()]

    def external(self, dice: Dice, shared: int, length: int) -> int:
        """How many of a prompt's tokens the store holds: none, or less than, as many as or more than what is shared."""
        if self.setup.config.connector in ("none", "offload"):
            return 0
        floor = shared // self.block * self.block
        offers = [0, length, floor, floor + self.block, floor - self.block, floor + 2 * self.block, length // 2]
        return max(0, min(dice.of(offers), length))

    def missing(self, dice: Dice, external: int) -> int:
        """How many of the store's tokens never arrive: mostly none, else the last one, a block, or all."""
        if not external or not self.setup.unreliable:
            return 0
        return min(external, dice.of([0, 0, 1, self.block, external, external // 2]))
