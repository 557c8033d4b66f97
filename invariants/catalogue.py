"""The catalogue: what must hold of a hybrid cache, in the order in which it is judged.

Causes come before consequences: where one observation breaks several rules, the first is the one to look at.
"""

from __future__ import annotations

from kvproof.invariants import admit, engine, event, ext, hit, offload, ref, reuse, slot, startup, tail
from kvproof.invariants.invariant import Invariant, Predicate, Scope, Verdict

__all__ = ["CATALOGUE", "FAMILIES", "Invariant", "Predicate", "Scope", "Verdict", "by_id"]

CATALOGUE: tuple[Invariant, ...] = (
    *engine.ENTRIES,
    *ext.ENTRIES,
    *offload.ENTRIES,
    *hit.ENTRIES,
    *admit.ENTRIES,
    *startup.ENTRIES,
    *ref.ENTRIES,
    *slot.ENTRIES,
    *tail.ENTRIES,
    *event.ENTRIES,
    *reuse.ENTRIES,
)
"""Every rule. Ids are unique and stay the same from version to version."""

FAMILIES: tuple[str, ...] = tuple(dict.fromkeys(entry.family for entry in CATALOGUE))
"""The families that have entries, in catalogue order."""


def by_id(name: str) -> Invariant:
    """The entry called ``name``. Raises :class:`KeyError` with the ids there are."""
    for entry in CATALOGUE:
        if entry.id == name:
            return entry
    raise KeyError(f"no invariant {name}; there are {', '.join(entry.id for entry in CATALOGUE)}")
