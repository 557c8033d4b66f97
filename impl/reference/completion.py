"""What a step leaves behind: computed positions move on, states change their names, and what can be reused is keyed.

Keys appear only here, after the forward has run: a key's content is there from its first moment on, and no two requests
of one step can meet on a block that is yet to be written. (vLLM keys blocks when they are allocated, and has to keep
others from hitting them within the step.)
"""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.impl.reference.request import Request, Status
from kvproof.impl.reference.scheduler import Scheduler
from kvproof.impl.reference.step import Outcome, Scheduled, Step
from kvproof.impl.reference.store import Flight
from kvproof.spec.view import NULL


def complete(scheduler: Scheduler, step: Step, outcomes: Mapping[str, Outcome | None], arrived: list[Flight]) -> None:
    """The device has run ``step``; ``arrived`` are the asynchronous loads that are complete with it."""
    for source, target in step.copies:
        scheduler.release((source, target))
    step.copies = []
    for part in step.rows:
        # A request that went away, or lost its blocks, while the step was under way has nothing here any more.
        if scheduler.requests.get(part.request.name) is not part.request or part.request.status is not Status.RUNNING:
            continue
        outcome = outcomes[part.request.name]
        if outcome is None:
            _load_fell_short(scheduler, step, part.request)
        else:
            _advance(scheduler, part, outcome)
    for flight in arrived:
        _loaded(scheduler, flight)
    scheduler.in_flight = None
    scheduler.release(step.deferred)
    step.deferred = []


def _advance(scheduler: Scheduler, part: Scheduled, outcome: Outcome) -> None:
    request = part.request
    before = 0 if part.first else request.computed
    request.computed = part.row.end - len(part.drafts) + outcome.accepted
    request.extend(list(outcome.tokens))
    scheduler.report.learn(request)
    key_attention(scheduler, request, before)
    if part.loaded:
        key_loaded_state(scheduler, request, part.row.start)
    _settle_states(scheduler, part)
    scheduler.planner.slide(request)
    limit = scheduler.config.max_model_len
    if outcome.tokens and (request.finishing or request.outputs >= request.max_tokens or request.known >= limit):
        scheduler.remove(request)


def key_attention(scheduler: Scheduler, request: Request, before: int) -> None:
    """Key every attention block that was completed since ``before`` tokens, and the tail inside a block."""
    config, pool = scheduler.config, scheduler.pool
    grain = scheduler.lookup.grain
    inside = (request.tail, request.tail + grain, request.junction) if config.partial_hits else ()
    for group, table in enumerate(request.tables):
        size = config.groups[group].block_size
        if group in request.recurrent:
            continue
        ends = [slot * size + size for slot in range(before // size, request.computed // size)]
        ends += [position for position in inside if before < position <= request.computed and position % size]
        for end in ends:
            block = table[(end - 1) // size]
            if block != NULL:
                pool.register(block, (group, request.states[end]))


def _settle_states(scheduler: Scheduler, part: Scheduled) -> None:
    """The state at the computed position is the running one now; those worth keeping get their key; others are scratch.

    A key names the position that the state was saved at. It is never worked out from a slot.
    """
    request, row = part.request, part.row
    for group, own in request.recurrent.items():
        saved = {save.position: save.blocks[group] for save in row.saves if save.position <= request.computed}
        written = {save.blocks[group] for save in row.saves}
        before, own.running = own.running, saved[request.computed]
        own.scratch = sorted({*own.scratch, *written} - {own.exporting, own.running})
        exporting, own.exporting = own.exporting, 0
        for position, block in saved.items():
            if not scheduler.chunks.wanted(request, position):
                continue
            scheduler.pool.register(block, (group, request.states[position]))
            scheduler.hold(group, request, position, block)
            if block in own.scratch:
                own.scratch.remove(block)
                scheduler.release((block,))
        if exporting:
            scheduler.release((exporting,))
        if before not in written:
            scheduler.release((before,))


def _load_fell_short(scheduler: Scheduler, step: Step, request: Request) -> None:
    """What the store brought has no state at its end: nothing of it counts, and the request starts over without it."""
    scheduler.store.distrusted.add(request.name)
    flight = next(f for f in step.loads if f.load.request == request.name)
    scheduler.preempt(request)
    scheduler.report.loaded(request, flight)


def _loaded(scheduler: Scheduler, flight: Flight) -> None:
    """An asynchronous load is complete: its request can start from where it ends, if it brought all it claimed."""
    name = flight.load.request
    scheduler.release(scheduler.fenced.pop(name, []))
    request = scheduler.requests.get(name)
    if request is None or request.status is not Status.LOADING:
        return
    if not flight.whole:
        scheduler.store.distrusted.add(name)
        scheduler.preempt(request)
    else:
        request.status = Status.LOADED
        request.computed = flight.load.end
        key_attention(scheduler, request, 0)
        key_loaded_state(scheduler, request, flight.load.end)
    scheduler.report.loaded(request, flight)


def key_loaded_state(scheduler: Scheduler, request: Request, position: int) -> None:
    """The state that a load brought can be reused as much as one that was computed."""
    for group, own in request.recurrent.items():
        scheduler.pool.register(own.running, (group, request.states[position]))
        scheduler.hold(group, request, position, own.running)
