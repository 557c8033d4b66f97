"""Mutants of what is promised before it is there (checkpoints, states of the same step, null slots), of the gate for
whole sequences, and of what is found again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvproof.impl.reference.batch import Row
from kvproof.impl.reference.engine import Engine
from kvproof.impl.reference.lookup import Hit
from kvproof.impl.reference.plan import Target
from kvproof.impl.reference.planting import mutant, wrap
from kvproof.impl.reference.pool import KeyName
from kvproof.impl.reference.request import Request
from kvproof.spec.view import NULL


@mutant("S1", "a block is keyed as a checkpoint that the device never exports", "PR 53212")
def checkpoint_is_not_exported(engine: Engine) -> None:
    def save(original: Any, row: Row) -> None:
        # Without drafts, what is saved before the end is a checkpoint.
        original(replace(row, saves=row.saves[-1:]) if row.outputs <= 1 else row)

    wrap(engine.device, "_save_states", save)


@mutant("S1", "a state can be hit in the step that is yet to make it", "PR 29387")
def state_is_keyed_when_scheduled(engine: Engine) -> None:
    scheduler = engine.scheduler

    def schedule(original: Any, request: Request, target: Target, drafts: Any, step: Any) -> None:
        original(request, target, drafts, step)
        for save in step.rows[-1].row.saves:
            if save.position < len(request.states) and scheduler.chunks.wanted(request, save.position):
                for group in request.recurrent:
                    scheduler.pool.register(save.blocks[group], (group, request.states[save.position]))

    wrap(scheduler, "_schedule", schedule)


@mutant("S4", "null slots get the keys of their positions", "PR 34418")
def null_slots_are_keyed(engine: Engine) -> None:
    pool, config = engine.scheduler.pool, engine.config

    def register(original: Any, block: int, key: KeyName) -> None:
        original(block, key)
        group, state = key
        if config.groups[group].kind != "mamba":
            return
        for request in engine.scheduler.requests.values():
            if state in request.states:
                before = request.states.index(state) - config.mamba_block
                if before > 0 and pool.find((group, request.states[before])) is None:
                    original(NULL, (group, request.states[before]))
                return

    wrap(pool, "register", register)


@mutant("S3", "the whole-sequence gate does not know that a window group gives blocks back", "PR 40946")
def gate_forgets_that_windows_slide(engine: Engine) -> None:
    def capped(original: Any, target: Target, index: int, new: int, own: int) -> int:
        return new

    wrap(engine.scheduler.planner, "_capped", capped)


@mutant("others", "where no state is at attention's depth, there is no hit at all", "PR 42524")
def recurrent_miss_loses_the_hit(engine: Engine) -> None:
    lookup = engine.scheduler.lookup

    def agreed(original: Any, request: Request) -> Hit:
        hit: Hit = original(request)
        deepest = min(hit.reach, request.known - 1) // lookup.grain * lookup.grain
        return Hit(0, lookup.blocks(request, 0), hit.reach) if hit.tokens < deepest else hit

    wrap(lookup, "agreed", agreed)


@mutant("others", "a prompt leaves one state, at its end, whatever the retention interval asks for", "issue 45238")
def states_at_the_tail_only(engine: Engine) -> None:
    def wanted(original: Any, request: Request, position: int) -> bool:
        return 0 < position == request.tail

    wrap(engine.scheduler.chunks, "wanted", wanted)
