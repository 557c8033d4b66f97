"""Mutants of what is cached and looked up: states and their keys (S1), hits and cuts (S2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvproof.impl.reference.batch import Row
from kvproof.impl.reference.chunks import Chunk
from kvproof.impl.reference.engine import Engine
from kvproof.impl.reference.lookup import Hit
from kvproof.impl.reference.plan import GroupPlan, Target, ceil
from kvproof.impl.reference.planting import mutant, wrap
from kvproof.impl.reference.pool import KeyName
from kvproof.impl.reference.request import Request
from kvproof.spec.view import NULL

# -- S1: slot p is the state at (p + 1) · B ---------------------------------------------------------------------------


@mutant("S1", "aligned chunk ends are enforced only below the last cacheable position", "PR 51113")
def chunk_ends_anywhere_past_the_last_cacheable_position(engine: Engine) -> None:
    def cut(original: Any, request: Request, start: int, budget: int) -> Chunk:
        offered = min(request.known, start + min(budget, engine.scheduler.chunks.limit))
        if start >= request.last_cacheable or offered > request.last_cacheable:
            return Chunk(offered if start >= request.last_cacheable else request.last_cacheable)
        chunk: Chunk = original(request, start, budget)
        return chunk

    wrap(engine.scheduler.chunks, "cut", cut)


@mutant("S1", "a chunk that starts inside a block runs past the block's end", "PR 45477")
def chunk_crosses_a_boundary(engine: Engine) -> None:
    def cut(original: Any, request: Request, start: int, budget: int) -> Chunk:
        chunk: Chunk = original(request, start, budget)
        if start % engine.config.mamba_block and chunk.end > start:
            return replace(chunk, end=min(request.known, start + min(budget, engine.scheduler.chunks.limit)))
        return chunk

    if engine.scheduler.chunks.recurrent:
        wrap(engine.scheduler.chunks, "cut", cut)


@mutant("S1", "a state is keyed as the end of the slot it lies in, wherever it was taken", "PR 51113")
def key_named_after_the_slot(engine: Engine) -> None:
    size = engine.config.mamba_block

    def register(original: Any, block: int, key: KeyName) -> None:
        group, state = key
        if engine.config.groups[group].kind == "mamba":
            for request in engine.scheduler.requests.values():
                position = request.states.index(state) if state in request.states else 0
                end = ceil(position, size) * size
                if position and end < len(request.states):
                    return original(block, (group, request.states[end]))  # type: ignore[no-any-return]
        return original(block, key)  # type: ignore[no-any-return]

    wrap(engine.scheduler.pool, "register", register)


@mutant("S1", "the state of the last draft is kept as the running one, accepted or not", "PR 50021")
def rejected_drafts_are_not_rolled_back(engine: Engine) -> None:
    def settle(original: Any, step: Any, watch: Any) -> Any:
        outcomes = original(step, watch)
        for part in step.rows:
            saves = part.row.saves
            if part.drafts and saves and outcomes.get(part.request.name) is not None:
                last = saves[-1]
                for save in saves[:-1]:
                    for group, block in enumerate(save.blocks):
                        if block != NULL:
                            temporal, window = engine.memory.state_at(last.blocks[group])
                            engine.memory.mark_state(block, temporal, window)  # type: ignore[arg-type]
        return outcomes

    wrap(engine.device, "execute", settle)


@mutant("S1", "the convolution window is not saved with the state", "PR 55601")
def window_is_left_behind(engine: Engine) -> None:
    def mark(original: Any, block: int, temporal: Any, window: Any) -> None:
        original(block, temporal, engine.memory.state_at(block)[1])

    wrap(engine.memory, "mark_state", mark)


@mutant("S1", "the exported checkpoint holds the state at the chunk's end", "PR 53212")
def checkpoint_exported_at_the_wrong_position(engine: Engine) -> None:
    def save(original: Any, row: Row) -> None:
        original(row)
        if row.outputs <= 1:  # no drafts: what is saved before the end is a checkpoint
            for save in row.saves[:-1]:
                for block in filter(None, save.blocks):
                    engine.memory.mark_state(block, row.states[-1], row.states[-1])

    wrap(engine.device, "_save_states", save)


@mutant("S1", "a keyed running state is overwritten in place", "PR 57605")
def keyed_state_is_written_over(engine: Engine) -> None:
    def writable(original: Any, block: int) -> bool:
        return block != NULL

    wrap(engine.scheduler.planner, "writable", writable)


@mutant("S1", "a hit that ends inside an attention block is written to without a copy", "issue 43884")
def shared_tail_is_not_copied(engine: Engine) -> None:
    def attention(original: Any, request: Request, target: Target, index: int) -> GroupPlan:
        part: GroupPlan = original(request, target, index)
        return replace(part, copy=-1, new=part.new - (part.copy >= 0))

    wrap(engine.scheduler.planner, "_attention", attention)


@mutant("S1", "block copies run after the forward", "PR 44409")
def copies_run_too_late(engine: Engine) -> None:
    def execute(original: Any, step: Any, watch: Any) -> Any:
        late, step.copies = step.copies, []
        outcomes = original(step, watch)
        step.copies = late
        engine.memory.copy(late)
        return outcomes

    wrap(engine.device, "execute", execute)


@mutant("S1", "freshly taken blocks keep the keys of what they held", "PR 33775")
def stale_keys_survive(engine: Engine) -> None:
    def take(original: Any, count: int) -> list[int]:
        kept = [dict(keys) for keys in engine.scheduler.pool.keys]
        taken: list[int] = original(count)
        for block in taken:
            for key in kept[block]:
                engine.scheduler.pool.register(block, key)
        return taken

    wrap(engine.scheduler.pool, "take", take)


@mutant("S1", "attention blocks are keyed one block further than they are computed", "issue 47194")
def keyed_before_computed(engine: Engine) -> None:
    def register(original: Any, block: int, key: KeyName) -> None:
        original(block, key)
        group, state = key
        size = engine.config.groups[group].block_size
        if engine.config.groups[group].kind == "mamba":
            return
        for request in engine.scheduler.requests.values():
            if state in request.states:
                end = request.states.index(state) + size
                table = request.tables[group]
                if end < len(request.states) and ceil(end, size) <= len(table) and table[ceil(end, size) - 1] != NULL:
                    original(table[ceil(end, size) - 1], (group, request.states[end]))
                return

    wrap(engine.scheduler.pool, "register", register)


# -- S2: only recurrent groups may be short ---------------------------------------------------------------------------


@mutant("S2", "cutting a lookup result asserts that every group covers the endpoint", "PR 51468")
def every_group_must_cover(engine: Engine) -> None:
    def truncate(original: Any, request: Request, hit: Hit, endpoint: int) -> Hit:
        for group, blocks in zip(engine.config.groups, hit.blocks, strict=True):
            if len(blocks) < ceil(endpoint, group.block_size):
                raise AssertionError("a group is short")
        cut: Hit = original(request, hit, endpoint)
        return cut

    wrap(engine.scheduler, "_truncate", truncate)


@mutant("S2", "cutting a lookup result drops attention's last block as well", "PR 51468")
def cut_goes_one_block_too_far(engine: Engine) -> None:
    def truncated(original: Any, request: Request, hit: Hit, endpoint: int, after: Any) -> None:
        original(request, hit, endpoint, tuple(blocks[:-1] for blocks in after))

    wrap(engine.scheduler.report, "truncated", truncated)


@mutant("S2", "a diverged hit is resumed from although no store brings the state", "PR 50344")
def diverged_hit_without_state(engine: Engine) -> None:
    def point(original: Any, request: Request, agreed: Hit) -> tuple[Hit, int]:
        hit, external = original(request, agreed)
        if not external and agreed.tokens:
            deep = engine.scheduler.lookup.attention(request, agreed)
            return (deep, 0) if deep is not agreed else (hit, external)
        return hit, external

    wrap(engine.scheduler, "_resume_point", point)


@mutant("S2", "a hit may cover the whole prompt, and leaves nothing to compute", "PR 47861")
def hit_of_everything(engine: Engine) -> None:
    def agreed(original: Any, request: Request) -> Hit:
        hit: Hit = original(request)
        grain = engine.scheduler.lookup.grain
        if hit.tokens + grain == request.known:
            blocks = engine.scheduler.lookup.blocks(request, request.known)
            if all(len(b) == 0 or b[-1] != NULL for b in blocks):
                engine.scheduler.report.looked_up(request, Hit(request.known, blocks, hit.reach))
        return hit

    wrap(engine.scheduler.lookup, "agreed", agreed)


@mutant("S2", "a window group is not asked whether it covers a hit", "PR 43650")
def window_is_not_asked(engine: Engine) -> None:
    def covers(original: Any, request: Request, group: int, tokens: int) -> bool:
        return True

    wrap(engine.scheduler.lookup, "_covers", covers)


@mutant("S2", "a recurrent state one unit earlier is taken for the one at the hit", "issue 53505")
def hit_of_an_earlier_state(engine: Engine) -> None:
    pool, lookup = engine.scheduler.pool, engine.scheduler.lookup

    def blocks(original: Any, request: Request, tokens: int, recurrent: bool = True) -> Any:
        found = original(request, tokens, recurrent)
        answer = []
        for group, row in enumerate(found):
            earlier = tokens - lookup.grain
            if engine.config.groups[group].kind == "mamba" and row and earlier > 0:
                block = pool.find((group, request.states[earlier]))
                if block is not None:
                    row = (*row[:-1], block)
            answer.append(row)
        return tuple(answer)

    wrap(lookup, "blocks", blocks)
