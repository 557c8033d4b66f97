"""The review's examples: what was spoilt is drawn and marked, and what a predicate is written with is shown."""

from __future__ import annotations

import html
import inspect
import re
from pathlib import Path

import pytest

from kvproof.invariants.catalogue import CATALOGUE, Invariant, by_id
from kvproof.review import content, digests, told
from kvproof.review.cases.calls import allocate, charged
from kvproof.review.cases.fakeview import MAMBA
from kvproof.review.examples import example
from kvproof.review.helpers import helpers
from kvproof.spec.view import NULL


def section_of(built_site: Path, invariant: str) -> str:
    """What the site says of one invariant."""
    page = (built_site / f"{invariant.partition('.')[0].lower()}.html").read_text(encoding="utf-8")
    return page.partition(f'<section id="{content.anchor(invariant)}">')[2].partition("</section>")[0]


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.id)
def test_an_example_is_computed_and_shows_what_is_wrong(entry: Invariant) -> None:
    shown = example(entry.id)
    assert shown.sound.violation is None
    assert shown.broken.violation is not None
    assert shown.broken.violation.witness
    assert shown.sound.strips


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.id)
def test_what_was_spoilt_is_drawn_and_marked_on_the_page(entry: Invariant, built_site: Path) -> None:
    shown = example(entry.id)
    assert shown.broken.plain != shown.sound.plain, "nothing of what was spoilt is drawn"
    assert shown.right.endswith(".")
    sound, broken = section_of(built_site, entry.id).split('<div class="case">')[1:]
    marks = r'<mark>|class="cell \w+ (?:wrong|differs)"'
    assert not re.search(marks, sound)
    assert re.search(marks, broken)
    assert html.escape(shown.right) in html.escape(html.unescape(broken))
    cells = [cell for strip in shown.broken.strips for cell in strip.cells]
    assert shown.broken.violation is not None
    block = dict(shown.broken.violation.where).get("block", NULL)
    if block != NULL:
        assert {cell.block for cell in cells if cell.wrong} == {block}
    elif not shown.broken.differing:
        assert any(cell.marked for cell in cells), "the event is the same, and so is the picture"


def test_an_example_marks_what_differs_and_draws_a_count_of_the_null_block() -> None:
    assert example("SLOT.chunk-end").broken.differing == ("granted",)
    assert example("SLOT.chunk-end").sound.differing == ()
    shown = example("REF.null-count")
    null = [cell for strip in shown.broken.strips for cell in strip.cells if cell.kind == "null"]
    assert null
    assert all(cell.lines == ("-4 references",) and cell.wrong and cell.differs for cell in null)
    assert not any(cell.lines for strip in shown.sound.strips for cell in strip.cells if cell.kind == "null")


@pytest.mark.parametrize(
    ("name", "title", "line"),
    [
        ("EVENT.replays", "block 11", "never announced"),
        ("EXT.in-flight-held", "block 13", "a load for r2 writes to it"),
        ("HIT.same-step", "@24 block 9", "written in this very step"),
        ("HIT.covers", "@20 no block", ""),
        ("SLOT.key-length", "@16 block 8", "noted as 15 tokens"),
        ("TAIL.newest-held", "block 11", "r1's newest state, after 8 tokens"),
        ("REF.queue", "block 14", "0 references"),
        ("REF.queue-shape", "free blocks", "14 by its count"),
        ("REF.double-free", "block 14, place 14", "0 references"),
        ("REF.null", "null, place 14", ""),
        ("REF.keys-map", "@16 block 8", "found by no lookup"),
        ("REF.drained", "block 9, place 22", "1 reference"),
    ],
)
def test_a_mark_is_on_what_is_wrong(name: str, title: str, line: str) -> None:
    marked = {cell.title: cell.lines for strip in example(name).broken.strips for cell in strip.cells if cell.marked}
    assert title in marked
    assert not line or line in marked[title]


def test_a_partial_key_and_an_empty_block_are_explained_where_they_are_as_they_should_be(built_site: Path) -> None:
    for entry in CATALOGUE:
        for shown in (example(entry.id).sound, example(entry.id).broken):
            for strip in (strip for strip in shown.strips if "mamba" in strip.title):
                for cell in strip.cells:
                    empty = cell.kind != "null" and not any("key" in line or "holds" in line for line in cell.lines)
                    explained = f"Block {cell.block} is empty" in strip.caption
                    assert explained == (empty and not cell.marked), f"{entry.id}: {cell}"
    (strip,) = [strip for strip in example("SLOT.chunk-end").sound.strips if "mamba" in strip.title]
    assert strip.caption == (
        "Block 9 has a partial key: state@20#93c0 ends inside its slot, which ends after 24 tokens. "
        "Block 10 is empty: it is for the state after a draft token."
    )
    assert strip.caption in section_of(built_site, "SLOT.chunk-end")


def test_of_a_long_value_only_what_differs_is_marked() -> None:
    pieces = dict(example("ADMIT.exact").broken.fields)["estimates"]
    assert [text for text, differs in pieces if differs] == ["8"]
    assert told.compared("", "two") == (("two", True),)
    assert "".join(text for text, _ in pieces) == told.told(allocate(charged(MAMBA, total=8)).event.estimates)


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.id)
def test_prefixes_are_told_by_length_and_hash_and_not_as_numbers(entry: Invariant) -> None:
    for shown in (example(entry.id).sound, example(entry.id).broken):
        for name, pieces in shown.fields:
            text = "".join(text for text, _ in pieces)
            assert not re.search(r"\b\d{6,}\b", text), f"{name} is told as {text}"
            assert name not in ("states", "parent", "state") or text.lstrip("[").startswith("state@")


def test_helpers_are_shown_with_their_sources_and_rules_are_not() -> None:
    shown = dict(helpers(by_id("SLOT.key-content").predicate))
    assert {"invariants.content.key_mismatch", "invariants.invariant.due_blocks", "spec.tracer.show"} <= shown.keys()
    assert "invariants.content._tokens_mismatch" in shown, "what a helper calls is shown, too"
    assert shown["invariants.content.key_mismatch"].startswith("def key_mismatch(")
    # A view's references() is not the predicate of that name, and a rule has a page of its own.
    assert "invariants.ref.references" not in dict(helpers(by_id("REF.null-count").predicate))
    assert not [name for name in dict(helpers(by_id("SLOT.chunk-end").predicate)) if name.startswith("spec.rules")]


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.id)
def test_every_function_that_a_predicate_calls_is_on_its_page(entry: Invariant, built_site: Path) -> None:
    sources_shown = html.unescape(section_of(built_site, entry.id))
    for part in digests.closure(entry.predicate):
        called = part.__module__.startswith("kvproof.invariants.") and re.search(
            rf"(?<![.\w]){part.__name__}\(", inspect.getsource(inspect.unwrap(entry.predicate))
        )
        if called and inspect.isfunction(part):
            assert f"def {part.__name__}(" in sources_shown, f"{entry.id} calls {part.__name__}"


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.id)
def test_where_a_rule_comes_from_is_a_number_or_said_in_words(entry: Invariant) -> None:
    for text in entry.provenance:
        assert re.fullmatch(r"(PR|issue) \d+", text) or text.startswith("design rule of ")
