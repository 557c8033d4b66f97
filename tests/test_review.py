"""The review: every invariant has every field, nothing is older than its rule, and no change is spurious."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from typer.testing import CliRunner

from kvproof import cli, findings
from kvproof.errors import CheckerError, UsageError
from kvproof.invariants.catalogue import CATALOGUE, by_id
from kvproof.review import causes, content, diff, digests, machine, site, sources, status
from kvproof.review.grounds import GROUNDS
from kvproof.review.status import CHECKS, Said, Status, Word
from kvproof.spec.rules import chunk

ROOT = Path(__file__).parents[1]
STORED = status.stored_file()


def said(name: str, *words: Word) -> Status:
    return Status(1, {name: Said(name, f"kvproof {name}", "2026-01-01", "0" * 40, "kvproof: …", 1.0, list(words))})


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
    (line,) = [one for one in content._lines(entry.id, old) if one.checker == "fuzz, vLLM 0.33.0"]
    assert line.stale
    assert line.colour == "stale"
    (recorded,) = [one for one in _entry(entry.id, old).lines if one.checker == "fuzz, vLLM 0.33.0"]
    assert (recorded.stale, recorded.colour) == (True, "known"), "what is on record stands by itself"
    assert "the rule has changed since" in site.pages(content.entries(old), old)["slot.html"]


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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    counts = site.build(out, status.load(STORED))
    assert counts["invariants"] == len(CATALOGUE)
    return out


def test_every_invariant_has_every_field(made: Path) -> None:
    entries = content.entries(status.load(STORED))
    assert [entry.id for entry in entries] == [entry.id for entry in CATALOGUE]
    for entry in entries:
        page = (made / f"{entry.id.partition('.')[0].lower()}.html").read_text(encoding="utf-8")
        assert f'id="{entry.anchor}"' in page
        for text in (entry.statement, entry.why):
            assert text.replace("'", "&#39;").replace(">", "&gt;") in page
        assert {line.checker for line in entry.lines} >= {"explore", "fuzz, reference engine", "fuzz, vLLM 0.33.0"}


def test_a_field_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_mutants", lambda *_: ())
    with pytest.raises(CheckerError, match=r"has no mutants"):
        content.entries(Status(1, {}))


def test_a_broken_cell_leads_to_its_causes_and_says_which_are_on_record_today() -> None:
    known = next(one for one in causes.records() if one.source.scenario and one.releases[0].isdigit())
    name, release = known.source.invariant, known.releases.split(", ")[0]
    words = [Word("invariant", name, "broken", "fail"), Word("finding", f"{name} {known.cause}", "new", "fail", "seen")]
    recorded_since = said(f"fuzz {release}", *words)
    (line,) = [one for one in _entry(name, recorded_since).lines if one.checker == f"fuzz, vLLM {release}"]
    assert (line.mark, line.verdict) == ("known", "broken (known)")
    new = said(f"fuzz {release}", *words, Word("finding", f"{name} unheard-of", "new", "fail", "block 3 is odd"))
    entry = _entry(name, new)
    (line,) = [one for one in entry.lines if one.checker == f"fuzz, vLLM {release}"]
    assert (line.mark, line.verdict) == ("broken", "broken")
    assert "2 causes seen, 1 not on record" in line.words
    files = site.pages(content.entries(new), new)
    page = files[f"{name.partition('.')[0].lower()}.html"]
    assert f"kvproof replay findings/{known.file} --on vllm=={release}" in page
    assert f'id="{known.anchor}"' in page
    assert "unheard-of</b>" in page
    assert "block 3 is odd" in page
    assert f'#{entry.causes_on(release)}">✗!</a>' in files["index.html"]
    # What is gone, or was not seen, is no cause that was seen.
    old = said(f"fuzz {release}", words[0], Word("finding", f"{name} old", "gone: it is", "info"))
    assert all(cause.missed for on in _entry(name, old).seen for cause in on.causes)
    assert "old" not in {cause.name for on in _entry(name, old).seen for cause in on.causes}


def _silent(stored: Status) -> Status:
    """The same runs, had no search of a release come across anything."""
    runs = dict(stored.runs)
    for release in status.RELEASES:
        run = runs[f"fuzz {release}"]
        names = [word.id for word in run.words if word.kind == "invariant"]
        words = [Word("invariant", name, "fuzzed, holds", "pass", "12 times") for name in names]
        runs[f"fuzz {release}"] = msgspec.structs.replace(run, words=words)
    return Status(1, runs)


@pytest.mark.parametrize("search", ["as it is stored", "that came across nothing", "that was never run"])
def test_every_cell_of_a_release_says_what_is_on_record_for_it(search: str) -> None:
    stored = status.load(STORED)
    silent = {"that came across nothing": _silent(stored), "that was never run": Status(1, {})}
    shown = silent.get(search, stored)
    entries = content.entries(shown)
    files = site.pages(entries, shown)
    records = [(one, release) for one in causes.records() for release in status.RELEASES
               if findings.known_for([one.source], release).records]  # fmt: skip
    broken = {(one.source.invariant, release) for one, release in records}
    assert len(broken) > 50
    cells = _cells(files["index.html"])
    for entry in entries:
        page = files[f"{entry.id.partition('.')[0].lower()}.html"]
        for release in status.RELEASES:
            mark, words, href = cells[entry.id, release]
            if (entry.id, release) in broken:
                assert mark in ("✗", "✗!"), f"{entry.id} is on record as broken on {release}"
                assert href.endswith(f"#{entry.causes_on(release)}")
                assert f'id="{entry.causes_on(release)}"' in page
            elif search != "as it is stored":
                assert mark not in ("✗", "✗!"), f"{entry.id} is on no record for {release}"
            if (entry.id, release) in broken and search != "as it is stored":
                told = "did not come across it" if "nothing" in search else "no search is stored"
                assert words.startswith("broken (on record")
                assert told in words
                (line,) = [line for line in entry.lines if line.checker == f"fuzz, vLLM {release}"]
                assert (line.mark, told in line.words) == ("known", True)
    listed = {
        (entry.id, on.subject, cause.name, cause.record.file)
        for entry in entries for on in entry.seen for cause in on.causes if cause.record is not None
    }  # fmt: skip
    for one, release in records:
        named = {file for name, on, cause, file in listed if (name, on, cause) == (*_of(one, release), one.cause)}
        assert named, f"{one.file} is not among what breaks {one.source.invariant} on {release}"


def _of(one: causes.Record, release: str) -> tuple[str, str]:
    return one.source.invariant, release


def _cells(index: str) -> dict[tuple[str, str], tuple[str, str, str]]:
    """Mark, words and link of each cell of the overview that is about a release."""
    found = {}
    for row in re.findall(r"<tr><td><a href.*?</tr>", index, re.DOTALL):
        name = re.search(r">([A-Z]+\.[\w-]+)</a>", row)
        assert name is not None
        ticks = re.findall(r'<td class="tick \w+" title="([^"]*)">(?:<a href="([^"]*)">)?([^<]*)', row)
        for (_, subject), (words, href, mark) in zip(site.COLUMNS, ticks, strict=True):
            if subject in status.RELEASES:
                found[name[1], subject] = (mark, words, href)
    return found


def test_what_a_search_shows_gone_is_told_as_that() -> None:
    known = next(one for one in causes.records() if one.releases.startswith("0.26.0"))
    name = known.source.invariant
    gone = Word("finding", f"{name} {known.cause}", "gone: its recorded scenario no longer shows it", "info")
    (on,) = [on for on in _entry(name, said("fuzz 0.26.0", gone)).seen if on.subject == "0.26.0"]
    (cause,) = [cause for cause in on.causes if cause.name == known.cause]
    assert cause.missed.endswith("ran the scenario that was recorded then, which did not show it")


def test_what_is_proved_under_premises_says_so(made: Path) -> None:
    stored = status.load(STORED)
    entry = _entry("SLOT.key-content", stored)
    (line,) = [one for one in entry.lines if one.checker == "prove: SLOT.two-chunks"]
    assert line.verdict == f"proved under {line.premises} premises"
    assert "no junction; no checkpoint exports" in line.words
    index = (made / "index.html").read_text(encoding="utf-8")
    assert f'<a href="slot.html#{entry.said}">✓ if</a>' in index
    # And so does every other claim that has any, here and on the page of proofs; one that has none does not.
    for entry in content.entries(stored):
        for line in entry.lines:
            if line.verdict.startswith(("proved", "bounded")):
                assert (" under " in line.verdict) == ("premises: " in line.words)
                assert (" under " in line.verdict) == bool(line.premises)
    told = {(run, word.id): (word, today) for run, words in content.claims(stored) for word, today in words}
    for word, today in told.values():
        if word.verdict in ("proved", "bounded"):
            assert (" under " in today.verdict) == bool(word.data["premises"])
    assert told["prove", "RADIX.sum"][1].verdict == "proved"


def test_the_overview_says_why_it_is_in_its_order(made: Path) -> None:
    index = (made / "index.html").read_text(encoding="utf-8")
    assert "the order in which they are judged" in index
    assert [name for name, release in _cells(index) if release == "0.33.0"] == [entry.id for entry in CATALOGUE]


@pytest.mark.parametrize(
    ("run", "checker", "subject"),
    [("fuzz reference", "fuzz, reference engine", "reference"), ("explore", "explore", "spec")],
)
def test_a_broken_cell_of_what_is_ours_leads_to_its_causes_too(run: str, checker: str, subject: str) -> None:
    name = "SLOT.key-content"
    broken = said(
        run, Word("invariant", name, "broken", "fail"), Word("finding", f"{name} odd", "new", "fail", "block 3")
    )
    entry = _entry(name, broken)
    (line,) = [one for one in entry.lines if one.checker == checker]
    assert "1 cause seen, 1 not on record" in line.words
    files = site.pages(content.entries(broken), broken)
    assert f'<a href="slot.html#{entry.causes_on(subject)}">✗!</a>' in files["index.html"]
    assert f'id="{entry.causes_on(subject)}"' in files["slot.html"]
    assert f"{causes.SEARCHES[subject][1]}: 1" in files["slot.html"]


NEGATIVE = "ADMIT.exact", "mamba-estimate-negative-and-below-taken"


@pytest.mark.parametrize(
    ("verdict", "outcome", "shown", "today"),
    [
        ("refuted", "fail", [], "refuted (known)"),
        ("refuted", "fail", [list(NEGATIVE)], "refuted (known)"),
        ("refuted", "fail", [["ADMIT.exact", "unheard-of"]], "refuted"),
        ("refuted (known: ADMIT.exact mamba-estimate-negative-and-below-taken)", "info", [], "refuted (known)"),
        ("refuted (no scenario was run; on record as: ADMIT.exact mamba-estimate-negative-and-below-taken)", "info", [],
         "refuted (known, no scenario was run)"),
        ("refuted (known: ADMIT.exact a-record-that-is-gone)", "info", [], "refuted"),
        ("proved", "pass", [], "proved"),
    ],
)  # fmt: skip
def test_a_refuted_claim_is_known_if_it_is_on_record_today(
    verdict: str, outcome: str, shown: list[list[str]], today: str
) -> None:
    claim = "MAMBA.estimate-not-negative"
    proved = said("prove --on 0.26.0", Word("proof", claim, verdict, outcome, data={"shown": shown, "scope": ""}))
    (line,) = [one for one in _entry("ADMIT.exact", proved).lines if one.checker == f"prove --on 0.26.0: {claim}"]
    assert line.verdict == today
    known = [record for record in causes.records() if record.source.identity == NEGATIVE]
    if "known" in today:
        assert line.mark == "known"
        assert list(line.records) == known
        assert ("on record since" in line.words) == (outcome == "fail")
    else:
        assert (line.mark, line.records) == ("holds" if outcome == "pass" else "broken", ())


def test_a_refuted_claim_links_to_its_record(made: Path) -> None:
    (record,) = [record for record in causes.records() if record.source.identity == NEGATIVE]
    for name in ("admit.html", "proofs.html"):
        page = (made / name).read_text(encoding="utf-8")
        assert re.search(rf'refuted \(known\)<br><a href="{record.href}">', page)


def _entry(name: str, status: Status) -> content.Entry:
    return next(entry for entry in content.entries(status) if entry.id == name)


def test_what_was_not_run_is_said_and_counted_and_no_result_of_its_own(tmp_path: Path) -> None:
    stored = status.load(STORED)
    stored.runs["explore"] = msgspec.structs.replace(
        stored.runs["explore"], words=[w for w in stored.runs["explore"].words if w.id != "REF.references"]
    )
    assert "not run yet" in content._smallest("REF.references", stored)
    assert site.build(tmp_path, stored)["not_run"] == 1
    assert stored.lacking("explore") == ["REF.references"]


def test_every_page_says_how_to_read_its_notation(made: Path) -> None:
    for file in made.glob("*.html"):
        assert "Reading the notation" in file.read_text(encoding="utf-8")
    assert {"Split", "g1, group 1"} <= content.glossary().keys()
    assert 'glossary.html">Glossary</a></p>' not in (made / "glossary.html").read_text(encoding="utf-8")
    assert 'glossary.html">Glossary</a></p>' in (made / "slot.html").read_text(encoding="utf-8")


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


def test_the_readme_leads_to_a_page_that_there_is(made: Path) -> None:
    found = re.findall(r"`site/(\w+\.html)#([\w-]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert found
    for page, anchor in found:
        assert f'<section id="{anchor}">' in (made / page).read_text(encoding="utf-8")


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


def test_no_link_leads_nowhere_and_nothing_is_loaded(made: Path) -> None:
    read = {}
    for file in made.glob("*.html"):
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


def test_the_diagram_has_every_change_of_status_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    first = machine.arrows()
    monkeypatch.setattr(machine, "STATES_LOOKED_AT", 2 * machine.STATES_LOOKED_AT)
    assert machine.arrows() == first
    drawn = machine.diagram(first)
    assert drawn.count("<line") == len(first)
    assert {arrow.before for arrow in first} | {arrow.after for arrow in first} == set(machine._PLACES)


def test_every_arrow_goes_from_border_to_border_of_its_boxes_and_through_no_other() -> None:
    arrows = machine.arrows()
    drawn = ElementTree.fromstring(machine.diagram(arrows))
    names = [text.text for text in drawn.iter("text") if text.get("class") == "name"]
    boxes = dict(zip(names, map(_box, drawn.iter("rect")), strict=True))
    lines = [[float(line.get(end, "")) for end in ("x1", "y1", "x2", "y2")] for line in drawn.iter("line")]
    assert len(boxes) == 5
    for arrow, (x1, y1, x2, y2) in zip(arrows, lines, strict=True):
        assert abs(_outside(boxes[arrow.before], x1, y1)) < 0.1, f"{arrow} does not begin on its box's border"
        assert abs(_outside(boxes[arrow.after], x2, y2)) < 0.1, f"{arrow} does not end on its box's border"
        for part in range(1, 200):
            x, y = x1 + (x2 - x1) * part / 200, y1 + (y2 - y1) * part / 200
            under = [name for name, box in boxes.items() if _outside(box, x, y) < 0]
            assert not under, f"{arrow} runs under {under}"


def _box(rect: ElementTree.Element) -> tuple[float, float, float, float]:
    x, y, width, height = (float(rect.get(name, "")) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def _outside(box: tuple[float, float, float, float], x: float, y: float) -> float:
    """How far a point is outside a box; 0 on its border, negative within."""
    left, top, right, bottom = box
    return max(left - x, x - right, top - y, y - bottom)


def test_every_action_says_what_it_does_and_when() -> None:
    for action in machine.actions():
        assert action.does.endswith(".")
        assert action.guard
        assert f"def {action.name}" in action.source


BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("name", ["index.html", "slot.html", "machine.html"])
def test_a_browser_shows_a_page_without_complaint(made: Path, tmp_path: Path, name: str) -> None:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
               f"--user-data-dir={tmp_path}", "--enable-logging=stderr", "--v=0", "--dump-dom"]  # fmt: skip
    done = subprocess.run([str(BROWSER), *options, (made / name).as_uri()], capture_output=True, text=True, check=True)
    assert "kvproof" in done.stdout
    assert "CONSOLE" not in done.stderr


# -- what changed ------------------------------------------------------------------------------------------------------


def test_only_what_decides_counts_as_a_change() -> None:
    before = (
        'class A:\n    def f(self, x: int) -> int:\n        """Says."""\n        return x + 1\n    def g(self): ...\n'
    )
    after = (
        "class A:\n    def f(self, x: float):\n        # new words\n        logger.info('x')\n        return x + 1\n"
        "    def h(self): ...\n"
    )
    old, new = (sources.functions([("a.py", text)]) for text in (before, after))
    assert [(c.name, c.how) for c in sources.changes(old, new, ["A.f", "A.g", "A.h"])] == [
        ("A.g", "gone"),
        ("A.h", "new"),
    ]
    other = sources.functions([("a.py", before.replace("x + 1", "x + 2"))])
    (change,) = sources.changes(old, other, ["A.f"])
    assert change.place == "a.py:2"
    assert [line for line in change.lines() if line[:1] in "+-"] == ["-    return x + 1", "+    return x + 2"]


def test_verdicts_differ_where_one_holds_and_the_other_does_not() -> None:
    def run(*words: tuple[str, str, str]) -> Said:
        told = [Word("invariant", name, verdict, outcome) for name, verdict, outcome in words]
        return Said("fuzz", "", "", "", "", 0, told)

    before = run(("A", "fuzzed, holds", "pass"), ("B", "broken (known)", "info"), ("C", "fuzzed, holds", "pass"))
    after = run(("A", "broken", "fail"), ("B", "broken (known)", "info"), ("C", "fuzzed, holds", "pass"))
    assert [v.id for v in diff._verdicts("fuzz", [before, after])] == ["A"]


def commit(folder: Path, text: str) -> None:
    (folder / "spec" / "rules").mkdir(parents=True, exist_ok=True)
    (folder / "invariants").mkdir(exist_ok=True)
    (folder / "spec" / "rules" / "chunk.py").write_text(f"def split(case):\n    return {text}\n")
    (folder / "invariants" / "slot.py").write_text(f'E = Invariant(id="SLOT.x", statement="It is {text}.", why="w")\n')
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", text], check=True)


def test_two_commits_differ_in_rules_and_sentences(tmp_path: Path) -> None:
    commit(tmp_path, "one")
    commit(tmp_path, "two")
    made = diff.diff("HEAD~1", "HEAD", Status(1, {}), tmp_path, print)
    assert [change.name for change in made.sources["rules"]] == ["split"]
    assert made.sentences == [("SLOT.x", "It is one.", "It is two.")]
    assert "+    return two" in diff.as_text(made)
    assert "It is two." in site.diff_page(made)
    assert "rules (spec/rules, spec/radix.py, spec/logic.py): to be read again" in diff.as_text(made)
    assert "nothing differs" in diff.as_text(diff.Difference("a", "b"))


def test_commits_are_compared_from_any_folder_of_the_checkout(tmp_path: Path) -> None:
    commit(tmp_path, "one")
    commit(tmp_path, "two")
    made = diff.diff("HEAD~1", "HEAD", Status(1, {}), tmp_path / "spec", print)
    assert made.counts()["sources"] == made.counts()["sentences"] == 1


def test_a_file_of_a_commit_that_is_no_python_is_said(tmp_path: Path) -> None:
    commit(tmp_path, "one")
    (tmp_path / "invariants" / "odd.py").write_text("<<<<<<< HEAD\n")
    commit(tmp_path, "two")
    made = diff.diff("HEAD~1", "HEAD", Status(1, {}), tmp_path, print)
    assert made.missing[0] == "HEAD~1 has no stored results"
    assert made.missing[1] == "invariants/odd.py of HEAD, which is no Python"
    assert made.sentences == [("SLOT.x", "It is one.", "It is two.")]


def test_commits_of_nothing_are_not_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a checkout, in one of something else, and without git nothing is compared, which is said."""
    with pytest.raises(UsageError, match="is in no git checkout: change to one of kvproof"):
        diff.diff("HEAD", "HEAD", Status(1, {}), tmp_path, print)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    with pytest.raises(UsageError, match="is no checkout of kvproof"):
        diff.diff("HEAD", "HEAD", Status(1, {}), tmp_path, print)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="git, which is not installed"):
        diff.diff("HEAD", "HEAD", Status(1, {}), tmp_path, print)


