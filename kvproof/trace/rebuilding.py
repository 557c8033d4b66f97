"""A trace's own part of the work: what sequences, blocks, keys and tables are after each event."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvproof.impl.vllm.device import Device
from kvproof.impl.vllm.live.blockhistory import BlockHistory
from kvproof.spec.finding import Violation
from kvproof.spec.scenario import Scenario
from kvproof.spec.view import Holder, Key
from kvproof.trace.reader import Trace
from kvproof.trace.telling import Telling
from kvproof.trace.view import Told, TraceView, begins

_LONGEST: Final = 1 << 22
"""No sequence has as many tokens: a state's length would not fit into its name."""


@dataclass(frozen=True)
class Found:
    """The first violation of an identity. ``line`` of ``file`` is the event that showed it, in ``step``.

    ``since`` is the first write after which it was wrong, ``history`` what happened to the block lately.
    """

    violation: Violation
    step: int
    file: Path
    line: int
    since: str = ""
    history: tuple[str, ...] = ()


@dataclass
class Result:
    """What traces showed. ``unjudged`` says where judging stopped for a while or for good, and why.

    ``lacking`` are the families and ids that some trace could not show, with the reason; ``notes`` what else there is
    to say of the files. ``coverage`` counts kinds of events.
    """

    found: list[Found] = field(default_factory=list)
    evaluations: Counter[str] = field(default_factory=Counter)
    coverage: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    lacking: dict[str, str] = field(default_factory=dict)
    events: int = 0
    steps: int = 0


