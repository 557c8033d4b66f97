"""The abstract machine for review: its actions with guards and effects, and what becomes of a request.

The diagram's arrows are not drawn by hand: small worlds are explored, and each change of a request's status that an
action brings about is an arrow.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvproof.models.explore.scopes import SCOPES
from kvproof.models.explore.shard import Shard
from kvproof.review.told import marked
from kvproof.spec.machine.device import Device
from kvproof.spec.machine.machine import Machine
from kvproof.spec.machine.schedule import Schedule
from kvproof.spec.machine.world import ARRIVED, LOADING, RUNNING, WAITING, World

STATES_LOOKED_AT = 900
"""Of each world: enough for every change of status that it has."""
WORLDS = ("store", "acceptance")
"""Which have every change of status that any world has (a test says so)."""
NAMES = {WAITING: "waiting", LOADING: "loading", ARRIVED: "arrived", RUNNING: "running"}
NOWHERE = "not there"
STATUSES = {
    NOWHERE: "It has not been sent yet, or it has ended; it holds no block.",
    "waiting": "It holds no block. What a preempted one has computed it computes again.",
    "loading": "It waits, with blocks, for a load from a store.",
    "arrived": "Its load has come; it keeps its blocks until a step lets it run.",
    "running": "It has blocks, and computes tokens in each step that has room for it.",
}
"""What each means, in the order of a request's life."""
WHY = {
    (NOWHERE, "waiting", "submit"): "it is sent",
    ("waiting", "loading", "step"): "there is room for it, and a store brings what it lacks",
    ("waiting", "running", "step"): "there is room for it",
    ("waiting", NOWHERE, "step"): "there is room for it, and its first token is its last",
    ("waiting", NOWHERE, "abort"): "its client goes away",
    ("loading", "arrived", "step"): "the load has come",
    ("loading", "waiting", "step"): "the load has failed, and its blocks are let go",
    ("loading", NOWHERE, "abort"): "its client goes away; the load goes on, and keeps the blocks until it is over",
    ("arrived", "running", "step"): "there is room for it",
    ("arrived", NOWHERE, "abort"): "its client goes away",
    ("running", "waiting", "step"): "its blocks are needed, or a load that it ran with did not come",
    ("running", "waiting", "preempt"): "it is made to let go of its blocks",
    ("running", NOWHERE, "step"): "it has said its last token",
    ("running", NOWHERE, "abort"): "its client goes away",
}
"""What brings a change about, by what happens."""
PARTS: tuple[tuple[str, Callable[..., object]], ...] = (
    ("The scheduler goes through those that run, then through those that wait", Schedule.run),
    ("One that runs goes on, or another gives way to it", Schedule._advance),
    ("One that waits is let in, at the boundary where it resumes", Schedule._admit),
    ("Where it resumes: what is hit, and what a store brings on top", Schedule._resume_point),
    ("Where its chunk ends", Schedule._cut),
    ("Its blocks are taken, if they are there", Schedule._take),
    ("A load begins", Schedule._load),
    ("The device copies blocks, moves states and computes", Device.run),
    ("What a load brings is written", Device.load),
    ("What was sampled becomes known, and blocks are let go", Machine._take_in),
    ("A load is over", Machine._land),
)
"""Of a step: what it is made of, in words."""
ACTIONS = ("submit", "step", "finish", "abort", "preempt", "evict", "reset")


@dataclass(frozen=True)
class Action:
    """An action of the machine: what it says of itself, when it may happen, and the source of its effect. ``parts`` are
    what it is made of, in order: what happens, whose it is, and the source."""

    name: str
    does: str
    guard: str
    source: str
    parts: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class Arrow:
    """Requests were seen to go from one status to another by these actions."""

    before: str
    after: str
    actions: tuple[str, ...]


@dataclass(frozen=True)
class Status:
    """A status of a request: what it means, and where it leads: to which, by which action, and why."""

    name: str
    means: str
    ways: tuple[tuple[str, str, str], ...]


def statuses(arrows: Sequence[Arrow]) -> list[Status]:
    """Every status with the arrows that begin there. Raises ``KeyError`` for one of which nothing is said."""
    order = list(STATUSES)
    return [
        Status(
            name,
            means,
            tuple(
                (one.after, action, WHY[name, one.after, action])
                for one in sorted(arrows, key=lambda one: (one.after == NOWHERE, order.index(one.after)))
                if one.before == name
                for action in one.actions
            ),
        )
        for name, means in STATUSES.items()
    ]


def actions() -> list[Action]:
    """Every action, in the order of :data:`ACTIONS`. What happens without a guard may happen at any time."""
    found = []
    for name in ACTIONS:
        method = getattr(Machine, name)
        said = " ".join((inspect.getdoc(method) or "").split())
        guard = re.search(r"Guard: (.*?\.)(?: |$)", said)
        does = said.replace(guard.group(0), "").strip() if guard else said
        when = guard.group(1) if guard else "none: it may happen at any time."
        parts = [(told, part.__qualname__, _source(part)) for told, part in (PARTS if name == "step" else ())]
        found.append(Action(name, marked(does), marked(when), _source(method), tuple(parts)))
    return found


