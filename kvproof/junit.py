"""The report as JUnit XML, which CI servers read: one suite per kind of row and subject, one case per row."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvproof.report import Report, Row

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_TAGS: Final = {"fail": "failure", "undetermined": "error", "error": "error", "skip": "skipped"}


def junit(report: Report) -> str:
    """The XML document. An undetermined row is an error there, since JUnit knows nothing weaker than a pass."""
    root = ET.Element("testsuites", name=_clean(f"kvproof {report.command} {report.subject}".strip()))
    for kind, subject in dict.fromkeys((row.kind, row.subject) for row in report.rows):
        rows = [row for row in report.rows if (row.kind, row.subject) == (kind, subject)]
        tags = [_TAGS.get(row.outcome, "") for row in rows]
        suite = ET.SubElement(root, "testsuite", name=_clean(f"{kind} {subject}".strip()), tests=str(len(rows)))
        suite.set("failures", str(tags.count("failure")))
        suite.set("errors", str(tags.count("error")))
        suite.set("skipped", str(tags.count("skipped")))
        suite.set("time", f"{sum(row.seconds for row in rows):.3f}")
        for row, tag in zip(rows, tags, strict=True):
            _case(suite, report, row, tag)
    if report.problem:
        suite = ET.SubElement(root, "testsuite", name="environment", tests="1", failures="0", errors="1", skipped="0")
        case = ET.SubElement(suite, "testcase", name="environment", classname=f"kvproof.{report.command}")
        ET.SubElement(case, "error", message=_clean(report.problem))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ET.Element, report: Report, row: Row, tag: str) -> None:
    case = ET.SubElement(suite, "testcase", name=_clean(row.id), classname=f"kvproof.{report.command}.{row.kind}")
    case.set("time", f"{row.seconds:.3f}")
    body = "\n".join(filter(None, [row.statement, row.detail, row.text, row.pointer]))
    if tag:
        ET.SubElement(case, tag, message=_clean(f"{row.verdict}: {row.detail}")).text = _clean(body)
    else:
        ET.SubElement(case, "system-out").text = _clean(f"{row.verdict}\n{body}")


def _clean(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
