"""Random histories of a few requests, lived through by the release's worker and by oracles side by side.

Requests prefill in chunks, decode with drafts of which some are accepted, sit out steps, lose their blocks and start
again from a hit. After every step all blocks, all reads and all accepted counts must agree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from calibration_found import Tags, Tally, difference, no_one, nothing
from calibration_worker import MAX_TOKENS, Member, Memory, Release

from kvproof.impl.vllm.device import Device
from kvproof.impl.vllm.rows import Sampled
from kvproof.spec.config import Config, Group
from kvproof.spec.tracer import State, states_of
from kvproof.spec.view import NULL, MambaContent

STEPS, REQUESTS, STORY = 25, 3, MAX_TOKENS // 2
SIT_OUT, RESTART, REUSED_BLOCK = 0.25, 0.04, 0.1


@dataclass
class Life:
    """A request's whole future: its tokens and states, how many of them are known, how many are computed."""

    states: list[State]
    tokens: list[int]
    known: int
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    home: bool = False
    """Whether the worker knows it."""

    def answer(self, guess: Sequence[int], end: int) -> Sampled:
        """What the model says after ``end`` tokens: the drafts that are right, and the token after them."""
        accepted = 0
        while accepted < len(guess) and guess[accepted] == self.tokens[self.known + accepted]:
            accepted += 1
        return Sampled(self.tokens[self.known : self.known + accepted + 1] if end == self.known else [], accepted)


@dataclass
class Step:
    """What one step schedules."""

    batch: list[Member] = field(default_factory=list)
    guesses: dict[str, list[int]] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    left: set[str] = field(default_factory=set)


