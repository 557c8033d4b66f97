"""The checkers behind the commands, imported when they are used, so that ``kvproof --help`` needs none of them.

What each returns is written down here as protocols: the shapes that reports rely on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from kvproof.errors import CheckerError, stop
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.scenario import Scenario
from kvproof.spec.subject import Subject

Progress = Callable[[str], None]


class Claim(Protocol):
    """One rule as a solver judged it. ``expected`` is ``refuted`` for a historical fault that must be caught."""

    @property
    def id(self) -> str: ...
    @property
    def statement(self) -> str: ...
    @property
    def scope(self) -> str: ...
    @property
    def premises(self) -> str | Sequence[str]: ...
    @property
    def verdict(self) -> str: ...
    @property
    def expected(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def second_solver(self) -> str: ...
    @property
    def premises_satisfiable(self) -> bool: ...
    @property
    def counterexample(self) -> str: ...
    @property
    def note(self) -> str: ...
    @property
    def mutant_of(self) -> str: ...


class Entry(Protocol):
    """One invariant of the catalogue."""

    @property
    def id(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def statement(self) -> str: ...


class Campaign(Protocol):
    """What a fuzz campaign did and found. ``findings`` are the new ones; ``first_seen`` counts known ones, too.

    ``errors`` are mistakes of a checker or lost workers; a campaign with errors claims nothing beyond its findings.
    """

    @property
    def findings(self) -> Sequence[Finding]: ...
    @property
    def evaluations(self) -> Mapping[str, int]: ...
    @property
    def steps(self) -> int: ...
    @property
    def examples(self) -> int: ...
    @property
    def searched(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def coverage(self) -> Mapping[str, int]: ...
    @property
    def seed(self) -> int: ...
    @property
    def interrupted(self) -> bool: ...
    @property
    def first_seen(self) -> Mapping[tuple[str, str], float]: ...
    @property
    def errors(self) -> Sequence[str]: ...


class Replay(Protocol):
    """What happened when a scenario was run again."""

    @property
    def violations(self) -> Sequence[Violation]: ...
    @property
    def actions(self) -> Sequence[int]: ...
    @property
    def evaluations(self) -> Mapping[str, int]: ...
    @property
    def steps(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def spoiled(self) -> bool: ...
    @property
    def follows(self) -> frozenset[tuple[str, str]]: ...
    @property
    def error(self) -> str: ...


def load(module: str, name: str) -> Any:
    """``name`` of ``module``. A missing dependency stays an ``ImportError``; a missing part of kvproof does not."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "kvproof":
            raise CheckerError(f"this kvproof has no {error.name}") from error
        raise
    except AttributeError as error:
        raise CheckerError(f"this kvproof has no {module}.{name}") from error


def prove(out: Path | None, progress: Progress) -> Iterator[Claim]:
    """Every claim as both solvers judge it, each as soon as it is settled. An interrupt is let in between two claims.

    Amid a solver's call it would come out as anything, or be lost; and Z3 takes Ctrl-C for itself unless told not to.
    """

    def told(line: str) -> None:
        stop.check()
        progress(line)

    run = load("kvproof.models.smt", "prove")
    import z3

    z3.set_param(ctrl_c=False)
    stop.held = True
    try:
        yield from run(out, told)
    finally:
        stop.held = False
    stop.check()


def catalogue() -> Sequence[Entry]:
    entries = load("kvproof.invariants.catalogue", "CATALOGUE")
    return tuple(entries.values() if isinstance(entries, Mapping) else entries)


def campaign(
    subject: Subject,
    *,
    seed: int,
    steps: int,
    seconds: float | None,
    workers: int,
    known: frozenset[tuple[str, str]],
    progress: Progress | None,
    spread: Any = None,
    journal: Any = None,
) -> Campaign:
    run = load("kvproof.models.stateful.campaign", "run")
    if progress is not None:
        progress(f"fuzzing {subject.name} from seed {seed}")
    return cast(
        "Campaign",
        run(
            subject,
            seed=seed,
            steps=steps,
            seconds=seconds,
            workers=workers,
            known=known,
            progress=progress,
            spread=spread,
            journal=journal,
        ),
    )


def replay(subject: Subject, scenario: Scenario) -> Replay:
    return cast("Replay", load("kvproof.models.stateful.replay", "replay")(subject, scenario))


def vllm_subject(tree: Path | None, name: str) -> Subject:
    return cast("Subject", load("kvproof.impl.vllm.subject", "VllmSubject")(tree, name))


def specification_subject() -> Subject:
    return cast("Subject", load("kvproof.spec.machine.subject", "MachineSubject")())


def reference_subject() -> Subject:
    return cast("Subject", load("kvproof.impl.reference.subject", "ReferenceSubject")())


def export(form: str, scenario: Scenario, violation: Violation | None, subject: str, action: int) -> str:
    if form == "text":
        return cast("str", load("kvproof.kvexport", "export_text")(scenario, violation, subject))
    return cast("str", load("kvproof.kvexport", "export_pytest")(scenario, violation, subject, action))