def _source(method: Callable[..., object]) -> str:
    """A method without what it says of itself, which stands above it."""
    text = textwrap.dedent(inspect.getsource(method))
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.FunctionDef)
    if ast.get_docstring(node) is None:
        return text
    said, lines = node.body[0], text.splitlines(keepends=True)
    return "".join([*lines[: said.lineno - 1], *lines[said.end_lineno :]])


def arrows() -> list[Arrow]:
    """What was seen to happen to requests in :data:`WORLDS`."""
    seen: dict[tuple[str, str], set[str]] = {}
    for name in WORLDS:
        shard = Shard(SCOPES[name], judged=False)
        shard.start()
        while shard.frontier and len(shard.states) < STATES_LOOKED_AT:
            shard.level()
        for state in shard.states[:STATES_LOOKED_AT]:
            _follow(shard, shard.encoding.decode(state), seen)
    return [Arrow(*pair, tuple(sorted(by, key=ACTIONS.index))) for pair, by in sorted(seen.items())]


def _follow(shard: Shard, world: World, seen: dict[tuple[str, str], set[str]]) -> None:
    for move in list(shard.scope.possible(world)):
        after = world.copy()
        shard.judge.run(after, move)
        before, now = _statuses(world), _statuses(after)
        for request in before.keys() | now.keys():
            pair = before.get(request, NOWHERE), now.get(request, NOWHERE)
            if pair[0] != pair[1]:
                seen.setdefault(pair, set()).add(move.kind)


def _statuses(world: World) -> dict[str, str]:
    return {request.name: NAMES[request.status] for request in world.requests()}


# -- drawn ----------------------------------------------------------------------------------------------------------

_PLACES = {NOWHERE: (340, 165), "waiting": (90, 40), "loading": (90, 290), "arrived": (590, 290), "running": (590, 40)}
_WIDTH, _HEIGHT = 120, 44
_SHIFT = 11
"""How far an arrow is from the line between the middles: less than half a box, so that it meets both."""

_Point = tuple[float, float]


def diagram(arrows: Sequence[Arrow]) -> str:
    """The arrows as an SVG picture with text for those who don't see it."""
    told = "; ".join(f"{one.before} to {one.after} by {', '.join(one.actions)}" for one in arrows)
    parts = [
        '<svg viewBox="0 0 680 330" role="img" class="diagram" aria-labelledby="statuses">',
        f'<title id="statuses">What becomes of a request: {told}</title>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" class="tip"/></marker></defs>',
    ]
    parts += [_arrow(one) for one in arrows]
    for name, (x, y) in _PLACES.items():
        parts.append(
            f'<rect x="{x - _WIDTH // 2}" y="{y - _HEIGHT // 2}" width="{_WIDTH}" height="{_HEIGHT}" rx="9"/>'
            f'<text x="{x}" y="{y + 5}" class="name">{name}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def _arrow(one: Arrow) -> str:
    """A little to the right of the straight line between the middles, so that there and back don't coincide; from where
    that leaves the one box to where it meets the other."""
    (x1, y1), (x2, y2) = _PLACES[one.before], _PLACES[one.after]
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    right_x, right_y = (y1 - y2) / length, (x2 - x1) / length
    aside = _SHIFT * right_x, _SHIFT * right_y
    start, end = _edge((x1, y1), aside, (x2 - x1, y2 - y1)), _edge((x2, y2), aside, (x1 - x2, y1 - y2))
    (ax, ay), (bx, by) = ((round(x, 1), round(y, 1)) for x, y in (start, end))
    tx, ty = round((ax + bx) / 2 + 14 * right_x), round((ay + by) / 2 + 14 * right_y) + 4
    anchor = "start" if right_x > 0.4 else "end" if right_x < -0.4 else "middle"
    label = ", ".join(one.actions)
    return (
        f'<line x1="{ax:g}" y1="{ay:g}" x2="{bx:g}" y2="{by:g}" marker-end="url(#tip)"/>'
        f'<text x="{tx}" y="{ty}" text-anchor="{anchor}" class="label">{label}</text>'
    )


def _edge(middle: _Point, aside: _Point, towards: _Point) -> _Point:
    """Where a line through a point ``aside`` of a box's middle, which is inside the box, leaves it."""
    reach = [
        (half - off if way > 0 else half + off) / abs(way)
        for half, off, way in zip((_WIDTH / 2, _HEIGHT / 2), aside, towards, strict=True)
        if way
    ]
    scale = min(reach)
    return middle[0] + aside[0] + scale * towards[0], middle[1] + aside[1] + scale * towards[1]
