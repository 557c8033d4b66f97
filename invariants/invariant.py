"""What an entry of the catalogue is: a rule in words, the predicate that judges it, and what is known about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvproof.spec.events import Drained, Observation
from kvproof.spec.finding import Violation

Verdict: TypeAlias = Sequence[Violation] | None
"""``None``: nothing to judge (vacuous). Empty: judged, and it holds. Otherwise: everything that broke."""

Predicate: TypeAlias = Callable[[Observation], Verdict]

Scope = Literal["block", "slot", "request", "step", "state", "call"]
"""What one evaluation is about: one block, table slot, request, engine step or call, or the whole state."""


@dataclass(frozen=True)
class Invariant:
    """One rule.

    ``id`` is the family and a name (``SLOT.key-content``). ``statement`` is one plain sentence, ``why`` what a user
    sees when it breaks, ``provenance`` the public numbers it comes from, or in words whose design rule it is where
    there are none. ``events`` are the event types it judges.
    ``contaminates`` tells whether what follows a violation in the same run is meaningless (a wrong content is copied
    on, a broken count frees a block in use); otherwise judging may go on.
    """

    id: str
    statement: str
    why: str
    provenance: tuple[str, ...]
    scope: Scope
    events: tuple[type[object], ...]
    predicate: Predicate
    contaminates: bool

    @property
    def family(self) -> str:
        """What comes before the dot, as in ``SLOT``: what a subject can show is said by family."""
        return self.id.partition(".")[0]


def violation(invariant: str, cause: str, witness: str, **where: str | int) -> Violation:
    """A :class:`Violation`; keywords (``block``, ``slot``, ``group``, ``request``, ``call``) become its ``where``."""
    return Violation(invariant, cause, witness, tuple(where.items()))


def spoils(entry: Invariant, violation: Violation) -> bool:
    """Whether what follows ``violation`` of ``entry`` is meaningless.

    An operator's call that failed leaves an engine that goes on, and what it does then is judged.
    """
    return entry.contaminates and "call" not in dict(violation.where)


def at(**where: str | int) -> dict[str, str | int]:
    """Where a violation is, as keywords for :func:`violation`."""
    return where


def due_blocks(observation: Observation) -> Iterable[int]:
    """The blocks to judge: all of them once everything has ended (an audit), else those the step touched."""
    if isinstance(observation.event, Drained):
        return range(1, observation.view.num_blocks)
    return observation.touched


SMALL_POOL = 512
"""Pools up to this size are judged whole after every step, larger ones where the step touched them, and whole when
everything has ended: what a step costs must not depend on the size of the pool."""


def whole_pool(observation: Observation) -> bool:
    """Whether this is a moment to look at the whole pool."""
    return observation.view.num_blocks <= SMALL_POOL or isinstance(observation.event, Drained)


def ceil_div(tokens: int, block: int) -> int:
    """How many blocks of ``block`` tokens hold ``tokens`` tokens."""
    return -(-tokens // block)
