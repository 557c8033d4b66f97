"""Each invariant by example: a small cache on which it is judged and holds, and the same with one thing wrong.

The caches are those by which the predicates are tested (:mod:`kvproof.review.cases`); whatever is said of them here is
computed by the predicates and read off the views.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvproof.invariants.catalogue import by_id
from kvproof.review.cases import CASES
from kvproof.spec.events import Observation
from kvproof.spec.finding import Violation
from kvproof.spec.tracer import State, length_of, show
from kvproof.spec.view import NULL, View

_SMALLEST_STATE = 1 << 32
"""No number of tokens or blocks is as large; every prefix but the empty one is larger."""


@dataclass(frozen=True)
class Cell:
    """A slot of a table, or a block of the free queue: what is said of it, whether it is the one that is wrong, and
    whether it ``differs`` from the sound case."""

    title: str
    lines: tuple[str, ...]
    kind: str
    wrong: bool = False
    differs: bool = False


@dataclass(frozen=True)
class Strip:
    """Cells in a row: a table of one request and group, or the free queue."""

    title: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Shown:
    """One observation: the event field by field, the cache, and what the predicate said (none: it holds).

    ``differing`` are the names of the fields that the sound case has otherwise.
    """

    event: str
    fields: tuple[tuple[str, str], ...]
    strips: tuple[Strip, ...]
    violation: Violation | None
    differing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Example:
    """A sound case, a broken one, and by how many wrong caches, and under which causes, the predicate is tested."""

    sound: Shown
    broken: Shown
    causes: tuple[str, ...]


def example(invariant: str) -> Example:
    """The worked example of an invariant. Raises :class:`KeyError` where there is none, and :class:`AssertionError`
    where the predicate does not say what it must of it."""
    case = next((case for case in CASES if case.id == invariant), None)
    if case is None:
        raise KeyError(f"{invariant} has no example: add one to kvproof.review.cases")
    predicate = by_id(invariant).predicate
    sound, broken = case.sound(), case.mutants[0].spoil()
    assert predicate(sound) == [] or predicate(sound) == (), f"{invariant}: its sound case is not judged and sound"
    verdict = predicate(broken)
    assert verdict, f"{invariant}: its broken case is not noticed"
    causes = tuple(dict.fromkeys(mutant.cause for mutant in case.mutants))
    before, after = _shown(sound, None), _shown(broken, verdict[0])
    differing = tuple(name for name, value in after.fields if (name, value) not in before.fields)
    strips = _changed(before.strips, after.strips)
    return Example(before, dataclasses.replace(after, strips=strips, differing=differing), causes)


def _shown(observation: Observation, violation: Violation | None) -> Shown:
    event = observation.event
    names = getattr(event, "_fields", None) or [field.name for field in dataclasses.fields(event)]  # type: ignore[arg-type]
    fields = tuple((name, told(getattr(event, name))) for name in names)
    return Shown(type(event).__name__, fields, _strips(observation.view, violation), violation)


def _changed(before: Sequence[Strip], after: Sequence[Strip]) -> tuple[Strip, ...]:
    """Only the strips that differ from the sound case, or have the wrong slot; all where none does."""
    marked = [_marked(strip, before) for strip in after]
    kept = tuple(strip for strip in marked if strip not in before or any(cell.wrong for cell in strip.cells))
    return kept or tuple(after)


def _marked(strip: Strip, before: Sequence[Strip]) -> Strip:
    """The strip with the cells marked that the sound case has otherwise at that place, or not at all. A queue that lost
    or gained a block differs there and not behind it."""
    sound = next((one.cells for one in before if one.title.partition(" (")[0] == strip.title.partition(" (")[0]), ())
    plain = [dataclasses.replace(cell, wrong=False) for cell in sound]
    cells = [
        dataclasses.replace(cell, differs=dataclasses.replace(cell, wrong=False) not in plain) for cell in strip.cells
    ]
    return Strip(strip.title, tuple(cells))


def _strips(view: View, violation: Violation | None) -> tuple[Strip, ...]:
    where = dict(violation.where) if violation is not None else {}
    strips = []
    for (name, group), table in view.tables().items():
        spec = view.config.groups[group]
        cells = [
            _cell(
                view,
                block,
                f"@{(slot + 1) * spec.block_size}",
                group,
                _is_wrong(where, block, name, group if "group" in where or spec.kind == "mamba" else -1, slot),
            )
            for slot, block in enumerate(table)
        ]
        window = f", window {spec.window}" if spec.window else ""
        strips.append(Strip(f"{name}, group {group}: {spec.kind} {spec.block_size}{window}", tuple(cells)))
    queue = [_cell(view, block, "", -1, _is_wrong(where, block, "", -1, -1)) for block in view.free_queue()[:6]]
    more = len(view.free_queue()) - len(queue)
    title = f"free queue, from its front{f' ({more} more)' if more > 0 else ''}"
    return (*strips, Strip(title, tuple(queue)))


def _is_wrong(where: Mapping[str, str | int], block: int, request: str, group: int, slot: int) -> bool:
    if "block" in where:
        return where["block"] == block and (block != NULL or where.get("slot", slot) == slot)
    return where.get("slot") == slot and where.get("group", group) == group and where.get("request", request) == request


def _cell(view: View, block: int, title: str, group: int, wrong: bool) -> Cell:
    if block == NULL:
        # It is never counted: a count is drawn where there is one all the same.
        counted = view.references(NULL)
        return Cell(f"{title} null".strip(), (f"{counted} references",) if counted else (), "null", wrong)
    lines = [f"{view.references(block)} references"] if view.references(block) != 1 else []
    lines += [f"key {show(key.state)}" for key in view.keys(block)]
    lines += _held(view, block, group)
    return Cell(f"{title} block {block}".strip(), tuple(lines), "held" if view.references(block) else "free", wrong)


def _held(view: View, block: int, group: int) -> list[str]:
    recurrent = view.mamba_content(block)
    if recurrent is not None and recurrent.temporal is not None:
        return [f"holds {show(recurrent.temporal)}"]
    attention = group >= 0 and view.config.groups[group].kind != "mamba"
    tokens = [state for state in (view.attention_content(block, group) if attention else None) or () if state]
    return [f"holds tokens {length_of(tokens[0])} to {length_of(tokens[-1])}"] if tokens else []


def told(value: Any) -> str:
    """A value of an event as people read it: prefixes by length and the last digits of their hash."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int):
        return show(State(value)) if value >= _SMALLEST_STATE else str(value)
    if isinstance(value, str):
        return value or "–"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = [f"{name} {told(getattr(value, name))}" for name in value._fields]
        return f"{type(value).__name__}({', '.join(parts)})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [f"{field.name} {told(getattr(value, field.name))}" for field in dataclasses.fields(value)]
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, Mapping):
        return ", ".join(f"{told(name)}: {told(item)}" for name, item in value.items()) or "none"
    if isinstance(value, (list, tuple, set, frozenset)):
        items = list(value)
        if len(items) > 8 and all(isinstance(item, int) and item >= _SMALLEST_STATE for item in items[1:]):
            return f"{len(items) - 1} tokens of one conversation"
        return "[" + ", ".join(map(told, items)) + "]" if items else "none"
    return str(value)
