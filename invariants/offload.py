"""EXT, where blocks leave the cache: what a store takes for a key must be that key's, and what it holds must serve."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvproof.invariants.content import key_mismatch
from kvproof.invariants.invariant import Invariant, Verdict, at, ceil_div, violation
from kvproof.spec.config import Config
from kvproof.spec.events import Observation, Offer, Offloaded
from kvproof.spec.tracer import State, length_of, show
from kvproof.spec.view import NULL, Key

Held = Collection[tuple[int, State]]


def offload_content(observation: Observation) -> Verdict:
    event, view = observation.event, observation.view
    if not isinstance(event, Offloaded):
        return None
    how, where = event.moment, at(block=event.block, group=event.group)
    if event.block == NULL:
        witness = f"the null block is {how} as {show(event.state)} for group {event.group}"
        return (violation("EXT.offload-content", f"{how}-null", witness, **where),)
    mismatch = key_mismatch(view, event.block, Key(event.group, event.state, length_of(event.state)))
    if isinstance(mismatch, bool):
        return () if mismatch else None
    # The words are those of a key in the cache; here it is one in a store, or one that a store is given.
    witness = mismatch.witness.replace("is keyed as", f"is {how} as", 1)
    cause = f"{how}-{mismatch.cause}"
    if how == "copied":  # it was right when it was chosen: what lies there now depends on the run, not on the fault
        recurrent = view.config.groups[event.group].kind == "mamba"
        cause = f"{'state' if recurrent else 'attention'}-overwritten-before-copy"
    return (violation("EXT.offload-content", cause, witness, **where),)


def offload_offers(observation: Observation) -> Verdict:
    event, config = observation.event, observation.view.config
    if not isinstance(event, Offer) or not event.offered:
        return None
    end, total = event.local + event.offered, len(event.states) - 1
    recurrent = [group for group in _groups(config) if config.groups[group].kind == "mamba"]
    offer = f"{event.request} has {event.local} of {total} tokens and is offered {event.offered} more"
    if recurrent and end > total - 1:
        witness = f"{offer}: its last token would be put into a state that has it already"
        return (violation("EXT.offload-offers", "leaves-nothing-to-compute", witness, request=event.request),)
    broken = []
    for group in recurrent:
        if (group, event.states[end]) not in event.held:
            witness = f"{offer}, but no state of group {group} at {end} is held"
            where = at(group=group, request=event.request)
            broken.append(violation("EXT.offload-offers", "offers-boundary-without-state", witness, **where))
    for group in _groups(config):
        size, full = config.groups[group].block_size, config.groups[group].kind == "full"
        lacking = [n for n in range((event.local // size + 1) * size, end + 1, size) if full
                   and (group, event.states[n]) not in event.held]  # fmt: skip
        if lacking:
            witness = f"{offer}, but the block of group {group} that ends at {lacking[0]} is not held"
            where = at(group=group, request=event.request)
            broken.append(violation("EXT.offload-offers", "offers-attention-it-lacks", witness, **where))
    return broken


def offload_serves(observation: Observation) -> Verdict:
    event, config = observation.event, observation.view.config
    if not isinstance(event, Offer) or event.offered is None:
        return None
    depth = servable(config, event.states, event.local, event.held)
    if depth <= event.local:
        return None
    if event.local + event.offered >= depth:
        return ()
    cause = "holds-but-offers-nothing" if not event.offered else "holds-more-than-it-offers"
    witness = (
        f"{event.request} has {event.local} tokens, and the store holds all that is needed to resume at {depth}, "
        f"but it offers {event.offered}"
    )
    return (violation("EXT.offload-serves", cause, witness, request=event.request),)


def servable(config: Config, states: Sequence[State], local: int, held: Held) -> int:
    """The furthest scheduler block at which ``states`` could resume from ``local`` tokens and what is ``held``, or 0.

    One token is left to compute. Drafters drop the last block of attention, so with EAGLE one more is asked for.
    """
    block = config.scheduler_block
    total = len(states) - 1
    for end in range((total - 1) // block * block, local, -block):
        proof = end + block if config.eagle else end
        if proof <= total and all(_held(config, group, states, local, end, proof, held) for group in _groups(config)):
            return end
    return 0


def _groups(config: Config) -> range:
    return range(len(config.groups))


def _held(config: Config, group: int, states: Sequence[State], local: int, end: int, proof: int, held: Held) -> bool:
    spec = config.groups[group]
    if spec.kind == "mamba":
        return (group, states[end]) in held
    size = spec.block_size
    window = (ceil_div(spec.window, size) + config.eagle) * size  # whole blocks, and one for drafters to drop
    first = local if spec.kind == "full" else max(local, end - window)
    boundaries = range((first // size + 1) * size, proof + 1, size)
    return all((group, states[boundary]) in held for boundary in boundaries)


ENTRIES = (
    Invariant(
        id="EXT.offload-content",
        statement="A block that is stored outside the cache, or handed over for that, holds what its key promises.",
        why="The wrong state comes back in another turn, or on another machine: wrong text, silently, and for long.",
        provenance=("PR 51358", "issue 53084"),
        scope="block",
        events=(Offloaded,),
        predicate=offload_content,
        contaminates=True,
    ),
    Invariant(
        id="EXT.offload-offers",
        statement="What a store offers up to a boundary it holds: every block of full attention, and the recurrent "
        "state of exactly that boundary, with a token left to put into it.",
        why="The request goes on from a state that has seen other tokens: wrong text, silently.",
        provenance=("PR 44599", "issue 51094"),
        scope="request",
        events=(Offer,),
        predicate=offload_offers,
        contaminates=True,
    ),
    Invariant(
        id="EXT.offload-serves",
        statement="A store that holds all that is needed to resume at a boundary offers at least that.",
        why="Host memory fills and never helps: every turn is computed again, and nothing says so.",
        provenance=("issue 52735", "PR 52771"),
        scope="request",
        events=(Offer,),
        predicate=offload_serves,
        contaminates=False,
    ),
)