def test_any_checkout_is_compared_and_a_refresh_is_named_only_where_there_is_one(tmp_path: Path) -> None:
    core = tmp_path / "vllm" / "v1" / "core"
    core.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    (core / "old.py").write_bytes(b"# Andr\xe9 wrote this\ndef f(): pass\n")
    made = diff.diff(f"vllm@{tmp_path}", f"vllm@{tmp_path}", Status(1, {}), tmp_path, print)
    assert "\n  " not in diff.as_text(made), "the same is the same"
    assert len(made.missing) == 4
    assert all(told.endswith("only") for told in made.missing)
    assert diff._way_out("fuzz 0.33.0") == "kvproof spec refresh 'fuzz 0.33.0'"


def test_a_difference_says_where_gone_and_new_come_from_and_wraps_what_is_long() -> None:
    code = "\n".join(f"    x = {index} + {' + '.join('y' * 300)}" for index in range(100))
    old, new = (sources.functions([("a.py", text)]) for text in ("def f():\n    pass\n", f"def f():\n{code}\n"))
    made = diff.Difference("vllm==0.30.0", "vllm==0.31.0", {"chunk": sources.changes(old, new, ["f"])})
    made.gone = [("A.b", "c")]
    text = diff.as_text(made)
    assert "findings, by the records in findings/" in text
    assert "  gone: A.b (c)" in text
    assert "chunk (what spec/rules/chunk.py mirrors in vLLM): to be read again" in text
    assert "lines more: --html FILE writes all of them" in text
    assert max(map(len, text.splitlines())) < 160
    at = text.splitlines().index("      @@ -1,2 +1,101 @@")
    assert text.splitlines()[at + 4].lstrip(" ").startswith("+  "), "a part of a long line is marked as the line"
    page = site.diff_page(made)
    assert " + ".join("y" * 300) in page
    assert "spec/rules/chunk.py" in page
    assert "By the records in findings/" in page


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        (("vllm==0.30.0", "HEAD"), "can't be compared"),
        (("HEAD", "no-such-commit"), "no-such-commit is neither a release"),
        (("0.30.0", "0.31.0"), "write a release as vllm==0.30.0"),
        (("--help", "HEAD"), "names no commit"),
    ],
)
def test_what_can_not_be_compared_is_said_in_a_line(pair: tuple[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        diff.diff(*pair, Status(1, {}), ROOT, print)


@pytest.mark.release
@pytest.mark.slow
def test_the_admission_change_of_0_31_is_shown_and_nothing_else() -> None:
    made = diff.diff("vllm==0.30.0", "vllm==0.31.0", status.load(STORED), ROOT, print)
    changed = {change.name: change for found in made.sources.values() for change in found}
    estimate = "\n".join(changed["MambaManager.get_num_blocks_to_allocate"].lines())
    assert re.search(r"^\+ .*num_new_blocks = min\(", estimate, re.MULTILINE), "the cap is a cap from 0.31.0 on"
    assert ("ADMIT.mamba-bound", "estimate-beyond-bound") in made.gone
    told = {(verdict.checker, verdict.id): (verdict.before[:7], verdict.after[:7]) for verdict in made.verdicts}
    assert told["prove --on", "MAMBA.estimate-bounded/checkpoint"] == ("refuted", "proved")
    # What a search of 0.31.0 came across is not called gone, on record there or not.
    shown = diff._shown(status.load(STORED).runs["fuzz 0.31.0"])
    assert shown
    assert not shown & set(made.gone)
    # Every function that is named says something else to Python, and no verdict is named on which both sides agree.
    for change in changed.values():
        assert any(line[:1] in "+-" for line in change.lines())
    same = diff.diff("vllm==0.31.0", "vllm==0.31.0", status.load(STORED), ROOT, print)
    assert same.counts() == {"sources": 0, "sentences": 0, "verdicts": 0, "gone": 0, "new": 0}


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
