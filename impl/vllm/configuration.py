"""A kvproof configuration as a real vLLM scheduler: no model, no hub, no device.

The engine configuration is the release's own ``VllmConfig`` with its own sub-configurations, so that everything the
engine derives (look-ahead, tokens in flight, runner version, prefill look-ahead …) is derived by the release, and what
it validates is validated. What is not the release's own is listed in :data:`STAND_INS` and compared with the real thing
in a test.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from kvproof.impl.vllm import offload
from kvproof.impl.vllm.drift import Release, fields, load, only, quiet, release
from kvproof.impl.vllm.requests import draft_token_ids, make_request, model_output
from kvproof.spec.config import Config, ConfigError, Group

__all__ = [
    "Release",
    "absent",
    "default_retention",
    "draft_token_ids",
    "engine_config",
    "legal",
    "make_request",
    "make_scheduler",
    "model_output",
    "release",
]

CONNECTOR_NAME = "KvproofConnector"

UNLIKE_UNTIL = (0, 29)
"""Before it a hybrid lookup asserts two kinds or sizes of groups (HybridKVCacheCoordinator); since then one will do."""

JUNCTION_STATES = ("enable_mamba_fine_grained_prefix_cache", "enable_mamba_shared_prefix_checkpoint")
"""What releases call it that a recurrent state is kept where a shared prefix ends: up to 0.30, and since."""

STAND_INS = {
    "model_config": "a text-only, decoder-only, generating, dense model; hybrid where there is a recurrent group",
    "draft_model_config": "a drafter with one layer, which drafts one token after the other",
    "HAS_TRITON": "the machine is taken to have Triton, which GPU machines have (decides the model runner version)",
}
"""What is not the release's own, and what is assumed in its place."""


def _model_config(max_model_len: int, hybrid: bool) -> Any:
    """What the core asks of a model. Any other attribute raises: nothing is answered by accident."""
    architecture, model_type = ("Qwen3NextForCausalLM", "qwen3_next") if hybrid else ("Qwen3ForCausalLM", "qwen3")
    return SimpleNamespace(
        max_model_len=max_model_len,
        runner_type="generate",
        architecture=architecture,
        architectures=[architecture],
        hf_config=SimpleNamespace(model_type=model_type),
        is_attention_free=False,
        is_diffusion=False,
        is_encoder_decoder=False,
        is_hybrid=hybrid,
        is_moe=False,
        is_multimodal_model=False,
        is_quantized=False,
        has_inner_state=hybrid,
        logprobs_mode="raw_logprobs",
        multimodal_config=None,
        supports_multimodal_inputs=False,
        use_mla=False,
        uses_mrope=False,
        uses_xdrope=False,
        enable_prompt_embeds=False,
        enable_return_routed_experts=False,
        logits_processors=None,
        return_sampling_mask=False,
        skip_tokenizer_init=True,
        supports_kv_cache_grouping=False,
    )


@functools.cache
def _template() -> Any:
    """A real ``VllmConfig``, built once; every engine gets a copy with its own parts."""
    quiet()
    vllm_module, config = load("vllm.config.vllm"), load("vllm.config")
    if hasattr(vllm_module, "HAS_TRITON"):
        vllm_module.HAS_TRITON = True
    built = config.VllmConfig(device_config=config.DeviceConfig(device="cpu"))
    # One release scans installed packages each time the property is read, which costs more than a whole scheduler.
    decided = property(lambda engine: engine.__dict__["decided_v2_model_runner"])
    built.__class__ = type("VllmConfig", (config.VllmConfig,), {"use_v2_model_runner": decided})
    object.__setattr__(built, "model_config", _model_config(1, True))
    register = getattr(load("vllm.v1.core.single_type_kv_cache_manager"), "register_all_kvcache_specs", None)
    if register is not None:  # from 0.23
        register(built)
    return built


@functools.cache
def _uses_v2_model_runner(method: str, hybrid: bool) -> bool:
    """The release's own choice of model runner for a model with this drafting method ("" for none)."""
    base = load("vllm.config").VllmConfig
    if not hasattr(base, "use_v2_model_runner"):  # 0.20 has the environment variable alone
        return bool(load("vllm.envs").VLLM_USE_V2_MODEL_RUNNER)
    engine = copy.copy(_template())
    object.__setattr__(engine, "model_config", _model_config(1, hybrid))
    object.__setattr__(engine, "speculative_config", _speculative_config(1, method) if method else None)
    return bool(base.use_v2_model_runner.fget(engine))


