"""The connector double: an external store that holds a prefix of each request, behind vLLM's real connector interface.

Offers end where the configuration says. A store may lose what it offered (``missing`` of a submit): then the last
tokens of the load never arrive, and its worker says so when the load is over, in the way that the release asks for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvproof.impl.vllm.rows import Load
from kvproof.spec.config import Config
from kvproof.spec.tracer import State


@dataclass
class Flight:
    """An asynchronous load under way: it is over in ``steps`` steps, once the step that asked for it has ``begun``."""

    load: Load
    steps: int
    begun: bool = True


@dataclass(frozen=True)
class Transfers:
    """What the worker's side says of loads after a step: those that are over, and what of them failed.

    ``failed`` are requests and ``invalid`` blocks: two ways of saying the same, of which a store uses one.
    """

    finished: frozenset[str]
    failed: frozenset[str]
    invalid: frozenset[int]
    sent: frozenset[str] = frozenset()
    """Requests that have ended, and whose blocks are needed no more."""


class Store:
    """What the external store holds, and the loads it has been asked for.

    ``missing`` is how many of a request's tokens it will have lost. A request whose load fell short is ``distrusted``:
    it is offered nothing again, lest it wait for ever; so is one whose
    prompt was prefilled elsewhere, once it has been loaded.
    """

    def __init__(self, config: Config, by_request: bool = False, fails: bool = False) -> None:
        """``by_request``: failures are told by request where that can be, not by block. ``fails``: there are some."""
        self.config = config
        self.by_request, self.fails = by_request, fails
        self.depth: dict[str, int] = {}
        self.missing: dict[str, int] = {}
        self.prompts: dict[str, int] = {}
        self.distrusted: set[str] = set()
        self.states: dict[str, Sequence[State]] = {}
        self.offered: dict[str, int] = {}
        self.asked_before: dict[str, int] = {}
        """How often each request was met with "ask again" since it was last admitted."""
        self.put_off = False
        """Whether anybody was met with that since it was last cleared."""
        self.sending: dict[str, int] = {}
        """Steps until a request that has ended needs its blocks no more."""
        self.shown: dict[str, int] = {}
        """The block-aligned local hit that the scheduler showed with its last question."""
        self.synchronous: list[Load] = []
        self.flying: dict[str, Flight] = {}
        self.asked: list[Flight] = []
        """Loads that a step has asked for which has not begun."""

    def holds(self, request: str, prompt: int, tokens: int, missing: int) -> None:
        """The store says it holds so many tokens of a prompt; the last ``missing`` of a load will not come."""
        self.prompts[request], self.depth[request] = prompt, tokens
        self.missing[request] = missing if self.fails else 0

    def targets(self) -> dict[str, list[int]]:
        """The blocks that loads in flight write to, by request."""
        return {name: flight.load.targets(self.config) for name, flight in self.flying.items()}

    def offer(self, request: str, num_tokens: int, local: int) -> int:
        """Tokens that the store can add to ``local`` (block-aligned) computed tokens."""
        held = 0 if request in self.distrusted else self.depth.get(request, 0)
        depth = self._end(held, num_tokens, self.prompts.get(request, 0))
        self.shown[request] = local
        self.offered[request] = max(0, depth - local)
        return self.offered[request]

    def _end(self, held: int, known: int, prompt: int) -> int:
        """Where an offer ends, of ``held`` tokens for a request that has ``known``, ``prompt`` of them its prompt."""
        config = self.config
        if config.offers == "prompt":
            return prompt - (1 if config.mamba_block else 0) if held >= prompt else 0
        step = config.hash_unit if config.offers == "unit" else config.scheduler_block
        return min(held, known - 1) // step * step

    def hesitates(self, request: str) -> bool:
        """Whether the store does not know yet what it holds of the request: it has to be asked again."""
        asked = self.asked_before[request] = self.asked_before.get(request, 0) + 1
        if asked <= self.config.offer_delay:
            self.put_off = True
            return True
        del self.asked_before[request]
        return False

    def keeps(self, request: Any, tables: Sequence[Sequence[int]]) -> bool:
        """Whether the blocks of a request that has ended are still to be sent. Not while they are being loaded, and not
        of one that failed: nobody waits for it."""
        name, failed = request.request_id, request.status.name == "FINISHED_ERROR"
        if not self.config.send_steps or failed or name in self.flying or not any(tables):
            return False
        self.sending[name] = self.config.send_steps
        return True

    def sent(self) -> frozenset[str]:
        """Whose blocks have been sent with this step."""
        self.sending = {name: left - 1 for name, left in self.sending.items()}
        done = frozenset(name for name, left in self.sending.items() if left < 0)
        self.sending = {name: left for name, left in self.sending.items() if name not in done}
        return done

    def take(self, request: str, tables: tuple[tuple[int, ...], ...], local: int, external: int) -> None:
        """The scheduler has allocated blocks for ``external`` tokens after ``local``: start the load."""
        lost = min(self.missing.get(request, 0), external)
        load = Load(request, local, local + external, tables, self.states[request], lost)
        if lost or self.config.offers == "prompt":
            self.distrusted.add(request)
        if self.config.connector == "async":
            flight = self.flying[request] = Flight(load, self.config.load_steps, not self.config.async_scheduling)
            if not flight.begun:
                self.asked.append(flight)
        else:
            self.synchronous.append(load)

    def due_now(self) -> list[Load]:
        """Synchronous loads of this step, handed over once."""
        due, self.synchronous = self.synchronous, []
        return due

    def arrived(self) -> list[Load]:
        """Asynchronous loads that are over with this step. A load outlives its request: the blocks wait for it."""
        for flight in self.flying.values():
            flight.steps -= flight.begun
        done = [flight.load for flight in self.flying.values() if flight.steps <= 0]
        self.flying = {name: flight for name, flight in self.flying.items() if flight.steps > 0}
        return done

    def report(self, synchronous: Sequence[Load], arrived: Sequence[Load]) -> Transfers | None:
        """What there is to say of the loads that are over with this step; ``None``: nothing."""
        short = [load for load in (*synchronous, *arrived) if load.lost]
        sent = self.sent()
        if not arrived and not short and not sent:
            return None
        # Only a request that waits for its load can be named: a synchronous one has run already.
        named = {load.request for load in arrived if load.lost} if self.by_request else set()
        blocks = (load.targets(self.config, load.received) for load in short if load.request not in named)
        return Transfers(
            finished=frozenset(load.request for load in arrived),
            failed=frozenset(named),
            invalid=frozenset(itertools.chain.from_iterable(blocks)),
            sent=sent,
        )


def make_connector_class(store: Store) -> type:
    """A connector class of the imported release, bound to ``store``. Must run after the release is importable."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
        KVConnectorBase_V1,
        KVConnectorMetadata,
        SupportsHMA,
    )

    class StoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
        """Scheduler side of the double; its worker side is the device oracle."""

        @property
        def supports_divergent_local_hybrid_hits(self) -> bool:
            return store.config.divergent_hits

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
            if store.hesitates(request.request_id):
                return None, False
            tokens = store.offer(request.request_id, request.num_tokens, num_computed_tokens)
            return tokens, store.config.connector == "async" and tokens > 0

        def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens <= 0:
                return
            local = store.shown[request.request_id]
            store.take(
                request.request_id, tuple(tuple(ids) for ids in blocks.get_block_ids()), local, num_external_tokens
            )

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            return KVConnectorMetadata()

        def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
            return store.keeps(request, (block_ids,)), None

        def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
            return store.keeps(request, block_ids), None

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
        def wait_for_layer_load(self, layer_name: str) -> None: ...
        def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
        def wait_for_save(self) -> None: ...

    return StoreConnector
