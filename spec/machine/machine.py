"""The abstract machine: guarded actions on worlds.

Each action has a guard (what must be so for it to happen) and an effect. They are composed from the rules that are
proved for all sizes; what they add is order: who is asked first, what is given back when, and what a step makes of it.

What can happen to a cache: a request is *submitted*; a *step* is taken, in which requests are admitted, advanced and
preempted (:mod:`kvproof.spec.machine.schedule`), the device runs (:mod:`kvproof.spec.machine.device`), and what was
sampled is taken in; the model *finishes* a request; a client *aborts* it; an operator *resets* the cache; and, from
outside what any of these can cause, a request is *preempted* and free blocks are *evicted*. An external store's offers
are part of admission, its loads arrive with a later step, whole or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvproof.spec.config import Config
from kvproof.spec.events import Event, Loaded, Observation, StepEnd
from kvproof.spec.machine import pool, unmoved
from kvproof.spec.machine.blocks import key, retire
from kvproof.spec.machine.device import Device, next_token
from kvproof.spec.machine.dialect import SPECIFICATION, Dialect
from kvproof.spec.machine.schedule import Row, Schedule, Step, preempt, release_all, remove
from kvproof.spec.machine.sizes import Sizes
from kvproof.spec.machine.view import MachineView
from kvproof.spec.machine.world import ARRIVED, LOADING, RUNNING, WAITING, Request, World
from kvproof.spec.subject import Observer
from kvproof.spec.tracer import State, advance
from kvproof.spec.view import NULL

END = 7
"""The token with which a model ends a request."""


class Machine:
    """One world under one configuration. Actions change :attr:`world`; each answers whether its guard held.

    ``observer`` is told of everything that predicates judge; without one nothing is reported, and nothing is slower for
    it. ``branches``: after a rejected draft the model says something else than it would have said without the draft
    (any model may: which of several likely tokens it draws is its affair).
    """

    def __init__(
        self,
        config: Config,
        observer: Observer | None = None,
        *,
        branches: bool = True,
        dialect: Dialect = SPECIFICATION,
    ) -> None:
        self.sizes = Sizes(config, dialect)
        self.config = config
        self.world = World.empty(config)
        self.view = MachineView(config, self.world)
        self.observer = observer
        self.branches = branches
        self.steps = 0
        self.scheduled: tuple[Row, ...] = ()
        """What the last step ran."""

    def become(self, world: World) -> None:
        """Go on from another world, which is changed from here on."""
        self.world = self.view.world = world

    def emit(self, event: Event) -> None:
        if self.observer is not None:
            self.observer(Observation(event, self.view))

    # -- requests come and go -----------------------------------------------------------------------------------------

    def submit(self, name: str, states: Sequence[State], max_tokens: int, store: int = 0, missing: int = 0) -> bool:
        """``name`` arrives with the prompt whose prefixes are ``states``. Guard: there is no request of that name, the
        prompt has a token, and there is room for one more."""
        length = len(states) - 1
        if not 0 < length < self.config.max_model_len or self.world.find(name) is not None:
            return False
        outputs = max(1, min(max_tokens, self.config.max_model_len - length))
        request = Request(name, list(states), length, outputs, min(store, length), missing)
        request.strip(len(self.config.groups))
        self.world.waiting.append(request)
        if self.observer is not None:
            self.view.learn(request.states)
        return True

    def finish(self, name: str) -> bool:
        """The model ends the request with its next token. Guard: it is there."""
        request = self.world.find(name)
        if request is not None:
            request.finishing = True
        return request is not None

    def abort(self, name: str) -> bool:
        """The client goes away. Guard: the request is there. Blocks that a load still writes to wait for it."""
        request = self.world.find(name)
        if request is None:
            return False
        world = self.world
        for queue in (world.running, world.loading, world.waiting):
            if request in queue:
                queue.remove(request)
        if request.status == LOADING:
            if self.sizes.dialect.moves_states:
                retire(world, self.sizes, request, request.computed)
            world.flights = [
                replace(flight, orphan=True) if flight.request == name else flight for flight in world.flights
            ]
        else:
            remove(world, self.sizes, request)
        return True

    # -- the cache is interfered with ---------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Every key is forgotten. Guard: no block is in use."""
        world = self.world
        if len(world.queue) < self.config.num_blocks - 1:
            return False
        for block in range(self.config.num_blocks):
            pool.forget(world, block)
        return True

    def evict(self, count: int) -> bool:
        """The first ``count`` free blocks (0: all) lose their keys."""
        free = len(self.world.queue)
        taken = pool.take(self.world, min(count or free, free))
        pool.release(self.world, list(reversed(taken)))
        return True

    def preempt(self, name: str) -> bool:
        """A running request loses its blocks and waits again. Guard: it runs."""
        request = self.world.find(name)
        if request is None or request.status != RUNNING:
            return False
        preempt(self.world, self.sizes, request)
        return True

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self, accept: Sequence[int] = ()) -> bool:
        """Schedule, run, take in what was sampled. Guard: there is a request, or a load on its way.

        ``accept`` says how many drafts the model agrees with, for each row in order, cycled; none given: all of them.
        """
        world = self.world
        if self.view.idle():
            return False
        self.steps += 1
        if self.observer is not None:
            world.due = {block: frozenset(keys) for block, keys in enumerate(world.keys) if keys}
        step = Schedule(world, self.sizes, self.emit if self.observer is not None else None).run()
        right = [self._right(row, index, accept) for index, row in enumerate(step.rows)]
        device = Device(world, self.sizes, self.view if self.observer is not None else None)
        device.run(step, right)
        landed = [flight for flight in world.flights if flight.steps <= 1]
        world.flights = [replace(flight, steps=flight.steps - 1) for flight in world.flights if flight.steps > 1]
        for flight in landed:
            device.load(flight)
        world.due = None
        for row, forward in zip(step.rows, device.forwards, strict=False):
            if row.load is None or not row.load.missing:  # what ran without its load is thrown away
                self.emit(forward)
        world.deferred = None if self.sizes.dialect.frees_at_once else []
        for row, accepted in zip(step.rows, right, strict=True):
            self._take_in(row, accepted)
        for flight in landed:
            self._land(flight.request, flight.missing, flight.start, flight.end, flight.orphan, flight.tables)
        if world.deferred is not None:
            pool.release(world, world.deferred)
            world.deferred = None
        self.scheduled = tuple(step.rows)
        if self.observer is not None:
            self._tell_end(step)
        world.touched = set()
        return True

    def _right(self, row: Row, index: int, accept: Sequence[int]) -> int:
        """How many of a row's drafts the model agrees with."""
        if row.wrong or row.request.finishing or not row.drafts:
            return 0
        wanted = accept[index % len(accept)] if accept else row.drafts
        return min(wanted, row.drafts)

    def _take_in(self, row: Row, accepted: int) -> None:
        """What was sampled becomes known; rejected drafts are taken back; whoever is done goes."""
        request = row.request
        if row.load is not None and row.load.missing:
            self._lost(request)
            return
        if row.end - row.drafts < request.known:  # not done with what is known: nothing was sampled
            self._settle(row)
            return
        request.computed -= row.drafts - accepted
        done = self._sample(request, accepted, row.drafts > accepted)
        if self.observer is not None:
            self.view.learn(request.states)
        if self.config.speculative:
            if self.sizes.dialect.keys_accepted and self.sizes.dialect.keys_ahead:
                key(self.world, self.sizes, request, request.computed)
            request.drafts = self.config.speculative
        self._settle(row)
        if done:
            self.world.running.remove(request)
            remove(self.world, self.sizes, request)

    def _settle(self, row: Row) -> None:
        """Where keys are not made ahead and states are not moved: what the row's forward has left behind."""
        world, sizes, request = self.world, self.sizes, row.request
        if sizes.dialect.moves_states:
            return
        unmoved.key_attention(world, sizes, request, 0 if row.first else row.start)
        if row.load is not None:
            unmoved.key_loaded(world, sizes, request, row.start)
        ends = range(row.end - row.drafts, row.end + 1)
        unmoved.settle(world, sizes, request, ends, row.places)

    def _sample(self, request: Request, accepted: int, rejected: bool) -> bool:
        """Append what the model said. True if that ends the request; what it said after its end does not count."""
        state = request.states[-1]
        for index in range(accepted + 1):
            last = index == accepted
            token = END if request.finishing else next_token(state) + (last and rejected and self.branches)
            state = advance(state, token)
            request.states.append(state)
            outputs = request.known - request.prompt
            if token == END or outputs >= request.max_tokens or request.known >= self.config.max_model_len:
                if self.sizes.dialect.rewinds_at_end:
                    request.computed -= accepted - index
                return True
        return False

    def _land(
        self, name: str, missing: int, start: int, end: int, orphan: bool, tables: Sequence[Sequence[int]]
    ) -> None:
        """A load is over. If all of it came, its tokens count from now on; if not, nothing that it was to bring is
        there to resume from. Blocks of a request that has gone are free now."""
        request, moved = self.world.find(name), self.sizes.dialect.moves_states
        if orphan and not moved:
            order = [*self.sizes.attention, *self.sizes.recurrent]
            pool.release(self.world, [block for group in order for block in reversed(tables[group])])
            return
        if orphan:
            for table in tables:
                pool.release(self.world, list(reversed(table)))
            return
        assert request is not None
        if missing:
            request.store = 0  # it is not asked again
            release_all(self.world, self.sizes, request)
            if request in self.world.loading:
                self.world.loading.remove(request)
                self.world.waiting.insert(0, request)
            request.status = WAITING
        else:
            request.status = ARRIVED
            if not moved:
                unmoved.key_attention(self.world, self.sizes, request, 0)
                unmoved.key_loaded(self.world, self.sizes, request, request.computed)
        self.emit(Loaded(name, start, end, end - missing, request.computed))

    def _lost(self, request: Request) -> None:
        """A load within the step did not come: what the step keyed on the strength of it is forgotten."""
        request.store = 0
        for table in request.tables if self.sizes.dialect.keys_ahead else ():
            for block in table:
                if block != NULL and self.world.references[block] == 1:
                    pool.forget(self.world, block)
        preempt(self.world, self.sizes, request)

    def _tell_end(self, step: Step) -> None:
        self.emit(
            StepEnd(
                index=self.steps,
                scheduled=tuple(row.request.name for row in step.rows),
                running=tuple(request.name for request in self.world.running),
                waiting=tuple(request.name for request in (*self.world.loading, *self.world.waiting)),
            )
        )
