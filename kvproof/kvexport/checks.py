"""Which check shows a violation, and the reason where none does: a test that can't fail would be worse than none."""

from __future__ import annotations

from typing import Literal

from kvproof.spec.finding import Violation
from kvproof.spec.scenario import ScenarioError

Check = Literal[
    "crash",
    "cuts",
    "keys",
    "reads",
    "chunks",
    "stall",
    "starved",
    "startup",
    "preemptions",
    "malformed",
    "ahead",
    "bound",
    "refused",
    "exact",
    "dry-real",
    "dry-pure",
    "lookups",
    "unread",
    "reuse",
    "events",
    "offloaded-events",
    "removals",
    "null-writes",
    "writes",
    "rests",
    "wipes",
    "counts",
    "offers",
    "serves",
    "copied",
    "chosen",
    "handed",
    "references",
    "drained",
    "null",
    "null-count",
]

CHECKS: dict[str, Check] = {
    "SLOT.key-content": "keys",
    "SLOT.chunk-end": "chunks",
    "SLOT.running-state": "reads",
    "SLOT.attention-read": "reads",
    "SLOT.null-write": "null-writes",
    "SLOT.exclusive-write": "writes",
    "ADMIT.mamba-bound": "bound",
    "ADMIT.refused-though-fits": "refused",
    "ADMIT.exact": "exact",
    "ADMIT.dry-real": "dry-real",
    "ADMIT.dry-pure": "dry-pure",
    "ADMIT.stall": "stall",
    "ADMIT.starved": "starved",
    "ADMIT.startup": "startup",
    "ADMIT.preemption-frees": "preemptions",
    "REF.references": "references",
    "REF.queue": "references",
    "REF.queue-shape": "references",
    "REF.double-free": "references",
    "REF.null": "null",
    "REF.null-count": "null-count",
    "REF.drained": "drained",
    "HIT.limit": "lookups",
    "HIT.only-recurrent-short": "cuts",
    "HIT.covers": "reads",
    "HIT.promises": "reads",
    "HIT.resume-boundary": "reads",
    "HIT.same-step": "reads",
    "REUSE.resend": "reuse",
    "REUSE.sibling": "reuse",
    "EXT.offload-content": "copied",
    "EXT.offload-offers": "offers",
    "EXT.offload-serves": "serves",
    "EXT.counts-what-came": "counts",
    "EXT.rest-wiped": "rests",
    "EXT.zero-spares-load": "wipes",
    "EVENT.stored-well-formed": "events",
    "EVENT.removed-is-gone": "removals",
    "FLOW.no-crash": "crash",
}
"""Which check shows a violation of an invariant. What a hit must bring is checked where it harms: when it is read."""

MOMENTS: dict[str, Check] = {"chosen": "chosen", "offered": "handed", "state": "copied", "attention": "copied"}
"""When a block that leaves the cache is looked at, by the first word of the cause."""

CONTENT: frozenset[Check] = frozenset({"keys", "reads", "null-writes", "writes", "copied", "chosen", "handed"})
"""Checks for which a test keeps an oracle of what blocks hold."""

WHOLE: frozenset[Check] = frozenset({"copied", "chosen", "handed"})
"""Those whose oracle follows every group: what another group writes into a block spoils it."""

OVERLAPPED: frozenset[Check] = frozenset(
    {"crash", "ahead", "keys", "reads", "writes", "wipes", "chosen", "handed", "preemptions", "unread", "drained"}
)
"""Checks that a test makes with a step in flight."""


def choose(violation: Violation | None) -> Check:
    """Which check shows the violation. Raises :class:`ScenarioError` with the reason where there is none."""
    if violation is None:
        return "drained"
    check = CHECKS.get(violation.invariant)
    if check is None:
        raise refusal(f"no test is written for {violation.invariant}")
    if "MalformedOutput" in violation.cause:
        # The release itself does not raise: its worker would, which is not there.
        check = "ahead" if violation.cause.endswith("more-tokens-than-there-are") else "malformed"
    if violation.invariant == "EXT.offload-content":
        check = MOMENTS.get(violation.cause.partition("-")[0], check)
    if check == "lookups" and violation.cause.endswith("read-for-unread"):
        check = "unread"
    if check == "events" and violation.cause.startswith("offloaded-"):
        check = "offloaded-events"
    blind = _blind(check, violation)
    if blind:
        raise refusal(f"{violation.invariant} ({violation.cause}): {blind}")
    return check


def refusal(reason: str) -> ScenarioError:
    """What ``kvproof export`` says instead of writing a test."""
    return ScenarioError(f"{reason}: use --as text")


def _blind(check: Check, violation: Violation) -> str:
    """Why the check can't see this cause; nothing where it can."""
    cause = violation.cause
    seen = {
        "null-writes": ("attention-write-to-null", "state-write-to-null"),
        "removals": ("removed-while-carried",),
        "offloaded-events": ("-block-size-of-another-group",),
        "events": ("tokens-of-other-blocks",),
        "cuts": ("refused",),  # any other cut goes through without a word
        "malformed": ("more-drafts-than-tokens",),
        "counts": ("counts-what-never-came",),
        "writes": ("write-over-key", "write-unheld", "attention-write-shared"),
    }.get(check)
    if seen is not None and not cause.endswith(seen):
        return f"a test of it sees only what ends in {' or '.join(seen)}"
    if check == "reuse" and "promised" not in dict(violation.where):
        return "its where does not say which request was promised how many tokens"
    if check in ("copied", "chosen", "handed") and cause.endswith("-null"):
        return "a test of it looks at what blocks hold, and the null block holds nothing"
    if check == "lookups" and "deeper-than-a-group" in cause:
        return "a test of it does not ask each group how far it reaches"
    return ""
