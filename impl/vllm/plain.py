"""A real scheduler that serves, without any of our hooks on it: what the assertions of a live engine are tried on.

The release's scheduler, its requests and its own prefix hashes are real; only the model is made up. What it says after
a prefix is a function of the prefix, so that equal prompts get equal answers. Scenarios drive it, as they drive every
subject; nothing is observed and nothing judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvproof.impl.vllm.configuration import draft_token_ids, make_request, make_scheduler, model_output
from kvproof.impl.vllm.connector import Store, make_connector_class
from kvproof.impl.vllm.drift import load, parameters
from kvproof.impl.vllm.requests import key_lookahead
from kvproof.spec.config import Config
from kvproof.spec.scenario import Action
from kvproof.spec.tracer import State, advance, states_of

EOS = 7


def _next(state: State) -> int:
    return 1_000_000_000 + (state >> 22) % 65_521


class PlainEngine:
    """One scheduler, a made-up model, and a store that keeps its word."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.store = Store(config)
        self.scheduler = make_scheduler(
            config, make_connector_class(self.store) if config.connector != "none" else None
        )
        utils = load("vllm.v1.core.kv_cache_utils")
        hashing = load("vllm.utils.hashing").sha256
        utils.init_none_hash(hashing)
        ahead = key_lookahead(self.scheduler)
        make = utils.get_request_block_hasher
        extra = {"num_hash_lookahead_tokens": ahead} if "num_hash_lookahead_tokens" in parameters(make) else {}
        self._hasher = make(config.hash_unit, hashing, **extra)
        self._requests: dict[str, Any] = {}
        self._states: dict[str, list[State]] = {}
        self._finishing: set[str] = set()
        self.sampled: dict[str, list[int]] = {}

    def submit(self, name: str, tokens: Sequence[int], max_tokens: int, external: int = 0) -> None:
        """A request arrives with its prompt's token ids, of which a store holds the first ``external``."""
        request = make_request(name, tokens, max_tokens, self._hasher, EOS)
        self._requests[name] = request
        self._states[name] = self.store.states[name] = states_of(tokens)
        self.store.depth[name] = external
        self.scheduler.add_request(request)

    def tokens(self, name: str) -> list[int]:
        """Prompt and output so far."""
        return list(self._requests[name].all_token_ids)

    def apply(self, action: Action) -> None:
        """Do one action of a scenario. What is forced on an engine is left out."""
        match action.kind:
            case "submit":
                base = self.tokens(action.base) if action.base in self._requests else []
                shared = base[: min(action.shared, action.length)]
                first = (len(self._requests) + 1) * 100_000
                tokens = [*shared, *range(first, first + action.length - len(shared))][: self.config.max_model_len - 1]
                if tokens and action.request not in self._requests:
                    room = self.config.max_model_len - len(tokens)
                    self.submit(action.request, tokens, max(1, min(action.max_tokens, room)), action.external)
            case "step":
                for _ in range(action.times):
                    if self.scheduler.has_requests():
                        self.step(action.accept)
            case "finish":
                self._finishing.add(action.request)
            case "abort":
                if action.request in self.scheduler.requests:
                    aborted = load("vllm.v1.request").RequestStatus.FINISHED_ABORTED
                    self.scheduler.finish_requests(action.request, aborted)
            case "reset":
                self.scheduler.reset_prefix_cache()

    def step(self, accept: Sequence[int] = ()) -> None:
        """Schedule, run, sample, update: as the engine's own loop does."""
        output = self.scheduler.schedule()
        sampled = {name: self._sample(name, output, i, accept) for i, name in enumerate(output.num_scheduled_tokens)}
        self.sampled = {name: tokens for name, tokens in sampled.items() if tokens}
        self.store.due_now()
        arrived = self.store.arrived()
        transfers = None
        if arrived:
            transfers = load("vllm.v1.outputs").KVConnectorOutput(finished_recving={a.request for a in arrived})
        self.scheduler.update_from_output(output, model_output(output, self.sampled, transfers))
        self._finishing &= self.scheduler.requests.keys()
        for name, tokens in self.sampled.items():
            states = self._states[name]
            for token in tokens:
                states.append(advance(states[-1], token))
        if self.config.speculative and not getattr(output, "skip_drafts", False):
            self._draft()

    def _sample(self, name: str, output: Any, index: int, accept: Sequence[int]) -> list[int]:
        request, states = self._requests[name], self._states[name]
        drafts = output.scheduled_spec_decode_tokens.get(name, ())
        # num_computed_tokens was moved on when the step was scheduled.
        if request.num_computed_tokens - len(drafts) < len(states) - 1:
            return []
        if name in self._finishing:
            return [EOS]
        wanted = accept[index % len(accept)] if accept else len(drafts)
        state, tokens = states[-1], []
        for draft in drafts[:wanted]:
            if draft != _next(state):
                break
            tokens.append(draft)
            state = advance(state, draft)
        return [*tokens, _next(state) + (1 if len(tokens) < len(drafts) else 0)]

    def _draft(self) -> None:
        names = [name for name in self.sampled if name in self.scheduler.requests]
        lists = []
        for name in names:
            state, drafts = self._states[name][-1], []
            for _ in range(self.config.speculative):
                drafts.append(_next(state))
                state = advance(state, drafts[-1])
            lists.append(drafts)
        if names:
            self.scheduler.update_draft_token_ids(draft_token_ids(names, lists))
