"""How many lookups fell short, and by how many tokens, per group kind and rule.

Where ``prometheus_client`` can be imported the numbers are its counters in the default registry as well, which a
serving engine exposes already; elsewhere they are plain numbers.
"""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from typing import Any, Final

from kvproof.impl.vllm.live.why import Miss

SHORT_HITS: Final = "kvproof_short_hits_total"
TOKENS_LOST: Final = "kvproof_tokens_lost_total"
_HELP: Final = {
    SHORT_HITS: "Prefix-cache lookups that ended below what full attention alone would have served.",
    TOKENS_LOST: "Tokens of those lookups that are computed again although full attention has them.",
}
REMEMBERED: Final = 4096
"""How many requests are known as counted: a request that waits is looked up in every step."""


class ShortHits:
    """Counts misses. ``hits`` and ``lost`` are this object's own numbers, by (kind, rule).

    The registry's counters belong to the process: all objects of this class add to the same two.
    """

    def __init__(self) -> None:
        self.hits: Counter[tuple[str, str]] = Counter()
        self.lost: Counter[tuple[str, str]] = Counter()
        self._counted: dict[str, None] = {}
        self._exposed = [_registered(name) for name in (SHORT_HITS, TOKENS_LOST)]

    def add(self, miss: Miss) -> bool:
        """Count ``miss``, unless one of the same request was counted lately. Whether it was counted."""
        if miss.request in self._counted:
            return False
        self._counted[miss.request] = None
        if len(self._counted) > REMEMBERED:
            del self._counted[next(iter(self._counted))]
        key = (miss.kind, miss.rule)
        self.hits[key] += 1
        self.lost[key] += miss.lost
        for counter, amount in zip(self._exposed, (1, miss.lost), strict=True):
            if counter is not None:
                counter.labels(group=miss.kind, rule=miss.rule).inc(amount)
        return True

    def lines(self) -> list[str]:
        """One line per kind and rule, the costliest first."""
        return [
            f"{kind}: {self.hits[kind, rule]} lookups fell short by {tokens} tokens in all ({rule})"
            for (kind, rule), tokens in sorted(self.lost.items(), key=lambda item: (-item[1], item[0]))
        ]


@functools.cache
def _registered(name: str) -> Any:
    """The process's counter of that name in the default registry; ``None`` without ``prometheus_client``."""
    try:
        client = importlib.import_module("prometheus_client")
    except ImportError:
        return None
    try:
        return client.Counter(name.removesuffix("_total"), _HELP[name], ["group", "rule"])
    except ValueError:  # registered by another copy of this module: the numbers are the same process's
        return getattr(client.REGISTRY, "_names_to_collectors", {}).get(name)
