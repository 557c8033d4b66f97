"""Pages: what they show, that they are whole in themselves, and that a browser runs them."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvproof import moments, scenario_file
from kvproof.models.stateful.film import MOST_FRAMES, film
from kvproof.pages import counterexample, ended
from kvproof.spec.config import Config, Group
from kvproof.spec.machine.subject import MachineSubject
from kvproof.spec.scenario import Action, Scenario

sys.path.insert(0, str(Path(__file__).parent))
from toysubject import ToySubject

sys.path.pop(0)

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")

LEAKS = Scenario(
    Config((Group("full", 4), Group("mamba", 8)), 20, 4, 12, retention=None),
    (
        Action("submit", "a", length=20, max_tokens=4),
        Action("step", times=2),
        Action("submit", "b", base="a", shared=16, length=30, max_tokens=3),
        Action("step"),
        Action("abort", "a"),
        Action("step", times=6),
    ),
)


def data_of(page: str) -> dict:
    found = re.search(r'<script id="film" type="application/json">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture(scope="module")
def page() -> str:
    subject = ToySubject("leak")
    taken = film(subject, LEAKS)
    return counterexample(LEAKS, taken, None, subject.name, "a leak.json")


def test_a_frame_for_every_step_and_violation() -> None:
    taken = film(MachineSubject(), LEAKS)
    assert [frame.title for frame in taken.frames[:3]] == ["step 1", "step 2", "step 3"]
    assert [frame.action for frame in taken.frames[:3]] == [1, 1, 3]
    first = taken.frames[0]
    assert first.ran == ("a [0, 8)",)
    tables = {(table.request, table.group): table.blocks for table in first.tables}
    (state,) = tables["a", 1]
    assert first.blocks[state].keys[0].startswith("g1 state@8")
    assert first.blocks[state].content.startswith("state@8")
    assert not first.blocks[state].mismatch
    assert not any(frame.violations for frame in taken.frames)


def test_what_broke_is_in_the_frame_in_which_it_showed() -> None:
    taken = film(ToySubject("leak"), LEAKS)
    broken = [frame for frame in taken.frames if frame.violations]
    assert broken
    assert broken[0].violations[0].invariant.startswith("REF.")
    assert broken[0].action >= 4


def test_a_long_run_keeps_its_end() -> None:
    config = replace(LEAKS.config, max_model_len=4000, num_blocks=2000)
    long = Scenario(config, (Action("submit", "a", length=4, max_tokens=600), Action("step", times=700)))
    taken = film(MachineSubject(), long)
    assert len(taken.frames) == MOST_FRAMES
    assert taken.dropped > 0
    assert taken.frames[-1].title in ("everything has finished", f"step {MOST_FRAMES + taken.dropped}")


def test_opens_where_it_breaks(page: str) -> None:
    data = data_of(page)
    assert data["frames"][data["start"]]["violations"]
    assert "REF.references" in page
    assert "kvproof replay 'a leak.json' --on 'toy with leak'" in html.unescape(page)


def test_is_whole_in_itself(page: str) -> None:
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "://" not in page
    assert "default-src 'none'" in page
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) > 8
    assert sorted(ids) == sorted(set(ids))


def test_what_it_shows_can_not_end_its_script() -> None:
    evil = replace(LEAKS, note="</script><img src=x onerror=alert(1)>")
    page = counterexample(evil, film(MachineSubject(), evil), None, "</script>", "<b>")
    assert "<img" not in page
    assert page.count("</script>") == 2


def test_a_record_says_on_its_page_what_was_read() -> None:
    record = scenario_file.load(Path(__file__).parents[1] / "findings" / "slot-key-content-full-key-stale.json")
    assert record.reasoning.startswith("Read in 0.33.0")
    page = counterexample(LEAKS, film(MachineSubject(), LEAKS), None, "spec", "f.json", record.reasoning)
    read = html.unescape(page)
    assert read.index("</h1>") < read.index(record.reasoning) < read.index("<main>")
    assert "On record." not in counterexample(LEAKS, film(MachineSubject(), LEAKS), None, "spec", "f.json")


CROSSES = Scenario(
    Config((Group("full", 4), Group("mamba", 8)), 20, 4, 16, retention=None),
    (
        Action("submit", "a", length=4, max_tokens=1),
        Action("submit", "b", length=12, max_tokens=1),
        Action("step", times=2),
    ),
)
"""Of a toy with unaligned chunks: what breaks lies in a table of b, which ends in that very step."""


def test_where_it_breaks_the_tables_of_what_ended_in_that_step_are_shown() -> None:
    plain, taken = film(ToySubject("unaligned"), CROSSES), ended.film(ToySubject("unaligned"), CROSSES)
    (before, broken) = plain.frames[-1], taken.frames[-1]
    assert before.violations
    assert "b" not in {table.request for table in before.tables}
    (request,) = [request for request in broken.requests if request.name == "b"]
    assert request.status == ended.ENDED
    (slots,) = [table.blocks for table in broken.tables if (table.request, table.group) == ("b", 1)]
    where = dict(broken.violations[0].where)
    assert where["block"] == slots[0]
    assert (broken.violations, broken.blocks) == (before.violations, before.blocks)
    text = moments.moment(CROSSES, taken, len(taken.frames) - 1).partition("free queue")[0]
    assert re.search(rf"┃ @8 block {slots[0]} ✗", text)


def test_a_request_has_given_its_tables_back_by_the_end_of_its_last_step() -> None:
    """And where nothing breaks that is what is shown, whatever is filmed with."""
    sound = film(ToySubject(), CROSSES)
    held = [{table.request for table in frame.tables} for frame in sound.frames]
    assert [name for frame in sound.frames for name in frame.ran] == ["a [0, 4)", "b [0, 8)", "b [8, 12)"]
    assert held == [{"b"}, set()]
    for scenario in (CROSSES, LEAKS):
        assert ended.film(ToySubject(), scenario).frames == film(ToySubject(), scenario).frames


def rendered(page: Path, moment: int) -> tuple[str, str]:
    """What a browser makes of one moment of the page, and what it said on its console."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=2000", "--dump-dom", f"file://{page}#{moment}"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return html.unescape(done.stdout), "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_shows_every_moment(page: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    data = data_of(page)
    broken = data["start"] + 1
    for moment in (1, 2, broken):
        dom, console = rendered(file, moment)
        assert console == ""
        frame = data["frames"][moment - 1]
        assert f"{moment} of {len(data['frames'])}: {frame['title']}" in dom
        assert ("ran " + ", ".join(frame["ran"]) if frame["ran"] else "nothing ran") in dom
    for violation in data["frames"][broken - 1]["violations"]:
        assert violation["witness"] in dom
    assert 'class="broken"' in dom
