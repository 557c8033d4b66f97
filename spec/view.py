"""The view: how a predicate sees any cache, without knowing whose it is.

Everything is an identifier or an integer. Blocks and groups are numbered from 0, block 0 is the null block, tables map
a request and group to a list of block numbers, and a slot is an index into a table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvproof.spec.config import Config
from kvproof.spec.tracer import State

NULL = 0
"""The null block: a placeholder in tables; never counted, freed, keyed or written."""


class Key(NamedTuple):
    """What is registered on a block: ``group`` may reuse it as ``state`` (a prefix, with its length).

    ``tokens`` is the length the cache itself notes for the key; a healthy cache agrees with the state's own.
    """

    group: int
    state: State
    tokens: int


@dataclass(frozen=True)
class MambaContent:
    """What a recurrent block holds: the temporal state and the convolution window, each named by its prefix.

    ``window`` names, for every shift of the convolution buffer, the prefix whose last tokens lie there; its first entry
    is the window that goes with ``temporal`` when nothing is speculative. ``None`` is garbage.
    """

    temporal: State | None
    window: tuple[State | None, ...]


class Holder(NamedTuple):
    """One counted reference to a block: whose it is (``table r1/0``, ``copy source``, ``deferred free``).

    A table's holder is named by ``request`` and ``group`` as well, and by the ``slot`` where the block lies.
    """

    owner: str
    block: int
    request: str = ""
    group: int = -1
    slot: int = -1


class RunningRequest(NamedTuple):
    """A request that holds blocks. ``states[n]`` is the prefix after its first n tokens; ``computed`` as scheduled."""

    name: str
    states: Sequence[State]
    prompt: int
    computed: int
    status: str


class View(Protocol):
    """The state of a cache between two events. Cheap accessors; nothing here changes the subject."""

    @property
    def config(self) -> Config: ...

    @property
    def num_blocks(self) -> int: ...

    def references(self, block: int) -> int:
        """The block's reference count, as the cache has it."""

    def queued(self, block: int) -> bool:
        """Whether the block is in the free queue (found by walking the queue)."""

    def free_queue(self) -> Sequence[int]:
        """The free queue from its front (evicted next), found by walking it; raises nothing when it is malformed."""

    def free_count(self) -> int:
        """How many blocks the cache says are free."""

    def queue_fault(self) -> str:
        """What is wrong with the queue's links, or an empty string."""

    def keys(self, block: int) -> Sequence[Key]:
        """The keys that the block carries, primary first."""

    def lookup_map(self) -> Mapping[tuple[int, State], Collection[int]]:
        """(group, state) to the blocks that a lookup of that key could return."""

    def pending(self, block: int) -> bool:
        """Whether the block's content is not due yet: the step that writes it has not run."""

    def of_this_step(self, block: int) -> bool:
        """Whether it is the step that is being scheduled that writes it: those in flight run before that."""

    def holders(self) -> Iterable[Holder]:
        """Every counted reference that the cache's bookkeeping gives a reason for."""

    def holders_of(self, blocks: Collection[int]) -> Iterable[Holder]:
        """:meth:`holders` of these blocks alone; cheap where the cache can tell without looking at all tables."""

    def tables(self) -> Mapping[tuple[str, int], Sequence[int]]:
        """(request, group) to its table."""

    def requests(self) -> Mapping[str, RunningRequest]:
        """Requests that are running or hold blocks, by name."""

    def bookkeeping(self) -> Sequence[str]:
        """Per-request records the cache keeps, as ``where: request`` lines; empty when nothing is left."""

    def idle(self) -> bool:
        """Whether no request is running, waiting or in flight, and no free is deferred."""

    def mamba_content(self, block: int) -> MambaContent | None:
        """What a recurrent layer would read from the block; ``None`` where the subject can't tell."""

    def attention_content(self, block: int, group: int) -> Sequence[State | None] | None:
        """Per token of the block, the prefix whose key/value lies there; ``None`` where the subject can't tell."""

    def tails(self) -> Mapping[tuple[str, int], tuple[int, int]]:
        """(request, recurrent group) to the newest state that it left or resumed from: its position and its block.

        Empty where the cache keeps no such account.
        """

    def arriving(self) -> Mapping[str, Collection[int]]:
        """The blocks that external loads in flight are still writing to, by the request they were for."""

    def announced(self, block: int) -> Collection[tuple[int, State]] | None:
        """The keys of ``block`` by the cache's events so far; ``None`` where nobody listens to them."""

    def prefix(self, state: State) -> Sequence[State] | None:
        """The states after 1 … n tokens that lead to ``state``, or ``None`` for a prefix nobody submitted."""

    def touched(self) -> Collection[int]:
        """The blocks whose keys, content or references changed since the last observation of a whole step."""
