"""The matrix: releases by faults, as text and as Markdown, from stored results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvproof.errors import UsageError
from kvproof.scenario_file import write_whole
from kvproof.zoo.fault import Fault, ordered
from kvproof.zoo.results import Results

BEGIN: Final = "<!-- zoo matrix: kvproof zoo matrix --write FILE -->"
END: Final = "<!-- end of zoo matrix -->"
BEGIN_REST: Final = "<!-- rest of zoo: kvproof zoo matrix --write FILE -->"
END_REST: Final = "<!-- end of rest of zoo -->"

SHOWN: Final = "R"
SILENT: Final = "·"
OTHER: Final = "?"
LEGEND: Final = (
    f"**{SHOWN}** found by replay, **{SHOWN} 12 s** found by blind fuzzing, too (median seconds), "
    f"**{SHOWN} missed** not found blind, **{SILENT}** replayed and not shown, **-** can't be configured there, "
    f"**{OTHER}** another violation ended the run or a checker failed; empty: not run"
)


@dataclass(frozen=True)
class Line:
    """One fault: a cell for each release, and a word on the whole."""

    fault: Fault
    cells: tuple[str, ...]
    note: str

    def text(self) -> str:
        return "; ".join(filter(None, [self.fault.title, self.note]))


@dataclass(frozen=True)
class Matrix:
    """``left_out`` are faults without a cell: mutants that stand for them, or why they are not reached."""

    releases: tuple[str, ...]
    lines: tuple[Line, ...]
    mutants: tuple[Line, ...] = ()
    left_out: tuple[Line, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)

    def summary(self) -> str:
        """How many of how many, in one line."""
        c = self.counts
        return (
            f"{c['shown']} of {c['scenarios']} pair and open faults found by replay, {c['blind']} of {c['searched']} "
            f"that were searched for found by blind fuzzing; {c['killed']} of {c['mutants']} killed as mutants; "
            f"{c['left']} not reached"
        )


def matrix(faults: Sequence[Fault], results: Results) -> Matrix:
    """What the results say of the faults as they are now; what a fault was before it was changed is left out."""
    replayed = {
        (fault.id, one.release)
        for fault in faults
        for one in results.replayed.values()
        if (one.fault, one.digest) == (fault.id, fault.digest)
    }
    releases = tuple(ordered({release for _, release in replayed}))
    having = [fault for fault in faults if fault.reached]
    lines = tuple(
        Line(fault, tuple(_cell(fault, release, results) for release in releases), _note(fault, results))
        for fault in having
    )
    mutants = tuple(Line(f, (), _killed(f, results)) for f in faults if f.mutants and not f.reached)
    left_out = tuple(Line(f, (), f.not_reached) for f in faults if not f.reached and not f.mutants)
    searched = [fault for fault in having if results.searches(fault, fault.blind_release)]
    counts = {
        "scenarios": len(having),
        "shown": sum(_shown(fault, results) for fault in having),
        "searched": len(searched),
        "blind": sum(results.median(fault, fault.blind_release) is not None for fault in searched),
        "mutants": len(mutants),
        "killed": sum(line.note.startswith("killed") for line in mutants),
        "left": len(left_out),
    }
    return Matrix(releases, lines, mutants, left_out, counts)


def _cell(fault: Fault, release: str, results: Results) -> str:
    one = results.replayed.get((fault.id, release))
    replayed = ""
    if one is not None and one.digest == fault.digest:
        replayed = {"shown": SHOWN, "not shown": SILENT, "refused": "-"}.get(one.verdict, OTHER)
    searches = results.searches(fault, release)
    seconds = results.median(fault, release)
    blind = f"{seconds:.0f} s" if seconds is not None else "missed" if searches else ""
    return f"{replayed} {blind}".strip()


def _shown(fault: Fault, results: Results) -> bool:
    """Shown where it is wrong, and not shown where it is right, as far as it was run around the change."""
    told = [(fault.expects(r), results.replayed.get((fault.id, r))) for r in fault.around]
    return bool(told) and all(
        one is not None and one.digest == fault.digest and one.verdict == ("shown" if expected else "not shown")
        for expected, one in told
    )


def _note(fault: Fault, results: Results) -> str:
    if not any(one.fault == fault.id and one.digest == fault.digest for one in results.replayed.values()):
        return "not run"
    return "" if _shown(fault, results) else "not reproduced around the change"


def _killed(fault: Fault, results: Results) -> str:
    kills = [results.killed.get((fault.id, mutant)) for mutant in fault.mutants]
    names = ", ".join(fault.mutants)
    if any(kill is None or kill.digest != fault.digest for kill in kills):
        return f"not run: {names}"
    return f"killed: {names}" if all(kill is not None and kill.killed for kill in kills) else f"survives: {names}"


# -- as text -----------------------------------------------------------------------------------------------------------


def as_text(made: Matrix, width: int) -> str:
    """For a terminal ``width`` columns wide, or a pipe."""
    out = Console(width=width, highlight=False, no_color=True)
    with out.capture() as captured:
        out.print("kvproof zoo: releases by faults\n")
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for name in ("", "class", *(_short(r) for r in made.releases)):
            table.add_column(name, no_wrap=True)
        table.add_column("", overflow="fold", ratio=1)
        for line in made.lines:
            cells = (Text(cell.replace(" s", "")) for cell in line.cells)
            table.add_row(line.fault.id, line.fault.kind, *cells, Text(line.text()))
        out.print(table)
        for heading, lines in (("mutants", made.mutants), ("not reached", made.left_out)):
            if lines:
                out.print(f"\n{heading}")
                for line in lines:
                    out.print(Text(f"  {line.fault.id}  {line.fault.title}: {line.note}"))
        out.print(Text(f"\n{LEGEND.replace('**', '').replace('12 s', '12')}"))
    return "".join(line.rstrip() + "\n" for line in captured.get().splitlines())


def _short(release: str) -> str:
    return release.removeprefix("0.").removesuffix(".0")


# -- as Markdown -------------------------------------------------------------------------------------------------------


def as_markdown(made: Matrix) -> str:
    """For a page: the table alone."""
    rows = [["", "fault", *(_short(release) for release in made.releases)]]
    rows.append(["---"] * len(rows[0]))
    rows += [[line.fault.id, _words(line), *line.cells] for line in made.lines]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{made.summary()}.\n\n{table}\n\n{LEGEND}. Columns are releases of vLLM (0.).\n"


def rest_as_markdown(made: Matrix) -> str:
    """For a page: the faults without a row in the table: mutants, and what is not reached with the reasons."""
    parts = []
    if made.mutants:
        parts.append("Mutants of ours stand for what no release of this range had, or what costs speed only:")
        parts.append(_list(made.mutants))
    if made.left_out:
        parts += ["Not reached on the CPU, and why:", _list(made.left_out)]
    return "\n\n".join(parts) + "\n"


def _words(line: Line) -> str:
    still = " (open)" if line.fault.kind == "open" else ""
    return "; ".join(filter(None, [line.fault.title + still, line.note])).replace("|", r"\|")


def _list(lines: Iterable[Line]) -> str:
    return "\n".join(f"- {line.fault.id} {line.fault.title}: {line.note}" for line in lines)


def write_between(file: Path, made: Matrix) -> None:
    """Put the table, the rest, or both between their markers in ``file``.

    Raises :class:`UsageError` where neither pair of markers is there, or one of them is not there once each.
    """
    try:
        text = old = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"can't read {file}: {getattr(error, 'strerror', None) or error}") from error
    for begin, end, new in ((BEGIN, END, as_markdown(made)), (BEGIN_REST, END_REST, rest_as_markdown(made))):
        other = BEGIN_REST if begin == BEGIN else BEGIN
        if begin not in old and end not in old and (other in old or begin == BEGIN_REST):
            continue
        if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
            raise UsageError(
                f"{file} has no place for the matrix: put the lines {begin!r} and {end!r} into it, once each"
            )
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{new}{end}{rest.split(end)[1]}"
    try:
        write_whole(file, text)
    except OSError as error:
        raise UsageError(f"can't write {file}: {error.strerror or error}") from error