@functools.cache
def _structured_output() -> Any:
    """The real manager. It holds nothing of a scheduler unless a request asks for a grammar, so one serves all."""
    return load("vllm.v1.structured_output").StructuredOutputManager(_template())


@functools.lru_cache(maxsize=256)
def _speculative_config(tokens: int, method: str, modules: int = 1, lookahead: bool = True) -> Any:
    """A real ``SpeculativeConfig``: built for n-grams, which need no draft model, then given the method."""
    built = load("vllm.config").SpeculativeConfig(method="ngram", num_speculative_tokens=tokens, prompt_lookup_max=2)
    if method != "ngram":
        built = copy.copy(built)
        drafter = SimpleNamespace(
            hf_config=SimpleNamespace(model_type="qwen3_next_mtp", num_nextn_predict_layers=modules),
            architectures=["Qwen3NextMTP"],
            model="drafter",
        )
        object.__setattr__(built, "method", method)
        object.__setattr__(built, "parallel_drafting", method == "dspark")
        object.__setattr__(built, "draft_model_config", drafter)
        if not lookahead:
            object.__setattr__(built, "disable_lookahead_block_hashes", True)
    return built


def speculative_method(config: Config) -> str:
    """The drafting method that fits: MTP with EAGLE, a draft model where a group is the drafter's, n-grams otherwise.

    With EAGLE and a drafter's group it is the method whose drafter the release recognises, if any. Asynchronous
    scheduling is refused with host-side n-grams, so there the GPU variant takes their place. No drafts: "".
    """
    if not config.speculative:
        return ""
    drafter = any(group.drafter for group in config.groups)
    if config.eagle:
        return min(release().drafters_recognised, default="mtp") if drafter else "mtp"
    if drafter:
        return "draft_model"
    return "ngram_gpu" if config.async_scheduling else "ngram"


def engine_config(config: Config, connector: bool = False) -> Any:
    """The release's ``VllmConfig`` for ``config``. Raises :class:`ConfigError` where the release's validation does."""
    with _refusal():
        return _engine_config(config, connector)


@contextlib.contextmanager
def _refusal() -> Iterator[None]:
    """Validation errors of the release, as one line that names it."""
    try:
        yield
    except (ValueError, AssertionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"vLLM {release().name} refuses this configuration: {_reason(error)}") from error


def _engine_config(config: Config, connector: bool) -> Any:
    vllm = load("vllm.config")
    engine = copy.copy(_template())
    method = speculative_method(config)
    speculative = None
    if method:
        speculative = _speculative_config(config.speculative, method, config.draft_modules, config.lookahead_keys)
    extra_slots = speculative.max_num_new_slots_for_drafting * config.max_running if speculative else 0
    watermark = (config.watermark + 0.5) / config.num_blocks if config.watermark else 0.0
    scheduler = vllm.SchedulerConfig(
        max_model_len=config.max_model_len,
        is_encoder_decoder=False,
        max_num_batched_tokens=config.step_tokens + extra_slots,
        max_num_scheduled_tokens=config.step_tokens,
        max_num_seqs=config.max_running,
        enable_chunked_prefill=True,
        long_prefill_token_threshold=config.long_prefill_threshold,
        scheduler_reserve_full_isl=config.full_sequence_must_fit,
        async_scheduling=config.async_scheduling,
        policy=config.policy,
        disable_hybrid_kv_cache_manager=False,
        **({"watermark": watermark} if "watermark" in fields(vllm.SchedulerConfig) else {}),
    )
    block = config.mamba_block or config.groups[0].block_size
    cache = only(
        vllm.CacheConfig,
        block_size=block,
        enable_prefix_caching=True,
        prefix_match_unit=config.hash_unit,
        hash_block_size=config.hash_unit,
        mamba_block_size=config.mamba_block or None,
        mamba_cache_mode="align" if config.mamba_block else "none",
        prefix_cache_retention_interval=_retention_interval(config),
        **dict.fromkeys(JUNCTION_STATES, config.junction_state),
    )
    object.__setattr__(cache, "num_gpu_blocks", config.num_blocks)
    transfer = None
    if connector:
        transfer = vllm.KVTransferConfig(
            kv_connector=CONNECTOR_NAME,
            kv_role="kv_both",
            kv_buffer_device="cpu",
            engine_id="kvproof",
            kv_load_failure_policy=config.load_failure,
        )
    events = None
    if config.cache_events:
        # "null": whoever listens stands in for the wire. Hashes as they are: 64 bits of them may be shared.
        events = vllm.KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"
    parts = {
        "model_config": _model_config(config.max_model_len, bool(config.mamba_block)),
        "scheduler_config": scheduler,
        "cache_config": cache,
        "speculative_config": speculative,
        "kv_transfer_config": transfer,
        "kv_events_config": events,
        "decided_v2_model_runner": _uses_v2_model_runner(method, bool(config.mamba_block)),
    }
    for name, part in parts.items():
        object.__setattr__(engine, name, part)
    engine._set_max_num_scheduled_tokens()
    engine.validate_block_size()
    engine.validate_mamba_block_size()
    return engine


