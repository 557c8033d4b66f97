"""What is said when an invariant breaks in a live engine: what, where, since when, and what makes it happen again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvproof.impl.vllm.drift import release
from kvproof.impl.vllm.live.blockhistory import first_wrong
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.tracer import length_of

if TYPE_CHECKING:
    from kvproof.impl.vllm.live.engine import Watched


@dataclass(frozen=True)
class Reported:
    """A violation seen in a live engine.

    ``where`` is the violation's own, completed by the slot and the request that a wrong key was made for. ``step``
    counts the engine's schedules. ``since`` names the first write after which it was wrong, where the block's
    history goes back so far; ``history`` is that block's, oldest first. ``finding`` has the scenario; ``replays`` tells
    whether it is whole. It is ``None`` where no scheduler is involved.
    """

    violation: Violation
    subject: str
    step: int
    known: bool
    where: dict[str, str | int] = field(default_factory=dict)
    since: str = ""
    history: tuple[str, ...] = ()
    finding: Finding | None = None
    replays: bool = False

    def lines(self) -> list[str]:
        """For people, the most important first."""
        broken = self.violation
        where = ", ".join(f"{name} {value}" for name, value in self.where.items())
        found = [f"{broken.invariant} ({broken.cause}) in step {self.step} of {self.subject}: {broken.witness}"]
        if where:
            found.append(f"  where: {where}")
        if self.since:
            found.append(f"  first corrupting write: {self.since}")
        found += [f"  block's history: {line}" for line in self.history]
        return found


def describe(watched: Watched, violation: Violation, known: bool) -> Reported:
    """What can be told of ``violation`` at the moment it is seen."""
    where = dict(violation.where)
    block = where.get("block")
    history: tuple[str, ...] = ()
    since = ""
    if isinstance(block, int) and block > 0:
        history = tuple(watched.history.lines(block))
        if violation.invariant in ("SLOT.key-content", "SLOT.running-state"):
            keys = watched.view.keys(block)
            entries = watched.history.of(block)
            wrong = next((entry for key in keys if (entry := first_wrong(entries, key.state)) is not None), None)
            since = wrong.line() if wrong is not None else ""
            keyed = next((entry for entry in reversed(entries) if entry.what == "keyed" and entry.state), None)
            group = where.get("group")
            if keyed is not None and keyed.state is not None and isinstance(group, int):
                size = watched.view.config.groups[group].block_size
                where.setdefault("slot", -(-length_of(keyed.state) // size) - 1)
                where.setdefault("request", keyed.who)
    subject = f"vllm=={release().name}"
    finding = None
    if watched.story is not None:
        watched.story.stepped(())  # the one that is under way
        scenario = watched.story.scenario()
        finding = Finding(violation, subject, scenario, len(scenario.actions) - 1)
    return Reported(
        violation=violation,
        subject=subject,
        step=watched.history.step,
        known=known,
        where=where,
        since=since,
        history=history,
        finding=finding,
        replays=watched.story is not None and watched.story.whole,
    )
