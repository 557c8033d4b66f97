"""Runs inside one release: the device oracle beside the release's own worker functions, on random histories.

``python tests/calibration_program.py SEED EPISODES`` with the release on ``PYTHONPATH``. Prints one JSON object: per comparison
and per device, how many cases there were, how many of them differed, and the first difference. Beside the oracle run
oracles with one planted fault each; that those differ shows that the comparison could have seen it.
"""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from calibration_worker import MAX_TOKENS, Member, Memory, Release, WorkerV1, WorkerV2, load
from kvproof.impl.vllm.device import Device, Sampled
from kvproof.impl.vllm.subject import checkpoint_rule
from kvproof.spec.config import Config, Group
from kvproof.spec.tracer import EMPTY, State, states_of
from kvproof.spec.view import NULL, MambaContent

STEPS, COPIES, CHECKPOINTS = 25, 150, 400
REQUESTS = 3


# -- planted faults ---------------------------------------------------------------------------------------------------


class IgnoresShift(Device):
    """Moves the state of the first draft, whatever was accepted."""

    def _move_state(self, row: Any) -> None:
        before, row.worker.accepted = row.worker.accepted, 1
        column = row.worker.state_column
        super()._move_state(row)
        if column == row.worker.state_column:
            row.worker.accepted = before


class KeepsWindow(Device):
    """Moves the temporal state rightly, and the convolution window without its shift."""

    def _move_state(self, row: Any) -> None:
        column = row.worker.state_column
        old = [self.mamba.get(self._block(row, g, column)) if column is not None else None for g in self._mamba_groups]
        super()._move_state(row)
        if column in (None, -1, row.column):
            return
        for group, source in zip(self._mamba_groups, old, strict=True):
            block = self._block(row, group, row.column)
            if source is not None and block > NULL:
                self._set_mamba(block, self.mamba[block].temporal, source.window)


class NeverResets(Device):
    """Still counts the drafts as accepted once the state has moved to a new column."""

    def _move_state(self, row: Any) -> None:
        accepted = row.worker.accepted
        super()._move_state(row)
        row.worker.accepted = accepted


class OneColumnOn(Device):
    """Runs one column too far on."""

    def _block(self, row: Any, group: int, column: int) -> int:
        return super()._block(row, group, column + 1)


class SavesNoBoundary(Device):
    """Forgets to save the state at a boundary that acceptance crossed."""

    def _after_sampling(self, row: Any) -> Any:
        row.worker.accepted = max(1, len(row.sampled.tokens))
        return []


class ForgetsSittingOut(Device):
    """Forgets how many drafts were accepted when a request sits out a step: the V1 runner's way."""

    def execute(self, output: Any, *rest: Any) -> Any:
        for name, worker in self.workers.items():
            if name not in output.num_scheduled_tokens:
                worker.accepted = 1
        return super().execute(output, *rest)


class CopiesOneByOne(Device):
    """Copies blocks one after the other, so that a chain carries its first block along."""

    def _copy(self, copies: Sequence[Any]) -> None:
        for copy in copies:
            super()._copy([copy])


class ExportsOneColumnOn(Device):
    """Exports a checkpoint to the running column."""

    def _checkpoint(self, row: Any, end: int) -> tuple[int, int]:
        position, column = super()._checkpoint(row, end)
        return (position, column + 1) if position else (position, column)


MOVES = (Device, IgnoresShift, KeepsWindow, NeverResets, OneColumnOn, SavesNoBoundary)


