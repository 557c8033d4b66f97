"""TAIL: the one state from which a conversation can be resumed stays while the conversation lives."""

from __future__ import annotations

from collections import Counter

from kvproof.invariants.invariant import Invariant, Verdict, at, violation, whole_pool
from kvproof.spec.events import Drained, Observation, StepEnd
from kvproof.spec.tracer import show


def newest_held(observation: Observation) -> Verdict:
    view = observation.view
    tails = view.tails()
    if not tails:
        return None
    running, lookups = view.requests(), view.lookup_map()
    broken = []
    judged = False
    for (name, group), (position, block) in tails.items():
        request = running.get(name)
        if request is None:
            continue
        judged = True
        state = request.states[position]
        keyed = block in lookups.get((group, state), ())
        if keyed and view.references(block) > 0:
            continue
        if view.references(block) <= 0:
            cause, why = "newest-state-evictable", "nobody holds: the next request that needs a block takes it"
        else:
            cause, why = "newest-state-not-keyed", f"is not keyed as {show(state)}: no lookup finds it"
        witness = f"{name} can be resumed at {position} tokens in group {group} from block {block}, which {why}"
        where = at(block=block, group=group, request=name)
        broken.append(violation("TAIL.newest-held", cause, witness, **where))
    return broken if judged else None


def one_hold(observation: Observation) -> Verdict:
    if not whole_pool(observation):
        return None
    holds = Counter(holder.owner for holder in observation.view.holders() if holder.owner.startswith("hold "))
    if not holds:
        return None
    broken = []
    for owner, count in holds.items():
        if count > 1:
            witness = f"{owner.removeprefix('hold ')} holds {count} checkpoints; only the newest is of use"
            name, _, group = owner.removeprefix("hold ").rpartition("/")
            where = at(group=int(group), request=name)
            broken.append(violation("TAIL.one-hold", "older-checkpoint-kept", witness, **where))
    return broken


_PATCH = (
    "design rule of a downstream patch of 2026-10-06, which is not in vLLM up to 0.33.0; no public change or issue is "
    "known to have it",
)

ENTRIES = (
    Invariant(
        id="TAIL.newest-held",
        statement="The newest state that a living request left, or resumed from, is keyed and cannot be evicted.",
        why="The next turn of the conversation hits nothing, although all its attention blocks are cached.",
        provenance=_PATCH,
        scope="request",
        events=(StepEnd,),
        predicate=newest_held,
        contaminates=False,
    ),
    Invariant(
        id="TAIL.one-hold",
        statement="A request holds at most one checkpoint per recurrent group.",
        why="Long conversations take the pool away from everybody else, block by block.",
        provenance=_PATCH,
        scope="request",
        events=(StepEnd, Drained),
        predicate=one_hold,
        contaminates=False,
    ),
)
