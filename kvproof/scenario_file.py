"""Scenario files: read strictly, written so that a person can read them.

A scenario file is ``Scenario.to_dict()`` as JSON. A finding file is the same with an added ``finding`` object that says
what broke. A record of a known finding (see :mod:`kvproof.findings`) carries its scenario inside, and so
does a fault of the zoo. All of them replay.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shlex
import tempfile
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvproof import engines
from kvproof.spec.config import Config, ConfigError, Group
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.scenario import (
    ACTION_BOUNDS,
    MOST_ACCEPTED,
    MOST_ACTIONS,
    MOST_IMAGES,
    MOST_LETTERS,
    MOST_PROMPT_TOKENS,
    VERSION,
    Action,
    Scenario,
    ScenarioError,
)

_MARK = "kvproof_scenario"
_MOST_BYTES = 16_000_000
_MOST_DIGITS = 18  # as many as every field has room for


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
    """A scenario, and the finding that it shows, if the file names one. ``reasoning`` is what a record says of it."""

    scenario: Scenario
    finding: FindingNote | None = None
    reasoning: str = ""


def load(path: Path) -> ScenarioFile:
    """The scenario in ``path``. Raises :class:`ScenarioError` with one line that names the file and what is wrong."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ScenarioError(f"can't read {path}: {error.strerror or error}") from error
    try:
        return parse(decode(content))
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error}") from error


