"""Who runs in this step, and on which blocks.

Running requests come first, oldest first; then waiting ones in the order they came, none overtaking another. Where a
running request finds no block, the newest one gives up everything and waits again; if it is the newest itself, it first
gives up its own held checkpoint. What is decided here is reported as it is decided (``emit``), so that the same rules
judge this engine and any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvproof.impl.reference.batch import Load, Row, Save
from kvproof.impl.reference.chunks import Chunk, Chunks
from kvproof.impl.reference.lookup import Hit, Lookup
from kvproof.impl.reference.plan import Planner, Target, ceil
from kvproof.impl.reference.pool import CacheEvent, Pool
from kvproof.impl.reference.report import Report
from kvproof.impl.reference.request import Request, Status
from kvproof.impl.reference.step import Scheduled, Step
from kvproof.impl.reference.store import Flight, Store
from kvproof.spec.config import Config
from kvproof.spec.events import Event
from kvproof.spec.rules.hits import resume
from kvproof.spec.tracer import advance
from kvproof.spec.view import NULL

Drafter = Callable[[Request, int], Sequence[int]]
"""Proposes at most that many tokens after what is known of a request."""


class Scheduler:
    """All bookkeeping of the engine. It never looks at a tensor."""

    def __init__(
        self,
        config: Config,
        emit: Callable[[Event], None] | None,
        announce: Callable[[CacheEvent], None],
        whole: bool = True,
    ) -> None:
        self.config = config
        self.pool = Pool(config.num_blocks, announce)
        self.lookup = Lookup(config, self.pool)
        self.chunks = Chunks(config)
        self.planner = Planner(config, self.pool, self.chunks)
        self.store = Store(config)
        self.report = Report(self.config, self.pool, self.planner, emit, whole)
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.in_flight: Step | None = None
        self.fenced: dict[str, list[int]] = {}
        """Blocks of requests that went away while a load was writing to them, by request: released when it is done."""
        self.steps = 0

    # -- requests come and go -----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.planner.strip(request)
        self.requests[request.name] = request
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Finished or aborted: everything it counted on is let go, now or when nothing can touch it any more."""
        self._let_go(request)
        request.status = Status.FINISHED
        del self.requests[request.name]
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self.store.distrusted.discard(request.name)
        self.report.forget(request)

    def preempt(self, request: Request) -> None:
        """The request loses its blocks and waits again, first in line. What it keyed may still be there then."""
        self._let_go(request)
        request.status = Status.WAITING
        if request in self.running:
            self.running.remove(request)
            self.waiting.insert(0, request)
        if self.in_flight is not None:
            self.in_flight.preempted = True

    def _let_go(self, request: Request) -> None:
        blocks = self.planner.strip(request)
        if request.name in self.store.flying:
            self.fenced.setdefault(request.name, []).extend(blocks)
        elif self.in_flight is not None and self.in_flight.involves(request):
            self.in_flight.deferred += blocks
        else:
            self.release(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.pool.release(block)

    # -- one step -----------------------------------------------------------------------------------------------------

    def schedule(self, drafter: Drafter) -> Step:
        """Decide the next step. It is in flight until it is completed."""
        self.steps += 1
        step = self.in_flight = Step(self.steps)
        self._fill(step, drafter)
        step.fresh, self.pool.fresh = self.pool.fresh, []
        return step

    def _fill(self, step: Step, drafter: Drafter) -> None:
        budget = self.config.step_tokens
        for request in list(self.running):
            if request in self.running and budget > 0:
                budget -= self._advance(request, budget, step, drafter)
        if step.preempted:
            return  # whoever lost its blocks would take them right back
        for request in list(self.waiting):
            if len(self.running) >= self.config.max_running or budget <= 0:
                break
            if request.status is Status.LOADING:
                continue
            used = self._admit(request, budget, step)
            while used is None and self._idle_holder_gives_way(request):
                used = self._admit(request, budget, step)
            if used is None:
                break
            budget -= used

    def _advance(self, request: Request, budget: int, step: Step, drafter: Drafter) -> int:
        """Schedule a running request. Returns how many tokens it was given.

        Drafts are optional: where they find no room the request goes on without them, before anybody, itself included,
        gives up anything for it.
        """
        start = request.computed
        drafts: tuple[int, ...] = ()
        if start < request.prefill_end:
            chunk = self._cut(request, start, budget)
        else:
            room = min(budget, self.config.max_model_len - start) - 1
            if self.config.speculative and room > 0:
                drafts = tuple(drafter(request, min(room, self.config.speculative)))
            chunk = Chunk(start + 1 + len(drafts))
        if chunk.end <= start:
            return 0
        target = Target(chunk.end, start, drafts=len(drafts), checkpoint=chunk.checkpoint)
        while not self._allocate(request, target, step):
            if drafts:
                drafts, target = (), Target(start + 1, start)
            elif not self._make_room(request):
                return 0
        self._schedule(request, target, drafts, step)
        return target.end - start

    def _admit(self, request: Request, budget: int, step: Step) -> int | None:
        """Let a waiting request in, if it fits. Returns how many tokens it was given (0: it waits for a load)."""
        if request.status is Status.LOADED:
            return self._start(request, Target(0, request.computed), budget, step)
        agreed = self.lookup.agreed(request)
        self.report.looked_up(request, agreed)
        self.chunks.declare(request, agreed.tokens, agreed.reach)
        hit, external = self._resume_point(request, agreed)
        target = Target(0, hit.tokens + external, hit.blocks, hit.tokens, external)
        if external and self.config.connector == "async":
            return self._load(request, target, step)
        return self._start(request, target, budget, step)

    def _start(self, request: Request, found: Target, budget: int, step: Step) -> int | None:
        start = found.computed
        chunk = self._cut(request, start, budget)
        if chunk.end <= start:
            return None
        target = Target(chunk.end, start, found.hits, found.local, found.external, 0, chunk.checkpoint)
        if not self._whole_fits(request, target) or not self._allocate(request, target, step):
            return None
        request.computed = start
        if found.external:
            step.loads.append(self._begin_load(request, target))
        self._enter(request, self.running, Status.RUNNING)
        self._schedule(request, target, (), step)
        return chunk.end - start

    def _load(self, request: Request, found: Target, step: Step) -> int | None:
        """Make room for an asynchronous load, leaving others what they still need, and begin it; the request waits for
        it with its blocks."""
        target = Target(found.computed, found.computed, found.hits, found.local, found.external, load=True)
        reserved = sum(self._remaining(other) for other in (*self.running, *self.waiting))
        if not self._whole_fits(request, target) or not self._allocate(request, target, step, reserved):
            return None
        self._begin_load(request, target)
        request.status = Status.LOADING
        return 0

    def _remaining(self, request: Request) -> int:
        """Blocks that a request with blocks in its hands still needs for the tokens that are known of it. Nobody can
        take them from a load under way: were they not left, those who wait for their loads could keep each other from
        ever starting."""
        if request.status is Status.WAITING:
            return 0
        return self.planner.plan(request, Target(request.known, request.computed, whole=True)).total

    def _enter(self, request: Request, queue: list[Request], status: Status) -> None:
        self.waiting.remove(request)
        queue.append(request)
        request.status = status

    # -- where to resume ----------------------------------------------------------------------------------------------

    def _resume_point(self, request: Request, agreed: Hit) -> tuple[Hit, int]:
        """What is adopted of the local hit, and how many tokens a store brings on top.

        The store is shown whole blocks. If it claims more than the tail inside the last one, the tail is cut and the
        load covers it; if not, the tail stays and nothing is loaded. Attention may reach deeper than the states do:
        then it is worth asking for the rest, and if the store has none, the agreed hit is what remains.
        """
        config = self.config
        if config.connector == "none":
            return agreed, 0
        hit = self.lookup.attention(request, agreed) if config.divergent_hits else agreed
        diverged = hit is not agreed
        if diverged:
            self.report.looked_up(request, hit, diverged=True)
        tail = hit.tokens % config.scheduler_block
        offered = self.store.offer(request, hit.tokens - tail)
        self.report.offered[request.name] = offered
        point = resume(hit.tokens, tail, agreed.tokens, diverged, offered)
        local, external = int(point.local), int(point.external)
        if external and local < hit.tokens:
            hit = self._truncate(request, hit, local)
        elif diverged and not external:
            return agreed, 0
        if external:
            # The load brings the state at its end: the one at the local hit is not resumed from.
            blocks = tuple(
                () if group.kind == "mamba" else found for group, found in zip(config.groups, hit.blocks, strict=True)
            )
            hit = Hit(local, blocks, hit.reach)
        return hit, external

    def _truncate(self, request: Request, hit: Hit, endpoint: int) -> Hit:
        """The same hit up to ``endpoint`` tokens. Attention covers it; a recurrent group may be short."""
        blocks = tuple(
            found[: ceil(endpoint, group.block_size)]
            for group, found in zip(self.config.groups, hit.blocks, strict=True)
        )
        self.report.truncated(request, hit, endpoint, blocks)
        return Hit(endpoint, blocks, hit.reach)

    # -- chunks and blocks --------------------------------------------------------------------------------------------

    def _cut(self, request: Request, start: int, budget: int) -> Chunk:
        if start >= request.prefill_end:
            return Chunk(min(request.known, start + budget))
        chunk = self.chunks.cut(request, start, budget)
        self.report.split(request, start, budget, chunk, self.chunks)
        return chunk

    def _whole_fits(self, request: Request, target: Target) -> bool:
        """With "full sequence must fit": whether there is room for all that is known of the request."""
        if not self.config.full_sequence_must_fit:
            return True
        whole = Target(request.known, target.computed, target.hits, target.local, target.external, 0,
                       target.checkpoint, whole=True, load=target.load)  # fmt: skip
        plan = self.planner.plan(request, whole)
        self.report.asked(request, plan, dry=True)
        fits = plan.total <= len(self.pool.free)
        if not fits:
            self.report.refused(request)
        return fits

    def _allocate(self, request: Request, target: Target, step: Step, reserved: int = 0) -> bool:
        """Take what the step needs, or nothing: ``reserved`` blocks are left for others."""
        self.report.dry_run(request, target)
        plan = self.planner.plan(request, target)
        self.report.asked(request, plan, dry=False)
        free = len(self.pool.free)
        if plan.total > free - reserved:
            self.report.refused(request, reserved)
            return False
        grant = self.planner.carry_out(request, plan)
        step.copies += grant.copies
        for group, block in grant.exports.items():
            request.recurrent[group].exporting = block
        self._pin_source(request, target)
        self.report.granted(request, plan, grant, free, reserved)
        return True

    def _pin_source(self, request: Request, target: Target) -> None:
        """The state that a request resumes from is the newest there is of it: hold it, so that one that stops early
        still leaves it."""
        for group in request.recurrent:
            if target.hits and target.hits[group]:
                self.hold(group, request, target.local, target.hits[group][-1])

    def hold(self, group: int, request: Request, position: int, block: int) -> None:
        """Hold the newest reusable state, and let go of an older one."""
        own = request.recurrent[group]
        if own.newest is not None and own.newest[0] >= position:
            return
        own.newest = (position, block)
        self.pool.hold(block)
        if own.held is not None:
            self.pool.release(own.held[1])
        own.held = (position, block)

    def _make_room(self, request: Request) -> bool:
        """Somebody must give way to a running request. False if it is this one."""
        newest = self.running[-1]
        if newest is not request:
            self.preempt(newest)
            return True
        if self._give_up_checkpoints(request):
            return True
        if self._loaded_gives_way(request):
            return True
        self.preempt(request)
        return False

    def _idle_holder_gives_way(self, request: Request) -> bool:
        """Where nothing runs or is about to, those whose load has arrived hold blocks that the first in line needs: the
        newest of them gives way. False if nobody does."""
        if self.running or any(other.status is Status.LOADING for other in self.waiting):
            return False
        return self._loaded_gives_way(request)

    def _loaded_gives_way(self, request: Request) -> bool:
        """The newest of the others whose load has arrived loses its blocks. False if there is none."""
        loaded = [other for other in self.waiting if other.status is Status.LOADED and other is not request]
        if loaded:
            self.preempt(loaded[-1])
        return bool(loaded)

    def _give_up_checkpoints(self, request: Request) -> bool:
        """A request that would lose everything gives up its held state first, for good: nobody can resume there."""
        gave = False
        for own in request.recurrent.values():
            if own.held is None:
                continue
            block = own.held[1]
            own.held = own.newest = None
            gave = True
            if self.pool.references[block] == 1 + (block == own.running):
                self.pool.forget(block)
            self.pool.release(block)
        return gave

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _begin_load(self, request: Request, target: Target) -> Flight:
        tables = tuple(tuple(table) for table in request.tables)
        state = tuple(
            request.recurrent[g].running if g in request.recurrent else NULL for g in range(len(self.config.groups))
        )
        tokens = tuple(request.tokens[: target.computed])
        load = Load(request.name, tokens, target.local, target.computed, tables, state)
        return self.store.start(request, load)

    def _schedule(self, request: Request, target: Target, drafts: tuple[int, ...], step: Step) -> None:
        start, end = target.computed, target.end
        first = not request.admitted
        groups = range(len(self.config.groups))
        positions = list(range(start + 1, end + 1)) if drafts else [end]
        places: dict[int, list[int]] = {}
        for group, own in request.recurrent.items():
            # In place if nobody else may see the state it goes on from, now or by the key it is about to get.
            in_place = self.planner.writable(own.running) and not target.external
            private = [own.running, *own.scratch] if in_place else list(own.scratch)
            places[group] = private[: len(positions)]
        saves = [
            Save(position, tuple(places[g][i] if g in places else NULL for g in groups))
            for i, position in enumerate(positions)
        ]
        if target.checkpoint:
            exports = tuple(request.recurrent[g].exporting if g in places else NULL for g in groups)
            saves.insert(0, Save(target.checkpoint, exports))
        states = list(request.states[start : min(end, request.known) + 1])
        for token in drafts:
            states.append(advance(states[-1], token))
        row = Row(
            request=request.name,
            tokens=(*request.tokens[start:end], *drafts),
            start=start,
            tables=tuple(tuple(table) for table in request.tables),
            state=tuple(request.recurrent[g].running if g in places else NULL for g in groups),
            saves=tuple(saves) if places else (),
            outputs=1 + len(drafts) if end >= request.known else 0,
            states=tuple(states),
        )
        request.admitted = True
        step.rows.append(Scheduled(request, row, drafts, first, target.external > 0, request.prefill_end))
