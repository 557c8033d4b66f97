"""HIT: what a lookup may answer, how its answer may be cut, and where a request may resume."""

from __future__ import annotations

from collections.abc import Sequence

from kvproof.invariants.invariant import Invariant, Verdict, at, ceil_div, violation
from kvproof.spec.config import Group
from kvproof.spec.events import Lookup, Observation, Resume, Truncate
from kvproof.spec.finding import Violation
from kvproof.spec.rules.hits import cut_right, hit_within, may_cut
from kvproof.spec.tracer import State, length_of, show
from kvproof.spec.view import NULL, View

Blocks = tuple[tuple[int, ...], ...]


def only_recurrent_short(observation: Observation) -> Verdict:
    event, config = observation.event, observation.view.config
    if not isinstance(event, Truncate):
        return None
    short: list[Violation] = []
    lagging = False
    for index, (group, blocks) in enumerate(zip(config.groups, event.before, strict=True)):
        wanted, recurrent = ceil_div(event.endpoint, group.block_size), group.kind == "mamba"
        lagging = lagging or (recurrent and len(blocks) < wanted)
        if not may_cut(wanted, len(blocks), recurrent, True):
            short.append(
                _cut(event, f"{group.kind}-short-{'refused' if event.error else 'accepted'}", index,
                     f"{group.kind} group {index} has {len(blocks)} of {wanted} blocks")
            )  # fmt: skip
        elif event.after is not None and not cut_right(wanted, len(blocks), len(event.after[index]), recurrent, True):
            short.append(_cut(event, f"{group.kind}-cut-wrong", index, f"{len(event.after[index])} blocks are left"))
    if short or not event.error:
        return short
    cause = "recurrent-short-refused" if lagging else "cut-refused"
    witness = f"every group that must cover it does, but the cut raised {event.error}"
    return (_cut(event, cause, -1, witness),)


def _cut(event: Truncate, cause: str, group: int, what: str) -> Violation:
    lengths = "/".join(str(len(blocks)) for blocks in event.before)
    witness = f"cutting {event.request}'s lookup ({lengths} blocks by group) to {event.endpoint} tokens: {what}"
    if group < 0:
        return violation("HIT.only-recurrent-short", cause, witness, request=event.request)
    return violation("HIT.only-recurrent-short", cause, witness, group=group, request=event.request)


def pure_view(observation: Observation) -> Verdict:
    event = observation.event
    if not isinstance(event, Truncate) or event.after is None:
        return None
    faults = {
        "cut-changes-references": event.references_changed,
        "cut-changes-input": event.input_changed,
        "cut-invents-blocks": any(
            after != before[: len(after)] for before, after in zip(event.before, event.after, strict=True)
        ),
    }
    return [
        violation(
            "HIT.pure-view",
            cause,
            f"cutting {event.request}'s lookup {event.before} to {event.endpoint} tokens left {event.after}: "
            f"{cause.replace('-', ' ')}",
            request=event.request,
        )
        for cause, happened in faults.items()
        if happened
    ]


def covers(observation: Observation) -> Verdict:
    event, config = observation.event, observation.view.config
    if isinstance(event, Lookup) and event.joint and event.tokens > 0:
        end, external = event.tokens, 0
    elif isinstance(event, Resume) and event.local > 0:
        end, external = event.local, event.external
    else:
        return None
    call = "lookup" if isinstance(event, Lookup) else "resume"
    broken: list[Violation] = []
    for index, (group, blocks) in enumerate(zip(config.groups, event.blocks, strict=True)):
        # An external load brings the state at the boundary, and moves windows on.
        slot = None if group.kind == "mamba" and external else _gap(group, blocks, end, end + external)
        if slot is None:
            continue
        how = "short" if slot >= len(blocks) else "null"
        what = f"has only {len(blocks)} blocks" if how == "short" else "has none there"
        witness = (
            f"{event.request}'s {call} of {end} tokens needs slot {slot} of {group.kind} group {index}, which {what}"
        )
        where = at(slot=slot, group=index, request=event.request)
        broken.append(violation("HIT.covers", f"{group.kind}-{how}-at-{call}", witness, **where))
    return broken


