"""SLOT: what blocks hold, what their keys promise, and what a forward reads and writes."""

from __future__ import annotations

from functools import lru_cache

from kvproof.invariants.content import Mismatch, key_mismatch, relation, token_relation
from kvproof.invariants.invariant import Invariant, Verdict, at, ceil_div, due_blocks, violation
from kvproof.spec.config import Config
from kvproof.spec.events import Drained, Forward, Observation, Read, Split, StepEnd
from kvproof.spec.finding import Violation
from kvproof.spec.radix import Position, Radix
from kvproof.spec.rules.checkpoint import checkpoint_position, export_valid, on_alignment
from kvproof.spec.rules.chunk import may_end_at
from kvproof.spec.tracer import length_of, show
from kvproof.spec.view import NULL, View


def key_content(observation: Observation) -> Verdict:
    view = observation.view
    broken: list[Violation] = []
    judged = False
    for block in due_blocks(observation):
        keys = view.keys(block)
        if not keys or view.pending(block):
            continue
        for key in keys:
            if not 0 <= key.group < len(view.config.groups):
                continue  # SLOT.key-length names it
            found = key_mismatch(view, block, key)
            judged = judged or found is not False
            if isinstance(found, Mismatch):
                broken.append(violation("SLOT.key-content", found.cause, found.witness, block=block, group=key.group))
    return broken if judged else None


def key_length(observation: Observation) -> Verdict:
    view = observation.view
    config = view.config
    broken: list[Violation] = []
    judged = False
    for block in due_blocks(observation):
        for key in view.keys(block):
            judged = True
            length = length_of(key.state)
            cause = ""
            if not 0 <= key.group < len(config.groups):
                cause, why = "key-of-no-group", f"there is no group {key.group}"
            elif key.tokens != length:
                cause, why = "noted-length-differs", f"the cache notes {key.tokens} tokens for it"
            elif length == 0 or length % config.hash_unit:
                cause, why = "key-off-unit", f"{length} is not on a hash unit of {config.hash_unit}"
            if cause:
                witness = f"block {block} is keyed as {show(key.state)} for group {key.group}, but {why}"
                broken.append(violation("SLOT.key-length", cause, witness, block=block, group=key.group))
    return broken if judged else None


def key_slot(observation: Observation) -> Verdict:
    view = observation.view
    config = view.config
    keyed = {block: keys for block in due_blocks(observation) if (keys := view.keys(block))}
    if not keyed:
        return None
    broken: list[Violation] = []
    judged = False
    for _, block, request, group, slot in view.holders_of(keyed):
        if group < 0 or slot < 0:
            continue
        size = config.groups[group].block_size
        # A checkpoint is exported into the column before the chunk's last one, which may lie before its own; with
        # EAGLE's drop it is a unit earlier, so that the column may lie behind its own as well.
        early = 1 if config.groups[group].kind == "mamba" and config.checkpoint_blocks else 0
        late = early if config.eagle else 0
        for key in keyed[block]:
            judged = True
            own = ceil_div(length_of(key.state), size) - 1
            promise = f"block {block}, keyed as {show(key.state)} for group {key.group},"
            cause = ""
            if key.group != group:
                cause, witness = "key-of-other-group", f"{promise} lies in {request}'s table of group {group}"
            elif not own - early <= slot <= own + late:
                cause = "key-in-other-slot"
                witness = f"{promise} lies in slot {slot} of {request}'s table instead of slot {own}"
            if cause:
                where = at(block=block, slot=slot, group=group, request=request)
                broken.append(violation("SLOT.key-slot", cause, witness, **where))
    return broken if judged else None


_may_end = lru_cache(maxsize=1 << 14)(may_end_at)
"""The rule, remembered: a run asks about the same few chunks again and again."""