class Rebuilding:
    """The events of one run that change what is there, from its start or from a snapshot. ``result`` is added to."""

    def __init__(self, trace: Trace, result: Result) -> None:
        self.config, self.result = trace.config, result
        self.file, self.line = trace.path, 0
        self._exports: dict[tuple[int, int], tuple[int, int]] = {}
        checkpoints = trace.config.checkpoint_blocks > 0
        rule = (lambda end, tokens: self._exports.get((end, tokens), (0, -1))) if checkpoints else None
        self.device = Device(trace.config, rule) if trace.contents else None
        self.view = TraceView(trace.config, self.device)
        self.history = BlockHistory()
        self.telling = Telling(trace.config, trace.part == 0)
        self._names: dict[int, str] = {-1: ""}
        self._changed: set[str] = set()
        self._trusted: set[str] = set()
        self._granted: dict[int, Key] = {}
        self._reached: dict[str, int] = {}
        self._unkeyed: set[int] = set()
        self._stamp = self._step = 0
        self._base = (-1, -1, 0)
        self._amid = self._under_way = False

    def scenarios(self) -> tuple[Scenario | None, Scenario | None]:
        """What happened up to now: since the engine's start, and since it was idle last, as far as that can be told."""
        if self._under_way:
            self.telling.stepped()
        return self.telling.scenario() if self.telling.whole else None, self.telling.since_idle()

    def _seen(self, kind: str) -> None:
        self.result.coverage[kind] += 1

    # -- sequences ----------------------------------------------------------------------------------------------------

    def _on_seq(self, s: int, name: str, base: int, shared: int, length: int) -> None:
        told = Told(s, name, begins(self.view.sequences[base] if base >= 0 else None, shared), length)
        if len(told.states) != shared + 1 or not shared <= length < _LONGEST:
            raise ValueError("no such sequence")
        told.extend_fresh(s, length)
        self._introduce(told)
        self._base = (s, base, shared)
        if shared:
            self._seen("prompt that shares a beginning")

    def _on_known(self, s: int, name: str, runs: list[list[int]]) -> None:
        told = Told(s, name, begins(None, 0), 0)
        if sum(count for _, count in runs) >= _LONGEST:
            raise ValueError("no such sequence")
        for first, count in runs:
            told.add(range(first, first + count))
        told.prompt = len(told.states) - 1
        self._introduce(told)

    def _introduce(self, told: Told) -> None:
        self.view.sequences[told.number] = told
        if told.name:
            self.view.live[told.name] = told
            self._names[told.number] = told.name

    def _on_grow(self, s: int, numbers: list[int]) -> None:
        self.view.sequences[s].add(numbers)

    def _on_forget(self, numbers: list[int]) -> None:
        for s in numbers:
            self.view.sequences.pop(s, None)
            self._names.pop(s, None)
        self.telling.forgotten(numbers)

    def _on_submit(self, r: int, prompt: int, most: int) -> None:
        _, base, shared = self._base
        self.telling.submitted(r, base, shared, prompt, most)

    def _on_offer(self, r: int, depth: int, asynchronous: bool, divergent: bool) -> None:
        self.telling.offered(r, depth, asynchronous, divergent)

    def _on_abort(self, r: int) -> None:
        self._seen("abort")
        self.telling.aborted(r)
        self._over(r)

    def _on_gone(self, r: int, stopped: bool) -> None:
        self._seen("end by the model" if stopped else "end by length")
        self.telling.gone(r, stopped)
        self._over(r)

    def _over(self, r: int) -> None:
        name = self._names[r]
        self._reached.pop(name, None)
        told = self.view.live.get(name)
        if told is not None:
            told.over = True

    # -- pool, keys and tables ----------------------------------------------------------------------------------------

    def _on_begin(self, step: int) -> None:
        self._step = self._stamp = self.history.step = step
        self._under_way = True
        self._unkeyed.clear()

    def _count(self, what: str, block: int, r: int, references: int, queued: bool | None) -> None:
        if block < 1:
            raise ValueError("no such block")
        self.view.count(block, references, references == 0 if queued is None else queued, self._stamp)
        name = self._names[r]
        self.history.note(block, what, name)
        self._changed.add(name)

    def _on_take(self, block: int, r: int, references: int, queued: bool | None = None) -> None:
        self._count("taken", block, r, references, queued)
        if block in self._unkeyed:
            self._seen("eviction")

    def _on_hold(self, block: int, r: int, references: int, queued: bool | None = None) -> None:
        self._count("held", block, r, references, queued)
        if references > 1:
            self._seen("block held by several")

    def _on_free(self, block: int, r: int, references: int, queued: bool | None = None) -> None:
        self._count("freed", block, r, references, queued)

    def _on_key(self, block: int, r: int, s: int, tokens: int, group: int, noted: int | None, step: int) -> None:
        name = self._names[r]
        self._changed.add(name)
        if not 0 < block < self.config.num_blocks or not 0 <= group < len(self.config.groups):
            raise ValueError("no such block or group")
        if s < 0:
            return
        key = self.view.key(block, self.view.sequences[s], tokens, group, noted, step)
        self.history.note(block, "keyed", name, key.state)
        if self._amid or name in self._trusted:
            self._granted[block] = key
            self.view.promise_kept(block, key)

    def _on_unkey(self, block: int, r: int) -> None:
        keys = self.view.keys(block)
        state = keys[0].state if keys else None
        if self.view.unkey(block):
            self._unkeyed.add(block)
        self.history.note(block, "unkeyed", self._names[r], state)

    def _on_table(self, r: int | str, group: int, start: int, stop: int, blocks: list[int]) -> None:
        name = r if isinstance(r, str) else self._names[r]
        self.view.table(name, group, start, stop, blocks)
        self._changed.add(name)

    def _on_passing(self, holders: list[list[Any]]) -> None:
        self.view.passing = [Holder(owner, block) for owner, block in holders]

    def _on_reset(self) -> None:
        self._seen("reset of the cache")
        self.telling.reset()

    # -- a file that begins amid a run --------------------------------------------------------------------------------

    def _on_snapshot(self, step: int) -> None:
        self._step = self._stamp = self.history.step = step
        self._amid = True
        self.result.notes.append(
            f"{self.file} begins in step {step}: what blocks were keyed as then is taken to be what they held, and "
            "requests that ran then are not followed"
        )

    def _on_trust(self, requests: list[int]) -> None:
        self._amid = False
        for r in requests:
            self._trusted.add(self._names[r])
            self.view.unknown_worker(self._names[r])
