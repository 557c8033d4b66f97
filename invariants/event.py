"""EVENT: what the cache tells those who mirror it, and what it counts."""

from __future__ import annotations

from kvproof.invariants.invariant import Invariant, Verdict, due_blocks, violation
from kvproof.spec.config import Config
from kvproof.spec.events import Counted, Drained, Observation, Removed, StepEnd, Stored
from kvproof.spec.tracer import EMPTY, length_of, show


def replays(observation: Observation) -> Verdict:
    view = observation.view
    broken = []
    judged = False
    for block in due_blocks(observation):
        told = view.announced(block)
        if told is None:
            continue
        there = {(key.group, key.state) for key in view.keys(block)}
        if not there and not told:
            continue
        judged = True
        if there == set(told):
            continue
        for cause, keys, words in (
            ("key-not-announced", there - set(told), "carries it, but nobody was told"),
            ("removal-not-announced", set(told) - there, "carries it no more, but nobody was told"),
        ):
            for group, state in keys:
                witness = f"{show(state)} of group {group}: block {block} {words}"
                broken.append(violation("EVENT.replays", cause, witness, block=block, group=group))
    return broken if judged else None


def stored_well_formed(observation: Observation) -> Verdict:
    event, config = observation.event, observation.view.config
    if not isinstance(event, Stored):
        return None
    faults = [fault for fault in (_wrong_sizes(config, event), _wrong_tokens(event), _gone(event)) if fault]
    where = "offloaded-" if event.offloaded else ""
    return [
        violation("EVENT.stored-well-formed", where + cause, words, group=event.group) for cause, words in faults[:1]
    ]


def _wrong_sizes(config: Config, event: Stored) -> tuple[str, str] | None:
    kind = config.groups[event.group].kind if event.group >= 0 else "some"
    sizes = {config.groups[event.group].block_size} if event.group >= 0 else {g.block_size for g in config.groups}
    # A key inside a block stands for the tokens since the boundary before it: in the cache it is announced alone, and
    # when it was offloaded with those of the units before it.
    inside = _ends_inside(event, sizes) if event.offloaded else len(event.keys) == 1
    if event.block_size not in sizes and not (inside and event.block_size == config.hash_unit):
        return (
            f"{kind}-block-size-of-another-group",
            f"an event of group {event.group} says that its blocks hold {event.block_size} tokens: they hold "
            f"{'/'.join(map(str, sorted(sizes)))}",
        )
    if event.tokens != len(event.keys) * event.block_size:
        return (
            f"{kind}-tokens-of-other-blocks",
            f"an event of group {event.group} lists {event.tokens} tokens and {len(event.keys)} hashes, for blocks of "
            f"{event.block_size}",
        )
    return None


def _ends_inside(event: Stored, sizes: set[int]) -> bool:
    last = event.keys[-1] if event.keys else None
    return last is not None and any(length_of(last) % size for size in sizes)


def _wrong_tokens(event: Stored) -> tuple[str, str] | None:
    if not event.keys:
        return None
    first = event.keys[0]
    begins = EMPTY if first is None else max(0, length_of(first) - event.block_size)
    if event.parent is None or length_of(event.parent) != begins:
        return (
            "parent-of-another-block",
            f"the first hash of an event of group {event.group} is {show(first)}, of a block that begins at {begins}, "
            f"and its parent is {show(event.parent)}",
        )
    wrong = next(((k, r) for k, r in zip(event.keys, event.reached, strict=False) if k != r), None)
    if wrong is None:
        return None
    return (
        "tokens-of-another-prefix",
        f"an event of group {event.group} has a hash of {show(wrong[0])}, and its tokens lead to {show(wrong[1])}",
    )


def _gone(event: Stored) -> tuple[str, str] | None:
    if not event.gone:
        return None
    return (
        "stored-nowhere",
        f"{show(event.gone[0])} of group {event.group} was announced as stored, and no block carries it",
    )


def removed_is_gone(observation: Observation) -> Verdict:
    event = observation.event
    if not isinstance(event, Removed):
        return None
    if not event.carriers:
        return ()
    block = event.carriers[0]
    return (
        violation(
            "EVENT.removed-is-gone",
            "removed-while-carried",
            f"{show(event.state)} of group {event.group} was announced as removed, and block {block} carries it",
            block=block,
            group=event.group,
        ),
    )


def counters(observation: Observation) -> Verdict:
    event = observation.event
    if not isinstance(event, Counted):
        return None
    counts = dict(event.counts)
    whose = f" of {event.request}" if event.request else ""
    of = event.of.replace(" ", "-")
    said = f"the {event.of}{whose} is counted as " + ", ".join(f"{name} {count}" for name, count in event.counts)
    broken = [(f"{of}-{name}-negative", f"{name} is negative") for name, count in event.counts if count < 0]
    cached = counts.get("local", 0) + counts.get("external", 0)
    if cached > counts.get("prompt", cached):
        broken.append((f"{of}-cached-beyond-prompt", "more came from caches than the prompt has"))
    if 0 <= event.found < cached:
        broken.append((f"{of}-cached-beyond-first-hit", f"{event.found} were in a cache when it was admitted first"))
    if cached + counts.get("computed", 0) != counts.get("prompt", cached + counts.get("computed", 0)):
        broken.append((f"{of}-does-not-add-up", "its parts do not add up"))
    if counts.get("hits", 0) > counts.get("queries", 0):
        broken.append((f"{of}-hits-beyond-queries", "there are more hits than queries"))
    # One wrong number spoils the sums as well.
    return [
        violation("EVENT.counters", cause, f"{said}: {words}", request=event.request) for cause, words in broken[:1]
    ]


ENTRIES = (
    Invariant(
        id="EVENT.replays",
        statement="Replaying the cache's events yields exactly the keys that its blocks carry.",
        why="A router sends requests to where nothing is cached, or away from where it is.",
        provenance=("issue 44451",),
        scope="block",
        events=(StepEnd, Drained),
        predicate=replays,
        contaminates=False,
    ),
    Invariant(
        id="EVENT.stored-well-formed",
        statement="An announcement of stored blocks lists the tokens of exactly these blocks, in blocks of the group's "
        "size, from the parent that it names on.",
        why="A router that hashes the tokens itself takes blocks for cached that are not, or drops the event.",
        provenance=("issue 44451", "PR 51614"),
        scope="call",
        events=(Stored,),
        predicate=stored_well_formed,
        contaminates=False,
    ),
    Invariant(
        id="EVENT.removed-is-gone",
        statement="A key is announced as removed when no block carries it any more.",
        why="A router forgets what is cached as soon as one of two copies goes, and sends the next request elsewhere.",
        provenance=("PR 55092", "PR 48933"),
        scope="call",
        events=(Removed,),
        predicate=removed_is_gone,
        contaminates=False,
    ),
    Invariant(
        id="EVENT.counters",
        statement="What the cache counts is never negative, a prompt's parts add up to it, what of it counts as cached "
        "was in a cache when it was admitted first, and hits are at most queries.",
        why="Prometheus refuses a counter that falls, which ends the engine; dashboards and bills show nonsense.",
        provenance=("issue 36755",),
        scope="request",
        events=(Counted,),
        predicate=counters,
        contaminates=False,
    ),
)
