"""A counterexample in a terminal, as its page shows it: what broke, requests as rows, their tables as strips of slots.

A slot that broke has a heavy frame and a cross besides its colour, so that it is seen where there are none. One moment
is shown at a time; :func:`step_through` goes from one to the next.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from typing import Final

from rich import box
from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from kvproof.colours import wanted
from kvproof.models.stateful.film import BlockShot, Film, Frame
from kvproof.pages import entry_of, group_name, start
from kvproof.spec.config import Config
from kvproof.spec.finding import Violation
from kvproof.spec.scenario import Scenario
from kvproof.spec.view import NULL

HELP: Final = "Enter next, b back, v next violation, a number, q quit"
_WIDTH: Final = 100
_UNUSED: Final = BlockShot(0, (), "", -1, False)
_BAD, _HELD, _SOFT, _PROMISED = "bold red", "blue", "dim", "green"


def shown(scenario: Scenario, film: Film, asked: Violation | None) -> str:
    """The moment that the page opens with: where ``asked``, or else anything, breaks. Empty if there is no moment."""
    return moment(scenario, film, start(film, asked)) if film.frames else ""


def breaks(film: Film) -> bool:
    return any(frame.violations for frame in film.frames)


def moment(scenario: Scenario, film: Film, index: int) -> str:
    """Moment ``index`` of ``film``, in colours if the terminal wants them."""
    frame = film.frames[index]
    # A pipe gets a fixed width, so that what is stored does not depend on a window.
    width = shutil.get_terminal_size((_WIDTH, 24)).columns if wanted() else _WIDTH
    colours = wanted()
    # Nothing of it is for standard output, whose reader may be gone: of that the library makes an end of the process.
    out = Console(file=io.StringIO(), width=max(width, 40), highlight=False, force_terminal=colours,
                  color_system="standard" if colours else None)  # fmt: skip
    with out.capture() as captured:
        for part in _parts(scenario, frame, f"{film.dropped + index + 1} of {film.dropped + len(film.frames)}"):
            out.print(part)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def _parts(scenario: Scenario, frame: Frame, place: str) -> Iterator[RenderableType]:
    at = frame.action
    action = f"{at + 1}. {scenario.actions[at]}" if at < len(scenario.actions) else "everything finishes"
    yield Text.assemble((f"moment {place}: {frame.title}", "bold"), (f"  (action {action})", _SOFT))
    yield Text(f"ran {', '.join(frame.ran)}" if frame.ran else "nothing ran")
    if frame.waiting:
        yield Text(f"waiting {', '.join(frame.waiting)}")
    for broken in frame.violations:
        entry = entry_of(broken)
        yield Text(f"\N{BALLOT X} {broken.invariant} ({broken.cause})", _BAD)
        yield Padding(Text(broken.witness), (0, 0, 0, 2))
        if entry is not None:
            yield Padding(Text(f"what must hold: {entry.statement}", _SOFT), (0, 0, 0, 2))
    yield Text("\nrequests that hold blocks", "bold")
    known = {request.name: request for request in frame.requests}
    names = dict.fromkeys([*known, *(table.request for table in frame.tables)])
    for name in names:
        yield from _request(scenario.config, frame, name)
    if not names:
        yield Text("  none", _SOFT)
    yield Text("\nfree queue, taken from the left", "bold")
    queue = sorted((b for b, shot in frame.blocks.items() if shot.place >= 0), key=lambda b: frame.blocks[b].place)
    # Most of a free queue says nothing: blocks in a row that hold nothing and are fine are named in a line.
    yield Padding(_strip(list(_queue(frame, queue))), (0, 0, 0, 2)) if queue else Text("  empty", _SOFT)


def _request(config: Config, frame: Frame, name: str) -> Iterator[RenderableType]:
    request = next((one for one in frame.requests if one.name == name), None)
    bad = any(dict(violation.where).get("request") == name for violation in frame.violations)
    told = Text("  ").append(name, _BAD if bad else "bold")
    if request is not None:
        told.append(
            f" {request.status}, prompt {request.prompt}, {request.computed} of {request.known} tokens computed", _SOFT
        )
    yield told
    for table in frame.tables:
        if table.request != name:
            continue
        size = config.groups[table.group].block_size
        cells: list[RenderableType] = [
            _cell(frame, block, f"@{(slot + 1) * size}", wrong(frame, block, name, table.group, slot))
            for slot, block in enumerate(table.blocks)
        ]
        yield Padding(Text(group_name(config, table.group), _SOFT), (0, 0, 0, 4))
        yield Padding(_strip(cells), (0, 0, 0, 4))


def _strip(cells: list[RenderableType]) -> Columns:
    return Columns(cells, padding=(0, 1))


def _cell(frame: Frame, block: int, head: str, bad: bool) -> Panel:
    """One slot or free block: the position it ends at, its block, its keys, and what it holds."""
    shot = frame.blocks.get(block, _UNUSED)
    bad = bad or shot.mismatch
    name = "null" if block == NULL else f"block {block}"
    told = Text(" ".join(filter(None, [head, name])) + (" \N{BALLOT X}" if bad else ""), _BAD if bad else "")
    if block != NULL:
        if shot.references != 1 and head:
            told.append(f"\n{shot.references} references", _SOFT)
        for key in shot.keys:
            told.append(f"\nkey {key}", _PROMISED if shot.mismatch else "")
        if shot.content:
            told.append(f"\n{'but holds' if shot.mismatch else 'holds'} {shot.content}", _BAD if shot.mismatch else "")
    style = _BAD if bad else _SOFT if block == NULL or not shot.references else _HELD
    return _box(told, style, box.HEAVY if bad else box.SQUARE)


def _queue(frame: Frame, queue: list[int]) -> Iterator[RenderableType]:
    plain: list[int] = []
    for block in queue:
        shot = frame.blocks[block]
        bad = wrong(frame, block, "", -1, -1) or bool(shot.references)
        if shot.keys or shot.mismatch or bad:
            yield from _plain(plain)
            plain = []
            yield _cell(frame, block, "", bad)
        else:
            plain.append(block)
    yield from _plain(plain)


def _plain(blocks: list[int]) -> Iterator[RenderableType]:
    if blocks:
        several = f"blocks {', '.join(map(str, blocks))}" if len(blocks) > 1 else f"block {blocks[0]}"
        yield _box(Text(f"{several}\nno key"), _SOFT)


def _box(told: Text, style: str, lines: box.Box = box.SQUARE) -> Panel:
    return Panel(told, box=lines, border_style=style, expand=False, padding=(0, 1))


def wrong(frame: Frame, block: int, request: str, group: int, slot: int) -> bool:
    """Whether a violation of this moment is about this slot (in the free queue: this block)."""
    for violation in frame.violations:
        where = dict(violation.where)
        if "block" in where:
            if where["block"] == block != NULL:
                return True
        elif (where.get("slot"), where.get("group", group), where.get("request", request)) == (slot, group, request):
            return True
    return False


def step_through(
    scenario: Scenario, film: Film, asked: Violation | None, write: Callable[[str], None], ask: Callable[[str], str]
) -> None:
    """Show one moment after the other, as told: see :data:`HELP`. The end of the input ends it."""
    at, last = start(film, asked), len(film.frames) - 1
    while last >= 0:
        write(moment(scenario, film, at))
        try:
            answer = ask(f"{HELP}: ").strip().lower()
        except EOFError:
            write("\n")
            return
        if answer == "q":
            return
        if answer == "b":
            at = max(0, at - 1)
        elif answer == "v":
            rest = [*range(at + 1, last + 1), *range(at + 1)]
            at = next((i for i in rest if film.frames[i].violations), at)
        elif answer.isdecimal():
            at = max(0, min(last, int(answer[:9]) - film.dropped - 1))
        elif not answer or answer == "n":
            at = min(last, at + 1)
        else:
            write(f"{answer!r}? {HELP}\n")
