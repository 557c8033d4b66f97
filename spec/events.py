"""The events of a cache: what a predicate about calls is given, with the values that mattered at the time.

An :class:`Observation` is an event and the view after it. What a predicate needs of the view *before* is recorded in
the event itself, so that observing costs no copy of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from kvproof.spec.tracer import State
from kvproof.spec.view import View


@dataclass(frozen=True)
class Promised:
    """A lookup has to answer ``tokens`` at least, for nothing is lost of what ``base`` left.

    ``resend`` is whether the request is the same prompt again (otherwise it shares a part of it). Where the answer is
    less, ``lacking`` says as a slug what stands in between, and ``group`` is the one that lacks something (−1: none).
    """

    tokens: int
    base: str
    resend: bool
    lacking: str = ""
    group: int = -1


@dataclass(frozen=True)
class Lookup:
    """A prefix-cache lookup for ``request`` answered ``tokens``; ``blocks[g]`` are group g's hit blocks.

    ``limit`` is the longest hit allowed (at most tokens − 1). ``states`` are the request's own prefixes. ``joint`` is
    whether the groups agreed on one boundary (otherwise each was looked up alone and ``diverged`` may be set).
    ``depth[g]`` is group g's own depth in tokens, where the cache reports it. ``promised`` is what earlier requests
    have promised to it, where anybody followed them (:mod:`kvproof.spec.promises`).
    """

    request: str
    states: tuple[State, ...] = field(repr=False)
    tokens: int
    limit: int
    blocks: tuple[tuple[int, ...], ...]
    joint: bool = True
    diverged: bool = False
    depth: tuple[int, ...] = ()
    promised: Promised | None = None


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
    whether the load completes in a later step. ``unread``: nothing of it may be read from any cache.
    """

    request: str
    local: int
    external: int
    blocks: tuple[tuple[int, ...], ...]
    hit: int
    offered: int
    diverged: bool
    asynchronous: bool
    unread: bool = False


@dataclass(frozen=True)
class Loaded:
    """An external load for ``request`` is over: of the tokens [``start``, ``claimed``) those up to ``received`` came.

    ``counted`` is how many tokens the cache counts as computed now. ``partly`` are attention blocks in whose midst it
    ended, ``unwiped`` those of them that were not wiped since they were handed out, where anybody wipes blocks.
    """

    request: str
    start: int
    claimed: int
    received: int
    counted: int
    partly: tuple[int, ...] = ()
    unwiped: tuple[int, ...] = ()


@dataclass(frozen=True)
class Offer:
    """A store outside the cache was asked what it adds to ``local`` tokens of ``request``, and ``offered`` so many.

    ``offered`` is ``None`` for "ask again". ``states`` are the request's own prefixes. ``held`` is what can be read of
    the store now: (group, state) for each block of that group that ends there, a recurrent state for a recurrent group.
    """

    request: str
    states: tuple[State, ...] = field(repr=False)
    local: int
    offered: int | None
    held: frozenset[tuple[int, State]] = field(repr=False)


OffloadMoment = Literal["offered", "chosen", "copied"]


@dataclass(frozen=True)
class Offloaded:
    """``block`` is taken for what ``state`` promises to ``group``, outside the cache, and holds it by now.

    ``moment``: the cache has ``offered`` it with its boundary, a store has ``chosen`` it for a key of its own, or it is
    being ``copied``, some time after it was chosen.
    """

    group: int
    block: int
    state: State
    moment: OffloadMoment


@dataclass(frozen=True)
class Zeroing:
    """A step is about to run, and first wipes these ``blocks`` on the device."""

    blocks: tuple[int, ...]


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

    ``peak`` is what it needs at most by the specification, and whoever else holds blocks; ``pool`` is what an idle pool
    offers. ``blocked``: others hold blocks, and none of them runs.
    """

    request: str
    schedules: int
    peak: int
    pool: int
    blocked: bool
    why: str = ""


@dataclass(frozen=True)
class Preempted:
    """The scheduler took everything from ``request`` to make room: ``freed`` blocks are free now that were not.

    ``alone`` is how many blocks nobody else held.
    """

    request: str
    alone: int
    freed: int


@dataclass(frozen=True)
class Starved:
    """``request`` was given nothing in ``steps`` steps in a row in which others ran, although nothing was short.

    ``left`` is how many tokens the last of these steps left over. There was a place for it, and nobody was refused
    blocks. ``why`` is how it stood: ``running``, or ``waiting`` as the first in line.
    """

    request: str
    steps: int
    left: int
    why: str


@dataclass(frozen=True)
class Crash:
    """The subject raised. ``location`` is ``module:function``, ``error`` the exception's type and text.

    ``call`` is the operator's call that raised, where that is answered with an error and the engine goes on. Empty: the
    engine's own loop raised, and nothing more can come of it.
    """

    location: str
    error: str
    line: str
    call: str = ""


@dataclass(frozen=True)
class Lone:
    """``request`` had the whole engine to itself: it ran to its end there, or can't get any further.

    ``tokens`` is the most it may have, ``longest`` the longest request that the engine's own start-up check promised to
    hold in this pool of ``blocks`` (0: it promised none, or was not asked). ``finished`` tells that it ended by itself;
    otherwise ``preempted`` is how often in a row it lost its blocks without having got any further, 0 where it waits
    and does not get in. ``partial`` tells that its last lookup ended inside a block: a hit that takes room for a copy.
    """

    request: str
    tokens: int
    longest: int
    blocks: int
    finished: bool
    preempted: int = 0
    partial: bool = False


@dataclass(frozen=True)
class Stored:
    """The cache announced stored blocks of ``group`` (−1: it did not say which), as whoever mirrors it reads that.

    ``keys`` are the prefixes that the hashes stand for, ``parent`` is that of the parent's hash (``EMPTY`` where there
    is none); ``None`` for a hash that stands for nothing known. ``tokens`` is how many tokens are listed, at
    ``block_size`` a hash, and ``reached`` where they lead, block by block from the parent on. ``gone`` are those of
    ``keys`` that no block carries once the step is over, although nothing said so. ``offloaded``: it is host memory
    that has them.
    """

    group: int
    keys: tuple[State | None, ...]
    parent: State | None
    tokens: int
    block_size: int
    reached: tuple[State, ...]
    gone: tuple[State, ...] = ()
    offloaded: bool = False


@dataclass(frozen=True)
class Removed:
    """The cache announced that ``state`` of ``group`` is gone. ``carriers`` carry it still once the step is over."""

    group: int
    state: State
    carriers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Counted:
    """What the cache says of itself in tokens: ``counts`` by name.

    ``of`` is what is counted: ``prompt`` of one ``request`` (``prompt`` tokens, of which ``local`` and ``external``
    came from a cache, and ``computed`` were left to do), or ``lookups`` in the cache or in the external store
    (``queries``, of which ``hits``). ``found`` is how many tokens of the prompt were in a cache when the request was
    admitted first (-1: not known).
    """

    of: str
    counts: tuple[tuple[str, int], ...]
    request: str = ""
    found: int = -1


@dataclass(frozen=True)
class Drained:
    """Everything has finished or been aborted: what is left must be nothing."""


Event = (
    Lookup
    | Truncate
    | Resume
    | Loaded
    | Zeroing
    | Offer
    | Offloaded
    | Split
    | Estimate
    | Allocate
    | Forward
    | StepEnd
    | Stall
    | Starved
    | Preempted
    | Lone
    | Stored
    | Removed
    | Counted
    | Crash
    | Drained
)


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
