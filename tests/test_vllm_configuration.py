"""The adapter's engine configuration, on real releases: it builds, runs, drains, and is what a real engine derives.

One process per release, because a process imports one vLLM: this file is also the program that runs there
(``python tests/test_vllm_configuration.py drive|compare``, with the release on ``PYTHONPATH``), and prints JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvproof.review.status import RELEASES
from kvproof.spec.config import Config, ConfigError, Group
from kvproof.spec.tracer import EMPTY, State, decode_key, encode_key, states_of

COMPARED = ("0.26.0", "0.29.0", "0.33.0")
OLD = ("0.20.0", "0.23.0", "0.25.1")
"""Of the releases before 0.26 those that differ most."""

FULL, MAMBA = Group("full", 16), Group("mamba", 16)
FINE, COARSE = Group("full", 8), Group("mamba", 32)
DRAFT, FINE_DRAFT = Group("full", 16, drafter=True), Group("full", 8, drafter=True)


def _config(*groups: Group, unit: int, **more: Any) -> Config:
    return Config(groups, **{"num_blocks": 64, "step_tokens": 64, "hash_unit": unit, **more})


CONFIGS = {
    "attention alone": _config(FULL, unit=16),
    "one block size": _config(FULL, MAMBA, unit=16),
    "partial hits": _config(FINE, COARSE, unit=8),
    "dense retention": _config(FINE, COARSE, unit=8, retention=None),
    "retention 64": _config(FINE, COARSE, unit=8, retention=64),
    "window": _config(FULL, Group("window", 16, window=32), MAMBA, unit=16),
    "eagle, no drafter named": _config(FULL, MAMBA, unit=16, speculative=2, eagle=True),
    "eagle": _config(FULL, MAMBA, DRAFT, unit=16, speculative=2, eagle=True),
    "eagle, partial hits": _config(FINE, COARSE, FINE_DRAFT, unit=8, speculative=2, eagle=True),
    "n-grams": _config(FULL, MAMBA, unit=16, speculative=2),
    "draft model": _config(FULL, MAMBA, DRAFT, unit=16, speculative=2),
    "checkpoints": _config(FINE, COARSE, unit=8, checkpoint_blocks=1, checkpoint_alignment=8),
    "eagle, checkpoints": _config(
        FINE, COARSE, FINE_DRAFT, unit=8, speculative=2, eagle=True, checkpoint_blocks=1, checkpoint_alignment=8
    ),
    "first chunk must fit": _config(FULL, MAMBA, unit=16, full_sequence_must_fit=False, long_prefill_threshold=32),
    "asynchronous": _config(FULL, MAMBA, unit=16, async_scheduling=True),
    "asynchronous, eagle": _config(FULL, MAMBA, DRAFT, unit=16, speculative=2, eagle=True, async_scheduling=True),
    "asynchronous, n-grams": _config(FULL, MAMBA, unit=16, speculative=2, async_scheduling=True),
    "connector": _config(FULL, MAMBA, unit=16, connector="sync"),
    "connector, eagle": _config(FINE, COARSE, FINE_DRAFT, unit=8, speculative=2, eagle=True, connector="sync"),
}

ILLEGAL = {
    "block above step": _config(FULL, Group("mamba", 128), unit=16),
    "block above long-prefill threshold": _config(FULL, MAMBA, unit=16, long_prefill_threshold=8),
    "more requests than tokens": _config(FULL, MAMBA, unit=16, step_tokens=16, max_running=17),
    "threshold above model length": _config(FULL, MAMBA, unit=16, long_prefill_threshold=2048),
    "unit finer than the only block": _config(FULL, unit=8),
    "retention of attention": _config(FULL, unit=16, retention=64),
    "groups all alike": _config(FULL, FULL, unit=16),
}

PLAIN = (
    "attention alone",
    "one block size",
    "partial hits",
    "window",
    "eagle, no drafter named",
    "n-grams",
    "draft model",
    "first chunk must fit",
)
"""What releases before 0.26 are tried with, at their default retention. A hash unit finer than the block is legal
there, but hits are whole blocks."""


# -- the program that runs inside a release ---------------------------------------------------------------------------


def _hasher(unit: int, lookahead: int) -> Any:
    def keys(request: Any) -> list[bytes]:
        states = states_of(request.all_token_ids)
        ends = range((len(request.block_hashes) + 1) * unit, request.num_tokens - lookahead + 1, unit)
        return [encode_key(states[end], states[end + lookahead] if lookahead else EMPTY) for end in ends]

    return keys


def _connector() -> type:
    """A synchronous store that holds the first 64 tokens of every prompt."""
    base = __import__("vllm.distributed.kv_transfer.kv_connector.v1.base", fromlist=["base"])

    class Double(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc, name-defined]
        def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
            return max(0, 64 - computed), False

        def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None: ...

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            return base.KVConnectorMetadata()

        def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
            return False, None

        def start_load_kv(self, *_: Any, **__: Any) -> None: ...
        def wait_for_layer_load(self, *_: Any) -> None: ...
        def save_kv_layer(self, *_: Any, **__: Any) -> None: ...
        def wait_for_save(self) -> None: ...

    return Double


def _run(config: Config) -> dict[str, Any]:
    """Two siblings, then a third that resends the first, with one draft in two accepted; then what is left."""
    from kvproof.impl.vllm.configuration import draft_token_ids, make_request, make_scheduler, model_output
    from kvproof.impl.vllm.requests import key_lookahead

    connector = _connector() if config.connector != "none" else None
    scheduler = make_scheduler(config, connector)
    begin = time.perf_counter()
    for _ in range(20):
        scheduler = make_scheduler(config, connector)
    milliseconds = (time.perf_counter() - begin) / 20 * 1000
    hasher = _hasher(config.hash_unit, key_lookahead(scheduler))
    prompts = {"a": list(range(150)), "b": [*range(70), *range(1000, 1080)], "c": list(range(150))}
    requests = {name: make_request(name, tokens, 6, hasher, eos=5) for name, tokens in prompts.items()}
    scheduler.add_request(requests["a"])
    scheduler.add_request(requests["b"])
    pending: deque[tuple[Any, set[str]]] = deque()
    keys: set[bytes] = set()
    steps = hits = 0
    while scheduler.has_unfinished_requests() or pending or not requests["c"].is_finished():
        steps += 1
        assert steps < 200, f"stalled: {sorted(scheduler.requests)}"
        if not scheduler.has_unfinished_requests() and not pending:
            scheduler.add_request(requests["c"])
        if scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            hits += sum(new.num_computed_tokens for new in output.scheduled_new_reqs if new.req_id == "c")
            ends = {n for n in output.num_scheduled_tokens if not scheduler.requests[n].is_prefill_chunk}
            pending.append((output, ends))
            if config.async_scheduling and len(pending) < 2 and steps % 2:
                continue
        output, ends = pending.popleft()
        drafted = output.scheduled_spec_decode_tokens
        sampled = {name: [2000 + steps] * (1 + (len(drafted.get(name, ())) + 1) // 2) for name in ends}
        scheduler.update_from_output(output, model_output(output, sampled))
        if config.speculative and not config.async_scheduling:
            live = [name for name in sorted(ends) if name in scheduler.requests]
            scheduler.update_draft_token_ids(draft_token_ids(live, [[7] * config.speculative for _ in live]))
        keys |= {bytes(key) for key in scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache}
    last = scheduler.schedule()
    scheduler.update_from_output(last, model_output(last, {}))
    pool = scheduler.kv_cache_manager.block_pool
    known = {state for request in requests.values() for state in states_of(request.all_token_ids)}
    return {
        "class": type(scheduler).__name__,
        "finished": [name for name, request in requests.items() if request.is_finished()],
        "outputs": [request.num_output_tokens for request in requests.values()],
        "free": pool.get_num_free_blocks(),
        "hit": hits,
        "keys": len(keys),
        "unknown keys": sum(decode_key(key[-36:]) not in known for key in keys),
        "milliseconds": milliseconds,
        "eagle groups": sorted(scheduler.kv_cache_manager.coordinator.eagle_group_ids),
        "lookahead": [scheduler.num_lookahead_tokens, key_lookahead(scheduler)],
        "retention": getattr(scheduler.kv_cache_manager.coordinator, "retention_interval", None),
        "step tokens": scheduler.max_num_scheduled_tokens,
        "v2": scheduler.use_v2_model_runner,
    }


def _run_or_crash(config: Config) -> dict[str, Any]:
    try:
        return _run(config)
    except AssertionError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        if "vllm/v1/core" not in where.filename:
            raise
        return {"crashed in": where.name}


def drive_old() -> dict[str, Any]:
    from kvproof.impl.vllm.configuration import default_retention, legal, release

    plain = {name: dataclasses.replace(CONFIGS[name], retention=None) for name in PLAIN}
    windows = {"window": CONFIGS["window"], "none": CONFIGS["one block size"]}
    return {
        "release": dataclasses.asdict(release()) | {"drafters_recognised": sorted(release().drafters_recognised)},
        "legal": {name: legal(config) for name, config in plain.items()},
        "retention 0": {name: legal(config) for name, config in windows.items()},
        "alike": legal(ILLEGAL["groups all alike"]),
        "default": [default_retention(eagle=False), default_retention(eagle=True)],
        "runs": {name: _run(config) for name, config in plain.items()},
    }


def drive() -> dict[str, Any]:
    from kvproof.impl.vllm.configuration import default_retention, legal, make_scheduler, release

    refused = {}
    for name, config in ILLEGAL.items():
        reason = legal(config)
        try:
            make_scheduler(config)
            built = True
        except ConfigError:
            built = False
        refused[name] = {"reason": reason, "built": built}
    return {
        "release": dataclasses.asdict(release()) | {"drafters_recognised": sorted(release().drafters_recognised)},
        "legal": {name: legal(config) for name, config in CONFIGS.items()},
        "refused": refused,
        "retention": [default_retention(eagle=False), default_retention(eagle=True)],
        "environment": os.environ.get("VLLM_PREFIX_CACHE_RETENTION_INTERVAL"),
        "runs": {name: _run_or_crash(config) for name, config in CONFIGS.items()},
    }


TINY_HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
    "num_experts": 0,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}

DERIVED = (
    "is_mm_encoder_only",
    "kv_events_config",
    "kv_transfer_config",
    "lora_config",
    "max_concurrent_batches",
    "max_in_flight_tokens",
    "num_hash_lookahead_tokens",
    "num_lookahead_tokens",
    "num_prefill_lookahead_tokens",
    "num_speculative_tokens",
    "use_v2_model_runner",
)
PARTS = ("scheduler_config", "cache_config", "parallel_config", "observability_config", "ec_transfer_config")
PREDICATES = (
    "use_eagle",
    "use_eagle_block_drop",
    "needs_eagle_block_drop",
    "uses_draft_model",
    "use_multi_module_mtp",
    "use_dflash",
    "use_dspark",
)


def compare() -> dict[str, Any]:
    """Where the adapter's configuration differs from one built whole, with a real hybrid model and MTP drafter."""
    from kvproof.impl.vllm import configuration
    from kvproof.impl.vllm.drift import load, only

    vllm = load("vllm.config")
    platform = load("vllm.platforms").current_platform
    type(platform).support_hybrid_kv_cache = classmethod(lambda cls: True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY_HYBRID))
        configuration.engine_config(CONFIGS["one block size"])
        model = vllm.ModelConfig(model=folder, tokenizer=folder, skip_tokenizer_init=True, max_model_len=1024)
        drafter = vllm.SpeculativeConfig(
            method="mtp",
            num_speculative_tokens=2,
            target_model_config=model,
            target_parallel_config=vllm.ParallelConfig(),
        )
        differences: list[str] = []

        def check(name: str, real: Any, ours: Any) -> None:
            if real != ours:
                differences.append(f"{name}: real {real!r}, ours {ours!r}")

        stand_in = vars(configuration.engine_config(CONFIGS["one block size"]).model_config)
        for name, value in stand_in.items():
            if name != "hf_config" and hasattr(model, name):
                check(f"model_config.{name}", getattr(model, name), value)
        for label in ("one block size", "eagle, no drafter named", "asynchronous", "asynchronous, eagle"):
            # Without a drafter's group the adapter drafts with MTP in every release, as the real drafter here does.
            config = dataclasses.replace(CONFIGS[label], groups=(FULL, MAMBA))
            ours = configuration.engine_config(config)
            real = vllm.VllmConfig(
                model_config=model,
                device_config=vllm.DeviceConfig(device="cpu"),
                speculative_config=drafter if config.eagle else None,
                cache_config=only(
                    vllm.CacheConfig,
                    block_size=16,
                    mamba_block_size=16,
                    enable_prefix_caching=True,
                    mamba_cache_mode="align",
                    prefix_match_unit=16,
                    prefix_cache_retention_interval=0,
                ),
                scheduler_config=vllm.SchedulerConfig(
                    max_model_len=1024,
                    is_encoder_decoder=False,
                    max_num_batched_tokens=64,
                    max_num_scheduled_tokens=64,
                    max_num_seqs=8,
                    enable_chunked_prefill=True,
                    disable_hybrid_kv_cache_manager=False,
                    async_scheduling=config.async_scheduling,
                ),
            )
            real.validate_block_size()
            for name in DERIVED:
                check(f"{label}: {name}", getattr(real, name, None), getattr(ours, name, None))
            for part in PARTS:
                a, b = getattr(real, part, None), getattr(ours, part, None)
                names = [f.name for f in dataclasses.fields(a)] if dataclasses.is_dataclass(a) else []
                for name in names:
                    check(f"{label}: {part}.{name}", getattr(a, name, None), getattr(b, name, None))
            if config.eagle:
                a, b = real.speculative_config, ours.speculative_config
                for name in PREDICATES:
                    if hasattr(a, name):
                        check(f"{label}: {name}()", getattr(a, name)(), getattr(b, name)())
                slots = "max_num_new_slots_for_drafting"
                check(f"{label}: {slots}", getattr(a, slots), getattr(b, slots))
    return {"differences": differences}


