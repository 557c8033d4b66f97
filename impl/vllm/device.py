"""The device oracle: what the GPU worker would read and write, on tracers instead of tensors.

It is driven by the scheduler's output alone, as a worker is. Its block tables are append-only copies built from the ids
that the output carries; the manager's own tables are never read, because faults live in the difference.

Mirrored is the align mode of the V2 model runner (``worker/gpu/model_states/mamba_hybrid.py``), whose arithmetic is the
same from 0.22 to 0.33; before, and for hybrid models up to 0.28 by default, the V1 runner does the same, but
forgets how many drafts were accepted when a request sits out a step. Synchronous external loads are taken to arrive
before the states move, which is what the scheduler counts on; both runners start them after it. Decode rows without
drafts are taken to read the accepted column, which the kernels do from 0.32. Order within a step: zeroing, block copies
(one gather, then one scatter), synchronous external loads, the move of each running state to its new column, the
forward (every read before any recurrent write; attention writes before attention reads, as in each layer), the export
of prefill checkpoints, and after sampling the copy of the state to a boundary that acceptance just crossed. Within the
forward the convolution buffer is written first, then the checkpoint is exported, then the temporal state: the order of
the kernels, which shows where the blocks are the same.

A recurrent block holds two things that are moved by different rules: the temporal state (one per draft, in successive
columns) and the convolution buffer (in the first column only, where a shift selects the draft).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

from kvproof.impl.vllm.rows import Load, Row, Sampled, WorkerRequest, forget, rows_of, spoil
from kvproof.spec.config import Config
from kvproof.spec.events import Forward, Read, Write
from kvproof.spec.tracer import State
from kvproof.spec.view import NULL, MambaContent

CheckpointRule = Callable[[int, int], tuple[int, int]]
"""(sequence length, query length) to (exported position or 0, column)."""


def _judged(
    writer: str,
    group: int,
    block: int,
    slot: int,
    state: State | None,
    owners: Callable[[int, str], set[str]],
    foreign_keys: Callable[[int], Sequence[State]],
    excused: Set[str],
) -> Write:
    holders = owners(block, writer) - (excused - {writer})
    return Write(writer, group, block, slot, state, len(holders), holders <= {writer}, tuple(foreign_keys(block)))


def _no_keys(block: int) -> Sequence[State]:
    return ()


class Device:
    """Blocks of tracers, and the worker's bookkeeping."""

    def __init__(self, config: Config, checkpoint_rule: CheckpointRule | None) -> None:
        self.config = config
        self.checkpoint_rule = checkpoint_rule if config.checkpoint_blocks else None
        self.attention: dict[int, list[State | None]] = {}
        self.mamba: dict[int, MambaContent] = {}
        self.workers: dict[str, WorkerRequest] = {}
        self.spoiled: set[str] = set()
        """The requests whose rows of the last step are worth nothing, since a load failed."""
        self.failed: set[str] = set()
        """Those of them that start from what a load of that step itself did not bring."""
        self.propose: Callable[[Sequence[State], int], list[int]] | None = None
        """Where steps overlap, the worker does not hear back what was sampled and drafted: it has that itself. This
        drafts so many tokens after a prefix.
        """
        self.dirty: set[int] = set()
        self._mamba_groups = [i for i, g in enumerate(config.groups) if g.kind == "mamba"]
        self._attention_groups = [i for i, g in enumerate(config.groups) if g.kind != "mamba"]

    # -- what a step is made of ---------------------------------------------------------------------------------------

    def execute(
        self,
        output: Any,
        states_of: Callable[[str], Sequence[State]],
        sampler: Callable[[str, int, list[int], bool], Sampled],
        loads: Sequence[Load],
        owners: Callable[[int, str], set[str]],
        foreign_keys: Callable[[int], Sequence[State]],
        only: Collection[str] | None = None,
        before_forward: Callable[[], None] | None = None,
        void: Mapping[str, bool] = MappingProxyType({}),
    ) -> tuple[dict[str, Sampled], list[Forward]]:
        """Run one scheduler output. Returns what was sampled and what was read and written, per request.

        ``only`` these requests' rows are run, if given, and of what they attend to only what others may have written is
        looked at. The rows left out must be such that :meth:`catch_up` can make up for them later: one known token,
        no new block, no drafts.

        ``sampler(request, end, drafts, is_sampling)`` is the model. ``owners(block, writer)`` and
        ``foreign_keys(block)`` let the writes be judged: whose tables hold the block, and which of its keys its content
        no longer matches. ``before_forward`` is called when copies and states have been moved. ``void`` names rows that
        were on their way when the scheduler heard of a failed load (see :func:`~kvproof.impl.vllm.rows.spoil`).
        Raises :class:`~kvproof.impl.vllm.rows.Malformed`.
        """
        forget(self.workers, output)
        for block in output.new_block_ids_to_zero or ():
            if block in self.attention:
                self.attention[block] = [None] * len(self.attention[block])
            self.dirty.add(block)
        self._copy(getattr(output, "kv_cache_block_copies", None) or ())
        rows = rows_of(output, self.workers, states_of, only, self.propose, self.catch_up)
        for load in loads:
            self.load(load)
        spoil(rows, loads, self.config, void)
        self.spoiled = {row.worker.name for row in rows if row.spoiled}
        self.failed = {row.worker.name for row in rows if row.failed}
        for row in rows:
            self._move_state(row)
        if before_forward is not None:
            before_forward()
        for row in rows:
            self._write_attention(row)
        reads = {
            row.worker.name: () if row.spoiled else tuple(self._reads(row, only is None or row.worker.fresh))
            for row in rows
        }
        written: dict[str, list[tuple[int, int, int, State | None]]] = {row.worker.name: [] for row in rows}
        for row in rows:
            written[row.worker.name] += self._write_mamba(row)
        for row in rows:
            row.sampled = sampler(row.worker.name, row.known_end, row.drafts, row.known_end >= len(row.states) - 1)
            written[row.worker.name] += self._after_sampling(row)
            row.worker.done, row.worker.fresh = row.known_end + row.sampled.accepted_drafts, False
        forwards = []
        for row in rows:
            name = row.worker.name
            written[name] += self._attention_blocks(row)
            # Keys of what is computed on a load that failed are judged once the scheduler has heard of the failure.
            keys = _no_keys if row.spoiled else foreign_keys
            # Nor does it harm a sharer whose own row is void: what that one reads later is judged then.
            excused = self.spoiled if row.spoiled else set[str]()
            forwards.append(
                Forward(
                    request=name,
                    start=row.start,
                    tokens=row.tokens,
                    drafts=len(row.drafts),
                    prefill_end=row.worker.prefill,
                    reads=reads[name],
                    writes=tuple(_judged(name, *write, owners, keys, excused) for write in written[name]),
                )
            )
        return {row.worker.name: row.sampled for row in rows if row.sampled is not None}, forwards

    def catch_up(self, name: str, end: int, states: Sequence[State]) -> None:
        """Run the rows of a request that were left out, up to ``end`` tokens, as one."""
        worker = self.workers[name]
        if worker.done >= end:
            return
        row = Row(worker, worker.done, end - worker.done, [], states, [])
        worker.accepted = 1
        self._move_state(row)
        self._write_attention(row)
        self._write_mamba(row)
        worker.done = end

    def load(self, load: Load) -> None:
        """External tokens arrive: attention blocks get their tokens, recurrent groups the state at the end."""
        for group, spec in enumerate(self.config.groups):
            table, size = load.tables[group], spec.block_size
            if spec.kind == "mamba":
                slot = (load.end - 1) // size
                if not load.lost and slot < len(table) and table[slot] != NULL:
                    self._set_mamba(table[slot], load.states[load.end], (load.states[load.end],))
                continue
            for slot in range(load.start // size, -(-load.received // size)):
                if slot >= len(table) or table[slot] == NULL:
                    continue
                first, last = max(load.start, slot * size), min(load.received, (slot + 1) * size)
                content = self._attention(table[slot], size)
                content[first - slot * size : last - slot * size] = load.states[first + 1 : last + 1]

    def _copy(self, copies: Sequence[Any]) -> None:
        pairs = [(copy.src_block_id, copy.dst_block_id) for copy in copies]
        gathered = [(self.attention.get(src), self.mamba.get(src)) for src, _ in pairs]
        for (_, dst), (tokens, state) in zip(pairs, gathered, strict=True):
            self.attention.pop(dst, None)
            self.mamba.pop(dst, None)
            if tokens is not None:
                self.attention[dst] = list(tokens)
            if state is not None:
                self.mamba[dst] = state
            self.dirty.add(dst)

    # -- attention ----------------------------------------------------------------------------------------------------

    def _attention(self, block: int, size: int) -> list[State | None]:
        self.mamba.pop(block, None)
        self.dirty.add(block)
        content = self.attention.get(block)
        if content is None or len(content) != size:
            content = self.attention[block] = [None] * size
        return content

    def _write_attention(self, row: Row) -> None:
        for group in self._attention_groups:
            size, table = self.config.groups[group].block_size, row.worker.tables[group]
            for slot in range(row.start // size, -(-(row.start + row.tokens) // size)):
                if slot >= len(table) or table[slot] == NULL:
                    continue
                first, last = max(row.start, slot * size), min(row.start + row.tokens, (slot + 1) * size)
                content = self._attention(table[slot], size)
                content[first - slot * size : last - slot * size] = (
                    row.states[first + 1 : last + 1]
                    if last <= row.known_end and not row.spoiled
                    else [row.state(p + 1) for p in range(first, last)]
                )

    def _attention_blocks(self, row: Row) -> list[tuple[int, int, int, State | None]]:
        written: list[tuple[int, int, int, State | None]] = []
        for group in self._attention_groups:
            size, table = self.config.groups[group].block_size, row.worker.tables[group]
            for slot in range(row.start // size, -(-(row.start + row.tokens) // size)):
                block = table[slot] if slot < len(table) else -1
                written.append((group, block, slot, row.state(min(row.start + row.tokens, (slot + 1) * size))))
        return written

    # -- recurrent state ----------------------------------------------------------------------------------------------

    def _set_mamba(self, block: int, temporal: State | None, window: tuple[State | None, ...]) -> None:
        self.attention.pop(block, None)
        self.mamba[block] = MambaContent(temporal, window)
        self.dirty.add(block)

    def _block(self, row: Row, group: int, column: int) -> int:
        table = row.worker.tables[group]
        return table[column] if 0 <= column < len(table) else -1

    def _content(self, row: Row, group: int, column: int, shift: int) -> tuple[State | None, State | None]:
        """The temporal state ``shift`` columns on, and the convolution window ``shift`` tokens on."""
        temporal = self.mamba.get(self._block(row, group, column + shift))
        window = self.mamba.get(self._block(row, group, column))
        return (
            temporal.temporal if temporal is not None else None,
            window.window[shift] if window is not None and shift < len(window.window) else None,
        )

    def _shifted(self, source: int, target: int, shift: int) -> tuple[State | None, ...]:
        """``target``'s windows after ``source``'s buffer was copied there from row ``shift`` on: its last rows stay."""
        rows = self.config.speculative + 1 - shift
        moved = self.mamba[source].window[shift:] if source in self.mamba else ()
        kept = self.mamba[target].window[rows:] if target in self.mamba else ()
        return (*moved, *(None,) * (rows - len(moved)), *kept) if kept else moved

    def _move_state(self, row: Row) -> None:
        if not self._mamba_groups:
            return
        size, worker = self.config.mamba_block, row.worker
        before = worker.state_column if worker.state_column is not None else (row.start - 1) // size
        row.column = worker.state_column = -(-(row.start + row.tokens) // size) - 1
        if before < 0 or before == row.column:
            return
        shift = worker.accepted - 1
        for group in self._mamba_groups:
            target = self._block(row, group, row.column)
            temporal, _ = self._content(row, group, before, shift)
            if target > NULL:
                self._set_mamba(target, temporal, self._shifted(self._block(row, group, before), target, shift))
        worker.accepted = 1

    def _reads(self, row: Row, attention: bool) -> list[Read]:
        reads = []
        for group in self._mamba_groups:
            if row.start == 0:
                continue
            shift = row.worker.accepted - 1
            temporal, window = self._content(row, group, row.column, shift)
            expected, slot = row.states[row.start], row.column + shift
            block = self._block(row, group, slot)
            ok = temporal == expected and window == expected
            reads.append(Read(row.worker.name, group, True, row.start, expected, temporal, window, slot, block, ok))
        if attention:
            reads += [self._attention_read(row, group) for group in self._attention_groups]
        return reads

    def _attention_read(self, row: Row, group: int) -> Read:
        spec, table = self.config.groups[group], row.worker.tables[group]
        size, end = spec.block_size, row.start
        first = spec.first_read(row.start)
        for slot in range(first // size, -(-end // size)):
            block = table[slot] if slot < len(table) else -1
            low, high = max(first, slot * size), min(end, (slot + 1) * size)
            content = self.attention.get(block) if block > NULL else None
            wanted = row.states[low + 1 : high + 1]
            if content is not None and content[low - slot * size : high - slot * size] == wanted:
                continue
            for offset, expected in enumerate(wanted):
                at = low - slot * size + offset
                found = content[at] if content is not None and at < len(content) else None
                if found != expected:
                    return Read(
                        row.worker.name, group, False, end, expected, found, None, slot, block, False, low + offset
                    )
        return Read(row.worker.name, group, False, end, row.states[end], row.states[end], None, -1, -1, True)

    def _write_mamba(self, row: Row) -> list[tuple[int, int, int, State | None]]:
        written: list[tuple[int, int, int, State | None]] = []
        end, rows = row.start + row.tokens, len(row.drafts) + 1
        states = [row.state(end - rows + 1 + i) for i in range(rows)]
        position, column = self._checkpoint(row, end)
        for group in self._mamba_groups:
            running = self._block(row, group, row.column)
            if running > NULL:
                kept = self.mamba.get(running)
                self._set_mamba(running, kept.temporal if kept is not None else None, tuple(states))
            block = self._block(row, group, column) if position else NULL
            if block > NULL:
                self._set_mamba(block, row.state(position), (row.state(position),))
                written.append((group, block, column, row.state(position)))
            for i, state in enumerate(states):
                block = self._block(row, group, row.column + i)
                written.append((group, block, row.column + i, state))
                if block > NULL:
                    kept = self.mamba.get(block)
                    self._set_mamba(block, state, kept.window if kept is not None else ())
        return written

    def _checkpoint(self, row: Row, end: int) -> tuple[int, int]:
        """The position that the kernel exports inside this chunk and its column, or (0, −1)."""
        if self.checkpoint_rule is None or row.start >= row.worker.prefill or row.drafts:
            return 0, -1
        return self.checkpoint_rule(end, row.tokens)

    def _after_sampling(self, row: Row) -> list[tuple[int, int, int, State | None]]:
        """Record how much was accepted, and save the state at a boundary that acceptance crossed inside the step."""
        assert row.sampled is not None
        worker = row.worker
        worker.accepted = max(1, len(row.sampled.tokens))
        if not self._mamba_groups or self.config.speculative == 0:
            return []
        size = self.config.mamba_block
        after_first = row.known_end
        computed = after_first + row.sampled.accepted_drafts
        boundary = computed // size * size
        if boundary < after_first:
            return []
        shift, target_column = boundary - after_first, boundary // size - 1
        written: list[tuple[int, int, int, State | None]] = []
        if row.column == target_column:
            worker.accepted = 1
            if shift == 0:
                return []
        for group in self._mamba_groups:
            target = self._block(row, group, target_column)
            temporal, _ = self._content(row, group, row.column, shift)
            if target > NULL:
                self._set_mamba(target, temporal, self._shifted(self._block(row, group, row.column), target, shift))
                written.append((group, target, target_column, temporal))
        return written
