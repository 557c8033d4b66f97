"""What a release's own start-up check says of a pool, and whether a request that is alone in it gets to its end.

A release refuses to start an engine whose pool does not hold one request of the longest length. Who is not refused
relies on that: whatever a client may send, alone, is served.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

from kvproof.impl.vllm.configuration import engine_config, kv_cache_config
from kvproof.impl.vllm.drift import load
from kvproof.spec.config import MOST_BLOCKS, Config
from kvproof.spec.events import Lone
from kvproof.spec.rules.blocks import peak_blocks

REFUSALS = ("No available memory", "at least one request")
"""What the start-up check says when it refuses a pool. Any other error is none of a pool."""

PREEMPTED_IN_VAIN = 3
"""How often in a row a lone request loses its blocks without having got any further before it is called stuck."""


@functools.lru_cache(maxsize=4096)
def promised(config: Config) -> int:
    """The longest request that the release promises to hold in this pool; 0 where its start-up check refuses the pool.

    Also 0 where it can't be asked: it would form other groups of these layers. Raises :class:`ConfigError` where its
    validation refuses the configuration.
    """
    engine = engine_config(config, config.connector != "none")
    groups = kv_cache_config(config, engine).kv_cache_groups
    object.__setattr__(engine.model_config, "original_max_model_len", config.max_model_len)
    object.__setattr__(engine.cache_config, "num_gpu_blocks_override", config.num_blocks)
    if hasattr(engine.cache_config, "kv_cache_layout"):  # from 0.29; the engine core takes what the workers prefer
        object.__setattr__(engine.cache_config, "kv_cache_layout", "LBNHC")
    # Blocks are one size in bytes: a model's smaller ones are padded, as the release's platforms do.
    page = math.lcm(*(group.kv_cache_spec.page_size_bytes for group in groups))
    layers = {f"layer.{i}": replace(group.kv_cache_spec, page_size_padded=page) for i, group in enumerate(groups)}
    try:
        planned = _plan(engine, layers, config.num_blocks * page)
    except ValueError as error:
        if not any(words in str(error) for words in REFUSALS):
            raise
        return 0
    asked = Counter((type(layer).__name__, layer.block_size) for layer in layers.values())
    formed = Counter((type(g.kv_cache_spec).__name__, g.kv_cache_spec.block_size) for g in planned.kv_cache_groups)
    return config.max_model_len if (formed, planned.num_blocks) == (asked, config.num_blocks) else 0


def _plan(engine: Any, layers: dict[str, Any], memory: int) -> Any:
    """The release's own plan for one worker with these layers. Raises ``ValueError`` where it refuses to start."""
    try:
        planning = load("vllm.v1.core.kv_cache_planning")  # from 0.33
    except ImportError:
        planning = load("vllm.v1.core.kv_cache_utils")
    if hasattr(planning, "get_global_kv_cache_groups"):
        groups = planning.get_global_kv_cache_groups(engine, [layers])
        return planning.get_kv_cache_configs(engine, [layers], [memory], groups)[0]
    return planning.get_kv_cache_configs(engine, [layers], [memory])[0]


def smallest_promising(config: Config) -> int:
    """The smallest pool that the start-up check accepts for the longest request; 0 where there is none to be found."""
    low = config.smallest_pool()
    high = min(MOST_BLOCKS, 2 * peak_blocks(config, config.max_model_len) + config.step_tokens + low)
    if not promised(replace(config, num_blocks=high)):
        return 0
    while low < high:
        middle = (low + high) // 2
        if promised(replace(config, num_blocks=middle)):
            high = middle
        else:
            low = middle + 1
    return low


class LoneRequest:
    """Follows whichever request is alone in a scheduler, step by step.

    ``stuck`` is set once it has been said of a request that it gets no further, until it does.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._request: Any = None
        self._reached = (0, 0)
        self._preemptions = 0
        self._seen = 0
        self.stuck = False

    def after(self, requests: dict[str, Any], waits: bool) -> Lone | None:
        """A step is over. ``waits``: nothing has run for so long that a stall is called.

        What there is to say of the request that was alone in it; ``None``: nothing, it goes on.
        """
        before = self._request
        if before is not None and before.request_id not in requests:
            self._request = None
            ended = before.is_finished() and before.status.name != "FINISHED_ABORTED"
            return self._say(before, finished=True) if ended and not requests and not self.stuck else None
        alone = next(iter(requests.values())) if len(requests) == 1 else None
        if alone is None:
            self._request = None
            return None
        reached = (alone.num_tokens, alone.num_computed_tokens)
        if alone is not before or reached > self._reached:
            self._request, self._reached, self._preemptions = alone, reached, 0
            self._seen, self.stuck = alone.num_preemptions, False
            return None
        self._preemptions += alone.num_preemptions - self._seen
        self._seen = alone.num_preemptions
        if self.stuck or not (waits or self._preemptions >= PREEMPTED_IN_VAIN):
            return None
        self.stuck = True
        return self._say(alone, finished=False, preempted=0 if waits else self._preemptions)

    def interfered(self) -> None:
        """Somebody took its blocks from outside: it starts over."""
        self._request, self.stuck = None, False

    def _say(self, request: Any, finished: bool, preempted: int = 0) -> Lone:
        return Lone(
            request=request.request_id,
            tokens=min(request.num_prompt_tokens + request.max_tokens, self._config.max_model_len),
            longest=promised(self._config),
            blocks=self._config.num_blocks,
            finished=finished,
            preempted=preempted,
        )
