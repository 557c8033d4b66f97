"""The abstract machine for review: its actions with guards and effects, and what becomes of a request.

The diagram's arrows are not drawn by hand: small worlds are explored, and each change of a request's status that an
action brings about is an arrow.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from kvproof.models.explore.scopes import SCOPES
from kvproof.models.explore.shard import Shard
from kvproof.spec.machine.machine import Machine
from kvproof.spec.machine.world import ARRIVED, LOADING, RUNNING, WAITING, World

STATES_LOOKED_AT = 900
"""Of each world: enough for every change of status that it has (a test says so)."""
WORLDS = ("tiny", "store")
NAMES = {WAITING: "waiting", LOADING: "loading", ARRIVED: "arrived", RUNNING: "running"}
NOWHERE = "not there"
ACTIONS = ("submit", "step", "finish", "abort", "preempt", "evict", "reset")


@dataclass(frozen=True)
class Action:
    """An action of the machine: what it says of itself, when it may happen, and the source of its effect."""

    name: str
    does: str
    guard: str
    source: str


@dataclass(frozen=True)
class Arrow:
    """Requests were seen to go from one status to another by these actions."""

    before: str
    after: str
    actions: tuple[str, ...]


def actions() -> list[Action]:
    """Every action, in the order of :data:`ACTIONS`. What happens without a guard may happen at any time."""
    found = []
    for name in ACTIONS:
        method = getattr(Machine, name)
        said = " ".join((inspect.getdoc(method) or "").replace("``", "").split())
        guard = re.search(r"Guard: (.*?\.)(?: |$)", said)
        does = said.replace(guard.group(0), "").strip() if guard else said
        source = textwrap.dedent(inspect.getsource(method))
        found.append(Action(name, does, guard.group(1) if guard else "always", source))
    return found


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
