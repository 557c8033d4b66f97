"""What came out, kept in one file: a result per fault and release, with the code and the commit that it is of."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvproof import scenario_file
from kvproof.errors import UsageError
from kvproof.locking import locked
from kvproof.revision import revision
from kvproof.zoo.code import code_hash
from kvproof.zoo.fault import Fault, is_release

VERSION = 1
DEFAULT = Path("bench/results/zoo.json")

Verdict = Literal["shown", "not shown", "refused", "undetermined", "error"]
"""Of a replay. ``refused``: the release can't be configured so. ``undetermined``: another violation ended the run."""


class _Result(msgspec.Struct, frozen=True, kw_only=True):
    fault: str
    digest: str
    """:attr:`Fault.digest` of what was run."""
    code: str
    revision: str

    def fresh(self, fault: Fault) -> bool:
        """Whether doing it again could come to nothing else: same fault, same code."""
        return (self.digest, self.code) == (fault.digest, code_hash())


def stamp(fault: Fault) -> dict[str, Any]:
    """What every result about ``fault`` says of what it is about, and of the code that it is of."""
    return {"fault": fault.id, "digest": fault.digest, "code": code_hash(), "revision": revision()}


class Replayed(_Result, frozen=True, kw_only=True):
    """A fault's scenario on one release. ``detail`` is the witness, or why nothing can be said."""

    release: str
    verdict: Verdict
    detail: str = ""

    def fresh(self, fault: Fault) -> bool:
        """Not where a checker failed: that says nothing of the fault, and may come of the machine."""
        return self.verdict != "error" and super().fresh(fault)


class Blind(_Result, frozen=True, kw_only=True):
    """A search on a release that has the fault, by somebody who does not know it.

    ``limit`` is how long it was searched for. ``seen``: after so many seconds the violation came up whose reduced
    ``scenario`` is gone on the release ``gone_on`` (empty for what no release has corrected); ``None``: missed.
    ``detail`` tells of a miss what was found instead.
    """

    release: str
    seed: int
    workers: int
    limit: float
    seen: float | None = None
    invariant: str = ""
    cause: str = ""
    scenario: dict[str, Any] | None = None
    gone_on: str = ""
    detail: str = ""


class Killed(_Result, frozen=True, kw_only=True):
    """A mutant that stands for a fault, and who noticed it."""

    mutant: str
    killed: bool
    detail: str = ""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    kvproof_zoo: int = VERSION
    replayed: list[Replayed] = []
    blind: list[Blind] = []
    killed: list[Killed] = []


class Results:
    """All results, by fault; each is on disk as soon as it is added, so that an interrupt costs nothing."""

    def __init__(self, path: Path) -> None:
        """Read ``path``, if it is there. Raises :class:`UsageError` if it is something else."""
        self._path = path
        self.replayed: dict[tuple[str, str], Replayed] = {}
        self.blind: dict[tuple[str, str, int], Blind] = {}
        self.killed: dict[tuple[str, str], Killed] = {}
        if not path.exists():
            return
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=_File)
        except OSError as error:
            raise UsageError(f"can't read {path}: {error.strerror or error}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} holds no results of the zoo: {error}: move it away") from error
        if stored.kvproof_zoo != VERSION:
            raise UsageError(f"{path} is of version {stored.kvproof_zoo}, this kvproof writes {VERSION}: move it away")
        releases = [*(one.release for one in stored.replayed), *(search.release for search in stored.blind)]
        odd = next((release for release in releases if not is_release(release)), None)
        if odd is not None:
            raise UsageError(f"{path} holds no results of the zoo: {odd!r} is no release: move it away")
        for one in stored.replayed:
            self.replayed[one.fault, one.release] = one
        for search in stored.blind:
            self.blind[search.fault, search.release, search.seed] = search
        for kill in stored.killed:
            self.killed[kill.fault, kill.mutant] = kill

    def add(self, result: Replayed | Blind | Killed) -> None:
        """Keep it, in place of an older one. What another run added meanwhile stays in the file.

        Raises :class:`UsageError` where it can't be written.
        """
        self._put(result)
        try:
            with locked(self._path):
                there = Results(self._path)
                there._put(result)
                there._save()
        except OSError as error:
            raise UsageError(f"can't write {self._path}: {error.strerror or error}") from error

    def _put(self, result: Replayed | Blind | Killed) -> None:
        """A search by one code takes the place of all by another: a median is that of searches by the same."""
        if isinstance(result, Replayed):
            self.replayed[result.fault, result.release] = result
        elif isinstance(result, Blind):
            where = (result.fault, result.release)
            self.blind = {
                key: search for key, search in self.blind.items() if key[:2] != where or search.code == result.code
            }
            self.blind[result.fault, result.release, result.seed] = result
        else:
            self.killed[result.fault, result.mutant] = result

    def _save(self) -> None:
        data = _File(
            replayed=[self.replayed[key] for key in sorted(self.replayed)],
            blind=[self.blind[key] for key in sorted(self.blind)],
            killed=[self.killed[key] for key in sorted(self.killed)],
        )
        text = msgspec.json.format(msgspec.json.encode(data), indent=1).decode()
        scenario_file.write_whole(self._path, text + "\n")

    def searches(self, fault: Fault, release: str) -> list[Blind]:
        """All searches of ``release`` that were judged for ``fault``, as it is now."""
        return [b for b in self.blind.values() if (b.fault, b.release, b.digest) == (fault.id, release, fault.digest)]

    def median(self, fault: Fault, release: str) -> float | None:
        """Seconds to the first detection, over the searches that found it; ``None`` where none did."""
        seen = [search.seen for search in self.searches(fault, release) if search.seen is not None]
        return statistics.median(seen) if seen else None
