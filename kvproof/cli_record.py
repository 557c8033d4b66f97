"""The wiring of ``kvproof record``: from a scenario file that names a finding to a record of a known one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvproof.errors import UsageError, require_file
from kvproof.findings import Status
from kvproof.options import write_file
from kvproof.streams import write


def record(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario file that names its finding.")],
    out: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="The record; must not be there yet. -: standard output."),
    ],
    releases: Annotated[
        list[str] | None,
        typer.Option(
            "--release",
            metavar="VERSION",
            help="A release that shows it, or a range as >=0.27,<0.28; may be given more than once (default: where it "
            "was found).",
        ),
    ] = None,
    status: Annotated[
        Status, typer.Option("--status", help="confirmed: you have read the code that does it.")
    ] = "unconfirmed",
    reasoning: Annotated[
        str, typer.Option("--reasoning", metavar="TEXT", help="What you read (default: words to be replaced).")
    ] = "",
    reference: Annotated[
        str, typer.Option("--reference", metavar="TEXT", help="Public numbers, as in: issue 43559, PR 51113.")
    ] = "",
) -> int:
    """Make a record of a known finding, so that runs list it instead of failing. It runs nothing."""
    from kvproof import recording

    if str(out) == "-":
        write(recording.text(recording.make(scenario, releases or [], status, reasoning, reference)))
        return 0
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} is there already: name a new file with --output")
    require_file(out, "the record")
    made = recording.make(scenario, releases or [], status, reasoning, reference)
    write_file(out, recording.text(made))
    named = f"{made.invariant} ({made.cause}) status={made.status} releases={','.join(made.releases)}"
    write(f"kvproof: record {named} file={out} exit=0\n")
    return 0
