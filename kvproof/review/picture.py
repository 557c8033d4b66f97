"""An example's caches as rows of blocks: what is on each, and which of them the spoilt one has otherwise.

Of what a view knows only that is drawn which does not follow from the rest: that somebody was told of a key, where
somebody was not. So whatever was spoilt is in the picture, and the same is drawn of the sound case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvproof.spec.events import Lookup, Observation, Resume, Truncate
from kvproof.spec.finding import Violation
from kvproof.spec.tracer import length_of, show
from kvproof.spec.view import NULL, View

QUEUE_SHOWN = 6
"""So many blocks of the free queue are drawn, and behind them those that matter."""


@dataclass(frozen=True)
class Cell:
    """A slot of a table, a block of the free queue, or a count: what is said of it, whether it is the one that is
    wrong, and whether it ``differs`` from the sound case. ``block`` is −1 where there is none. ``note`` explains what a
    sound cache has there and a reader may take for a fault."""

    title: str
    lines: tuple[str, ...]
    kind: str
    block: int = -1
    wrong: bool = False
    differs: bool = False
    note: str = ""

    @property
    def plain(self) -> tuple[str, tuple[str, ...], str]:
        """What is drawn of it, without its marks."""
        return self.title, self.lines, self.kind

    @property
    def marked(self) -> bool:
        return self.wrong or self.differs


@dataclass(frozen=True)
class Strip:
    """Cells in a row: a table, or what a lookup returned, of one ``request`` and ``group``; or the free queue."""

    title: str
    cells: tuple[Cell, ...]
    note: str = ""
    request: str = ""
    group: int = -1

    @property
    def caption(self) -> str:
        """The notes of its cells, but for those that are marked: of these something else is to be said."""
        return " ".join(cell.note for cell in self.cells if cell.note and not cell.marked)


QUEUE = "free queue, from its front"
ELSEWHERE = "in no table and not in the free queue"
BOOKS = "what the cache says of itself"

Fact = tuple[list[str], bool]
"""What is said of a block, and whether that is worth saying: what follows from its keys is not."""

Where = Mapping[str, str | int]
Kinds = tuple[Callable[[View, int], Fact], ...]
Drawn = tuple[tuple[Strip, ...], tuple[Strip, ...]]


def draw(sound: Observation, broken: Observation, violation: Violation) -> Drawn:
    """The sound case whole, and of the broken one the strips that differ from it or have what is wrong, marked. Where
    none does, all of them: then it is the event that is wrong."""
    where = dict(violation.where)
    kinds = _telling(sound.view, broken.view)
    first, second = _strips(sound, kinds), _strips(broken, kinds)
    if _disagrees(sound.view) or _disagrees(broken.view):
        first, second = [*first, *_count(sound.view)], [*second, *_count(broken.view)]
    first, second = [*first, *_said(sound.view, broken.view)], [*second, *_said(broken.view, sound.view)]
    lost = _blocks(first) - _blocks(second)
    named = {int(where["block"])} - {NULL, -1} if "block" in where else set()
    second += _elsewhere(broken, kinds, (lost | named) - _blocks(second))
    second = [_marked(_with_gap(strip, where, broken), first, where, broken) for strip in second]
    matter = {cell.block for strip in second for cell in strip.cells if cell.marked and cell.block > NULL}
    first += _elsewhere(sound, kinds, (matter & named) - _blocks(first))
    kept = [strip for strip in second if any(cell.marked for cell in strip.cells) or strip not in first] or second
    return tuple(_cut(strip, matter) for strip in first), tuple(_cut(strip, matter) for strip in kept)


def _strips(observation: Observation, kinds: Kinds) -> list[Strip]:
    view = observation.view
    facts = _Facts(view, kinds)
    made = [_table(facts, title, name, group, blocks) for title, name, group, blocks in _returned(observation)]
    made += [_table(facts, name, name, group, table) for (name, group), table in view.tables().items()]
    return [*made, Strip(QUEUE, tuple(_cell(facts, block, "", -1) for block in view.free_queue()))]


def _returned(observation: Observation) -> Iterator[tuple[str, str, int, Sequence[int]]]:
    """The blocks that a call is about, by group: they are in no table yet."""
    event = observation.event
    results: dict[str, tuple[tuple[int, ...], ...]] = {}
    if isinstance(event, Lookup | Resume):
        results = {f"{event.request}'s hit": event.blocks}
    elif isinstance(event, Truncate):
        results = {f"{event.request}'s hit before the cut": event.before, "after it": event.after or ()}
    for title, groups in results.items():
        for group, blocks in enumerate(groups):
            yield title, event.request, group, blocks  # type: ignore[union-attr]


def _table(facts: _Facts, title: str, request: str, group: int, blocks: Sequence[int]) -> Strip:
    spec = facts.view.config.groups[group]
    cells = [
        dataclasses.replace(
            _cell(facts, block, f"@{(slot + 1) * spec.block_size}", group),
            note=_note(facts.view, request, group, slot, block),
        )
        for slot, block in enumerate(blocks)
    ]
    window = f", window {spec.window}" if spec.window else ""
    return Strip(f"{title}, group {group}: {spec.kind} {spec.block_size}{window}", tuple(cells), "", request, group)


def _elsewhere(observation: Observation, kinds: Kinds, blocks: Collection[int]) -> list[Strip]:
    facts = _Facts(observation.view, kinds)
    cells = tuple(_cell(facts, block, "", -1) for block in sorted(blocks))
    return [Strip(ELSEWHERE, cells)] if cells else []


def _blocks(strips: Iterable[Strip]) -> set[int]:
    return {cell.block for strip in strips for cell in strip.cells if cell.block > NULL}


# -- a block -----------------------------------------------------------------------------------------------------------


def _cell(facts: _Facts, block: int, title: str, group: int) -> Cell:
    view = facts.view
    counted = view.references(block)
    # In a table one is the usual number, and of the null block none: what goes without saying is not drawn.
    usual = 0 if block == NULL else 1 if group >= 0 else None
    lines = [f"{counted} reference{'s' * (counted != 1)}"] if counted != usual else []
    lines += [f"key {show(key.state)}" for key in view.keys(block)]
    if block == NULL:
        return Cell(f"{title} null".strip(), (*lines, *facts.of(block)), "null", block)
    lines += [*_held(view, block, group), *facts.of(block)]
    return Cell(f"{title} block {block}".strip(), tuple(lines), "held" if counted else "free", block)


def _held(view: View, block: int, group: int) -> list[str]:
    recurrent = view.mamba_content(block)
    if recurrent is not None and recurrent.temporal is not None:
        return [f"holds {show(recurrent.temporal)}"]
    attention = group >= 0 and view.config.groups[group].kind != "mamba"
    tokens = [state for state in (view.attention_content(block, group) if attention else None) or () if state]
    return [f"holds tokens {length_of(tokens[0])} to {length_of(tokens[-1])}"] if tokens else []


def _note(view: View, request: str, group: int, slot: int, block: int) -> str:
    """Of a key that ends inside its slot, and of a recurrent block that holds nothing: why that is as it should be."""
    size = view.config.groups[group].block_size
    starts, ends = slot * size, (slot + 1) * size
    if block == NULL:
        return ""
    for key in view.keys(block):
        if key.group == group and starts < length_of(key.state) < ends:
            inside = f"{show(key.state)} ends inside its slot, which ends after {ends} tokens"
            return f"Block {block} has a partial key: {inside}."
    content = view.mamba_content(block)
    if view.config.groups[group].kind != "mamba" or view.keys(block) or content is None or content.temporal is not None:
        return ""
    running = view.requests().get(request)
    draft = view.config.speculative and running is not None and starts >= running.computed
    return f"Block {block} is empty: {'it is for the state after a draft token' if draft else 'it is not written yet'}."


def _noted(view: View, block: int) -> Fact:
    keys = view.keys(block)
    return [f"noted as {key.tokens} tokens" for key in keys], any(key.tokens != length_of(key.state) for key in keys)


def _unwritten(view: View, block: int) -> Fact:
    return (["written in this very step"], True) if view.of_this_step(block) else ([], False)


def _loads(view: View, block: int) -> Fact:
    said = [f"a load for {request} writes to it" for request, blocks in view.arriving().items() if block in blocks]
    return said, bool(said)


def _told(view: View, block: int) -> Fact:
    told, keys = view.announced(block), {(key.group, key.state) for key in view.keys(block)}
    if told is None or not (told or keys):
        return [], False
    return [f"announced as {show(state)}" for _, state in sorted(told)] or ["never announced"], set(told) != keys


def _found(view: View, block: int) -> Fact:
    keys = {(key.group, key.state) for key in view.keys(block)}
    found = {key for key, blocks in view.lookup_map().items() if block in blocks}
    said = [f"found by {show(state)}" for _, state in sorted(found)] or ["found by no lookup"] * bool(keys)
    return said, found != keys


def _newest(view: View, block: int) -> Fact:
    said = [
        f"{request}'s newest state, after {tokens} tokens"
        for (request, _), (tokens, there) in view.tails().items()
        if there == block
    ]
    return said, bool(said)


def _holders(view: View, block: int) -> Fact:
    said = [f"counted for {holder.owner}" for holder in view.holders_of({block}) if holder.slot < 0]
    return said, bool(said)


_KINDS: Kinds = (_noted, _unwritten, _loads, _told, _found, _newest, _holders)
"""What a view knows of a block beside its count, keys and content."""


def _telling(*views: View) -> Kinds:
    """Those of :data:`_KINDS` that are worth drawing: they say something of a block that its keys don't."""
    return tuple(
        say for say in _KINDS if any(say(view, block)[1] for view in views for block in range(view.num_blocks))
    )


