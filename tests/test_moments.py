"""A counterexample in a terminal: what its page shows, in text, with colours where they are wanted and only there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvproof import cli, colours, scenario_file, subjects
from kvproof.models.stateful.film import BlockShot, Film, Frame, RequestShot, TableShot, film
from kvproof.moments import HELP, breaks, moment, shown, step_through, wrong
from kvproof.spec.config import Config, Group
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.scenario import Action, Scenario

sys.path.insert(0, str(Path(__file__).parent))
from toysubject import ToySubject, toy_command

sys.path.pop(0)

STALE = Violation("SLOT.key-content", "stale", "block 3 is keyed as state@8#aa but holds state@7#bb",
                  (("block", 3), ("request", "a")))  # fmt: skip
SCENARIO = Scenario(
    Config((Group("full", 4), Group("mamba", 8)), 20, 4, 12),
    (Action("submit", "a", length=20, max_tokens=4), Action("step", times=2)),
)
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def frame(*violations: Violation, title: str = "step 1") -> Frame:
    blocks = {
        1: BlockShot(1, (), "tokens 1-4", -1, False),
        2: BlockShot(2, ("g0 state@8#aa",), "tokens 5-8", -1, False),
        3: BlockShot(1, ("g1 state@8#aa",), "state@7#bb", -1, bool(violations)),
        4: BlockShot(0, (), "", 0, False),
        5: BlockShot(0, (), "", 1, False),
        6: BlockShot(0, ("g0 state@12#cc",), "tokens 9-12", 2, False),
    }
    tables = (TableShot("a", 0, (1, 2)), TableShot("a", 1, (0, 3)))
    return Frame(1, title, ("a [0, 8)",), ("b",), (RequestShot("a", "RUNNING", 20, 21, 8),), tables, blocks, violations)


FILM = Film((frame(), frame(STALE, title="step 2"), frame(title="step 3")), 0, "")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_what_the_page_shows_is_there_in_text() -> None:
    text = shown(SCENARIO, FILM, STALE)
    lines = text.splitlines()
    assert lines[0] == "moment 2 of 3: step 2  (action 2. step ×2)"
    assert "ran a [0, 8)" in text
    assert "waiting b" in text
    assert "✗ SLOT.key-content (stale)" in text
    assert STALE.witness in text
    assert "what must hold: " in text
    assert "  a RUNNING, prompt 20, 8 of 21 tokens computed" in lines
    assert "    group 0: full 4" in lines
    assert "    group 1: mamba 8" in lines
    strips = text.partition("requests that hold blocks")[2].partition("free queue")
    assert re.search(r"@4 block 1 .*@8 block 2 ", strips[0])
    assert "2 references" in strips[0]
    assert re.search(r"@8 null ", strips[0])
    assert "blocks 4, 5" in strips[2]
    assert "key g0 state@12#cc" in strips[2]
    assert not ESCAPES.search(text)


def test_the_slot_that_broke_stands_out_with_what_it_promises_and_holds() -> None:
    lines = moment(SCENARIO, FILM, 1).splitlines()
    heavy = [line for line in lines if "┃" in line]
    assert [re.sub(r".*┃ (.*?) *┃.*", r"\1", line) for line in heavy] == [
        "@16 block 3 ✗",
        "key g1 state@8#aa",
        "but holds state@7#bb",
    ]
    assert "┃" not in moment(SCENARIO, FILM, 0)


@pytest.mark.parametrize(
    ("where", "slots"),
    [
        ((("block", 2),), {(0, 1)}),
        ((("slot", 1), ("group", 1)), {(1, 1)}),
        ((("slot", 0), ("request", "b")), set()),
        ((("slot", 0), ("request", "a")), {(0, 0), (1, 0)}),
        ((("block", 0),), set()),
        ((), set()),
    ],
)
def test_which_slots_a_violation_is_about(
    where: tuple[tuple[str, str | int], ...], slots: set[tuple[int, int]]
) -> None:
    broken = frame(Violation("REF.references", "x", "y", where))
    marked = {
        (table.group, slot)
        for table in broken.tables
        for slot, block in enumerate(table.blocks)
        if wrong(broken, block, "a", table.group, slot)
    }
    assert marked == slots


def test_colours_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    text = moment(SCENARIO, FILM, 1)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    assert colours.wanted()
    coloured = moment(SCENARIO, FILM, 1)
    assert "\x1b[1;31m" in coloured
    bare = [line.rstrip() for line in ESCAPES.sub("", coloured).splitlines()]
    assert bare == text.splitlines()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colours.wanted()
    assert moment(SCENARIO, FILM, 1) == text


def test_a_narrow_terminal_wraps_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "44")
    lines = [line.rstrip() for line in ESCAPES.sub("", moment(SCENARIO, FILM, 1)).splitlines()]
    assert max(map(len, lines)) <= 44
    text = "\n".join(lines)
    for words in ("@4 block 1", "@8 block 2", "@16 block 3 ✗", "but holds state@7#bb", "key g0 state@12#cc"):
        assert words in text


def stepping(*answers: str) -> list[str]:
    """The moments that were shown on these answers."""
    said: list[str] = []
    left: Iterator[str] = iter(answers)

    def ask(_: str) -> str:
        answer = next(left, None)
        if answer is None:
            raise EOFError
        return answer

    step_through(SCENARIO, FILM, STALE, said.append, ask)
    return [re.sub(r"moment (\d).*", r"\1", text.splitlines()[0]) for text in said if text.strip()]


def test_stepping_goes_where_it_is_told() -> None:
    assert stepping("", "", "", "b", "b", "b", "q") == ["2", "3", "3", "3", "2", "1", "1"]
    assert stepping("1", "v", "v", "3", "v", "99", "0") == ["2", "1", "2", "2", "3", "2", "3", "1"]
    assert stepping("what") == ["2", f"'what'? {HELP}", "2"]
    assert stepping() == ["2"]


def test_nothing_broke_nothing_is_marked() -> None:
    sound = Film((frame(),), 7, "")
    assert not breaks(sound)
    assert shown(SCENARIO, sound, None).startswith("moment 8 of 8: step 1")
    assert shown(SCENARIO, Film((), 0, ""), None) == ""


# -- the command ------------------------------------------------------------------------------------------------------

LEAKS = Scenario(
    Config((Group("full", 4), Group("mamba", 8)), 20, 4, 12, retention=None),
    (Action("submit", "a", length=20, max_tokens=4), Action("step", times=2), Action("abort", "a"), Action("step")),
)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subjects, "open_subject", lambda *_: ToySubject("leak"))
    taken = film(ToySubject("leak"), LEAKS)
    violation = next(v for one in taken.frames for v in one.violations)
    scenario_file.save(tmp_path / "f.json", LEAKS, Finding(violation, "spec", LEAKS, 2))
    return "f.json"


def test_replay_shows_it_where_asked_and_on_a_terminal(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["replay", file, "--on", "spec"]
    assert cli.run(command) == 1
    piped = capsys.readouterr().out
    assert "moment" not in piped
    assert cli.run([*command, "--show"]) == 1
    asked = capsys.readouterr().out
    assert "moment" in asked
    assert "✗ REF.references" in asked
    assert not ESCAPES.search(asked)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert cli.run(command) == 1
    terminal = capsys.readouterr().out
    assert "\x1b[1;31m✗ REF.references" in terminal
    assert cli.run([*command, "--no-show"]) == 1
    assert "moment" not in capsys.readouterr().out


def test_going_through_it_needs_neither_input_nor_a_reader(file: str) -> None:
    program = [sys.executable, "-P", "-c", toy_command(2.0), "leak", "replay", file, "--on", "spec", "--step"]
    done = subprocess.run(["sh", "-c", '"$@" <&-', "sh", *program], capture_output=True, text=True, check=False)
    assert (done.returncode, "error" in done.stderr) == (1, False), done.stderr
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    step = subprocess.Popen(program, text=True, **pipes)  # type: ignore[call-overload]
    step.stdout.close()
    _, said = step.communicate("n\n" * 50)
    assert (step.returncode, "error" in said) == (1, False), said


def test_replay_goes_through_it_step_by_step(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["1", "q"])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    assert cli.run(["replay", file, "--on", "spec", "--step"]) == 1
    out = capsys.readouterr().out
    assert re.findall(r"moment (\d+) of", out)[-1] == "1"
    assert out.rstrip().endswith("exit=1")