def chunk_end(observation: Observation) -> Verdict:
    event, config = observation.event, observation.view.config
    block, unit = config.mamba_block, config.hash_unit
    if not isinstance(event, Split) or event.granted <= 0 or event.start >= event.prefill_end or not block:
        return None
    start, end = event.start, event.start + event.granted
    if _may_end(block, unit, start, end, event.prefill_end, event.stops, event.limit, False):
        return ()
    # Only an export makes a difference from here on, and whether one is possible takes longer to tell.
    exports = config.checkpoint_blocks > 0 and may_export(config, start, end)
    if exports and _may_end(block, unit, start, end, event.prefill_end, event.stops, event.limit, True):
        return ()
    crosses = start % block != 0 and end > (start // block + 1) * block
    what = f"the chunk [{start}, {end}) of {event.request}'s prefill to {event.prefill_end}, blocks of {block},"
    if crosses:
        cause, witness = "chunk-crosses-boundary", f"{what} starts inside a block and runs past its end"
    else:
        cause = "chunk-ends-off-boundary"
        stops = f" ({', '.join(map(str, event.stops))})" if event.stops else ""
        witness = f"{what} ends inside a block and on no declared stop{stops}"
    return (violation("SLOT.chunk-end", cause, witness, request=event.request, slot=ceil_div(end, block) - 1),)


def may_export(config: Config, start: int, end: int) -> bool:
    """Whether some backend exports a checkpoint from the chunk [start, end).

    Releases count the position in hash units or in what hits align to, and drop EAGLE's unit from the whole length or
    from length − 1: any of these is accepted here, since what the exported block is keyed as is judged by its content.
    """
    radix = Radix.of(config.mamba_block, config.hash_unit)
    first, last = Position.on(start, radix), Position.on(end, radix)
    for drop in {config.eagle, False}:
        for whole_blocks in {not config.partial_hits, False}:
            for length in {last, last.minus(radix.one_token())}:
                position = checkpoint_position(length, drop, whole_blocks)
                aligned = on_alignment(start, position.value(), config.checkpoint_alignment)
                if export_valid(first, last, position, aligned):
                    return True
    return False


def running_state(observation: Observation) -> Verdict:
    event, view = observation.event, observation.view
    if not isinstance(event, Forward) or event.start == 0:
        return None
    broken: list[Violation] = []
    judged = False
    for read in event.reads:
        if read.recurrent:
            judged = True
            if not read.found == read.window == read.expected:
                broken.append(_wrong_state(view, read))
    return broken if judged else None


def _wrong_state(view: View, read: Read) -> Violation:
    if read.block <= NULL:
        cause, found = "running-state-without-block", "no block is there"
    elif read.found != read.expected:
        cause = f"running-state-{relation(view, read.expected, read.found)}"
        found = f"block {read.block} holds {show(read.found)}"
    else:
        cause = "running-window-wrong"
        found = f"the convolution window in block {read.block} is that of {show(read.window)}"
    witness = (
        f"{read.request} goes on from {read.computed} tokens and needs {show(read.expected)} in slot {read.slot} "
        f"of group {read.group}, but {found}"
    )
    where = at(block=read.block, slot=read.slot, group=read.group, request=read.request)
    return violation("SLOT.running-state", cause, witness, **where)


def attention_read(observation: Observation) -> Verdict:
    event = observation.event
    if not isinstance(event, Forward) or event.start == 0:
        return None
    broken: list[Violation] = []
    judged = False
    for read in event.reads:
        if read.recurrent:
            continue
        judged = True
        if read.ok:
            continue
        if read.block <= NULL:
            how, found = "without-block", "no block is there"
        elif read.found is None:
            how, found = "missing", f"nothing was written there (block {read.block})"
        else:
            how, found = token_relation(read.expected, read.found), f"block {read.block} holds {show(read.found)}"
        witness = (
            f"{read.request} attends from {read.computed} tokens to position {read.position}, "
            f"which should be {show(read.expected)} in slot {read.slot} of group {read.group}, but {found}"
        )
        where = at(block=read.block, slot=read.slot, group=read.group, request=read.request)
        broken.append(violation("SLOT.attention-read", f"attention-{how}", witness, **where))
    return broken if judged else None


def exclusive_write(observation: Observation) -> Verdict:
    event, groups = observation.event, observation.view.config.groups
    if not isinstance(event, Forward) or not event.writes:
        return None
    broken = []
    for write in event.writes:
        if write.block == NULL:
            continue  # SLOT.null-write names it
        if write.block > NULL and write.owned and write.references > 0 and not write.foreign_keys:
            continue
        kind = "state" if groups[write.group].kind == "mamba" else "attention"
        place = f"block {write.block} (slot {write.slot} of group {write.group})"
        if write.block < NULL:
            cause, why = f"{kind}-write-past-table", f"slot {write.slot} of group {write.group}, which has no block"
        elif not write.owned:
            cause, why = f"{kind}-write-shared", f"{place}, which {write.references} requests hold"
        elif write.references == 0:
            cause, why = f"{kind}-write-unheld", f"{place}, which nobody holds"
        else:
            cause = f"{kind}-write-over-key"
            names = ", ".join(show(state) for state in write.foreign_keys)
            why = f"{place}, which is keyed as {names} and now holds {show(write.state)}"
        witness = f"{write.request}'s forward over [{event.start}, {event.start + event.tokens}) writes {why}"
        where = at(block=write.block, slot=write.slot, group=write.group, request=write.request)
        broken.append(violation("SLOT.exclusive-write", cause, witness, **where))
    return broken


def null_write(observation: Observation) -> Verdict:
    event, groups = observation.event, observation.view.config.groups
    if not isinstance(event, Forward) or not event.writes:
        return None
    return [
        violation(
            "SLOT.null-write",
            f"{'state' if groups[write.group].kind == 'mamba' else 'attention'}-write-to-null",
            f"{write.request}'s forward over [{event.start}, {event.start + event.tokens}) writes {show(write.state)} "
            f"to the null block (slot {write.slot} of group {write.group})",
            slot=write.slot,
            group=write.group,
            request=write.request,
        )
        for write in event.writes
        if write.block == NULL
    ]


ENTRIES = (
    Invariant(
        id="SLOT.chunk-end",
        statement="An intermediate prefill chunk ends on a block boundary or a declared stop, and no chunk that starts "
        "inside a block runs past its end, unless it is the last one and exports a checkpoint.",
        why="A state taken inside a block stays in a slot that is later keyed as the block's end: wrong text on reuse.",
        provenance=("PR 51113", "PR 45477", "issue 43559"),
        scope="call",
        events=(Split,),
        predicate=chunk_end,
        contaminates=False,
    ),
    Invariant(
        id="SLOT.running-state",
        statement="When a forward begins, the running state and its convolution window are those after exactly the "
        "tokens computed so far.",
        why="The request continues from another state: wrong text, silently.",
        provenance=("issue 43559", "issue 53142", "PR 55601", "issue 53912"),
        scope="request",
        events=(Forward,),
        predicate=running_state,
        contaminates=True,
    ),
    Invariant(
        id="SLOT.attention-read",
        statement="Every position that a forward attends to holds the key and value of the request's own prefix.",
        why="The request attends to fresh memory or to another request's tokens: wrong text, silently.",
        provenance=("issue 43559", "PR 47861", "issue 43884"),
        scope="request",
        events=(Forward,),
        predicate=attention_read,
        contaminates=True,
    ),
    Invariant(
        id="SLOT.exclusive-write",
        statement="A forward writes only blocks that its request owns alone and that carry no key for another content.",
        why="Another request, or a later hit, reads what this one overwrote.",
        provenance=("PR 57605", "issue 43884", "PR 33775", "PR 44409"),
        scope="block",
        events=(Forward,),
        predicate=exclusive_write,
        contaminates=True,
    ),
    Invariant(
        id="SLOT.null-write",
        statement="The null block is never written.",
        why="Every request that has a null slot may read what was written.",
        provenance=("issue 53084", "PR 51358"),
        scope="block",
        events=(Forward,),
        predicate=null_write,
        contaminates=True,
    ),
    Invariant(
        id="SLOT.key-content",
        statement="Once the step that fills it has run, a keyed block holds exactly what its key promises: the state "
        "and convolution window after the key's tokens, or every token of the key's prefix in that block.",
        why="Later requests resume from a wrong state: about 20 % accuracy lost with MTP and prefix caching.",
        provenance=("PR 51113", "issue 43559", "PR 53212", "PR 34418"),
        scope="block",
        events=(StepEnd, Drained),
        predicate=key_content,
        contaminates=True,
    ),
    Invariant(
        id="SLOT.key-length",
        statement="The length that a cache notes for a key is that of its prefix, and a whole number of hash units.",
        why="A hit of that length restores something else than it counts as computed.",
        provenance=("PR 51614", "PR 55601"),
        scope="block",
        events=(StepEnd, Drained),
        predicate=key_length,
        contaminates=True,
    ),
    Invariant(
        id="SLOT.key-slot",
        statement="A block keyed at n tokens lies in slot ceil(n/B) - 1 of every table that holds it; an exported "
        "checkpoint may lie in the slot before it or, with EAGLE's drop, behind it.",
        why="A block is keyed by its place in a table: in another place it is keyed as something it does not hold.",
        provenance=("issue 53084", "PR 51358"),
        scope="slot",
        events=(StepEnd, Drained),
        predicate=key_slot,
        contaminates=True,
    ),
)
