"""ADMIT: what a step is charged, what it takes, and whether a request that fits gets in."""

from __future__ import annotations

from kvproof.invariants.invariant import Invariant, Verdict, ceil_div, violation
from kvproof.spec.config import Config
from kvproof.spec.events import (
    Allocate,
    Estimate,
    GroupEstimate,
    Observation,
    Preempted,
    Stall,
    Starved,
    StepEnd,
)
from kvproof.spec.finding import Violation
from kvproof.spec.rules.blocks import (
    AttentionStep,
    MambaStep,
    attention_estimate,
    external_state,
    mamba_cap,
    mamba_estimate,
)


def deferred(group: GroupEstimate) -> bool:
    """Whether the answer means "not in this step". Only a hit can be waited for: without one it is a number."""
    return group.deferred and group.hits > 0


def mamba_step(config: Config, estimate: Estimate, group: GroupEstimate) -> MambaStep:
    """The question about a recurrent group, as the rules take it."""
    size = config.groups[group.group].block_size
    return MambaStep(
        needed=ceil_div(estimate.tokens, size),
        computed=ceil_div(estimate.computed, size),
        held=0 if group.first else group.held,
        # A finished load left its blocks in the table: they count as the hit's.
        hits=group.hits + (group.held if group.first else 0),
        speculative=config.speculative,
        first=group.first,
        partial=group.partial,
        checkpoint=group.checkpoint,
    )


def needed_by(config: Config, estimate: Estimate, group: GroupEstimate) -> int:
    """Blocks that leave the queue for one group, by this specification's own rules; at least what a correct cache
    takes.
    """
    spec = config.groups[group.group]
    if spec.kind == "mamba":
        return group.evictable + int(mamba_estimate(mamba_step(config, estimate, group)))
    below = spec.first_read(estimate.computed) // spec.block_size
    step = AttentionStep(
        needed=ceil_div(estimate.tokens, spec.block_size),
        computed=ceil_div(estimate.computed, spec.block_size),
        held=group.held,
        hits=group.hits,
        skipped=below,
        first=group.first,
        partial=group.partial,
    )
    return group.evictable + int(attention_estimate(step))


def dry_pure(observation: Observation) -> Verdict:
    event = observation.event
    if not isinstance(event, Estimate) or not event.dry:
        return None
    return [
        violation(
            "ADMIT.dry-pure",
            f"dry-run-changed-{name.replace(' ', '-')}",
            f"asking what {event.request} would take to reach {event.tokens} tokens changed: {name}",
            request=event.request,
        )
        for name in event.changed
    ]


def mamba_bound(observation: Observation) -> Verdict:
    event, config = observation.event, observation.view.config
    if not isinstance(event, Estimate):
        return None
    judged = False
    broken: list[Violation] = []
    for group in event.groups:
        if config.groups[group.group].kind != "mamba" or deferred(group):
            continue
        judged = True
        new = group.total - group.evictable
        if new <= 1:
            continue  # one running block is always due
        cap = int(mamba_cap(mamba_step(config, event, group)))
        if new > cap:
            # A cap that grants the drafts once more than due is another fault than none at all.
            beyond = "-by-drafts" if new <= cap + config.speculative else ""
            broken.append(
                violation(
                    "ADMIT.mamba-bound",
                    f"estimate-beyond-bound{beyond}",
                    f"{event.request} is charged {new} new blocks in recurrent group {group.group} to go from "
                    f"{event.computed} to {event.tokens} tokens, but no step takes more than {cap}",
                    group=group.group,
                    request=event.request,
                )
            )
    return broken if judged else None


def _last_real(event: Allocate) -> Estimate | None:
    return next((estimate for estimate in reversed(event.estimates) if not estimate.dry), None)


def deferral(observation: Observation) -> Verdict:
    event = observation.event
    if not isinstance(event, Allocate):
        return None
    # The whole-sequence gate may already have said it, in which case there is no real question.
    waits = {group.group: group for estimate in event.estimates for group in estimate.groups if deferred(group)}
    if not waits:
        return None
    if not event.granted:
        return ()
    return [
        violation(
            "ADMIT.deferred",
            "deferred-granted",
            f"{event.request} got its blocks although group {group.group} said: not in this step",
            group=group.group,
            request=event.request,
        )
        for group in waits.values()
    ]


def exact(observation: Observation) -> Verdict:
    event, config = observation.event, observation.view.config
    if not isinstance(event, Allocate) or not event.granted:
        return None
    real = _last_real(event)
    if real is None or any(deferred(group) for group in real.groups):
        return None
    if len(event.new_blocks) != len(real.groups) or len(event.evictable_hits) != len(real.groups):
        if real.total == event.taken:
            return ()
        return (_inexact(config, event, "", "blocks", real.total, event.taken, -1),)
    broken = []
    for group in real.groups:
        kind, index = config.groups[group.group].kind, group.group
        new, hits = event.new_blocks[index], event.evictable_hits[index]
        if group.total - group.evictable != new:
            broken.append(_inexact(config, event, f"{kind}-", "new blocks", group.total - group.evictable, new, index))
        if group.evictable != hits:
            broken.append(
                _inexact(config, event, f"{kind}-hit-", "blocks for evictable hits", group.evictable, hits, index)
            )
    if not broken and real.total != event.taken:
        broken.append(_inexact(config, event, "", "blocks", real.total, event.taken, -1))
    return broken


