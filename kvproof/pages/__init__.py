"""A scenario as a page that one steps through: requests as rows, tables as strips, and the slot that broke in colour.

One HTML file with everything in it: it asks no network and needs no server. Without scripts it shows the timeline as
text; printed, it shows the moment that was on the screen.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvproof.invariants.catalogue import by_id
from kvproof.models.stateful.film import BlockShot, Film, Frame
from kvproof.scenario_file import replay_command
from kvproof.spec.config import Config
from kvproof.spec.finding import Violation
from kvproof.spec.scenario import Scenario

__all__ = ["counterexample", "entry_of", "group_name", "start"]


def counterexample(
    scenario: Scenario, film: Film, asked: Violation | None, subject: str, file: str = "", reasoning: str = ""
) -> str:
    """The page of ``film``, which was taken of ``scenario`` on ``subject``.

    ``asked`` is the violation that the page is about (``None``: whatever shows), ``file`` the scenario's file, for the
    command that shows it again, ``reasoning`` what is on record of it.
    """
    shown = asked or next((violation for frame in film.frames for violation in frame.violations), None)
    entry = entry_of(shown)
    return _templates().get_template("counterexample.html.jinja").render(
        title=f"{shown.invariant}: {shown.cause}" if shown else "A scenario, step by step",
        violation=shown,
        statement=entry.statement if entry else "",
        why=entry.why if entry else "",
        subject=subject,
        command=replay_command(file, subject) if file else "",
        note=scenario.note,
        reasoning=reasoning,
        setting=Scenario(scenario.config, ()).text().splitlines(),
        actions=[str(action) for action in scenario.actions],
        timeline=film.text,
        dropped=film.dropped,
        groups=[group_name(scenario.config, index) for index in range(len(scenario.config.groups))],
        data=_embedded(scenario, film, shown),
    )  # fmt: skip


def group_name(config: Config, index: int) -> str:
    """A group as a heading: its number, kind, block size and window."""
    group = config.groups[index]
    window = f", window {group.window}" if group.window else ""
    return f"group {index}: {group.kind} {group.block_size}{window}{', drafter' if group.drafter else ''}"


def entry_of(violation: Violation | None) -> Any:
    """The invariant that broke, as the catalogue has it; ``None`` if it doesn't."""
    try:
        return by_id(violation.invariant) if violation else None
    except KeyError:
        return None


@functools.cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("kvproof.pages", "templates"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=True,
    )


def _embedded(scenario: Scenario, film: Film, asked: Violation | None) -> Markup:
    """What the page's script reads, as JSON that can't end its own element."""
    data = {
        "blocks": [group.block_size for group in scenario.config.groups],
        "pool": scenario.config.num_blocks,
        "actions": len(scenario.actions),
        "frames": [_frame(frame) for frame in film.frames],
        "start": start(film, asked),
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return Markup(text)


def start(film: Film, asked: Violation | None) -> int:
    """The frame to open with: where what is asked about shows, else the first violation, else the beginning."""
    wanted = asked.identity if asked else None
    for index, frame in enumerate(film.frames):
        if any(wanted is None or violation.identity == wanted for violation in frame.violations):
            return index
    return 0


def _frame(frame: Frame) -> dict[str, Any]:
    return {
        "action": frame.action,
        "title": frame.title,
        "ran": frame.ran,
        "waiting": frame.waiting,
        "requests": [dataclasses.astuple(request) for request in frame.requests],
        "tables": [dataclasses.astuple(table) for table in frame.tables],
        "blocks": {block: _block(shot) for block, shot in frame.blocks.items() if shot != _UNUSED},
        "queue": sorted(
            (b for b, shot in frame.blocks.items() if shot.place >= 0), key=lambda b: frame.blocks[b].place
        ),
        "violations": [
            {"id": v.invariant, "cause": v.cause, "witness": v.witness, "where": dict(v.where)}
            for v in frame.violations
        ],
    }


_UNUSED = BlockShot(0, (), "", -1, False)


def _block(shot: BlockShot) -> list[Any]:
    return [shot.references, shot.keys, shot.content, shot.mismatch]
