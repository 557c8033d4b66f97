"""The events of a cache: what a predicate about calls is given, with the values that mattered at the time.

An :class:`Observation` is an event and the view after it. What a predicate needs of the view *before* is recorded in
the event itself, so that observing costs no copy of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from kvproof.spec.tracer import State
from kvproof.spec.view import View


@dataclass(frozen=True)
class Lookup:
    """A prefix-cache lookup for ``request`` answered ``tokens``; ``blocks[g]`` are group g's hit blocks.

    ``limit`` is the longest hit allowed (at most tokens − 1). ``states`` are the request's own prefixes. ``joint`` is
    whether the groups agreed on one boundary (otherwise each was looked up alone and ``diverged`` may be set).
    ``depth[g]`` is group g's own depth in tokens, where the cache reports it.
    """

    request: str
    states: tuple[State, ...] = field(repr=False)
    tokens: int
    limit: int
    blocks: tuple[tuple[int, ...], ...]
    joint: bool = True
    diverged: bool = False
    depth: tuple[int, ...] = ()


@dataclass(frozen=True)
class Truncate:
    """A lookup result was cut to ``endpoint`` tokens; ``before``/``after`` are blocks per group.

    ``error`` is what was raised instead of an answer. ``references_changed`` and ``input_changed`` tell whether the cut
    was a pure view.
    """

    request: str
    endpoint: int
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...] | None
    error: str = ""
    references_changed: bool = False
    input_changed: bool = False


@dataclass(frozen=True)
class Resume:
    """``request`` is admitted with ``local`` + ``external`` computed tokens; ``blocks[g]`` are its adopted hit blocks.

    Slots that the request needs no more are null there. ``hit`` is what the lookup had answered (``diverged``: the
    groups did not agree on it), ``offered`` what the external store offered beyond the aligned hit, ``asynchronous``
    whether the load completes in a later step.
    """

    request: str
    local: int
    external: int
    blocks: tuple[tuple[int, ...], ...]
    hit: int
    offered: int
    diverged: bool
    asynchronous: bool


@dataclass(frozen=True)
class Loaded:
    """An external load for ``request`` is over: of the tokens [``start``, ``claimed``) those up to ``received`` came.

    ``counted`` is how many tokens the cache counts as computed now.
    """

    request: str
    start: int
    claimed: int
    received: int
    counted: int


@dataclass(frozen=True)
class Split:
    """The chunk of ``request`` from ``start`` was cut from ``offered`` tokens to ``granted``.

    ``prefill_end`` is the position up to which the request still replays known tokens. ``stops`` are the positions
    declared as stops (partial tail, junction, last cacheable position). ``limit`` is the largest chunk the
    configuration allows.
    """

    request: str
    start: int
    offered: int
    granted: int
    prefill_end: int
    limit: int
    stops: tuple[int, ...]


@dataclass(frozen=True)
class GroupEstimate:
    """One group's answer to "how many blocks would this take": ``total`` = new blocks + ``evictable`` hit blocks.

    ``evictable`` counts adopted hits only. ``deferred`` is the verdict "not in this step", which some caches encode as
    a number above the pool. ``partial`` and ``checkpoint`` tell whether a copy of a partial tail and a checkpoint block
    are due, ``first`` whether it is the request's first allocation. ``held`` is how many table slots the request has,
    ``hits`` how many it adopts.
    """

    group: int
    total: int
    evictable: int
    deferred: bool
    partial: bool
    checkpoint: bool
    first: bool
    held: int
    hits: int


@dataclass(frozen=True)
class Estimate:
    """The cache was asked how many blocks ``request`` would take to reach ``tokens``; ``dry`` if only asked.

    ``computed`` is local plus external computed tokens, ``main`` how many of ``tokens`` are not look-ahead (0: all, or
    not known). ``changed`` names what a dry run changed (empty: nothing).
    """

    request: str
    dry: bool
    tokens: int
    computed: int
    groups: tuple[GroupEstimate, ...]
    free: int
    changed: tuple[str, ...] = ()
    main: int = 0

    @property
    def total(self) -> int:
        return sum(group.total for group in self.groups)


@dataclass(frozen=True)
class Allocate:
    """Slots were asked for ``request``. ``granted`` tells the answer; ``taken`` is how many blocks left the queue.

    ``estimates`` are the questions asked on the way, in order. ``new_blocks`` and ``evictable_hits`` split ``taken`` by
    group, where that is known. ``reserved`` is how many free blocks admission has to leave for others.
    """

    request: str
    granted: bool
    taken: int
    free_before: int
    estimates: tuple[Estimate, ...]
    new_blocks: tuple[int, ...] = ()
    evictable_hits: tuple[int, ...] = ()
    reserved: int = 0
    error: str = ""


class Read(NamedTuple):
    """One group's part of a forward: what the device read for ``request`` at ``computed`` tokens.

    ``slot`` and ``block`` are where (−1: nothing was read). For recurrent groups ``found`` is the temporal state and
    ``window`` the convolution window. For attention, ``found`` is the first wrong token's content, ``position`` its
    position, and ``ok`` tells whether all positions held the request's own prefix.
    """

    request: str
    group: int
    recurrent: bool
    computed: int
    expected: State
    found: State | None
    window: State | None
    slot: int
    block: int
    ok: bool
    position: int = -1


class Write(NamedTuple):
    """One block a forward or export wrote for ``request``: who else holds it, and which keys it carried for others.

    ``state`` is the content after the write (recurrent groups) or the last token's prefix (attention).
    """

    request: str
    group: int
    block: int
    slot: int
    state: State | None
    references: int
    owned: bool
    foreign_keys: tuple[State, ...]


class Forward(NamedTuple):
    """The device ran ``request`` from ``start`` over ``tokens`` (``drafts`` of them speculative)."""

    request: str
    start: int
    tokens: int
    drafts: int
    prefill_end: int
    reads: tuple[Read, ...]
    writes: tuple[Write, ...]


@dataclass(frozen=True)
class StepEnd:
    """A whole engine step is over: what it made is due, and the state may be judged. ``index`` counts from 1.

    ``scheduled`` are the requests that ran, ``waiting`` those that did not get in, in queue order.
    """

    index: int
    scheduled: tuple[str, ...]
    running: tuple[str, ...]
    waiting: tuple[str, ...]


@dataclass(frozen=True)
class Stall:
    """``schedules`` steps in a row brought nothing forward although ``request`` is first in line.

    ``peak`` is what it needs at most by the specification, ``pool`` what an idle pool offers, ``blocked`` whether
    something legitimate holds it back (an external load in flight, other requests' blocks).
    """

    request: str
    schedules: int
    peak: int
    pool: int
    blocked: bool
    why: str = ""


@dataclass(frozen=True)
class Crash:
    """The subject raised. ``location`` is ``module:function``, ``error`` the exception's type and text."""

    location: str
    error: str
    line: str


@dataclass(frozen=True)
class Drained:
    """Everything has finished or been aborted: what is left must be nothing."""


Event = Lookup | Truncate | Resume | Loaded | Split | Estimate | Allocate | Forward | StepEnd | Stall | Crash | Drained


@dataclass(frozen=True)
class Observation:
    """An event, and the view after it. The view is live: a predicate must judge it now and keep no hold of it."""

    event: Event
    view: View

    @cached_property
    def free_queue(self) -> Sequence[int]:
        """The view's free queue, walked once for all rules that ask about this observation."""
        return self.view.free_queue()

    @cached_property
    def touched(self) -> Sequence[int]:
        """The blocks that the step touched, in ascending order, sorted once for all rules."""
        return sorted(self.view.touched())