# -- the tests --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=RELEASES)
def driven(request: pytest.FixtureRequest, inside: Callable[..., Any]) -> dict[str, Any]:
    return dict(inside(request.param, __file__, "drive"))


def _version(driven: dict[str, Any]) -> tuple[int, ...]:
    return tuple(driven["release"]["version"])


@pytest.mark.release
@pytest.mark.slow
def test_every_configuration_is_legal_runs_and_drains(driven: dict[str, Any]) -> None:
    """All but one: 0.27.0 dies on a group shorter than the agreed hit when a store adds to it (PR 51468)."""
    assert driven["legal"] == dict.fromkeys(CONFIGS)
    for name, run in driven["runs"].items():
        if name == "connector, eagle" and _version(driven) == (0, 27, 0):
            assert run == {"crashed in": "truncate_computed_blocks"}
            continue
        assert run["finished"] == ["a", "b", "c"], name
        assert run["outputs"] == [6, 6, 6], name
        assert run["free"] == CONFIGS[name].num_blocks - 1, name
        assert run["keys"] > 0, name
        assert run["unknown keys"] == 0, name
        assert run["step tokens"] == CONFIGS[name].step_tokens, name
        assert run["class"] == ("AsyncScheduler" if CONFIGS[name].async_scheduling else "Scheduler"), name
    assert driven["environment"] is None


