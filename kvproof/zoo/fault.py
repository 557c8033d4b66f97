"""One fault of the zoo: its data file, read strictly."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from packaging.version import InvalidVersion, Version

from kvproof import scenario_file
from kvproof.datafiles import data_files
from kvproof.errors import UsageError
from kvproof.spec.scenario import Scenario, ScenarioError

PACKAGE: Final = "kvproof.faults"
VERSION: Final = 1

Kind = Literal["pair", "open", "mutant"]
"""``pair``: a faulty and a fixed release exist. ``open``: the newest release has it. ``mutant``: no release that can be
driven ever had it, or nothing but speed or order depends on it; a mutant of ours stands for it."""


class Sign(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a fault shows: the invariant that it breaks, and the cause that is named then (empty: any)."""

    invariant: str
    cause: str = ""

    def shown_by(self, invariant: str, cause: str) -> bool:
        return invariant == self.invariant and self.cause in ("", cause)


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A public fault. ``wrong`` and ``right`` are the releases on which ``scenario`` was run and showed it, or did not.

    ``signs``: how it shows, that of the scenario first. ``where`` is the place in a faulty release. ``not_reached``
    says why there is no scenario; for a mutant, why there is none of ours. ``mutants`` are names that
    ``kvproof mutants`` knows. ``references`` are public numbers of changes and issues.
    """

    kvproof_fault: int
    id: str
    title: str
    kind: Kind = msgspec.field(name="class")
    references: list[str]
    where: str
    explanation: str
    wrong: list[str] = []
    right: list[str] = []
    signs: list[Sign] = []
    not_reached: str = ""
    mutants: list[str] = []
    scenario: dict[str, Any] | None = None

    @cached_property
    def digest(self) -> str:
        """Changes with whatever a result depends on: the scenario, the signs, the mutants, and what is right."""
        what = [self.scenario, msgspec.to_builtins(self.signs), self.mutants, ordered(self.right)]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def reached(self) -> bool:
        return self.scenario is not None

    @property
    def blind_release(self) -> str:
        """Where to search for it: the last release that has it. Empty where none was established."""
        return ordered(self.wrong)[-1] if self.wrong else ""

    @property
    def fixed_release(self) -> str:
        """The first release after all faulty ones that was seen to be right. Empty where there is none."""
        later = [release for release in self.right if self.wrong and Version(release) > Version(self.blind_release)]
        return ordered(later)[0] if later else ""

    @property
    def around(self) -> tuple[str, ...]:
        """The releases around the change: the last right one before it came, the last wrong one, the first right."""
        if not self.wrong:
            return tuple(ordered(self.right))
        first = Version(ordered(self.wrong)[0])
        before = [release for release in self.right if Version(release) < first]
        return tuple(filter(None, [*ordered(before)[-1:], self.blind_release, self.fixed_release]))

    def expects(self, release: str) -> bool | None:
        """Whether the scenario should show the fault there; ``None`` where that was not established."""
        return True if release in self.wrong else False if release in self.right else None

    def shown_by(self, invariant: str, cause: str) -> bool:
        return any(sign.shown_by(invariant, cause) for sign in self.signs)


def is_release(text: str) -> bool:
    """Whether it can be put in order with others."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def ordered(releases: Iterable[str]) -> list[str]:
    return sorted(releases, key=Version)


def load(folder: Path | None = None) -> tuple[Fault, ...]:
    """All faults, of ``folder`` or else those that kvproof comes with, by id.

    Raises :class:`UsageError` naming the damaged file.
    """
    return tuple(_read(file) for file in data_files(folder, PACKAGE, "faults"))


def chosen(faults: Sequence[Fault], ids: Sequence[str]) -> tuple[Fault, ...]:
    """Those with the given ids, all if none is given. Raises :class:`UsageError` for an id that is not there."""
    by_id = {fault.id: fault for fault in faults}
    for name in ids:
        if name.upper() not in by_id:
            raise UsageError(f"there is no fault {name!r} in the zoo: kvproof zoo lists them")
    wanted = {name.upper() for name in ids} or by_id.keys()
    return tuple(fault for fault in faults if fault.id in wanted)


def nothing_of(faults: Iterable[Fault]) -> str:
    """Why none of these can be tried, in one line."""
    words = [f"{fault.id} is {'not reached' if fault.not_reached else 'on no release'}" for fault in faults]
    return f"{', '.join(words)} (kvproof zoo says why)" if words else "there are no faults"


def _read(file: Traversable) -> Fault:
    try:
        fault: Fault = scenario_file.convert(scenario_file.decode(file.read_bytes()), Fault)
        problem = _problem(fault, file.name)
        if problem:
            raise ScenarioError(problem)
        for sign in fault.signs:
            scenario_file.check_invariant(sign.invariant)
        if fault.scenario is not None:
            scenario_file.parse(fault.scenario)
    except (ScenarioError, OSError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UsageError(f"fault {file} can't be read: {reason}") from error
    return fault


def _problem(fault: Fault, name: str) -> str:
    """What contradicts itself in a file called ``name``; empty if nothing does."""
    if fault.kvproof_fault != VERSION:
        return f"kvproof_fault is {fault.kvproof_fault}: this kvproof reads version {VERSION}"
    if not re.fullmatch(r"[A-Z][0-9A-Z-]{1,20}", fault.id):
        return f"id is {fault.id!r}: use a capital letter and digits, as in Z01"
    if name != f"{fault.id.lower()}.json":
        return f"it holds {fault.id}: name the file {fault.id.lower()}.json"
    for release in (*fault.wrong, *fault.right):
        if not is_release(release):
            return f"{release!r} is no release: write it as in 0.33.0"
    both = set(fault.wrong) & set(fault.right)
    if both:
        return f"{min(both)} is both wrong and right: the scenario shows the fault there or it doesn't"
    return _scenario_problem(fault)


def _scenario_problem(fault: Fault) -> str:
    if not fault.reached:
        if fault.wrong or fault.right or fault.signs:
            return "releases or signs without a scenario that showed them: add it, or leave them out"
        if not fault.not_reached and not fault.mutants:
            return "no scenario, no mutant, and no word why: say it in not_reached"
        if fault.kind == "mutant" and fault.mutants and fault.not_reached:
            return "not_reached although a mutant of ours stands for it: leave one of them out"
        return ""
    if fault.not_reached:
        return "not_reached although there is a scenario: leave one of them out"
    if not fault.signs:
        return "a scenario without a sign: name the invariant that it breaks"
    if not fault.wrong:
        return "a scenario that shows nothing on any release: name those in wrong, or say why not in not_reached"
    if fault.kind == "pair" and not fault.fixed_release:
        return "a pair without a release that is right after the wrong ones: name it, or make it open"
    if fault.kind == "open" and not all(sign.cause for sign in fault.signs):
        return "an open fault has no fixed release to tell it by: name the cause with each invariant"
    if fault.kind == "open" and fault.fixed_release:
        return f"open although {fault.fixed_release} is right: make it a pair"
    return ""


def scenario_of(fault: Fault) -> Scenario:
    """Its scenario. The fault must have one."""
    return scenario_file.parse(fault.scenario).scenario