@dataclass(frozen=True)
class _Facts:
    view: View
    kinds: Kinds

    def of(self, block: int) -> tuple[str, ...]:
        return tuple(line for say in self.kinds for line in say(self.view, block)[0])


# -- what is no block's ------------------------------------------------------------------------------------------------


def _disagrees(view: View) -> bool:
    return view.free_count() != len(view.free_queue())


def _count(view: View) -> list[Strip]:
    lines = (f"{view.free_count()} by its count", f"{len(view.free_queue())} in its queue")
    return [Strip(BOOKS, (Cell("free blocks", lines, "free"),))]


def _said(view: View, other: View) -> list[Strip]:
    cells = []
    if view.queue_fault() != other.queue_fault():
        cells.append(Cell("links of the queue", (view.queue_fault() or "whole",), "free"))
    if list(view.bookkeeping()) != list(other.bookkeeping()):
        cells.append(Cell("records of requests", tuple(view.bookkeeping()) or ("none",), "free"))
    return [Strip(BOOKS, tuple(cells))] if cells else []


# -- marks -------------------------------------------------------------------------------------------------------------


def _with_gap(strip: Strip, where: Where, observation: Observation) -> Strip:
    """The strip with a cell for the slot that is wrong since there is none."""
    slot = int(where.get("slot", -1))
    here = (strip.request, strip.group) == (where.get("request"), where.get("group"))
    if not here or slot < len(strip.cells) or int(where.get("block", NULL)) > NULL:
        return strip
    size = observation.view.config.groups[strip.group].block_size
    gap = Cell(f"@{(slot + 1) * size} no block", (), "null")
    return dataclasses.replace(strip, cells=(*strip.cells, gap))