@pytest.mark.release
@pytest.mark.slow
def test_a_resend_hits(driven: dict[str, Any]) -> None:
    """Prefix caching is really on: an identical prompt hits, except where the release is known to find nothing."""
    nothing = {name for name, run in driven["runs"].items() if run.get("hit") == 0}
    assert not nothing & {"attention alone", "one block size", "partial hits", "dense retention", "window", "n-grams"}


@pytest.mark.release
@pytest.mark.slow
def test_what_the_release_derives(driven: dict[str, Any]) -> None:
    version, runs = _version(driven), driven["runs"]
    assert runs["dense retention"]["retention"] is None
    assert runs["retention 64"]["retention"] == 64
    assert runs["partial hits"]["retention"] == 0
    assert runs["n-grams"]["lookahead"][0] == 0
    assert runs["draft model"]["lookahead"][0] == 2
    assert runs["draft model"]["eagle groups"] == []
    assert runs["eagle"]["lookahead"] == [2, 1 if version >= (0, 33) else 0]
    assert runs["eagle"]["eagle groups"] == ([2] if version >= (0, 29) else [0, 1, 2])
    if version != (0, 27, 0):
        assert runs["connector, eagle"]["lookahead"] == [2, 0]
    assert runs["one block size"]["v2"] is (version >= (0, 29))


