"""A toy engine with a prefix cache: small, correct, and faulty on demand.

Every group keeps all of a request's blocks. A chunk never crosses a scheduler block's boundary, so a recurrent block
holds exactly the state at its slot's end once it is full. Hits are whole scheduler blocks. There are no drafts, no
external loads and no checkpoints: those settings are ignored.

Faults: ``leak`` (an aborted request that runs leaves its last block's reference behind), ``unaligned`` (a prefill chunk
that isn't the first of its step may cross a boundary, so that a full slot's state is not the one its key promises) and
``crash`` (a preemption while two others wait raises).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvproof.spec.config import Config
from kvproof.spec.events import Crash, Drained, Event, Forward, Observation, Resume, StepEnd
from kvproof.spec.scenario import Action
from kvproof.spec.subject import Observer
from kvproof.spec.tracer import State, advance, length_of, states_of
from kvproof.spec.view import NULL, Holder, Key, MambaContent, RunningRequest

DRAIN_STEPS = 2000


def toy_command(seconds_between_reports: float) -> str:
    """A program that is the command ``kvproof``, but for its subject: the toy with the fault that comes before the
    command's arguments."""
    return f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from toysubject import ToySubject
sys.path.pop(0)
from kvproof import cli, subjects
from kvproof.models.stateful import campaign
campaign.SECONDS_BETWEEN_REPORTS = {seconds_between_reports}
fault = sys.argv.pop(1)
class Subject(ToySubject):
    def lacking(self):
        return {{}}
subjects.open_subject = lambda *_: Subject(fault)
cli.main()
"""


@dataclass
class Request:
    name: str
    tokens: list[int]
    states: list[State]
    prompt: int
    most: int
    groups: int
    tables: list[list[int]] = field(default_factory=list)
    computed: int = 0
    ends_now: bool = False

    def __post_init__(self) -> None:
        self.tables = [[] for _ in range(self.groups)]


class ToySubject:
    """Implements :class:`kvproof.spec.subject.Subject`."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.name = f"toy with {fault}" if fault else "toy"

    def families(self) -> frozenset[str]:
        return frozenset({"SLOT", "REF", "FLOW"})

    def start(self, config: Config, observer: Observer | None) -> Toy:
        return Toy(config.check(), observer, self.fault)


