"""REF: references, holders, the free queue, and the two directions of the key map."""

from __future__ import annotations

import re
from collections import Counter

from kvproof.invariants.invariant import Invariant, Verdict, due_blocks, violation, whole_pool
from kvproof.spec.events import Drained, Observation, StepEnd
from kvproof.spec.finding import Violation
from kvproof.spec.tracer import show
from kvproof.spec.view import NULL


def references(observation: Observation) -> Verdict:
    view = observation.view
    whole = whole_pool(observation)
    blocks = range(1, view.num_blocks) if whole else due_blocks(observation)
    held = Counter(holder.block for holder in (view.holders() if whole else view.holders_of(set(blocks))))
    broken: list[Violation] = []
    for block in blocks:
        counted = view.references(block)
        if counted == held[block]:
            continue
        names = [holder.owner for holder in view.holders_of({block})]
        kinds = sorted({_holder_kind(name) for name in names})
        if counted < 0:
            cause = "count-below-zero"
        elif counted > held[block]:
            cause = "count-exceeds-holders"
        else:
            cause = f"count-below-holders-{'-and-'.join(kinds)}"
        witness = f"block {block} counts {counted} references, held by: {', '.join(names) or 'nobody'}"
        broken.append(violation("REF.references", cause, witness, block=block))
    return broken if view.num_blocks > 1 else None


_NAMED = ("table", "hold", "scratch", "export", "connector pin", "deferred free")


def _holder_kind(owner: str) -> str:
    """``table r1/0`` → ``table``; ``copy source`` → ``copy-source``: whose it is changes from run to run."""
    kind = next((kind for kind in _NAMED if owner.startswith(f"{kind} ")), owner)
    return kind.replace(" ", "-")


def queue(observation: Observation) -> Verdict:
    view = observation.view
    broken: list[Violation] = []
    for block in due_blocks(observation):
        counted, queued = view.references(block), view.queued(block)
        if (counted == 0) != queued:
            cause = "free-but-not-queued" if counted == 0 else "queued-while-referenced"
            where = "in" if queued else "not in"
            witness = f"block {block} has {counted} references and is {where} the free queue"
            broken.append(violation("REF.queue", cause, witness, block=block))
    return broken if view.num_blocks > 1 else None


def queue_shape(observation: Observation) -> Verdict:
    view = observation.view
    if not whole_pool(observation):
        return None
    walked, said, fault = len(observation.free_queue), view.free_count(), view.queue_fault()
    if fault:
        return (violation("REF.queue-shape", "links-broken", fault),)
    if walked != said:
        cause = "count-exceeds-queue" if said > walked else "count-below-queue"
        witness = f"the cache counts {said} free blocks, its queue has {walked}"
        return (violation("REF.queue-shape", cause, witness),)
    return ()


def double_free(observation: Observation) -> Verdict:
    walked = observation.free_queue if whole_pool(observation) else ()
    if not walked:
        return None
    if len(set(walked)) == len(walked):
        return ()
    return [
        violation("REF.double-free", "block-queued-twice", f"block {block} is {n} times in the free queue", block=block)
        for block, n in Counter(walked).items()
        if n > 1
    ]


def null(observation: Observation) -> Verdict:
    view = observation.view
    broken = []
    if view.queued(NULL):
        broken.append(violation("REF.null", "null-queued", "the null block is in the free queue", block=NULL))
    for key in view.keys(NULL):
        witness = f"the null block is keyed as {show(key.state)} for group {key.group}"
        broken.append(violation("REF.null", "null-keyed", witness, block=NULL, group=key.group))
    return broken


def null_count(observation: Observation) -> Verdict:
    counted = observation.view.references(NULL)
    if counted == 0:
        return ()
    cause = "null-count-negative" if counted < 0 else "null-count-positive"
    return (violation("REF.null-count", cause, f"the null block counts {counted} references", block=NULL),)