def _inexact(config: Config, event: Allocate, what: str, noun: str, asked: int, taken: int, group: int) -> Violation:
    side = "exceeds" if asked > taken else "below" if asked >= 0 else "negative-and-below"
    real = _last_real(event)
    assert real is not None
    where: dict[str, str | int] = (
        {"request": event.request} if group < 0 else {"group": group, "request": event.request}
    )
    return violation(
        "ADMIT.exact",
        f"{what}estimate-{side}-taken{_special(config, real, group)}",
        f"{event.request} was charged {asked} {noun}{f' in group {group}' if group >= 0 else ''} and took {taken} "
        f"to go from {real.computed} to {real.tokens} tokens",
        **where,
    )


def _special(config: Config, real: Estimate, group: int) -> str:
    """The most unusual block that was due: it tells faults apart that would otherwise look the same."""
    answer = next((g for g in real.groups if g.group == group), None)
    if answer is None:
        return ""
    if config.groups[group].kind == "mamba" and external_state(mamba_step(config, real, answer)):
        return "-with-external-state"
    if answer.checkpoint:
        return "-with-checkpoint"
    return "-with-partial" if answer.partial else ""


def dry_real(observation: Observation) -> Verdict:
    event, config = observation.event, observation.view.config
    if not isinstance(event, Allocate):
        return None
    asked: dict[tuple[object, ...], list[Estimate]] = {}
    for estimate in event.estimates:
        if estimate.dry:
            asked.setdefault(_arguments(estimate), []).append(estimate)
    judged = False
    broken: list[Violation] = []
    for real in event.estimates:
        dry_runs = [] if real.dry else asked.get(_arguments(real), [])
        judged = judged or bool(dry_runs)
        for dry in dry_runs:
            broken += _disagreements(config, event, dry, real)
    return broken if judged else None


def _disagreements(config: Config, event: Allocate, dry: Estimate, real: Estimate) -> list[Violation]:
    broken = []
    for ours, theirs in zip(dry.groups, real.groups, strict=True):
        kind = config.groups[theirs.group].kind
        # The gate caps what it charges a window group for the whole sequence, so there it may be below.
        if ours.total == theirs.total or (config.groups[theirs.group].recycles and ours.total < theirs.total):
            continue
        side = "exceeds" if ours.total > theirs.total else "below"
        broken.append(
            violation(
                "ADMIT.dry-real",
                f"{kind}-dry-{side}-real",
                f"{event.request} to {real.tokens} tokens in group {theirs.group}: a dry run says {ours.total} "
                f"blocks, the real question {theirs.total}",
                group=theirs.group,
                request=event.request,
            )
        )
    return broken


def _arguments(estimate: Estimate) -> tuple[object, ...]:
    tables = tuple((group.group, group.held, group.hits) for group in estimate.groups)
    return (estimate.tokens, estimate.main, estimate.computed, tables)


def refused_though_fits(observation: Observation) -> Verdict:
    event, config = observation.event, observation.view.config
    if not isinstance(event, Allocate) or event.error or not event.estimates:
        return None
    if event.granted:
        return ()
    asked = event.estimates[-1]
    if any(deferred(group) for group in asked.groups):
        return None
    needs = {group.group: needed_by(config, asked, group) for group in asked.groups}
    need = sum(needs.values())
    if need + event.reserved > event.free_before:
        return ()
    gate = "whole-sequence-gate" if asked.dry else "step"
    # Which charge was too high tells one fault from another that refuses as well.
    over = next((group for group in asked.groups if group.total > needs[group.group]), None)
    charge = "" if over is None else f"-{config.groups[over.group].kind}{_special(config, asked, over.group)}"
    return (
        violation(
            "ADMIT.refused-though-fits",
            f"{gate}-refuses-what-fits{charge}",
            f"{event.request} needs at most {need} blocks to reach {asked.tokens} tokens; {event.free_before} are free "
            f"({event.reserved} reserved), but it is charged {asked.total} and refused",
            request=event.request,
        ),
    )


def stall(observation: Observation) -> Verdict:
    event = observation.event
    if isinstance(event, StepEnd):
        # A step that ran something is the healthy case: without it nothing would ever count as judged.
        return () if event.scheduled else None
    if not isinstance(event, Stall) or event.peak > event.pool:
        return None
    which = f"{event.why}-request" if event.why else "request"
    needs = f"{event.request} is first in line and needs at most {event.peak} of {event.pool} blocks"
    if event.blocked:
        needs = (
            f"{event.request} is first in line, others hold blocks and none of them runs; each alone needs at most "
            f"{event.peak} of {event.pool} blocks"
        )
    return (
        violation(
            "ADMIT.stall",
            f"{which}-starves-{'behind-idle-holders' if event.blocked else 'in-idle-pool'}",
            f"{needs}, but {event.schedules} steps in a row brought nothing forward",
            request=event.request,
        ),
    )