def _gap(group: Group, blocks: Sequence[int], end: int, computed: int) -> int | None:
    """The first slot that a hit of ``end`` tokens needs and has not: all, those in the window, or the last."""
    last = ceil_div(end, group.block_size) - 1
    first = last if group.kind == "mamba" else group.first_read(computed) // group.block_size
    return next((s for s in range(first, last + 1) if s >= len(blocks) or blocks[s] == NULL), None)


def resume_boundary(observation: Observation) -> Verdict:
    event, view = observation.event, observation.view
    if not isinstance(event, Resume) or event.external > 0 or event.local <= 0:
        return None
    states = _states(view, event)
    recurrent = [i for i, group in enumerate(view.config.groups) if group.kind == "mamba"]
    if not recurrent or states is None or len(states) <= event.local:
        return None
    boundary = states[event.local]
    broken: list[Violation] = []
    for index in recurrent:
        slot = ceil_div(event.local, view.config.groups[index].block_size) - 1
        block = event.blocks[index][slot] if slot < len(event.blocks[index]) else NULL
        keys = [key.state for key in view.keys(block) if key.group == index] if block != NULL else []
        if boundary in keys:
            continue
        which = "diverged-resume" if event.diverged else "resume"
        found = f"block {block} is keyed as {', '.join(map(show, keys)) or 'nothing'}" if block else "there is no block"
        witness = (
            f"{event.request} resumes at {event.local} tokens with nothing loaded and needs {show(boundary)} "
            f"in slot {slot} of group {index}, but {found}"
        )
        cause = f"{which}-{'with-other-state' if block else 'without-state'}"
        where = at(block=block, slot=slot, group=index, request=event.request)
        broken.append(violation("HIT.resume-boundary", cause, witness, **where))
    return broken


def promises(observation: Observation) -> Verdict:
    event, view = observation.event, observation.view
    if not isinstance(event, Lookup | Resume):
        return None
    states = event.states if isinstance(event, Lookup) else _states(view, event)
    end = event.tokens if isinstance(event, Lookup) else event.local
    if states is None:
        return None
    call = "lookup" if isinstance(event, Lookup) else "resume"
    judged = False
    broken: list[Violation] = []
    for index, group in enumerate(view.config.groups):
        for slot, block in enumerate(event.blocks[index]):
            if block == NULL:
                continue
            judged = True
            keys = [key.state for key in view.keys(block) if key.group == index]
            if any(_serves(group, states, slot, end, key) for key in keys):
                continue
            witness = (
                f"{event.request}'s {call} of {end} tokens returns block {block} for slot {slot} of group {index}, "
                f"which is keyed as {', '.join(map(show, keys)) or 'nothing'}"
            )
            cause = f"{group.kind}-hit-{'of-other-key' if keys else 'without-key'}-at-{call}"
            where = at(block=block, slot=slot, group=index, request=event.request)
            broken.append(violation("HIT.promises", cause, witness, **where))
    return broken if judged else None


def _serves(group: Group, states: Sequence[State], slot: int, end: int, key: State) -> bool:
    """Whether ``key`` on a hit block stands for the request's own prefix in that slot.

    A recurrent block is the one state at its key. An attention block may be keyed further than the hit goes: a lookup
    drops EAGLE's unit, or is cut to what another group has.
    """
    length, size = length_of(key), group.block_size
    if length >= len(states) or states[length] != key or ceil_div(length, size) - 1 != slot:
        return False
    return group.kind == "mamba" or length >= min(end, (slot + 1) * size)


def same_step(observation: Observation) -> Verdict:
    event, view = observation.event, observation.view
    if not isinstance(event, Resume):
        return None
    judged = False
    broken: list[Violation] = []
    for index, group in enumerate(view.config.groups):
        for slot, block in enumerate(event.blocks[index]):
            # Attention writes every request's tokens before any is read, so only recurrent blocks must wait.
            if block == NULL or group.kind != "mamba":
                continue
            judged = True
            if view.of_this_step(block):
                witness = (
                    f"{event.request} resumes from block {block} (slot {slot} of group {index}), "
                    "which is only written in this step"
                )
                where = at(block=block, slot=slot, group=index, request=event.request)
                broken.append(violation("HIT.same-step", "state-of-this-step-hit", witness, **where))
    return broken if judged else None


