"""Boundary states that the cache hands to a connector, with their exact blocks, watched as they are handed over.

From 0.29 on every kept boundary of an aligned recurrent group is offered in the step that computes it, in 0.27 and 0.28
partial tails alone. A connector reads the block when the step has run; what lies there then is what it stores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from kvproof.impl.vllm.cacheview import RequestLog
from kvproof.spec.events import Event, Offloaded


class HandOver:
    """What one scheduler offers its connector."""

    def __init__(self, scheduler: Any, sequences: Mapping[str, RequestLog], emit: Callable[[Event], None]) -> None:
        self._sequences, self._emit = sequences, emit
        self.offered: list[tuple[str, int, int, int]] = []
        """Request, group, block and boundary of what is judged when the step is over."""
        build = scheduler.connector.build_connector_meta

        def build_connector_meta(output: Any) -> Any:
            self.offered += _offers(output)
            return build(output)

        scheduler.connector.build_connector_meta = build_connector_meta

    def step_over(self, spoiled: Collection[str]) -> None:
        """The step has run: judge what was offered in it.

        Not what was offered for ``spoiled`` requests: their load failed, which the connector knows before it stores
        anything, and whoever offered it did not. No connector that is released and takes offers has such loads.
        """
        offered, self.offered = self.offered, []
        for request, group, block, boundary in offered:
            log = self._sequences.get(request)
            if log is not None and boundary < len(log.states) and request not in spoiled:
                self._emit(Offloaded(group, block, log.states[boundary], "offered"))


def _offers(output: Any) -> list[tuple[str, int, int, int]]:
    """Request, group, block and boundary of everything that is handed over with a step."""
    state = getattr(output, "kv_connector_block_state", None)
    handed = state.boundary_state_offloads if state is not None else getattr(output, "partial_tail_offloads", None)
    return [(request, *entry) for request, entries in (handed or {}).items() for entry in entries]
