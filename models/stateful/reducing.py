"""Making small what a search found, once the search is over: a search that stopped for that would see less.

Each scenario is reduced, and then tried in pools of other sizes, where the same fault may show otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from kvproof.models.stateful.drive import Run, Watchers
from kvproof.models.stateful.notes import Notebook, Report, Tally
from kvproof.models.stateful.shrink import Reducer
from kvproof.spec.config import ConfigError
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.scenario import Scenario
from kvproof.spec.subject import Subject

REDUCTION_ATTEMPTS = 800
MORE_BLOCKS = 4
MOST_POOLS = 24
"""What is found is tried again in pools from so many blocks more downwards."""

_Shown = dict[Scenario, Violation]
"""What each candidate that was kept showed last."""


class Reduction:
    """Reduces ``findings``, one after the other, and tells each when it is done. ``notebook`` knows all that was found;
    what turns up on the way is new, and reduced as well. ``seconds`` are for all of them (``None``: each may take
    :data:`REDUCTION_ATTEMPTS`); what there is no time for comes back as it is.

    After them come the ``others``, which are of kinds that others stand for: what there is no time for is dropped.
    """

    def __init__(
        self,
        subject: Subject,
        findings: Sequence[Finding],
        others: Sequence[Finding] = (),
        *,
        notebook: Notebook,
        watchers: Watchers,
        seconds: float | None,
        report: Report,
    ) -> None:
        self.tally = notebook.tally
        self._subject, self._queue, self._notebook = subject, list(findings), notebook
        self._others = list(others)
        self._watchers, self._report = watchers, report
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._late: float | None = None

    def run(self) -> Tally:
        """An interrupt ends it early: what was not reduced by then is in the tally as it was found."""
        try:
            while self._queue:
                self._late = self._due(len(self._queue) + len(self._others) / 2)
                small = self._reduced(self._queue[0])
                self._queue.pop(0)
                self.tally.findings.append(small)
                self._report(small)
                self._try_other_pools(small.scenario)
            while self._others:
                self._late = self._due(len(self._others))
                self._reduce_other(self._others.pop(0))
        except KeyboardInterrupt:
            self.tally.interrupted = True
            self.tally.findings += self._queue
        return self.tally

    def _due(self, left: float) -> float | None:
        """When the next of ``left`` findings has to be done, so that the rest get as much time."""
        if self._deadline is None:
            return None
        now = time.monotonic()
        return now + max(0.0, self._deadline - now) / left

    def _is_late(self) -> bool:
        return self._late is not None and time.monotonic() > self._late

    def _reduce_other(self, finding: Finding) -> None:
        reducer, shown = self._reducer(finding)
        if not self._is_late():
            reducer.reduce(self._is_late)
            if reducer.reproduced:
                self.tally.findings.append(_smaller(finding, reducer, shown))

    def _reducer(self, finding: Finding) -> tuple[Reducer, _Shown]:
        shown: _Shown = {}
        return Reducer(finding.scenario, lambda *it: self._shows(finding, shown, *it), REDUCTION_ATTEMPTS), shown

    def _reduced(self, finding: Finding) -> Finding:
        reducer, shown = self._reducer(finding)
        try:
            reducer.reduce(self._is_late)
        except KeyboardInterrupt:
            self._queue[0] = _smaller(finding, reducer, shown)
            raise
        if reducer.reproduced is False:
            invariant, cause = finding.violation.identity
            self.tally.error(f"{invariant} ({cause}) did not show again when its scenario was replayed")
        return _smaller(finding, reducer, shown)

    def _shows(self, finding: Finding, shown: _Shown, candidate: Scenario, drains: bool) -> int | None:
        """During which action the candidate shows the finding. ``shown`` gets the violation, by what led to it."""
        identity = finding.violation.identity
        watcher = self._watchers(self._notebook.known - {identity}, False)
        try:
            run = Run(self._subject, candidate.config, watcher)
        except ConfigError:
            return None
        for index in range(len(candidate.actions) + drains):
            if run.over:
                return None
            if index < len(candidate.actions):
                run.do(candidate.actions[index])
            else:
                run.drain()
            for violation in watcher.violations:
                if violation.identity == identity:
                    shown[replace(candidate, actions=candidate.actions[: index + 1])] = violation
                    return index
        return None

    def _try_other_pools(self, scenario: Scenario) -> None:
        """A fault shows otherwise where there is less room, or more: a charge that is too high refuses what fits, a
        block that is missing is one that another request holds. Small scenarios are cheap to try in many pools."""
        config = scenario.config
        for blocks in range(config.smallest_pool(), config.num_blocks + MORE_BLOCKS + 1)[-MOST_POOLS:]:
            if blocks == config.num_blocks or self._is_late():
                continue
            try:
                watcher = self._watchers(self._notebook.known, True)
                run = Run(self._subject, replace(config, num_blocks=blocks), watcher)
            except ConfigError:
                continue
            for action in scenario.actions:
                run.do(action)
            run.drain()
            found = self._notebook.remember(run)
            if found is not None:
                self._queue.append(found)


def _smaller(finding: Finding, reducer: Reducer, shown: _Shown) -> Finding:
    """The finding by the smallest scenario so far, and what that one shows: the numbers in a witness may differ."""
    if reducer.action < 0:
        return finding
    violation = shown.get(reducer.best, finding.violation)
    return replace(finding, violation=violation, scenario=reducer.best, action=reducer.action)
