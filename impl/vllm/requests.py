"""Real requests with decodable keys, and the model's side of a step as the release's scheduler expects it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvproof.impl.vllm.drift import fields, load

Hasher = Callable[[Any], list[bytes]]
"""What a request calls when it has new tokens: the keys of the boundaries that have become computable, in order."""


def key_lookahead(scheduler: Any) -> int:
    """How many tokens after a boundary its key covers: 1 in 0.33 with EAGLE and without a connector, else 0."""
    return int(getattr(scheduler, "num_hash_lookahead_tokens", 0))


def make_request(
    name: str,
    tokens: Sequence[int],
    max_tokens: int,
    hasher: Hasher,
    eos: int | None = None,
    priority: int = 0,
    images: Sequence[Any] = (),
    unread: bool = False,
) -> Any:
    """A real ``Request``: prompt ``tokens``, at most ``max_tokens`` of output, ended early by the token ``eos``.

    Generation has no other stop condition. ``priority`` matters under that policy alone, ``images``
    are the release's features of what is no text in the prompt. ``unread``: its prompt's log probabilities are wanted,
    so that nothing of it may be read from a cache. ``hasher`` is called with the
    request whenever it has new tokens and returns the 32-byte keys of the boundaries after
    ``len(request.block_hashes)`` that have become computable: one per hash unit, due once :func:`key_lookahead` more
    tokens exist, which the key must cover as well. The release appends the group id.
    """
    sampling = load("vllm.sampling_params")
    params = sampling.SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        stop_token_ids=None,
        prompt_logprobs=0 if unread else None,
    )
    if eos is not None:
        params.update_from_generation_config({}, eos)
    return load("vllm.v1.request").Request(
        request_id=name,
        prompt_token_ids=list(tokens),
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        block_hasher=hasher,
        priority=priority,
        mm_features=list(images) or None,
    )


def unread(request: Any) -> bool:
    """Whether nothing of the release's request may be read from a cache."""
    return bool(request.skip_reading_prefix_cache)


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
