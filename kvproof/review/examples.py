"""Each invariant by example: a small cache on which it is judged and holds, and the same with one thing wrong.

The caches are those by which the predicates are tested (:mod:`kvproof.review.cases`); what is said of them is computed
by the predicates and read off the views, but for the sentence about what would be right.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproof.invariants.catalogue import by_id
from kvproof.review import picture, told
from kvproof.review.cases import CASES
from kvproof.review.picture import Strip
from kvproof.spec.events import Event
from kvproof.spec.finding import Violation

Piece = tuple[str, bool]
"""A piece of a field's text, and whether the sound case has it otherwise."""


@dataclass(frozen=True)
class Shown:
    """One observation: the event field by field, the cache, and what the predicate said (none: it holds)."""

    event: str
    fields: tuple[tuple[str, tuple[Piece, ...]], ...]
    strips: tuple[Strip, ...]
    violation: Violation | None

    @property
    def differing(self) -> tuple[str, ...]:
        """The names of the fields that the sound case has otherwise."""
        return tuple(name for name, pieces in self.fields if any(differs for _, differs in pieces))

    @property
    def plain(self) -> tuple[object, ...]:
        """What is drawn and written of the observation, without its marks."""
        fields = tuple((name, "".join(text for text, _ in pieces)) for name, pieces in self.fields)
        return self.event, fields, tuple((strip.title, *(cell.plain for cell in strip.cells)) for strip in self.strips)


@dataclass(frozen=True)
class Example:
    """A sound case, a broken one, what would be ``right`` in it, and by how many wrong caches, and under which causes,
    the predicate is tested."""

    sound: Shown
    broken: Shown
    right: str
    causes: tuple[str, ...]


def example(invariant: str) -> Example:
    """The worked example of an invariant. Raises :class:`KeyError` where there is none, and :class:`AssertionError`
    where the predicate does not say what it must of it."""
    case = next((case for case in CASES if case.id == invariant), None)
    if case is None:
        raise KeyError(f"{invariant} has no example: add one to kvproof.review.cases")
    predicate = by_id(invariant).predicate
    sound, broken = case.sound(), case.mutants[0].spoil()
    assert predicate(sound) == [] or predicate(sound) == (), f"{invariant}: its sound case is not judged and sound"
    verdict = predicate(broken)
    assert verdict, f"{invariant}: its broken case is not noticed"
    causes = tuple(dict.fromkeys(mutant.cause for mutant in case.mutants))
    before, after = picture.draw(sound, broken, verdict[0])
    return Example(
        Shown(type(sound.event).__name__, _fields(sound.event, sound.event), before, None),
        Shown(type(broken.event).__name__, _fields(broken.event, sound.event), after, verdict[0]),
        case.right,
        causes,
    )


def _fields(event: Event, sound: Event) -> tuple[tuple[str, tuple[Piece, ...]], ...]:
    before = dict(told.fields(sound))
    return tuple(
        (name, ((text, False),) if before.get(name) == text else told.compared(before.get(name, ""), text))
        for name, text in told.fields(event)
    )
