"""The pages of the site, written into a folder: plain HTML with a style sheet beside it, no scripts, no network."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvproof import findings
from kvproof.errors import UsageError
from kvproof.review import content, diff, machine, mirrors, told
from kvproof.review.diff import Difference
from kvproof.review.status import CHECKS, PLACES, RELEASES, Status
from kvproof.revision import revision
from kvproof.scenario_file import write_whole

STYLE = "style.css"
COLUMNS = (
    ("prove", ""),
    ("explore", findings.SPECIFICATION),
    ("fuzz, reference engine", findings.REFERENCE),
    *((f"fuzz, vLLM {release}", release) for release in RELEASES),
)
"""Of the overview: the checker, and the subject whose causes its cells lead to (none: a proof comes across nothing)."""
_WORST_FIRST = ("broken", "open", "known", "holds", "none")
"""Marks: of several words on one invariant the worst is shown."""


def build(out: Path, status: Status) -> dict[str, int]:
    """Write the site into ``out``, which is made if need be. Returns what it holds, in numbers; :func:`note` says in
    words what of it is old or missing.

    Raises :class:`UsageError` where it can't be written, and :class:`kvproof.errors.CheckerError` where something that
    it must say is missing.
    """
    entries = content.entries(status)
    made = pages(entries, status)
    for name, text in made.items():
        try:
            write_whole(out / name, text)
        except OSError as error:
            raise UsageError(f"can't write {out / name}: {error.strerror or error}") from error
    lines = [line for entry in entries for line in entry.lines]
    stale, not_run = sum(bool(line.stale) for line in lines), sum(content.NOT_RUN in line.verdict for line in lines)
    counts = {"pages": len(made) - 1, "invariants": len(entries), "results": len(status.runs), "stale": stale}
    return {**counts, "not_run": not_run}


def note(status: Status) -> str:
    """Which checks are stale or were not run, and what to do about it, in a line; empty where that is none."""
    missing = [check.name for check in CHECKS if check.name not in status.runs]
    missing += [PLACES] if status.misplaced() else []
    stale = [
        check.name
        for check in CHECKS
        if check.name not in missing and (status.stale(check.name) or status.lacking(check.name))
    ]
    parts = [
        f"{what}: {', '.join(names)}" for what, names in (("older than a rule", stale), ("not run", missing)) if names
    ]
    return f"stored results: {'; '.join(parts)}. To run these again: kvproof spec refresh" if parts else ""


def pages(entries: Sequence[content.Entry], status: Status) -> dict[str, str]:
    """Every file of the site by name."""
    families = content.families(entries)
    arrows = machine.arrows()
    common = {
        "families": list(families),
        "version": importlib.metadata.version("kvproof"),
        "revision": revision()[:9],
        "releases": RELEASES,
    }

    def page(template: str, title: str, **more: Any) -> str:
        return _templates().get_template(template).render(title=title, **common, **more)

    made = {
        STYLE: _templates().get_template(STYLE).render(),
        "index.html": page("index.html.jinja", "kvproof: the specification", by_family=families, status=status,
                           columns=COLUMNS),
        "rules.html": page("rules.html.jinja", "Rules", modules=content.rule_modules(status)),
        "machine.html": page(
            "machine.html.jinja", "The abstract machine", actions=machine.actions(), statuses=machine.statuses(arrows),
            diagram=Markup(machine.diagram(arrows)), mirrors=mirrors.of("machine", status.mirrors),
        ),
        "proofs.html": page("proofs.html.jinja", "Proofs", runs=content.claims(status), status=status),
        "glossary.html": page("glossary.html.jinja", "Glossary", terms=content.glossary()),
    }  # fmt: skip
    for family, members in families.items():
        made[f"{family.lower()}.html"] = page("family.html.jinja", family, family=family, entries=members)
    return made


def diff_page(made: Difference) -> str:
    """What differs, as one file with everything in it."""
    style = Markup(_templates().get_template(STYLE).render())
    return _templates().get_template("diff.html.jinja").render(made=made, style=style, told=diff)


@functools.cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("kvproof.review", "templates"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=lambda name: name is not None and name != STYLE,
    )
    environment.filters["cell"] = _cell
    environment.filters["marked"] = told.marked
    return environment


def _cell(entry: content.Entry, checker: str) -> tuple[str, str]:
    """What the overview says of one invariant and one checker: a mark, and its words for who points at it."""
    lines = [line for line in entry.lines if line.checker == checker or line.checker.startswith(f"{checker}: ")]
    if not lines:
        return "none", "nothing to prove: no rule of its own"
    worst = min(lines, key=lambda line: _WORST_FIRST.index(line.mark))
    mark = "stale" if any(line.colour == "stale" for line in lines) else worst.mark
    if mark == "holds" and any(line.premises for line in lines):
        return "premised", "\n".join(f"{line.checker.removeprefix('prove: ')}: {line.verdict}" for line in lines)
    return mark, f"{worst.verdict}: {worst.words}"