def preemption_frees(observation: Observation) -> Verdict:
    event = observation.event
    if not isinstance(event, Preempted) or not event.alone:
        return None
    if event.freed:
        return ()
    return (
        violation(
            "ADMIT.preemption-frees",
            "preempted-for-nothing",
            f"{event.request} lost all its blocks to make room, {event.alone} of which nobody else held, but none of "
            "them is free",
            request=event.request,
        ),
    )


def starved(observation: Observation) -> Verdict:
    event = observation.event
    if isinstance(event, StepEnd):
        return () if event.scheduled else None
    if not isinstance(event, Starved):
        return None
    stands = "first in line" if event.why == "waiting" else event.why
    return (
        violation(
            "ADMIT.starved",
            f"{event.why}-request-passed-over",
            f"{event.request} is {stands} and was given nothing in {event.steps} steps in a row, although others ran, "
            f"nobody was refused blocks, and the last of them left {event.left} tokens over",
            request=event.request,
        ),
    )


ENTRIES = (
    Invariant(
        id="ADMIT.dry-pure",
        statement="Asking how many blocks a request would take changes nothing.",
        why="The real allocation then acts on what was noted for other arguments.",
        provenance=("PR 57050",),
        scope="call",
        events=(Estimate,),
        predicate=dry_pure,
        contaminates=False,
    ),
    Invariant(
        id="ADMIT.mamba-bound",
        statement="The new blocks charged to a recurrent group in one step are at most 1 + partial + checkpoint + "
        "external state, + K on the first allocation, whatever the length of the prompt.",
        why="A long prompt is charged thousands of blocks, refused for ever, and stalls everything behind it.",
        provenance=("PR 57050", "PR 57000", "PR 53614"),
        scope="call",
        events=(Estimate,),
        predicate=mamba_bound,
        contaminates=False,
    ),
    Invariant(
        id="ADMIT.deferred",
        statement="A request that a group defers to the next step gets no blocks in this one.",
        why="It would resume from a state that is only written in this step.",
        provenance=("PR 34418", "PR 29387"),
        scope="call",
        events=(Allocate,),
        predicate=deferral,
        contaminates=True,
    ),
    Invariant(
        id="ADMIT.exact",
        statement="An allocation takes exactly the blocks it was charged: new ones and evictable hits, each by group.",
        why="Charged too much, a request that fits is refused; too little, an allocation fails halfway.",
        provenance=("PR 57050", "PR 41282"),
        scope="call",
        events=(Allocate,),
        predicate=exact,
        contaminates=False,
    ),
    Invariant(
        id="ADMIT.dry-real",
        statement="At the same arguments a dry run and the real question get the same answer, except that a window "
        "group's dry run may be capped.",
        why="The admission gate lets in what then does not fit, or keeps out what would.",
        provenance=("PR 57050",),
        scope="call",
        events=(Allocate,),
        predicate=dry_real,
        contaminates=False,
    ),
    Invariant(
        id="ADMIT.refused-though-fits",
        statement="A request is granted every step for which enough blocks are free, after what is reserved for "
        "others.",
        why="The engine is healthy, and the request never runs.",
        provenance=("PR 57050", "PR 40946", "issue 39734"),
        scope="call",
        events=(Allocate,),
        predicate=refused_though_fits,
        contaminates=False,
    ),
    Invariant(
        id="ADMIT.stall",
        statement="While a request that fits an idle pool is first in line, something runs, or a load is under way.",
        why="0 tokens per second with healthy probes, until somebody restarts the server.",
        provenance=("PR 57050", "issue 40707", "issue 45414", "PR 57841", "PR 57104", "PR 44560", "PR 45406"),
        scope="state",
        events=(Stall, StepEnd),
        predicate=stall,
        contaminates=False,
    ),
    Invariant(
        id="ADMIT.preemption-frees",
        statement="A request that is preempted to make room gives some: blocks that it alone held are free at once.",
        why="One after the other loses its blocks for nothing, until nobody runs.",
        provenance=("issue 49674", "PR 49675", "PR 45357"),
        scope="request",
        events=(Preempted,),
        predicate=preemption_frees,
        contaminates=False,
    ),
    Invariant(
        id="ADMIT.starved",
        statement="A request that has its place, or is first in line for one, is not passed over for ever while tokens "
        "are left over and nobody is refused blocks.",
        why="One conversation stands still as long as others generate, and whoever came after it with it.",
        provenance=("issue 45414", "PR 36844", "issue 53130"),
        scope="request",
        events=(Starved, StepEnd),
        predicate=starved,
        contaminates=False,
    ),
)
