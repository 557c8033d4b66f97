"""What a test needs: which check shows the violation, and which parts of an engine the scenario uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvproof.spec.config import GroupKind
from kvproof.spec.finding import Violation
from kvproof.spec.scenario import Action, Scenario, ScenarioError

Check = Literal[
    "crash",
    "cuts",
    "keys",
    "reads",
    "chunks",
    "stall",
    "starved",
    "malformed",
    "bound",
    "refused",
    "exact",
    "dry-real",
    "dry-pure",
    "lookups",
    "reuse",
    "events",
    "removals",
    "null-writes",
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
    "ADMIT.mamba-bound": "bound",
    "ADMIT.refused-though-fits": "refused",
    "ADMIT.exact": "exact",
    "ADMIT.dry-real": "dry-real",
    "ADMIT.dry-pure": "dry-pure",
    "ADMIT.stall": "stall",
    "ADMIT.starved": "starved",
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
    "EVENT.stored-well-formed": "events",
    "EVENT.removed-is-gone": "removals",
    "FLOW.no-crash": "crash",
}
"""Which check shows a violation of an invariant. What a hit must bring is checked where it harms: when it is read."""


@dataclass(frozen=True)
class Plan:
    """One test. ``actions`` are those that count; ``drain`` is whether to finish everything after them.

    ``recurrent`` and ``attention`` are the group kinds whose contents the test keeps an oracle of.
    """

    check: Check
    actions: tuple[Action, ...]
    drain: bool
    recurrent: bool
    attention: bool

    @property
    def content(self) -> bool:
        return self.recurrent or self.attention

    @property
    def reads(self) -> bool:
        return self.check == "reads"


def plan(scenario: Scenario, violation: Violation | None, action: int = -1) -> Plan:
    """The test that shows ``violation``. Raises :class:`ScenarioError` where no check fits it."""
    if scenario.config.connector == "offload":
        raise ScenarioError("offloading to host memory has no pytest form yet: use --as text")
    beyond = _beyond(scenario)
    if beyond:
        raise ScenarioError(f"{beyond} have no pytest form yet: use --as text")
    check = choose(violation)
    short = any(action.missing for action in scenario.actions) and scenario.config.connector != "none"
    if short and (check != "crash" or scenario.config.connector != "async" or scenario.config.load_report != "block"):
        raise ScenarioError("loads that fall short have no pytest form yet: use --as text")
    if check == "reads" and any(group.kind == "chunked" for group in scenario.config.groups):
        raise ScenarioError("what chunked local attention reads has no pytest form yet: use --as text")
    kinds = _kinds(scenario, violation) if check in ("keys", "reads", "null-writes") else set()
    shown = 0 <= action < len(scenario.actions)
    return Plan(
        check=check,
        actions=tuple(scenario.actions[: action + 1] if shown else scenario.actions),
        drain=check == "drained" or (not shown and (action >= 0 or not _ends_with_steps(scenario))),
        recurrent="mamba" in kinds,
        attention=bool(kinds - {"mamba"}),
    )


def _beyond(scenario: Scenario) -> str:
    """What the scenario uses that no test does: without it, a test would pass where the finding is."""
    config, actions = scenario.config, scenario.actions
    if config.async_scheduling:
        return "steps in flight"
    if any(action.images for action in actions):
        return "images"
    return ""


def choose(violation: Violation | None) -> Check:
    """Which check shows the violation."""
    if violation is None:
        return "drained"
    check = CHECKS.get(violation.invariant)
    if "MalformedOutput" in violation.cause:
        check = "malformed"  # the release itself does not raise: its worker would, which is not there
    if check is None or not _shows(check, violation):
        raise ScenarioError(f"{violation.invariant} ({violation.cause}) has no pytest form yet: use --as text")
    return check


def _shows(check: Check, violation: Violation) -> bool:
    """Whether the check can see this cause: a test that can't fail would be worse than none."""
    cause = violation.cause
    if check in ("keys", "reads"):
        return "window-wrong" not in cause  # it keeps no convolution windows
    if check == "null-writes":
        return cause == "attention-write-to-null"
    if check == "starved":
        return cause == "waiting-request-passed-over"
    if check == "removals":
        return cause == "removed-while-carried"
    if check == "reuse":
        where = dict(violation.where)
        return "promised" in where and where["request"] != where["base"]  # that is its second lookup, or a later one
    if check == "events":
        return cause.endswith("tokens-of-other-blocks")
    if check == "cuts":
        return cause.endswith("refused")  # any other cut goes through without a word
    if check == "malformed":
        return cause.endswith("more-drafts-than-tokens")
    return not (check == "lookups" and "deeper-than-a-group" in cause)


def _kinds(scenario: Scenario, violation: Violation | None) -> set[GroupKind]:
    """The kinds of the groups that the violation is about; all where it does not say."""
    kinds = {group.kind for group in scenario.config.groups}
    if violation is None:
        return kinds
    group = dict(violation.where).get("group")
    if isinstance(group, int) and 0 <= group < len(scenario.config.groups):
        return {scenario.config.groups[group].kind}
    recurrent, attention = kinds & {"mamba"}, kinds - {"mamba"}
    if violation.invariant in ("SLOT.running-state", "HIT.resume-boundary", "HIT.same-step"):
        return recurrent
    if violation.invariant == "SLOT.attention-read":
        return attention
    about = violation.cause.partition("-")[0]  # a record names no group, but its cause begins with what it is about
    if violation.invariant in ("HIT.covers", "HIT.promises"):
        return recurrent if about == "mamba" else attention
    if violation.invariant == "SLOT.key-content" and about in ("full", "partial", "attention"):
        return attention if about == "attention" else recurrent
    return kinds


def _ends_with_steps(scenario: Scenario) -> bool:
    """Whether the scenario itself ends with steps, in which what it shows has had time to show."""
    return bool(scenario.actions) and scenario.actions[-1].kind == "step"
