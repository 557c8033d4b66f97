"""The part of the states that one process looks after: which there are, how each was first reached, what broke."""

from __future__ import annotations

import contextlib
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvproof.invariants.catalogue import CATALOGUE
from kvproof.invariants.monitor import Monitor, RunSpoiled
from kvproof.models.explore.encoding import Encoding
from kvproof.models.explore.scope import Move, Scope
from kvproof.spec.events import Crash, Drained, Event
from kvproof.spec.finding import Violation
from kvproof.spec.machine.blocks import Faulty
from kvproof.spec.machine.machine import Machine
from kvproof.spec.machine.subject import MachineSubject
from kvproof.spec.machine.world import Request, World
from kvproof.spec.rules.blocks import peak_blocks

NOBODY = (1 << 32) - 1
KINDS = ("submit", "step", "abort", "preempt", "finish", "evict", "reset")

TOLD = 1 << 18
"""How many states a process remembers having told another of, at the end of a level."""

Pause = Callable[[], None]
Arrival = tuple[bytes, int, int]
"""A state that was reached: its bytes, the number of the state it was reached from (see :meth:`Shard.number`), and the
packed move."""


def pack(move: Move) -> int:
    """A move in 32 bits: at most three running requests have drafts, and 14 of them each."""
    accept = sum((accepted + 1) << (20 + 4 * place) for place, accepted in enumerate(move.accept))
    return KINDS.index(move.kind) | (move.request + 1) << 4 | (move.prompt + 1) << 12 | accept


def unpack(packed: int) -> Move:
    accept = tuple(taken - 1 for place in range(3) if (taken := packed >> (20 + 4 * place) & 15))
    return Move(KINDS[packed & 15], (packed >> 4 & 255) - 1, (packed >> 12 & 255) - 1, accept)


@dataclass(frozen=True)
class Broken:
    """A violation, in the state numbered ``state`` by the packed ``move``."""

    violation: Violation
    state: int
    move: int


class Judge:
    """Runs moves on one machine, with the whole catalogue watching, or with nobody."""

    def __init__(self, scope: Scope, judged: bool) -> None:
        self.scope = scope
        self.machine: Machine = scope.machine()
        self.monitor: Monitor | None = None
        if judged:
            families, lacking = MachineSubject().families(), MachineSubject().lacking()
            entries = [entry for entry in CATALOGUE if entry.family in families and entry.id not in lacking]
            self.monitor = Monitor(entries, stop=False)
            self.machine.observer = self._observe
            for sequence in scope.sequences:
                self.machine.view.learn(sequence)

    def _observe(self, observation: object) -> None:
        assert self.monitor is not None
        self.monitor(observation)  # type: ignore[arg-type]

    def run(self, world: World, move: Move) -> list[Violation]:
        """Change ``world`` by ``move``. Answers what broke. A world whose machine fell over is of no use any more."""
        machine, monitor = self.machine, self.monitor
        machine.become(world)
        if monitor is not None:
            monitor.violations.clear()
            monitor._recorded.clear()
        try:
            self.scope.carry_out(machine, move)
        except Faulty as fault:
            self._tell(Crash("kvproof.spec.machine", f"Faulty: {fault}", ""))
        except RunSpoiled:
            pass  # what broke is on record, and nothing more can be judged
        else:
            if machine.view.idle():
                self._tell(Drained())
        return list(monitor.violations) if monitor is not None else []

    def _tell(self, event: Event) -> None:
        with contextlib.suppress(RunSpoiled):
            self.machine.emit(event)


