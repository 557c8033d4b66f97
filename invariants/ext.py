"""EXT: external loads. What a store fails to bring must not count, and what it still writes to must not be reused."""

from __future__ import annotations

from kvproof.invariants.invariant import Invariant, Verdict, at, violation
from kvproof.spec.events import Loaded, Observation, StepEnd, Zeroing


def counts_what_came(observation: Observation) -> Verdict:
    event = observation.event
    if not isinstance(event, Loaded):
        return None
    # A state can't be cut: without all of its tokens a load has none, and only attention alone could go on from less.
    recurrent = any(group.kind == "mamba" for group in observation.view.config.groups)
    whole = event.received >= event.claimed
    most = event.claimed if whole else event.start if recurrent else event.received
    if event.counted <= most:
        return ()
    what = "with all that it claimed" if whole else f"at {event.received} of {event.claimed} tokens"
    witness = f"the load for {event.request} ended {what}, yet {event.counted} tokens count as computed"
    cause = "counts-beyond-claim" if whole else "counts-what-never-came"
    return (violation("EXT.counts-what-came", cause, witness, request=event.request),)


def in_flight_held(observation: Observation) -> Verdict:
    view = observation.view
    arriving = view.arriving()
    if not arriving:
        return None
    broken = []
    for request, blocks in arriving.items():
        for block in sorted(blocks):
            if view.references(block) > 0:
                continue
            witness = f"a load for {request} is still writing to block {block}, which nobody holds"
            where = at(block=block, request=request)
            broken.append(violation("EXT.in-flight-held", "block-of-load-in-flight-free", witness, **where))
    return broken


def zero_spares_load(observation: Observation) -> Verdict:
    event = observation.event
    if not isinstance(event, Zeroing):
        return None
    arriving = observation.view.arriving()
    if not arriving or not event.blocks:
        return None
    wiped = set(event.blocks)
    return [
        violation(
            "EXT.zero-spares-load",
            "block-of-load-wiped",
            f"block {block} is wiped while a load for {request} writes to it",
            block=block,
            request=request,
        )
        for request, blocks in arriving.items()
        for block in sorted(wiped.intersection(blocks))
    ]


def rest_wiped(observation: Observation) -> Verdict:
    event = observation.event
    if not isinstance(event, Loaded) or not event.partly:
        return None
    return [
        violation(
            "EXT.rest-wiped",
            "rest-of-loaded-block-dirty",
            f"the load for {event.request} ended inside block {block}, the rest of which was not wiped for it",
            block=block,
            request=event.request,
        )
        for block in event.unwiped
    ]


ENTRIES = (
    Invariant(
        id="EXT.counts-what-came",
        statement="After an external load no more tokens count as computed than it brought, state included.",
        why="The request goes on from fresh memory: wrong text, silently.",
        provenance=("PR 50630", "PR 51468"),
        scope="request",
        events=(Loaded,),
        predicate=counts_what_came,
        contaminates=True,
    ),
    Invariant(
        id="EXT.in-flight-held",
        statement="A block that a load in flight writes to is held until the load is over, whatever becomes of its "
        "request.",
        why="The block is handed out, and the late load overwrites another conversation.",
        provenance=("PR 50630",),
        scope="block",
        events=(StepEnd,),
        predicate=in_flight_held,
        contaminates=True,
    ),
    Invariant(
        id="EXT.zero-spares-load",
        statement="No step wipes a block that an external load in flight writes to.",
        why="The wipe and the transfer are not ordered: what arrived before it is gone, and counts as loaded.",
        provenance=("PR 48481",),
        scope="block",
        events=(Zeroing,),
        predicate=zero_spares_load,
        contaminates=True,
    ),
    Invariant(
        id="EXT.rest-wiped",
        statement="Of an attention block that an external load fills in part, the rest has been wiped, where blocks "
        "are shared with recurrent groups.",
        why="Kernels read whole pages: what was a recurrent state, read as keys and values, is not a number.",
        provenance=("PR 48481", "PR 55085"),
        scope="block",
        events=(Loaded,),
        predicate=rest_wiped,
        contaminates=False,
    ),
)
