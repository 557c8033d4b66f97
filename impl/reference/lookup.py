"""What the cache has of a request's prefix.

Attention is downward closed: a group that has a prefix has every shorter one. A recurrent group has single states, so a
hit is the longest position that attention covers *and* at which every recurrent group has a state. With a store behind
it the cache also says how deep attention alone reaches, since the store may bring the state.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproof.impl.reference.pool import Pool
from kvproof.impl.reference.request import Request
from kvproof.spec.config import Config
from kvproof.spec.rules.hits import after_drop, hit_limit
from kvproof.spec.view import NULL

Blocks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Hit:
    """``tokens`` that need not be computed again, in ``blocks[g]``. ``reach`` is how deep attention alone goes."""

    tokens: int
    blocks: Blocks
    reach: int


class Lookup:
    """Answers lookups from the pool's keys. Nothing here changes anything."""

    def __init__(self, config: Config, pool: Pool) -> None:
        self.config, self.pool = config, pool
        self.grain = config.hash_unit if config.partial_hits else config.scheduler_block
        self._full = [i for i, g in enumerate(config.groups) if g.kind == "full"]
        self._window = [i for i, g in enumerate(config.groups) if g.kind == "window"]
        self._recurrent = [i for i, g in enumerate(config.groups) if g.kind == "mamba"]
        marked = any(group.drafter for group in config.groups)
        self._dropping = [
            config.eagle and group.kind != "mamba" and (group.drafter or not marked) for group in config.groups
        ]
        """Groups that hold draft layers: their last unit was made from a token that may differ in the next request."""

    def agreed(self, request: Request) -> Hit:
        """The longest hit that every group can serve, leaving a token to compute."""
        limit = hit_limit(request.known)
        reach = self._reach(request, limit)
        tokens = min(reach, limit) // self.grain * self.grain
        while tokens > 0 and not self._serves(request, tokens):
            tokens -= self.grain
        return Hit(tokens, self.blocks(request, tokens), reach)

    def attention(self, request: Request, agreed: Hit) -> Hit:
        """Each group alone: attention as deep as it goes (in whole grains), recurrent groups up to the agreed hit."""
        tokens = min(agreed.reach, hit_limit(request.known)) // self.grain * self.grain
        while tokens > agreed.tokens and not all(self._covers(request, g, tokens) for g in self._window):
            tokens -= self.grain
        if tokens <= agreed.tokens:
            return agreed
        deep = self.blocks(request, tokens, recurrent=False)
        blocks = tuple(agreed.blocks[g] if g in self._recurrent else deep[g] for g in range(len(deep)))
        return Hit(tokens, blocks, agreed.reach)

    def blocks(self, request: Request, tokens: int, recurrent: bool = True) -> Blocks:
        """The blocks of a hit of ``tokens`` tokens, slot by slot. Null where a group needs none."""
        found: list[tuple[int, ...]] = []
        for index, group in enumerate(self.config.groups):
            slots = -(-tokens // group.block_size)
            first = 0
            if group.kind == "window":
                first = group.first_read(tokens) // group.block_size
            if group.kind == "mamba":
                if not recurrent or not slots:
                    found.append(())
                    continue
                block = self.pool.find((index, request.states[tokens]))
                found.append((*(NULL,) * (slots - 1), block if block is not None else NULL))
                continue
            row = [self._find(request, index, slot, tokens) for slot in range(first, slots)]
            found.append((*(NULL,) * first, *(block if block is not None else NULL for block in row)))
        return tuple(found)

    # -- groups -------------------------------------------------------------------------------------------------------

    def _drop(self, group: int) -> int:
        """What a group drops of what it matches: a grain, or a block of its own if that is less."""
        return min(self.grain, self.config.groups[group].block_size) if self._dropping[group] else 0

    def _reach(self, request: Request, limit: int) -> int:
        """How deep every full-attention group has the prefix, what they drop taken off."""
        reach = limit if not self._full else request.known
        for group in self._full:
            depth = self._depth(request, group)
            reach = min(reach, after_drop(depth, self._drop(group), self._dropping[group]))
        return reach

    def _depth(self, request: Request, group: int) -> int:
        """Tokens that a full-attention group has, counted in hash units."""
        size, states = self.config.groups[group].block_size, request.states
        depth = 0
        while depth + size < len(states) and self.pool.find((group, states[depth + size])) is not None:
            depth += size
        for end in range(min(depth + size - 1, request.known) // self.config.hash_unit * self.config.hash_unit, depth,
                         -self.config.hash_unit):  # fmt: skip
            if self.pool.find((group, states[end])) is not None:
                return end
        return depth

    def _find(self, request: Request, group: int, slot: int, tokens: int) -> int | None:
        """A block whose key covers slot ``slot`` of a hit of ``tokens``: keyed at the hit's end, or further on."""
        size, unit = self.config.groups[group].block_size, self.config.hash_unit
        end = (slot + 1) * size
        position = end if tokens >= end else tokens
        while position <= min(end, request.known):
            block = self.pool.find((group, request.states[position]))
            if block is not None:
                return block
            position += unit
        return None

    def _covers(self, request: Request, group: int, tokens: int) -> bool:
        """Whether a window group has every block that the window before ``tokens`` (and what it drops) needs."""
        spec = self.config.groups[group]
        proven = tokens + self._drop(group)
        if proven > request.known:
            return False
        slots = range(spec.first_read(tokens) // spec.block_size, -(-proven // spec.block_size))
        return all(self._find(request, group, slot, proven) is not None for slot in slots)

    def _serves(self, request: Request, tokens: int) -> bool:
        return all(self.pool.find((g, request.states[tokens])) is not None for g in self._recurrent) and all(
            self._covers(request, g, tokens) for g in self._window
        )
