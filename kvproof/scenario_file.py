"""Scenario files: read strictly, written so that a person can read them.

A scenario file is ``Scenario.to_dict()`` as JSON. A finding file is the same with an added ``finding`` object that says
what broke. A record of a known finding (see :mod:`kvproof.findings`) carries its scenario inside; all three replay.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tempfile
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvproof.spec.config import Config, ConfigError, Group
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.scenario import VERSION, Action, Scenario, ScenarioError

_MARK = "kvproof_scenario"


class FindingNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a finding file says about its scenario."""

    invariant: str
    cause: str
    witness: str = ""
    subject: str = ""
    seed: str = ""
    action: int = -1
    where: dict[str, str | int] = {}

    @property
    def identity(self) -> tuple[str, str]:
        return (self.invariant, self.cause)

    def violation(self) -> Violation:
        return Violation(self.invariant, self.cause, self.witness, tuple(self.where.items()))


@dataclass(frozen=True)
class ScenarioFile:
    """A scenario, and the finding that it shows, if the file names one."""

    scenario: Scenario
    finding: FindingNote | None = None


def load(path: Path) -> ScenarioFile:
    """The scenario in ``path``. Raises :class:`ScenarioError` with one line that names the file and what is wrong."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"can't read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ScenarioError(f"{path} is not JSON: {error}") from error
    try:
        return parse(data)
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error}") from error


def parse(data: Any) -> ScenarioFile:
    """The scenario in decoded JSON. Raises :class:`ScenarioError`."""
    if not isinstance(data, dict):
        raise ScenarioError("not a kvproof scenario: expected a JSON object")
    if _MARK not in data and "invariant" in data and isinstance(data.get("scenario"), dict):
        note = {name: data[name] for name in ("invariant", "cause") if name in data}
        return ScenarioFile(parse(data["scenario"]).scenario, _convert(note, FindingNote, "$"))
    _check_version(data)
    note_data = data.get("finding")
    finding = None if note_data is None else _convert(note_data, FindingNote, "$.finding")
    raw = _convert({k: v for k, v in data.items() if k not in (_MARK, "finding")}, _strict_scenario(), "$")
    config: Config = _build(Config, raw.config)
    try:
        config.check()
    except ConfigError as error:
        raise ScenarioError(str(error)) from error
    scenario = Scenario(config, tuple(_build(Action, action) for action in raw.actions), raw.note)
    _check_actions(scenario)
    return ScenarioFile(scenario, finding)


def to_data(scenario: Scenario, finding: Finding | None = None) -> dict[str, Any]:
    """What :func:`save` writes."""
    data = scenario.to_dict()
    if finding is None:
        return data
    note = {
        "invariant": finding.violation.invariant,
        "cause": finding.violation.cause,
        "witness": finding.violation.witness,
        "where": dict(finding.violation.where),
        "subject": finding.subject,
        "seed": finding.seed,
        "action": finding.action,
    }
    return {_MARK: data.pop(_MARK), "finding": note, **data}


def save(path: Path, scenario: Scenario, finding: Finding | None = None) -> None:
    """Write ``path`` whole or not at all, with its folder. Raises ``OSError``."""
    write_whole(path, json.dumps(to_data(scenario, finding), indent=1, ensure_ascii=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``, never leaving half of it behind. Makes the folder. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes private files; reports are for everybody
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _check_version(data: dict[str, Any]) -> None:
    version = data.get(_MARK)
    if version is None:
        raise ScenarioError(f"not a kvproof scenario: it has no {_MARK!r} field")
    if type(version) is not int or version < 1:
        raise ScenarioError(f"{_MARK} is {version!r}: expected a version number")
    if version > VERSION:
        raise ScenarioError(f"written by a newer kvproof: version {version}, this one reads up to {VERSION}")


def _check_actions(scenario: Scenario) -> None:
    """Refuse actions that can mean nothing. What depends on how a run goes (is the request gone?) is the subject's."""
    submitted: set[str] = set()
    for number, action in enumerate(scenario.actions, 1):
        problem = _action_problem(action, submitted)
        if problem:
            raise ScenarioError(f"action {number} ({action.kind}): {problem}")
        if action.kind == "submit":
            submitted.add(action.request)


def _action_problem(action: Action, submitted: set[str]) -> str | None:
    if min(action.shared, action.length, action.max_tokens, action.external, action.times, *action.accept, 0) < 0:
        return "numbers must not be negative"
    if action.kind == "submit":
        if not action.request:
            return "it names no request"
        if action.request in submitted:
            return f"request {action.request!r} was submitted before: use another name"
        if action.length < 1 or action.max_tokens < 1:
            return "length and max_tokens must be at least 1"
        if action.base and action.base not in submitted:
            return f"base {action.base!r} was never submitted before"
        if action.shared and not action.base:
            return "shared tokens without a base request"
    elif action.kind == "step":
        if action.times < 1:
            return "times must be at least 1"
    elif action.kind in ("finish", "abort", "preempt") and action.request not in submitted:
        return f"request {action.request!r} was never submitted before"
    return None


@functools.cache
def _strict(cls: type) -> type[msgspec.Struct]:
    """A dataclass's twin that refuses unknown fields, which msgspec offers for its own structures only."""
    hints = typing.get_type_hints(cls)
    fields: list[Any] = []
    for field in dataclasses.fields(cls):
        hint = tuple[_strict(Group), ...] if field.name == "groups" else hints[field.name]  # type: ignore[misc]
        fields.append((field.name, hint) if field.default is dataclasses.MISSING else (field.name, hint, field.default))
    return msgspec.defstruct(cls.__name__, fields, forbid_unknown_fields=True, frozen=True)


@functools.cache
def _strict_scenario() -> type[msgspec.Struct]:
    fields: list[Any] = [
        ("config", _strict(Config)),
        ("actions", tuple[_strict(Action), ...]),  # type: ignore[misc]
        ("note", str, ""),
    ]
    return msgspec.defstruct("Scenario", fields, forbid_unknown_fields=True, frozen=True)


def _convert(data: Any, shape: Any, path: str) -> Any:
    try:
        return msgspec.convert(data, shape)
    except msgspec.ValidationError as error:
        message = str(error)
        if " - at `$" not in message:
            message += " - at `$`"
        raise ScenarioError(message.replace(" - at `$", f" - at `{path}").replace("`", "")) from error


def _build(cls: Any, raw: Any) -> Any:
    """The dataclass that ``raw``, an instance of its strict twin, stands for."""
    values = {name: getattr(raw, name) for name in raw.__struct_fields__}
    if "groups" in values:
        values["groups"] = tuple(_build(Group, group) for group in values["groups"])
    return cls(**values)
