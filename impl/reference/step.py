"""One engine step, between being scheduled and being complete."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvproof.impl.reference.batch import Row
from kvproof.impl.reference.request import Request
from kvproof.impl.reference.store import Flight


@dataclass
class Scheduled:
    """One request's part: its ``row``, the ``drafts`` in it, and whether this is its ``first`` forward since it was
    admitted, from a state that was ``loaded`` in this very step. Known tokens are replayed up to ``prefill_end``."""

    request: Request
    row: Row
    drafts: tuple[int, ...]
    first: bool
    loaded: bool
    prefill_end: int


@dataclass
class Step:
    """What runs together. ``fresh`` blocks are cleared, then ``copies`` run (source, target), then the synchronous
    ``loads`` arrive, then the rows.

    ``deferred`` are blocks given up while the step was under way, which it may still read or write: they are released
    when it is complete.
    """

    index: int
    rows: list[Scheduled] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    loads: list[Flight] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)
    preempted: bool = False

    def involves(self, request: Request) -> bool:
        """Whether the step reads or writes this request's blocks."""
        return any(part.request is request for part in self.rows) or any(
            flight.load.request == request.name for flight in self.loads
        )


@dataclass(frozen=True)
class Outcome:
    """What the device answered for one row: the ``tokens`` it put out, of which all but the last were drafts.

    ``None`` in place of an outcome: the row did not run, since its load fell short.
    """

    tokens: tuple[int, ...]
    accepted: int
