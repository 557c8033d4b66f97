"""The release's own worker functions on CPU tensors, behind one small interface for both model runners.

A worker owns real tensors for two recurrent groups that share their storage, as a hybrid cache does: in each block a
convolution window (one row per shift, so a window of one token) and a temporal state. What is run is the release's:
bookkeeping of accepted counts and columns, copy specifications, copy kernels, state indices. What is not is the model's
forward, which the caller plays by writing where the state indices point.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from calibration_triton import Kernel, Language, install

CONV_WIDTH, STATE_SHAPE, LAYERS = 3, (2, 2), 1
MAX_REQUESTS, MAX_TOKENS = 6, 128
MAMBA_GROUPS = (1, 2)
"""Group 0 is attention: the worker functions must pick the recurrent groups out by themselves."""


def load(name: str) -> Any:
    return importlib.import_module(name)


class OnDevice(torch.Tensor):
    """A CPU tensor that claims to lie on the accelerator, for launchers that insist on it."""

    is_cuda = True  # type: ignore[assignment]


def _pin_nothing() -> None:
    """Without an accelerator there is no memory to pin. Said before the modules that copy the answer are imported."""
    type(load("vllm.platforms").current_platform).is_pin_memory_available = classmethod(lambda cls: False)
    utilities = load("vllm.utils.torch_utils")
    forget = getattr(utilities.is_pin_memory_available, "cache_clear", None)
    if forget is not None:
        forget()
    if "PIN_MEMORY" in vars(utilities):
        utilities.PIN_MEMORY = False


class Release:
    """The modules of the imported release, with every kernel made to run here."""

    def __init__(self) -> None:
        self.language = Language()
        _pin_nothing()
        self.copies = load("vllm.v1.worker.mamba_utils")
        self.states = load("vllm.model_executor.layers.mamba.mamba_utils")
        self.hybrid = load("vllm.v1.worker.gpu.model_states.mamba_hybrid")
        self.default = load("vllm.v1.worker.gpu.model_states.default")
        self.batch = load("vllm.v1.worker.gpu_input_batch")
        self.interface = load("vllm.v1.kv_cache_interface")
        self.backends = load("vllm.v1.attention.backends.utils")
        self.buffer = load("vllm.v1.utils").CpuGpuBuffer
        self.sampling = load("vllm.sampling_params").SamplingParams
        self.kernels: dict[str, Kernel] = install(self.language, [self.copies, self.hybrid])
        if hasattr(self.copies, "_TEMPORAL_TILES"):
            self.copies._TEMPORAL_TILES = 2  # enough to have a tile boundary; sixteen only cost time here


class Memory:
    """Blocks of real tensors. A tag (a small positive integer) stands for a state; 0 is what was never written."""

    def __init__(self, release: Release, block_size: int, drafts: int, blocks: int, columns: int) -> None:
        self.release, self.block_size, self.drafts, self.columns = release, block_size, drafts, columns
        rows = drafts + 1
        conv_bytes = -(-rows * CONV_WIDTH * 4 // 8) * 8
        page = conv_bytes + STATE_SHAPE[0] * STATE_SHAPE[1] * 8 + 8  # padded, as pages are
        self.raw = [torch.zeros((blocks, page), dtype=torch.uint8) for _ in range(LAYERS)]
        self.conv, self.temporal = [], []
        for raw in self.raw:
            words, longs = raw.view(torch.int32), raw.view(torch.int64)
            self.conv.append(words.as_strided((blocks, rows, CONV_WIDTH), (page // 4, CONV_WIDTH, 1)))
            self.temporal.append(
                longs.as_strided((blocks, *STATE_SHAPE), (page // 8, STATE_SHAPE[1], 1), conv_bytes // 8)
            )
        release.language.allow(*self.raw)
        self.spec = release.interface.MambaSpec(
            block_size=block_size,
            shapes=((rows, CONV_WIDTH), STATE_SHAPE),
            dtypes=(torch.int32, torch.int64),
            mamba_cache_mode="align",
            num_speculative_blocks=drafts,
        )
        names = [[f"g{group}l{layer}" for layer in range(LAYERS)] for group in MAMBA_GROUPS]
        self.config = SimpleNamespace(
            num_blocks=blocks,
            kv_cache_groups=[
                SimpleNamespace(layer_names=["attention"], kv_cache_spec=SimpleNamespace()),
                *(SimpleNamespace(layer_names=layers, kv_cache_spec=self.spec) for layers in names),
            ],
        )
        self.context = {
            name: SimpleNamespace(kv_cache=[self.conv[layer], self.temporal[layer]])
            for layers in names
            for layer, name in enumerate(layers)
        }
        functions = (release.states.get_conv_copy_spec, release.states.get_temporal_copy_spec)
        by_type = hasattr(release.states, "MambaStateCopyFuncsByType")
        self.copy_functions: Any = {self.spec.mamba_type: functions} if by_type else functions

    def make_buffer(self, n: int, dtype: Any) -> Any:
        return self.release.buffer(n, dtype=dtype, device=torch.device("cpu"))

    def fill(self, block: int, window: Sequence[int | None], temporal: int | None) -> None:
        for conv, state in zip(self.conv, self.temporal, strict=True):
            for row, tag in enumerate(window):
                conv[block, row] = tag or 0
            state[block] = temporal or 0

    def read(self, block: int) -> tuple[tuple[int, ...], int]:
        """The window's tags and the state's. Raises when a block's elements or its layers disagree (a torn copy)."""
        found = set()
        for conv, state in zip(self.conv, self.temporal, strict=True):
            rows = [set(row) for row in conv[block].tolist()]
            cells = set(state[block].flatten().tolist())
            if any(len(row) != 1 for row in rows) or len(cells) != 1:
                raise AssertionError(f"block {block} is torn: {rows}, {cells}")
            found.add((tuple(row.pop() for row in rows), cells.pop()))
        if len(found) != 1:
            raise AssertionError(f"the layers of block {block} disagree: {found}")
        return found.pop()


