"""Recording a live engine instead of judging it: everything that the rules need to know, as lines of a trace file.

The hooks are those of the assertions; what they tell is written and not looked at. One line is one event, a list whose
first entry says which (``kvproof/trace/reader.py`` has them all). Requests are numbers in the file; only the line that
introduces one has its id. No token of a prompt or of an answer is written, nor anything that it could be told from:
see :mod:`kvproof.impl.vllm.live.sequences` for what stands in its place. Prompts given as embeddings are as good as
never seen: what is cached of them has no name.

A step's lines are written together at its end.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections import Counter, deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvproof.impl.vllm.device import CheckpointRule
from kvproof.impl.vllm.drift import release
from kvproof.impl.vllm.frames import innermost
from kvproof.impl.vllm.live.blockhistory import BlockHistory
from kvproof.impl.vllm.live.calls import LiveCalls
from kvproof.impl.vllm.live.derive import Engine
from kvproof.impl.vllm.live.engine import Watched
from kvproof.impl.vllm.live.judge import Guard
from kvproof.impl.vllm.live.lookups import Lookups
from kvproof.impl.vllm.live.sequences import KEPT_TOKENS, Sequences
from kvproof.impl.vllm.live.tracefile import FILES, TraceFile
from kvproof.impl.vllm.live.view import LiveView
from kvproof.impl.vllm.live.why import Miss
from kvproof.spec.events import Allocate, Estimate, Event, GroupEstimate, Lookup, Resume, Split, Truncate
from kvproof.spec.tracer import State

MEGABYTES: Final = 256
"""The bound of all files of one engine's trace together, unless another is given."""

_ESTIMATE: Final = attrgetter(*GroupEstimate.__annotations__)
_BYTES_A_TOKEN: Final = 16
_ALLOCATIONS: Final = {"taken": "take", "held": "hold", "freed": "free"}


class RecordTo(NamedTuple):
    """Where traces go, and how large each may become in all its files together (10⁶ bytes)."""

    folder: Path
    megabytes: float = MEGABYTES


class _Blocks(BlockHistory):
    """Hears what the pool's hooks tell of a block, and writes it."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self._step = 0
        self.blocks = recorded.manager.block_pool.blocks

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self._recorded.tell("begin", step)

    def note(self, block: int, what: str, who: str = "", state: Any = None) -> None:
        recorded = self._recorded
        request = recorded.sequences.number(who)
        if what == "keyed":
            sequence, tokens, group, raw = state
            held = self.blocks[block]
            noted = held.block_hash_num_tokens if held.block_hash == raw else None
            recorded.tell("key", block, request, sequence, tokens, group, noted, recorded.hooks.scheduling)
        elif what == "unkeyed":
            recorded.tell("unkey", block, request)
        else:
            count, queued = self.blocks[block].ref_cnt, self.blocks[block].next_free_block is not None
            line = (_ALLOCATIONS[what], block, request, count)
            recorded.tell(*line, *(() if queued == (count == 0) else (queued,)))


class _Calls(Guard):
    """Stands where the judge would: what happened is written, and what goes wrong in here ends the recording."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self._recorded = recorded

    def failed(self, error: Exception) -> None:
        self.spoiled = f"{type(error).__name__}: {error}"
        self._recorded.stop(f"an error in kvproof: {self.spoiled}")
        if self.on_error is not None:
            self.on_error(self.spoiled)

    def observe(self, event: Event) -> None:
        tell, number = self._recorded.tell, self._recorded.sequences.number
        match event:
            case Estimate():
                groups = [_ESTIMATE(group) for group in event.groups]
                tell("ask", number(event.request), event.dry, event.tokens, event.computed, event.free, event.main,
                     event.changed, groups)  # fmt: skip
            case Allocate():
                tell("allocate", number(event.request), event.granted, event.taken, event.free_before,
                     len(event.estimates), event.new_blocks, event.evictable_hits, event.reserved)  # fmt: skip
            case Split():
                tell("split", number(event.request), event.start, event.offered, event.granted, event.prefill_end,
                     event.limit, event.stops)  # fmt: skip
            case Lookup():
                tell("lookup", number(event.request), event.tokens, event.limit, event.blocks, event.joint,
                     event.diverged)  # fmt: skip
            case Resume():
                tell("resume", number(event.request), event.local, event.external, event.blocks, event.hit,
                     event.offered, event.diverged, event.asynchronous)  # fmt: skip
            case Truncate():
                tell("truncate", number(event.request), event.endpoint, event.before, event.after, event.error,
                     event.references_changed, event.input_changed)  # fmt: skip


