"""Breadth first through every state of a scope, in one process or several.

Level by level: all states at one distance from the empty cache before any further away, so that whatever breaks is
reached by a shortest way. With several processes each looks after the states whose bytes hash to it; after every level
they tell each other what they reached.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvproof.models.explore import saved
from kvproof.models.explore.liveness import Livelock, livelocks
from kvproof.models.explore.scope import Move, Scope
from kvproof.models.explore.shard import NOBODY, Arrival, Broken, Pause, Shard, unpack
from kvproof.spec.finding import Violation
from kvproof.spec.machine.world import World
from kvproof.spec.scenario import Action, Scenario

Progress = Callable[[str], None]
SAVE_EVERY = 60.0
"""Seconds after which what is known is saved at the end of a level, where a file was named."""


@dataclass(frozen=True)
class Counterexample:
    """A violation, and the shortest way to it from the empty cache."""

    violation: Violation
    moves: tuple[Move, ...]
    scenario: Scenario


@dataclass
class Explored:
    """What an exploration did. ``complete``: nothing new appeared any more. Otherwise it was stopped at ``depth``.

    ``evaluations`` counts by invariant how often something was judged. ``widest`` is the largest level.
    """

    scope: Scope
    states: int = 0
    transitions: int = 0
    depth: int = 0
    widest: int = 0
    seconds: float = 0.0
    complete: bool = False
    evaluations: Counter[str] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)
    broken: list[Counterexample] = field(default_factory=list)
    livelocks: list[Livelock] = field(default_factory=list)
    cramped: int = 0
    """Ways round with a request that may need more blocks than there are."""
    promised: int = 0
    """States with requests each of which fits: those that liveness says something about."""
    live: bool = False
    """Whether it was shown that steps alone bring every request that fits to its end, from every state."""
    interrupted: bool = False
    unsaved: str = ""
    """Why what was visited is not in the file that was named; empty where it is, or nothing had to be."""

    def words(self) -> str:
        """What may be claimed."""
        if self.complete:
            return f"explored completely: {self.states} states, {self.depth} moves deep"
        return f"explored to depth {self.depth}: {self.states} states, not all there are"


def explore(
    scope: Scope,
    *,
    judged: bool = True,
    symmetry: bool = True,
    workers: int = 1,
    most: int = 5_000_000,
    stop_at_first: bool = True,
    liveness: bool = True,
    save: Path | None = None,
    progress: Progress = lambda line: None,
    pause: Pause = lambda: None,
) -> Explored:
    """Look at every state of ``scope``, up to ``most`` of them.

    ``judged``: the catalogue judges every move. ``stop_at_first``: end with the level in which something broke.
    ``save`` is a file in which what is known is kept from time to time and when the exploration is stopped, and from
    which it goes on (one process only). ``pause`` is called between two states, or two levels where there are several
    processes: a ``KeyboardInterrupt`` that it raises ends the exploration, and what was seen is told and saved. One
    that comes from anywhere else ends it as well, without saving. While liveness is looked at, either ends no more than
    that: nothing is claimed of it.

    Raises ``ValueError`` for a file that can't be gone on from, and ``RuntimeError`` when a process is lost.
    """
    result = Explored(scope)
    began = time.perf_counter()
    team: Alone | Team = Team(scope, judged, symmetry, workers) if workers > 1 else Alone(scope, judged, symmetry)
    try:
        if isinstance(team, Alone) and save is not None:
            result.depth = team.load(save)
        calm = _levels(team, result, most, stop_at_first, save, progress, pause)
        if calm or isinstance(team, Alone):
            _sum_up(team, result)
        if result.complete and liveness and not result.broken:
            _live(team, result, pause)
    finally:
        team.end()
        result.seconds = time.perf_counter() - began
    return result


def _live(team: Alone | Team, result: Explored, pause: Pause) -> None:
    try:
        shard, states = team.shard_for_questions(), team.all_states()
        for one in livelocks(shard, states, pause):
            if one.fits:
                result.livelocks.append(one)
            else:
                result.cramped += 1
        promised = 0
        for state in states:
            pause()
            promised += shard.promises(state)
    except KeyboardInterrupt:
        result.interrupted = True
        return
    result.promised = promised
    result.live = bool(promised) and not result.livelocks


def _levels(
    team: Alone | Team,
    result: Explored,
    most: int,
    stop_at_first: bool,
    save: Path | None,
    progress: Progress,
    pause: Pause,
) -> bool:
    """Level by level. False if it was interrupted amid something, so that nobody may be asked any more."""
    kept = time.perf_counter()
    paused = _Paused(pause)
    try:
        while True:
            paused()
            waiting, states, broken = team.counts()
            result.states, result.widest = states, max(result.widest, waiting)
            if not waiting:
                result.complete = not (broken and stop_at_first)
                break
            if states >= most or (broken and stop_at_first):
                break
            progress(f"{result.scope.name}: depth {result.depth}, {states} states, {waiting} to look at")
            team.level(paused)
            result.depth += 1
            if time.perf_counter() - kept > SAVE_EVERY:
                _keep(team, result, save, progress)
                kept = time.perf_counter()
    except KeyboardInterrupt:
        result.interrupted = True
        if not paused.raised:
            return False
    _keep(team, result, save, progress)
    return True


class _Paused:
    """Tells an interrupt between two states from one amid something."""

    def __init__(self, pause: Pause) -> None:
        self.pause = pause
        self.raised = False

    def __call__(self) -> None:
        try:
            self.pause()
        except KeyboardInterrupt:
            self.raised = True
            raise


def _keep(team: Alone | Team, result: Explored, save: Path | None, progress: Progress) -> None:
    """What broke is told and not kept: there is nothing to go on from. What can't be kept ends nothing."""
    if save is not None and isinstance(team, Alone) and not team.shard.broken:
        result.unsaved = ""
        try:
            team.save(save, result.depth)
        except OSError as error:
            result.unsaved = f"can't save what was visited in {save}: {error.strerror or error}: free some room there"
            progress(result.unsaved)