class Member:
    """One request of the batch: ``start`` tokens computed, ``tokens`` scheduled, of which the last ``drafts``."""

    def __init__(self, name: str, start: int, tokens: int, drafts: int) -> None:
        self.name, self.start, self.tokens, self.drafts = name, start, tokens, drafts


class WorkerV2:
    """The V2 runner's hybrid model state: slots, with the columns and accepted counts kept on the device."""

    def __init__(self, release: Release, memory: Memory) -> None:
        self.release, self.memory = release, memory
        engine = SimpleNamespace(
            cache_config=SimpleNamespace(
                block_size=memory.block_size,
                mamba_block_size=memory.block_size,
                mamba_cache_mode="align",
                use_kda_recoverssm=False,
            ),
            compilation_config=SimpleNamespace(static_forward_context=memory.context),
            speculative_config=None,
            num_speculative_tokens=memory.drafts,
        )
        model = SimpleNamespace(
            get_mamba_state_copy_func=lambda: memory.copy_functions,
            get_mamba_state_copy_funcs=lambda types: memory.copy_functions,
        )

        def base(self: Any, *_: Any) -> None:
            self.vllm_config, self.model, self.device = engine, model, torch.device("cpu")
            self.max_num_reqs = MAX_REQUESTS
            self.rope_state = self.prompt_embeds_state = None

        release.default.DefaultModelState.__init__ = base
        self.state = release.hybrid.MambaHybridModelState(engine, model, None, torch.device("cpu"))
        groups = range(len(MAMBA_GROUPS) + 1)
        self.by_slot = [torch.zeros((MAX_REQUESTS, memory.columns), dtype=torch.int32) for _ in groups]
        self.by_row = [torch.zeros((MAX_REQUESTS, memory.columns), dtype=torch.int32) for _ in groups]
        release.language.allow(*self.by_slot, *self.by_row)
        self.per_slot_tables = hasattr(release.hybrid.MambaHybridModelState, "initialize_kv_cache")
        if self.per_slot_tables:
            tables = SimpleNamespace(
                block_tables=[SimpleNamespace(gpu=table) for table in self.by_slot], input_block_tables=self.by_row
            )
            self.state.initialize_kv_cache(memory.config, tables)
        self.slots: dict[str, int] = {}
        self.computed = torch.zeros(MAX_REQUESTS, dtype=torch.int32)

    def admit(self, name: str, computed: int, tables: Sequence[Sequence[int]]) -> None:
        free = [slot for slot in reversed(range(MAX_REQUESTS)) if slot not in self.slots.values()]
        slot = self.slots.setdefault(name, free[0] if free else -1)
        for group, table in zip(MAMBA_GROUPS, tables, strict=True):
            self.by_slot[group][slot] = torch.tensor(table, dtype=torch.int32)
        self.state.add_request(slot, SimpleNamespace(num_computed_tokens=computed, mm_features=[]))

    def leave(self, name: str) -> None:
        del self.slots[name]

    def prepare(self, batch: Sequence[Member]) -> None:
        """Everything up to the forward."""
        slots = [self.slots[member.name] for member in batch]
        for group in MAMBA_GROUPS:
            self.by_row[group].zero_()
            self.by_row[group][: len(slots)] = self.by_slot[group][slots]
        for slot, member in zip(slots, batch, strict=True):
            self.computed[slot] = member.start
        starts = [sum(m.tokens for m in batch[:i]) for i in range(len(batch) + 1)]
        inputs = SimpleNamespace(
            num_reqs=len(batch),
            idx_mapping=torch.tensor(slots, dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
        )
        rows = tuple(table[: len(batch)] for table in self.by_row)
        self.state.preprocess_state(inputs, rows, self.memory.config, self.computed)

    def indices(self, batch: Sequence[Member]) -> list[list[list[int]]]:
        """Per group and row, the blocks that the forward may touch: the running one, then one per draft."""
        lengths = torch.tensor([m.start + m.tokens for m in batch], dtype=torch.int32)
        plain = _plain_indices(self, [self.by_row[g][: len(batch)] for g in MAMBA_GROUPS], lengths)
        context = self.state._mamba_ctx
        if not hasattr(context, "compute_aligned_state_indices"):
            return plain
        fused = context.compute_aligned_state_indices(lengths.as_subclass(OnDevice), len(batch)).tolist()
        assert fused == plain, f"the release's two ways to find state indices disagree: {fused} and {plain}"
        return fused

    def accepted(self, name: str) -> int:
        return int(self.state.num_accepted_tokens_gpu[self.slots[name]])

    def finish(self, batch: Sequence[Member], sampled: Sequence[int]) -> None:
        """Everything after sampling. ``sampled``: tokens that each row emits, 0 while its prompt is incomplete."""
        slots = [self.slots[member.name] for member in batch]
        for slot, member, emitted in zip(slots, batch, sampled, strict=True):
            rejected = member.drafts + 1 - emitted if emitted else 0
            self.computed[slot] += member.tokens - rejected
        self.state.postprocess_state(
            torch.tensor(slots, dtype=torch.int32), torch.tensor(sampled, dtype=torch.int32), self.computed
        )


class WorkerV1:
    """The V1 runner's functions around its persistent batch. ``fused``: the move before the forward as one kernel."""

    def __init__(self, release: Release, memory: Memory, fused: bool = False) -> None:
        self.release, self.memory, self.fused = release, memory, fused
        known = inspect.signature(release.batch.InputBatch.__init__).parameters
        wanted = {
            "max_num_reqs": MAX_REQUESTS,
            "max_model_len": MAX_TOKENS,
            "max_num_batched_tokens": MAX_TOKENS,
            "device": torch.device("cpu"),
            "pin_memory": False,
            "vocab_size": 16,
            "block_sizes": [memory.block_size] * 3,
            "kernel_block_sizes": [memory.block_size] * 3,
            "max_num_blocks_per_req": [memory.columns] * 3,
            "num_spec_tokens": memory.drafts,
        }
        self.batch = release.batch.InputBatch(**{n: value for n, value in wanted.items() if n in known})
        self.bufs = release.copies.MambaBuffers.create(
            max_num_reqs=MAX_REQUESTS,
            kv_cache_config=memory.config,
            copy_funcs=memory.copy_functions,
            make_buffer=memory.make_buffer,
            device=torch.device("cpu"),
            with_postprocess_align=memory.drafts > 0,
        )
        self.columns: dict[str, int] = {}
        self.requests: dict[str, Any] = {}
        self.gone: set[str] = set()
        self.output: Any = None

    def admit(self, name: str, computed: int, tables: Sequence[Sequence[int]]) -> None:
        self.requests[name] = self.release.batch.CachedRequestState(
            req_id=name,
            prompt_token_ids=[1] * 4,
            mm_features=[],
            sampling_params=self.release.sampling(temperature=0.0),
            generator=None,
            block_ids=([], *(list(table) for table in tables)),
            num_computed_tokens=computed,
            output_token_ids=[],
        )

    def leave(self, name: str) -> None:
        self.gone.add(name)

    def _rows(self) -> list[str]:
        return list(self.batch.req_ids)

    def prepare(self, batch: Sequence[Member]) -> None:
        """As ``_update_states``: what is not scheduled leaves the batch, what is new enters, rows close up."""
        names = {member.name: member for member in batch}
        for name in self._rows():
            if name not in names or name in self.gone:
                self.batch.remove_request(name)
        for name, member in names.items():
            request = self.requests[name]
            request.num_computed_tokens = member.start
            if name in self.batch.req_id_to_index:
                self.batch.num_computed_tokens_cpu[self.batch.req_id_to_index[name]] = member.start
            else:
                self.batch.add_request(request)
        self.batch.condense()
        self.batch.refresh_metadata()
        self.batch.block_table.commit_block_table(len(batch))
        for group in MAMBA_GROUPS:
            self.release.language.allow(self.batch.block_table[group].get_device_tensor(len(batch)))
        self.output = SimpleNamespace(
            finished_req_ids=set(),
            preempted_req_ids=set(self.gone),
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
            num_scheduled_tokens={m.name: m.tokens for m in batch},
            scheduled_spec_decode_tokens={m.name: [0] * m.drafts for m in batch if m.drafts},
        )
        self.gone.clear()
        extra = {"align_ctx": self.bufs.postprocess_align} if self.fused else {}
        self.release.copies.preprocess_mamba(
            self.output,
            self.memory.config,
            SimpleNamespace(enable_prefix_caching=True),
            self.columns,
            self.batch,
            self.requests,
            self.memory.context,
            self.memory.copy_functions,
            self.bufs.preprocess,
            **extra,
        )

    def indices(self, batch: Sequence[Member]) -> list[list[list[int]]]:
        order = [self._rows().index(member.name) for member in batch]
        lengths = torch.tensor([m.start + m.tokens for m in batch], dtype=torch.int32)
        tables = [self.batch.block_table[g].get_device_tensor(len(batch))[order] for g in MAMBA_GROUPS]
        return _plain_indices(self, tables, lengths)

    def accepted(self, name: str) -> int:
        return int(self.batch.num_accepted_tokens_cpu[self.batch.req_id_to_index[name]])

    def finish(self, batch: Sequence[Member], sampled: Sequence[int]) -> None:
        context = self.bufs.postprocess_align
        if context is None:
            return
        rows = self._rows()
        self.release.copies.stage_postprocess_inputs_to_gpu(
            context, self.output, rows, len(rows), self.requests, self.columns
        )
        # Rows whose prompt is incomplete are sampled, too, here; the runner drops their token later.
        emitted = {member.name: max(1, n) for member, n in zip(batch, sampled, strict=True)}
        accepted = torch.ones(MAX_REQUESTS, dtype=torch.int32)
        accepted[: len(rows)] = torch.tensor([emitted[name] for name in rows], dtype=torch.int32)
        self.release.copies.postprocess_mamba_align_gpu(
            bufs=self.bufs,
            num_reqs=len(rows),
            num_accepted_tokens_gpu=accepted,
            num_accepted_tokens_cpu_tensor=self.batch.num_accepted_tokens_cpu_tensor,
            input_batch=self.batch,
            kv_cache_config=self.memory.config,
            forward_context=self.memory.context,
            mamba_state_copy_funcs=self.memory.copy_functions,
        )


def _plain_indices(worker: Any, tables: Sequence[Any], lengths: Any) -> list[list[list[int]]]:
    find = worker.release.backends.mamba_get_block_table_tensor
    return [find(table, lengths, worker.memory.spec, "align").tolist() for table in tables]
