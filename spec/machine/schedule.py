"""Who runs in a step: admission, chunks, preemption.

Running requests come first, oldest first, then those that wait, in order. Where a running request finds no room the
newest one is preempted, and then nobody is admitted in that step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvproof.spec.events import Allocate, Estimate, Event, GroupEstimate, Lookup, Resume, Split, Truncate
from kvproof.spec.machine import lookup, pool, unmoved
from kvproof.spec.machine.blocks import Faulty, Need, allocate, charge, key, passed_slots, retire
from kvproof.spec.machine.lookup import Hit
from kvproof.spec.machine.sizes import Sizes, ceil
from kvproof.spec.machine.world import ARRIVED, LOADING, RUNNING, WAITING, Flight, Request, World
from kvproof.spec.rules.hits import resume
from kvproof.spec.view import NULL

Emit = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a step: the tokens [``start``, ``end``), of which the last ``drafts`` are speculative.

    ``wrong``: the drafts stand for nothing. ``load`` is what an external store brings before the forward. Where states
    are not moved they go to ``places``; ``first``: it is the request's first row since it was admitted.
    """

    request: Request
    start: int
    end: int
    drafts: int
    wrong: bool = False
    load: Flight | None = None
    places: unmoved.Places = ()
    first: bool = False


@dataclass(slots=True)
class Step:
    """What is to run. ``copies`` are queued (source, target) pairs; ``preempted``: somebody had to give way;
    ``decoding``: requests that ran before run on, ``prefilling``: one of them was not done with its prefill."""

    rows: list[Row] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: bool = False
    prefilling: bool = False
    decoding: bool = False


