"""The review's verdicts: a cell tells what was seen and what is on record today, and a proof tells its premises."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import pytest

from kvproof import findings
from kvproof.invariants.catalogue import CATALOGUE
from kvproof.review import causes, content, site, status
from kvproof.review.status import Status, Word
from kvproof.shipped import UNSHOWN

sys.path.insert(0, str(Path(__file__).parent))
from reviewed import STORED, entry_of, said

sys.path.pop(0)


def test_a_broken_cell_leads_to_its_causes_and_says_which_are_on_record_today() -> None:
    known = next(one for one in causes.records() if one.source.scenario and one.releases[0].isdigit())
    name, release = known.source.invariant, known.releases.split(", ")[0]
    words = [Word("invariant", name, "broken", "fail"), Word("finding", f"{name} {known.cause}", "new", "fail", "seen")]
    recorded_since = said(f"fuzz {release}", *words)
    (line,) = [one for one in entry_of(name, recorded_since).lines if one.checker == f"fuzz, vLLM {release}"]
    assert (line.mark, line.verdict) == ("known", "broken (known)")
    new = said(f"fuzz {release}", *words, Word("finding", f"{name} unheard-of", "new", "fail", "block 3 is odd"))
    entry = entry_of(name, new)
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
    assert all(cause.missed for on in entry_of(name, old).seen for cause in on.causes)
    assert "old" not in {cause.name for on in entry_of(name, old).seen for cause in on.causes}


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
    (on,) = [on for on in entry_of(name, said("fuzz 0.26.0", gone)).seen if on.subject == "0.26.0"]
    (cause,) = [cause for cause in on.causes if cause.name == known.cause]
    assert cause.missed.endswith("ran the scenario that was recorded then, which did not show it")


def test_what_is_proved_under_premises_says_so(built_site: Path) -> None:
    stored = status.load(STORED)
    entry = entry_of("SLOT.key-content", stored)
    (line,) = [one for one in entry.lines if one.checker == "prove: SLOT.two-chunks"]
    assert line.verdict == f"proved under {line.premises} premises"
    assert "no junction; no checkpoint exports" in line.words
    index = (built_site / "index.html").read_text(encoding="utf-8")
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


def test_the_overview_says_why_it_is_in_its_order(built_site: Path) -> None:
    index = (built_site / "index.html").read_text(encoding="utf-8")
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
    entry = entry_of(name, broken)
    (line,) = [one for one in entry.lines if one.checker == checker]
    assert "1 cause seen, 1 not on record" in line.words
    files = site.pages(content.entries(broken), broken)
    assert f'<a href="slot.html#{entry.causes_on(subject)}">✗!</a>' in files["index.html"]
    assert f'id="{entry.causes_on(subject)}"' in files["slot.html"]
    assert f"{causes.SEARCHES[subject][1]}: 1" in files["slot.html"]


NEGATIVE = "ADMIT.exact", "mamba-estimate-negative-and-below-taken"
AS_KNOWN = f"refuted (known: {' '.join(NEGATIVE)})"
AS_UNSHOWN = f"refuted ({UNSHOWN}; on record as: {' '.join(NEGATIVE)})"


@pytest.mark.parametrize(
    ("verdict", "outcome", "shown", "today"),
    [
        ("refuted", "fail", [], f"refuted (known, {UNSHOWN})"),
        ("refuted", "fail", [["SLOT.chunk-end", "unheard-of"]], f"refuted (known, {UNSHOWN})"),
        ("refuted", "fail", [list(NEGATIVE)], "refuted (known)"),
        ("refuted", "fail", [["ADMIT.exact", "unheard-of"]], "refuted"),
        ("refuted", "fail", [list(NEGATIVE), ["ADMIT.exact", "unheard-of"]], "refuted"),
        (AS_KNOWN, "info", [list(NEGATIVE)], "refuted (known)"),
        ("refuted (known: ADMIT.exact a-record-that-is-gone)", "info", [list(NEGATIVE)], "refuted (known)"),
        (AS_UNSHOWN, "info", [], f"refuted (known, {UNSHOWN})"),
        ("proved", "pass", [], "proved"),
    ],
)
def test_a_refuted_claim_is_known_if_it_is_on_record_today(
    verdict: str, outcome: str, shown: list[list[str]], today: str
) -> None:
    claim = "MAMBA.estimate-not-negative"
    data = {"scope": "", "shown": shown}
    proved = said("prove --on 0.26.0", Word("proof", claim, verdict, outcome, data=data))
    (line,) = [one for one in entry_of("ADMIT.exact", proved).lines if one.checker == f"prove --on 0.26.0: {claim}"]
    assert line.verdict == today
    known = [record for record in causes.records() if record.source.identity == NEGATIVE]
    if "known" in today:
        assert line.mark == "known"
        assert list(line.records) == known
        assert ("on record since" in line.words) == (outcome == "fail")
    else:
        assert (line.mark, line.records) == ("holds" if outcome == "pass" else "broken", ())


def test_the_verdict_on_a_claim_that_there_is_no_more_is_as_it_was() -> None:
    word = Word("proof", "MAMBA.no-such-claim", "refuted (known: A.b c)", "info")
    stored = said("prove --on 0.26.0", word)
    ((_, ((_, today),)),) = content.claims(stored)
    assert (today.verdict, today.outcome, today.records) == (word.verdict, word.outcome, ())


def test_a_refuted_claim_links_to_its_record(built_site: Path) -> None:
    (record,) = [record for record in causes.records() if record.source.identity == NEGATIVE]
    for name in ("admit.html", "proofs.html"):
        page = (built_site / name).read_text(encoding="utf-8")
        assert re.search(rf'refuted \(known\)<br><a href="{record.href}">', page)
