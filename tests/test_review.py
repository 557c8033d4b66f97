"""The review: every invariant has every field, nothing is older than its rule, and every link leads somewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from kvproof import cli
from kvproof.errors import CheckerError, UsageError
from kvproof.invariants.catalogue import CATALOGUE, by_id
from kvproof.review import content, digests, site, status
from kvproof.review.grounds import GROUNDS
from kvproof.review.status import CHECKS, Said, Status, Word
from kvproof.spec.rules import chunk

sys.path.insert(0, str(Path(__file__).parent))
from reviewed import STORED, entry_of, said

sys.path.pop(0)

ROOT = Path(__file__).parents[1]


# -- what is stored ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_no_stored_result_is_missing_or_older_than_its_rule(check: status.Check) -> None:
    """Where this fails a rule was changed: run ``kvproof spec refresh``."""
    stored = status.load(STORED)
    old = [w.id for w in stored.runs[check.name].words if w.digest and w.digest != status.current(w)]
    assert not old
    assert not stored.stale(check.name)
    assert not stored.lacking(check.name)


def test_a_result_is_stale_once_its_rule_has_changed() -> None:
    entry = by_id("SLOT.chunk-end")
    now = digests.digest(entry.predicate)
    fresh = said("fuzz 0.33.0", Word("invariant", entry.id, "fuzzed, holds", "pass", digest=now))
    old = said("fuzz 0.33.0", Word("invariant", entry.id, "fuzzed, holds", "pass", digest="another"))
    assert not fresh.stale("fuzz 0.33.0")
    assert old.stale("fuzz 0.33.0")
    assert fresh.stale("prove"), "what was never run"
    (line,) = [one for one in content.lines(entry.id, old) if one.checker == "fuzz, vLLM 0.33.0"]
    assert line.stale
    assert line.colour == "stale"
    (recorded,) = [one for one in entry_of(entry.id, old).lines if one.checker == "fuzz, vLLM 0.33.0"]
    assert (recorded.stale, recorded.colour) == ("the rule has changed since", "known"), (
        "what is on record stands by itself"
    )
    assert "the rule has changed since" in site.pages(content.entries(old), old)["slot.html"]


def test_a_refutation_that_says_not_what_an_engine_showed_is_stale() -> None:
    """What it is known as hangs on that: :func:`kvproof.shipped.on_record`."""
    run, claim = "prove --on 0.26.0", "MAMBA.estimate-not-negative"

    def stored(verdict: str, name: str = claim, **data: object) -> Status:
        return said(run, Word("proof", name, verdict, "info", data={"scope": "", **data}))

    bare = stored("refuted (known: ADMIT.exact mamba-estimate-negative-and-below-taken)")
    assert bare.stale(run)
    (line,) = [one for one in entry_of("ADMIT.exact", bare).lines if one.checker == f"{run}: {claim}"]
    assert line.told.endswith("(stored without what a whole engine showed)")
    assert "did not show it" not in line.told, "which is not known"
    ((_, ((_, today),)),) = content.claims(bare)
    assert today.verdict == line.told
    assert not stored("refuted", shown=[]).stale(run)
    assert not stored("proved").stale(run)
    assert not stored("refuted", "SLOT.two-chunks").stale(run), "no engine is asked of a rule of ours"


def test_a_digest_covers_the_rules_that_are_asked_and_no_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {part.__qualname__ for part in digests.closure(by_id("SLOT.chunk-end").predicate)}
    assert {"may_end_at", "may_end", "keeps_to_block", "Position"} <= asked
    before = digests.digest(by_id("SLOT.chunk-end").predicate)
    right = digests._meaning
    monkeypatch.setattr(
        digests,
        "_meaning",
        lambda part: right(part).replace("<=", "<") if part is chunk.keeps_to_block else right(part),
    )
    assert digests.digest(by_id("SLOT.chunk-end").predicate) != before
    assert digests.meaning('def f():\n    """Says."""\n    return 1  # why\n') == digests.meaning("def f(): return 1")


def test_a_file_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    file.write_text("[1]")
    with pytest.raises(UsageError, match="refresh makes it anew"):
        status.load(file)
    with pytest.raises(UsageError, match="no check is called 'nothing'"):
        list(status.refresh(file, ["nothing"], False, print, lambda: None))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"outcome": "fine"}, "Invalid enum value 'fine'"),
        ({"data": {"live": "killed"}}, "live of mutant M is no such thing"),
        ({"kind": "run", "data": {"exercised": {"A.b": 1}}}, "states of run M is no such thing"),
    ],
)
def test_stored_words_that_can_not_be_shown_are_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    word = {"kind": "mutant", "id": "M", "verdict": "killed", "outcome": "pass", **change}
    run = {"name": "m", "command": "", "made": "", "revision": "", "line": "", "seconds": 1, "words": [word]}
    file = tmp_path / "status.json"
    file.write_text(json.dumps({"kvproof_status": 1, "runs": {"mutants": run}}))
    with pytest.raises(UsageError, match=f"{said}.*move it away"):
        status.load(file)


def test_results_of_a_newer_kvproof_are_left_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "status.json"
    file.write_text('{"kvproof_status": 99, "runs": {}}')
    assert cli.run(["spec", "refresh", "prove", "--status", str(file)]) == 2
    assert "written by a newer kvproof (version 99)" in capfd.readouterr().err
    assert "99" in file.read_text()


def test_two_at_once_refresh_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another refresh stores while a check of this one runs stays."""
    file = tmp_path / "status.json"

    def run(check: status.Check) -> Said:
        if check.name == "prove":
            list(status.refresh(file, ["explore"], False, str, lambda: None))
        return Said(check.name, check.command, "2026-01-01", "", "kvproof: …", 1.0, [])

    monkeypatch.setattr(status, "run", run)
    assert list(status.refresh(file, ["prove"], False, str, lambda: None)) == [("prove", True)]
    assert set(status.load(file).runs) == {"prove", "explore"}
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"], "no lock is left behind"