class Schedule:
    """One step being scheduled in ``world``, which it changes. ``emit`` hears of every decision, if there is one."""

    def __init__(self, world: World, sizes: Sizes, emit: Emit | None) -> None:
        self.world, self.sizes, self.config, self.emit = world, sizes, sizes.config, emit
        self.step = Step()
        self.budget = self.config.step_tokens
        self._skipped: list[Request] = []
        self._asked: list[Estimate] = []
        self._answer = (0, 0, False)
        """Of the last lookup: its tokens, what the store offered on top, and whether the groups disagreed."""

    def run(self) -> Step:
        world = self.world
        world.made = set()
        waiting = len(world.running) + len(world.waiting) + len(world.loading)
        limited = waiting > 1 or not self.sizes.dialect.spares_lone_prefill
        self.threshold = self.config.long_prefill_threshold if limited else 0
        for request in list(world.running):
            if self.budget <= 0 or request.status != RUNNING:
                break
            if not self._advance(request):
                break
        if not self.step.preempted:
            self._admit_all()
        queued, world.copies = world.copies, []
        if self.sizes.dialect.frees_at_once:
            queued = sorted(queued, key=lambda copy: copy[0])
        self.step.copies = [(source, target) for _, source, target in queued]
        # Nothing else is in flight, so both ends are given back as soon as the copies are queued.
        pool.release(world, [block for pair in self.step.copies for block in pair])
        for row in self.step.rows:
            if row.end - row.start <= row.drafts:
                raise Faulty(f"{row.request.name} is to run {row.drafts} drafts in {row.end - row.start} tokens")
            row.request.computed = row.end
            row.request.prefilling = row.end < row.request.known
        return self.step

    # -- running requests ---------------------------------------------------------------------------------------------

    def _advance(self, request: Request) -> bool:
        """Schedule a running request. False where the step has no room for it or for anybody after it."""
        start = request.computed
        drafts = max(0, request.drafts)
        if not self.sizes.dialect.drafts_with_samples and start >= request.prefill_end:
            drafts = self.config.speculative
        tokens = request.known + drafts - start
        tokens = min(self._limited(request, start, tokens), self.budget)
        tokens = min(tokens, self.config.max_model_len - start - self.sizes.dialect.spares_last)
        end = self._cut(request, start, start + tokens)
        if end <= start:
            return True
        need = Need(end, start, drafts=max(0, end - request.known))
        while not self._take(request, need):
            if need.drafts and not self.sizes.dialect.drafts_count:
                end = start + 1
                need = Need(end, start)
            elif not self._make_room(request):
                return False
        self.step.decoding = True
        self.step.prefilling |= request.prefilling
        request.drafts = 0
        self.step.rows.append(self._row(request, start, end, need.drafts))
        self.budget -= end - start
        return True

    def _limited(self, request: Request, start: int, tokens: int) -> int:
        """What the limit for long prefills leaves of ``tokens``."""
        limited = self.sizes.dialect.limits_decoding or start < request.prefill_end
        return self.threshold if limited and 0 < self.threshold < tokens else tokens

    def _make_room(self, request: Request) -> bool:
        """Somebody gives way to a running request. False if it is this one."""
        world, dialect = self.world, self.sizes.dialect
        gives = world.running[-1]
        if gives is request and not dialect.lets_go and unmoved.give_up(world, request):
            return True
        if gives is request and not dialect.keeps_arrived:
            gives = self._newest_arrived(request) or request
        preempt(world, self.sizes, gives)
        self.step.preempted = True
        return gives is not request

    def _newest_arrived(self, request: Request) -> Request | None:
        """The newest of the others whose load has arrived, and who wait with their blocks."""
        arrived = (other for other in reversed(self.world.waiting) if other.status == ARRIVED and other is not request)
        return next(arrived, None)

    def _row(
        self, request: Request, start: int, end: int, drafts: int, wrong: bool = False, load: Flight | None = None
    ) -> Row:
        if self.sizes.dialect.moves_states:
            return Row(request, start, end, drafts, wrong, load)
        saved = unmoved.places(self.world, self.sizes, request, drafts, load is not None)
        first, request.grown = not request.grown, True
        return Row(request, start, end, drafts, wrong, load, saved, first)

    # -- waiting requests ---------------------------------------------------------------------------------------------

    def _admit_all(self) -> None:
        world, skipped = self.world, self._skipped
        if not self.sizes.dialect.queues_loads_apart:
            self._admit_in_order()
            return
        while self.budget > 0 and len(world.running) < self.config.max_running:
            queue = world.loading or world.waiting
            if not queue:
                break
            request = queue[0]
            if request.status == LOADING:
                skipped.append(queue.pop(0))
                continue
            if request.status == ARRIVED:
                self._arrive(request)
            admitted = self._admit(request)
            if admitted is None:
                break
            queue.pop(0)
            if admitted:
                world.running.append(request)
                request.status = RUNNING
            else:
                request.status = LOADING
                skipped.append(request)
        world.loading[:0] = skipped

    def _admit_in_order(self) -> None:
        """Those that wait for a load keep their place among those that wait."""
        world = self.world
        for request in list(world.waiting):
            if self.budget <= 0 or len(world.running) >= self.config.max_running:
                break
            if request.status == LOADING:
                continue
            admitted = self._admit(request)
            while admitted is None and self._idle_holder_gives_way(request):
                admitted = self._admit(request)
            if admitted is None:
                break
            if admitted:
                world.waiting.remove(request)
                world.running.append(request)
            request.status = RUNNING if admitted else LOADING

    def _idle_holder_gives_way(self, request: Request) -> bool:
        """Where nothing runs or is about to, the newest whose load has arrived gives way to the first in line."""
        world = self.world
        if self.sizes.dialect.keeps_arrived or world.running or any(r.status == LOADING for r in world.waiting):
            return False
        gives = self._newest_arrived(request)
        if gives is not None:
            preempt(world, self.sizes, gives)
        return gives is not None

    def _arrive(self, request: Request) -> None:
        """The load is there: what it brought is keyed, and one token at least is computed."""
        if self.sizes.dialect.keys_ahead:
            key(self.world, self.sizes, request, request.computed)
        if request.computed == request.known:
            request.computed -= 1
        request.status = WAITING

    def _admit(self, request: Request) -> bool | None:
        """Let a waiting request in. ``None``: not in this step; ``False``: it begins to wait for a load."""
        computed, hit, external = request.computed, None, 0
        if computed == 0:
            hit, external = self._resume_point(request)
            computed = hit.tokens + external
        if hit is not None and external and self.config.connector == "async":
            return self._load(request, hit, external)
        tokens, padded = request.known - computed, False
        if self._pads(tokens, computed):
            whole, room = 1 + self.config.speculative, self.config.max_model_len - computed
            careful = self.sizes.dialect.pads_where_room
            if whole < room or not careful:
                if whole > self.budget or whole > room:
                    return None
                tokens, padded = whole, True
        tokens = self._limited(request, computed, tokens)
        end = self._cut(request, computed, computed + min(tokens, self.budget))
        if end <= computed:
            return None
        if padded and end - computed != 1 + self.config.speculative and self.sizes.dialect.pads_where_room:
            end, padded = computed + 1, False
        need = Need(end, hit.tokens, external, hit.blocks) if hit is not None else Need(end, computed)
        if not self._take(request, need, gate=self.config.full_sequence_must_fit):
            return None
        load = self._flight(request, need, hit) if hit is not None and external else None
        drafts = self.config.speculative if padded else 0
        self.step.rows.append(self._row(request, computed, end, drafts, wrong=padded, load=load))
        self.budget -= end - computed
        # One whose load has arrived counts as unfinished until this step is over, even if this chunk is its last.
        request.computed, request.prefilling = computed, end < request.known or hit is None
        return True

    def _pads(self, tokens: int, computed: int) -> bool:
        """Whether a request that has ``tokens`` left is to enter with a whole decoding step."""
        if not self.config.speculative or tokens != 1 or self.step.prefilling or not self.sizes.dialect.pads_admitted:
            return False
        return self.step.decoding or (computed > 0 and self.sizes.dialect.pads_resumed)

    def _load(self, request: Request, hit: Hit, external: int) -> bool | None:
        """Make room for an asynchronous load, leaving others what they still need, and begin it."""
        need = Need(hit.tokens + external, hit.tokens, external, hit.blocks, load=True)
        others = [*self.world.requests(), *self._skipped]
        if self.sizes.dialect.reserves_for_prefills:
            reserved = sum(self._remaining(other) for other in others if self._prefills(other))
            reserved += self.sizes.decoding_blocks()
        else:
            reserved = sum(self._known_blocks(other) for other in others if other.status != WAITING)
        if not self._take(request, need, self.config.full_sequence_must_fit, reserved, keyed=False):
            return None
        request.computed = need.computed
        self.world.flights.append(self._flight(request, need, hit))
        return False

    def _flight(self, request: Request, need: Need, hit: Hit) -> Flight:
        start = need.local - need.local % self.config.scheduler_block
        missing = min(request.missing, need.computed - start)
        tables = tuple(tuple(table) for table in request.tables)
        return Flight(request.name, self.config.load_steps, start, need.computed, missing, tables,
                      tuple(request.states[: need.computed + 1]))  # fmt: skip

    def _prefills(self, request: Request) -> bool:
        held = request.status == WAITING and request.computed > 0
        return held or request.status in (LOADING, ARRIVED) or request.prefilling

    def _remaining(self, request: Request) -> int:
        """Blocks that a request which is not done with its prefill still needs."""
        drafts, dialect = self.config.speculative, self.sizes.dialect
        need = Need(request.known, request.computed, ahead=1 + drafts if drafts and dialect.reserves_slots else 0)
        blocks = sum(part.total for part in self._charge(request, need))
        return blocks if dialect.reserves_slots else blocks + self.sizes.decoding_blocks()

    def _known_blocks(self, request: Request) -> int:
        """Blocks that a request still needs for the tokens that are known of it."""
        return sum(part.total for part in self._charge(request, Need(request.known, request.computed)))

    # -- where to resume ----------------------------------------------------------------------------------------------

    def _resume_point(self, request: Request) -> tuple[Hit, int]:
        """What is adopted of the local hit, and how many tokens a store brings on top of it."""
        world, sizes, config = self.world, self.sizes, self.config
        connected = config.connector != "none"
        apart = connected and (config.divergent_hits or not sizes.dialect.asks_apart_when_told)
        first = apart and sizes.dialect.asks_once
        hit = (lookup.apart if first else lookup.agreed)(world, sizes, request)
        request.junction = hit.junction
        self._looked_up(request, hit)
        if not (sizes.dialect.moves_states and sizes.dialect.stops_by_prompt):
            unmoved.declare(sizes, request)
        if apart and not first:
            hit = lookup.apart(world, sizes, request)
            if hit.diverged:
                self._looked_up(request, hit)
        self._answer = (hit.tokens, 0, hit.diverged)
        if not connected:
            return hit, 0
        tail = hit.tokens % config.scheduler_block
        offered = offer(sizes, request, hit.tokens - tail)
        self._answer = (hit.tokens, offered, hit.diverged)
        joint = lookup.agreed(world, sizes, request) if hit.diverged else hit
        point = resume(hit.tokens, tail, joint.tokens, hit.diverged, offered)
        local, external = int(point.local), int(point.external)
        if hit.diverged and not external:
            if sizes.dialect.asks_once:
                request.junction = joint.junction
                self._looked_up(request, joint)
                self._answer = (joint.tokens, offered, False)
            return joint, 0
        if local < hit.tokens:
            hit = self._truncated(request, hit, local)
        if external and not sizes.dialect.moves_states:
            # The load brings the state at its end: the one at the local hit is not adopted.
            blocks = tuple(() if group in sizes.recurrent else found for group, found in enumerate(hit.blocks))
            hit = Hit(hit.tokens, blocks, hit.junction, hit.diverged)
        return hit, external

    def _truncated(self, request: Request, hit: Hit, endpoint: int) -> Hit:
        """The same up to ``endpoint`` tokens. Attention covers it, a recurrent group may be short."""
        if not self.sizes.dialect.cuts_recurrent_short:
            for group, found in zip(self.config.groups, hit.blocks, strict=True):
                if len(found) < endpoint // group.block_size:
                    raise Faulty("a recurrent group has fewer blocks than the lookup is cut to")
        blocks = tuple(
            found[: ceil(endpoint, group.block_size)]
            for group, found in zip(self.config.groups, hit.blocks, strict=True)
        )
        if self.emit is not None:
            self.emit(Truncate(request.name, endpoint, hit.blocks, blocks))
        return Hit(endpoint, blocks, hit.junction, hit.diverged)

    def _looked_up(self, request: Request, hit: Hit) -> None:
        if self.emit is not None:
            states = tuple(request.states)
            self.emit(Lookup(request.name, states, hit.tokens, request.known - 1, hit.blocks,
                             joint=not self.config.divergent_hits, diverged=hit.diverged))  # fmt: skip

    # -- chunks and blocks --------------------------------------------------------------------------------------------

    def _cut(self, request: Request, start: int, offered: int) -> int:
        prefill_end = request.prefill_end
        if start >= prefill_end or offered <= start:
            return offered
        case = (start, offered, prefill_end, request.prompt, request.known, request.junction)
        declared = None if self.sizes.dialect.stops_by_prompt else (request.last, request.tail)
        end, stops = self.sizes.cut(*case, declared)
        if self.emit is not None:
            self.emit(Split(request.name, start, offered - start, end - start, prefill_end, self.sizes.limit, stops))
        return end

    def _take(self, request: Request, need: Need, gate: bool = False, reserved: int = 0, keyed: bool = True) -> bool:
        """Take what is needed, or nothing. ``gate``: all that is known of the request has to fit first."""
        world, sizes = self.world, self.sizes
        free, self._asked = len(world.queue), []
        if gate:
            known = min(request.known, self.config.max_model_len)
            whole = Need(known, need.local, need.external, need.hits, load=need.load)
            if self._ask(request, whole, dry=True) > free:
                return self._refused(request, reserved)
        if sizes.dialect.moves_states:
            retire(world, sizes, request, need.computed)
        if self.emit is not None:
            self._ask(request, need, dry=True)
        total = self._ask(request, need, dry=False)
        free = len(world.queue)
        if total > free - reserved:
            return self._refused(request, reserved)
        fresh = request.cached[0] < 0
        taken = (allocate if sizes.dialect.moves_states else unmoved.allocate)(world, sizes, request, need)
        if self.emit is not None:
            if fresh and need.computed and need.hits:
                self._resumed(request, need)
            self.emit(Allocate(request.name, True, free - len(world.queue), free, tuple(self._asked),
                               tuple(taken.new), tuple(taken.hit), reserved))  # fmt: skip
        if keyed and sizes.dialect.keys_ahead:
            key(world, sizes, request, min(need.end, request.known))
        return True

    def _charge(self, request: Request, need: Need) -> tuple[GroupEstimate, ...]:
        return (charge if self.sizes.dialect.moves_states else unmoved.charge)(self.world, self.sizes, request, need)

    def _ask(self, request: Request, need: Need, dry: bool) -> int:
        groups = self._charge(request, need)
        if self.emit is not None:
            event = Estimate(request.name, dry, need.end, need.computed, groups, len(self.world.queue))
            self._asked.append(event)
            self.emit(event)
        return sum(part.total for part in groups)

    def _refused(self, request: Request, reserved: int) -> bool:
        if self.emit is not None:
            free = len(self.world.queue)
            self.emit(Allocate(request.name, False, 0, free, tuple(self._asked), reserved=reserved))
        return False

    def _resumed(self, request: Request, need: Need) -> None:
        if self.emit is None:
            return
        adopted = []
        for group, found in enumerate(need.hits):
            passed = min(passed_slots(self.sizes, group, need.computed), len(found))
            adopted.append((*[NULL] * passed, *found[passed:]))
        asynchronous = self.config.connector == "async" and need.external > 0
        self.emit(Resume(request.name, need.local, need.external, tuple(adopted), *self._answer, asynchronous))


