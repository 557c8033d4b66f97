"""Running a scenario again: what it breaks, and what happens on the way, line by line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvproof.invariants.catalogue import CATALOGUE
from kvproof.invariants.invariant import spoils
from kvproof.models.stateful.drive import Identity, Run, Watcher, Watchers, standard_watchers
from kvproof.spec.events import Allocate, Crash, Forward, Loaded, Lone, Observation, Resume, Stall, Starved, StepEnd
from kvproof.spec.finding import Violation
from kvproof.spec.scenario import Scenario
from kvproof.spec.subject import Subject


@dataclass(frozen=True)
class Replay:
    """What a scenario did on one subject. The same scenario on the same subject always does the same.

    ``actions[i]`` is the index of the action during which ``violations[i]`` was seen; the number of actions stands for
    the draining at the end. Violations repeat where the fault shows again. ``spoiled`` tells whether the run stopped
    before its end because nothing more could be judged, ``error`` is a mistake of a checker. ``text`` is the timeline,
    which says the same thing once and where the run stopped early.

    ``follows`` are identities that showed only in the observation that ended the run, after what ended it:
    consequences, and no findings of their own (a campaign does not report them either).
    """

    violations: tuple[Violation, ...]
    actions: tuple[int, ...]
    evaluations: Mapping[str, int]
    steps: int
    text: str
    spoiled: bool = False
    follows: frozenset[Identity] = frozenset()
    error: str = ""

    def at(self, identity: Identity) -> int | None:
        """The index of the action during which ``identity`` was first seen; ``None`` if it was not."""
        pairs = zip(self.violations, self.actions, strict=True)
        return next((action for violation, action in pairs if violation.identity == identity), None)


def replay(
    subject: Subject,
    scenario: Scenario,
    *,
    known: frozenset[Identity] = frozenset(),
    watchers: Watchers | None = None,
    begins: Callable[[int], None] = lambda index: None,
) -> Replay:
    """Run ``scenario`` to its end and drain the engine, collecting every violation on the way.

    A violation after which nothing can be judged (a crash, a wrong content that spreads) ends the run; others don't.
    ``known`` is passed on to the judge: known violations are reported like others here. ``begins`` is told the index
    of each action before it is taken (the number of actions: draining).
    Raises :class:`kvproof.spec.config.ConfigError` where the subject can't run the configuration.
    """
    watcher = (watchers or standard_watchers(subject))(known, False)
    timeline = _Timeline(watcher)
    timeline.lines += Scenario(scenario.config, ()).text().splitlines()
    run = Run(subject, scenario.config, watcher, timeline)
    where: list[int] = []

    def note(index: int) -> None:
        where.extend([index] * (len(watcher.violations) - len(where)))
        timeline.catch_up()

    for index, action in enumerate(scenario.actions):
        begins(index)
        timeline.lines.append(f"{index + 1:3}. {action}")
        if not run.do(action) and not run.over:
            timeline.say("did not apply")
        note(index)
        if run.over:
            break
    if not run.over:
        begins(len(scenario.actions))
        timeline.lines.append("     drain")
        run.drain()
        note(len(scenario.actions))
    spoiled = run.spoiled or run.broken is not None
    if spoiled:
        left = len(scenario.actions) - len(run.actions)
        skipped = f" ({left} action{'s' * (left != 1)} left out)" if left else ""
        timeline.say(f"the run ends here: after this violation nothing more can be judged{skipped}")
    if run.error:
        timeline.say(f"the checker failed: {run.error}")
    return Replay(
        violations=tuple(watcher.violations),
        actions=tuple(where),
        evaluations=dict(watcher.evaluations),
        steps=run.steps,
        text="\n".join(timeline.lines),
        spoiled=spoiled,
        follows=_follows(watcher.violations) if spoiled else frozenset(),
        error=run.error,
    )


def _follows(violations: Sequence[Violation]) -> frozenset[Identity]:
    """What came with the violation that ended the run, and after it in the order of the catalogue."""
    entries = {entry.id: entry for entry in CATALOGUE}
    ends = (i for i, v in enumerate(violations) if v.invariant in entries and spoils(entries[v.invariant], v))
    first = next(ends, len(violations))
    before = {violation.identity for violation in violations[: first + 1]}
    after = {v.identity for v in violations[first + 1 :] if v.invariant != violations[first].invariant}
    return frozenset(after - before)


class _Timeline:
    """Events that people look for, one line each, indented under their action, and violations as ``watcher`` sees
    them, each below the step in which it was seen first."""

    def __init__(self, watcher: Watcher) -> None:
        self.lines: list[str] = []
        self._ran: list[str] = []
        self._watcher = watcher
        self._read = 0
        self._told: set[Violation] = set()
        self._at_end_of_step = False

    def say(self, text: str) -> None:
        self.lines.append(f"       {text}")

    def catch_up(self) -> None:
        """Say the violations that were seen since the last time, each once."""
        for violation in self._watcher.violations[self._read :]:
            self._read += 1
            if violation not in self._told:
                self._told.add(violation)
                self.say(f"! {violation.invariant} ({violation.cause}): {violation.witness}")

    def __call__(self, observation: Observation) -> None:
        """Called before the watcher is, so that what it saw of one event is said with the next."""
        event = observation.event
        if self._at_end_of_step:
            self.catch_up()
        self._at_end_of_step = type(event) is StepEnd
        match event:
            case Resume():
                external = f" + {event.external} external" if event.external else ""
                diverged = ", groups diverged" if event.diverged else ""
                self.say(f"{event.request} resumes at {event.local} local{external} tokens{diverged}")
            case Allocate(granted=False):
                asked = event.estimates[-1].total if event.estimates else "?"
                self.say(f"{event.request} is refused: {asked} blocks asked, {event.free_before} free")
            case Forward():
                drafts = f" ({event.drafts} drafts)" if event.drafts else ""
                self._ran.append(f"{event.request} [{event.start}, {event.start + event.tokens}){drafts}")
            case StepEnd():
                waiting = f"; waiting {', '.join(event.waiting)}" if event.waiting else ""
                self.say(f"step {event.index}: {', '.join(self._ran) or 'nothing runs'}{waiting}")
                self._ran.clear()
                self.catch_up()
            case Stall():
                self.say(f"stall: {event.request} is first in line and {event.schedules} steps brought nothing forward")
            case Loaded() if event.received < event.claimed:
                came = f"brought {event.received} of {event.claimed} tokens: {event.counted} count"
                self.say(f"the load for {event.request} {came}")
            case Starved():
                self.say(f"{event.request} has been passed over in {event.steps} steps")
            case Lone(finished=False):
                how = f"lost its blocks {event.preempted} times" if event.preempted else "waits"
                self.say(f"{event.request} is alone, {how} and gets no further")
            case Crash():
                self.say(f"{f'{event.call} fails' if event.call else 'crash'} in {event.location}: {event.error}")
            case _:
                pass
