"""Where in vLLM the functions are that our rules mirror: in the newest release that has them, file and line.

Places are stored with the results of checkers, so that the site needs no release to be built. A released file does not
change any more: what can grow old is which release is the newest, and which functions are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvproof.review.grounds import MIRRORS
from kvproof.review.sources import functions, release_files

REPOSITORY = "https://github.com/vllm-project/vllm"


class Place(msgspec.Struct, frozen=True):
    """A function's definition, in the sources of a release."""

    release: str
    file: str
    line: int

    @property
    def href(self) -> str:
        return link(self.release, self.file, self.line)


@dataclass(frozen=True)
class Mirror:
    """A function of vLLM by its name, and where it is (``None``: not stored)."""

    name: str
    place: Place | None


def link(release: str, file: str, line: int) -> str:
    """Where a line of a release is to be read."""
    return f"{REPOSITORY}/blob/v{release}/{file}#L{line}"


def named() -> list[str]:
    """All functions that rules mirror."""
    return [name for names in MIRRORS.values() for name in names]


def stale(places: Mapping[str, Place], newest: str) -> bool:
    """Whether a function was named since, or a newer release is looked at."""
    return places.keys() != set(named()) or all(place.release != newest for place in places.values())


def find(releases: Sequence[str], progress: Callable[[str], None], names: Iterable[str] = ()) -> dict[str, Place]:
    """The place of each of ``names`` (all that are mirrored) in the newest of ``releases``, oldest first, that has it.
    Fetches a release that is not cached. What none has is left out.

    Raises :class:`kvproof.errors.UsageError` where a release can't be had.
    """
    from kvproof.impl.vllm.fetch import release_tree

    wanted = list(names or named())
    found: dict[str, Place] = {}
    for release in reversed(releases):
        if missing := [name for name in wanted if name not in found]:
            there = functions(release_files(release_tree(release, progress=progress)))
            found |= {name: Place(release, there[name].file, there[name].line) for name in missing if name in there}
    return {name: found[name] for name in wanted if name in found}


def of(module: str, places: Mapping[str, Place]) -> tuple[Mirror, ...]:
    """What the rules of a module mirror."""
    return tuple(Mirror(name, places.get(name)) for name in MIRRORS.get(module, ()))