class Shard:
    """States whose bytes hash to ``place`` of ``places``.

    A state is numbered by its index here times ``places`` plus ``place``: so every state has one number everywhere.
    """

    def __init__(self, scope: Scope, *, place: int = 0, places: int = 1, judged: bool = True,
                 symmetry: bool = True) -> None:  # fmt: skip
        self.scope, self.place, self.places = scope, place, places
        self.encoding = Encoding(scope, symmetry)
        self.judge = Judge(scope, judged)
        self.index: dict[bytes, int] = {}
        self.states: list[bytes] = []
        self.parents = array("Q")
        self.moves = array("I")
        self.frontier: list[int] = []
        """States of this level that have not been looked at."""
        self.ahead: list[int] = []
        """States of the next level."""
        self.told: list[set[bytes]] = [set() for _ in range(places)]
        """By owner: states of theirs that they were told of. They need not hear of them again."""
        self.transitions = 0
        self.broken: list[Broken] = []
        self.taken: Counter[str] = Counter()

    def owner(self, state: bytes) -> int:
        return zlib.crc32(state) % self.places if self.places > 1 else 0

    def number(self, index: int) -> int:
        return index * self.places + self.place

    def start(self) -> None:
        """Begin at the empty cache, if it is this shard's."""
        first = self.encoding.encode(World.empty(self.scope.config))
        if self.owner(first) == self.place:
            self.arrive([(first, NOBODY, 0)])
        self.turn()

    def arrive(self, arrivals: Iterable[Arrival]) -> None:
        """States that others reached, or this shard itself: new ones are to be looked at in the next level."""
        index, states = self.index, self.states
        for state, parent, move in arrivals:
            if state not in index:
                index[state] = len(states)
                self.ahead.append(len(states))
                states.append(state)
                self.parents.append(parent)
                self.moves.append(move)

    def turn(self) -> None:
        """The level has been looked at: on to the next."""
        self.frontier, self.ahead = self.ahead, []

    def level(self, pause: Pause = lambda: None) -> list[list[Arrival]]:
        """Carry out everything that can happen in the states of the frontier. Answers, by owner, what was reached of
        others' states, each for the first time (nearly: what was told is forgotten now and then, to bound it).

        ``pause`` is called between two states. What it raises leaves the shard in order: the rest of the level is
        looked at when this is called again.
        """
        outbox: list[list[Arrival]] = [[] for _ in range(self.places)]
        place = 0
        try:
            for place, index in enumerate(self.frontier):
                if place & 63 == 0:
                    pause()
                self._look_at(index, outbox)
            place = len(self.frontier)
        finally:
            del self.frontier[:place]
        if self.places == 1:
            self.turn()
        for told in self.told:
            if len(told) > TOLD:
                told.clear()
        return outbox

    def _look_at(self, index: int, outbox: list[list[Arrival]]) -> None:
        encoding, scope, judge = self.encoding, self.scope, self.judge
        world = encoding.decode(self.states[index])
        number = self.number(index)
        moves = list(scope.possible(world))
        for place, move in enumerate(moves):
            # The last move may change the world itself.
            after = world if place == len(moves) - 1 else world.copy()
            broken = judge.run(after, move)
            self.transitions += 1
            self.taken[move.kind] += 1
            packed = pack(move)
            if broken:
                self.broken += [Broken(violation, number, packed) for violation in broken]
                continue  # what follows from a broken state proves nothing
            state = encoding.encode(after)
            owner = self.owner(state)
            if owner == self.place:
                if state not in self.index:
                    self.arrive([(state, number, packed)])
            elif state not in self.told[owner]:
                self.told[owner].add(state)
                outbox[owner].append((state, number, packed))

    def fits(self, state: bytes) -> bool:
        """Whether each request of a state fits the pool, alone in it."""
        return self._fits(self.encoding.decode(state).requests())

    def promises(self, state: bytes) -> bool:
        """Whether there are requests in a state, each of which fits."""
        requests = self.encoding.decode(state).requests()
        return bool(requests) and self._fits(requests)

    def _fits(self, requests: Sequence[Request]) -> bool:
        config = self.scope.config
        longest = [min(one.prompt + one.max_tokens, config.max_model_len) + config.speculative for one in requests]
        return all(peak_blocks(config, total) < config.num_blocks for total in longest)

    def step_from(self, state: bytes) -> Sequence[bytes]:
        """Where steps alone lead from a state, whatever the model says to drafts; empty where nobody is there."""
        world = self.encoding.decode(state)
        if not world.requests():
            return ()
        found = []
        for move in self.scope.possible(world):
            if move.kind == "step":
                after = world.copy()
                self.judge.run(after, move)
                found.append(self.encoding.encode(after))
        return found