class Toy:
    """Implements :class:`kvproof.spec.subject.Driven` and :class:`kvproof.spec.view.View` in one."""

    def __init__(self, config: Config, observer: Observer | None, fault: str) -> None:
        self.config, self.fault = config, fault
        self.observer = observer
        self.num_blocks = config.num_blocks
        self.refs = [0] * config.num_blocks
        self.queue = list(range(1, config.num_blocks))
        self.block_key: dict[int, Key] = {}
        self.key_block: dict[tuple[int, State], int] = {}
        self.attention: dict[int, list[State | None]] = {}
        self.mamba: dict[int, State] = {}
        self.sequences: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.steps = 0
        self.dead = False
        self.dirty: set[int] = set()

    # -- Driven -------------------------------------------------------------------------------------------------------

    @property
    def view(self) -> Toy:
        return self

    def live(self) -> tuple[str, ...]:
        return () if self.dead else tuple(r.name for r in (*self.running, *self.waiting))

    def apply(self, action: Action) -> bool:
        if self.dead:
            return False
        request = next((r for r in (*self.running, *self.waiting) if r.name == action.request), None)
        match action.kind:
            case "submit":
                return self._submit(action)
            case "step":
                for _ in range(action.times):
                    if not self.live():
                        break
                    self._step()
                return True
            case "finish" if request is not None:
                request.ends_now = True
                return True
            case "abort" if request is not None:
                self._leave(request, aborted=True)
                return True
            case "preempt" if request in self.running:
                assert request is not None
                self._preempt(request)
                return True
            case "evict":
                for block in self.queue[: action.times or len(self.queue)]:
                    self._unkey(block)
                return True
            case "reset" if not any(self.refs):
                for block in list(self.block_key):
                    self._unkey(block)
                return True
        return False

    def drain(self) -> None:
        for _ in range(DRAIN_STEPS):
            if not self.live():
                break
            self._step()
        for name in self.live():
            self.apply(Action("abort", name))
        if not self.dead:
            self._emit(Drained())

    # -- the engine ---------------------------------------------------------------------------------------------------

    def _emit(self, event: Event) -> None:
        if self.observer is not None:
            self.observer(Observation(event, self))

    def _submit(self, action: Action) -> bool:
        if action.request in self.sequences:
            return False
        base = self.sequences.get(action.base)
        shared = base.tokens[: min(action.shared, action.length)] if base is not None else []
        first = (len(self.sequences) + 1) * 100_000
        tokens = [*shared, *range(first, first + action.length - len(shared))]
        room = (self.num_blocks - 1) // len(self.config.groups) * min(g.block_size for g in self.config.groups)
        if not tokens or len(tokens) >= room:
            return False
        most = min(action.max_tokens, room - len(tokens))
        request = Request(action.request, tokens, states_of(tokens), len(tokens), most, len(self.config.groups))
        self.sequences[action.request] = request
        self.waiting.append(request)
        return True

    def _step(self) -> None:
        self.steps += 1
        budget, ran = self.config.step_tokens, []
        for request in list(self.running):
            if request in self.running and (end := self._chunk(request, budget, ran)):
                budget -= end - request.computed
                ran.append((request, end))
        while self.waiting and budget and len(self.running) < self.config.max_running:
            request = self.waiting[0]
            if not request.computed:
                self._adopt(request)
            end = self._chunk(request, budget, ran)
            if not end:
                self._release(request)
                break
            budget -= end - request.computed
            self.running.append(self.waiting.pop(0))
            ran.append((request, end))
        ran = [(request, end) for request, end in ran if request in self.running]
        for request, end in ran:
            self._forward(request, end)
        self._emit(
            StepEnd(
                self.steps,
                tuple(r.name for r, _ in ran),
                tuple(r.name for r in self.running),
                tuple(r.name for r in self.waiting),
            )
        )

    def _chunk(self, request: Request, budget: int, ran: list[tuple[Request, int]]) -> int:
        """Where the request's next chunk ends, with blocks for it; 0 if it must wait."""
        block = self.config.scheduler_block
        end = min(len(request.tokens), request.computed + budget)
        if not (self.fault == "unaligned" and ran):
            end = min(end, (request.computed // block + 1) * block)
        if end <= request.computed:
            return 0
        sizes = [g.block_size for g in self.config.groups]
        wanted = [-(-end // size) - len(table) for size, table in zip(sizes, request.tables, strict=True)]
        while sum(wanted) > len(self.queue):
            victim = self.running[-1] if self.running else None
            if victim is None or request not in self.running or victim is request or any(r is victim for r, _ in ran):
                return 0
            self._preempt(victim)
        for table, count in zip(request.tables, wanted, strict=True):
            for _ in range(count):
                block_id = self.queue.pop(0)
                self._unkey(block_id)
                self.attention.pop(block_id, None)
                self.mamba.pop(block_id, None)
                self.refs[block_id] = 1
                table.append(block_id)
        return end

    def _adopt(self, request: Request) -> None:
        """The longest prefix of whole scheduler blocks that every group has."""
        block = self.config.scheduler_block
        hit = 0
        for end in range(block, len(request.tokens), block):
            keys = [
                (g, request.states[n])
                for g, group in enumerate(self.config.groups)
                for n in range(end - block + group.block_size, end + 1, group.block_size)
            ]
            if not all(key in self.key_block for key in keys):
                break
            hit = end
        for g, group in enumerate(self.config.groups):
            for n in range(group.block_size, hit + 1, group.block_size):
                found = self.key_block[g, request.states[n]]
                if not self.refs[found]:
                    self.queue.remove(found)
                self.refs[found] += 1
                request.tables[g].append(found)
        request.computed = hit
        if hit:
            blocks = tuple(tuple(table) for table in request.tables)
            self._emit(Resume(request.name, hit, 0, blocks, hit, 0, False, False))

    def _forward(self, request: Request, end: int) -> None:
        start, request.computed = request.computed, end
        for g, group in enumerate(self.config.groups):
            size, table = group.block_size, request.tables[g]
            if group.kind == "mamba":
                self.mamba[table[-(-end // size) - 1]] = request.states[end]
            else:
                for position in range(start, end):
                    content = self.attention.setdefault(table[position // size], [None] * size)
                    content[position % size] = request.states[position + 1]
            for slot in range(start // size, end // size):
                self.dirty.add(table[slot])
                self._key(table[slot], Key(g, request.states[(slot + 1) * size], (slot + 1) * size))
        self._emit(Forward(request.name, start, end - start, 0, request.prompt, (), ()))
        if end == len(request.tokens):
            request.tokens.append(1_000_000_000 + (request.states[-1] >> 22) % 65_521)
            request.states.append(advance(request.states[-1], request.tokens[-1]))
            if request.ends_now or len(request.tokens) - request.prompt >= request.most:
                self._leave(request)

    def _key(self, block: int, key: Key) -> None:
        if (key.group, key.state) not in self.key_block and block not in self.block_key:
            self.block_key[block] = key
            self.key_block[key.group, key.state] = block

    def _unkey(self, block: int) -> None:
        key = self.block_key.pop(block, None)
        if key is not None:
            del self.key_block[key.group, key.state]

    def _release(self, request: Request, kept: int = 0) -> None:
        blocks = [block for table in request.tables for block in reversed(table)]
        for block in blocks[kept:]:
            self.refs[block] -= 1
            if not self.refs[block]:
                self.queue.append(block)
        request.tables = [[] for _ in request.tables]
        request.computed = 0

    def _leave(self, request: Request, aborted: bool = False) -> None:
        leaks = aborted and self.fault == "leak" and request in self.running
        (self.running if request in self.running else self.waiting).remove(request)
        self._release(request, kept=1 if leaks else 0)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        self.waiting.insert(0, request)
        if self.fault == "crash" and len(self.waiting) > 2:
            self.dead = True
            self._emit(Crash("toy:_preempt", "RuntimeError: two others wait", "self._release(request)"))

    # -- View ---------------------------------------------------------------------------------------------------------

    def references(self, block: int) -> int:
        return self.refs[block]

    def queued(self, block: int) -> bool:
        return block in self.queue

    def free_queue(self) -> Sequence[int]:
        return self.queue

    def free_count(self) -> int:
        return len(self.queue)

    def queue_fault(self) -> str:
        return ""

    def keys(self, block: int) -> Sequence[Key]:
        key = self.block_key.get(block)
        return [] if key is None else [key]

    def lookup_map(self) -> Mapping[tuple[int, State], Collection[int]]:
        return {key: [block] for key, block in self.key_block.items()}

    def pending(self, block: int) -> bool:
        return False

    def of_this_step(self, block: int) -> bool:
        return False

    def holders(self) -> Iterable[Holder]:
        for request in (*self.running, *self.waiting):
            for group, table in enumerate(request.tables):
                for slot, block in enumerate(table):
                    yield Holder(f"table {request.name}/{group}", block, request.name, group, slot)

    def holders_of(self, blocks: Collection[int]) -> Iterable[Holder]:
        return [holder for holder in self.holders() if holder.block in blocks]

    def tables(self) -> Mapping[tuple[str, int], Sequence[int]]:
        live = (*self.running, *self.waiting)
        return {(r.name, g): table for r in live for g, table in enumerate(r.tables) if table}

    def requests(self) -> Mapping[str, RunningRequest]:
        return {
            r.name: RunningRequest(
                r.name, r.states, r.prompt, r.computed, "RUNNING" if r in self.running else "WAITING"
            )
            for status, requests in (("RUNNING", self.running), ("WAITING", self.waiting))
            for r in requests
        }

    def bookkeeping(self) -> Sequence[str]:
        return []

    def idle(self) -> bool:
        return not self.running and not self.waiting

    def mamba_content(self, block: int) -> MambaContent | None:
        state = self.mamba.get(block)
        return MambaContent(state, (state,) if state is not None else ())

    def attention_content(self, block: int, group: int) -> Sequence[State | None] | None:
        return self.attention.get(block, [None] * self.config.groups[group].block_size)

    def tails(self) -> Mapping[tuple[str, int], tuple[int, int]]:
        return {}

    def arriving(self) -> Mapping[str, Collection[int]]:
        return {}

    def announced(self, block: int) -> Collection[tuple[int, State]] | None:
        return None

    def prefix(self, state: State) -> Sequence[State] | None:
        length = length_of(state)
        for request in self.sequences.values():
            if length < len(request.states) and request.states[length] == state:
                return request.states[1 : length + 1]
        return None

    def touched(self) -> Collection[int]:
        touched, self.dirty = self.dirty, set()
        return touched or [block for block in range(self.num_blocks) if block != NULL]
