"""Block copies and prefill checkpoints: the release's functions beside the oracle, on random inputs."""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch
from calibration_faults import CopiesOneByOne, ExportsOneColumnOn
from calibration_found import Tags, Tally, difference, no_one, nothing
from calibration_moves import Life, Step, scheduler_output
from calibration_worker import Member, Memory, Release, load

from kvproof.impl.vllm.device import Device
from kvproof.impl.vllm.rows import Sampled
from kvproof.impl.vllm.subject import checkpoint_rule
from kvproof.spec.config import Config, Group
from kvproof.spec.tracer import EMPTY, State, states_of
from kvproof.spec.view import NULL, MambaContent

COPIES, CHECKPOINTS = 150, 400


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
        output = scheduler_output(Step([Member("r", start, tokens, 0)], new=["r"]), {"r": life})
        found = {}
        for device in devices:
            oracle = device(config, checkpoint_rule(config, eagle))
            answer = Sampled([5], 0)
            oracle.execute(output, lambda _: life.states, lambda *_: answer, (), no_one, nothing)  # noqa: B023
            running = table[-(-(start + tokens) // size) - 1]
            # An export has a block of its own; the running block is no export.
            wrote = {
                b: c for b, c in oracle.mamba.items() if c.temporal == life.states[start + offset] and b != running
            }
            expected = (
                {block: MambaContent(life.states[start + offset], (life.states[start + offset],))} if offset else {}
            )
            if {b: c for b, c in wrote.items() if c.temporal not in (EMPTY, None)} != expected:
                found[device.__name__] = (
                    f"[{start}, {start + tokens}) unit {unit} block {size}: {expected}, not {wrote}"
                )
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
    lookahead = int(config.eagle and "num_hash_lookahead_tokens" in load("vllm.config").VllmConfig.__dict__)
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
