"""The catalogue, asked about a live engine: what applies is asked, what breaks is handed on, and an error of ours ends
the questions and not the server.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Mapping

from kvproof.invariants.catalogue import CATALOGUE
from kvproof.invariants.monitor import InvariantBroken, Monitor, RunSpoiled
from kvproof.spec.events import Event, Observation
from kvproof.spec.finding import Violation
from kvproof.spec.view import View

OnViolation = Callable[[Violation], None]


class Guard:
    """Our own work inside somebody else's server. Once ``spoiled`` says why, none is done any more.

    ``on_error`` is told what went wrong in here.
    """

    def __init__(self) -> None:
        self.spoiled = ""
        self.on_error: Callable[[str], None] | None = None

    def guard(self, work: Callable[..., None], *args: object) -> None:
        """Do some of our own work. What it raises, findings apart, goes to :meth:`failed`."""
        if self.spoiled:
            return
        try:
            work(*args)
        except InvariantBroken:
            raise
        except Exception as error:
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """Something went wrong in here: do no more."""
        raise NotImplementedError


class Judge(Guard):
    """``lacking`` are families or ids not to ask about. ``report`` is called once for every identity that breaks, and
    may raise; nothing else that goes wrong here gets out.

    ``evaluations`` counts, by id, how often something was judged; engines of one process may share it.
    ``spoiled`` says why nothing is judged any more: something broke after which everything looks wrong, or an error in
    here (then it is in ``errors``, too).
    """

    def __init__(self, view: View, lacking: Mapping[str, str], report: OnViolation, evaluations: Counter[str]) -> None:
        super().__init__()
        self.view = view
        self.lacking = lacking
        self.errors: list[str] = []
        self._report = report
        self._reported: set[tuple[str, str]] = set()
        asked = [entry for entry in CATALOGUE if entry.id not in lacking and entry.family not in lacking]
        self._monitor = Monitor(asked, stop=False)
        self._monitor.evaluations = evaluations
        self.asked = frozenset(entry.id for entry in asked)

    @property
    def evaluations(self) -> Counter[str]:
        return self._monitor.evaluations

    def observe(self, event: Event) -> None:
        if self.spoiled:
            return
        monitor = self._monitor
        before = len(monitor.violations)
        try:
            monitor(Observation(event, self.view))
        except RunSpoiled as spoiled:
            self.spoiled = f"after {spoiled.violation.invariant} ({spoiled.violation.cause}) nothing more can be judged"
        for violation in monitor.violations[before:]:
            if violation.identity not in self._reported:
                self._reported.add(violation.identity)
                self._report(violation)

    def failed(self, error: Exception) -> None:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})"
        self.errors.append(text)
        if self.on_error is not None:
            self.on_error(text)
        self.spoiled = f"kvproof failed and judges no more: {text}"