# -- what was found ---------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """One comparison: cases, cases that differed and the first difference, per device."""

    cases: int = 0
    differing: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    """How often something worth meeting was met, so that a comparison of nothing can't pass."""

    def meet(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    def add(self, devices: Sequence[type[Device]], found: dict[str, str], where: str) -> None:
        self.cases += 1
        for device in devices:
            name = device.__name__
            self.differing.setdefault(name, 0)
            if name in found:
                self.differing[name] += 1
                self.first.setdefault(name, f"{where}: {found[name]}")


class Tags:
    """States as small integers, which fit every tensor. 0 is nothing."""

    def __init__(self) -> None:
        self._tags: dict[State, int] = {}

    def __call__(self, state: State | None) -> int:
        return 0 if state is None else self._tags.setdefault(state, len(self._tags) + 1)


def difference(device: Device, memory: Memory, tags: Tags, blocks: int) -> str:
    """Where the device's recurrent blocks differ from the tensors. Windows that the oracle calls garbage are not judged."""
    for block in range(1, blocks):
        content = device.mamba.get(block, MambaContent(None, ()))
        window, temporal = memory.read(block)
        if temporal != tags(content.temporal):
            return f"block {block} holds state {temporal}, the oracle says {tags(content.temporal)}"
        wanted = tuple(tags(state) for state in content.window)
        if any(ours and ours != theirs for ours, theirs in zip(wanted, window, strict=False)):
            return f"block {block} holds windows {window}, the oracle says {wanted}"
    return ""


def no_one(*_: Any) -> Any:
    return set()


def nothing(*_: Any) -> Any:
    return ()


# -- moves: random histories of a few requests ------------------------------------------------------------------------


@dataclass
class Life:
    """A request's whole future: its states, how many tokens of it are known, how many are computed."""

    states: list[State]
    tokens: list[int]
    known: int
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    home: bool = False


def _table(rng: random.Random, fresh: list[int], columns: int, first: int, drafts: int) -> list[int]:
    """Null up to ``first``; now and then the block of an earlier column again, as an allocator moves draft blocks on."""
    table = [NULL] * first
    for column in range(first, columns):
        back = rng.randint(1, drafts + 1)
        again = column - back >= first and rng.random() < 0.1
        table.append(table[column - back] if again else fresh.pop())
    return table


def episode(
    release: Release, make: Callable[[Release, Memory], Any], devices: Sequence[type[Device]], seed: int, sit_out: bool,
    tally: Tally,
) -> None:  # fmt: skip
    rng = random.Random(seed)
    size, drafts = rng.choice((2, 3, 4, 8)), rng.choice((0, 1, 2, 3, 3))
    columns = MAX_TOKENS // 2 // size + drafts + 1
    blocks = 1 + 2 * 2 * REQUESTS * columns
    config = Config((Group("full", size), Group("mamba", size), Group("mamba", size)), blocks, size, 64,
                    speculative=drafts)  # fmt: skip
    memory = Memory(release, size, drafts, blocks, columns)
    worker, tags = make(release, memory), Tags()
    oracles = [device(config, None) for device in devices]
    fresh = list(range(1, blocks))
    rng.shuffle(fresh)
    lives: dict[str, Life] = {}
    for i in range(REQUESTS):
        tokens = [rng.randint(1, 9) + 10 * i for _ in range(MAX_TOKENS // 2)]
        lives[f"r{i}"] = Life(states_of(tokens), tokens, rng.randint(1, 3 * size))
    found: dict[str, str] = {}
    restarts = 0
    for step in range(STEPS):
        batch: list[Member] = []
        guesses: dict[str, list[int]] = {}
        new, left = [], set()
        for name, life in lives.items():
            if life.home and restarts < REQUESTS and rng.random() < 0.04:
                restarts += 1
                life.home = False
                worker.leave(name)
                left.add(name)
                tally.meet("restart")
                continue
            if (sit_out or not life.home) and rng.random() < 0.25:
                continue
            if not life.home:
                life.computed = rng.choice((0, rng.randint(0, life.known - 1)))
            if life.known + drafts + 1 >= len(life.tokens):
                continue  # at the end of its story it stays away
            if not life.home:
                _admit(rng, life, fresh, columns, size, drafts)
                new.append(name)
                worker.admit(name, life.computed, life.tables)
                start = life.states[life.computed]
                for table in life.tables if life.computed else ():
                    block = table[(life.computed - 1) // size]
                    memory.fill(block, [tags(start)], tags(start))
                    for oracle in oracles:
                        oracle.mamba[block] = MambaContent(start, (start,))
            due = life.known - life.computed
            if due == 1:
                guessed = rng.randint(0, drafts)
                wrong = rng.randint(0, guessed)
                guesses[name] = [
                    life.tokens[life.known + i] if i < wrong else 1000 + i for i in range(guessed)
                ]
                batch.append(Member(name, life.computed, 1 + guessed, guessed))
            else:
                batch.append(Member(name, life.computed, rng.randint(1, min(due, 2 * size)), 0))
        gone = [name for name, life in lives.items() if not life.home and name not in left]
        rng.shuffle(batch)
        if not batch:
            continue
        output = _output(batch, guesses, new, left, lives)
        known = {name: life.states[: life.known + 1] for name, life in lives.items()}
        sampled: dict[str, Sampled] = {}
        for member in batch:
            life, guess = lives[member.name], guesses.get(member.name, [])
            end = member.start + member.tokens - member.drafts
            accepted = 0
            while accepted < len(guess) and guess[accepted] == life.tokens[life.known + accepted]:
                accepted += 1
            emits = end == life.known
            sampled[member.name] = Sampled(life.tokens[life.known : life.known + accepted + 1] if emits else [], accepted)
        worker.prepare(batch)
        indices = worker.indices(batch)
        reads = {m.name: [_read(memory, rows[i], worker.accepted(m.name)) for rows in indices]
                 for i, m in enumerate(batch)}  # fmt: skip
        for i, member in enumerate(batch):
            _forward(memory, lives[member.name], member, guesses.get(member.name, []), [rows[i] for rows in indices], tags)
            if worker.accepted(member.name) > 1:
                tally.meet("read past the first draft")
        worker.finish(batch, [len(sampled[m.name].tokens) for m in batch])
        for oracle in oracles:
            name = type(oracle).__name__
            if name in found:
                continue
            try:
                _, forwards = oracle.execute(
                    output, known.__getitem__, lambda who, *_: sampled[who], (), no_one, nothing
                )
                problem = _wrong_reads(forwards, reads, tags) or difference(oracle, memory, tags, blocks)
                problem = problem or _wrong_counts(oracle, worker, batch, drafts)
            except AssertionError as error:
                problem = str(error)
            if problem:
                found[name] = f"step {step}, block size {size}, {drafts} drafts: {problem}"
        for member in batch:
            life, answer = lives[member.name], sampled[member.name]
            life.home = True
            life.known += len(answer.tokens)
            life.computed += member.tokens - (member.drafts - answer.accepted_drafts)
            if len(answer.tokens) > 1:
                tally.meet("draft accepted")
        del gone
    tally.add(devices, found, f"seed {seed}")


def _admit(rng: random.Random, life: Life, fresh: list[int], columns: int, size: int, drafts: int) -> None:
    first = max(0, (life.computed - 1) // size)
    life.tables = [_table(rng, fresh, columns, first, drafts) for _ in range(2)]


def _output(batch: Sequence[Member], guesses: dict[str, list[int]], new: Sequence[str], left: set[str],
            lives: dict[str, Life]) -> Any:  # fmt: skip
    """The scheduler's output, as far as the oracle looks at it."""
    old = [m for m in batch if m.name not in new]
    return SimpleNamespace(
        finished_req_ids=set(),
        preempted_req_ids=set(left),
        new_block_ids_to_zero=None,
        kv_cache_block_copies=None,
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=n, block_ids=[[NULL] * 64, *lives[n].tables], num_computed_tokens=lives[n].computed
            )
            for n in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[m.name for m in old],
            new_block_ids=[None] * len(old),
            num_computed_tokens=[m.start for m in old],
            resumed_req_ids=set(),
        ),
        num_scheduled_tokens={m.name: m.tokens for m in batch},
        scheduled_spec_decode_tokens={name: guess for name, guess in guesses.items() if guess},
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


def _wrong_counts(oracle: Device, worker: Any, batch: Sequence[Member], drafts: int) -> str:
    for member in batch if drafts else ():
        ours, theirs = oracle.workers[member.name].accepted, worker.accepted(member.name)
        if ours != theirs:
            return f"{member.name} goes on with {theirs} accepted, the oracle says {ours}"
    return ""


# -- block copies -----------------------------------------------------------------------------------------------------


def copies(release: Release, seed: int) -> Tally:
    """Chains, swaps, fans and doubles (no block is written from two sources, which no order would make definite)."""
    tally, rng = Tally(), random.Random(seed)
    run = load("vllm.v1.worker.utils").copy_kv_cache_blocks_inplace
    pair = load("vllm.v1.core.kv_cache_utils").KVCacheBlockCopy
    blocks, size, parts = 9, 4, 2
    config = Config((Group("full", size), Group("mamba", size)), blocks, size, 64, speculative=2)
    devices = (Device, CopiesOneByOne)
    for case in range(COPIES):
        memory, tags = Memory(release, size, 2, blocks, 4), Tags()
        attention = torch.zeros((blocks * parts, size // parts, 3), dtype=torch.int64)
        oracles = [device(config, None) for device in devices]
        for block in range(1, blocks):
            states = [State((block << 8) + i + 1) for i in range(size)]
            if rng.random() < 0.5:
                for i, state in enumerate(states):
                    attention[block * parts + i // (size // parts), i % (size // parts)] = tags(state)
            else:
                memory.fill(block, [tags(s) for s in states[:3]], tags(states[3]))
            for oracle in oracles:
                if memory.read(block)[1]:
                    oracle.mamba[block] = MambaContent(states[3], tuple(states[:3]))
                else:
                    oracle.attention[block] = list(states)
        targets = rng.sample(range(1, blocks), rng.randint(1, 6))
        wanted = [pair(rng.randint(1, blocks - 1), target) for target in targets]
        wanted += [rng.choice(wanted)] * rng.randint(0, 1)
        if any(a.dst_block_id == b.src_block_id for a in wanted for b in wanted if a.dst_block_id != a.src_block_id):
            tally.meet("chain")
        run([attention, *memory.raw], blocks, wanted)
        found = {}
        for oracle in oracles:
            oracle._copy(wanted)
            problem = difference(oracle, memory, tags, blocks)
            for block in range(1, blocks):
                cells = attention[block * parts : (block + 1) * parts].reshape(size, 3).tolist()
                ours = [[tags(s)] * 3 for s in oracle.attention.get(block, [None] * size)]
                if cells != ours:
                    problem = problem or f"block {block} holds {cells}, the oracle says {ours}"
            if problem:
                found[type(oracle).__name__] = f"{[tuple(p) for p in wanted]}: {problem}"
        tally.add(devices, found, f"case {case}")
    return tally


# -- prefill checkpoints ----------------------------------------------------------------------------------------------


def checkpoints(release: Release, seed: int) -> Tally | None:
    """The release's metadata builder names the block each row's checkpoint is exported to; so does the oracle."""
    if not hasattr(release.interface, "is_mamba_prefill_checkpoint_valid"):
        return None
    tally, rng = Tally(), random.Random(seed)
    devices = (Device, ExportsOneColumnOn)
    for case in range(CHECKPOINTS):
        unit = rng.choice((2, 4, 8))
        size = unit * rng.choice((1, 2, 4))
        alignment, eagle = unit * rng.choice((1, 1, 2)), rng.random() < 0.4
        start = rng.choice((0, 0, unit * rng.randint(0, 12), size * rng.randint(0, 4), rng.randint(0, 40)))
        tokens = rng.randint(1, 5 * size)
        config = Config(
            (Group("full", unit), Group("mamba", size)), 64, unit, 256, speculative=int(eagle), eagle=eagle,
            checkpoint_blocks=1, checkpoint_alignment=alignment,
        )  # fmt: skip
        table = rng.sample(range(1, 64), -(-(start + tokens) // size) + 2)
        offset, block = _exported(release, config, start, tokens, table)
        tally.meet("exported" if offset else "declined")
        life = Life(states_of(range(start + tokens)), list(range(start + tokens)), start + tokens, start, [table])
        output = _output([Member("r", start, tokens, 0)], {}, ["r"], set(), {"r": life})
        found = {}
        for device in devices:
            oracle = device(config, checkpoint_rule(config, eagle))
            answer = Sampled([5], 0)
            oracle.execute(output, lambda _: life.states, lambda *_: answer, (), no_one, nothing)  # noqa: B023
            running = table[-(-(start + tokens) // size) - 1]
            # Each export takes a block of its own: whatever else than the running block (and a moved state) was written.
            wrote = {b: c for b, c in oracle.mamba.items() if c.temporal == life.states[start + offset] and b != running}
            expected = {block: MambaContent(life.states[start + offset], (life.states[start + offset],))} if offset else {}
            if {b: c for b, c in wrote.items() if c.temporal not in (EMPTY, None)} != expected:
                found[device.__name__] = f"[{start}, {start + tokens}) unit {unit} block {size}: {expected}, not {wrote}"
        tally.add(devices, found, f"case {case}")
    return tally


def _exported(release: Release, config: Config, start: int, tokens: int, table: list[int]) -> tuple[int, int]:
    """(offset in the chunk, block) by the release: its builder from 0.31 on, the only backend's two calls before."""
    align = config.hash_unit if config.partial_hits else config.scheduler_block
    try:
        builder_class = load("vllm.model_executor.layers.mamba.checkpoint").MambaPrefillCheckpointBuilder
    except ImportError:
        interface, end = release.interface, start + tokens
        position = interface.get_mamba_prefill_checkpoint_position(end, config.hash_unit, config.eagle)
        valid = interface.is_mamba_prefill_checkpoint_valid(
            start, end, position, config.hash_unit, config.mamba_block, config.checkpoint_alignment
        )
        return (position - start, table[-(-end // config.mamba_block) - 2]) if valid else (0, NULL)
    drafter = SimpleNamespace(
        use_eagle=lambda: config.eagle,
        use_eagle_block_drop=lambda: config.eagle,
        needs_eagle_block_drop=lambda: config.eagle,
    )
    lookahead = int(
        config.eagle and "num_hash_lookahead_tokens" in load("vllm.config").VllmConfig.__dict__
    )
    engine = SimpleNamespace(
        speculative_config=drafter if config.eagle else None,
        num_hash_lookahead_tokens=lookahead,
        cache_config=SimpleNamespace(
            mamba_cache_mode="align",
            prefix_match_unit=config.hash_unit,
            hash_block_size=config.hash_unit,
            cache_hit_alignment_tokens=align,
        ),
    )
    spec = SimpleNamespace(
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=config.checkpoint_alignment,
        block_size=config.mamba_block,
    )
    batch = SimpleNamespace(
        query_start_loc_cpu=torch.tensor([0, tokens]),
        query_start_loc=torch.tensor([0, tokens]),
        seq_lens_cpu_upper_bound=torch.tensor([start + tokens]),
        block_table_tensor=torch.tensor([table]),
    )
    made = builder_class(engine, spec).build(batch, [0])
    return (0, NULL) if made is None else (int(made.checkpoint_offsets[0]), int(made.state_indices[0]))


# -- the whole --------------------------------------------------------------------------------------------------------


def main(seed: int, episodes: int) -> None:
    release = Release()

    def moves(
        make: Callable[[Release, Memory], Any], devices: Sequence[type[Device]], sit_out: bool, backwards: bool = False
    ) -> Tally:
        tally = Tally()
        release.language.backwards = backwards
        for number in range(episodes):
            episode(release, make, devices, seed * 1000 + number, sit_out, tally)
        release.language.backwards = False
        return tally

    tallies = {
        "block copies": copies(release, seed),
        "checkpoints": checkpoints(release, seed),
        "V2": moves(WorkerV2, (*MOVES, ForgetsSittingOut), sit_out=True),
        "V2, backwards": moves(WorkerV2, MOVES, sit_out=True, backwards=True),
        "V1": moves(WorkerV1, MOVES, sit_out=False),
        "V1, sitting out": moves(WorkerV1, (Device, ForgetsSittingOut), sit_out=True),
    }
    if "align_ctx" in release.copies.preprocess_mamba.__code__.co_varnames:
        tallies["V1, fused"] = moves(functools.partial(WorkerV1, fused=True), MOVES, sit_out=False)
    launches = {name: kernel.launches for name, kernel in release.kernels.items()}
    found = {name: vars(tally) for name, tally in tallies.items() if tally is not None}
    print(json.dumps({"tallies": found, "launches": launches}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
