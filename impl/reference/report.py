"""What the engine says of its own decisions, in the specification's words: the events that predicates judge.

Where nobody listens nothing is worked out. What is reported is what happened (blocks that left the free queue as
counted there), not what was planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvproof.impl.reference.chunks import Chunk, Chunks
from kvproof.impl.reference.lookup import Blocks, Hit
from kvproof.impl.reference.plan import Grant, Plan, Planner, Target, ceil
from kvproof.impl.reference.pool import Pool
from kvproof.impl.reference.request import Request
from kvproof.impl.reference.store import Flight
from kvproof.spec.config import Config
from kvproof.spec.events import Allocate, Estimate, Event, GroupEstimate, Loaded, Lookup, Resume, Split, Truncate
from kvproof.spec.rules.hits import hit_limit
from kvproof.spec.tracer import State, length_of
from kvproof.spec.view import NULL

FEWEST_SWEPT = 1 << 16
"""Up to so many prefixes are remembered without asking which of them anybody still has."""


class Report:
    """Turns decisions into events for ``emit`` (``None``: nobody listens).

    ``whole``: dry runs are asked on top, and questions about steps that take no block are told, too.
    """

    def __init__(
        self, config: Config, pool: Pool, planner: Planner, emit: Callable[[Event], None] | None, whole: bool
    ) -> None:
        self.config, self.pool, self.planner, self.emit, self.whole = config, pool, planner, emit, whole
        self.offered: dict[str, int] = {}
        """What the store claimed in answer to its last question, by request."""
        self._looked_up: dict[str, tuple[int, bool]] = {}
        self._estimates: list[Estimate] = []
        self._known: dict[State, Sequence[State]] = {}
        self._sweep_at = FEWEST_SWEPT

    # -- prefixes -----------------------------------------------------------------------------------------------------

    def learn(self, request: Request) -> None:
        """Remember the request's prefixes, so that a wrong content can be told by name."""
        if self.emit is None:
            return
        for state in reversed(request.states):
            if self._known.get(state) is request.states:
                break
            self._known.setdefault(state, request.states)

    def tidy(self, requests: Iterable[Request]) -> None:
        """Forget the prefixes that neither these requests have nor any key names, once that is worth a look at all of
        them: what is remembered stays in proportion to what is live and cached."""
        if len(self._known) < self._sweep_at:
            return
        kept: dict[State, Sequence[State]] = {}
        for request in requests:
            for state in request.states:
                kept.setdefault(state, request.states)
        for _, state in self.pool.index:
            if state not in kept and state in self._known:
                kept[state] = self._known[state]
        self._known = kept
        self._sweep_at = max(FEWEST_SWEPT, 2 * len(kept))

    def forget(self, request: Request) -> None:
        """The request has ended: what was said of it is of no use any more."""
        self.offered.pop(request.name, None)
        self._looked_up.pop(request.name, None)

    def prefix(self, state: State) -> Sequence[State] | None:
        """The states that lead to ``state``, or ``None`` for a prefix that nobody submitted."""
        states = self._known.get(state)
        return None if states is None else states[1 : length_of(state) + 1]

    # -- lookups ------------------------------------------------------------------------------------------------------

    def looked_up(self, request: Request, hit: Hit, diverged: bool = False) -> None:
        if self.emit is None:
            return
        self._looked_up[request.name] = (hit.tokens, diverged)
        self.emit(
            Lookup(
                request=request.name,
                states=tuple(request.states),
                tokens=hit.tokens,
                limit=hit_limit(request.known),
                blocks=hit.blocks,
                joint=not diverged,
                diverged=diverged,
            )
        )

    def truncated(self, request: Request, hit: Hit, endpoint: int, after: Blocks) -> None:
        if self.emit is not None:
            self.emit(Truncate(request.name, endpoint, before=hit.blocks, after=after))

    def resumed(self, request: Request, target: Target) -> None:
        """The request was admitted with something that it need not compute."""
        if self.emit is None or target.computed == 0 or not target.hits:
            return
        tokens, diverged = self._looked_up.get(request.name, (0, False))
        adopted = []
        for index, blocks in enumerate(target.hits):
            passed = min(self.planner.passed(index, target.computed), len(blocks))
            adopted.append((*[NULL] * passed, *blocks[passed:]))
        self.emit(
            Resume(
                request=request.name,
                local=target.local,
                external=target.external,
                blocks=tuple(adopted),
                hit=tokens,
                offered=self.offered.get(request.name, 0),
                diverged=diverged,
                asynchronous=target.load,
            )
        )

    def loaded(self, request: Request, flight: Flight) -> None:
        """A load has arrived, whole or not, and this is what the cache makes of it."""
        if self.emit is not None:
            self.emit(Loaded(request.name, flight.load.start, flight.load.end, flight.received, request.computed))

    # -- chunks -------------------------------------------------------------------------------------------------------

    def split(self, request: Request, start: int, budget: int, chunk: Chunk, chunks: Chunks) -> None:
        if self.emit is not None and chunks.recurrent:
            self.emit(
                Split(
                    request=request.name,
                    start=start,
                    offered=min(budget, chunks.limit, request.known - start),
                    granted=chunk.end - start,
                    prefill_end=request.prefill_end,
                    limit=chunks.limit,
                    stops=chunk.stops,
                )
            )

    # -- estimates and allocations ------------------------------------------------------------------------------------

    def dry_run(self, request: Request, target: Target) -> None:
        """Ask without taking, at the arguments of the real question: the answers must agree."""
        if self.emit is not None and self.whole:
            before = self.pool.changes, len(self.pool.free)
            plan = self.planner.plan(request, target)
            changed = ("pool",) if (self.pool.changes, len(self.pool.free)) != before else ()
            self.asked(request, plan, dry=True, changed=changed)

    def asked(self, request: Request, plan: Plan, dry: bool, changed: tuple[str, ...] = ()) -> None:
        if self.emit is None or not (self.whole or any(part.new or part.evictable for part in plan.groups)):
            return
        target, groups = plan.target, []
        first = not request.admitted
        for part in plan.groups:
            own = request.recurrent.get(part.group)
            # As if the running and scratch blocks were a table's last slots.
            held = (
                len(request.tables[part.group])
                if own is None
                else ceil(request.computed, self.config.mamba_block)
                if first
                else own.columns + self.config.speculative
            )
            groups.append(
                GroupEstimate(
                    group=part.group,
                    total=part.total,
                    evictable=part.evictable,
                    deferred=False,
                    partial=part.partial or part.copy >= 0,
                    checkpoint=part.checkpoint,
                    first=first,
                    held=held,
                    hits=len(target.hits[part.group]) if target.hits else 0,
                )
            )
        event = Estimate(
            request=request.name,
            dry=dry,
            tokens=target.end,
            computed=target.computed,
            groups=tuple(groups),
            free=len(self.pool.free),
            changed=changed,
        )
        self._estimates.append(event)
        self.emit(event)

    def refused(self, request: Request, reserved: int = 0) -> None:
        """There is no room for what was asked last, with ``reserved`` blocks left for others."""
        if self.emit is not None:
            estimates, self._estimates = tuple(self._estimates), []
            free = len(self.pool.free)
            self.emit(Allocate(request.name, False, taken=0, free_before=free, estimates=estimates, reserved=reserved))

    def granted(self, request: Request, plan: Plan, grant: Grant, free: int, reserved: int = 0) -> None:
        if self.emit is None or not (self.whole or self._estimates or plan.target.hits):
            return  # nothing was taken, and nothing was said of the question
        estimates, self._estimates = tuple(self._estimates), []
        self.resumed(request, plan.target)
        self.emit(
            Allocate(
                request=request.name,
                granted=True,
                taken=free - len(self.pool.free),
                free_before=free,
                estimates=estimates,
                new_blocks=tuple(grant.taken),
                evictable_hits=tuple(grant.touched),
                reserved=reserved,
            )
        )