class _View(LiveView):
    """Answers only what is written down."""

    def states_of(self, request: Any) -> Sequence[State]:
        return ()


class _Told:
    """What clients and the operator did: stands where a scenario would be told."""

    whole = True

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def submitted(self, request: Any, sequence: Any) -> None:
        self._recorded.tell("submit", sequence.number, int(request.num_prompt_tokens), int(request.max_tokens or 1))

    def offered(self, request: str, depth: int, asynchronous: bool, divergent: bool) -> None:
        self._recorded.tell("offer", self._recorded.sequences.number(request), depth, asynchronous, divergent)

    def aborted(self, request: str) -> None:
        self._recorded.tell("abort", self._recorded.sequences.number(request))

    def reset(self) -> None:
        self._recorded.tell("reset")


class Recorded(Watched):
    """A core whose steps are written to ``to.folder`` once a scheduler adopts it. ``failed`` hears why it ended."""

    def __init__(self, manager: Any, engine: Engine, to: RecordTo, failed: Callable[[str], None]) -> None:
        self.to, self._failed = to, failed
        self.file: TraceFile | None = None
        self.lines: list[tuple[Any, ...]] = []
        self.manager = manager
        # What is remembered is in each snapshot: at most a quarter of a file.
        kept = int(to.megabytes * 1e6 / FILES / 4 / _BYTES_A_TOKEN)
        self.sequences = Sequences(engine.config.hash_unit, self.tell, min(KEPT_TOKENS, kept))
        self._tables: dict[tuple[str, int], list[int]] = {}
        self._passing: list[tuple[str, int]] = []
        self._rule: CheckpointRule | None = None
        super().__init__(manager, engine, lambda *_: None, True, Counter(), Lookups(manager, self._missed))

    def tell(self, *line: Any) -> None:
        """One event more of the step that is under way."""
        self.lines.append(line)

    def stop(self, why: str) -> None:
        """Nothing more is written."""
        if self.file is not None:
            self.file.write([*self.lines, ("stop", why)])
            self.file.close()
        self.lines = []

    def flush(self) -> None:
        """Write what there is."""
        lines, self.lines = self.lines, []
        if self.file is None or self.file.failed:
            return
        self.file.write(lines)
        if self.file.failed:
            self._failed(f"the recording ends here: {self.file.failed}")

    def detach(self) -> None:
        super().detach()
        self.flush()

    # -- what is put in the place of the judgement --------------------------------------------------------------------

    def _memory(self) -> tuple[Any, Any]:
        return _Blocks(self), self.sequences

    def _build(self) -> None:
        config = self.engine.config
        self.view = _View(config, self.manager, self.scheduler, self.names, self.hooks, None)
        self.judge = _Calls(self)  # type: ignore[assignment]
        self.hooks.guard = self.judge.guard
        self.calls = LiveCalls(
            config, self.manager, self.scheduler, self.view, self.judge, self.hooks, self._request_changed, True
        )
        self.calls.looked_up = self._looked_up

    def _shadow(self, rule: CheckpointRule | None) -> None:
        self._rule = rule
        self.story = _Told(self)  # type: ignore[assignment]
        self.lines = []
        config = dataclasses.asdict(self.engine.config)
        header = {"subject": f"vllm=={release().name}", "config": config, "lacking": self.engine.lacking,
                  "contents": self.engine.contents}  # fmt: skip
        name = f"trace-{os.getpid()}-{secrets.token_hex(3)}.jsonl"
        self.file = TraceFile(self.to.folder / name, int(self.to.megabytes * 1e6), header, self._snapshot)

    def _judge_call(self) -> None:
        """Nothing is judged."""

    def _missed(self, miss: Miss) -> None:
        self.tell("miss", self.sequences.number(miss.request), {
            name: value for name, value in dataclasses.asdict(miss).items() if name != "request"})  # fmt: skip

    def _looked_up(self, request: Any, tokens: int) -> None:
        if not tokens:
            self.tell("lookup", self.sequences.number(request.request_id), 0, 0, (), True, False)
        assert self.lookups is not None
        self.lookups.looked_up(request, tokens)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _scheduled(self, output: Any) -> None:
        """The output as a worker sees it, after the tables that go with it."""
        tokens, number = output.num_scheduled_tokens, self.sequences.number
        cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
        visited = {name for name, n in tokens.items() if n > 1} | self._changed | {one.req_id for one in new}
        visited |= {name for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True) if ids}
        self._follow(visited)
        self._changed.clear()
        running = self.scheduler.requests
        replayed = {
            name
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if name in running and computed < max(running[name].num_prompt_tokens, running[name].num_tokens - 1)
        }
        self.calls.scheduled(output, replayed)
        drafts = output.scheduled_spec_decode_tokens
        rows: list[tuple[Any, ...]] = []
        for one in new:
            name = one.req_id
            rows.append((number(name), one.num_computed_tokens, tokens.get(name, 0), len(drafts.get(name, ())),
                         one.block_ids, 1))  # fmt: skip
        resumed = cached.resumed_req_ids
        for i, name in enumerate(cached.req_ids):
            row = (number(name), cached.num_computed_tokens[i], tokens.get(name, 0))
            ids = cached.new_block_ids[i]
            if ids or name in drafts or name in resumed:
                row = (*row, len(drafts.get(name, ())), ids, 2 if name in resumed else 0)  # type: ignore[assignment]
            rows.append(row)
        copies = [(copy.src_block_id, copy.dst_block_id) for copy in output.kv_cache_block_copies or ()]
        preempted = getattr(output, "preempted_req_ids", None) or ()
        self.tell("step", self._steps, rows, [number(name) for name in tokens], copies,
                  getattr(output, "new_block_ids_to_zero", None) or (),
                  [number(name) for name in output.finished_req_ids], [number(name) for name in preempted],
                  self._exports(rows))  # fmt: skip
        self._outputs.append((self._steps, output, set()))

    def _exports(self, rows: Sequence[tuple[Any, ...]]) -> list[tuple[int, int, int, int]]:
        """What a kernel exports from these chunks by the release's own rule: end, tokens, position and column."""
        if self._rule is None:
            return []
        found = {}
        for _, computed, tokens, *rest in rows:
            if tokens and not (rest and rest[0]):
                position, column = self._rule(computed + tokens, tokens)
                if position:
                    found[computed + tokens, tokens] = (computed + tokens, tokens, position, column)
        return list(found.values())

    def _follow(self, requests: set[str]) -> None:
        """Write how the tables of these requests changed."""
        for group, manager in enumerate(self.view.managers):
            tables = manager.req_to_blocks
            for name in requests:
                now = [block.block_id for block in tables.get(name, ())]
                before = self._tables.get((name, group), [])
                if now == before:
                    continue
                first = 0
                most = min(len(now), len(before))
                while first < most and now[first] == before[first]:
                    first += 1
                last = 0
                while last < most - first and now[-1 - last] == before[-1 - last]:
                    last += 1
                self.tell("table", name if self.sequences.number(name) < 0 else self.sequences.number(name), group,
                          first, len(before) - last, now[first : len(now) - last])  # fmt: skip
                if now:
                    self._tables[name, group] = now
                else:
                    del self._tables[name, group]

    def _ran(self, output: Any, answer: Any) -> None:
        outputs: deque[tuple[int, Any, set[str]]] = self._outputs
        while outputs and outputs[0][1] is not output:
            outputs.popleft()  # nobody will answer for it any more
        step = outputs.popleft()[0] if outputs else self._steps
        sampled, index = answer.sampled_token_ids, answer.req_id_to_index
        found = []
        for name in output.num_scheduled_tokens:
            sequence = self.sequences.live.get(name)
            tokens = sampled[index[name]] if sampled and name in index else ()
            if sequence is not None and len(tokens):
                found.append((sequence.number, self.sequences.sampled(sequence, [int(t) for t in tokens], False)))
        self.tell("ran", step, found)
        self.hooks.settled(step)

    def _step_over(self, output: Any, answer: Any, alive: dict[str, Any]) -> None:
        requests, sequences, other = self.scheduler.requests, self.sequences, []
        sampled, index = answer.sampled_token_ids, answer.req_id_to_index
        for name in output.num_scheduled_tokens:
            sequence = sequences.live.get(name)
            if sequence is None or sequence.opaque or not sampled or name not in index:
                continue
            told, known, total = len(sampled[index[name]]), len(sequence), int(sequence.request.num_tokens)
            if total > known:
                sequences.sampled(sequence, list(sequence.request.all_token_ids[known:total]), True)
            if told and total - known != told:
                other.append((sequence.number, total))
        gone = alive.keys() - requests.keys() if len(alive) != len(requests) else set()
        self._changed |= gone
        self._follow(self._changed)
        self._changed.clear()
        for name in gone:
            self.tell("gone", sequences.number(name), alive[name].status.name == "FINISHED_STOPPED")
        passing = [(holder.owner, holder.block) for holder in (*self.view.passing(), *self.hooks.held_outside())]
        if passing != self._passing:
            self._passing = passing
            self.tell("passing", passing)
        self.hooks.touched.clear()
        pool = self.manager.block_pool
        self.tell("end", self._step_of(output), int(pool.get_num_free_blocks()), int(pool.null_block.ref_cnt), other)
        for name in output.finished_req_ids:
            sequences.forget(name)
            self.calls.forget(name)
        sequences.tidy(pool.cached_block_hash_to_block._cache)
        if not requests and self.view.idle() and not self._outputs and self._audited != self.hooks.changes:
            self._audited = self.hooks.changes
            self.tell("idle", self.view.bookkeeping())
        self.flush()

    def _step_of(self, output: Any) -> int:
        return self._steps - len(self._outputs)

    def _crashed(self, error: Exception) -> None:
        location, line = innermost(error.__traceback__)
        text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
        self.tell("crash", location, text, line)
        self.flush()

    # -- a file that begins amid a run --------------------------------------------------------------------------------

    def _snapshot(self) -> list[tuple[Any, ...]]:
        sequences, pool = self.sequences, self.manager.block_pool
        lines: list[tuple[Any, ...]] = [("snapshot", self._steps)]
        for one in sequences.all.values():
            name = "" if one.over else one.request.request_id
            lines.append(("known", one.number, name, one.runs()))
        for block in pool.blocks[1:]:
            if block.ref_cnt or block.next_free_block is None:
                queued = block.next_free_block is not None
                lines.append(("hold", block.block_id, -1, block.ref_cnt, *((queued,) if queued else ())))
            if block.block_hash is not None:
                for i, raw in enumerate(self.view._raw_keys(block.block_id)):
                    key = sequences.state(raw)[:3]
                    noted = block.block_hash_num_tokens if i == 0 else None
                    at = self.hooks.keyed.get(block.block_id, -1)
                    lines.append(("key", block.block_id, -1, *key, noted, at))
        for (name, group), blocks in self._tables.items():
            lines.append(("table", sequences.number(name), group, 0, 0, blocks))
        if self._passing:
            lines.append(("passing", self._passing))
        lines.append(("trust", [sequences.number(name) for name in self.scheduler.requests]))
        return lines