def keys_map(observation: Observation) -> Verdict:
    view = observation.view
    blocks = set(due_blocks(observation))
    carried = {(key.group, key.state, block) for block in blocks for key in view.keys(block)}
    if not carried and not isinstance(observation.event, Drained):
        return None  # building the map costs more than all other rules together
    found = view.lookup_map()
    if whole_pool(observation):
        mapped = {(*key, block) for key, there in found.items() for block in there if block in blocks}
    else:
        mapped = {(group, state, block) for group, state, block in carried if block in found.get((group, state), ())}
    broken: list[Violation] = []
    for group, state, block in carried - mapped:
        witness = f"block {block} carries the key {show(state)} of group {group}, which no lookup would find"
        broken.append(violation("REF.keys-map", "key-not-in-map", witness, block=block, group=group))
    for group, state, block in mapped - carried:
        witness = f"a lookup of {show(state)} in group {group} finds block {block}, which does not carry that key"
        broken.append(violation("REF.keys-map", "map-without-key", witness, block=block, group=group))
    return broken if mapped or carried else None


def drained(observation: Observation) -> Verdict:
    view = observation.view
    broken = [
        violation("REF.drained", "references-left", f"nothing runs, yet block {b} has {n} references", block=b)
        for b in range(1, view.num_blocks)
        if (n := view.references(b)) != 0
    ]
    if view.free_count() != view.num_blocks - 1:
        witness = f"nothing runs, yet only {view.free_count()} of {view.num_blocks - 1} blocks are free"
        broken.append(violation("REF.drained", "pool-not-full", witness))
    for line in view.bookkeeping():
        # Group and request change from run to run, the kind of record does not.
        record = re.sub(r"[^a-z0-9]+", "-", re.sub(r" of group \d+", "", line.partition(":")[0]).lower()).strip("-")
        broken.append(violation("REF.drained", f"record-left-{record}", f"nothing runs, yet a record is left: {line}"))
    return broken


_EACH_STEP = (StepEnd, Drained)

ENTRIES = (
    Invariant(
        id="REF.references",
        statement="A block's reference count is the number of its holders: table slots, both ends of copies that have "
        "not run, pins and deferred frees.",
        why="Too low, a block in use is evicted and overwritten; too high, it is lost to the pool for ever.",
        provenance=("PR 42612", "issue 42571", "issue 43884", "PR 44409"),
        scope="block",
        events=_EACH_STEP,
        predicate=references,
        contaminates=True,
    ),
    Invariant(
        id="REF.queue",
        statement="A block is in the free queue exactly when it has no references.",
        why="A block in use is handed to another request, or a free one is never used again.",
        provenance=("PR 42612", "issue 43884"),
        scope="block",
        events=_EACH_STEP,
        predicate=queue,
        contaminates=True,
    ),
    Invariant(
        id="REF.queue-shape",
        statement="The free queue is well linked, and the free count is the number of blocks in it.",
        why="Admission counts on blocks that are not there.",
        provenance=("PR 42612", "issue 42571"),
        scope="state",
        events=_EACH_STEP,
        predicate=queue_shape,
        contaminates=True,
    ),
    Invariant(
        id="REF.double-free",
        statement="No block is in the free queue twice.",
        why="Two requests get the same block and overwrite each other.",
        provenance=("PR 42612", "issue 42571", "PR 42615"),
        scope="state",
        events=_EACH_STEP,
        predicate=double_free,
        contaminates=True,
    ),
    Invariant(
        id="REF.null",
        statement="The null block is never in the free queue and never carries a key.",
        why="A placeholder is handed out as memory, or hit as content.",
        provenance=("PR 34418",),
        scope="block",
        events=_EACH_STEP,
        predicate=null,
        contaminates=True,
    ),
    Invariant(
        id="REF.null-count",
        statement="The null block is never counted.",
        why="Nothing by itself: a count that drifts hides real errors in sums over all blocks.",
        provenance=(
            "design rule of vLLM's block pool, which does not keep the null block's count (up to 0.32.0 it drifts "
            "below zero); no public change or issue is known",
        ),
        scope="block",
        events=_EACH_STEP,
        predicate=null_count,
        contaminates=False,
    ),
    Invariant(
        id="REF.keys-map",
        statement="A block carries a key exactly when a lookup of that key can return the block.",
        why="A hit returns a block that holds something else, or a cached block can't be hit or evicted cleanly.",
        provenance=("PR 34418",),
        scope="state",
        events=_EACH_STEP,
        predicate=keys_map,
        contaminates=True,
    ),
    Invariant(
        id="REF.drained",
        statement="When nothing runs, no block but the null block is referenced, the pool is full, and no per-request "
        "record is left.",
        why="Blocks or host memory leak until the server is restarted.",
        provenance=("PR 42612", "PR 44490", "issue 44175"),
        scope="state",
        events=(Drained,),
        predicate=drained,
        contaminates=True,
    ),
)
