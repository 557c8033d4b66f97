"""The device: it runs a step on the memory, and shows what it reads and writes.

Order within a step: fresh blocks are cleared, block copies run (all read before any is written), synchronous loads
arrive, and the forward runs: attention writes its keys and values before it reads, recurrent layers read their state
before they save any. The tracers beside the floats go the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from kvproof.impl.reference.batch import Load, Model, Row
from kvproof.impl.reference.memory import GARBAGE, Memory
from kvproof.impl.reference.step import Outcome, Scheduled, Step
from kvproof.impl.reference.store import Flight
from kvproof.spec.config import Config
from kvproof.spec.events import Forward, Read, Write
from kvproof.spec.tracer import State
from kvproof.spec.view import NULL

Sharers = Callable[[int], Collection[str]]
"""Whose tables hold a block."""


class Device:
    """``EOS`` is what a model says to end a request; the engine says it for requests that are told to finish."""

    EOS = 7

    def __init__(self, config: Config, model: Model, memory: Memory) -> None:
        self.config, self.model, self.memory = config, model, memory
        self._attention = [i for i, g in enumerate(config.groups) if g.kind != "mamba"]
        self._recurrent = [i for i, g in enumerate(config.groups) if g.kind == "mamba"]
        self.written: set[int] = set()
        """Blocks whose content changed; whoever looks clears it."""
        self.outcomes: dict[str, Outcome | None] = {}
        """What the step under way, or the last one, has answered so far."""

    # -- a step -------------------------------------------------------------------------------------------------------

    def execute(self, step: Step, watch: Watcher | None) -> dict[str, Outcome | None]:
        """Run ``step``. The answer is per request; ``None`` for a row whose load fell short, which does not run."""
        self.outcomes = {}
        self.memory.clear(step.fresh)
        self.memory.copy(step.copies)
        self.written.update(step.fresh, (target for _, target in step.copies))
        for flight in step.loads:
            self.load(flight)
        short = {flight.load.request for flight in step.loads if not flight.whole}
        parts = [part for part in step.rows if part.request.name not in short]
        for part in parts:
            self._write_attention(part.row)
        reads = watch.reads(parts) if watch is not None else []
        for part in parts:
            self._save_states(part.row)
        answers = self.model.forward([part.row for part in parts], self.memory) if parts else []
        self.outcomes.update(dict.fromkeys(short))
        for part, answer in zip(parts, answers, strict=True):
            self.outcomes[part.request.name] = self._sample(part, answer)
        if watch is not None:
            for part, read in zip(parts, reads, strict=True):
                watch.ran(part, read)
        return self.outcomes

    def load(self, flight: Flight) -> None:
        """What a store brings lands: attention token by token as far as it came, the state only with the last."""
        load = flight.load
        if flight.received <= load.start:
            return
        states = flight.states
        for group in self._attention:
            self._mark_tokens(load.tables[group], group, load.start, states[load.start + 1 : flight.received + 1])
        if flight.whole:
            for group in self._recurrent:
                self._mark_state(load.state[group], states[load.end])
        self.model.fill(Load(load.request, load.tokens[: flight.received], load.start, flight.received, load.tables,
                             load.state if flight.whole else (NULL,) * len(load.state)), self.memory)  # fmt: skip

    def _sample(self, part: Scheduled, answer: Sequence[int]) -> Outcome:
        """Greedy verification: drafts are accepted as long as the model says the same."""
        if not answer:
            return Outcome((), 0)
        if part.request.finishing:
            return Outcome((self.EOS,), 0)
        tokens = [answer[0]]
        for draft, following in zip(part.drafts, answer[1:], strict=True):
            if draft != tokens[-1]:
                break
            tokens.append(following)
        room = min(part.request.max_tokens - part.request.outputs, self.config.max_model_len - part.request.known)
        tokens = tokens[: max(1, room)]
        return Outcome(tuple(tokens), len(tokens) - 1)

    # -- marks --------------------------------------------------------------------------------------------------------

    def _write_attention(self, row: Row) -> None:
        for group in self._attention:
            self._mark_tokens(row.tables[group], group, row.start, row.states[1:])

    def _save_states(self, row: Row) -> None:
        for save in row.saves:
            for group in self._recurrent:
                self._mark_state(save.blocks[group], row.states[save.position - row.start])

    def _mark_tokens(self, table: Sequence[int], group: int, start: int, states: Sequence[State]) -> None:
        size = self.config.groups[group].block_size
        done = 0
        while done < len(states):
            slot, offset = divmod(start + done, size)
            count = min(size - offset, len(states) - done)
            if slot < len(table) and table[slot] != NULL:
                self.memory.mark_tokens(table[slot], offset, states[done : done + count])
                self.written.add(table[slot])
            done += count

    def _mark_state(self, block: int, state: State) -> None:
        if block != NULL:
            self.memory.mark_state(block, state, state)
            self.written.add(block)


class Watcher:
    """What a step read and wrote, for those who judge it.

    ``whole`` looks at everything a row attends to in every step. Otherwise only at a request's first forward: what it
    wrote itself is its own until somebody else writes it, and that is judged as a write.
    """

    def __init__(
        self,
        config: Config,
        memory: Memory,
        sharers: Sharers,
        broken_keys: Callable[[int], Sequence[State]],
        emit: Callable[[Forward], None],
        whole: bool,
    ) -> None:
        self.config, self.memory, self.whole = config, memory, whole
        self._sharers, self._broken_keys, self._emit = sharers, broken_keys, emit

    def reads(self, parts: Sequence[Scheduled]) -> list[tuple[Read, ...]]:
        """What each row is about to read. Ask before any of them saves a state."""
        found: list[list[Read]] = [[] for _ in parts]
        for index, group in enumerate(self.config.groups):
            if group.kind == "mamba":
                going = [i for i, part in enumerate(parts) if part.row.start > 0]
                blocks = [parts[i].row.state[index] for i in going]
                there = self.memory.marks[blocks, :2].tolist()  # at once: each look at a device takes its time
                for i, (temporal, window) in zip(going, there, strict=True):
                    row = parts[i].row
                    slot = (row.start - 1) // group.block_size
                    expected = row.states[0]
                    ok = temporal == window == expected
                    seen, convolved = (expected, expected) if ok else (_known(temporal), _known(window))
                    found[i].append(Read(row.request, index, True, row.start, expected, seen, convolved, slot,
                                         row.state[index], ok))  # fmt: skip
                continue
            for i, part in enumerate(parts):
                if part.row.start > 0 and (self.whole or part.first):
                    found[i].append(self._read_tokens(part, index))
        return [tuple(reads) for reads in found]

    def _read_tokens(self, part: Scheduled, group: int) -> Read:
        """The first position before the row's own tokens that does not hold the request's own prefix, if any."""
        row, spec = part.row, self.config.groups[group]
        states, size, table = part.request.states, spec.block_size, row.tables[group]
        first = spec.first_read(row.start)
        for slot in range(first // size, -(-row.start // size)):
            low, high = max(first, slot * size), min(row.start, (slot + 1) * size)
            block = table[slot] if slot < len(table) else -1
            there = self.memory.tokens_at(block, size)[low - slot * size : high - slot * size] if block > NULL else []
            wanted = states[low + 1 : high + 1]
            if there != wanted:
                at = next((i for i, state in enumerate(wanted) if i >= len(there) or there[i] != state), 0)
                seen = _known(there[at]) if at < len(there) else None
                return Read(row.request, group, False, row.start, wanted[at], seen, None, slot, block, False, low + at)
        return Read(row.request, group, False, row.start, row.states[0], row.states[0], None, -1, -1, True)

    def ran(self, part: Scheduled, reads: tuple[Read, ...]) -> None:
        """Report the row's forward, with what it wrote."""
        row, name, writes = part.row, part.row.request, []
        start, end, states = row.start, row.end, row.states
        for index, group in enumerate(self.config.groups):
            size = group.block_size
            if group.kind == "mamba":
                for save in row.saves:
                    at, block = save.position, save.blocks[index]
                    writes.append(self._write(name, index, block, (at - 1) // size, states[at - start]))
                continue
            table = row.tables[index]
            for slot in range(start // size, -(-end // size)):
                block = table[slot] if slot < len(table) else -1
                state = states[min(end, (slot + 1) * size) - start]
                writes.append(self._write(name, index, block, slot, state))
        self._emit(Forward(name, start, end - start, len(part.drafts), part.prefill_end, reads, tuple(writes)))

    def _write(self, name: str, group: int, block: int, slot: int, state: State) -> Write:
        owners = self._sharers(block) if block > NULL else ()
        owned = not owners or (len(owners) == 1 and name in owners)
        return Write(name, group, block, slot, state, len(owners), owned, tuple(self._broken_keys(block)))


def _known(mark: int) -> State | None:
    return None if mark == GARBAGE else State(mark)


Outcomes = Mapping[str, Outcome | None]