def decode(content: bytes) -> Any:
    """JSON as strict as this format needs it: each key once, no number too long for any field, none that is
    not finite, not endlessly nested.

    A byte-order mark is passed over. Raises :class:`ScenarioError` for anything else.
    """
    if len(content) > _MOST_BYTES:
        raise ScenarioError(f"not a kvproof scenario: larger than {_MOST_BYTES // 1_000_000} MB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScenarioError(f"it is not JSON: not UTF-8 text (byte {error.start + 1}): save it as UTF-8") from error
    if not text.strip():
        raise ScenarioError("it is not JSON: it is empty")
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_int=_number, parse_float=_fraction, parse_constant=_fraction
        )
    except ScenarioError:
        raise
    except ValueError as error:
        raise ScenarioError(f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise ScenarioError("it is not a kvproof scenario: nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ScenarioError(f"{twice!r} is there twice in one object: keep one of them")
    return made


def _number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ScenarioError(f"a number of {len(digits)} digits ({digits[:_MOST_DIGITS]}…): no field takes one as large")
    return int(digits)


def _fraction(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):  # sums and reports could not be read again
        raise ScenarioError(f"{text[:_MOST_DIGITS]} is no number that a field takes")
    return number


def parse(data: Any) -> ScenarioFile:
    """The scenario in decoded JSON. Raises :class:`ScenarioError`."""
    if not isinstance(data, dict):
        raise ScenarioError("not a kvproof scenario: expected a JSON object")
    if "kvproof_fault" in data and isinstance(data.get("scenario"), dict):  # of the zoo: its first sign is the finding
        signs: list[dict[str, Any]] = convert(data.get("signs", []), list[dict[str, Any]], "$.signs")
        data = {"scenario": data["scenario"], **signs[0]} if signs and "cause" in signs[0] else data["scenario"]
    if _MARK not in data and "invariant" in data and isinstance(data.get("scenario"), dict):
        note = {name: data[name] for name in ("invariant", "cause", "where") if name in data}
        scenario = parse(data["scenario"]).scenario
        if data.get("drained") is True:
            note["action"] = len(scenario.actions)
        reasoning: str = convert(data.get("reasoning", ""), str, "$.reasoning")
        return ScenarioFile(scenario, _note(note, "$"), reasoning)
    _check_version(data)
    note_data = data.get("finding")
    finding = None if note_data is None else _note(note_data, "$.finding")
    raw = convert({k: v for k, v in data.items() if k not in (_MARK, "finding")}, _strict_scenario(), "$")
    config: Config = _build(Config, raw.config)
    try:
        config.check()
    except ConfigError as error:
        raise ScenarioError(str(error)) from error
    scenario = Scenario(config, tuple(_build(Action, action) for action in raw.actions), raw.note)
    _check_actions(scenario)
    if finding is not None and not -1 <= finding.action <= len(scenario.actions):
        count = len(scenario.actions)
        raise ScenarioError(f"its finding is at action {finding.action}, counted from 0: it has {count} actions")
    return ScenarioFile(scenario, finding)


def _note(data: Any, path: str) -> FindingNote:
    note: FindingNote = convert(data, FindingNote, path)
    check_invariant(note.invariant)
    return note


def check_invariant(name: str) -> None:
    """Refuse an id that no invariant has: nothing could ever be found under it. Raises :class:`ScenarioError`."""
    ids = [entry.id for entry in engines.catalogue()]
    if name not in ids:
        alike = [known for known in ids if known.partition(".")[0] == name.partition(".")[0]] or ids
        raise ScenarioError(
            f"there is no invariant {name!r} (of a newer kvproof? then upgrade): write one of {', '.join(alike)}"
        )


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


def replay_command(file: str, subject: str) -> str:
    """What a shell takes to run ``file`` again, whatever its name."""
    return f"kvproof replay {shlex.quote(file)} --on {shlex.quote(subject)}"


def encoded(value: Any) -> bytes:
    """Plain data and ``msgspec`` structures as JSON. Half a character (in the name of a file, in an engine's message)
    becomes a question mark: it is no reason to lose the rest."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value), ensure_ascii=False).encode("utf-8", "replace")


def write_whole(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``, never leaving half of it behind. Makes the folder. Raises ``OSError``.

    A device or a pipe is written to, not replaced; of a link, what it leads to is.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        return
    if path.is_symlink():  # not before: what /dev/stdout leads to may have no name of its own
        path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        # What can't be encoded (half a character in an engine's message) is no reason to lose the rest.
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
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
        raise ScenarioError(
            f"written by a newer kvproof: version {version}, this one reads up to {VERSION}: upgrade kvproof"
        )


def _check_actions(scenario: Scenario) -> None:
    """Refuse actions that can mean nothing. What depends on how a run goes (is the request gone?) is the subject's."""
    if len(scenario.actions) > MOST_ACTIONS:
        raise ScenarioError(f"it has {len(scenario.actions)} actions: at most {MOST_ACTIONS} are run")
    block = max(group.block_size for group in scenario.config.groups)
    submitted: dict[str, Action] = {}
    prompts = 0
    for number, action in enumerate(scenario.actions, 1):
        problem = _number_problem(action) or _action_problem(action, submitted, scenario.config)
        if action.kind == "submit":
            submitted[action.request] = action
            prompts += -(-action.length // block) * block
            if prompts > MOST_PROMPT_TOKENS and not problem:
                problem = f"the prompts have more than {MOST_PROMPT_TOKENS} tokens together, rounded up to whole blocks"
        if problem:
            raise ScenarioError(f"action {number} ({action.kind}): {problem}")


def _number_problem(action: Action) -> str | None:
    for name, most in ACTION_BOUNDS.items():
        if getattr(action, name) < 0:
            return f"{name} is {getattr(action, name)}: numbers must not be negative"
        if getattr(action, name) > most:
            return f"{name} is {getattr(action, name)}: at most {most}"
    if len(action.accept) > MOST_ACCEPTED:
        return f"accept has {len(action.accept)} entries: at most {MOST_ACCEPTED}"
    if len(action.images) > MOST_IMAGES or any(not 0 <= at <= ACTION_BOUNDS["length"] for at in action.images):
        return f"images begin at up to {MOST_IMAGES} positions in the prompt, none of them negative"
    odd = next((drafts for drafts in action.accept if not 0 <= drafts <= MOST_ACCEPTED), None)
    return None if odd is None else f"accept has {odd}: numbers must not be negative, and at most {MOST_ACCEPTED}"


def _action_problem(action: Action, submitted: Mapping[str, Action], config: Config) -> str | None:
    if action.kind == "submit":
        return _submit_problem(action, submitted, config)
    if action.kind == "step" and action.times < 1:
        return "times must be at least 1"
    if action.kind in ("finish", "abort", "preempt") and action.request not in submitted:
        return f"request {action.request!r} was never submitted before"
    return None


def _submit_problem(action: Action, submitted: Mapping[str, Action], config: Config) -> str | None:
    if not action.request:
        return "it names no request"
    if len(action.request) > MOST_LETTERS or not action.request.isprintable():
        return (
            f"request {action.request[:MOST_LETTERS]!r}: a name has at most {MOST_LETTERS} characters, all of them "
            "printable"
        )
    if action.request in submitted:
        return f"request {action.request!r} was submitted before: use another name"
    if action.length < 1 or action.max_tokens < 1:
        return "length and max_tokens must be at least 1"
    if action.length >= config.max_model_len:
        return (
            f"length is {action.length}: engines refuse a prompt that leaves no room for a token in max_model_len "
            f"{config.max_model_len}"
        )
    if action.base and action.base not in submitted:
        return f"base {action.base!r} was never submitted before"
    if action.shared and not action.base:
        return "shared tokens without a base request"
    if action.base:
        base = submitted[action.base]
        if action.shared > base.length + base.max_tokens:
            return (
                f"shared is {action.shared}: {action.base} has at most {base.length + base.max_tokens} tokens, "
                "its prompt and its output"
            )
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


def convert(data: Any, shape: Any, path: str = "$") -> Any:
    """Decoded JSON in the given shape. Raises :class:`ScenarioError`, with the place counted from ``path``."""
    try:
        return msgspec.convert(data, shape)
    except RecursionError as error:
        raise ScenarioError("it is not a kvproof scenario: nested too deeply") from error
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
