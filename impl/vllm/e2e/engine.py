"""One vLLM engine in this process, step by step, with its cache's keys and its recurrent states within reach.

vLLM runs as it is: its own scheduler, worker, kernels. Everything here goes in through ``add_request`` and ``step`` and
otherwise only reads, apart from :meth:`Engine.write_state`, which is there to break things on purpose.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvproof.impl.vllm.e2e import copies
from kvproof.impl.vllm.e2e.models import LOAD_FORMAT, Model, register_loader

BLOCK: Final = 32
BLOCKS: Final = 160
LONGEST: Final = 512
ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's objects are in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # with more, two cores wait for each other
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

State = tuple[Any, ...]
"""Tensors: for each layer of a group the convolution's window and the temporal state (or what the layer keeps)."""


@dataclass(frozen=True)
class Answer:
    """What a request got: ``logprobs`` are those of its ``tokens``; the prompt's first ``cached`` were not computed."""

    name: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


@dataclass(frozen=True)
class Keyed:
    """A key of a recurrent group: ``block`` can be reused as ``group``'s state after ``prefix``."""

    group: int
    prefix: tuple[int, ...]
    block: int


class Engine:
    """vLLM serving ``model``. One for a process: vLLM keeps its settings and its process groups in globals."""

    def __init__(self, model: Model, **options: Any) -> None:
        """``options`` go to ``vllm.LLM`` and win over what is set here."""
        if "vllm" in sys.modules:
            missing = [f"{name}={value}" for name, value in ENVIRONMENT.items() if name not in os.environ]
            if missing:
                raise RuntimeError(f"vllm was imported before its environment was set: {' '.join(missing)}")
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        vllm = importlib.import_module("vllm")
        register_loader()
        if options.get("speculative_config"):
            copies.register()
        self.model = model
        self.version: str = vllm.__version__
        self._sampling: Callable[..., Any] = vllm.SamplingParams
        # A prefill chunk of a block fits beside the other requests' decode tokens.
        chunk = BLOCK if model.together == 1 else BLOCK + model.together
        with tempfile.TemporaryDirectory() as folder:
            model.write(Path(folder))
            settings: dict[str, Any] = {
                "model": folder,
                "load_format": LOAD_FORMAT,
                "skip_tokenizer_init": True,
                "dtype": model.dtype,
                "enforce_eager": True,
                "enable_prefix_caching": True,
                "mamba_cache_mode": "align",
                "mamba_ssm_cache_dtype": "float32",
                "block_size": BLOCK,
                "num_gpu_blocks_override": BLOCKS,
                "kv_cache_memory_bytes": 1 << 28,
                "max_model_len": LONGEST,
                "max_num_seqs": model.together,
                "max_num_batched_tokens": chunk,
                "async_scheduling": False,  # when a step returns, all that it did has been done
                "disable_log_stats": True,
                "seed": 0,
            }
            self.llm: Any = vllm.LLM(**{**settings, **options})
        self.core: Any = self.llm.llm_engine.engine_core.engine_core
        self.scheduler: Any = self.core.scheduler
        self.manager: Any = self.scheduler.kv_cache_manager
        self.pool: Any = self.manager.block_pool
        self.after_step: list[Callable[[], None]] = []
        self.requests: dict[str, Any] = {}
        """vLLM's own request objects, finished ones too: their hashes say what the pool's keys mean."""
        self._prompts: dict[str, tuple[int, ...]] = {}
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        spec = importlib.import_module("vllm.v1.kv_cache_interface").MambaSpec
        self.groups: dict[int, Any] = {i: g for i, g in enumerate(groups) if isinstance(g.kv_cache_spec, spec)}
        """The recurrent ones, by number."""
        self.block: int = max(group.kv_cache_spec.block_size for group in self.groups.values())
        self.hash_unit: int = self.pool.hash_block_size

    @property
    def runner(self) -> Any:
        """The model runner."""
        worker = self.core.model_executor.driver_worker
        return getattr(worker, "worker", worker).model_runner

    # -- serving ------------------------------------------------------------------------------------------------------

    def submit(self, name: str, prompt: Sequence[int], outputs: int) -> None:
        """A request for exactly so many greedy tokens."""
        params = self._sampling(temperature=0, max_tokens=outputs, ignore_eos=True, logprobs=1, detokenize=False)
        known = set(self.scheduler.requests)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        (added,) = set(self.scheduler.requests) - known
        self.requests[name] = self.scheduler.requests[added]
        self._prompts[name] = tuple(prompt)

    def step(self) -> list[Answer]:
        """One step of the engine: the requests that it finished."""
        done = [self._answer(output) for output in self.llm.llm_engine.step() if output.finished]
        for hook in self.after_step:
            hook()
        return done

    def busy(self) -> bool:
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def serve(self, name: str, prompt: Sequence[int], outputs: int) -> Answer:
        """One request alone, from its arrival to its end."""
        self.submit(name, prompt, outputs)
        done: list[Answer] = []
        while self.busy():
            done += self.step()
        (answer,) = done
        return answer

    def reset(self) -> None:
        """Forget all that is cached."""
        if not self.llm.llm_engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        self.requests.clear()
        gc.collect()

    def _answer(self, output: Any) -> Answer:
        (completion,) = output.outputs
        tokens = tuple(completion.token_ids)
        logprobs = tuple(kept[token].logprob for token, kept in zip(tokens, completion.logprobs, strict=True))
        name = output.request_id
        return Answer(name, self._prompts[name], tokens, logprobs, output.num_cached_tokens or 0)

    # -- the cache ----------------------------------------------------------------------------------------------------

    def keyed(self) -> list[Keyed]:
        """Every key of a recurrent group that the pool has now.

        A key is the hash of a prefix and four bytes of a group's number. A request's i-th hash is that of its first
        (i + 1) · ``hash_unit`` tokens. Raises ``LookupError`` for a key of no request's prefix.
        """
        prefixes: dict[bytes, tuple[Any, int]] = {}
        for request in self.requests.values():
            for index, name in enumerate(request.block_hashes):
                prefixes.setdefault(bytes(name), (request, (index + 1) * self.hash_unit))
        found = []
        for key, blocks in self.pool.cached_block_hash_to_block._cache.items():
            group = int.from_bytes(key[-4:], "big")
            if group not in self.groups:
                continue
            if bytes(key[:-4]) not in prefixes:
                raise LookupError(f"a key of group {group} is that of no request's prefix")
            request, length = prefixes[bytes(key[:-4])]
            prefix = tuple(request.all_token_ids[:length])
            for block in blocks.values() if isinstance(blocks, dict) else [blocks]:
                found.append(Keyed(group, prefix, block.block_id))
        return found

    def running_states(self, name: str) -> tuple[int, dict[int, State]] | None:
        """A running request's state in each recurrent group, and after how many tokens it is.

        It is found by the request's own table of blocks, not by any key: the state after n tokens is in the slot of
        token n. ``None`` if the request has computed nothing yet or is over.
        """
        request = self.requests[name]
        if request.request_id not in self.scheduler.requests or not request.num_computed_tokens:
            return None
        tables = self.manager.get_block_ids(request.request_id)
        computed: int = request.num_computed_tokens
        slot = {group: (computed - 1) // entry.kv_cache_spec.block_size for group, entry in self.groups.items()}
        return computed, {group: self.state(group, tables[group][slot[group]]) for group in self.groups}

    def state(self, group: int, block: int) -> State:
        """A copy of what a block holds of a recurrent group, on the CPU."""
        return tuple(part[block].detach().to("cpu", copy=True) for part in self._parts(group))

    def write_state(self, group: int, block: int, state: State | None) -> None:
        """Overwrite it; with zeros if there is no ``state``."""
        for index, part in enumerate(self._parts(group)):
            if state is None:
                part[block].zero_()
            else:
                part[block].copy_(state[index])

    def _parts(self, group: int) -> list[Any]:
        layers = self.core.vllm_config.compilation_config.static_forward_context
        return [part for name in self.groups[group].layer_names for part in layers[name].kv_cache]
