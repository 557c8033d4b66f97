"""Turning assertions on: from here on every cache manager and scheduler that vLLM builds is watched.

Two constructors are wrapped, ``KVCacheManager`` and ``Scheduler``; everything else is wrapped on the objects that they
build, which are made so that they can be. Without :func:`install` nothing of vLLM is changed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from kvproof.impl.vllm.drift import load, release
from kvproof.impl.vllm.live.derive import Engine, Unsupported, engine_of
from kvproof.impl.vllm.live.engine import Watched
from kvproof.impl.vllm.live.lookups import Lookups
from kvproof.impl.vllm.live.overlay import lasting, lay_from_birth
from kvproof.impl.vllm.live.record import Recorded, RecordTo
from kvproof.impl.vllm.live.report import Reported, describe
from kvproof.impl.vllm.live.why import Miss, never_hits
from kvproof.impl.vllm.subject import checkpoint_rule
from kvproof.invariants.monitor import InvariantBroken
from kvproof.spec.finding import Violation

logger = logging.getLogger("kvproof")

_HOT = (
    ("sched.scheduler", "Scheduler"),
    ("kv_cache_manager", "KVCacheManager"),
    ("kv_cache_coordinator", "KVCacheCoordinator"),
    ("block_pool", "BlockPool"),
)
"""Where methods are laid over that each step goes through, or objects whose attributes it reads."""

Mode = Literal["touched", "full", "record"]
Reaction = Literal["raise", "log", "dump"]
OnFinding = Callable[[Reported], None]
OnMiss = Callable[[Miss], None]


@dataclass(eq=False)
class Installed:
    """What is being watched, and what came of it so far.

    ``evaluations`` counts by invariant how often something was judged, over all engines of this process.
    ``not_applicable`` has the families and ids that some engine here could not show, with the reason; ``errors`` what
    went wrong in kvproof itself (the engine it happened in is judged no more); ``unwatched`` why an engine was left
    alone.
    """

    mode: Mode
    reaction: Reaction
    known: Collection[tuple[str, str]] = ()
    on_finding: OnFinding | None = None
    on_miss: OnMiss | None = None
    on_warning: Callable[[str], None] | None = None
    record: RecordTo | None = None
    findings: list[Reported] = field(default_factory=list)
    evaluations: Counter[str] = field(default_factory=Counter)
    not_applicable: dict[str, str] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    """Invariants that some engine here can show."""
    errors: list[str] = field(default_factory=list)
    unwatched: Counter[str] = field(default_factory=Counter)
    engines: int = 0
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def uninstall(self) -> None:
        """Let vLLM build its objects as before. Engines that exist already stay under watch."""
        if self in _active:
            _active.remove(self)
        while self._undo:
            self._undo.pop()()

    def summary(self) -> str:
        """What was judged, in one line."""
        judged = sum(self.evaluations.values())
        known = sum(found.known for found in self.findings)
        parts = [
            f"{self.engines} engines watched",
            f"{judged} judgements of {len(self.evaluations)} invariants" if judged else "nothing was judged",
            f"{len(self.findings) - known} findings" + (f" and {known} known ones" if known else ""),
        ]
        parts += [f"{count} left alone: {why}" for why, count in self.unwatched.items()]
        judging = {part for name in self.asked for part in (name, name.partition(".")[0])}
        apart = sorted(name for name in self.not_applicable if name not in judging)
        parts += [f"not applicable: {', '.join(apart)}"] if apart else []
        parts += [f"{len(self.errors)} errors of its own"] if self.errors else []
        return "; ".join(parts)

    # -- what the constructors call -----------------------------------------------------------------------------------

    def built_manager(self, manager: Any) -> None:
        try:
            engine = engine_of(manager)
            lookups = Lookups(manager, self.on_miss) if self.on_miss is not None else None
            lean = self.mode == "touched"
            watched = (
                Watched(manager, engine, self._broken, lean, self.evaluations, lookups)
                if self.record is None
                else Recorded(manager, engine, self.record, self._recording_ended)
            )
        except Unsupported as reason:
            self.unwatched[str(reason)] += 1
            return
        except Exception as error:
            self._failed(error)
            return
        lasting(manager).laid._kvproof = watched  # type: ignore[attr-defined]
        self.asked |= getattr(watched.judge, "asked", frozenset())

    def built_scheduler(self, scheduler: Any) -> None:
        watched = getattr(getattr(scheduler, "kv_cache_manager", None), "_kvproof", None)
        if watched is None:
            return
        try:
            engine = engine_of(watched.manager, scheduler)
            watched.adopt(scheduler, engine, _rule(engine))
        except Exception as error:
            watched.detach()
            if isinstance(error, Unsupported):
                self.unwatched[str(error)] += 1
            else:
                self._failed(error)
            return
        self.engines += 1
        never = never_hits(watched.manager)
        if never is not None and self.on_warning is not None:
            self.on_warning(never)
        for name, why in engine.lacking.items():
            self.not_applicable.setdefault(name, why)
        watched.judge.on_error = self._note_error
        self.asked |= getattr(watched.judge, "asked", frozenset())

    def _failed(self, error: Exception) -> None:
        self._note_error(f"{type(error).__name__}: {error}")

    def _note_error(self, text: str) -> None:
        self.errors.append(text)
        logger.error("kvproof: an error in the assertions themselves; this engine is judged no more: %s", text)

    def _recording_ended(self, text: str) -> None:
        self.errors.append(text)
        logger.error("kvproof: %s", text)

    def _broken(self, watched: Watched, violation: Violation) -> None:
        found = describe(watched, violation, violation.identity in self.known)
        self.findings.append(found)
        if self.on_finding is not None:
            self.on_finding(found)
        if self.reaction == "raise" and not found.known:
            raise InvariantBroken(violation)


def _rule(engine: Engine) -> Any:
    config = engine.config
    if not config.checkpoint_blocks or not engine.contents:
        return None
    if release().version < (0, 30):
        engine.contents = False
        engine.lacking["SLOT"] = "before 0.30 checkpoints are exported in one model only"
        return None
    return checkpoint_rule(config, config.eagle)


_active: list[Installed] = []
"""What is installed in this process: one at most, since two would take each other's hooks for the engine."""