def _sum_up(team: Alone | Team, result: Explored) -> None:
    evaluations, taken, transitions, broken = team.account()
    result.evaluations, result.taken, result.transitions = evaluations, taken, transitions
    seen: set[tuple[str, str]] = set()
    for one in broken:
        if one.violation.identity not in seen:
            seen.add(one.violation.identity)
            moves = (*team.way_to(one.state), unpack(one.move))
            result.broken.append(Counterexample(one.violation, moves, as_scenario(result.scope, moves)))
    _, result.states, _ = team.counts()


class Alone:
    """One process, one shard."""

    def __init__(self, scope: Scope, judged: bool, symmetry: bool) -> None:
        self.shard = Shard(scope, judged=judged, symmetry=symmetry)
        self.shard.start()

    def level(self, pause: Pause) -> None:
        self.shard.level(pause)

    def counts(self) -> tuple[int, int, int]:
        return len(self.shard.frontier), len(self.shard.states), len(self.shard.broken)

    def account(self) -> tuple[Counter[str], Counter[str], int, list[Broken]]:
        return _account(self.shard)

    def way_to(self, number: int) -> Sequence[Move]:
        moves: list[Move] = []
        while self.shard.parents[number] != NOBODY:
            moves.append(unpack(self.shard.moves[number]))
            number = self.shard.parents[number]
        return moves[::-1]

    def all_states(self) -> Sequence[bytes]:
        return self.shard.states

    def shard_for_questions(self) -> Shard:
        shard = self.shard
        return Shard(shard.scope, judged=False, symmetry=shard.encoding.symmetry)

    def save(self, file: Path, depth: int) -> None:
        saved.save(file, self.shard, depth)

    def load(self, file: Path) -> int:
        return saved.load(file, self.shard)

    def end(self) -> None:
        pass


def _account(shard: Shard) -> tuple[Counter[str], Counter[str], int, list[Broken]]:
    monitor = shard.judge.monitor
    return (monitor.evaluations if monitor is not None else Counter(), shard.taken, shard.transitions, shard.broken)


