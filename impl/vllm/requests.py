"""Real requests with decodable keys, and the model's side of a step as the release's scheduler expects it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvproof.impl.vllm.drift import fields, load
from kvproof.spec.tracer import State, advance, encode_key

NEVER = -2
"""A token that no model returns: the end-of-sequence token of requests that end by length or by order only."""

Hasher = Callable[[Any], list[bytes]]
"""What a request calls after each new token: the keys of the boundaries that have become computable, in order."""


def make_hasher(hash_unit: int, lookahead: int = 0) -> Hasher:
    """A block hasher whose keys decode to the prefix they stand for.

    One key per ``hash_unit`` tokens, 32 bytes, ``encode_key`` of the state at the boundary; the release appends the
    group id. ``lookahead`` is the number of tokens after the boundary that the key covers too (:func:`key_lookahead` of
    the scheduler): the key is due once they exist, and the state after them fills the bytes above the boundary's own
    state, so that keys differ where the release's would. One hasher per request: it remembers how far it has read.
    """
    state, position = State(0), 0

    def hasher(request: Any) -> list[bytes]:
        nonlocal state, position
        keys = []
        tokens = request.all_token_ids
        done = len(request.block_hashes)
        while (end := (done + len(keys) + 1) * hash_unit) + lookahead <= request.num_tokens:
            for token in tokens[position:end]:
                state = advance(state, token)
            position = end
            key = encode_key(state)
            if lookahead:
                beyond = state
                for token in tokens[end : end + lookahead]:
                    beyond = advance(beyond, token)
                key = key[:16] + int(beyond).to_bytes(8, "big") + key[24:]
            keys.append(key)
        return keys

    return hasher


def key_lookahead(scheduler: Any) -> int:
    """How many tokens after a boundary its key covers: 1 in 0.33 with EAGLE and without a connector, else 0."""
    return int(getattr(scheduler, "num_hash_lookahead_tokens", 0))


def make_request(name: str, tokens: Sequence[int], max_tokens: int, hasher: Hasher, eos: int | None = None) -> Any:
    """A real ``Request``: prompt ``tokens``, at most ``max_tokens`` of output, ended early by the token ``eos``.

    Generation has no other stop condition. ``hasher`` comes from :func:`make_hasher` (one per request).
    """
    sampling = load("vllm.sampling_params")
    params = sampling.SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=None)
    if eos is not None:
        params.update_from_generation_config({}, eos)
    return load("vllm.v1.request").Request(
        request_id=name,
        prompt_token_ids=list(tokens),
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        block_hasher=hasher,
    )


def model_output(
    scheduler_output: Any,
    sampled: Mapping[str, Sequence[int]],
    kv_connector_output: Any | None = None,
) -> Any:
    """The ``ModelRunnerOutput`` of one step.

    ``sampled`` holds, per request, the accepted drafts and the next token; a request that is missing (a prefill chunk
    that does not end its prompt) sampled nothing.
    """
    names = list(scheduler_output.num_scheduled_tokens)
    cls = load("vllm.v1.outputs").ModelRunnerOutput
    values: dict[str, Any] = {
        "req_ids": names,
        "req_id_to_index": {name: index for index, name in enumerate(names)},
        "sampled_token_ids": [list(sampled.get(name, ())) for name in names],
        "logprobs": None,
        "prompt_logprobs_dict": {},
        "pooler_output": [None] * len(names),
        "kv_connector_output": kv_connector_output,
    }
    known = fields(cls)
    return cls(**{key: value for key, value in values.items() if key in known})


def draft_token_ids(req_ids: Sequence[str], lists: Sequence[Sequence[int]]) -> Any:
    """The drafts proposed after a step, for ``Scheduler.update_draft_token_ids``."""
    return load("vllm.v1.outputs").DraftTokenIds(list(req_ids), [list(drafts) for drafts in lists])
