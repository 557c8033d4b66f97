"""What a step takes, group by group: asked before it is taken, and then taken. The same plan serves both.

An estimate can only be wrong by being computed apart from the allocation. Here :meth:`Planner.plan` says, for each
group, which blocks of a hit are adopted and how many fresh ones are due; admission counts them, and
:meth:`Planner.carry_out` does exactly that.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproof.impl.reference.chunks import Chunks
from kvproof.impl.reference.pool import Pool
from kvproof.impl.reference.request import Recurrent, Request
from kvproof.spec.config import Config
from kvproof.spec.radix import Position, Radix
from kvproof.spec.rules.blocks import window_cap
from kvproof.spec.view import NULL


@dataclass(frozen=True)
class Target:
    """What a request should have room for: tokens up to ``end``, of which ``computed`` need no work.

    ``hits[g]`` are the hit blocks to adopt (empty after the first allocation), ``local`` how many tokens they stand
    for; ``external`` tokens more come from a store. ``drafts`` of the tokens up to ``end`` are speculative. The chunk
    exports a ``checkpoint`` at that position (0: none). ``whole`` asks for a whole sequence, not for a step;
    ``load`` only makes room for what the store brings.
    """

    end: int
    computed: int
    hits: tuple[tuple[int, ...], ...] = ()
    local: int = 0
    external: int = 0
    drafts: int = 0
    checkpoint: int = 0
    whole: bool = False
    load: bool = False


@dataclass(frozen=True)
class GroupPlan:
    """One group's part. ``new`` blocks are taken and ``evictable`` hit blocks leave the free queue.

    ``passed`` leading slots stay null. ``copy`` is the slot whose block is shared and gets a private copy (-1: none).
    ``partial``: the running state carries a key inside a block, so that the next one needs a block of its own.
    """

    group: int
    new: int
    evictable: int
    passed: int = 0
    copy: int = -1
    partial: bool = False
    checkpoint: bool = False

    @property
    def total(self) -> int:
        return self.new + self.evictable


@dataclass(frozen=True)
class Plan:
    """All groups. ``total`` is how many blocks will have left the free queue."""

    target: Target
    groups: tuple[GroupPlan, ...]

    @property
    def total(self) -> int:
        return sum(group.total for group in self.groups)


@dataclass
class Grant:
    """What was taken. ``taken[g]`` and ``touched[g]`` count fresh and hit blocks per group, as the pool saw it.

    ``copies`` are (source, target) pairs to copy on the device before the forward; both ends are counted until then.
    ``exports[g]`` are the blocks for the checkpoint.
    """

    taken: list[int]
    touched: list[int]
    copies: list[tuple[int, int]]
    exports: dict[int, int]


def ceil(tokens: int, block: int) -> int:
    """How many blocks hold ``tokens`` tokens."""
    return -(-tokens // block)


class Planner:
    """Plans and carries out, for one pool."""

    def __init__(self, config: Config, pool: Pool, chunks: Chunks) -> None:
        self.config, self.pool, self.chunks = config, pool, chunks

    def plan(self, request: Request, target: Target) -> Plan:
        """What ``target`` would take. Changes nothing."""
        parts = []
        for index, group in enumerate(self.config.groups):
            plan = self._recurrent if group.kind == "mamba" else self._attention
            parts.append(plan(request, target, index))
        return Plan(target, tuple(parts))

    # -- attention ----------------------------------------------------------------------------------------------------

    def passed(self, group: int, computed: int) -> int:
        """How many leading slots no token after ``computed`` attends to."""
        spec = self.config.groups[group]
        return spec.first_read(computed) // spec.block_size

    def _attention(self, request: Request, target: Target, index: int) -> GroupPlan:
        group = self.config.groups[index]
        table = request.tables[index]
        needed = ceil(target.end, group.block_size)
        if request.admitted or table:
            own = sum(block != NULL and self.pool.references[block] == 1 for block in table)
            return GroupPlan(index, self._capped(target, index, max(0, needed - len(table)), own), 0)
        hits = target.hits[index] if target.hits else ()
        passed = min(self.passed(index, target.computed), ceil(target.computed, group.block_size))
        adopted = hits[passed:]
        evictable = sum(block != NULL and self.pool.references[block] == 0 for block in adopted)
        # A hit that ends inside a block shares it with its owner: whoever writes on needs a copy.
        copy = len(hits) - 1 if adopted and target.local % group.block_size and not target.load else -1
        fresh = max(0, needed - max(passed, len(hits)))
        return GroupPlan(index, self._capped(target, index, fresh, evictable) + (copy >= 0), evictable, passed, copy)

    def _capped(self, target: Target, index: int, new: int, own: int) -> int:
        """A window group never holds more than its window and what is in flight, however long the sequence. ``own``
        blocks are among that: hits that leave the free queue, or what the request alone holds. Blocks that others hold
        are not: they don't come back when they are passed."""
        group = self.config.groups[index]
        if not target.whole or group.kind != "window":
            return new
        radix = Radix(1, group.block_size)
        tokens = [group.window, self.config.step_tokens + self.config.speculative, self.config.max_model_len]
        window, flight, longest = (Position.on(n, radix) for n in tokens)
        return min(new, max(0, int(window_cap(window, flight, longest)) - own))

    # -- recurrent state ----------------------------------------------------------------------------------------------

    def _recurrent(self, request: Request, target: Target, index: int) -> GroupPlan:
        own = request.recurrent[index]
        hits = target.hits[index] if target.hits else ()
        evictable = sum(block != NULL and self.pool.references[block] == 0 for block in hits)
        if target.load:
            return GroupPlan(index, 1, evictable)
        arriving = 1 if target.external else 0
        state = NULL if arriving else hits[-1] if hits else own.running
        writable = request.admitted and self.writable(state)
        new = max(0, self.states(request, target) - len(own.scratch) - writable) + arriving
        partial = bool(target.computed % self.config.mamba_block) and not writable
        return GroupPlan(index, new, evictable, partial=partial, checkpoint=target.checkpoint > 0)

    def writable(self, block: int) -> bool:
        """Whether the running state may be overwritten: it is there, nobody else counts on it, and it has no key."""
        return block != NULL and self.pool.references[block] == 1 and not self.pool.keys[block]

    def states(self, request: Request, target: Target) -> int:
        """How many blocks a step must have to write states into: at its end, one per possible draft, at its
        checkpoint, and at a boundary worth keeping that the drafts may run across."""
        count = 1 + self.config.speculative + (target.checkpoint > 0)
        if target.drafts:
            block = self.config.mamba_block
            boundary = (target.computed // block + 1) * block
            count += boundary < target.end and self.chunks.wanted(request, boundary)
        return count

    # -- taking it ----------------------------------------------------------------------------------------------------

    def carry_out(self, request: Request, plan: Plan) -> Grant:
        """Take what was planned. The hit blocks of every group first: none must be evicted by taking another's."""
        target, count = plan.target, len(plan.groups)
        grant = Grant([0] * count, [0] * count, [], {})
        for part in plan.groups:
            before = len(self.pool.free)
            self._adopt(request, part, target)
            grant.touched[part.group] = before - len(self.pool.free)
        for part in plan.groups:
            before = len(self.pool.free)
            if part.group in request.recurrent:
                self._take_states(request, part, target, grant)
            else:
                self._take_slots(request, part, target, grant)
            grant.taken[part.group] = before - len(self.pool.free)
        return grant

    def _adopt(self, request: Request, part: GroupPlan, target: Target) -> None:
        hits = target.hits[part.group] if target.hits else ()
        if part.group in request.recurrent:
            for block in hits[-1:]:
                self.pool.hold(block)
                request.recurrent[part.group].running = block
            return
        if request.admitted or request.tables[part.group]:
            return
        adopted = hits[part.passed :]
        for block in adopted:
            self.pool.hold(block)
        request.tables[part.group] = [NULL] * part.passed + list(adopted)

    def _take_slots(self, request: Request, part: GroupPlan, target: Target, grant: Grant) -> None:
        table = request.tables[part.group]
        if part.copy >= 0:
            # The table's count on the source becomes the copy's; the fresh block is counted by both.
            (fresh,) = self.pool.take(1)
            self.pool.hold(fresh)
            grant.copies.append((table[part.copy], fresh))
            table[part.copy] = fresh
        table += self.pool.take(max(0, ceil(target.end, self.config.groups[part.group].block_size) - len(table)))

    def _take_states(self, request: Request, part: GroupPlan, target: Target, grant: Grant) -> None:
        own = request.recurrent[part.group]
        taken = self.pool.take(part.new)
        if target.external:
            own.running = taken.pop()
        if part.checkpoint:
            grant.exports[part.group] = taken.pop() if taken else own.scratch.pop()
        own.scratch += taken
        own.columns = max(own.columns, ceil(target.end, self.config.mamba_block))

    # -- letting go ---------------------------------------------------------------------------------------------------

    def slide(self, request: Request) -> None:
        """Windows move on: slots that no later token attends to become null."""
        for index, table in enumerate(request.tables):
            for slot in range(min(self.passed(index, request.computed), len(table))):
                if table[slot] != NULL:
                    self.pool.release(table[slot])
                    table[slot] = NULL

    def blocks(self, request: Request) -> list[int]:
        """Every block that the request counts on, in the order to let go: what the next turn can do without first.

        Later slots before earlier ones, since a prefix is of no use without its beginning; states after attention,
        since a hit is as long as the shortest group's; the held checkpoint last.
        """
        order = [block for table in request.tables for block in reversed(table) if block != NULL]
        for own in request.recurrent.values():
            order += [*own.scratch, *filter(None, (own.exporting, own.running))]
        order += [own.held[1] for own in request.recurrent.values() if own.held is not None]
        return order

    def strip(self, request: Request) -> list[int]:
        """The request counts on nothing any more; returns what it counted on, for the caller to release."""
        blocks = self.blocks(request)
        request.tables = [[] for _ in self.config.groups]
        request.recurrent = {g: Recurrent() for g, spec in enumerate(self.config.groups) if spec.kind == "mamba"}
        request.admitted = False
        request.computed = 0
        return blocks
