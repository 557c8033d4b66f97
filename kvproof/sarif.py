"""The report as SARIF 2.1.0, which code hosts show beside the source: one result per finding and refuted claim.

A finding's scenario is its code flow: one location for each action, at its line of the scenario's file. What is known
is told as a note and as ``unchanged``, so that a gate can be set on what is new.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from kvproof.invariants.catalogue import CATALOGUE
from kvproof.spec.scenario import Scenario

if TYPE_CHECKING:
    from kvproof.report import Report, Row

SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS: Final = {"fail": "error", "error": "warning", "undetermined": "warning"}
_NOWHERE: Final = "reports"
"""A result has to have a file for hosts to show it: where there is no scenario, the folder of reports stands for it."""


def sarif(report: Report) -> str:
    """The SARIF document. What holds is no result; what stayed undetermined is a warning."""
    rows = [row for row in report.rows if _is_told(row)]
    rules = [_rule(name) for name in dict.fromkeys(_rule_of(row) for row in rows)]
    run = {
        "tool": {
            "driver": {
                "name": "kvproof",
                "version": importlib.metadata.version("kvproof"),
                "rules": rules,
            }
        },
        "invocations": [{"executionSuccessful": not report.problem, "exitCode": report.exit_code}],
        "automationDetails": {"id": f"kvproof/{report.command}/{report.subject}".rstrip("/") + "/"},
        "results": [_result(report, row) for row in rows],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, ensure_ascii=False) + "\n"


def _is_told(row: Row) -> bool:
    if row.kind == "invariant" and row.outcome == "fail":
        return False  # the finding itself is told
    refuted = row.kind == "proof" and row.verdict.startswith("refuted") and not row.belongs_to
    return row.outcome in _LEVELS or row.kind == "finding" or (refuted and row.outcome == "info")


def _rule_of(row: Row) -> str:
    return row.id.partition(" ")[0] if row.kind == "finding" else row.id


def _rule(name: str) -> dict[str, Any]:
    entry = next((entry for entry in CATALOGUE if entry.id == name), None)
    if entry is None:
        return {"id": name, "shortDescription": {"text": name}}
    return {
        "id": name,
        "shortDescription": {"text": entry.statement},
        "fullDescription": {"text": f"{entry.statement} Otherwise: {entry.why}"},
        "help": {"text": f"Judged per {entry.scope}. Comes from: {', '.join(entry.provenance)}."},
    }


def _result(report: Report, row: Row) -> dict[str, Any]:
    subject = row.subject or report.subject
    file, scenario = str(row.data.get("file") or ""), _scenario(row.data.get("scenario"))
    text = ": ".join(filter(None, [row.id, row.verdict, row.detail]))
    result: dict[str, Any] = {
        "ruleId": _rule_of(row),
        "level": _LEVELS.get(row.outcome, "note"),
        "message": {"text": f"{subject}: {text}" if subject else text},
        "locations": [_location(file)],
        "partialFingerprints": {"kvproofIdentity/v1": f"{subject} {row.id}".strip()},
        "baselineState": "new" if row.outcome == "fail" and not row.verdict.startswith("earlier") else "unchanged",
    }
    if scenario is not None:
        lines = _action_lines(file)
        steps = [
            {"location": {**_location(file, lines.get(place, 1)), "message": {"text": str(action)}}}
            for place, action in enumerate(scenario.actions)
        ]
        if steps:
            steps[-1]["location"]["message"]["text"] += f": {row.data.get('witness') or row.detail}"
            result["codeFlows"] = [{"threadFlows": [{"locations": steps}]}]
    return result


def _scenario(data: object) -> Scenario | None:
    if not isinstance(data, Mapping):
        return None
    try:
        return Scenario.from_dict(dict(data))
    except (ValueError, KeyError, TypeError):
        return None


def _location(file: str, line: int = 1) -> dict[str, Any]:
    """A place in a file, relative to the current folder if it lies in there, as hosts want it."""
    path = os.path.relpath(file) if file and not os.path.relpath(file).startswith("..") else file or _NOWHERE
    uri = Path(path).as_uri() if Path(path).is_absolute() else quote(os.fsencode(Path(path).as_posix()))
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": line}}}


def _action_lines(file: str) -> dict[int, int]:
    """At which line of a scenario's file each action begins; empty where the file can't be read."""
    try:
        lines: Sequence[str] = Path(file).read_text(encoding="utf-8").splitlines() if file else ()
    except (OSError, ValueError):
        return {}
    begun, found = False, []
    for number, line in enumerate(lines, 1):
        begun = begun or line.strip().startswith('"actions"')
        if begun and line.strip().startswith('"kind"'):
            found.append(number)
    return dict(enumerate(found))