class Episode:
    """One history. ``make`` builds the worker; ``sit_out``: whether running requests may miss a step."""

    def __init__(
        self,
        release: Release,
        make: Callable[[Release, Memory], Any],
        devices: Sequence[type[Device]],
        seed: int,
        sit_out: bool,
        tally: Tally,
    ) -> None:
        self.seed, self.sit_out, self.devices, self.tally = seed, sit_out, devices, tally
        rng = self.rng = random.Random(seed)
        self.size, self.drafts = rng.choice((2, 3, 4, 8)), rng.choice((0, 1, 2, 3, 3))
        self.columns = STORY // self.size + self.drafts + 1
        self.blocks = 1 + 2 * 2 * REQUESTS * self.columns
        mamba = Group("mamba", self.size)
        config = Config((Group("full", self.size), mamba, mamba), self.blocks, self.size, 64, speculative=self.drafts)
        self.memory = Memory(release, self.size, self.drafts, self.blocks, self.columns)
        self.worker, self.tags = make(release, self.memory), Tags()
        self.oracles = [device(config, None) for device in devices]
        self.fresh = list(range(1, self.blocks))
        rng.shuffle(self.fresh)
        self.lives: dict[str, Life] = {}
        for i in range(REQUESTS):
            tokens = [rng.randint(1, 9) + 10 * i for _ in range(STORY)]
            self.lives[f"r{i}"] = Life(states_of(tokens), tokens, rng.randint(1, 3 * self.size))
        self.restarts = 0
        self.found: dict[str, str] = {}

    def run(self) -> None:
        for number in range(STEPS):
            step = self._schedule()
            if step.batch:
                self._execute(step, number)
        self.tally.add(self.devices, self.found, f"seed {self.seed}")

    # -- what a scheduler would decide --------------------------------------------------------------------------------

    def _schedule(self) -> Step:
        step, rng = Step(), self.rng
        for name, life in self.lives.items():
            if life.home and self.restarts < REQUESTS and rng.random() < RESTART:
                self.restarts += 1
                self.tally.meet("restart")
                life.home = False
                self.worker.leave(name)
                step.left.add(name)
                continue
            if (self.sit_out or not life.home) and rng.random() < SIT_OUT:
                continue
            if life.known + self.drafts + 1 >= len(life.tokens):
                continue  # its story is told
            if not life.home:
                self._admit(name, life)
                step.new.append(name)
            due = life.known - life.computed
            if due > 1:
                step.batch.append(Member(name, life.computed, rng.randint(1, min(due, 2 * self.size)), 0))
                continue
            guessed = rng.randint(0, self.drafts)
            right = rng.randint(0, guessed)
            step.guesses[name] = [life.tokens[life.known + i] if i < right else 1000 + i for i in range(guessed)]
            step.batch.append(Member(name, life.computed, 1 + guessed, guessed))
        rng.shuffle(step.batch)
        return step

    def _admit(self, name: str, life: Life) -> None:
        """It starts from nothing or from a hit, whose state lies in the column of its last token."""
        life.computed = self.rng.choice((0, self.rng.randint(0, life.known - 1)))
        first = max(0, (life.computed - 1) // self.size)
        life.tables = [self._table(first) for _ in range(2)]
        self.worker.admit(name, life.computed, life.tables)
        state = life.states[life.computed]
        for table in life.tables if life.computed else ():
            self.memory.fill(table[first], [self.tags(state)], self.tags(state))
            for oracle in self.oracles:
                oracle.mamba[table[first]] = MambaContent(state, (state,))

    def _table(self, first: int) -> list[int]:
        """Null up to ``first``; now and then the block of an earlier column again, as draft blocks are moved on."""
        table = [NULL] * first
        for column in range(first, self.columns):
            back = column - self.rng.randint(1, self.drafts + 1)
            again = back >= first and self.rng.random() < REUSED_BLOCK
            table.append(table[back] if again else self.fresh.pop())
        return table

    # -- one step, twice ----------------------------------------------------------------------------------------------

    def _execute(self, step: Step, number: int) -> None:
        output = scheduler_output(step, self.lives)
        known = {name: life.states[: life.known + 1] for name, life in self.lives.items()}
        sampled = {
            m.name: self.lives[m.name].answer(step.guesses.get(m.name, ()), m.start + m.tokens - m.drafts)
            for m in step.batch
        }
        reads = self._run_worker(step, sampled)
        for oracle in self.oracles:
            name = type(oracle).__name__
            if name in self.found:
                continue
            try:
                _, forwards = oracle.execute(
                    output, known.__getitem__, lambda who, *_: sampled[who], (), no_one, nothing
                )
                problem = (
                    _wrong_reads(forwards, reads, self.tags)
                    or difference(oracle, self.memory, self.tags, self.blocks)
                    or self._wrong_counts(oracle, step.batch)
                )
            except AssertionError as error:
                problem = str(error)
            if problem:
                self.found[name] = f"step {number}, block size {self.size}, {self.drafts} drafts: {problem}"
        for member in step.batch:
            life, answer = self.lives[member.name], sampled[member.name]
            life.home = True
            life.known += len(answer.tokens)
            life.computed += member.tokens - (member.drafts - answer.accepted_drafts)
            if len(answer.tokens) > 1:
                self.tally.meet("draft accepted")

    def _run_worker(self, step: Step, sampled: dict[str, Sampled]) -> dict[str, list[tuple[int, int]]]:
        """The release's part of the step. Returns what each request's forward started from, per group."""
        worker, memory, batch = self.worker, self.memory, step.batch
        worker.prepare(batch)
        indices = worker.indices(batch)
        reads = {}
        for row, member in enumerate(batch):
            accepted = worker.accepted(member.name)
            reads[member.name] = [_read(memory, group[row], accepted) for group in indices]
            if accepted > 1:
                self.tally.meet("read past the first draft")
        for row, member in enumerate(batch):
            guess = step.guesses.get(member.name, ())
            _forward(memory, self.lives[member.name], member, guess, [group[row] for group in indices], self.tags)
        worker.finish(batch, [len(sampled[member.name].tokens) for member in batch])
        return reads

    def _wrong_counts(self, oracle: Device, batch: Sequence[Member]) -> str:
        for member in batch if self.drafts else ():
            ours, theirs = oracle.workers[member.name].accepted, self.worker.accepted(member.name)
            if ours != theirs:
                return f"{member.name} goes on with {theirs} accepted, the oracle says {ours}"
        return ""


def scheduler_output(step: Step, lives: dict[str, Life]) -> Any:
    """The scheduler's output, as far as the oracle looks at it."""
    old = [member for member in step.batch if member.name not in step.new]
    return SimpleNamespace(
        finished_req_ids=set(),
        preempted_req_ids=set(step.left),
        new_block_ids_to_zero=None,
        kv_cache_block_copies=None,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=n, block_ids=[[NULL] * 64, *lives[n].tables], num_computed_tokens=lives[n].computed)
            for n in step.new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[m.name for m in old],
            new_block_ids=[None] * len(old),
            num_computed_tokens=[m.start for m in old],
            resumed_req_ids=set(),
        ),
        num_scheduled_tokens={m.name: m.tokens for m in step.batch},
        scheduled_spec_decode_tokens={name: guess for name, guess in step.guesses.items() if guess},
    )


def _read(memory: Memory, blocks: list[int], accepted: int) -> tuple[int, int]:
    """What the forward would start from: the state of the last accepted draft, and the window at its shift."""
    return memory.read(blocks[accepted - 1])[1], memory.read(blocks[0])[0][accepted - 1]


def _forward(
    memory: Memory, life: Life, member: Member, guess: Sequence[int], blocks: Sequence[list[int]], tags: Tags
) -> None:
    """The model's part: one window row and one state per token from the last known one on."""
    end = member.start + member.tokens - member.drafts
    states = states_of([*life.tokens[:end], *guess])[end:]
    for indices in blocks:
        for conv in memory.conv:
            for row, state in enumerate(states):
                conv[indices[0], row] = tags(state)
        for temporal in memory.temporal:
            for block, state in zip(indices, states, strict=False):
                temporal[block] = tags(state)


def _wrong_reads(forwards: Sequence[Any], reads: dict[str, list[tuple[int, int]]], tags: Tags) -> str:
    """Where a forward starts from something else than the oracle says. Garbage may be any, but not what is expected."""
    for forward in forwards:
        recurrent = [read for read in forward.reads if read.recurrent]
        for read, (temporal, window) in zip(recurrent, reads[forward.request], strict=bool(recurrent)):
            lost = read.window is None and window != tags(read.expected)
            if tags(read.found) != temporal or (tags(read.window) != window and not lost):
                return (
                    f"{forward.request} reads state {temporal} and window {window}, "
                    f"the oracle says {tags(read.found)} and {tags(read.window)}"
                )
    return ""