def _marked(strip: Strip, sound: Sequence[Strip], where: Where, observation: Observation) -> Strip:
    """The strip with the cells marked that the sound case has otherwise at that place, or not at all. A queue that lost
    or gained a block differs there and not behind it."""
    plain = {cell.plain for one in sound if one.title == strip.title for cell in one.cells}
    cells = []
    for slot, cell in enumerate(strip.cells):
        differs = cell.plain not in plain
        wrong = _is_wrong(strip, slot, cell, differs, where, observation)
        cells.append(dataclasses.replace(cell, differs=differs, wrong=wrong))
    return dataclasses.replace(strip, cells=tuple(cells))


def _is_wrong(strip: Strip, slot: int, cell: Cell, differs: bool, where: Where, observation: Observation) -> bool:
    block = where.get("block", -1)
    if block not in (NULL, -1):
        return cell.block == block
    if "slot" in where:
        recurrent = strip.group >= 0 and observation.view.config.groups[strip.group].kind == "mamba"
        group = strip.group == where["group"] if "group" in where else recurrent
        return group and (slot, strip.request) == (where["slot"], where.get("request", strip.request))
    # The null block stands in many tables: it is where it is not as it should be.
    return block == NULL and cell.block == NULL and differs


def _cut(strip: Strip, matter: Collection[int]) -> Strip:
    """The free queue cut to its front, and what matters behind it with its place in the queue."""
    if strip.title != QUEUE:
        return strip
    shown = [
        dataclasses.replace(cell, title=f"{cell.title}, place {place}") if place > QUEUE_SHOWN else cell
        for place, cell in enumerate(strip.cells, 1)
        if place <= QUEUE_SHOWN or cell.marked or cell.block in matter
    ]
    more = len(strip.cells) - len(shown)
    note = f"{len(strip.cells)} blocks{f', {more} of them not drawn' if more else ''}"
    return dataclasses.replace(strip, cells=tuple(shown), note=note)
