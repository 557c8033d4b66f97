"""One live vLLM core under watch: its hooks, its shadow on the device, and when what is judged.

A manager alone (as unit tests drive it) is judged after each of its calls. A scheduler is judged at the end of each
step, when the content of what the step keyed is due: the device's part of the step is run on tracers from the
scheduler's output and the sampled tokens alone, as a worker would, before the scheduler learns of them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from kvproof.impl.vllm.device import CheckpointRule, Device
from kvproof.impl.vllm.frames import innermost
from kvproof.impl.vllm.live.blockhistory import BlockHistory
from kvproof.impl.vllm.live.calls import LiveCalls
from kvproof.impl.vllm.live.derive import Engine
from kvproof.impl.vllm.live.judge import Judge, OnViolation
from kvproof.impl.vllm.live.lookups import Lookups
from kvproof.impl.vllm.live.naming import Names
from kvproof.impl.vllm.live.overlay import given, wrap
from kvproof.impl.vllm.live.poolhooks import DUE, PoolHooks
from kvproof.impl.vllm.live.story import Story
from kvproof.impl.vllm.live.view import LiveView
from kvproof.impl.vllm.rows import Sampled
from kvproof.invariants.monitor import InvariantBroken
from kvproof.spec.events import Crash, Drained, StepEnd
from kvproof.spec.finding import Violation
from kvproof.spec.tracer import State
from kvproof.spec.view import NULL

_UNKNOWN_DRAFT = 1 << 40
"""Stands for a draft whose token the scheduler never learns, since it was rejected on the device."""


class Watched:
    """Hooks on one ``KVCacheManager``, and on the scheduler around it once :meth:`adopt` knows it.

    ``lean``: what a step did not touch is not looked at. Otherwise everything is, in every step.
    """

    def __init__(
        self,
        manager: Any,
        engine: Engine,
        report: Callable[[Watched, Violation], None],
        lean: bool,
        evaluations: Counter[str],
        lookups: Lookups | None = None,
    ) -> None:
        self.manager, self.engine, self.lean, self.evaluations = manager, engine, lean, evaluations
        self.scheduler: Any = None
        self.lookups = lookups
        self.history: BlockHistory
        self.names: Names
        self.history, self.names = self._memory()
        self.hooks = PoolHooks(manager.block_pool, self.names, self.history)
        self.device: Device | None = None
        self.story: Story | None = None
        self.undo: list[Callable[[], None]] = []
        self._report: OnViolation = lambda violation: report(self, violation)
        self._changed: set[str] = set()
        if lookups is not None:
            self.hooks.on_key, self.hooks.on_reset = lookups.key, lookups.history.cleared
        self._build()
        for name in ("free", "pop_blocks_for_free", "cache_blocks", "remove_skipped_blocks", "evict_blocks"):
            wrap(manager, name, self._manager_call, self.undo)
        wrap(manager, "reset_prefix_cache", self._reset, self.undo)
        wrap(manager, "take_kv_cache_block_copies", self._copies_taken, self.undo)

    def _memory(self) -> tuple[Any, Any]:
        """What remembers a block's past, and what names prefixes."""
        return BlockHistory(), Names(self.engine.config.hash_unit)

    def _shadow(self, rule: CheckpointRule | None) -> None:
        """What follows the device, and what tells the story of the engine."""
        if self.engine.contents:
            self.device = Device(self.engine.config, rule)
        self.story = Story(self.engine.config)

    def _build(self) -> None:
        config = self.engine.config
        self.view = LiveView(config, self.manager, self.scheduler, self.names, self.hooks, self.device)
        self.view.whole = not self.lean
        self.judge = Judge(self.view, self.engine.lacking, self._report, self.evaluations)
        self.hooks.guard = self.judge.guard
        self.calls = LiveCalls(
            config, self.manager, self.scheduler, self.view, self.judge, self.hooks, self._request_changed, self.lean
        )

        if self.lookups is not None:
            self.calls.looked_up = self.lookups.looked_up

    def detach(self) -> None:
        """Take every hook off again."""
        for undo in (*self.calls.undo, *self.hooks.undo, *self.undo):
            undo()

    def _request_changed(self, name: str) -> None:
        self._changed.add(name)
        if self.scheduler is None:
            self._judge_call()

    # -- a manager alone ----------------------------------------------------------------------------------------------

    def _manager_call(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        request = args[0] if args else next(iter(kwargs.values()), None)
        name = getattr(request, "request_id", request if isinstance(request, str) else None)
        hooks, before = self.hooks, self.hooks.changes
        hooks.who = name or ""
        with hooks.at_work():
            answer = original(*args, **kwargs)
        if hooks.changes != before and isinstance(name, str) and not self.judge.spoiled:
            self._changed.add(name)
            if self.scheduler is None:
                self.judge.guard(self._judge_call)
        return answer

    def _reset(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with self.hooks.at_work():
            return original(*args, **kwargs)

    def _copies_taken(self, original: Any) -> Any:
        """Whoever takes the pending copies holds their blocks from then on, to free them once they are done."""
        answer = original()
        if not self.hooks.inside:
            for block in answer[1]:
                self.hooks.outside[block.block_id] = self.hooks.outside.get(block.block_id, 0) + 1
        return answer

    def _judge_call(self) -> None:
        if self.hooks.inside == 0 or self.scheduler is None:
            self._settle()
            self.judge.observe(StepEnd(self.history.step, (), (), ()))

    def _settle(self) -> None:
        self.view.holdings.follow(self._changed)
        self._changed.clear()
        self.view.collect()
        self.view.refresh()

    # -- a scheduler --------------------------------------------------------------------------------------------------

    def adopt(self, scheduler: Any, engine: Engine, rule: CheckpointRule | None) -> None:
        """The manager turns out to be this scheduler's: from now on whole steps are judged."""
        for undo in self.calls.undo:
            undo()
        self.scheduler, self.engine = scheduler, engine
        self._shadow(rule)
        self._build()
        self._outputs: deque[tuple[int, Any, set[str]]] = deque()
        self._prefilling: set[str] = set()
        self._steps = 0
        self._audited = 0
        wrap(scheduler, "schedule", self._schedule, self.undo)
        wrap(scheduler, "update_from_output", self._update, self.undo)
        wrap(scheduler, "add_request", self._add_request, self.undo)
        wrap(scheduler, "finish_requests", self._finish_requests, self.undo)
        wrap(scheduler, "reset_prefix_cache", self._reset_cache, self.undo)
        if getattr(scheduler, "connector", None) is not None:
            wrap(scheduler.connector, "get_num_new_matched_tokens", self._offer, self.undo)

    def _add_request(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.judge.guard(self._submitted, given(args, kwargs, 0, "request"))
        return original(*args, **kwargs)

    def _offer(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        request, computed = given(args, kwargs, 0, "request"), given(args, kwargs, 1, "num_computed_tokens")
        self.judge.guard(self._offered, request, computed, answer)
        return answer

    def _offered(self, request: Any, computed: int, answer: Any) -> None:
        self.calls.store.offered[request.request_id] = int(answer[0] or 0)
        if answer[0] and self.story is not None:
            divergent = bool(getattr(self.scheduler.connector, "supports_divergent_local_hybrid_hits", False))
            self.story.offered(request.request_id, computed + int(answer[0]), bool(answer[1]), divergent)

    def _submitted(self, request: Any) -> None:
        if request.request_id in self.scheduler.requests:
            if self.story is not None:
                self.story.whole = False  # a session goes on with more input: no action says that
            return
        log = self.names.learn(request)
        if self.story is not None:
            self.story.submitted(request, log)

    def _finish_requests(self, original: Any, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        inside = self.hooks.inside
        every = self.scheduler.requests if request_ids is None else request_ids
        names = [request_ids] if isinstance(request_ids, str) else list(every)
        with self.hooks.at_work():
            answer = original(request_ids if request_ids is None or isinstance(request_ids, str) else names,
                              *args, **kwargs)  # fmt: skip
        self.judge.guard(self._finished, names, inside == 0)
        return answer

    def _finished(self, names: list[str], aborted: bool) -> None:
        self._changed.update(names)
        if aborted and self.story is not None:
            for name in names:
                self.story.aborted(name)

    def _reset_cache(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        answer = self._reset(original, *args, **kwargs)
        if self.story is not None:
            self.judge.guard(self.story.reset)
        return answer

    def _schedule(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        hooks = self.hooks
        self._steps += 1
        self.history.step = hooks.scheduling = hooks.stamp = self._steps
        if self.lookups is not None:
            self.judge.guard(self.lookups.history.step_starts)
        try:
            output = self._own_call(original, *args, **kwargs)
        finally:
            hooks.scheduling = DUE
        self.judge.guard(self._scheduled, output)
        hooks.stamp = self._steps + 1
        return output

    def _own_call(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """The scheduler's half of a step. What it raises is told, unless it is ours."""
        try:
            with self.hooks.at_work():
                return original(*args, **kwargs)
        except InvariantBroken:
            raise
        except Exception as error:
            self.judge.guard(self._crashed, error)
            raise

    def _scheduled(self, output: Any) -> None:
        """Which rows have to be looked at: those that got blocks, replay known tokens, or carry drafts."""
        tokens = output.num_scheduled_tokens
        if not self.lean or self.engine.config.speculative:
            visited = set(tokens)
        else:
            visited = {name for name in self._changed | self._prefilling if name in tokens}
            if max(tokens.values(), default=0) > 1:
                visited |= {name for name, n in tokens.items() if n > 1}
            visited.update(new.req_id for new in output.scheduled_new_reqs)
            cached = output.scheduled_cached_reqs
            if any(cached.new_block_ids):
                visited.update(name for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True) if ids)
            visited |= {name for name in cached.resumed_req_ids if name in tokens}
        self.view.holdings.follow(self._changed | visited)
        self._outputs.append((self._steps, output, visited))
        if visited:
            self.calls.scheduled(output, visited)

    def _update(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        judge = self.judge
        output, answer = given(args, kwargs, 0, "scheduler_output"), given(args, kwargs, 1, "model_runner_output")
        judge.guard(self._ran, output, answer)
        alive = dict(self.scheduler.requests) if self.story is not None else {}
        result = self._own_call(original, *args, **kwargs)
        judge.guard(self._step_over, output, answer, alive)
        return result

    # -- the shadow of the device -------------------------------------------------------------------------------------

    def _ran(self, output: Any, answer: Any) -> None:
        """The worker has run ``output`` and sampled ``answer``: so does the shadow."""
        while self._outputs and self._outputs[0][1] is not output:
            self._outputs.popleft()  # nobody will answer for it any more
        step, _, visited = self._outputs.popleft() if self._outputs else (self._steps, output, set(
            output.num_scheduled_tokens))  # fmt: skip
        if self.device is None:
            self.hooks.settled(step)
            return
        sampled = answer.sampled_token_ids
        index = answer.req_id_to_index

        def sampler(name: str, end: int, drafts: list[int], samples: bool) -> Sampled:
            tokens = list(sampled[index[name]]) if sampled and name in index else []
            return Sampled(tokens, max(0, len(tokens) - 1) if drafts else 0)

        _, forwards = self.device.execute(
            _Known(output, sampled, index) if self.engine.config.speculative else output,
            self._states,
            sampler,
            (),
            lambda block, writer: self.view.sharers(block, writer, step),
            self.view.broken_keys,
            visited if self.lean else None,
        )
        self._note(output, forwards)
        self.hooks.settled(step)
        for name in visited:
            worker = self.device.workers[name]
            (self._prefilling.add if worker.done < worker.prefill else self._prefilling.discard)(name)
        for forward in forwards:
            self.judge.observe(forward)

    def _states(self, name: str) -> Sequence[State]:
        log = self.names.logs[name]
        log.follow()
        return log.states

    def _note(self, output: Any, forwards: Sequence[Any]) -> None:
        assert self.device is not None
        for copy in output.kv_cache_block_copies or ():
            content = self.device.mamba.get(copy.dst_block_id)
            self.history.note(copy.dst_block_id, "copied", f"from block {copy.src_block_id}",
                              content.temporal if content is not None else None)  # fmt: skip
        for forward in forwards:
            who = f"{forward.request}'s forward over [{forward.start}, {forward.start + forward.tokens})"
            for write in forward.writes:
                if write.block > NULL:
                    self.history.note(write.block, "written", who, write.state)

    # -- the end of a step --------------------------------------------------------------------------------------------

    def _step_over(self, output: Any, answer: Any, alive: dict[str, Any]) -> None:
        requests = self.scheduler.requests
        gone = alive.keys() - requests.keys() if len(alive) != len(requests) else set()
        if self.story is not None:
            for name in gone:
                request = alive[name]
                self.story.ended(name, request.status.name == "FINISHED_STOPPED")
            self.story.stepped(self._accepted(output, answer))
        self._changed |= gone
        self._catch_up()
        self._settle()
        self.judge.observe(StepEnd(self.history.step, tuple(output.num_scheduled_tokens), (), ()))
        for name in output.finished_req_ids:
            self.names.forget(name)
            self.calls.forget(name)
            self._prefilling.discard(name)
        self.names.tidy(self.manager.block_pool.cached_block_hash_to_block._cache)
        if not requests and self.view.idle() and not self._outputs and self._audited != self.hooks.changes:
            self._audited = self.hooks.changes
            self.audit()

    def _accepted(self, output: Any, answer: Any) -> tuple[int, ...]:
        drafts = output.scheduled_spec_decode_tokens
        if not drafts:
            return ()
        index, sampled = answer.req_id_to_index, answer.sampled_token_ids
        return tuple(max(0, len(sampled[index[name]]) - 1) if name in drafts and name in index else 0
                     for name in output.num_scheduled_tokens)  # fmt: skip

    def _catch_up(self) -> None:
        """Requests that changed in the meantime are brought up to date where their rows were left out."""
        if self.device is None or not self.lean:
            return
        for name in self._changed:
            request, worker = self.scheduler.requests.get(name), self.device.workers.get(name)
            if request is None or worker is None or worker.fresh or request.status.name != "RUNNING":
                continue
            ahead = sum(entry[1].num_scheduled_tokens.get(name, 0) for entry in self._outputs)
            self.device.catch_up(name, int(request.num_computed_tokens) - ahead, self._states(name))

    def audit(self) -> None:
        """Judge the whole state now. Everything must have ended."""
        self.view.whole = True
        try:
            self.view.holdings.follow_all()
            self.view.refresh()
            self.judge.observe(Drained())
        finally:
            self.view.whole = not self.lean

    def _crashed(self, error: Exception) -> None:
        location, line = innermost(error.__traceback__)
        text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
        self.judge.observe(Crash(location, text, line))


class _Known:
    """A scheduler's output with the drafts that the scheduler did not know when it was made: accepted ones are the
    tokens sampled, others were rejected and stand for nothing."""

    def __init__(self, output: Any, sampled: Any, index: Any) -> None:
        self._output = output
        self.scheduled_spec_decode_tokens = {
            name: self._drafts(drafts, sampled[index[name]] if sampled and name in index else ())
            for name, drafts in output.scheduled_spec_decode_tokens.items()
        }

    @staticmethod
    def _drafts(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
        if all(token >= 0 for token in drafts):
            return list(drafts)
        known = list(sampled[:-1])[: len(drafts)]
        return [*known, *(_UNKNOWN_DRAFT + i for i in range(len(drafts) - len(known)))]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)
