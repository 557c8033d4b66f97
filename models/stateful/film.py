"""Filming a scenario: what a cache looks like after every step, and at every violation.

The frames are plain data: what a page shows, one after the other. A frame is a copy; the view that it was taken from
goes on changing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvproof.models.stateful.drive import Watcher, standard_watchers
from kvproof.models.stateful.replay import replay
from kvproof.spec.events import Crash, Drained, Event, Forward, Observation, Stall, StepEnd
from kvproof.spec.finding import Violation
from kvproof.spec.scenario import Scenario
from kvproof.spec.subject import Subject
from kvproof.spec.tracer import State, length_of, show
from kvproof.spec.view import NULL, View

__all__ = ["BlockShot", "Camera", "Film", "Frame", "RequestShot", "TableShot", "film", "request_shots", "table_shots"]

MOST_FRAMES: Final = 400
"""Of a longer run the last ones are kept: that is where it ends badly."""


@dataclass(frozen=True)
class BlockShot:
    """One block. ``keys`` and ``content`` are as people read them; ``place`` is where it stands in the free queue (0 is
    taken next, -1: not in it). ``mismatch``: a key whose content is due promises something else than it holds."""

    references: int
    keys: tuple[str, ...]
    content: str
    place: int
    mismatch: bool


@dataclass(frozen=True)
class TableShot:
    """One request's table in one group: block numbers by slot, 0 is the null block."""

    request: str
    group: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class RequestShot:
    """A request that holds blocks. ``computed`` and ``known`` are in tokens, the prompt included."""

    name: str
    status: str
    prompt: int
    known: int
    computed: int


@dataclass(frozen=True)
class Frame:
    """The cache at one moment. ``action`` is the index of the action under way (the number of actions: draining)."""

    action: int
    title: str
    ran: tuple[str, ...]
    waiting: tuple[str, ...]
    requests: tuple[RequestShot, ...]
    tables: tuple[TableShot, ...]
    blocks: Mapping[int, BlockShot]
    violations: tuple[Violation, ...]


@dataclass(frozen=True)
class Film:
    """All frames, oldest first. ``dropped``: so many came before them. ``text`` is the same run as a timeline."""

    frames: tuple[Frame, ...]
    dropped: int
    text: str


def film(subject: Subject, scenario: Scenario, made: Callable[[Watcher], Camera] | None = None) -> Film:
    """Run ``scenario`` on ``subject`` and take a frame after every step and at every violation. ``made`` makes the
    camera that is wanted, if it is not a plain one.

    Raises :class:`kvproof.spec.config.ConfigError` where the subject can't run the configuration.
    """
    camera = (made or Camera)(standard_watchers(subject)(frozenset(), False))
    played = replay(subject, scenario, watchers=lambda known, stops: camera, begins=camera.turn)
    return Film(tuple(camera.frames), camera.dropped, played.text)


class Camera:
    """A judge that takes a picture when it has judged. Implements :class:`kvproof.models.stateful.drive.Watcher`.

    :meth:`shot` is what is in a picture: one that shows more extends it.
    """

    def __init__(self, judge: Watcher) -> None:
        self.judge = judge
        self.action = 0
        self.frames: deque[Frame] = deque(maxlen=MOST_FRAMES)
        self.dropped = 0
        self._told = 0
        self._ran: list[str] = []

    @property
    def evaluations(self) -> Mapping[str, int]:
        return self.judge.evaluations

    @property
    def violations(self) -> Sequence[Violation]:
        return self.judge.violations

    def turn(self, action: int) -> None:
        """Another action begins."""
        self.action = action

    def __call__(self, observation: Observation) -> None:
        event = observation.event
        if isinstance(event, Forward):
            self._ran.append(f"{event.request} [{event.start}, {event.start + event.tokens})")
        try:
            self.judge(observation)
        finally:
            new = tuple(self.judge.violations[self._told :])
            self._told += len(new)
            if new or isinstance(event, StepEnd):
                self.dropped += len(self.frames) == MOST_FRAMES
                self.frames.append(self.shot(event, observation.view, new))
            if isinstance(event, StepEnd):
                self._ran = []

    def shot(self, event: Event, view: View, violations: tuple[Violation, ...]) -> Frame:
        """The cache after ``event``, which is what broke where there are ``violations``."""
        waiting = event.waiting if isinstance(event, StepEnd) else ()
        return Frame(
            self.action, _title(event), tuple(self._ran), waiting, request_shots(view), table_shots(view),
            _blocks(view), violations,
        )  # fmt: skip


def _title(event: Event) -> str:
    match event:
        case StepEnd():
            return f"step {event.index}"
        case Crash():
            return f"{f'{event.call} fails' if event.call else 'crash'} in {event.location}"
        case Stall():
            return f"stall of {event.request}"
        case Drained():
            return "everything has finished"
        case _:
            name = getattr(event, "request", "")
            return f"{type(event).__name__.lower()}{f' of {name}' if name else ''}"


def request_shots(view: View) -> tuple[RequestShot, ...]:
    """Every request that runs or holds blocks."""
    return tuple(
        RequestShot(name, request.status, request.prompt, len(request.states) - 1, request.computed)
        for name, request in view.requests().items()
    )


def table_shots(view: View) -> tuple[TableShot, ...]:
    """Every table that has blocks, by request and group."""
    tables = sorted(view.tables().items())
    return tuple(TableShot(name, group, tuple(blocks)) for (name, group), blocks in tables if blocks)


def _blocks(view: View) -> dict[int, BlockShot]:
    """Every block that anybody holds or can find, and the free ones with their places."""
    places = {block: place for place, block in enumerate(view.free_queue())}
    owners = {block: group for (_, group), blocks in view.tables().items() for block in blocks}
    shots = {}
    for block in range(1, view.num_blocks):
        keys = view.keys(block)
        group = keys[0].group if keys else owners.get(block, -1)
        content, found = _content(view, block, group)
        mismatch = bool(keys) and not view.pending(block) and found is not None and _differs(view, block, found)
        shots[block] = BlockShot(
            view.references(block), tuple(f"g{key.group} {show(key.state)}" for key in keys), content,
            places.get(block, -1), mismatch,
        )  # fmt: skip
    return shots


def _content(view: View, block: int, group: int) -> tuple[str, State | None]:
    """What lies in the block, in words, and (recurrent groups) as a state."""
    if group < 0 or block == NULL:
        return "", None
    if view.config.groups[group].kind == "mamba":
        held = view.mamba_content(block)
        return (show(held.temporal), held.temporal) if held is not None else ("", None)
    tokens = view.attention_content(block, group)
    if tokens is None:
        return "", None
    written = [state for state in tokens if state is not None]
    if not written:
        return "nothing", None
    return f"tokens {length_of(written[0])}-{length_of(written[-1])}", None


def _differs(view: View, block: int, found: State) -> bool:
    recurrent = [key for key in view.keys(block) if view.config.groups[key.group].kind == "mamba"]
    return bool(recurrent) and all(key.state != found for key in recurrent)