def offer(sizes: Sizes, request: Request, local: int) -> int:
    """How many tokens a store can add to ``local`` ones (whole blocks), leaving one to compute."""
    block = sizes.config.scheduler_block
    return max(0, min(request.store, request.known - 1) // block * block - local)


def preempt(world: World, sizes: Sizes, request: Request) -> None:
    """A request loses its blocks and waits again: first in line, if it was running."""
    release_all(world, sizes, request)
    if request.status == RUNNING:
        world.running.remove(request)
        world.waiting.insert(0, request)
    request.status, request.preempted = WAITING, True


def remove(world: World, sizes: Sizes, request: Request) -> None:
    """The request is gone. Where a store may save what it leaves, what it has outgrown is let go first."""
    if sizes.config.connector != "none" and sizes.dialect.moves_states:
        retire(world, sizes, request, request.computed)
    release_all(world, sizes, request)


def release_all(world: World, sizes: Sizes, request: Request) -> None:
    """Everything the request counts on is let go: group by group, later slots first."""
    if not sizes.dialect.frees_at_once:
        blocks = unmoved.blocks_of(sizes, request)
        request.strip(len(sizes.config.groups))
        if world.deferred is not None and request.status == RUNNING:  # a step may still touch what its rows count on
            world.deferred += blocks
        else:
            pool.release(world, blocks)
        return
    tables, pins = request.tables, request.pins
    request.strip(len(sizes.config.groups))
    pool.release(world, pins)
    for table in tables:
        pool.release(world, list(reversed(table)))
