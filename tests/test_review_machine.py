"""The review of the abstract machine, and where in vLLM what our rules mirror is to be read."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvproof.models.explore.scopes import SCOPES
from kvproof.review import machine, mirrors, site, status, told
from kvproof.review.status import RELEASES

sys.path.insert(0, str(Path(__file__).parent))
from reviewed import STORED, said

sys.path.pop(0)


def test_the_diagram_has_every_change_of_status_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    first = machine.arrows()
    monkeypatch.setattr(machine, "STATES_LOOKED_AT", 2 * machine.STATES_LOOKED_AT)
    monkeypatch.setattr(machine, "WORLDS", tuple(SCOPES))
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
        assert '"""' not in action.source, "what it does is said once"
    (submit,) = [action for action in machine.actions() if action.name == "submit"]
    assert str(submit.does) == "<code>name</code> arrives with the prompt whose prefixes are <code>states</code>."
    (step,) = [action for action in machine.actions() if action.name == "step"]
    assert [name for _, name, _ in step.parts][:2] == ["Schedule.run", "Schedule._advance"]
    assert all(f"def {name.partition('.')[2]}(" in source for _, name, source in step.parts)


def test_every_status_and_every_way_out_of_it_is_told_in_words(built_site: Path) -> None:
    arrows = machine.arrows()
    ways = {(one.name, after, action) for one in machine.statuses(arrows) for after, action, _ in one.ways}
    assert ways == {(one.before, one.after, action) for one in arrows for action in one.actions} == machine.WHY.keys()
    page = (built_site / "machine.html").read_text(encoding="utf-8")
    assert all(text in page for text in [*machine.STATUSES.values(), *machine.WHY.values()])


def test_prose_of_sources_is_marked_and_escaped() -> None:
    shown = told.marked("``a < b`` and :meth:`Position.well_formed` of *every* p < q")
    assert str(shown) == ("<code>a &lt; b</code> and <code>Position.well_formed</code> of <em>every</em> p &lt; q")


# -- what rules mirror -------------------------------------------------------------------------------------------------


def test_every_function_that_a_rule_mirrors_is_a_link_to_its_line(built_site: Path) -> None:
    """Where this fails a function was named, or a release is new: run ``kvproof spec refresh mirrors``."""
    stored = status.load(STORED)
    assert not stored.misplaced()
    pages = "".join((built_site / name).read_text(encoding="utf-8") for name in ("rules.html", "machine.html"))
    for name in mirrors.named():
        place = stored.mirrors[name]
        assert place.release in RELEASES
        href = f"https://github.com/vllm-project/vllm/blob/v{place.release}/{place.file}#L{place.line}"
        assert f'<a href="{href}"><code>{name}</code></a>' in pages


def test_a_function_without_a_place_is_no_link_and_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = status.load(STORED)
    assert "mirrors" not in site.note(stored)
    place = stored.mirrors.pop("Scheduler.schedule")
    assert stored.misplaced()
    assert "not run: mirrors" in site.note(stored)
    page = site.pages([], stored)["machine.html"]
    assert "<code>Scheduler.schedule</code> " in page
    assert "kvproof spec refresh mirrors" in page
    stored.mirrors |= {"Scheduler.schedule": place, "Scheduler.no_such": place}
    assert stored.misplaced(), "one that no rule mirrors any more"
    del stored.mirrors["Scheduler.no_such"]
    monkeypatch.setattr(status, "RELEASES", (*RELEASES, "0.99.0"))
    assert stored.misplaced(), "a newer release is looked at"


@pytest.mark.release
def test_the_places_are_those_of_the_released_sources() -> None:
    assert status.load(STORED).mirrors == mirrors.find(RELEASES, print)
    assert set(mirrors.find(RELEASES[-1:], print)) < set(mirrors.named()), "one is in older releases only"
    assert mirrors.find(RELEASES[-1:], print, ["Scheduler.schedule", "Scheduler.no_such"]).keys() == {
        "Scheduler.schedule"
    }


@pytest.mark.release
def test_places_are_found_again_and_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "status.json"
    status.save(file, said("explore"))
    assert list(status.refresh(file, ["mirrors"], False, str, lambda: None)) == [("mirrors", True)]
    assert status.load(file).mirrors == status.load(STORED).mirrors
    assert "explore" in status.load(file).runs, "what was there stays"
    assert list(status.refresh(file, ["mirrors"], False, str, lambda: None)) == [], "nothing is due"
    lines: list[str] = []
    monkeypatch.setattr(mirrors, "named", lambda: ["Scheduler.schedule", "Scheduler.no_such"])
    assert list(status.refresh(file, ["mirrors"], False, lines.append, lambda: None)) == [("mirrors", False)]
    assert lines[-1] == "in no release: Scheduler.no_such"
