"""A scenario as a page: it is run on a subject for that, since a page shows what the cache looked like."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvproof import engines, subjects
from kvproof.errors import UsageError
from kvproof.scenario_file import ScenarioFile
from kvproof.spec.subject import Subject

if TYPE_CHECKING:
    from kvproof.models.stateful.film import Film


def page(file: Path, loaded: ScenarioFile, on: str | None, progress: engines.Progress) -> str:
    """The page of a scenario or finding file, run on ``on``, or else on the subject that the finding names.

    Raises :class:`UsageError` where neither says what to run it on.
    """
    asked = loaded.finding
    violation = asked.violation() if asked else None
    chosen = on or (asked.subject if asked else "") or _recorded(loaded)
    if not chosen:
        raise UsageError(f"{file} does not say where it was found: add --on, as in --on vllm=={subjects.NEWEST}")
    target = subjects.parse(chosen)
    subject = subjects.open_subject(target, progress)
    film = take(subject, loaded)
    made = engines.load("kvproof.pages", "counterexample")
    return cast("str", made(loaded.scenario, film, violation, target.text, str(file), loaded.reasoning))


def take(subject: Subject, loaded: ScenarioFile) -> Film:
    """The scenario's moments on ``subject``."""
    return cast("Film", engines.load("kvproof.pages.ended", "film")(subject, loaded.scenario))


def _recorded(loaded: ScenarioFile) -> str:
    """The newest release that a record with this scenario names; empty where there is none."""
    from kvproof.kvexport.origin import origin

    known = origin(loaded.scenario, loaded.finding.violation() if loaded.finding else None, "")
    return f"vllm=={known.releases[-1]}" if known.releases else ""
