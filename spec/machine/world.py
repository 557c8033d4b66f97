"""What there is: blocks, keys, requests and loads, as plain data.

A :class:`World` is one state of the abstract machine. Actions work on a copy (:meth:`World.copy`), so that whoever
holds a world can rely on it; two worlds are compared by what :mod:`kvproof.spec.machine.encoding` makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NewType

from kvproof.spec.config import Config
from kvproof.spec.tracer import State
from kvproof.spec.view import Key

Status = NewType("Status", int)
WAITING: Final = Status(0)
LOADING: Final = Status(1)
"""Waits, with blocks, for an external load to arrive."""
ARRIVED: Final = Status(2)
"""The load has arrived; its tokens count from the next schedule on."""
RUNNING: Final = Status(3)

RECURRENT: Final = State(-1)
TOKENS: Final = State(-2)
Content = tuple[State | None, ...]
"""What a block holds: :data:`RECURRENT` and one state, or :data:`TOKENS` and the prefix per token of an attention
block. ``None`` and ``()`` are garbage."""

PLACEHOLDER: Final = -1
"""A draft that stands for nothing: a request that enters with one token left is padded to a whole decoding step."""


@dataclass(slots=True)
class Request:
    """``states[n]`` is the prefix after its first n tokens, prompt and output.

    ``store`` is how many of its tokens an external store holds, of which the last ``missing`` never arrive. ``drafts``
    is how many tokens were proposed for the next step (:data:`PLACEHOLDER`: as many as there can be, all of them
    wrong). ``junction`` is where others' prefix ends that a recurrent group has no state for (0: nowhere).

    Per group: ``tables``; ``cached``, how many leading slots need no key any more (−1: nothing was allocated yet);
    ``partial``, the slot whose block is shared or keyed inside itself and has to be copied before it is written (−1:
    none). ``pins`` are blocks that it holds for a store to save. ``retired`` is how many leading recurrent slots were
    given back, ``previous`` where the running state was before the last allocation that took any, ``grown`` whether
    the recurrent groups have allocated before. ``column`` and ``accepted`` are the worker's: the recurrent slot with
    the running state (−1: the one that was resumed from) and how many of the last step's rows counted.

    Of a request whose states are not moved (:mod:`kvproof.spec.machine.unmoved`): per recurrent group its ``scratch``
    blocks and the newest state that is ``held`` (position and block); ``tail`` and ``last`` were declared on admission.
    """

    name: str
    states: list[State]
    prompt: int
    max_tokens: int
    store: int = 0
    missing: int = 0
    status: Status = WAITING
    computed: int = 0
    preempted: bool = False
    finishing: bool = False
    prefilling: bool = False
    drafts: int = 0
    junction: int = 0
    tables: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    partial: list[int] = field(default_factory=list)
    pins: list[int] = field(default_factory=list)
    retired: int = 0
    previous: int = -1
    grown: bool = False
    column: int = -1
    accepted: int = 1
    scratch: dict[int, list[int]] = field(default_factory=dict)
    held: dict[int, tuple[int, int]] = field(default_factory=dict)
    tail: int = 0
    last: int = 0

    @property
    def known(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.states) - 1

    @property
    def prefill_end(self) -> int:
        """Up to here known tokens are replayed; a resumed request replays its output, too."""
        return max(self.prompt, self.known - 1)

    def strip(self, groups: int) -> None:
        """Forget every block: nothing is allocated, nothing is computed."""
        self.tables = [[] for _ in range(groups)]
        self.cached = [-1] * groups
        self.partial = [-1] * groups
        self.pins = []
        self.retired, self.previous, self.grown, self.computed = 0, -1, False, 0
        self.column, self.accepted, self.drafts = -1, 1, 0
        self.prefilling = False
        self.scratch, self.held = {}, {}

    def copy(self) -> Request:
        twin = Request(self.name, list(self.states), self.prompt, self.max_tokens, self.store, self.missing)
        twin.status, twin.computed, twin.preempted, twin.finishing = (
            self.status, self.computed, self.preempted, self.finishing)  # fmt: skip
        twin.prefilling, twin.drafts, twin.junction = self.prefilling, self.drafts, self.junction
        twin.tables = [list(table) for table in self.tables]
        twin.cached, twin.partial, twin.pins = list(self.cached), list(self.partial), list(self.pins)
        twin.previous = self.previous
        twin.retired, twin.grown, twin.column, twin.accepted = self.retired, self.grown, self.column, self.accepted
        twin.tail, twin.last = self.tail, self.last
        if self.scratch or self.held:
            twin.scratch = {group: list(blocks) for group, blocks in self.scratch.items()}
            twin.held = dict(self.held)
        return twin


@dataclass(frozen=True, slots=True)
class Flight:
    """A load on its way: tokens [``start``, ``end``) of ``states``, of which the last ``missing`` won't come, into
    ``tables``. It arrives after ``steps`` more steps, whether its request still wants it or not; blocks of one that
    went away (``orphan``) are held until then."""

    request: str
    steps: int
    start: int
    end: int
    missing: int
    tables: tuple[tuple[int, ...], ...]
    states: tuple[State, ...]
    orphan: bool = False


@dataclass(slots=True)
class World:
    """One state. Block 0 is the null block.

    ``queue`` is the free queue from its front (taken next). ``keys[b]`` are block b's keys, the primary one first;
    ``index`` has the blocks of a key in the order in which they got it. ``waiting`` and ``loading`` (those that wait
    with blocks in their hands) are queues from their front, ``running`` is in order of admission. ``copies``
    (group, source, target) wait for the device, ``made`` are the keys that this step has made: both are empty between
    steps.
    """

    references: list[int]
    queue: list[int]
    keys: list[list[Key]]
    contents: list[Content]
    index: dict[tuple[int, State], list[int]] = field(default_factory=dict)
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    loading: list[Request] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    made: set[tuple[int, State]] = field(default_factory=set)
    flights: list[Flight] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)
    deferred: list[int] | None = None
    """While a step that has run is taken in: blocks to be given back when that is over (``None``: at once)."""
    due: dict[int, frozenset[Key]] | None = None
    """While a step runs: the keys that every block had before it. Those made since are pending."""

    @classmethod
    def empty(cls, config: Config) -> World:
        """Nothing has happened yet."""
        count = config.num_blocks
        return cls([0] * count, list(range(1, count)), [[] for _ in range(count)], [()] * count)

    def copy(self) -> World:
        """A world of its own, equal to this one."""
        return World(
            list(self.references),
            list(self.queue),
            [list(keys) for keys in self.keys],
            list(self.contents),
            {key: list(blocks) for key, blocks in self.index.items()},
            [request.copy() for request in self.running],
            [request.copy() for request in self.waiting],
            [request.copy() for request in self.loading],
            list(self.copies),
            set(self.made),
            list(self.flights),
        )

    def requests(self) -> list[Request]:
        """All that are there, running ones first."""
        return [*self.running, *self.loading, *self.waiting]

    def find(self, name: str) -> Request | None:
        return next((request for request in self.requests() if request.name == name), None)
