"""What changed between two releases of vLLM, or between two commits of this specification: what a reviewer reads first.

Of two releases: the functions that our rules mirror and that are not the same, to be read again; those that say the
same under other names; claims and invariants on which the stored verdicts differ; findings that are on record for one
only. Of two commits: sentences, predicates, rules and actions of the machine, and stored verdicts.
"""

from __future__ import annotations

import ast
import re
import subprocess
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvproof import findings, subjects
from kvproof.errors import UsageError
from kvproof.review import mirrors, verdicts
from kvproof.review import status as stored
from kvproof.review.grounds import MIRRORS
from kvproof.review.renames import Files, Renamed, Renames
from kvproof.review.sources import Changed, changes, functions, parsed, release_files
from kvproof.review.status import Said, Status
from kvproof.review.verdicts import Verdict

Progress = Callable[[str], None]


@dataclass(frozen=True)
class OnRecord:
    """Findings on record for one side only, and what is known of them on the other: that is ``asked``."""

    side: str
    identities: tuple[tuple[str, str], ...]
    asked: str

    @property
    def heading(self) -> str:
        return f"on record for {self.side} only ({self.asked})"


@dataclass
class Difference:
    """Everything that differs. ``sources`` are by what they belong to, and so is what is ``renamed``; ``missing`` says
    what could not be compared."""

    before: str
    after: str
    sources: dict[str, list[Changed]] = field(default_factory=dict)
    renamed: list[Renamed] = field(default_factory=list)
    sentences: list[tuple[str, str, str]] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    records: list[OnRecord] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def heading(self, module: str) -> str:
        """What changed functions are grouped by: of two releases the file of the rules that mirror them, of two commits
        the folder that they are in."""
        if self.before.startswith("vllm"):
            place = "spec/machine" if module == "machine" else f"spec/rules/{module}.py"
            return f"{module} (what {place} mirrors in vLLM)"
        return f"{module} ({', '.join(ROOMS[module])})"

    def href(self, change: Changed) -> str:
        """Where a changed function is to be read; empty where that is no release."""
        side, where = (self.after, change.after) if change.after else (self.before, change.before)
        release = side.removeprefix("vllm==")
        return mirrors.link(release, where.file, where.line) if where and release != side else ""

    def counts(self) -> dict[str, int]:
        return {
            "sources": sum(map(len, self.sources.values())),
            "renamed": len(self.renamed),
            "sentences": len(self.sentences),
            "verdicts": len(self.verdicts),
            "records": sum(len(one.identities) for one in self.records),
        }

    def compare(self, before: Files, after: Files, modules: Mapping[str, Sequence[str]]) -> None:
        """Take down how functions differ, those ``modules`` by module."""
        old, new = functions(before), functions(after)
        renames = Renames(before, after)
        for module, names in modules.items():
            changed, renamed = renames.apart(changes(old, new, names))
            self.renamed += renamed
            if changed:
                self.sources[module] = changed


def diff(before: str, after: str, status: Status, root: Path, progress: Progress) -> Difference:
    """Compare two releases (``vllm==0.30.0``) or two commits of ``root``. Raises :class:`UsageError` for anything else
    or for one of each."""
    sides = [text.startswith("vllm") for text in (before, after)]
    if all(sides):
        return _releases(subjects.parse(before), subjects.parse(after), status, progress)
    if any(sides):
        raise UsageError(f"{before} and {after} can't be compared: name two releases (vllm==0.30.0) or two commits")
    return _commits(before, after, root)


# -- two releases ------------------------------------------------------------------------------------------------------


