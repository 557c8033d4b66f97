"""Driving a real vLLM scheduler: actions in, observations out.

The scheduler's own ``schedule`` and ``update_from_output`` decide everything. Four things reach it from outside, as
they do in an engine: requests arrive, clients abort, operators reset, and (forced) a request is preempted or blocks
evicted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvproof.impl.vllm.cacheview import CacheView, RequestLog
from kvproof.impl.vllm.configuration import draft_token_ids, make_request, make_scheduler, model_output
from kvproof.impl.vllm.connector import Store, make_connector_class
from kvproof.impl.vllm.device import CheckpointRule, Device, Sampled
from kvproof.impl.vllm.drift import load
from kvproof.impl.vllm.frames import innermost
from kvproof.impl.vllm.requests import key_lookahead
from kvproof.impl.vllm.watch import Watch
from kvproof.spec.config import Config
from kvproof.spec.events import Crash, Drained, Event, Observation, Stall, StepEnd
from kvproof.spec.rules.blocks import peak_blocks
from kvproof.spec.scenario import Action
from kvproof.spec.subject import Observer
from kvproof.spec.tracer import State, advance, encode_key

EOS = 7
STALL_AFTER = 3
"""Steps in a row in which nothing runs before a stall is called. Loads in flight are waited for."""

DRAIN_STEPS = 400


def next_token(state: State) -> int:
    """What the model says after a prefix: a function of the prefix alone, so equal prompts give equal output."""
    return 1_000_000_000 + (state >> 22) % 65_521


class Driver:
    """One real scheduler and its device oracle. Implements :class:`kvproof.spec.subject.Driven`."""

    def __init__(self, config: Config, observer: Observer | None, checkpoint_rule: CheckpointRule | None) -> None:
        self.config = config
        self.observer = observer
        self.store = Store(config)
        connector = make_connector_class(self.store) if config.connector != "none" else None
        self.scheduler = make_scheduler(config, connector)
        self.device = Device(config, checkpoint_rule)
        self._view = CacheView(config, self.scheduler, self.device)
        self.lookahead = key_lookahead(self.scheduler)
        self.watch = Watch(config, self.scheduler, self._view, self.store, self._emit)
        self.steps = 0
        self.dead = False
        self._raised: BaseException | None = None
        self._finishing: set[str] = set()
        self._idle_steps = 0
        self._requests: dict[str, Any] = {}

    @property
    def view(self) -> CacheView:
        return self._view

    # -- observations -------------------------------------------------------------------------------------------------

    def _emit(self, event: Event) -> None:
        if self.observer is None or self._raised is not None:
            return
        self._view.refresh()
        try:
            self.observer(Observation(event, self._view))
        except BaseException as stop:
            self._raised = stop
            raise

    # -- requests -----------------------------------------------------------------------------------------------------

    def _log(self, request: Any) -> RequestLog:
        """The request's prefixes, extended to the tokens it has now."""
        log = self._view.sequences[request.request_id]
        tokens, states = request.all_token_ids, log.states
        known = self._view.known
        for position in range(len(log.tokens), request.num_tokens):
            token = tokens[position]
            state = advance(states[-1], token)
            log.tokens.append(token)
            states.append(state)
            known.setdefault(state, states)
        return log

    def _hash(self, request: Any) -> list[bytes]:
        states, unit, ahead = self._log(request).states, self.config.hash_unit, self.lookahead
        keys = []
        end = (len(request.block_hashes) + 1) * unit
        while end + ahead < len(states):
            keys.append(encode_key(states[end], states[end + ahead] if ahead else State(0)))
            end += unit
        return keys

    def _submit(self, action: Action) -> bool:
        if action.request in self._view.sequences:
            return False
        base = self._view.sequences.get(action.base)
        shared = base.tokens[: min(action.shared, action.length)] if base is not None else []
        first = (len(self._view.sequences) + 1) * 100_000
        tokens = [*shared, *range(first, first + action.length - len(shared))]
        longest = self.config.max_model_len - 1
        tokens = tokens[:longest]
        if not tokens:
            return False
        log = self._view.sequences[action.request] = RequestLog(action.request, len(tokens))
        self.store.depth[action.request] = action.external
        self.store.states[action.request] = log.states
        outputs = max(1, min(action.max_tokens, self.config.max_model_len - len(tokens)))
        request = make_request(action.request, tokens, outputs, self._hash, EOS)
        self._requests[action.request] = request
        self.scheduler.add_request(request)
        return True

    def live(self) -> tuple[str, ...]:
        return tuple(self.scheduler.requests) if not self.dead else ()

    # -- actions ------------------------------------------------------------------------------------------------------

    def apply(self, action: Action) -> bool:
        if self.dead:
            return False
        try:
            return self._apply(action)
        except Exception as error:
            if self._raised is not None:
                self.dead = True
                raise self._raised from None
            self._crash(error)
            return True

    def _apply(self, action: Action) -> bool:
        request = self.scheduler.requests.get(action.request) if action.request else None
        match action.kind:
            case "submit":
                return self._submit(action)
            case "step":
                for _ in range(action.times):
                    if not self.scheduler.has_requests():
                        break
                    self._step(action.accept)
                return True
            case "finish":
                if request is None:
                    return False
                self._finishing.add(action.request)
                return True
            case "abort":
                if request is None:
                    return False
                aborted = load("vllm.v1.request").RequestStatus.FINISHED_ABORTED
                self.scheduler.finish_requests(action.request, aborted)
                return True
            case "reset":
                return bool(self.scheduler.reset_prefix_cache())
            case "preempt":
                if request is None or request not in self.scheduler.running:
                    return False
                self.scheduler.running.remove(request)
                self.scheduler.prev_step_scheduled_req_ids.discard(action.request)
                self.scheduler._preempt_request(request, time.monotonic())
                return True
            case "evict":
                pool = self._view.pool
                free = pool.get_num_free_blocks()
                taken = pool.get_new_blocks(min(action.times or free, free))
                pool.free_blocks(reversed(taken))
                return True

    def _step(self, accept: Sequence[int]) -> None:
        self.steps += 1
        self._view.schedule_starts()
        output = self.scheduler.schedule()
        malformed = _malformed(output)
        if malformed:
            self.dead = True
            self._emit(Crash("vllm.v1.core.sched.scheduler:schedule", f"MalformedOutput: {malformed}", ""))
            return
        owners = self._view.owners()
        order = list(output.num_scheduled_tokens)

        def sampler(name: str, end: int, drafts: list[int], samples: bool) -> Sampled:
            if not samples:
                return Sampled([], 0)
            if name in self._finishing:
                return Sampled([EOS], 0)
            state = self._view.sequences[name].states[end]
            wanted = accept[order.index(name) % len(accept)] if accept else len(drafts)
            tokens: list[int] = []
            for draft in drafts[:wanted]:
                if draft != next_token(state):
                    break
                tokens.append(draft)
                state = advance(state, draft)
            accepted = len(tokens)
            rejected = accepted < len(drafts)
            return Sampled([*tokens, next_token(state) + (1 if rejected else 0)], accepted)

        sampled, forwards = self.device.execute(
            output,
            lambda name: self._view.sequences[name].states,
            sampler,
            self.store.due_now(),
            lambda block, writer: self._view.sharers(block, writer, owners),
            self._view.broken_keys,
        )
        arrived = self.store.arrived()
        for load_ in arrived:
            self.device.load(load_)
        transfers = None
        if arrived:
            transfers = load("vllm.v1.outputs").KVConnectorOutput(finished_recving={a.request for a in arrived})
        tokens = {name: answer.tokens for name, answer in sampled.items() if answer.tokens}
        self._view.device_has_run()
        for forward in forwards:
            self._emit(forward)
        self.scheduler.update_from_output(output, model_output(output, tokens, transfers))
        self._draft(output, tokens)
        for name in order:
            self._log(self._requests[name])
        self._finishing &= set(self.scheduler.requests)
        self._view.step_has_run()
        self._emit(
            StepEnd(
                index=self.steps,
                scheduled=tuple(order),
                running=tuple(r.request_id for r in self.scheduler.running),
                waiting=tuple(self._waiting()),
            )
        )
        self._watch_progress(bool(order) or bool(arrived))

    def _draft(self, output: Any, tokens: dict[str, list[int]]) -> None:
        if not self.config.speculative or getattr(output, "skip_drafts", False):
            return
        names, lists = [], []
        for name in tokens:
            if name not in self.scheduler.requests:
                continue
            state = self._log(self._requests[name]).states[-1]
            drafts: list[int] = []
            for _ in range(self.config.speculative):
                drafts.append(next_token(state))
                state = advance(state, drafts[-1])
            names.append(name)
            lists.append(drafts)
        if names:
            self.scheduler.update_draft_token_ids(draft_token_ids(names, lists))

    # -- progress -----------------------------------------------------------------------------------------------------

    def _waiting(self) -> list[str]:
        queues = [getattr(self.scheduler, n, ()) for n in ("kv_holding_waiting", "skipped_waiting", "waiting")]
        return [request.request_id for queue in queues for request in queue]

    def _watch_progress(self, progress: bool) -> None:
        if progress or not self.scheduler.requests or self.store.flying:
            self._idle_steps = 0
            return
        self._idle_steps += 1
        if self._idle_steps != STALL_AFTER:
            return
        waiting, running = self._waiting(), self.scheduler.running
        name = running[0].request_id if running else waiting[0] if waiting else ""
        if not name:
            return
        request = self.scheduler.requests[name]
        total = min(request.num_prompt_tokens + request.max_tokens, self.config.max_model_len) + self.config.speculative
        others = {holder.owner for holder in self._view.holders() if not holder.owner.startswith(f"table {name}/")}
        self._emit(
            Stall(
                request=name,
                schedules=self._idle_steps,
                peak=peak_blocks(self.config, total),
                pool=self._view.num_blocks - 1,
                blocked=bool(others) and not running,
                why="running" if running else "waiting",
            )
        )

    def drain(self) -> None:
        """Finish what can finish, abort what can't, let the engine take its last step, and judge what is left."""
        if self.dead:
            return
        try:
            steps, before = 0, -1
            while self.scheduler.requests and steps < DRAIN_STEPS and self._idle_steps <= STALL_AFTER:
                self._step(())
                steps += 1
            for name in list(self.scheduler.requests):
                self._apply(Action("abort", name))
            while self.scheduler.has_requests() and before != self.steps and steps < DRAIN_STEPS + 8:
                self._step(())
                steps += 1
            self._view.step_has_run()
            self._emit(Drained())
        except Exception as error:
            if self._raised is not None:
                self.dead = True
                raise self._raised from None
            self._crash(error)

    def _crash(self, error: Exception) -> None:
        self.dead = True
        location, line = innermost(error.__traceback__)
        text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
        try:
            self._emit(Crash(location, text, line))
        except BaseException:
            assert self._raised is not None
            raise self._raised from None


def _malformed(output: Any) -> str:
    """Why no worker could run this step: the rows of a request are one token and its drafts, or tokens alone."""
    for name, tokens in output.num_scheduled_tokens.items():
        drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
        if tokens < 1:
            return f"fewer tokens than one ({tokens})"
        if tokens <= drafts:
            return f"more drafts than tokens ({drafts}, {tokens})"
    return ""
