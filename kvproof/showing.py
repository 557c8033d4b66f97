"""What ``replay`` shows besides its timeline: a moment of the cache, or all of them, one after the other."""

from __future__ import annotations

import sys
import textwrap
from typing import Final

from kvproof import paging
from kvproof.replaying import Replayed
from kvproof.streams import write

_WIDTH: Final = 100


def picture(replayed: Replayed, show: bool | None, step: bool) -> str:
    """The moment at which it breaks, where that is wanted (``None``: on a terminal, if anything breaks).

    What a record says of it comes first. With ``step`` the moments are gone through here and now; an interrupt ends
    the command.
    """
    if not step and show is not True and (show is False or not sys.stdout.isatty()):
        return ""
    from kvproof import moments

    reasoning = replayed.loaded.reasoning
    told = f"{textwrap.fill(f'on record: {reasoning}', _WIDTH)}\n\n" if reasoning else ""

    scenario = replayed.loaded.scenario
    asked = replayed.loaded.finding.violation() if replayed.loaded.finding else None
    film = paging.take(replayed.subject, replayed.loaded)
    if step:
        write(told)
        moments.step_through(scenario, film, asked, write, _ask)
        return ""
    return told + moments.shown(scenario, film, asked) if show or moments.breaks(film) else ""


def _ask(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    write(prompt)  # whose reader may be gone, which is no error
    return input("")
