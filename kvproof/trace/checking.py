"""A trace held to the specification: the cache is rebuilt event by event, and the catalogue asked about each.

What a live engine's assertions ask (in the mode that looks at what a step touched) is asked here, later and elsewhere.
Two rules can't be: that a key found by a lookup is on the block, and that no block is queued twice, since the trace
says each only once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvproof.errors import UsageError
from kvproof.impl.vllm.live.blockhistory import first_wrong
from kvproof.impl.vllm.rows import Sampled
from kvproof.invariants.catalogue import CATALOGUE
from kvproof.invariants.invariant import Invariant
from kvproof.invariants.monitor import Monitor, RunSpoiled
from kvproof.spec.events import (
    Allocate,
    Crash,
    Drained,
    Estimate,
    Event,
    GroupEstimate,
    Lookup,
    Observation,
    Resume,
    Split,
    StepEnd,
    Truncate,
)
from kvproof.spec.finding import Violation
from kvproof.spec.tracer import State
from kvproof.spec.view import NULL
from kvproof.trace.output import Output
from kvproof.trace.reader import Trace, broken
from kvproof.trace.rebuilding import Found, Rebuilding, Result

UNTOLD: Final[Mapping[str, str]] = {
    "REF.keys-map": "a trace says only once which block has a key",
    "REF.double-free": "a trace says only whether a block is in the free queue",
}
_AUDIT_EVERY: Final = 4
"""Events per block of the pool between two looks at the whole of it."""

_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, AssertionError, OverflowError)


class Checker(Rebuilding):
    """One run, judged. ``on_found`` is told of each new finding."""

    def __init__(self, trace: Trace, result: Result, on_found: Callable[[Found, Checker], None] | None = None) -> None:
        super().__init__(trace, result)
        self.on_found = on_found
        self.spoiled = ""
        self.asked = asked(trace)
        # Counts change far more often than what blocks hold and are keyed as, which takes longer to judge.
        self._counts = self._monitor(lambda entry: entry.family == "REF")
        self._others = self._monitor(lambda entry: entry.family != "REF")
        self._drained = self._monitor(lambda entry: StepEnd not in entry.events)
        result.lacking.update({**trace.lacking, **UNTOLD})
        self._lean = not trace.config.speculative
        self._asks: list[Estimate] = []
        self._outputs: dict[int, Any] = {}
        self._sampled: list[Any] = []
        self._accepted: dict[str, int] = {}
        self._prefilling: set[str] = set()
        self._scheduled: tuple[str, ...] = ()
        self._finished: list[str] = []
        self._preempted: set[str] = set()
        self._audited = result.events
        self._do: dict[str, Callable[..., None]] = {
            name.removeprefix("_on_"): getattr(self, name) for name in dir(self) if name.startswith("_on_")
        }

    # -- the run ------------------------------------------------------------------------------------------------------

    def feed(self, trace: Trace, fresh: bool) -> None:
        """All events of one file. Unless ``fresh``, its snapshot is known already and left out."""
        self.file = trace.path
        do, notes = self._do, self.result.notes
        amid = trace.part > 0
        skip = amid and not fresh
        for number, line in trace.events(notes.append):
            self.line = number
            name = line[0]
            if skip:
                skip = name != "trust"
                continue
            self.result.events += 1
            try:
                do[name](*line[1:])
            except _DAMAGE as error:
                if isinstance(error, UsageError):
                    raise
                why = f"there is no event {name!r}" if name not in do else f"{name} does not fit what came before"
                raise broken(trace.path, number, why) from error

    def _monitor(self, chosen: Callable[[Invariant], bool]) -> Monitor:
        monitor = Monitor(filter(chosen, self.asked), stop=False)
        monitor.evaluations = self.result.evaluations
        return monitor

    def observe(self, event: Event) -> None:
        """Judge a call, or what the device did."""
        if not self.spoiled:
            self._judge(event, self._others)

    def _judge_state(self, event: Event) -> None:
        """Judge what is there at the end of a step."""
        if self.spoiled:
            return
        self.view.collect()
        self._judge(event, self._counts)
        self.view.only_contents()
        self._judge(event, self._others)

    def _judge(self, event: Event, monitor: Monitor) -> None:
        before = len(monitor.violations)
        try:
            monitor(Observation(event, self.view))
        except RunSpoiled as spoiled:
            broke = spoiled.violation
            self.spoiled = f"after {broke.invariant} ({broke.cause}) in step {self._step} nothing more was judged"
        for violation in monitor.violations[before:]:
            if all(found.violation.identity != violation.identity for found in self.result.found):
                self._found(violation)

    def _found(self, violation: Violation) -> None:
        block = dict(violation.where).get("block")
        since = ""
        lines: tuple[str, ...] = ()
        if isinstance(block, int) and block > NULL:
            entries = self.history.of(block)
            lines = tuple(entry.line() for entry in entries)
            if violation.invariant in ("SLOT.key-content", "SLOT.running-state"):
                keys = self.view.keys(block)
                wrong = next((entry for key in keys if (entry := first_wrong(entries, key.state)) is not None), None)
                since = wrong.line() if wrong is not None else ""
        found = Found(violation, self._step, self.file, self.line, since, lines)
        self.result.found.append(found)
        if self.on_found is not None:
            self.on_found(found, self)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _on_lookup(self, r: int, tokens: int, limit: int, blocks: Any, joint: bool, diverged: bool) -> None:
        if not tokens:
            self._seen("lookup without a hit")
            return
        inside = tokens % self.config.scheduler_block
        self._seen("hit inside a block" if inside else "hit")
        states: Any = self.view.live[self._names[r]].states  # not copied: nobody keeps it
        self.observe(Lookup(self._names[r], states, tokens, limit, _tuples(blocks), joint, diverged))

    def _on_truncate(
        self, r: int, endpoint: int, before: Any, after: Any, error: str, references: bool, changed: bool
    ) -> None:
        self._seen("hit cut for a store")
        kept = None if after is None else _tuples(after)
        self.observe(Truncate(self._names[r], endpoint, _tuples(before), kept, error, references, changed))

    def _on_resume(
        self, r: int, local: int, external: int, blocks: Any, hit: int, offered: int, diverged: bool, asynchronous: bool
    ) -> None:
        if external:
            self._seen("asynchronous load" if asynchronous else "tokens of a store")
        self.observe(Resume(self._names[r], local, external, _tuples(blocks), hit, offered, diverged, asynchronous))

    def _on_split(self, r: int, start: int, offered: int, granted: int, end: int, limit: int, stops: list[int]) -> None:
        if start + granted < end:
            self._seen("prompt in several chunks")
        self.observe(Split(self._names[r], start, offered, granted, end, limit, tuple(stops)))

    def _on_ask(
        self, r: int, dry: bool, tokens: int, computed: int, free: int, main: int, changed: Any, groups: Any
    ) -> None:
        answers = tuple(GroupEstimate(*group) for group in groups)
        event = Estimate(self._names[r], dry, tokens, computed, answers, free, tuple(changed), main)
        self._asks = [*self._asks[-7:], event]
        if any(group.deferred and group.hits for group in answers):
            self._seen("deferral")
        self.observe(event)

    def _on_allocate(
        self, r: int, granted: bool, taken: int, free: int, asked: int, new: Any, hits: Any, reserved: int
    ) -> None:
        estimates = tuple(self._asks[-asked:]) if asked else ()
        if not granted:
            self._seen("refusal")
        name = self._names[r]
        self._changed.add(name)
        if estimates:
            self.observe(Allocate(name, granted, taken, free, estimates, tuple(new), tuple(hits), reserved))

    def _on_miss(self, r: int, fields: dict[str, Any]) -> None:
        self._seen("short hit")

    # -- steps --------------------------------------------------------------------------------------------------------

    def _on_step(
        self, step: int, rows: Any, order: Any, copies: Any, zeroed: Any, finished: Any, preempted: Any, exports: Any
    ) -> None:
        names = self._names
        output = Output([names[r] for r in finished], [names[r] for r in preempted], zeroed, copies, exports)
        visited = self._changed | self._prefilling
        for r, computed, tokens, *rest in rows:
            name = names[r]
            if rest:
                drafts, blocks, how = rest
                if drafts:
                    output.drafts[name] = drafts
                if how:
                    self._trusted.discard(name)
                if how or blocks or drafts:
                    visited.add(name)
                if how == 1:
                    output.new(name, computed, blocks)
                else:
                    output.cached(name, computed, blocks, how == 2)
                if how and name in self._preempted:
                    self._preempted.discard(name)
                    self._seen("return after preemption")
            else:
                output.cached(name, computed, None, False)
            if tokens > 1 or not self._lean:
                visited.add(name)
            output.computed[name] = computed + tokens
            if tokens:
                output.tokens[name] = tokens
        output.num_scheduled_tokens = {names[r]: output.tokens[names[r]] for r in order}
        output.visited = {name for name in visited if name in output.tokens and name not in self._trusted}
        self.result.coverage["copy of a block"] += len(copies)
        self.result.coverage["preemption"] += len(preempted)
        self.result.coverage["checkpoint exported"] += len(exports)
        for r in preempted:
            self._reached.pop(names[r], None)
            self._preempted.add(names[r])
        self._outputs[step] = output
        self._stamp = step + 1
        self.view.scheduled = step

    def _on_ran(self, step: int, sampled: list[Any]) -> None:
        names, view = self._names, self.view
        output = self._outputs.pop(step, None)
        self._outputs = {at: one for at, one in self._outputs.items() if at > step}
        self._sampled = []
        said: dict[str, list[int]] = {}
        for r, numbers in sampled:
            told = view.sequences[r]
            self._sampled.append((told, len(told.states) - 1, numbers))
            said[names[r]] = numbers
        self._accepted = {}
        if output is None:  # it was scheduled before this file began
            self._scheduled, self._finished = (), []
            view.settle(step)
            return
        self._scheduled, self._finished = tuple(output.num_scheduled_tokens), output.finished_req_ids
        for name, drafts in output.drafts.items():
            accepted = self._accepted[name] = max(0, len(said.get(name, ())) - 1)
            self.result.coverage["drafts accepted"] += accepted
            self.result.coverage["drafts rejected"] += drafts - accepted
        if self.device is None or self.spoiled:
            view.settle(step)
            return
        output.guess(said)
        self._exports = {(end, tokens): (position, column) for end, tokens, position, column in output.exports}

        def sampler(name: str, end: int, drafts: list[int], samples: bool) -> Sampled:
            tokens = list(said.get(name, ()))
            return Sampled(tokens, max(0, len(tokens) - 1) if drafts else 0)

        _, forwards = self.device.execute(
            output, self._states, sampler, (), lambda block, writer: view.sharers(block, writer, step),
            view.broken_keys, output.visited,
        )  # fmt: skip
        self._note(output, forwards)
        view.settle(step)
        self._grant()
        for name in output.visited:
            worker = self.device.workers[name]
            (self._prefilling.add if worker.done < worker.prefill else self._prefilling.discard)(name)
        if self._lean:
            self._reached.update(output.computed)
        for forward in forwards:
            self.observe(forward)

    def _grant(self) -> None:
        """What requests that are not followed wrote, as far as they keyed it."""
        for block, key in list(self._granted.items()):
            if key in self.view.keys(block):
                self.view.promise_kept(block, key)
            if block not in self.view.due:
                del self._granted[block]

    def _states(self, name: str) -> Sequence[State]:
        return self.view.live[name].states

    def _note(self, output: Output, forwards: Sequence[Any]) -> None:
        assert self.device is not None
        for copy in output.kv_cache_block_copies:
            content = self.device.mamba.get(copy.dst_block_id)
            state = content.temporal if content is not None else None
            self.history.note(copy.dst_block_id, "copied", f"from block {copy.src_block_id}", state)
        for forward in forwards:
            who = f"{forward.request}'s forward over [{forward.start}, {forward.start + forward.tokens})"
            for write in forward.writes:
                if write.block > NULL:
                    self.history.note(write.block, "written", who, write.state)

    def _on_end(self, step: int, free: int, null_count: int, other: list[tuple[int, int]]) -> None:
        view, result = self.view, self.result
        lengths = dict(other)
        for told, known, numbers in self._sampled:
            have = len(told.states) - 1 - known
            keep = lengths.get(told.number, known + len(numbers)) - known
            if have < keep:
                told.add(numbers[have:keep])
        self._sampled = []
        self.telling.stepped(
            tuple(self._accepted.get(name, 0) for name in self._scheduled) if self._accepted else ())  # fmt: skip
        self._under_way = False
        view.said_free, view.null_count = free, null_count
        result.steps += 1
        if not self.spoiled:
            self._catch_up()
            self._judge_state(StepEnd(step, self._scheduled, (), ()))
        self._changed.clear()
        self._leave()

    def _catch_up(self) -> None:
        if self.device is None:
            return
        for name in self._changed:
            end, worker = self._reached.get(name), self.device.workers.get(name)
            if end is not None and worker is not None and not worker.fresh and name not in self._trusted:
                self.device.catch_up(name, end, self._states(name))

    def _leave(self) -> None:
        """Requests of which the worker has been told that they are over."""
        for name in self._finished:
            told = self.view.live.get(name)
            if told is not None and told.over:
                del self.view.live[name]
            self._prefilling.discard(name)
            self._preempted.discard(name)
            self._trusted.discard(name)
        self._finished = []

    def _on_idle(self, left: list[str]) -> None:
        self._seen("nothing runs")
        self.view.left = left
        if not self.spoiled:
            self._audit()
        self.telling.idle()

    def _audit(self) -> None:
        """Nothing runs. The whole pool is looked at only once it can have changed as a whole: what nobody touched since
        it was judged is what it was."""
        if self.result.events - self._audited < _AUDIT_EVERY * self.config.num_blocks:
            self._judge(Drained(), self._drained)
            return
        self._audited = self.result.events
        self._judge_state(Drained())

    def _on_crash(self, location: str, error: str, line: str) -> None:
        self._seen("crash")
        self.observe(Crash(location, error, line))

    def _on_stop(self, why: str) -> None:
        self.result.notes.append(f"{self.file}: the recording ended by itself: {why}")


def asked(trace: Trace) -> list[Invariant]:
    """The rules that can be asked about such a trace."""
    without = {**trace.lacking, **UNTOLD}
    return [entry for entry in CATALOGUE if entry.id not in without and entry.family not in without]


def check(
    runs: Sequence[Sequence[Trace]],
    on_found: Callable[[Found, Checker], None] | None = None,
    result: Result | None = None,
) -> Result:
    """Hold ``runs`` to the specification, each file after the one before.

    Where something broke after which nothing more can be judged, judging begins anew with the next file, if there is
    one. Raises :class:`UsageError` for a line that can't be.
    """
    result = Result() if result is None else result
    for run in runs:
        checker: Checker | None = None
        for trace in run:
            fresh = checker is None or bool(checker.spoiled)
            if checker is None or checker.spoiled:
                _note(result, checker)
                checker = Checker(trace, result, on_found)
            checker.feed(trace, fresh)
        _note(result, checker)
    return result


def _note(result: Result, checker: Checker | None) -> None:
    if checker is not None and checker.spoiled:
        result.unjudged.append(f"{checker.file}: {checker.spoiled}")


def _tuples(blocks: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, blocks))
