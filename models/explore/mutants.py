"""Faults planted in the abstract machine: each must be found, by a shortest way, in a small world.

A mutant is either one of the ways in which releases do otherwise (a switch of the dialect), or one function of the
machine replaced by a wrong one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvproof.models.explore.scope import Scope
from kvproof.models.explore.scopes import SCOPES
from kvproof.spec.machine import blocks, device, lookup, machine, pool, schedule
from kvproof.spec.machine.dialect import SPECIFICATION
from kvproof.spec.machine.world import LOADING, WAITING

Plant = Callable[[Any], Any]
"""Makes the wrong function of the right one."""


@dataclass(frozen=True)
class Mutant:
    """``scope`` is the world that shows it. ``off`` is the switch that is off, or ``place`` the modules or classes in
    which the function ``name`` is replaced."""

    id: str
    statement: str
    scope: str
    off: str = ""
    place: tuple[Any, ...] = ()
    name: str = ""
    plant: Plant | None = None

    def world(self) -> Scope:
        """The scope, in the mutant's dialect."""
        scope = SCOPES[self.scope]
        return replace(scope, dialect=replace(SPECIFICATION, **{self.off: False})) if self.off else scope

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """The machine is wrong meanwhile."""
        kept = [(where, getattr(where, self.name)) for where in self.place]
        try:
            for where, right in kept:
                assert self.plant is not None
                setattr(where, self.name, self.plant(right))
            yield
        finally:
            for where, right in kept:
                setattr(where, self.name, right)


def _takes_with_keys(right: Any) -> Any:
    def take(world: Any, count: int) -> Any:
        first = world.queue[:count]
        kept = [list(world.keys[block]) for block in first]
        taken = right(world, count)
        for block, keys in zip(first, kept, strict=True):
            for key in keys:
                pool.register(world, block, key)
        return taken

    return take


def _leaves_hit_in_queue(right: Any) -> Any:
    def touch(world: Any, hit: Any) -> None:
        queue = list(world.queue)
        right(world, hit)
        world.queue[:] = queue

    return touch


def _frees_one_too_many(right: Any) -> Any:
    return lambda world, sizes, request, computed: right(world, sizes, request, computed + sizes.block)


def _keys_and_writes_on(right: Any) -> Any:
    def key_state(world: Any, sizes: Any, request: Any, upto: int, group: int) -> None:
        before = request.partial[group]
        right(world, sizes, request, upto, group)
        request.partial[group] = before

    return key_state


def _forgets_states(right: Any) -> Any:
    def release_all(world: Any, sizes: Any, request: Any) -> None:
        for group in sizes.recurrent:
            request.tables[group] = []
        right(world, sizes, request)

    return release_all


def _keeps_count(right: Any) -> Any:
    def release_all(world: Any, sizes: Any, request: Any) -> None:
        computed = request.computed
        right(world, sizes, request)
        if request.status != LOADING:
            request.computed = computed

    return release_all


def _copies_keys(right: Any) -> Any:
    def move_keys(world: Any, source: int, target: int) -> None:
        for key in list(world.keys[source]):
            pool.register(world, target, key)

    return move_keys


def _frees_under_a_load(right: Any) -> Any:
    def abort(self: Any, name: str) -> Any:
        request = self.world.find(name)
        if request is not None and request.status == LOADING:
            request.status = WAITING
            self.world.flights = [
                replace(flight, orphan=True) if flight.request == name else flight for flight in self.world.flights
            ]
        return right(self, name)

    return abort


def _trusts_every_load(right: Any) -> Any:
    return lambda self, name, missing, *rest: right(self, name, 0, *rest)


def _charges_no_copy(right: Any) -> Any:
    def charge(*arguments: Any) -> Any:
        answer = right(*arguments)
        return replace(answer, total=answer.total - 1) if answer.partial and not answer.deferred else answer

    return charge


MUTANTS: tuple[Mutant, ...] = (
    Mutant("external-state-for-free", "the block of an external load's state is not asked for", "at-once",
           off="charges_external_state"),
    Mutant("copy-before-it-is-written", "a tail that this step writes is copied in this step", "tails",
           off="waits_for_copied_tail"),
    Mutant("ends-off-a-boundary", "chunk ends are aligned up to the last cacheable position only (PR 51113)",
           "acceptance", off="stops_in_every_block"),
    Mutant("padded-beyond-the-model", "a request is padded to a step that the model length has no room for",
           "acceptance", off="pads_where_room"),
    Mutant("asked-apart-for-any-store", "attention's hit is taken alone for a store that brings no state (PR 50344)",
           "acceptance", off="asks_apart_when_told"),
    Mutant("cap-instead-of-need", "a step is charged the cap where it needs less (PR 57050)", "tiny",
           off="charges_what_is_due"),
    Mutant("taken-with-keys", "a block that is taken keeps its keys", "tiny", place=(pool,), name="take",
           plant=_takes_with_keys),
    Mutant("hit-stays-queued", "a hit block stays in the free queue", "tiny", place=(pool,), name="touch",
           plant=_leaves_hit_in_queue),
    Mutant("running-state-retired", "the running state's block is given back", "tiny", place=(blocks, schedule),
           name="retire", plant=_frees_one_too_many),
    Mutant("keyed-tail-written", "a running block keyed inside is written on, without a copy", "tiny", place=(blocks,),
           name="_key_state", plant=_keys_and_writes_on),
    Mutant("same-step-hit", "a state is hit in the step that makes it", "tiny", place=(blocks,), name="_made_now",
           plant=lambda right: lambda world, block: False),
    Mutant("states-leaked", "a request that goes leaves its state blocks behind", "tiny", place=(schedule, machine),
           name="release_all", plant=_forgets_states),
    Mutant("preempted-not-rewound", "a preempted request counts its tokens as computed", "drafts",
           place=(schedule, machine), name="release_all", plant=_keeps_count),
    Mutant("keys-copied", "the key of a moved tail stays on the block that is written on", "tiny", place=(pool,),
           name="move_keys", plant=_copies_keys),
    Mutant("whole-prompt-hit", "a lookup leaves no token to compute", "tiny", place=(lookup,), name="hit_limit",
           plant=lambda right: lambda tokens: tokens),
    Mutant("boundary-not-saved", "a boundary that accepted drafts cross is not saved", "drafts",
           place=(device.Device,), name="_keep", plant=lambda right: lambda self, row, accepted: []),
    Mutant("copy-not-charged", "the copy of a tail inside a block is not asked for", "tiny", place=(blocks,),
           name="_recurrent_charge", plant=_charges_no_copy),
    Mutant("freed-under-a-load", "blocks that a load still writes to are freed with their request", "store",
           place=(machine.Machine,), name="abort", plant=_frees_under_a_load),
    Mutant("load-trusted", "a load that fell short counts as whole", "acceptance", place=(machine.Machine,),
           name="_land", plant=_trusts_every_load),
)  # fmt: skip