@pytest.mark.release
@pytest.mark.slow
def test_the_release_refuses_what_its_engine_would(driven: dict[str, Any]) -> None:
    only_026 = {"block above step", "block above long-prefill threshold"}
    from_027 = {"threshold above model length"}
    from_029 = {"groups all alike"} if _version(driven) >= (0, 29) else set()
    for name, answer in driven["refused"].items():
        legal = name in (from_027 if _version(driven) < (0, 27) else only_026) | from_029
        assert answer["built"] is legal, name
        assert (answer["reason"] is None) is legal, name


@pytest.mark.release
@pytest.mark.slow
def test_default_retention(driven: dict[str, Any]) -> None:
    version = _version(driven)
    plain = None if version < (0, 29) else 0
    assert driven["retention"] == [plain, None if version < (0, 30) else 0]


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("version", OLD)
def test_releases_before_026_are_driven_as_far_as_they_go(version: str, inside: Callable[..., Any]) -> None:
    driven = inside(version, __file__, "drive_old")
    numbers = _version(driven)
    assert driven["legal"] == dict.fromkeys(PLAIN)
    for name, run in driven["runs"].items():
        assert run["finished"] == ["a", "b", "c"], name
        assert run["outputs"] == [6, 6, 6], name
        assert run["free"] == CONFIGS[name].num_blocks - 1, name
        assert run["keys"] > 0, name
        assert run["unknown keys"] == 0, name
        assert run["hit"] > 0, name
        assert run["hit"] % CONFIGS[name].scheduler_block == 0, name
    assert "only where they differ" in driven["alike"]
    assert driven["default"] == [None, None]
    mechanisms = ("retention", "partial_hits", "admission_cap", "local_in_estimate", "lookup_for_connector")
    has = {name for name in mechanisms if driven["release"][name]}
    assert has == {name for name, since in (("admission_cap", (0, 20, 2)), ("retention", (0, 23))) if numbers >= since}
    kept = {name for name, reason in driven["retention 0"].items() if reason is None}
    assert kept == {name for name, since in (("window", (0, 23)), ("none", (0, 24))) if numbers >= since}


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("version", COMPARED)
def test_the_same_as_a_configuration_built_whole(version: str, inside: Callable[..., Any]) -> None:
    """What differs is only what no scheduler reads, and the profiler's result (``num_gpu_blocks``)."""
    unread = ("parallel_config.is_moe_model", "parallel_config.disable_nccl_for_dp_synchronization")
    allowed = (*unread, "cache_config.num_gpu_blocks")
    differences = inside(version, __file__, "compare", first=True)["differences"]
    assert [line for line in differences if line.split(": ")[1] not in allowed] == []


def test_keys_decode_with_and_without_lookahead() -> None:
    """A key promises the state at its boundary, whatever tokens after it the key covers."""
    state, beyond = State(states_of(range(16))[16]), State(states_of(range(17))[17])
    assert decode_key(encode_key(state) + b"\0\0\0\1") == state
    assert decode_key(encode_key(state, beyond) + b"\0\0\0\1") == state
    assert encode_key(state, beyond) != encode_key(state)


if __name__ == "__main__":
    print(json.dumps({"drive": drive, "drive_old": drive_old, "compare": compare}[sys.argv[1]]()))
