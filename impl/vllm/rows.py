"""What a worker keeps of requests, and the rows that a scheduler's output makes of it.

A table is replaced where a request is admitted, and grows at its end else; both by what the output carries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvproof.spec.config import Config
from kvproof.spec.tracer import State, advance
from kvproof.spec.view import NULL


class Malformed(Exception):
    """No worker could run this step. The message says why."""


@dataclass
class WorkerRequest:
    """What the worker keeps of a request. ``state_column`` is ``None`` until its first forward after (re)admission."""

    name: str
    tables: list[list[int]]
    computed: int
    prefill: int
    """Tokens known when the request was (re)admitted: up to there its rows are prefill rows."""
    state_column: int | None = None
    accepted: int = 1
    done: int = 0
    """How many of its tokens' states and keys are on the device: less than ``computed`` where rows were left out."""
    fresh: bool = True
    """Whether it has not run since it was (re)admitted: what it reads then was written for others."""


@dataclass(frozen=True)
class Load:
    """An external load: ``request``'s tokens ``[start, end)`` arrive in ``tables`` (one table per group).

    Of them the last ``lost`` never come, and a recurrent state comes with the last token or not at all.
    """

    request: str
    start: int
    end: int
    tables: tuple[tuple[int, ...], ...]
    states: Sequence[State]
    lost: int = 0

    @property
    def received(self) -> int:
        return self.end - self.lost

    def partly(self, config: Config) -> list[int]:
        """The attention blocks that it fills in part only, because it ends in their midst."""
        blocks: list[int] = []
        for spec, table in zip(config.groups, self.tables, strict=True):
            if spec.kind != "mamba" and self.end % spec.block_size:
                blocks += table[self.end // spec.block_size : self.end // spec.block_size + 1]
        return [block for block in blocks if block != NULL]

    def targets(self, config: Config, start: int | None = None) -> list[int]:
        """The blocks that it writes to, or (from the position ``start`` on) would have written to."""
        first = self.start if start is None else start
        blocks: list[int] = []
        for spec, table in zip(config.groups, self.tables, strict=True):
            size = spec.block_size
            slots = range(first // size, -(-self.end // size))
            blocks += table[slots.stop - 1 : slots.stop] if spec.kind == "mamba" else table[slots.start : slots.stop]
        return [block for block in blocks if block != NULL]


@dataclass
class Sampled:
    """What the model answers for one request: the tokens it emits, and how many drafts it accepted on the way."""

    tokens: list[int]
    accepted_drafts: int


@dataclass
class Row:
    """One request's part of the step that is being executed."""

    worker: WorkerRequest
    start: int
    tokens: int
    drafts: list[int]
    states: Sequence[State]
    """The request's known prefixes: ``states[n]`` after n tokens, up to the known part of this step."""
    draft_states: list[State]
    column: int = -1
    sampled: Sampled | None = None
    failed: bool = False
    """Whether it starts from tokens that a load of this very step did not bring."""
    spoiled: bool = False
    """Whether it starts from tokens that a load did not bring, of this step or of the one before, and whoever was told
    of the failure throws away what it computes, or has it computed again."""

    @property
    def known_end(self) -> int:
        return self.start + self.tokens - len(self.drafts)

    @property
    def samples(self) -> bool:
        """Whether it reaches the last token that is known, so that the model says the next one."""
        return self.known_end >= len(self.states) - 1

    def state(self, position: int) -> State | None:
        """The prefix after ``position`` tokens, drafts included, as far as the row can make it."""
        if self.spoiled:
            return None
        over = position - self.known_end
        return self.states[position] if over <= 0 else self.draft_states[over - 1]


def forget(workers: dict[str, WorkerRequest], output: Any) -> None:
    """Drop the requests that are over, and where the state lies of those that lost their blocks."""
    for name in output.finished_req_ids:
        workers.pop(name, None)
    for name in output.preempted_req_ids or ():
        if name in workers:
            workers[name].state_column = None


def rows_of(
    output: Any,
    workers: dict[str, WorkerRequest],
    states_of: Callable[[str], Sequence[State]],
    only: Collection[str] | None,
    propose: Callable[[Sequence[State], int], list[int]] | None,
    catch_up: Callable[[str, int, Sequence[State]], None],
) -> list[Row]:
    """The rows of a step, ``only`` of some requests if given; ``workers`` is brought up to date.

    ``propose`` drafts where steps overlap, ``catch_up`` makes up for rows that were left out. Raises
    :class:`Malformed` where a row has more tokens than there are.
    """
    for new in output.scheduled_new_reqs:
        known, computed = len(states_of(new.req_id)) - 1, new.num_computed_tokens
        workers[new.req_id] = WorkerRequest(
            new.req_id, [list(ids) for ids in new.block_ids], computed, known, done=computed
        )
    cached, scheduled = output.scheduled_cached_reqs, output.num_scheduled_tokens
    names: Iterable[str] = scheduled if only is None else [name for name in scheduled if name in only]
    places = enumerate(cached.req_ids)
    for i, name in places if only is None else [place for place in places if place[1] in only]:
        worker, fresh = workers[name], cached.new_block_ids[i]
        worker.computed = cached.num_computed_tokens[i]
        if propose is not None:
            # A scheduler that runs ahead counts drafts that were not accepted; it is behind where a load failed.
            worker.computed = worker.done = min(worker.computed, worker.done)
        if name in cached.resumed_req_ids:
            worker.tables = [list(ids) for ids in fresh]
            worker.state_column, worker.accepted = None, 1
            worker.prefill = len(states_of(name)) - 1
            worker.computed = worker.done = cached.num_computed_tokens[i]
            worker.fresh = True
        elif fresh is not None:
            for table, ids in zip(worker.tables, fresh, strict=True):
                table.extend(ids)
        if only is not None:
            catch_up(name, worker.computed, states_of(name))
    rows = []
    for name in names:
        tokens = scheduled[name]
        drafts = list(output.scheduled_spec_decode_tokens.get(name, ()))
        states = states_of(name)
        worker = workers[name]
        if drafts and propose is not None and not worker.fresh:
            drafts = propose(states, len(drafts))
        row = Row(worker, worker.computed, tokens, drafts, states, [])
        if row.known_end >= len(states):
            raise Malformed(f"more tokens than there are ({row.known_end}, {len(states) - 1})")
        state = states[row.known_end]
        for token in drafts:
            state = advance(state, token)
            row.draft_states.append(state)
        rows.append(row)
    return rows


def spoil(rows: Sequence[Row], loads: Sequence[Load], config: Config, void: Mapping[str, bool]) -> None:
    """Mark the rows that start from what a load failed to bring, and that nobody builds on.

    A load of this very step: its own request's, and those of requests that share the blocks it was to fill. One of the
    step before, where this one was on its way when the scheduler heard of it: it takes the requests named by ``void``
    back, so that their rows run again. But what they sample is taken, unless the request is gone (the value).
    """
    lost = {block for load in loads if load.lost for block in load.targets(config, load.received)}
    for row in rows:
        row.failed = row.spoiled = bool(lost) and not lost.isdisjoint(_read_by(row, config))
        if row.worker.name in void:
            row.spoiled = row.failed or void[row.worker.name] or not row.samples


def _read_by(row: Row, config: Config) -> Iterator[int]:
    """The blocks that a row reads. A worker's table goes on naming those that attention or the state has left behind,
    which may be somebody else's by now."""
    if not row.start:
        return
    for table, group in zip(row.worker.tables, config.groups, strict=True):
        first, last = group.first_read(row.start) // group.block_size, -(-row.start // group.block_size)
        if group.kind == "mamba":
            first = row.worker.state_column if row.worker.state_column is not None else last - 1
            last = first + row.worker.accepted
        yield from table[first:last]
