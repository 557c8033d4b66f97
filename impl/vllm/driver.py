"""Driving a real vLLM scheduler: actions in, observations out.

The scheduler's own ``schedule`` and ``update_from_output`` decide everything. Four things reach it from outside, as
they do in an engine: requests arrive, clients abort, operators reset, and (forced) a request is preempted or blocks
evicted.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvproof.impl.vllm.cacheevents import CacheEvents
from kvproof.impl.vllm.cacheview import CacheView, RequestLog
from kvproof.impl.vllm.configuration import draft_token_ids, make_request, make_scheduler, model_output
from kvproof.impl.vllm.connector import Flight
from kvproof.impl.vllm.counted import counted
from kvproof.impl.vllm.device import CheckpointRule, Device
from kvproof.impl.vllm.drift import load
from kvproof.impl.vllm.frames import innermost
from kvproof.impl.vllm.images import features, give_encoder, placed
from kvproof.impl.vllm.loads import make_store, transfers
from kvproof.impl.vllm.offload import Offload, connector_class
from kvproof.impl.vllm.offloads_watch import HandOver
from kvproof.impl.vllm.progress import STALL_AFTER, Progress, waiting_queues, watch_preemptions
from kvproof.impl.vllm.requests import key_lookahead
from kvproof.impl.vllm.rows import Load, Malformed, Sampled
from kvproof.impl.vllm.startup import LoneRequest
from kvproof.impl.vllm.watch import Watch
from kvproof.spec.config import Config
from kvproof.spec.events import Allocate, Crash, Drained, Event, Forward, Loaded, Observation, StepEnd, Zeroing
from kvproof.spec.scenario import Action
from kvproof.spec.subject import Observer
from kvproof.spec.tracer import State, advance, encode_key, states_of

EOS = 7
DRAIN_STEPS = 400


def next_token(state: State) -> int:
    """What the model says after a prefix: a function of the prefix alone, so equal prompts give equal output."""
    return 1_000_000_000 + (state >> 22) % 65_521


def propose(states: Sequence[State], count: int) -> list[int]:
    """``count`` drafts after the last of ``states``, as a drafter that is always right would say them."""
    state, drafts = states[-1], []
    for _ in range(count):
        drafts.append(next_token(state))
        state = advance(state, drafts[-1])
    return drafts


@dataclass
class Batch:
    """A step that was scheduled and has not run: whose blocks were whose then, and the loads that go before it."""

    output: Any
    accept: tuple[int, ...]
    owners: dict[int, set[str]]
    synchronous: list[Load]
    flights: list[Flight] = field(default_factory=list)
    admissions: dict[str, int] = field(default_factory=dict)
    offered: list[tuple[str, int, int, int]] = field(default_factory=list)
    void: dict[str, bool] = field(default_factory=dict)
    """Where steps overlap: the asynchronous loads that go with it, how often its requests had been admitted, what it
    hands over to the connector, and which rows the scheduler has taken back since, for a load failed (see
    :func:`~kvproof.impl.vllm.rows.spoil`)."""


class Driver:
    """One real scheduler and its device oracle. Implements :class:`kvproof.spec.subject.Driven`."""

    def __init__(self, config: Config, observer: Observer | None, checkpoint_rule: CheckpointRule | None) -> None:
        self.config = config
        self.observer = observer
        self.store = make_store(config)
        connector = connector_class(config, self.store)
        self.scheduler = make_scheduler(config, connector)
        give_encoder(self.scheduler, config)
        self.device = Device(config, checkpoint_rule)
        self._view = CacheView(config, self.scheduler, self.device)
        self.lookahead = key_lookahead(self.scheduler)
        self.watch = Watch(config, self.scheduler, self._view, self.store, self._emit)
        self.offload: Offload | None = None
        if config.connector == "offload":
            self.offload = Offload(config, self.scheduler, self.device, self.store, self._view.states_of, self._emit)
        self.hand_over = HandOver(self.scheduler, self._view.sequences, self._emit) if connector is not None else None
        self.events = CacheEvents(self.scheduler, self._view) if config.cache_events else None
        self.lone = LoneRequest(config)
        self.steps = 0
        self.dead = False
        self._raised: BaseException | None = None
        self._finishing: set[str] = set()
        self.progress = Progress(config, self.scheduler, self._view)
        self._view.loads = self._arriving
        self._preempt = watch_preemptions(self.scheduler, self._view, self._emit)
        self._requests: dict[str, Any] = {}
        self._starts: dict[str, list[int]] = {}
        """Where images begin in each request's prompt."""

    @property
    def view(self) -> CacheView:
        return self._view

    # -- observations -------------------------------------------------------------------------------------------------

    def _emit(self, event: Event) -> None:
        if isinstance(event, Allocate) and not event.granted:
            self.progress.refused()
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
        while end + ahead <= request.num_tokens:
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
        self.store.holds(action.request, len(tokens), action.external, action.missing)
        self.store.states[action.request] = log.states
        outputs = max(1, min(action.max_tokens, self.config.max_model_len - len(tokens)))
        request = make_request(
            action.request,
            tokens,
            outputs,
            self._hash,
            EOS,
            action.priority,
            self._images(action, tokens, len(shared)),
            action.unread,
        )
        request.arrival_time = float(len(self._requests))
        self._requests[action.request] = request
        self.scheduler.add_request(request)
        return True

    def _images(self, action: Action, tokens: Sequence[int], shared: int) -> list[Any]:
        """The request's images: where its base had them in the tokens that they share, and where it has its own."""
        if not self.config.image_tokens:
            return []
        before = self._starts.get(action.base, ())
        starts = placed(self.config, action.images, before, shared, len(tokens))
        self._starts[action.request] = starts
        return features(self.config, starts, states_of(tokens))

    def live(self) -> tuple[str, ...]:
        """Whoever waits or runs: who has ended stays known while its blocks are sent away."""
        requests = self.scheduler.requests.items()
        return tuple(name for name, request in requests if not request.is_finished()) if not self.dead else ()

    # -- actions ------------------------------------------------------------------------------------------------------

    def apply(self, action: Action) -> bool:
        if self.dead:
            return False
        try:
            return self._apply(action)
        except Exception as error:
            self._ended(error)
            return True

    def _apply(self, action: Action) -> bool:
        request = self.scheduler.requests.get(action.request) if action.request else None
        match action.kind:
            case "submit":
                return self._submit(action)
            case "step":
                for _ in range(action.times):
                    if self.dead or self._at_rest:
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
                return self._reset(action)
            case "preempt":
                if request is None or request not in self.scheduler.running:
                    return False
                self.scheduler.running.remove(request)
                self.scheduler.prev_step_scheduled_req_ids.discard(action.request)
                self.lone.interfered()
                self._preempt(request, time.monotonic())
                self.progress.interfered()
                return True
            case "evict":
                pool = self._view.pool
                free = pool.get_num_free_blocks()
                taken = pool.get_new_blocks(min(action.times or free, free))
                pool.free_blocks(reversed(taken))
                return True

    def _reset(self, action: Action) -> bool:
        """Clear the cache. Whoever runs can be made to start over, but nobody else who holds blocks."""
        running = {request.request_id for request in self.scheduler.running}
        if action.running:
            # A step that is in flight keeps what it writes from being cleared where there is a connector.
            flying = self.config.connector != "none" and bool(self._launched())
            if flying or any(holder.request not in running for holder in self._view.holders()):
                return False
        if action.running and running:
            self.lone.interfered()
            self.progress.interfered()
        watched, self.scheduler._preempt_request = self.scheduler._preempt_request, self._preempt
        try:
            return bool(self.scheduler.reset_prefix_cache(action.running, action.store))
        except Exception as error:
            if self._raised is not None:
                raise
            # EngineCoreProc._invoke_utility_method answers whoever called with what was raised, and the engine goes on.
            self._emit(_crash(error, call="reset"))
            return True
        finally:
            self.scheduler._preempt_request = watched

    def _step(self, accept: Sequence[int]) -> None:
        self.steps += 1
        self._complete(self._launch(accept))

    @property
    def _at_rest(self) -> bool:
        """Whether a step would have nothing to do."""
        return not self.scheduler.has_requests() and not self.store.sending

    def _launch(self, accept: Sequence[int]) -> Batch:
        """Schedule one step. Raises :class:`Malformed`."""
        self._view.schedule_starts()
        output = self.scheduler.schedule()
        _require_rows(output)
        return Batch(output, tuple(accept), self._view.owners(), self.store.due_now())

    def _complete(self, batch: Batch) -> None:
        """Run a scheduled step on the device, and tell the scheduler."""
        output, accept, owners, synchronous = batch.output, batch.accept, batch.owners, batch.synchronous
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

        if output.new_block_ids_to_zero:
            self._emit(Zeroing(tuple(output.new_block_ids_to_zero)))
            self._view.unwiped.difference_update(output.new_block_ids_to_zero)
        if self.offload is not None:
            self.offload.begins(output)
        sampled, forwards = self.device.execute(
            output,
            lambda name: self._view.sequences[name].states,
            sampler,
            synchronous,
            lambda block, writer: self._view.sharers(block, writer, owners),
            self._spoils,
            before_forward=None if self.offload is None else self.offload.runner(output),
            void=batch.void,
        )
        arrived = self.store.arrived()
        self._land(arrived)
        told = transfers(self.store.report(synchronous, arrived))
        if self.offload is not None:
            told = self.offload.after(output)
        tokens = {name: answer.tokens for name, answer in sampled.items() if answer.tokens}
        self._sampled(batch, tokens)
        self._owe(synchronous, forwards)
        self._view.device_has_run()
        for forward in forwards:
            self._emit(forward)
        outputs = self.scheduler.update_from_output(output, model_output(output, tokens, told))
        self._judge_loads((*synchronous, *arrived), forwards)
        self._draft(output, tokens)
        for name in order:
            self._log(self._requests[name])
        self._finishing &= set(self.scheduler.requests)
        self._view.settle()
        self._view.step_has_run()
        for counts in counted(outputs, self._requests, self.watch.found):
            self._emit(counts)
        for announced in self.events.step_over() if self.events is not None else ():
            self._emit(announced)
        self._emit(
            StepEnd(
                index=self.steps,
                scheduled=tuple(order),
                running=tuple(r.request_id for r in self.scheduler.running),
                waiting=tuple(self._waiting()),
            )
        )
        if self.hand_over is not None:
            self.hand_over.step_over(self.device.spoiled)
        loading = bool(self.store.flying or self.store.sending) or (self.offload is not None and self.offload.busy)
        put_off, self.store.put_off = self.store.put_off, False
        rows, launched = output.num_scheduled_tokens, self._launched()
        for found in self.progress.after(rows, loading, bool(arrived), launched, put_off):
            self._emit(found)
        self._watch_alone()

    def _launched(self) -> Collection[str]:
        """The requests in steps that are scheduled and not over."""
        return ()

    def _spoils(self, block: int) -> Sequence[State]:
        """The keys of ``block`` that what was just written to it breaks."""
        return self._view.broken_keys(block)

    def _land(self, arrived: Sequence[Load]) -> None:
        """Asynchronous loads are over: what they bring is there."""
        for load_ in arrived:
            self.device.load(load_)

    def _sampled(self, batch: Batch, tokens: dict[str, list[int]]) -> None:
        """The device has run a step, and sampled these tokens."""

    def _arriving(self) -> dict[str, list[int]]:
        """The blocks that loads in flight write to, by request."""
        return self.store.targets() if self.offload is None else self.offload.arriving()

    def _owe(self, loads: Sequence[Load], forwards: Sequence[Forward]) -> None:
        """A synchronous load failed, and what was computed on top of it is void: its blocks are due once more."""
        for load_ in loads:
            if load_.lost:
                self._view.owed[load_.request] = set(load_.targets(self.config, load_.received))
        for forward in forwards:
            if forward.request in self.device.spoiled:
                self._view.owed.setdefault(forward.request, set()).update(write.block for write in forward.writes)

    def _judge_loads(self, loads: Sequence[Load], forwards: Sequence[Forward]) -> None:
        """Loads are over, and the scheduler has heard of it. What ran on top of one counts apart."""
        starts = {forward.request: forward.start for forward in forwards}
        for load_ in loads:
            request = self.scheduler.requests.get(load_.request)
            if request is None or request.is_finished():
                continue
            computed = int(request.num_computed_tokens)
            counted_now = min(computed, starts.get(load_.request, computed))
            # A synchronous load has its blocks wiped as any step has; what another engine prefilled comes in blocks.
            inside = self.config.offers == "unit" and load_.request not in starts
            partly = load_.partly(self.config) if inside else []
            wiped = getattr(self.scheduler, "needs_kv_cache_zeroing", False)
            unwiped = [block for block in partly if wiped and block in self._view.unwiped]
            self._emit(
                Loaded(
                    request=load_.request,
                    start=load_.start,
                    claimed=load_.end,
                    received=load_.received,
                    counted=counted_now,
                    partly=tuple(partly) if wiped else (),
                    unwiped=tuple(unwiped),
                )
            )

    def _draft(self, output: Any, tokens: dict[str, list[int]]) -> None:
        if not self.config.speculative or getattr(output, "skip_drafts", False):
            return
        names, lists = [], []
        for name in tokens:
            if name not in self.scheduler.requests:
                continue
            names.append(name)
            lists.append(propose(self._log(self._requests[name]).states, self.config.speculative))
        if names:
            self.scheduler.update_draft_token_ids(draft_token_ids(names, lists))

    # -- progress -----------------------------------------------------------------------------------------------------

    def _waiting(self) -> list[str]:
        return [request.request_id for queue in waiting_queues(self.scheduler) for request in queue]

    def _watch_alone(self) -> None:
        said = self.lone.after(self.scheduler.requests, self.progress.idle >= STALL_AFTER)
        if said is None:
            return
        if not said.finished and self._others(said.request):
            self.lone.interfered()
            return
        self._emit(replace(said, partial=self.watch.partial_hit(said.request)))

    def _others(self, name: str) -> bool:
        """Whether anybody but this request holds blocks."""
        return any(not holder.owner.startswith(f"table {name}/") for holder in self._view.holders())

    def _hopeless(self) -> bool:
        return self.progress.stuck or self.lone.stuck

    def drain(self) -> None:
        """Finish what can finish, abort what can't, let the engine take its last step, and judge what is left."""
        if self.dead:
            return
        try:
            steps, before = 0, -1
            while self.scheduler.requests and steps < DRAIN_STEPS and not self._hopeless():
                self._step(())
                steps += 1
            for name in list(self.scheduler.requests):
                self._apply(Action("abort", name))
            while not self._at_rest and before != self.steps and steps < DRAIN_STEPS + 8:
                self._step(())
                steps += 1
            self._view.step_has_run()
            for announced in self.events.in_the_end() if self.events is not None else ():
                self._emit(announced)
            self._emit(Drained())
        except Exception as error:
            self._ended(error)

    def _ended(self, error: Exception) -> None:
        """Nothing more can come of this engine: whoever watches stopped it, it raised, or its step can't be run."""
        self.dead = True
        if self._raised is not None:
            raise self._raised from None
        try:
            self._emit(_crash(error))
        except BaseException:
            assert self._raised is not None
            raise self._raised from None


def _crash(error: Exception, call: str = "") -> Crash:
    """What there is to say of ``error``. ``call``: it was raised in an operator's call."""
    if isinstance(error, Malformed):
        return Crash("vllm.v1.core.sched.scheduler:schedule", f"MalformedOutput: {error}", "")
    location, line = innermost(error.__traceback__)
    return Crash(location, " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": "), line, call)


def _require_rows(output: Any) -> None:
    """Raise :class:`Malformed` where no worker could run this step: the rows of a request are one token and its drafts,
    or tokens alone."""
    for name, tokens in output.num_scheduled_tokens.items():
        drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
        if tokens < 1:
            raise Malformed(f"fewer tokens than one ({tokens})")
        if tokens <= drafts:
            raise Malformed(f"more drafts than tokens ({drafts}, {tokens})")
