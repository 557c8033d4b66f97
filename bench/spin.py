"""Small worlds visited whole by ``spin`` and by our explorer: are the states the same, and how fast is each?

    python bench/spin.py [inside crowded ...] [--out FILE]

The model in Promela (``models/promela/cache.pml``) is written by hand, a second opinion on the abstract machine. Both
sides visit every state of a world, blocks called by their names (no symmetry), and tell each in the same words; the two
sets are compared. Speeds are distinct states per second, from one run each on one core: a verifier compiled from the
model by ``gcc -O2``, not printing, against the explorer, judging nothing. Exit code 1: the two differ.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvproof.models.explore.scope import Scope
from kvproof.models.promela.projection import visited
from kvproof.models.promela.spin import SpinError, missing, visit
from kvproof.models.promela.worlds import WORLDS

SHOWN = 3


def measure(scope: Scope, lines: list[str]) -> bool:
    """Visit one world on both sides. True if nothing differs."""
    theirs, ours = visit(scope, timed=True), visited(scope)
    differ = theirs.states ^ ours.states
    verdict = f"{len(differ)} differ" if differ else "the same"
    if theirs.error:
        verdict = "an assertion failed"
    elif theirs.transitions != ours.transitions:
        verdict += f", but {theirs.transitions} moves on spin's side"
    counts = f"{theirs.stored:9}{ours.stored:9}{ours.transitions:9}"
    say(lines, f"{scope.name:12}{counts}{theirs.rate:11.0f}{ours.rate:11.0f}{theirs.rate / ours.rate:8.1f}  {verdict}")
    if theirs.error:
        say(lines, f"    {theirs.error}")
    for side, more in (("spin", theirs.states - ours.states), ("ours", ours.states - theirs.states)):
        for state in sorted(more, key=len)[:SHOWN]:
            say(lines, f"    {side} alone: {state}")
    return not differ and not theirs.error and theirs.transitions == ours.transitions


def say(lines: list[str], line: str) -> None:
    lines.append(line)
    print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", nargs="*", help=f"of {', '.join(WORLDS)} (default: all)")
    parser.add_argument("--out", type=Path, help="write the table there, too")
    options = parser.parse_args()
    strange = [name for name in options.world if name not in WORLDS]
    if strange:
        parser.error(f"there is no world {strange[0]!r}: use {', '.join(WORLDS)}")
    if options.out is not None and (options.out.is_dir() or not options.out.resolve().parent.is_dir()):
        parser.error(f"can't write the table to {options.out}: name a file in a folder that is there")
    if missing():
        parser.error(missing())
    lines: list[str] = []
    say(lines, f"{'':12}{'states of':>18}{'moves':>9}{'states/s of':>22}{'spin/':>8}")
    say(lines, f"{'world':12}{'spin':>9}{'ours':>9}{'':9}{'spin':>11}{'ours':>11}{'ours':>8}  sets of states")
    same, done = True, 0
    try:
        for name in options.world or WORLDS:
            same = measure(WORLDS[name], lines) and same
            done += 1
    except SpinError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted: {done} worlds were compared", file=sys.stderr)
        return 130
    say(lines, f"kvproof: bench spin worlds={done} {'same' if same else 'different'}")
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
