"""What a release counts, read off what its scheduler returns after a step.

Prompts are counted in the output of a request that put out its first token, lookups in the step's statistics. The names
differ by release: up to 0.19 a prompt's parts are fields of the output itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvproof.spec.events import Counted

LOOKUPS = {
    "prefix_cache_stats": "lookups in the cache",
    "connector_prefix_cache_stats": "lookups in the external store",
}


def counted(outputs: Mapping[int, Any], requests: Mapping[str, Any], found: Mapping[str, int]) -> Iterator[Counted]:
    """The counts in what ``update_from_output`` returned about these requests.

    ``found`` is how many tokens of each were in a cache when it was admitted first.
    """
    for of_client in outputs.values():
        for output in of_client.outputs:
            prompt = _prompt(output, requests[output.request_id].num_prompt_tokens)
            if prompt:
                yield Counted("prompt", prompt, output.request_id, found.get(output.request_id, -1))
        for name, of in LOOKUPS.items():
            stats = getattr(of_client.scheduler_stats, name, None)
            if stats is not None and stats.requests:
                yield Counted(of, (("queries", int(stats.queries)), ("hits", int(stats.hits))))


def _prompt(output: Any, prompt: int) -> tuple[tuple[str, int], ...]:
    """Where the tokens of one request's prompt came from; empty where the output does not say."""
    stats = getattr(output, "prefill_stats", None)
    if stats is not None:
        return (
            ("prompt", int(stats.num_prompt_tokens)),
            ("computed", int(stats.num_computed_tokens)),
            ("local", int(stats.num_local_cached_tokens)),
            ("external", int(stats.num_external_cached_tokens)),
        )
    cached, external = getattr(output, "num_cached_tokens", None), getattr(output, "num_external_computed_tokens", None)
    if cached is None or external is None:
        return ()
    return (
        ("prompt", prompt),
        ("computed", prompt - int(cached)),
        ("local", int(cached) - int(external)),
        ("external", int(external)),
    )
