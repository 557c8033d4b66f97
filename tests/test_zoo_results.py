"""The zoo's results, kept in one file, and the matrix that shows them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvproof import cli
from kvproof.zoo import matrix
from kvproof.zoo.fault import Fault, Sign, chosen, load, ordered
from kvproof.zoo.results import Blind, Replayed, Results

sys.path.insert(0, str(Path(__file__).parent))
from zoocases import LEFT, PAIR, fault, put

sys.path.pop(0)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "zoo").mkdir()
    return tmp_path / "zoo"


def stored(tmp_path: Path) -> tuple[tuple[Fault, ...], Results]:
    results = Results(tmp_path / "r.json")
    one, left = fault(), fault(**{**LEFT, "id": "Z04", "not_reached": "a worker's"}, wrong=[], right=[], signs=[],
                               scenario=None)  # fmt: skip
    common: dict[str, Any] = {"fault": "Z01", "digest": one.digest, "code": "c", "revision": "r"}
    for release, verdict in (("0.25.1", "refused"), ("0.27.0", "shown"), ("0.28.0", "not shown")):
        results.add(Replayed(**common, release=release, verdict=verdict))
    for seed, seen in ((1, 10.0), (2, 30.0), (3, None)):
        results.add(Blind(**common, release="0.27.0", seed=seed, workers=2, limit=60, seen=seen))
    return (one, left), Results(tmp_path / "r.json")


def test_the_matrix_says_what_came_out(tmp_path: Path) -> None:
    made = matrix.matrix(*stored(tmp_path))
    assert made.releases == ("0.25.1", "0.27.0", "0.28.0")
    assert made.lines[0].cells == ("-", "R 20 s", "·")
    assert [line.note for line in made.left_out] == ["a worker's"]
    text = matrix.as_markdown(made)
    assert "| Z01 | it breaks; not reproduced around the change | - | R 20 s | · |" in text
    assert "Z04" not in text
    assert "- Z04 it breaks: a worker's" in matrix.rest_as_markdown(made)
    assert "Z04  it breaks: a worker's" in matrix.as_text(made, 120)


def test_results_of_a_fault_as_it_was_are_left_out(tmp_path: Path) -> None:
    _, results = stored(tmp_path)
    made = matrix.matrix([fault(signs=[{"invariant": "REF.queue"}])], results)
    assert made.releases == ()
    assert made.lines[0].note == "not run"


def test_the_matrix_goes_between_its_markers(tmp_path: Path, folder: Path, capsys: Any) -> None:
    page = tmp_path / "page.md"
    put(folder, PAIR)
    command = ["zoo", "matrix", "--faults", str(folder), "--results", str(tmp_path / "r.json"), "--write", str(page)]
    page.write_text(f"before\n{matrix.BEGIN}\nold\n{matrix.END}\nafter\n")
    stored(tmp_path)
    for _ in range(2):
        assert cli.run(command) == 0
        text = page.read_text()
        assert text.startswith(f"before\n{matrix.BEGIN}\n")
        assert text.endswith(f"{matrix.END}\nafter\n")
        assert "old" not in text
        assert text.count("| Z01 |") == 1
    page.write_text(f"before\n{matrix.BEGIN_REST}\nold\n{matrix.END_REST}\nafter\n")
    assert cli.run(command) == 0
    assert page.read_text() == f"before\n{matrix.BEGIN_REST}\n\n{matrix.END_REST}\nafter\n"
    table = tmp_path / "table.md"
    table.write_text(f"{matrix.BEGIN}\n{matrix.END}\n")
    assert cli.run([*command, "--write", str(table)]) == 0, "one command for both"
    assert "| Z01 |" in table.read_text()
    page.write_text(f"{matrix.END_REST}\n{matrix.BEGIN_REST}\n")
    assert cli.run(command) == 2
    page.write_text("no markers")
    assert cli.run(command) == 2
    assert "has no place for the matrix" in capsys.readouterr().err


def test_two_runs_on_one_file_lose_nothing(tmp_path: Path) -> None:
    one, other = Results(tmp_path / "r.json"), Results(tmp_path / "r.json")
    common: dict[str, Any] = {"fault": "Z01", "digest": "d", "code": "c", "revision": "r", "verdict": "shown"}
    one.add(Replayed(**common, release="0.27.0"))
    other.add(Replayed(**common, release="0.28.0"))
    one.add(Replayed(**common, release="0.29.0"))
    assert [release for _, release in Results(tmp_path / "r.json").replayed] == ["0.27.0", "0.28.0", "0.29.0"]
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"], "no lock is left behind"


def test_runs_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    """Each in a process of its own, which holds what was there before any of them began."""
    program = """
import sys
from pathlib import Path
from kvproof.zoo.results import Replayed, Results
results = Results(Path(sys.argv[1]))
print(flush=True)
sys.stdin.readline()
for n in range(100):
    results.add(Replayed(fault=sys.argv[2], digest="d", code="c", revision="r", release=f"0.{n}", verdict="shown"))
"""
    command = [sys.executable, "-P", "-c", program, str(tmp_path / "r.json")]
    pipe = subprocess.PIPE
    runs = [subprocess.Popen([*command, name], stdin=pipe, stdout=pipe, text=True) for name in ("Z01", "Z02")]
    for run in runs:
        assert run.stdout is not None
        run.stdout.readline()
    for run in runs:
        assert run.stdin is not None
        run.stdin.write("\n")
        run.stdin.flush()
    for run in runs:
        run.communicate()
        assert run.returncode == 0
    assert len(Results(tmp_path / "r.json").replayed) == 200


@pytest.mark.parametrize("kind", ["replayed", "blind"])
def test_results_of_no_release_are_refused(tmp_path: Path, folder: Path, capsys: Any, kind: str) -> None:
    put(folder, PAIR)
    stored(tmp_path)
    data = json.loads((tmp_path / "r.json").read_text())
    data[kind][0]["release"] = "not a version"
    (tmp_path / "r.json").write_text(json.dumps(data))
    assert cli.run(["zoo", "--faults", str(folder), "--results", str(tmp_path / "r.json")]) == 2
    err = capsys.readouterr().err
    assert err == (
        f"kvproof: error: {tmp_path}/r.json holds no results of the zoo: 'not a version' is no release: move it away\n"
    )


def test_results_that_are_something_else_are_refused(tmp_path: Path, folder: Path, capsys: Any) -> None:
    put(folder, PAIR)
    (tmp_path / "r.json").write_text('{"kvproof_zoo": 1, "surprise": 1}')
    assert cli.run(["zoo", "--faults", str(folder), "--results", str(tmp_path / "r.json")]) == 2
    assert "holds no results of the zoo" in capsys.readouterr().err


def test_what_is_stored_is_of_these_faults() -> None:
    """Results in the project are about faults that are there, on releases in order."""
    results = Results(ROOT / "bench" / "results" / "zoo.json")
    ids = {one.id for one in load()}
    assert {one.fault for one in results.replayed.values()} <= ids
    assert ordered(["0.9.0", "0.10.0"]) == ["0.9.0", "0.10.0"]
    assert [one.id for one in chosen(load(), ["z01"])] == ["Z01"]
    assert Sign("REF.queue").shown_by("REF.queue", "whatever")
