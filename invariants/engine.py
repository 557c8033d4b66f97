"""FLOW: what holds of the engine as a whole. So far: it does not raise."""

from __future__ import annotations

import re

from kvproof.invariants.invariant import Invariant, Verdict, violation
from kvproof.spec.events import Crash, Observation, StepEnd

_LONGEST = 48


def no_crash(observation: Observation) -> Verdict:
    event = observation.event
    if not isinstance(event, Crash):
        # A step that came to its end is the healthy case: without it nothing would ever count as judged.
        return ()
    module, _, function = event.location.partition(":")
    name, _, text = event.error.partition(":")
    place = f"{module.rpartition('.')[2]}.{function}" if function else module
    what = _slug(text.strip() or event.line)
    line = f", at {event.line}" if event.line else ""
    cause = "-".join(part for part in (place, name.strip().rpartition(".")[2], what) if part)
    raised = f"raised {event.error} in {event.location}{line}"
    if event.call:
        told = f"the operator's {event.call} {raised}; it is answered with that, and the engine goes on"
        return (violation("FLOW.no-crash", cause, told, call=event.call),)
    return (violation("FLOW.no-crash", cause, f"the engine {raised}"),)


def _slug(text: str) -> str:
    """Words only: numbers, names of requests and addresses change from run to run."""
    words = re.findall(r"[a-z_]{2,}", re.sub(r"0x[0-9a-f]+|\w*\d\w*", " ", text.lower()))
    return "-".join(words)[:_LONGEST].rstrip("-_")


ENTRIES = (
    Invariant(
        id="FLOW.no-crash",
        statement="No request, however long or unlucky, makes the engine raise.",
        why="The engine dies, and every request in flight with it; or a call of the operator's fails.",
        provenance=("PR 51468", "PR 51843", "PR 42554", "PR 50388"),
        scope="step",
        events=(Crash, StepEnd),
        predicate=no_crash,
        contaminates=True,
    ),
)
