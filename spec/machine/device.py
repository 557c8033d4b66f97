"""What a step does to the blocks' contents: copies, loads, forwards, and what remains of drafts.

Only what a cache must get right is here: which prefix's state lies in which block, and which tokens' keys and values.
A recurrent row starts from the state in its request's running slot and leaves the state at its end in the slot of that
end; with drafts, one state per draft in the slots after it, so that whichever is accepted can be found. When
acceptance crosses a block's end the state there is saved into that block's slot. Where states are not moved
(:mod:`kvproof.spec.machine.unmoved`), each is saved where the step has a place for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvproof.spec.events import Forward, Read, Write
from kvproof.spec.machine.schedule import Row, Step
from kvproof.spec.machine.sizes import Sizes, ceil
from kvproof.spec.machine.world import RECURRENT, TOKENS, Content, Flight, Request, World
from kvproof.spec.sharing import broken_keys, sharers
from kvproof.spec.tracer import State, advance
from kvproof.spec.view import NULL, View

FIRST_OUTPUT = 1_000_000_000
WRONG = 0
"""A token that no model says: what a draft consists of that will be rejected."""


def next_token(state: State) -> int:
    """What the model says after a prefix: a function of the prefix, so that equal prompts get equal answers."""
    return FIRST_OUTPUT + (state >> 22) % 65_521


class Device:
    """Runs one step's rows on the contents of ``world``. With a ``view``, what is read and written is reported."""

    def __init__(self, world: World, sizes: Sizes, view: View | None) -> None:
        self.world, self.sizes, self.view = world, sizes, view
        self.forwards: list[Forward] = []

    def run(self, step: Step, accepted: Sequence[int]) -> None:
        """``accepted[i]`` drafts of row i are right."""
        world = self.world
        before = [world.contents[source] for source, _ in step.copies]
        for (_, target), content in zip(step.copies, before, strict=True):
            self._put(target, content)
        for row in step.rows:
            if row.load is not None:
                self.load(row.load)
        ahead = [self._states_ahead(row, right) for row, right in zip(step.rows, accepted, strict=True)]
        for row in step.rows if self.sizes.dialect.moves_states else ():
            self._move_state(row)
        for row, states in zip(step.rows, ahead, strict=True):
            self._write_attention(row, states)
        reads = [self._reads(row) for row in step.rows] if self.view is not None else []
        writes = [self._write_states(row, states) for row, states in zip(step.rows, ahead, strict=True)]
        for row, right, states, written in zip(step.rows, accepted, ahead, writes, strict=True):
            written += self._keep(row, right)
            if self.view is not None:
                written += self._attention_writes(row, states)
        if self.view is not None:
            self._report(step, reads, writes)

    def load(self, flight: Flight) -> None:
        """External tokens arrive: keys and values token by token, and the state at the end if nothing is missing."""
        end = flight.end - flight.missing
        for group, spec in enumerate(self.sizes.config.groups):
            table, size = flight.tables[group], spec.block_size
            if spec.kind == "mamba":
                slot = ceil(flight.end, size) - 1
                if not flight.missing and slot < len(table) and table[slot] != NULL:
                    self._put(table[slot], (RECURRENT, flight.states[flight.end]))
                continue
            for slot in range(flight.start // size, ceil(end, size)):
                if slot < len(table) and table[slot] != NULL:
                    first, last = max(flight.start, slot * size), min(end, (slot + 1) * size)
                    self._write(table[slot], size, first - slot * size, flight.states[first + 1 : last + 1])

    # -- contents -----------------------------------------------------------------------------------------------------

    def _put(self, block: int, content: Content) -> None:
        self.world.contents[block] = content
        self.world.touched.add(block)

    def _write(self, block: int, size: int, offset: int, states: Sequence[State]) -> None:
        held = self.world.contents[block]
        tokens: list[State | None] = list(held) if held[:1] == (TOKENS,) else [TOKENS, *[None] * size]
        tokens[1 + offset : 1 + offset + len(states)] = states
        self._put(block, tuple(tokens))

    def _state(self, block: int) -> State | None:
        content = self.world.contents[block] if block > NULL else ()
        return content[1] if content[:1] == (RECURRENT,) else None

    @staticmethod
    def _block(request: Request, group: int, column: int) -> int:
        table = request.tables[group]
        return table[column] if 0 <= column < len(table) else -1

    def _states_ahead(self, row: Row, right: int) -> list[State]:
        """The prefixes with 1, 2, … drafts: the first ``right`` are what the model says, the others are not."""
        state, states = row.request.states[row.end - row.drafts], []
        for index in range(row.drafts):
            state = advance(state, next_token(state) if index < right else WRONG)
            states.append(state)
        return states

    @staticmethod
    def _prefix(row: Row, ahead: Sequence[State], position: int) -> State:
        over = position - (row.end - row.drafts)
        return row.request.states[position] if over <= 0 else ahead[over - 1]

    # -- recurrent states ---------------------------------------------------------------------------------------------

    def _move_state(self, row: Row) -> None:
        request, size = row.request, self.sizes.block
        before = request.column if request.column >= 0 else (row.start - 1) // size
        request.column = ceil(row.end, size) - 1
        if before < 0 or before == request.column:
            return
        for group in self.sizes.recurrent:
            target = self._block(request, group, request.column)
            if target > NULL:
                state = self._state(self._block(request, group, before + request.accepted - 1))
                self._put(target, (RECURRENT, state))
        request.accepted = 1

    def _save_states(self, row: Row, ahead: Sequence[State]) -> list[Write]:
        """States that are not moved: each goes where the step has a place for it."""
        written = []
        for group, blocks in zip(self.sizes.recurrent, row.places, strict=True):
            for index, block in enumerate(blocks):
                position = row.end - row.drafts + index
                state = self._prefix(row, ahead, position)
                self._put(block, (RECURRENT, state))
                written.append(self._written(row, group, block, (position - 1) // self.sizes.block, state))
        return written

    def _write_states(self, row: Row, ahead: Sequence[State]) -> list[Write]:
        if not self.sizes.dialect.moves_states:
            return self._save_states(row, ahead)
        written = []
        for group in self.sizes.recurrent:
            for index in range(row.drafts + 1):
                state = self._prefix(row, ahead, row.end - row.drafts + index)
                block = self._block(row.request, group, row.request.column + index)
                if block > NULL:
                    self._put(block, (RECURRENT, state))
                written.append(self._written(row, group, block, row.request.column + index, state))
        return written

    def _keep(self, row: Row, right: int) -> list[Write]:
        """After sampling: how many rows counted, and the state at a block's end that acceptance crossed is saved."""
        request, size = row.request, self.sizes.block
        first = row.end - row.drafts
        if first < request.known:
            request.accepted = 1
            return []
        request.accepted = 1 + right
        if not self.sizes.config.speculative or not self.sizes.dialect.moves_states:
            return []
        boundary = (first + right) // size * size
        if boundary < first:
            return []
        shift, target_column = boundary - first, boundary // size - 1
        column = request.column
        if column == target_column:
            request.accepted = 1
            if shift == 0:
                return []
        written = []
        for group in self.sizes.recurrent:
            target = self._block(request, group, target_column)
            state = self._state(self._block(request, group, column + shift))
            if target > NULL:
                self._put(target, (RECURRENT, state))
                written.append(self._written(row, group, target, target_column, state))
        return written

    # -- attention ----------------------------------------------------------------------------------------------------

    def _write_attention(self, row: Row, ahead: Sequence[State]) -> None:
        size = self.sizes.slot
        for group in self.sizes.attention:
            for slot in range(row.start // size, ceil(row.end, size)):
                block = self._block(row.request, group, slot)
                if block > NULL:
                    first, last = max(row.start, slot * size), min(row.end, (slot + 1) * size)
                    states = [self._prefix(row, ahead, position + 1) for position in range(first, last)]
                    self._write(block, size, first - slot * size, states)

    # -- what is reported ---------------------------------------------------------------------------------------------

    def _reads(self, row: Row) -> tuple[Read, ...]:
        request, reads = row.request, []
        expected = request.states[row.start]
        for group in self.sizes.recurrent if row.start else ():
            moved = self.sizes.dialect.moves_states
            slot = request.column + request.accepted - 1 if moved else len(request.tables[group]) - 1
            block = self._block(request, group, slot)
            found = self._state(block)
            reads.append(Read(request.name, group, True, row.start, expected, found, found, slot, block,
                              found == expected))  # fmt: skip
        return (*reads, *(self._attention_read(row, group) for group in self.sizes.attention))

    def _attention_read(self, row: Row, group: int) -> Read:
        request, size, end = row.request, self.sizes.slot, row.start
        for position in range(end):
            slot = position // size
            block = self._block(request, group, slot)
            content = self.world.contents[block] if block > NULL else ()
            found = content[1 + position % size] if content[:1] == (TOKENS,) else None
            expected = request.states[position + 1]
            if found != expected:
                return Read(request.name, group, False, end, expected, found, None, slot, block, False, position)
        return Read(request.name, group, False, end, request.states[end], request.states[end], None, -1, -1, True)

    def _attention_writes(self, row: Row, ahead: Sequence[State]) -> list[Write]:
        size, written = self.sizes.slot, []
        for group in self.sizes.attention:
            for slot in range(row.start // size, ceil(row.end, size)):
                state = self._prefix(row, ahead, min(row.end, (slot + 1) * size))
                written.append(self._written(row, group, self._block(row.request, group, slot), slot, state))
        return written

    def _written(self, row: Row, group: int, block: int, slot: int, state: State | None) -> Write:
        """A write, before it is known who else would see it."""
        return Write(row.request.name, group, block, slot, state, 0, True, ())

    def _report(self, step: Step, reads: Sequence[tuple[Read, ...]], writes: Sequence[list[Write]]) -> None:
        assert self.view is not None
        held: dict[int, set[str]] = {}
        for request in self.world.requests():
            for table in (*request.tables, *request.scratch.values()):
                for block in table:
                    if block != NULL:
                        held.setdefault(block, set()).add(request.name)
        for row, read, written in zip(step.rows, reads, writes, strict=True):
            judged = []
            for write in written:
                who = sharers(self.view, write.block, write.request, held.get(write.block, set()))
                broken = tuple(broken_keys(self.view, write.block)) if write.block > NULL else ()
                judged.append(write._replace(references=len(who), owned=who <= {write.request}, foreign_keys=broken))
            self.forwards.append(Forward(row.request.name, row.start, row.end - row.start, row.drafts,
                                         row.request.prefill_end, read, tuple(judged)))  # fmt: skip
