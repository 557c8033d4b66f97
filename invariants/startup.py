"""ADMIT at start-up: a pool that the engine agreed to start with serves what the engine agreed to serve."""

from __future__ import annotations

from kvproof.invariants.invariant import Invariant, Verdict, violation
from kvproof.spec.config import Config
from kvproof.spec.events import Lone, Observation


def startup(observation: Observation) -> Verdict:
    event = observation.event
    if not isinstance(event, Lone) or event.tokens > event.longest:
        return None
    if event.finished:
        return ()
    how = (
        f"loses its blocks again and again ({event.preempted} times) and gets no further"
        if event.preempted
        else "is never served"
    )
    special = _special(event, observation.view.config)
    return (
        violation(
            "ADMIT.startup",
            f"lone-request-{'preempts-itself' if event.preempted else 'starves'}{special}",
            f"the start-up check accepts {event.blocks} blocks for {event.longest} tokens, and {event.request}, alone "
            f"with at most {event.tokens}, {how}",
            request=event.request,
        ),
    )


def _special(event: Lone, config: Config) -> str:
    """What takes more room than the longest request does by itself: it tells faults apart that look the same."""
    if event.partial:
        return "-with-partial-hit"  # which takes a copy of the block
    # Whoever waits may wait for a load or an image as well, whatever its windows hold.
    alone = event.preempted or (config.connector == "none" and not config.image_tokens)
    drafts = config.speculative and any(group.recycles for group in config.groups)
    return "-with-drafts-beyond-window" if drafts and alone else ""


ENTRIES = (
    Invariant(
        id="ADMIT.startup",
        statement="In a pool that the engine's own start-up check accepts, a request that is alone and no longer than "
        "the model allows runs to its end.",
        why="The engine starts, and the first long request hangs for ever at a healthy-looking load.",
        provenance=("PR 47272", "issue 55800", "issue 39734"),
        scope="request",
        events=(Lone,),
        predicate=startup,
        contaminates=False,
    ),
)