def _releases(before: subjects.Target, after: subjects.Target, status: Status, progress: Progress) -> Difference:
    made = Difference(before.text, after.text)
    targets = before, after
    old, new = (release_files(_tree(target, progress)) for target in targets)
    made.compare(old, new, MIRRORS)
    made.verdicts = verdicts.differences(*(verdicts.of_release(target.release, status) for target in targets))
    for run in ("prove --on", "fuzz"):
        made.missing += [
            f"no result of kvproof {run} {target.text} is stored: {_way_out(f'{run} {target.release}')}"
            for target in targets
            if f"{run} {target.release}" not in status.runs
        ]
    records = findings.load()
    unasked = [target for target in targets if not findings.names(records, target.release)]
    for target in dict.fromkeys(unasked):
        made.missing.append(f"findings: no record names {target.text}, so none says that one is there, or is not")
    if not unasked:
        sides = _only(before, after, records, status), _only(after, before, records, status)
        made.records = [one for one in sides if one.identities]
    return made


def _only(one: subjects.Target, other: subjects.Target, records: Sequence[findings.Record], status: Status) -> OnRecord:
    """What is on record for ``one`` and was neither put on record for the ``other`` nor seen there."""
    there, then = (findings.known_for(records, target.release).identities for target in (one, other))
    said = status.runs.get(f"fuzz {other.release}")
    return OnRecord(one.text, tuple(sorted(there - then - verdicts.shown(said))), _asked(other.text, said))


def _asked(text: str, said: Said | None) -> str:
    if said is None:
        return f"no search of {text} is stored"
    return f"the stored search of {text}, {said.command}, {said.made}, came across none of these"


def _way_out(check: str) -> str:
    known = any(one.name == check for one in stored.CHECKS)
    return f"kvproof spec refresh '{check}'" if known else f"results are kept of {', '.join(stored.RELEASES)} only"


def _tree(target: subjects.Target, progress: Progress) -> Path:
    if target.path is not None:
        return target.path
    if target.kind != "release":
        raise UsageError(f"{target.text} names no release to compare: use vllm=={subjects.NEWEST} or vllm@PATH")
    from kvproof.impl.vllm.fetch import release_tree

    return release_tree(target.release, progress=progress)


# -- two commits -------------------------------------------------------------------------------------------------------

ROOMS = {
    "rules": ("spec/rules", "spec/radix.py", "spec/logic.py"),
    "predicates": ("invariants",),
    "machine": ("spec/machine",),
    "claims": ("models/smt",),
}


def _commits(before: str, after: str, root: Path) -> Difference:
    _require_checkout(root)
    made = Difference(before, after)
    commits = [_commit(text, root) for text in (before, after)]
    rooms = [{room: _files(commit, places, root) for room, places in ROOMS.items()} for commit in commits]
    if not any(files for side in rooms for files in side.values()):
        raise UsageError(
            f"neither {before} nor {after} has a specification: {root.resolve()} is no checkout of kvproof"
        )
    for room in ROOMS:
        before_room, after_room = (side[room] for side in rooms)
        names = sorted(functions(before_room).keys() | functions(after_room).keys())
        made.compare(before_room, after_room, {room: names})
    old_entries, new_entries = (_sentences(side["predicates"]) for side in rooms)
    for name in sorted(old_entries.keys() | new_entries.keys()):
        pair = old_entries.get(name, ""), new_entries.get(name, "")
        if pair[0] != pair[1]:
            made.sentences.append((name, *pair))
    statuses = [_status_at(commit, root) for commit in commits]
    made.verdicts = verdicts.differences(*map(verdicts.of_commit, statuses))
    for text, side, status in zip((before, after), rooms, statuses, strict=True):
        files = [file for found in side.values() for file in found]
        made.missing += [f"{name} of {text}, which is no Python" for name, code in files if parsed(code) is None]
        if not status.runs:
            made.missing.append(f"{text} has no stored results")
    return made


def _require_checkout(root: Path) -> None:
    try:
        _git(root, "rev-parse", "--git-dir")
    except UsageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise
        raise UsageError(
            f"{root.resolve()} is in no git checkout: change to one of kvproof to compare its commits, or name two "
            "releases (vllm==0.30.0)"
        ) from error


def _git(root: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True)
    except FileNotFoundError as error:
        raise UsageError("two commits are compared with git, which is not installed") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        raise UsageError(f"git {' '.join(arguments)}: {lines[0] if lines else 'failed'}") from error
    return done.stdout


