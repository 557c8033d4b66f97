"""A hand-made view: a small hybrid cache written down, sound until a test spoils one thing of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvproof.spec.config import Config, Group
from kvproof.spec.tracer import State, length_of, states_of
from kvproof.spec.view import NULL, Holder, Key, MambaContent, RunningRequest

TOKENS = tuple(range(100, 124))
STATES = states_of(TOKENS)
"""The prefixes of the one conversation: ``STATES[n]`` after n of its 24 tokens."""

OTHER = states_of(range(500, 524))
"""The prefixes of a conversation that shares nothing with it."""

FULL, WINDOW, MAMBA = 0, 1, 2
CONFIG = Config(
    groups=(Group("full", 4), Group("window", 4, window=6), Group("mamba", 8)),
    num_blocks=24,
    hash_unit=4,
    step_tokens=16,
    speculative=1,
)


@dataclass
class FakeView:
    """Implements :class:`kvproof.spec.view.View` with plain fields, which tests change."""

    config: Config = CONFIG
    num_blocks: int = CONFIG.num_blocks
    counts: dict[int, int] = field(default_factory=dict)
    queue: list[int] = field(default_factory=list)
    said_free: int | None = None
    links: str = ""
    keyed: dict[int, list[Key]] = field(default_factory=dict)
    unmapped: set[int] = field(default_factory=set)
    strays: dict[tuple[int, State], set[int]] = field(default_factory=dict)
    unwritten: set[int] = field(default_factory=set)
    in_flight: set[int] = field(default_factory=set)
    """Of these, the blocks that a step before the one that is being scheduled writes."""
    others: list[Holder] = field(default_factory=list)
    slots: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    running: dict[str, RunningRequest] = field(default_factory=dict)
    records: list[str] = field(default_factory=list)
    recurrent: dict[int, MambaContent] | None = field(default_factory=dict)
    attention: dict[int, list[State | None]] | None = field(default_factory=dict)
    changed: set[int] | None = None
    newest: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    loading: dict[str, set[int]] = field(default_factory=dict)
    told: dict[int, set[tuple[int, State]]] | None = None

    def references(self, block: int) -> int:
        return self.counts.get(block, 0)

    def queued(self, block: int) -> bool:
        return block in self.queue

    def free_queue(self) -> Sequence[int]:
        return list(self.queue)

    def free_count(self) -> int:
        return len(self.queue) if self.said_free is None else self.said_free

    def queue_fault(self) -> str:
        return self.links

    def keys(self, block: int) -> Sequence[Key]:
        return self.keyed.get(block, [])

    def lookup_map(self) -> Mapping[tuple[int, State], Collection[int]]:
        found = {key: set(blocks) for key, blocks in self.strays.items()}
        for block, keys in self.keyed.items():
            for key in keys:
                if block not in self.unmapped:
                    found.setdefault((key.group, key.state), set()).add(block)
        return found

    def pending(self, block: int) -> bool:
        return block in self.unwritten

    def of_this_step(self, block: int) -> bool:
        return block in self.unwritten and block not in self.in_flight

    def holders(self) -> Iterable[Holder]:
        for (name, group), table in self.slots.items():
            for slot, block in enumerate(table):
                if block != NULL:
                    yield Holder(f"table {name}/{group}", block, name, group, slot)
        yield from self.others

    def holders_of(self, blocks: Collection[int]) -> Iterable[Holder]:
        return [holder for holder in self.holders() if holder.block in blocks]

    def tables(self) -> Mapping[tuple[str, int], Sequence[int]]:
        return self.slots

    def requests(self) -> Mapping[str, RunningRequest]:
        return self.running

    def bookkeeping(self) -> Sequence[str]:
        return self.records

    def idle(self) -> bool:
        return not self.running

    def mamba_content(self, block: int) -> MambaContent | None:
        return None if self.recurrent is None else self.recurrent.get(block, MambaContent(None, ()))

    def attention_content(self, block: int, group: int) -> Sequence[State | None] | None:
        if self.attention is None:
            return None
        return self.attention.get(block, [None] * self.config.groups[group].block_size)

    def tails(self) -> Mapping[tuple[str, int], tuple[int, int]]:
        return self.newest

    def arriving(self) -> Mapping[str, Collection[int]]:
        return self.loading

    def announced(self, block: int) -> Collection[tuple[int, State]] | None:
        return None if self.told is None else self.told.get(block, set())

    def prefix(self, state: State) -> Sequence[State] | None:
        for states in (STATES, OTHER):
            if 0 < length_of(state) < len(states) and states[length_of(state)] == state:
                return states[1 : length_of(state) + 1]
        return None

    def touched(self) -> Collection[int]:
        return range(1, self.num_blocks) if self.changed is None else self.changed


def key(group: int, state: State) -> Key:
    """A key that is noted with the length it has."""
    return Key(group, state, length_of(state))


def state(at: State) -> MambaContent:
    """A recurrent block that holds one state, window and all."""
    return MambaContent(at, (at,))


def running(name: str, states: Sequence[State] = STATES, computed: int = 20) -> RunningRequest:
    return RunningRequest(name, states, 20, computed, "RUNNING")


def busy() -> FakeView:
    """Request ``r1`` has computed 20 of its tokens; the state after 8 is cached in a free block.

    Full group: blocks 1 … 5. Window group (6 tokens): blocks 6 and 7 in slots 3 and 4. Recurrent group: block 8 in slot
    1 with state 16, block 9 in slot 2 with the running state 20 keyed as a partial tail, block 10 for drafts. Block 11
    is free and keyed as state 8. Blocks 12 … 23 are free.
    """
    view = FakeView(running={"r1": running("r1")})
    view.slots = {("r1", FULL): [1, 2, 3, 4, 5], ("r1", WINDOW): [0, 0, 0, 6, 7], ("r1", MAMBA): [0, 8, 9, 10]}
    view.counts = dict(Counter(holder.block for holder in view.holders()))
    view.queue = list(range(11, 24))
    assert view.attention is not None
    assert view.recurrent is not None
    for group, blocks in ((FULL, enumerate([1, 2, 3, 4, 5])), (WINDOW, enumerate([6, 7], 3))):
        for slot, block in blocks:
            view.keyed[block] = [key(group, STATES[slot * 4 + 4])]
            view.attention[block] = list(STATES[slot * 4 + 1 : slot * 4 + 5])
    for block, at in ((8, 16), (9, 20), (11, 8)):
        view.keyed[block] = [key(MAMBA, STATES[at])]
        view.recurrent[block] = state(STATES[at])
    return view


def idle() -> FakeView:
    """The same after ``r1`` has gone: everything is free, keys and contents stay."""
    view = busy()
    view.running, view.slots, view.counts = {}, {}, {}
    view.queue = [*range(11, 24), *range(1, 11)]
    return view