def install(
    mode: Mode = "touched",
    reaction: Reaction = "log",
    known: Collection[tuple[str, str]] = (),
    on_finding: OnFinding | None = None,
    on_miss: OnMiss | None = None,
    on_warning: Callable[[str], None] | None = None,
    record: RecordTo | None = None,
) -> Installed:
    """Watch every cache manager and scheduler that is built from now on. Imports vLLM's core if it is not yet.

    ``reaction`` is what a violation does: ``raise`` lets :class:`kvproof.invariants.monitor.InvariantBroken` out of the
    call that broke the rule, the others only hand it to ``on_finding``. Identities (invariant, cause) in ``known`` are
    reported as known and never raise. ``on_miss`` is told of lookups that end short, ``on_warning`` of an engine that
    can never hit. Mode ``record`` judges nothing, and writes what happens to where ``record`` says.
    """
    if _active:
        raise ValueError("assertions are on already in this process: uninstall them first")
    if (mode == "record") != (record is not None):
        raise ValueError("where to record to belongs to mode record, and to no other")
    installed = Installed(mode, reaction, known, on_finding, on_miss, on_warning, record)
    manager = load("vllm.v1.core.kv_cache_manager").KVCacheManager
    scheduler = load("vllm.v1.core.sched.scheduler").Scheduler
    for module, name in _HOT:
        lay_from_birth(getattr(load(f"vllm.v1.core.{module}"), name), installed._undo)
    _after_init(manager, installed.built_manager, installed._undo)
    _after_init(scheduler, installed.built_scheduler, installed._undo)
    _active.append(installed)
    return installed


def _after_init(cls: Any, then: Callable[[Any], None], undo: list[Callable[[], None]]) -> None:
    original = cls.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        then(self)

    init.__wrapped__ = original  # type: ignore[attr-defined]  # its signature is still asked for
    cls.__init__ = init
    undo.append(lambda: setattr(cls, "__init__", original))
