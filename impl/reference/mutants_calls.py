"""Mutants of what is counted and waited for: estimates (S3), references and checkpoints (S4), loads, events, stalls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvproof.impl.reference.batch import Load
from kvproof.impl.reference.engine import Engine
from kvproof.impl.reference.plan import GroupPlan, Plan, Target, ceil
from kvproof.impl.reference.planting import mutant, wrap
from kvproof.impl.reference.pool import CacheEvent
from kvproof.impl.reference.request import Request, Status
from kvproof.impl.reference.store import Flight
from kvproof.spec.view import NULL

# -- S3: the estimate is what is taken --------------------------------------------------------------------------------


@mutant("S3", "with a checkpoint due, the whole table is charged", "PR 57050")
def estimate_grows_with_the_prompt(engine: Engine) -> None:
    def recurrent(original: Any, request: Request, target: Target, index: int) -> GroupPlan:
        part: GroupPlan = original(request, target, index)
        if part.checkpoint:
            return replace(part, new=max(part.new, ceil(target.end, engine.config.mamba_block)))
        return part

    wrap(engine.scheduler.planner, "_recurrent", recurrent)


@mutant("S3", "the copy of a partial tail is not charged", "PR 41282")
def copy_is_not_charged(engine: Engine) -> None:
    def plan(original: Any, request: Request, target: Target) -> Plan:
        whole: Plan = original(request, target)
        return replace(whole, groups=tuple(_uncharged(part) for part in whole.groups))

    def _uncharged(part: GroupPlan) -> GroupPlan:
        return replace(part, new=part.new - 1) if part.copy >= 0 and part.new else part

    wrap(engine.scheduler.planner, "plan", plan)


@mutant("S3", "hit blocks that are free are not charged", "PR 38378")
def evictable_hits_are_not_charged(engine: Engine) -> None:
    def plan(original: Any, request: Request, target: Target) -> Plan:
        whole: Plan = original(request, target)
        return replace(whole, groups=tuple(replace(part, evictable=0) for part in whole.groups))

    wrap(engine.scheduler.planner, "plan", plan)


@mutant("S3", "asking what a request would take notes something", "PR 57050")
def dry_run_takes_notes(engine: Engine) -> None:
    def plan(original: Any, request: Request, target: Target) -> Plan:
        if target.hits:
            for blocks in target.hits:
                for block in blocks[-1:]:
                    engine.scheduler.pool.hold(block)
                    engine.scheduler.pool.release(block)
        whole: Plan = original(request, target)
        return whole

    wrap(engine.scheduler.planner, "plan", plan)


@mutant("S3", "the whole-sequence gate charges every group twice", "PR 57050")
def gate_charges_twice(engine: Engine) -> None:
    def plan(original: Any, request: Request, target: Target) -> Plan:
        whole: Plan = original(request, target)
        if target.whole:
            return replace(whole, groups=tuple(replace(part, new=2 * part.new) for part in whole.groups))
        return whole

    wrap(engine.scheduler.planner, "plan", plan)


@mutant("S3", "a request never gives up its own checkpoint, and waits for a block that it holds itself", "issue 44409")
def own_checkpoint_never_yields(engine: Engine) -> None:
    scheduler, refused = engine.scheduler, dict[str, int]()

    def holds(request: Request) -> bool:
        return any(own.held is not None for own in request.recurrent.values())

    def allocate(original: Any, request: Request, target: Target, step: Any, reserved: int = 0) -> bool:
        if not target.drafts and refused.get(request.name) == step.index:
            return False  # nor does it go on without its drafts: they are what it waits for
        granted: bool = original(request, target, step, reserved)
        if not granted and target.drafts and holds(request):
            refused[request.name] = step.index
        return granted

    def give_up(original: Any, request: Request) -> bool:
        return False

    def make_room(original: Any, request: Request) -> bool:
        if len(scheduler.running) == 1 and holds(request):
            return False
        answer: bool = original(request)
        return answer

    wrap(scheduler, "_allocate", allocate)
    wrap(scheduler, "_give_up_checkpoints", give_up)
    wrap(scheduler, "_make_room", make_room)


# -- S4 and references ------------------------------------------------------------------------------------------------


@mutant("S4", "the newest reusable state is not held", "downstream patch of 2026-10-06")
def checkpoint_is_not_held(engine: Engine) -> None:
    def hold(original: Any, group: int, request: Request, position: int, block: int) -> None:
        original(group, request, position, block)
        own = request.recurrent[group]
        if own.held is not None:
            engine.scheduler.pool.release(own.held[1])
            own.held = None

    wrap(engine.scheduler, "hold", hold)


@mutant("S4", "a newer checkpoint does not release the older one", "downstream patch of 2026-10-06")
def older_checkpoint_is_kept(engine: Engine) -> None:
    def hold(original: Any, group: int, request: Request, position: int, block: int) -> None:
        before = request.recurrent[group].held
        if before is not None:
            engine.scheduler.pool.hold(before[1])
        original(group, request, position, block)
        if before is not None and request.recurrent[group].held == before:
            engine.scheduler.pool.release(before[1])

    wrap(engine.scheduler, "hold", hold)


@mutant("S4", "preemption and finishing forget the held checkpoint", "downstream patch of 2026-10-06")
def held_checkpoint_is_leaked(engine: Engine) -> None:
    def blocks(original: Any, request: Request) -> list[int]:
        held = [own.held[1] for own in request.recurrent.values() if own.held is not None]
        order: list[int] = original(request)
        return order[: len(order) - len(held)]

    wrap(engine.scheduler.planner, "blocks", blocks)


@mutant("S4", "a finished request's last block is released twice", "issue 42571")
def double_free(engine: Engine) -> None:
    def release(original: Any, blocks: Any) -> None:
        original(blocks)
        if len(blocks) > 2:
            pool, last = engine.scheduler.pool, blocks[-1]
            pool.references[last] -= 1

    wrap(engine.scheduler, "release", release)


@mutant("S4", "both ends of a copy stay counted after it has run", "PR 42612")
def copy_ends_are_leaked(engine: Engine) -> None:
    def complete(original: Any, step: Any, watch: Any) -> Any:
        outcomes = original(step, watch)
        step.copies = []
        return outcomes

    wrap(engine.device, "execute", complete)


@mutant("S4", "a block without references is not put back into the queue", "PR 42612")
def freed_but_not_queued(engine: Engine) -> None:
    pool = engine.scheduler.pool

    def release(original: Any, block: int) -> None:
        original(block)
        if block != NULL and pool.references[block] == 0 and len(pool.keys[block]) > 1:
            pool.free.pop(block, None)

    wrap(pool, "release", release)


@mutant("S4", "a hit leaves the block in the free queue", "issue 43884")
def hit_stays_in_the_queue(engine: Engine) -> None:
    pool = engine.scheduler.pool

    def hold(original: Any, block: int) -> None:
        free = pool.references[block] == 0 and block != NULL
        original(block)
        if free:
            pool.free[block] = None

    wrap(pool, "hold", hold)


@mutant("S4", "null slots are counted", "PR 51358")
def null_block_is_counted(engine: Engine) -> None:
    pool = engine.scheduler.pool

    def slide(original: Any, request: Request) -> None:
        before = sum(table.count(NULL) for table in request.tables)
        original(request)
        pool.references[NULL] += sum(table.count(NULL) for table in request.tables) - before

    wrap(engine.scheduler.planner, "slide", slide)


@mutant("S4", "the null block is handed out when the pool runs dry", "issue 53084")
def null_block_is_handed_out(engine: Engine) -> None:
    def take_slots(original: Any, request: Request, part: GroupPlan, target: Target, grant: Any) -> None:
        original(request, part, target, grant)
        table = request.tables[part.group]
        if len(table) > 2 and not engine.scheduler.pool.free:
            engine.scheduler.pool.release(table[-1])
            table[-1] = NULL

    wrap(engine.scheduler.planner, "_take_slots", take_slots)


@mutant("S4", "evicting a block leaves its key in the lookup map", "PR 33775")
def key_stays_in_the_map(engine: Engine) -> None:
    pool = engine.scheduler.pool

    def forget(original: Any, block: int) -> None:
        keys = list(pool.keys[block])
        original(block)
        for key in keys[:1]:
            pool.index.setdefault(key, {})[block] = None

    wrap(pool, "forget", forget)


@mutant("S4", "a finished request is not forgotten", "PR 42554")
def request_is_not_forgotten(engine: Engine) -> None:
    def remove(original: Any, request: Request) -> None:
        original(request)
        if request.outputs > 1:
            engine.scheduler.fenced[request.name] = []

    wrap(engine.scheduler, "remove", remove)


# -- external loads, events, progress ---------------------------------------------------------------------------------


@mutant("others", "a load that fell short counts as if all had come", "PR 50630")
def short_load_counts(engine: Engine) -> None:
    class Whole(Flight):
        @property
        def whole(self) -> bool:
            return True

    def start(original: Any, request: Request, load: Load) -> Flight:
        flight = original(request, load)
        flight.__class__ = Whole
        return flight  # type: ignore[no-any-return]

    def load(original: Any, flight: Flight) -> None:
        flight.__class__ = Flight
        original(flight)
        flight.__class__ = Whole

    wrap(engine.scheduler.store, "start", start)
    wrap(engine.device, "load", load)


@mutant("others", "an aborted request's blocks are freed while a load still writes to them", "PR 50388")
def load_in_flight_is_not_fenced(engine: Engine) -> None:
    scheduler = engine.scheduler

    def let_go(original: Any, request: Request) -> None:
        original(request)
        scheduler.release(scheduler.fenced.pop(request.name, []))

    wrap(scheduler, "_let_go", let_go)


@mutant("others", "evictions are not announced", "issue 44451")
def removal_is_not_announced(engine: Engine) -> None:
    pool = engine.scheduler.pool

    def announce(original: Any, event: CacheEvent) -> None:
        if event.kind == "stored":
            original(event)

    wrap(pool, "_announce", announce)


@mutant("others", "a request whose load has arrived is not woken", "issue 53912")
def loaded_request_is_not_woken(engine: Engine) -> None:
    def admit(original: Any, request: Request, budget: int, step: Any) -> int | None:
        if request.status is Status.LOADED:
            return None
        answer: int | None = original(request, budget, step)
        return answer

    wrap(engine.scheduler, "_admit", admit)


# -- what was computed is found again ---------------------------------------------------------------------------------


@mutant("others", "the state that a prompt leaves is above every hit that the same prompt can have", "issue 50235")
def no_state_is_left_for_a_resend(engine: Engine) -> None:
    config = engine.config

    def declare(original: Any, request: Request, agreed: int, reach: int) -> None:
        original(request, agreed, reach)
        grain = config.hash_unit if config.partial_hits else config.scheduler_block
        if request.known % grain == 0:
            request.tail = request.known
            request.last_cacheable = request.known // config.scheduler_block * config.scheduler_block

    wrap(engine.scheduler.chunks, "declare", declare)


@mutant("others", "with a drafter the last unit is dropped twice", "PR 57616")
def drop_is_taken_twice(engine: Engine) -> None:
    lookup = engine.scheduler.lookup

    def reach(original: Any, request: Request, limit: int) -> int:
        deep: int = original(request, limit)
        return max(0, deep - lookup.grain) if engine.config.eagle else deep

    wrap(lookup, "_reach", reach)