@contextlib.contextmanager
def _all_there() -> Iterator[None]:
    """Raises ``RuntimeError`` where a process that is spoken to is no more."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise RuntimeError("a process of the exploration was killed: nothing it had seen is left") from error


class Team:
    """Several processes, a shard each. This one passes on what they reached."""

    def __init__(self, scope: Scope, judged: bool, symmetry: bool, workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self.scope, self.judged, self.symmetry = scope, judged, symmetry
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for place in range(workers):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            # A child must not keep what it inherits of this end: it would never see it closed.
            process = context.Process(
                target=_serve, args=(scope, judged, symmetry, place, workers, theirs, tuple(self.pipes)), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)

    def _ask(self, question: str, *arguments: Any) -> list[Any]:
        with _all_there():
            for pipe in self.pipes:
                pipe.send((question, arguments))
            return [pipe.recv() for pipe in self.pipes]

    def level(self, pause: Pause) -> None:
        outboxes = self._ask("level")
        with _all_there():
            for place, pipe in enumerate(self.pipes):
                pipe.send(("arrive", ([outbox[place] for outbox in outboxes],)))
            for pipe in self.pipes:
                pipe.recv()

    def counts(self) -> tuple[int, int, int]:
        answers = self._ask("counts")
        return sum(a[0] for a in answers), sum(a[1] for a in answers), sum(a[2] for a in answers)

    def account(self) -> tuple[Counter[str], Counter[str], int, list[Broken]]:
        evaluations: Counter[str] = Counter()
        taken: Counter[str] = Counter()
        transitions, broken = 0, []
        for theirs in self._ask("account"):
            evaluations += theirs[0]
            taken += theirs[1]
            transitions += theirs[2]
            broken += theirs[3]
        return evaluations, taken, transitions, broken

    def way_to(self, number: int) -> Sequence[Move]:
        moves: list[Move] = []
        while True:
            pipe = self.pipes[number % len(self.pipes)]
            with _all_there():
                pipe.send(("origin", (number // len(self.pipes),)))
                parent, move = pipe.recv()
            if parent == NOBODY:
                return moves[::-1]
            moves.append(unpack(move))
            number = parent

    def all_states(self) -> Sequence[bytes]:
        return [state for states in self._ask("states") for state in states]

    def shard_for_questions(self) -> Shard:
        return Shard(self.scope, judged=False, symmetry=self.symmetry)

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)


def _serve(
    scope: Scope,
    judged: bool,
    symmetry: bool,
    place: int,
    places: int,
    pipe: Connection,
    others: Sequence[Connection],
) -> None:
    """What one process of a team does: answer questions until nobody asks any more. Whoever asks is interrupted, and
    ends it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for other in others:
        other.close()
    shard = Shard(scope, place=place, places=places, judged=judged, symmetry=symmetry)
    shard.start()

    def level() -> list[bytes]:
        # Whoever asks passes on what it can't read: all the work is done in the processes that look at states.
        return [pickle.dumps(box, pickle.HIGHEST_PROTOCOL) for box in shard.level()]

    def arrive(boxes: Sequence[bytes]) -> None:
        for box in boxes:
            arrivals: list[Arrival] = pickle.loads(box)
            shard.arrive(arrivals)
        shard.turn()

    answers: Mapping[str, Callable[..., Any]] = {
        "level": level,
        "arrive": arrive,
        "counts": lambda: (len(shard.frontier), len(shard.states), len(shard.broken)),
        "account": lambda: _account(shard),
        "origin": lambda index: (shard.parents[index], shard.moves[index]),
        "states": lambda: shard.states,
    }
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            question, arguments = pipe.recv()
            pipe.send(answers[question](*arguments))


def as_scenario(scope: Scope, moves: Sequence[Move]) -> Scenario:
    """The same as a scenario, which replays on any subject.

    A prompt is told by the earliest request that shares the most with it; what the scope calls the same tokens are the
    same tokens there.
    """
    machine = scope.machine()
    world = World.empty(scope.config)
    machine.become(world)
    actions: list[Action] = []
    called: dict[str, str] = {}
    sequences: dict[str, list[int]] = {}
    for move in moves:
        name = ""
        if move.request >= 0:
            name = called[world.requests()[move.request].name]
        if move.kind == "submit":
            prompt, inner = scope.prompts[move.prompt], scope.free_name(world)
            wanted = scope.sequences[move.prompt][: prompt.length + 1]
            base, shared = "", 0
            for other, states in sequences.items():
                same = next((i for i, (a, b) in enumerate(zip(states, wanted, strict=False)) if a != b),
                            min(len(states), len(wanted))) - 1  # fmt: skip
                if same > shared:
                    base, shared = other, same
            name = f"r{len(sequences) + 1}"
            actions.append(Action("submit", name, base, shared, prompt.length, scope.outputs,
                                  external=prompt.store, missing=prompt.missing))  # fmt: skip
            called[inner] = name
        elif move.kind == "step":
            actions.append(Action("step", accept=move.accept))
        else:
            actions.append(Action(move.kind, name, times=1))  # type: ignore[arg-type]
        try:
            scope.carry_out(machine, move)
        except Exception:  # the last move may be the one that breaks the machine
            break
        for request in world.requests():
            outer = called[request.name]
            sequences[outer] = [int(state) for state in request.states]
    return Scenario(scope.config, tuple(actions), note=f"explored: scope {scope.name}")
