"""EVENT: what the cache tells those who mirror it."""

from __future__ import annotations

from kvproof.invariants.invariant import Invariant, Verdict, due_blocks, violation
from kvproof.spec.events import Drained, Observation, StepEnd
from kvproof.spec.tracer import show


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
)