def _commit(text: str, root: Path) -> str:
    if text.startswith("-"):
        raise UsageError(f"{text} names no commit: write it as in HEAD~3")
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", f"{text}^{{commit}}").decode().strip()
    except UsageError as error:
        meant = text if re.fullmatch(r"[0-9]+(\.[0-9]+)+", text) else subjects.NEWEST
        raise UsageError(
            f"{text} is neither a release nor a commit of {root.resolve()}: write a release as vllm=={meant}"
        ) from error


def _files(commit: str, places: Sequence[str], root: Path) -> list[tuple[str, str]]:
    # From the top of the checkout, wherever in it the command is run.
    names = _git(root, "ls-tree", "-r", "--full-tree", "--name-only", commit, "--", *places).decode().splitlines()
    return [
        (name, _git(root, "show", f"{commit}:{name}").decode("utf-8", "replace"))
        for name in names
        if name.endswith(".py")
    ]


def _sentences(files: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The sentence of each entry of the catalogue, read off its source."""
    found = {}
    for _, text in files:
        tree = parsed(text)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Invariant":
                given: dict[str, Any] = {word.arg: word.value for word in node.keywords if word.arg}
                given.update(zip(("id", "statement"), node.args, strict=False))
                try:
                    found[str(ast.literal_eval(given["id"]))] = str(ast.literal_eval(given["statement"]))
                except (KeyError, ValueError):
                    continue
    return found


def _status_at(commit: str, root: Path) -> Status:
    try:
        data = _git(root, "show", f"{commit}:{stored.FILE}")
        return msgspec.json.decode(data, type=Status)
    except (UsageError, ValueError):
        return Status(1, {})


# -- told --------------------------------------------------------------------------------------------------------------

MOST_LINES = 60
MOST_CHARACTERS = 150
"""Of a line of code in a terminal."""


def as_text(made: Difference) -> str:
    """The difference to be read in a terminal, most telling first."""
    parts = [f"{made.before} → {made.after}"]
    for verdict in made.verdicts:
        parts.append(f"  {verdict.checker}: {verdict.id}: {verdict.before} → {verdict.after}")
    for records in made.records:
        parts.append(f"\nfindings {records.heading}:")
        parts += [f"  {invariant} ({cause})" for invariant, cause in records.identities]
    if made.records:
        parts.append(RECORDS)
    for name, old, new in made.sentences:
        parts.append(f"  {name}: {old or '(none)'} → {new or '(none)'}")
    for module, found in made.sources.items():
        parts.append(f"\n{made.heading(module)}: to be read again")
        for change in found:
            parts.append(f"  {change.how}: {change.name}  {change.place}")
            lines = change.lines()
            parts += [f"      {part}" for line in lines[:MOST_LINES] for part in _wrapped(line)]
            if len(lines) > MOST_LINES:
                parts.append(f"      … {len(lines) - MOST_LINES} lines more: --html FILE writes all of them")
    if made.renamed:
        parts.append(f"\n{RENAMED}")
    parts += [f"  {one.change.name}  {one.change.place}: {one.told}" for one in made.renamed]
    parts += [f"not compared: {text}" for text in made.missing]
    if len(parts) == 1:
        parts.append("  nothing differs")
    return "\n".join(parts) + "\n"


RECORDS = (
    "What is not on record for a release may be wrong there all the same: kvproof replay findings/FILE --on RELEASE"
)
"""Said below such findings."""
RENAMED = "the same under other names, and not to be read again:"


def _wrapped(line: str) -> list[str]:
    """A line of the difference as lines that a terminal has room for, each marked as added or removed as it is."""
    if len(line) <= MOST_CHARACTERS:
        return [line]
    indent = len(line[1:]) - len(line[1:].lstrip())
    return textwrap.wrap(line, MOST_CHARACTERS, subsequent_indent=line[:1] + " " * (indent + 8))


__all__ = ["Difference", "OnRecord", "as_text", "diff"]
