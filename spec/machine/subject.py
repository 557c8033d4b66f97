"""The abstract machine as a subject: the same scenarios that drive engines drive it."""

from __future__ import annotations

from collections.abc import Mapping

from kvproof.spec.config import Config
from kvproof.spec.events import Crash, Drained, Stall
from kvproof.spec.machine.blocks import Faulty
from kvproof.spec.machine.dialect import SPECIFICATION, Dialect
from kvproof.spec.machine.machine import Machine
from kvproof.spec.machine.view import MachineView
from kvproof.spec.rules.blocks import peak_blocks
from kvproof.spec.scenario import Action
from kvproof.spec.subject import Observer
from kvproof.spec.tracer import EMPTY, State, advance

STALL_AFTER = 3
"""Steps in a row in which nothing runs and nothing is on its way before a stall is called."""

DRAIN_STEPS = 400


class MachineDriver:
    """Implements :class:`kvproof.spec.subject.Driven`."""

    def __init__(
        self, config: Config, observer: Observer | None, dialect: Dialect = SPECIFICATION, branches: bool = True
    ) -> None:
        self.config = config
        self.machine = Machine(config, observer, branches=branches, dialect=dialect)
        self.sequences: dict[str, list[State]] = {}
        self.dead = False
        self._idle = 0

    @property
    def view(self) -> MachineView:
        return self.machine.view

    def live(self) -> tuple[str, ...]:
        return tuple(name for name in self.sequences if self.machine.world.find(name)) if not self.dead else ()

    def apply(self, action: Action) -> bool:
        if self.dead or action.rare:
            return False
        try:
            return self._apply(action)
        except Faulty as fault:
            self.dead = True
            self.machine.emit(Crash("kvproof.spec.machine", f"Faulty: {fault}", ""))
            return True

    def _apply(self, action: Action) -> bool:
        machine = self.machine
        match action.kind:
            case "submit":
                return self._submit(action)
            case "step":
                for _ in range(action.times):
                    if not self._step(action.accept):
                        break
                return True
            case "finish":
                return machine.finish(action.request)
            case "abort":
                return machine.abort(action.request)
            case "reset":
                return machine.reset()
            case "preempt":
                return machine.preempt(action.request)
            case "evict":
                return machine.evict(action.times)

    def _submit(self, action: Action) -> bool:
        if action.request in self.sequences:
            return False
        base = self.sequences.get(action.base, [EMPTY])
        shared = min(action.shared, action.length, len(base) - 1)
        length = min(action.length, self.config.max_model_len - 1)
        states, first = base[: min(shared, length) + 1], (len(self.sequences) + 1) * 100_000
        for token in range(first, first + length - shared):
            states.append(advance(states[-1], token))
        if not self.machine.submit(action.request, states, action.max_tokens, action.external, action.missing):
            return False
        request = self.machine.world.find(action.request)
        assert request is not None
        self.sequences[action.request] = request.states
        return True

    def _step(self, accept: tuple[int, ...] = ()) -> bool:
        machine = self.machine
        flying = bool(machine.world.flights)
        if not machine.step(accept):
            return False
        if machine.scheduled or flying or not machine.world.requests():
            self._idle = 0
            return True
        self._idle += 1
        if self._idle == STALL_AFTER:
            self._stall()
        return True

    def _stall(self) -> None:
        world = self.machine.world
        request = (world.running or world.loading or world.waiting)[0]
        total = min(request.prompt + request.max_tokens, self.config.max_model_len) + self.config.speculative
        others = any(other.tables[0] for other in world.requests() if other is not request)
        self.machine.emit(
            Stall(
                request=request.name,
                schedules=self._idle,
                peak=peak_blocks(self.config, total),
                pool=self.config.num_blocks - 1,
                blocked=others and not world.running,
                why="running" if world.running else "waiting",
            )
        )

    def drain(self) -> None:
        """Finish what can finish, abort what can't, let loads arrive, and judge what is left."""
        if self.dead:
            return
        try:
            steps = 0
            while self.machine.world.requests() and steps < DRAIN_STEPS and self._idle <= STALL_AFTER:
                self._step()
                steps += 1
            for name in self.live():
                self.machine.abort(name)
            while self.machine.world.flights:
                self.machine.step()
        except Faulty as fault:
            self.dead = True
            self.machine.emit(Crash("kvproof.spec.machine", f"Faulty: {fault}", ""))
            return
        self.machine.emit(Drained())


class MachineSubject:
    """The specification itself, as a subject named ``spec``. ``branches``: as in
    :class:`kvproof.spec.machine.machine.Machine`."""

    name = "spec"

    def __init__(self, dialect: Dialect = SPECIFICATION, branches: bool = True) -> None:
        self.dialect = dialect
        self.branches = branches

    def families(self) -> frozenset[str]:
        return frozenset({"SLOT", "ADMIT", "REF", "HIT", "EXT", "FLOW", "REUSE"})

    def lacking(self) -> Mapping[str, str]:
        return {
            "EXT.zero-spares-load": "the machine wipes no blocks",
            "EXT.rest-wiped": "its stores offer whole blocks",
            "ADMIT.preemption-frees": "it is not asked what each preemption frees",
            "ADMIT.starved": "it is not asked how long who comes later has waited",
            "ADMIT.startup": "it starts with any pool",
            **dict.fromkeys(
                ("EXT.offload-content", "EXT.offload-offers", "EXT.offload-serves"), "it has no store of its own"
            ),
        }

    def default_retention(self, eagle: bool) -> int | None:
        """What users get who set nothing: replay boundaries only."""
        return 0

    def start(self, config: Config, observer: Observer | None) -> MachineDriver:
        return MachineDriver(config, observer, self.dialect, self.branches)
