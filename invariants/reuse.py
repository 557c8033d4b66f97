"""REUSE: what was computed and not lost is found again. That is the other half of correctness: a cache that never hits
is right, and of no use to anybody.

A cause names what stood in between: the group that has not kept what the promised boundary takes, or a lookup that
passes over what all groups have; whether layers of a drafter are cached, and whether a store is connected.
"""

from __future__ import annotations

from kvproof.invariants.invariant import Invariant, Verdict, at, violation
from kvproof.spec.config import Config
from kvproof.spec.events import Lookup, Observation, Promised

WORDS = {
    "boundary-state-not-kept": "a chunk ended there, but its state is not keyed",
    "tail-state-not-kept": "a chunk ended there, but its state is not keyed",
    "no-chunk-ended-at-boundary": "no chunk ended there, so that there is no state",
    "no-chunk-ended-at-tail": "no chunk ended there, so that there is no state",
    "full-not-kept": "its blocks are not keyed that far",
    "window-not-kept": "the window before it is not keyed",
    "window-of-one-token": "every group has what that takes, windows of one token nothing",
    "lookup-of-one-group-passes-over": "the group has what that takes",
    "lookup-passes-over-short-of-a-window": "every group has what that takes, from the beginning on",
    "lookup-passes-over": "every group has what that takes",
}


def resend(observation: Observation) -> Verdict:
    return _judge(observation, True)


def sibling(observation: Observation) -> Verdict:
    return _judge(observation, False)


def _judge(observation: Observation, resend: bool) -> Verdict:
    event = observation.event
    if not isinstance(event, Lookup) or event.promised is None or event.promised.resend is not resend:
        return None
    found = event.promised
    if event.tokens >= found.tokens:
        return ()
    name = "REUSE.resend" if resend else "REUSE.sibling"
    tokens = len(event.states) - 1
    what = f"sends the {tokens} tokens of {found.base} again" if resend else f"shares a prefix with {found.base}"
    config = observation.view.config
    witness = (
        f"{event.request} {what} and has to hit {found.tokens} of {tokens} tokens, but hits {event.tokens}: "
        f"{_who(config, found)}{WORDS.get(found.lacking, found.lacking)}, and nothing of that prefix was lost"
    )
    where = at(request=event.request, base=found.base, promised=found.tokens)
    if found.group >= 0:
        where["group"] = found.group
    return (violation(name, _cause(config, found), witness, **where),)


def _who(config: Config, found: Promised) -> str:
    return f"{config.groups[found.group].kind} group {found.group}: " if found.group >= 0 else ""


def _cause(config: Config, found: Promised) -> str:
    if found.lacking == "window-of-one-token":
        return found.lacking
    parts = [found.lacking, "with-drafter" if config.eagle else "", "with-store" if config.connector != "none" else ""]
    return "-".join(part for part in parts if part)


ENTRIES = (
    Invariant(
        id="REUSE.resend",
        statement="While nothing of it is lost, a prompt that is sent again hits at least the boundary that the "
        "configuration keeps for that.",
        why="The hit rate stays at zero, and nothing says so.",
        provenance=("PR 53945", "PR 54713", "PR 57180", "issue 50235", "issue 53595", "issue 54360", "issue 57032"),
        scope="call",
        events=(Lookup,),
        predicate=resend,
        contaminates=False,
    ),
    Invariant(
        id="REUSE.sibling",
        statement="While nothing of it is lost, a prompt that shares a prefix with an earlier one hits at least the "
        "last boundary that the earlier one left in the shared part.",
        why="Every turn of a conversation is computed from its beginning.",
        provenance=("PR 53945", "PR 54713", "PR 57616", "issue 45238", "issue 51771", "issue 57032"),
        scope="call",
        events=(Lookup,),
        predicate=sibling,
        contaminates=False,
    ),
)
