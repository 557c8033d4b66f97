"""What a test needs: which check shows the violation, and which parts of an engine the scenario uses."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from kvproof.kvexport.checks import CONTENT, OVERLAPPED, WHOLE, Check, choose, refusal
from kvproof.spec.config import RARE, GroupKind
from kvproof.spec.finding import Violation
from kvproof.spec.scenario import Action, Scenario

PLAYED = frozenset({"offload_outputs", "lookahead_keys"})
"""What a test has of what few engines have (:data:`RARE`); a test of crashes has ``offer_delay``, too."""


@dataclass(frozen=True)
class Plan:
    """One test. ``actions`` are those that count; ``drain`` is whether to finish everything after them.

    ``recurrent`` and ``attention`` are the group kinds whose contents the test keeps an oracle of; ``convolution`` is
    whether it follows the convolution windows of recurrent groups as well.
    """

    check: Check
    actions: tuple[Action, ...]
    drain: bool
    recurrent: bool
    attention: bool
    convolution: bool = False

    @property
    def content(self) -> bool:
        return self.recurrent or self.attention

    @property
    def reads(self) -> bool:
        return self.check == "reads"


def plan(scenario: Scenario, violation: Violation | None, action: int = -1) -> Plan:
    """The test that shows ``violation``. Raises :class:`ScenarioError` with the reason where no check fits it."""
    check = choose(violation)
    convolution = violation is not None and check in ("keys", "reads") and "window-wrong" in violation.cause
    kinds: set[GroupKind] = set()
    if check in CONTENT:
        kinds = {g.kind for g in scenario.config.groups} if check in WHOLE else _kinds(scenario, violation)
    reason = _beyond(scenario, check, convolution) or _beyond_loads(scenario, check, kinds)
    if check in CONTENT and not kinds:
        reason = "the configuration has no group of the kind that it is about"
    if violation is not None and violation.cause.endswith(("unheld", "shared")) and scenario.config.async_scheduling:
        reason = "a test of it has no steps in flight (async_scheduling)"
    if reason:
        raise refusal(f"{violation.invariant} ({violation.cause}): {reason}" if violation else reason)
    shown = 0 <= action < len(scenario.actions)
    # How many steps a transfer needs is another matter from release to release.
    whole = action >= 0 or not _ends_with_steps(scenario) or scenario.config.connector == "offload"
    return Plan(
        check=check,
        actions=tuple(scenario.actions[: action + 1] if shown else scenario.actions),
        drain=check == "drained" or (not shown and whole),
        recurrent="mamba" in kinds,
        attention=bool(kinds - {"mamba"}),
        convolution=convolution,
    )


def _beyond(scenario: Scenario, check: Check, convolution: bool) -> str:
    """What the scenario uses that no test of this check does: without it, a test would pass where the finding is."""
    config, actions = scenario.config, scenario.actions
    if check == "reads" and any(group.kind == "chunked" for group in config.groups):
        return "a test does not follow what chunked local attention reads"
    if convolution and any(action.max_tokens > 1 for action in actions) and config.speculative:
        return "a test does not follow convolution windows through drafts"
    if check in ("offers", "serves", "copied", "chosen", "offloaded-events") and config.connector != "offload":
        return "what is stored in host memory is followed with the offloading connector alone"
    if check in ("stall", "startup") and config.connector == "offload":
        return "a test of it does not tell waiting for host memory from standing still"
    if check == "handed" and config.connector == "none":
        return "without a connector nothing is handed over"
    if check == "counts" and (config.connector != "sync" or not any(action.missing for action in actions)):
        return "a test of it looks at synchronous loads that fall short"
    if check == "rests" and (config.connector != "async" or config.offers != "unit"):
        return "the rest of a block that a load fills in part is looked at where asynchronous loads end with a unit"
    if check == "wipes" and config.connector != "async":
        return "a test of it looks at asynchronous loads of a store"
    usual = config.usual()
    played = PLAYED | {"offer_delay"} if check == "crash" else PLAYED
    rare = [name for name in RARE if name not in played and getattr(config, name) != getattr(usual, name)]
    if rare:
        return f"a test has none of {', '.join(rare)}"
    if check in ("copied", "handed", "offers", "serves") and any(action.store for action in actions):
        return "a test of it does not follow resets of the store"
    if check in ("stall", "startup", "starved") and any(action.running for action in actions):
        return "a test of it does not tell requests that were made to start over from those that stand still"
    if config.async_scheduling:
        if check not in OVERLAPPED:
            return "a test of it has no steps in flight (async_scheduling)"
        if any(action.images for action in actions):
            return "a test with steps in flight (async_scheduling) has no images"
    if check == "ahead" and not config.async_scheduling:
        return "without steps in flight (async_scheduling) no token is scheduled before it is there"
    return ""


def _beyond_loads(scenario: Scenario, check: Check, kinds: Set[GroupKind]) -> str:
    """The same of loads that fall short. ``kinds`` are the group kinds whose contents the test follows."""
    config = scenario.config
    if config.connector not in ("sync", "async") or not any(action.missing for action in scenario.actions):
        return ""
    if config.connector == "sync":
        # With steps in flight the scheduler hears of it too late. Without any, what did not come may be hit by others.
        if check == "reads" and (kinds == {"mamba"} or (config.async_scheduling and "mamba" not in kinds)):
            return ""
        if check not in ("keys", "writes", "null-writes", "exact", "crash", "ahead", "counts"):
            return (
                "a test of synchronous loads that fall short looks at keys, writes, charges and counts alone, "
                "at states, and at what attention reads with steps in flight (async_scheduling)"
            )
        return ""
    if config.async_scheduling or check != "crash" or config.load_report != "block":
        return (
            "a test of asynchronous loads that fall short looks at crashes alone, "
            "with failed blocks named and no steps in flight"
        )
    return ""


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
    if violation.invariant in ("SLOT.key-content", "SLOT.exclusive-write", "SLOT.null-write"):
        if about == "attention":
            return attention
        if about in ("full", "partial", "key", "state"):
            return recurrent
    return kinds


def _ends_with_steps(scenario: Scenario) -> bool:
    """Whether the scenario itself ends with steps, in which what it shows has had time to show."""
    return bool(scenario.actions) and scenario.actions[-1].kind == "step"