def test_what_can_not_be_written_is_refused_before_a_check_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status, "run", lambda check: pytest.fail(f"{check.name} was run"))
    (tmp_path / "file").touch()
    assert cli.run(["spec", "refresh", "prove", "--status", str(tmp_path / "file" / "status.json")]) == 2
    monkeypatch.chdir(ROOT)
    assert cli.run(["spec", "diff", "HEAD", "HEAD", "--html", str(tmp_path)]) == 2
    first, second = capfd.readouterr().err.splitlines()
    assert "can't write results" in first
    assert "it is a folder: name a file" in second


def test_a_check_is_run_and_stored(tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    check = status.Check("explore", ("explore", "tiny"))
    made = status.run(check)
    assert made.of("run", "scope tiny") is not None
    word = made.of("invariant", "REF.references")
    assert word is not None
    assert word.digest == digests.digest(by_id("REF.references").predicate)
    status.save(file, Status(1, {"explore": made}))
    assert status.load(file).runs["explore"] == made
    assert "scope tiny" in content._smallest("REF.references", status.load(file))
    with pytest.raises(CheckerError, match="gave no result"):
        status.run(status.Check("explore", ("explore", "no such scope")))


# -- the site ----------------------------------------------------------------------------------------------------------


def test_every_invariant_has_every_field(built_site: Path) -> None:
    entries = content.entries(status.load(STORED))
    assert [entry.id for entry in entries] == [entry.id for entry in CATALOGUE]
    for entry in entries:
        page = (built_site / f"{entry.id.partition('.')[0].lower()}.html").read_text(encoding="utf-8")
        assert f'id="{entry.anchor}"' in page
        for text in (entry.statement, entry.why):
            assert text.replace("'", "&#39;").replace(">", "&gt;") in page
        assert {line.checker for line in entry.lines} >= {"explore", "fuzz, reference engine", "fuzz, vLLM 0.33.0"}


def test_a_field_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_mutants", lambda *_: ())
    with pytest.raises(CheckerError, match=r"has no mutants"):
        content.entries(Status(1, {}))


def test_what_was_not_run_is_said_and_counted_and_no_result_of_its_own(tmp_path: Path) -> None:
    stored = status.load(STORED)
    stored.runs["explore"] = msgspec.structs.replace(
        stored.runs["explore"], words=[w for w in stored.runs["explore"].words if w.id != "REF.references"]
    )
    assert "not run yet" in content._smallest("REF.references", stored)
    assert site.build(tmp_path, stored)["not_run"] == 1
    assert stored.lacking("explore") == ["REF.references"]


def test_every_page_says_how_to_read_its_notation(built_site: Path) -> None:
    for file in built_site.glob("*.html"):
        assert "Reading the notation" in file.read_text(encoding="utf-8")
    assert {"Split", "g1, group 1"} <= content.glossary().keys()
    assert 'glossary.html">Glossary</a></p>' not in (built_site / "glossary.html").read_text(encoding="utf-8")
    assert 'glossary.html">Glossary</a></p>' in (built_site / "slot.html").read_text(encoding="utf-8")


def test_what_invariants_stand_on_is_claimed() -> None:
    from kvproof.models.smt import CLAIMS

    right = {claim.id for claim in CLAIMS if not claim.mutant_of}
    named = {claim for claims in GROUNDS.values() for claim in claims}
    assert named <= right
    assert {claim for claim in right - named if not claim.startswith("RADIX.")} == set()
    assert set(GROUNDS) <= {entry.id for entry in CATALOGUE}


def test_the_glossary_has_the_words_that_events_and_configurations_use() -> None:
    terms = content.glossary()
    words = {
        "convolution window",
        "MTP",
        "StepEnd",
        "Drained",
        "drafter",
        "junction state",
        "look-ahead keys",
        "watermark",
    }
    assert words <= terms.keys()
    assert all(meaning.endswith(".") for meaning in terms.values())
    order = list(terms)
    assert order[:2] == ["block", "pool"]
    for word in ("block", "table", "key", "prefix", "free queue"):
        assert order.index(word) < min(map(order.index, ("state@16#a7d4", "Split", "junction")))


def test_the_readme_leads_to_a_page_that_there_is(built_site: Path) -> None:
    found = re.findall(r"`site/(\w+\.html)#([\w-]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert found
    for page, anchor in found:
        assert f'<section id="{anchor}">' in (built_site / page).read_text(encoding="utf-8")


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a":
            self.hrefs.append(given.get("href") or "")
        elif given.get("src") or (tag == "link" and not (given.get("href") or "").startswith(("data:", "style.css"))):
            self.outside.append(tag)
        if given.get("id"):
            self.ids.append(str(given["id"]))


def test_no_link_leads_nowhere_and_nothing_is_loaded(built_site: Path) -> None:
    read = {}
    for file in built_site.glob("*.html"):
        read[file.name] = Links()
        read[file.name].feed(file.read_text(encoding="utf-8"))
    for name, page in read.items():
        assert not page.outside
        assert sorted(page.ids) == sorted(set(page.ids)), f"a name stands twice in {name}"
        for href in page.hrefs:
            if href.startswith("https://"):
                continue
            file, _, anchor = href.partition("#")
            assert (file or name) in read, f"{name} links to {href}"
            assert not anchor or anchor in read[file or name].ids, f"{name} links to {href}"


BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("name", ["index.html", "slot.html", "machine.html"])
def test_a_browser_shows_a_page_without_complaint(built_site: Path, tmp_path: Path, name: str) -> None:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
               f"--user-data-dir={tmp_path}", "--enable-logging=stderr", "--v=0", "--dump-dom"]  # fmt: skip
    page = (built_site / name).as_uri()
    done = subprocess.run([str(BROWSER), *options, page], capture_output=True, text=True, check=True)
    assert "kvproof" in done.stdout
    assert "CONSOLE" not in done.stderr


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_writes_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(cli.app, ["spec", "--out", str(tmp_path / "site")])
    assert done.exit_code == 0, done.output
    assert f"invariants={len(CATALOGUE)}" in done.output
    assert (tmp_path / "site" / "index.html").exists()


def test_the_command_says_which_results_are_old_or_missing_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "build", lambda *_: {"stale": 1})
    old = Word("invariant", "SLOT.chunk-end", "fuzzed, holds", "pass", digest="another")
    file = tmp_path / "status.json"
    status.save(file, said("fuzz 0.33.0", old))
    done = CliRunner().invoke(cli.app, ["spec", "--out", str(tmp_path / "site"), "--status", str(file)])
    note, last = done.output.splitlines()
    assert note.startswith("stored results: older than a rule: fuzz 0.33.0; not run: prove, explore, ")
    assert note.endswith(f"kvproof spec refresh --status {file}")
    assert last.startswith("kvproof: spec stale=1 ")
    stored = status.load(STORED)
    assert site.note(stored) == "" or any(stored.stale(check.name) or stored.lacking(check.name) for check in CHECKS)


def test_an_interrupted_refresh_tells_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(check: status.Check) -> Said:
        if check.name == "explore":
            raise KeyboardInterrupt
        return Said(check.name, check.command, "2026-01-01", "", "kvproof: …", 1.0, [])

    monkeypatch.setattr(status, "run", run)
    file = tmp_path / "status.json"
    assert cli.run(["spec", "refresh", "prove", "explore", "--status", str(file)]) == 130
    assert "run=1 failed=0" in capfd.readouterr().out
    assert set(status.load(file).runs) == {"prove"}