def _retention_interval(config: Config) -> int | None:
    """The retention interval as this release takes it.

    Where no group is sparse, 0 means nothing, and releases up to 0.28 refuse it: there it is left unset.
    """
    if config.retention == 0 and all(group.kind == "full" for group in config.groups):
        return None
    return config.retention


def _reason(error: Exception) -> str:
    """A validation error in one line: what the release says, or the condition that it asserts without a word."""
    details = getattr(error, "errors", None)
    if callable(details):
        text = "; ".join(str(detail["msg"]).removeprefix("Value error, ") for detail in details())
    else:
        text = str(error) or next((f.line or "" for f in reversed(traceback.extract_tb(error.__traceback__))), "")
    return " ".join(text.split()) or type(error).__name__


def _spec(config: Config, group: Group) -> Any:
    interface, torch = load("vllm.v1.kv_cache_interface"), load("torch")
    if group.kind == "mamba":
        return only(
            interface.MambaSpec,
            block_size=group.block_size,
            shapes=((1,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
            num_speculative_blocks=config.speculative,
            num_prefill_checkpoint_blocks=config.checkpoint_blocks,
            prefill_checkpoint_alignment=config.checkpoint_alignment or None,
        )
    shared = {"block_size": group.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if group.kind == "window":
        return interface.SlidingWindowSpec(**shared, sliding_window=group.window)
    if group.kind == "chunked":
        return interface.ChunkedLocalAttentionSpec(**shared, attention_chunk_size=group.window)
    return interface.FullAttentionSpec(**shared)


def kv_cache_config(config: Config, engine: Any) -> Any:
    """The release's ``KVCacheConfig``: the groups in the order given, drafters marked where the release would."""
    with _refusal():
        return _kv_cache_config(config, engine)


def _kv_cache_config(config: Config, engine: Any) -> Any:
    interface = load("vllm.v1.kv_cache_interface")
    speculative = engine.speculative_config
    marks = bool(speculative and _drops_unit(speculative) and speculative.method in release().drafters_recognised)
    groups = [
        interface.KVCacheGroupSpec([f"layer.{index}"], _spec(config, group), is_eagle_group=marks and group.drafter)
        for index, group in enumerate(config.groups)
    ]
    alike = len(groups) > 1 and all(group.kv_cache_spec == groups[0].kv_cache_spec for group in groups)
    if alike and release().version < UNLIKE_UNTIL:
        raise ConfigError(
            f"vLLM {release().name} starts with several groups only where they differ: leave one of them, or give them "
            "different blocks"
        )
    built = only(
        interface.KVCacheConfig,
        num_blocks=config.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=_retention_interval(config),
    )
    utils = load("vllm.v1.core.kv_cache_utils")
    block, unit = utils.resolve_kv_cache_block_sizes(built, engine)
    if (block, unit) != (config.scheduler_block, config.hash_unit):
        raise ConfigError(
            f"vLLM {release().name} resolves scheduler block {block} and hash unit {unit} here, "
            f"not {config.scheduler_block} and {config.hash_unit}: with one group the unit is its block"
        )
    retention = _retention_interval(config)
    if release().retention:
        load("vllm.v1.core.kv_cache_coordinator")._validate_prefix_cache_retention_interval(retention, block, built)
    elif retention is not None:
        raise ConfigError(f"vLLM {release().name} keeps every boundary: set retention to null, not {retention}")
    if release().hash_block_in_config:
        built.hash_block_size = unit
        built.cache_hit_alignment_tokens = utils.resolve_cache_hit_alignment_tokens(built, engine, block, unit)
    return built


def _drops_unit(speculative: Any) -> bool:
    drop = getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)
    return bool(drop())


def make_scheduler(config: Config, connector_cls: type | None = None) -> Any:
    """The real ``Scheduler`` (``AsyncScheduler`` with asynchronous scheduling) of the imported release.

    ``connector_cls`` (a subclass of ``KVConnectorBase_V1`` and ``SupportsHMA``) is what the scheduler constructs
    through the release's own factory, as ``connector_cls(vllm_config, role, kv_cache_config)``; ``None`` means no
    connector. Raises :class:`ConfigError` where the release would refuse the engine.
    Cheap: whatever does not depend on ``config`` is built once per process (measured: 0.1 to 0.4 ms each).
    """
    config.check()
    engine = engine_config(config, connector_cls is not None)
    caches = kv_cache_config(config, engine)
    if config.connector == "offload":
        offload.prepare(config, engine, caches)
    if connector_cls is not None:
        factory = load("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
        factory._registry[CONNECTOR_NAME] = lambda: connector_cls
    with _Retention(config):
        return engine.scheduler_config.get_scheduler_cls()(
            vllm_config=engine,
            kv_cache_config=caches,
            structured_output_manager=_structured_output(),
            block_size=config.scheduler_block,
            hash_block_size=config.hash_unit,
            log_stats=True,
        )


class _Retention:
    """While a coordinator is built, the environment says the retention interval (releases up to 0.28 read it there)."""

    NAME = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"

    def __init__(self, config: Config) -> None:
        self.value = _retention_interval(config)
        self.active = release().retention_from_environment

    def __enter__(self) -> None:
        if self.active:
            self.before = os.environ.pop(self.NAME, None)
            if self.value is not None:
                os.environ[self.NAME] = str(self.value)

    def __exit__(self, *_: object) -> None:
        if self.active:
            os.environ.pop(self.NAME, None)
            if self.before is not None:
                os.environ[self.NAME] = self.before


@functools.lru_cache(maxsize=4096)
def legal(config: Config) -> str | None:
    """Why this release's own validation would refuse such an engine; ``None`` if it would start.

    Asked of the release: its configuration classes, its block-size and retention checks. Known answers: up to 0.22 any
    retention interval, and in 0.23 one without a window group; up to 0.26 a recurrent block above the step's token
    limit, or above the long-prefill threshold; up to 0.28 several groups that are all alike; everywhere more running
    requests than tokens in a step, a threshold above the model length, a unit finer than the block of a single group, a
    positive retention interval without a sparse group.
    """
    reason = config.problem()
    if reason is not None:
        return reason
    try:
        engine = engine_config(config, config.connector != "none")
        caches = kv_cache_config(config, engine)
        if config.connector == "offload":
            offload.prepare(config, engine, caches)
    except ConfigError as error:
        return str(error)
    return None


def absent(config: Config) -> dict[str, str]:
    """Which of the rarer things that ``config`` asks for this release does not have, by field, and what to do."""
    vllm, usual = load("vllm.config"), config.usual()
    has = {
        "junction_state": not fields(vllm.CacheConfig).isdisjoint(JUNCTION_STATES),
        "lookahead_keys": "disable_lookahead_block_hashes" in fields(vllm.SpeculativeConfig),
        "draft_modules": hasattr(vllm.VllmConfig, "num_prefill_lookahead_tokens"),
        "watermark": "watermark" in fields(vllm.SchedulerConfig),
        "offload_outputs": release().version >= (0, 23),
    }
    return {
        name: f"knows no other {name} than {getattr(usual, name)}: set it to that"
        for name, there in has.items()
        if not there and getattr(config, name) != getattr(usual, name)
    }


def default_retention(eagle: bool) -> int | None:
    """The retention interval that the release's engine arguments resolve to for a hybrid model when none is given.

    Up to 0.28 the environment variable is unset: ``None``. 0.29 resolves to 0, and to ``None`` for hybrid models with
    EAGLE. From 0.30 it is 0.
    """
    if not release().retention or release().retention_from_environment:
        return None
    return None if eagle and release().version < (0, 30) else 0