def limit(observation: Observation) -> Verdict:
    event = observation.event
    if isinstance(event, Lookup):
        if event.tokens == 0:
            return None
        total, depths, hit = len(event.states) - 1, (*event.depth, event.limit), event.tokens
    elif isinstance(event, Resume):
        states = _states(observation.view, event)
        if event.unread:
            where = f"{event.local} tokens of the cache and {event.external} of a store"
            witness = f"nothing of {event.request} may be read from a cache, but {where} count as computed"
            cause = f"{'store' if event.external else 'cache'}-read-for-unread"
            return (violation("HIT.limit", cause, witness, request=event.request),)
        if states is None or event.asynchronous:
            return None  # a load that is awaited may bring everything: what counts is settled when it has arrived
        total, depths, hit = len(states) - 1, (), event.local + event.external
    else:
        return None
    if hit_within(hit, total, depths):
        return ()
    if hit > total - 1:
        cause, why = "nothing-left-to-compute", f"it has {total} tokens"
    elif isinstance(event, Lookup) and hit > event.limit:
        cause, why = "hit-beyond-limit", f"the limit is {event.limit}"
    else:
        cause, why = "hit-deeper-than-a-group", f"the groups reach {', '.join(map(str, depths[:-1]))}"
    call = "lookup" if isinstance(event, Lookup) else "resume"
    witness = f"{event.request}'s {call} counts {hit} tokens as computed, but {why}"
    return (violation("HIT.limit", f"{cause}-at-{call}", witness, request=event.request),)


def _states(view: View, event: Resume) -> Sequence[State] | None:
    request = view.requests().get(event.request)
    return request.states if request is not None else None


ENTRIES = (
    Invariant(
        id="HIT.limit",
        statement="A hit leaves at least one token to compute, keeps to the limit it was asked for, and is no deeper "
        "than any group; where a request asks that nothing be read, there is none.",
        why="Nothing is left to sample from, tokens count as computed that no group has, or the log probabilities of a "
        "prompt are missing.",
        provenance=("PR 47861", "issue 47194", "PR 44599"),
        scope="call",
        events=(Lookup, Resume),
        predicate=limit,
        contaminates=True,
    ),
    Invariant(
        id="HIT.covers",
        statement="Every attention group covers an agreed hit with blocks as far as its window reaches, and every "
        "recurrent group has a block at its boundary, unless an external load brings the state.",
        why="Tokens count as computed whose blocks are fresh memory.",
        provenance=("PR 47861", "PR 43650", "issue 43559", "issue 47194"),
        scope="call",
        events=(Lookup, Resume),
        predicate=covers,
        contaminates=True,
    ),
    Invariant(
        id="HIT.promises",
        statement="Every block of a hit is keyed for the request's own prefix in that slot.",
        why="The request goes on from another conversation.",
        provenance=("issue 43559", "issue 43884"),
        scope="call",
        events=(Lookup, Resume),
        predicate=promises,
        contaminates=True,
    ),
    Invariant(
        id="HIT.only-recurrent-short",
        statement="A lookup result can be cut to any endpoint that its non-recurrent groups cover: recurrent groups "
        "may be short, others may not.",
        why="An assertion kills the engine, or a short attention group goes unnoticed.",
        provenance=("PR 51468", "PR 49502"),
        scope="call",
        events=(Truncate,),
        predicate=only_recurrent_short,
        contaminates=True,
    ),
    Invariant(
        id="HIT.pure-view",
        statement="Cutting a lookup result changes neither it nor any reference count, and only shortens it.",
        why="Blocks are counted for nobody, or a second look at the result sees something else.",
        provenance=("PR 51468",),
        scope="call",
        events=(Truncate,),
        predicate=pure_view,
        contaminates=True,
    ),
    Invariant(
        id="HIT.resume-boundary",
        statement="A request that resumes without external tokens has, in every recurrent group, the state at exactly "
        "that boundary.",
        why="The recurrent layers resume from the wrong position or from nothing: wrong text, silently.",
        provenance=("PR 50344", "PR 51468", "issue 53505", "PR 54302"),
        scope="request",
        events=(Resume,),
        predicate=resume_boundary,
        contaminates=True,
    ),
    Invariant(
        id="HIT.same-step",
        statement="No request resumes from a recurrent state that is only written in the same step.",
        why="It reads the block before it is written.",
        provenance=("PR 34418", "PR 29387"),
        scope="call",
        events=(Resume,),
        predicate=same_step,
        contaminates=True,
    ),
)
