"""Bad input and full disks: one clear line with a way out, the right exit code, and nothing that was found is lost."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvproof import cli, engines, findings, scenario_file
from kvproof.errors import CheckerError
from kvproof.models.stateful import campaign
from kvproof.models.stateful.notes import Tally
from kvproof.spec.scenario import Action, Scenario, ScenarioError

sys.path.insert(0, str(Path(__file__).parent))
from fakeengines import FINDING, FUZZ, SCENARIO, Engines, FakeCampaign, FakeSubject, command, install, line, record

sys.path.pop(0)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engines:
    return install(monkeypatch, tmp_path)


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    scenario_file.save(tmp_path / "s.json", SCENARIO)
    return str(tmp_path / "s.json")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"status": "maybe"}, "Invalid enum value"),
        ({"colour": 1}, "unknown field colour"),
        ({"scenario": {"kvproof_scenario": 2}}, "newer kvproof"),
        ({"releases": ["soon"]}, "unreadable release range"),
        (
            {"invariant": "SLOT.ful"},
            "there is no invariant 'SLOT.ful' (of a newer kvproof? then upgrade): write one of",
        ),
    ],
)
def test_a_damaged_record_is_said(
    fakes: Engines, capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    record(tmp_path, **changes)
    assert cli.run(list(FUZZ)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("kvproof: error: known finding known/a.json can't be read: ")
    assert says in captured.err
    assert captured.err.count("\n") == 1, "nothing is fuzzed, and none is said to be"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            ModuleNotFoundError("No module named 'z3'", name="z3"),
            2,
            "z3 is not installed: pip install 'kvproof[check]'",
        ),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 2, "'kvproof[torch]'"),
        (ModuleNotFoundError("No module named 'zmq'", name="zmq"), 2, "'kvproof[vllm,torch]'"),
        (ModuleNotFoundError("No module named 'vllm'", name="vllm"), 2, "vLLM is not installed in this interpreter"),
        (ModuleNotFoundError("No module named 'vllm.v2'", name="vllm.v2"), 2, "this vLLM can't be driven"),
        (ModuleNotFoundError("No module named 'kvproof.x'", name="kvproof.x"), 3, "this kvproof has no kvproof.x"),
        (ImportError("cannot import name 'a'", name="kvproof.models"), 3, "this kvproof has no kvproof.models"),
        (ImportError("libcuda.so: no such file", name="vllm._C"), 2, "this vLLM can't be driven: libcuda.so"),
        (CheckerError("the worker died"), 3, "the worker died"),
        (EOFError("marshal data too short"), 3, "a checker failed: EOFError: marshal data too short"),
        (OSError(errno.ENOSPC, "No space left on device", "x.json"), 2, "can't write x.json: No space left on device"),
        (SystemExit(0), 3, "what was driven ended the process: SystemExit: 0"),
        (ValueError("\x1b[2Jwiped"), 3, "ValueError: \N{REPLACEMENT CHARACTER}[2Jwiped"),
        (ZeroDivisionError("division\nby zero"), 3, "a checker failed: ZeroDivisionError: division by zero"),
    ],
)
def test_what_goes_wrong_inside_is_one_line(
    fakes: Engines, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, says: str
) -> None:
    fakes.campaign = error
    assert cli.run(list(FUZZ)) == code
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert last.startswith("kvproof: error: ")
    assert says in last
    assert "Traceback" not in captured.err


def test_the_trace_is_shown_on_request(
    fakes: Engines, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPROOF_DEBUG", "1")
    fakes.campaign = ZeroDivisionError("no")
    assert cli.run(list(FUZZ)) == 3
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("fuzz", "sglang"), "unknown subject 'sglang': use spec, reference, vllm, vllm==0.33.0 or vllm@PATH"),
        (("fuzz", "vllm=="), "names no release"),
        (("fuzz", "vllm==latest"), "names no release"),
        (("fuzz", "vllm==0.9.1"), "too old to be driven: use 0.20.0 or newer"),
        (("fuzz", "vllm@/nowhere"), "no vLLM checkout at /nowhere"),
        (("fuzz", "vllm==" + "9" * 5000), "names no release"),
        (("fuzz", "vllm@~nobody.at.all/vllm"), "'vllm@~nobody.at.all/vllm' names no folder"),
        (("fuzz", "vllm==0.33.0", "--findings", "none"), "no folder of known findings at none: nothing is there"),
        (("fuzz", "vllm==0.33.0", "--findings", "file"), "no folder of known findings at file: a file is there"),
        (("fuzz", "vllm==0.33.0", "--steps", "0"), "Invalid value for '--steps'"),
        (("fuzz", "vllm==0.33.0", "--steps", "x"), "Invalid value for '--steps'"),
        (("fuzz", "vllm==0.33.0", "--workers", "65"), "Invalid value for '--workers'"),
        (("fuzz", "vllm==0.33.0", "--seed", "9" * 30), "Invalid value for '--seed'"),
        (("fuzz", "vllm==0.33.0", "--seconds", "nan"), "Invalid value for '--seconds'"),
        (("fuzz",), "Missing argument"),
        (("fuzz", "vllm", "--fast"), "No such option"),
        (("dance",), "No such command"),
        (("replay", "none.json", "--on", "vllm==0.33.0"), "can't read none.json"),
        (("replay", "s.json"), "Missing option"),
        (("export", "s.json", "--as", "pdf"), "Invalid value for '--as'"),
        (("export", "none.json"), "can't read none.json"),
        (("export", "s.json", "-o", "./s.json"), "s.json is the scenario itself: name another file with --output"),
        (("export", "s.json", "-o", "to-s.json"), "to-s.json is the scenario itself"),
    ],
)
def test_wrong_use_is_one_line(
    fakes: Engines, capsys: pytest.CaptureFixture[str], scenario: str, arguments: tuple[str, ...], says: str
) -> None:
    Path("file").write_text("")
    Path("to-s.json").symlink_to("s.json")
    before = Path(scenario).read_text()
    assert cli.run(arguments) == 2
    assert Path(scenario).read_text() == before
    err = capsys.readouterr().err
    errors = [text for text in err.splitlines() if text.startswith("kvproof: error: ")]
    assert len(errors) == 1
    assert says in errors[0]
    assert err.splitlines()[-1] == errors[0]


def test_the_real_command_fails_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "new.json").write_text(json.dumps({**SCENARIO.to_dict(), "kvproof_scenario": 2}))
    (tmp_path / "file").write_text("")
    offline = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "1",
    }
    cases: list[tuple[tuple[str, ...], dict[str, str], str]] = [
        (("fuzz", "specs"), {}, "unknown subject 'specs'"),
        (("replay", "new.json", "--on", "vllm==0.33.0"), {}, "written by a newer kvproof: version 2"),
        (
            ("fuzz", "vllm==0.33.0"),
            {"KVPROOF_CACHE": str(tmp_path / "cache"), **offline},
            "can't reach the package index",
        ),
        (("fuzz", "vllm==0.33.0"), {"KVPROOF_CACHE": str(tmp_path / "file" / "x")}, "can't write to the cache folder"),
    ]
    for arguments, environment, says in cases:
        done = command(*arguments, cwd=tmp_path, **environment)
        assert done.returncode == 2
        last = done.stderr.splitlines()[-1]
        assert last.startswith("kvproof: error: ")
        assert says in last
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


@pytest.mark.parametrize(
    ("file", "source", "says"),
    [
        ("__init__.py", b"raise SystemExit(0)", "vllm/__init__.py, line 1: SystemExit: 0"),
        ("__init__.py", b"import sys\nsys.exit('no GPU')", "vllm/__init__.py, line 2: SystemExit: no GPU"),
        ("__init__.py", b"1 / 0", "vllm/__init__.py, line 1: ZeroDivisionError: division by zero"),
        ("version.py", b"\ndef (", "vllm/version.py, line 2: SyntaxError: invalid syntax"),
        ("version.py", b"a = 1\0", "SyntaxError: source code "),
    ],
)
def test_a_checkout_that_can_not_be_imported_is_the_environment_s(
    tmp_path: Path, file: str, source: bytes, says: str
) -> None:
    """Each in a process of its own: what the checkout does must not happen to this one."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("import vllm.version")
    (tmp_path / "vllm" / file).write_bytes(source)
    done = command("fuzz", "vllm@.", "--steps", "1", "--workers", "1", cwd=tmp_path)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"kvproof: error: this vLLM can't be imported: {tmp_path}/")
    assert says in last
    assert done.stderr.count("kvproof: error: ") == 1


def test_what_a_checker_does_wrong_while_a_vllm_is_opened_stays_a_checker_s(
    fakes: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.subject = RuntimeError("a mistake of ours")
    assert cli.run(list(FUZZ)) == 3
    assert "a checker failed: RuntimeError: a mistake of ours" in capsys.readouterr().err


def test_a_part_of_kvproof_that_is_missing_is_no_missing_extra() -> None:
    with pytest.raises(CheckerError, match=r"this kvproof has no kvproof\.models\.nothing"):
        engines.load("kvproof.models.nothing", "x")
    with pytest.raises(CheckerError, match=r"this kvproof has no kvproof\.report\.nothing"):
        engines.load("kvproof.report", "nothing")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("fuzz", "vllm==0.33.0", "--json", "file/x.json"), "can't write the result to file/x.json: file is a file"),
        (("fuzz", "vllm==0.33.0", "--json", "folder"), "can't write the result to folder: it is a folder: name a file"),
        (("fuzz", "vllm==0.33.0", "--json", "-"), "can't write the result to -: standard output has something else"),
        (("fuzz", "vllm==0.33.0", "--json", "/proc/x.json"), "nothing can be made in /proc"),
        (("fuzz", "vllm==0.33.0", "--out", "file"), "can't write findings to file: file is a file where a folder is"),
        (("fuzz", "vllm==0.33.0", "--out", "file/x"), "can't write findings to file/x: file is a file where a folder"),
        (("fuzz", "vllm==0.33.0", "--out", "/proc/x/y"), "nothing can be made in /proc"),
        (("fuzz", "vllm==0.33.0", "--out", "dangling/x"), "dangling is no folder: name another folder"),
        (("fuzz", "vllm==0.33.0", "--report", "file"), "can't write the report to file: file is a file"),
        (("fuzz", "vllm==0.33.0", "--report", "folder"), "can't write the report to folder/fuzz.json: it is a folder"),
        (("prove", "--report", "file"), "can't write the report to file"),
        (("prove", "--out", "file/x"), "can't write proofs to file/x"),
        (("verify", "--report", "file"), "can't write the report to file"),
        (("verify", "--report", "taken"), "can't write findings to taken/findings: taken/findings is a file"),
        (("replay", "s.json", "--on", "vllm==0.33.0", "--report", "file"), "can't write the report to file"),
        (("export", "s.json", "--as", "text", "-o", "file/x/y.txt"), "can't write the export to file/x/y.txt: file is"),
        (("export", "s.json", "--as", "text", "-o", "folder"), "can't write the export to folder: it is a folder"),
        (("export", "s.json", "--as", "text", "-o", "to-proc"), "can't write the export to to-proc: nothing can be"),
    ],
)
def test_what_can_not_be_written_is_refused_before_anything_is_searched(
    fakes: Engines, capsys: pytest.CaptureFixture[str], scenario: str, arguments: tuple[str, ...], says: str
) -> None:
    Path("file").write_text("")
    Path("dangling").symlink_to("nowhere")
    Path("to-proc").symlink_to("/proc/x.txt")
    Path("folder/fuzz.json").mkdir(parents=True)
    Path("taken").mkdir()
    Path("taken/findings").write_text("")
    before = sorted(Path().rglob("*"))
    fakes.campaign = fakes.claims = fakes.replay = CheckerError("this was searched")
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("kvproof: error: can't write ")
    assert captured.err.count("\n") == 1
    assert says in captured.err
    assert sorted(Path().rglob("*")) == before, "asking makes nothing"


def test_findings_are_shown_and_failed_on_where_files_can_not_be_written(
    fakes: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is full when all is done: /dev/full says so to whatever is written, and the report is in its way."""

    class Filling(FakeSubject):
        def families(self) -> frozenset[str]:
            Path("r/fuzz.json").mkdir(parents=True)
            return super().families()

    fakes.subject = Filling()
    fakes.campaign = FakeCampaign(findings=(FINDING,))
    assert cli.run([*FUZZ, "--json", "/dev/full", "--report", "r"]) == 1
    captured = capsys.readouterr()
    assert SCENARIO.text() in captured.out
    assert line(captured.out).endswith("verdict=found exit=1")
    last = captured.err.splitlines()[-1]
    assert last.startswith(
        "kvproof: error: can't write /dev/full: No space left on device; can't write the report to r"
    )


def test_without_findings_a_file_that_can_not_be_written_is_an_error(fakes: Engines) -> None:
    assert cli.run([*FUZZ, "--json", "/dev/full"]) == 2
    fakes.campaign = FakeCampaign(interrupted=True)
    assert cli.run([*FUZZ, "--json", "/dev/full"]) == 130


def test_standard_output_that_is_full_costs_neither_the_exit_code_nor_a_trace(tmp_path: Path) -> None:
    scenario_file.save(tmp_path / "s.json", SCENARIO)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "kvproof", "export", str(tmp_path / "s.json"), "--as", "text"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert done.stderr == "kvproof: error: can't write to standard output: No space left on device\n"


def test_findings_count_where_standard_output_is_full(fakes: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.campaign = FakeCampaign(findings=(FINDING,))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.run(list(FUZZ)) == 1
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # closing writes once more


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    scenario_file.write_whole(pipe, "all of it")
    reader.join()
    assert read == ["all of it"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_pipe_without_a_name_is_written_to(tmp_path: Path) -> None:
    """As in --json /dev/stdout before a pipe, and >(…) of a shell: a link that leads to no path."""
    read, write = os.pipe()
    place = Path(f"/dev/fd/{write}")
    assert place.is_symlink()
    scenario_file.write_whole(place, "all of it")
    os.close(write)
    with open(read) as reader:
        assert reader.read() == "all of it"


def test_a_folder_that_is_gone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.run(["spec", "diff", "HEAD", "HEAD"]) == 2
    assert capfd.readouterr().err == "kvproof: error: the current folder is there no more: change to another\n"


def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("elsewhere/target")
    for text in ("not there yet", "replaced"):
        scenario_file.write_whole(link, text)
        assert link.readlink() == Path("elsewhere/target")
        assert (tmp_path / "elsewhere" / "target").read_text() == text
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["target"]


def test_what_can_not_be_encoded_is_written_all_the_same(tmp_path: Path) -> None:
    scenario_file.write_whole(tmp_path / "x", "half a character: \ud800")
    assert (tmp_path / "x").read_text() == "half a character: \\ud800"


def test_a_terminal_without_the_letters_is_no_error(tmp_path: Path) -> None:
    scenario_file.save(tmp_path / "s.json", Scenario(SCENARIO.config, SCENARIO.actions, note="…"))
    done = command("export", "s.json", "--as", "text", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2026" in done.stdout


@pytest.mark.parametrize("invariant", ["SLOT.key-contents", "NONE.such", ""])
def test_a_finding_of_an_invariant_that_there_is_not_is_never_gone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, invariant: str
) -> None:
    data = scenario_file.to_data(SCENARIO, FINDING)
    data["finding"]["invariant"] = invariant
    (tmp_path / "f.json").write_text(json.dumps(data))
    assert cli.run(["replay", str(tmp_path / "f.json"), "--on", "vllm==0.33.0"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"kvproof: error: {tmp_path}/f.json: there is no invariant {invariant!r}")
    assert "SLOT.key-content, SLOT.key-length" in err


def test_the_records_that_come_with_kvproof_name_invariants_that_there_are() -> None:
    for known in findings.load():
        scenario_file.check_invariant(known.invariant)


def test_what_a_campaign_finds_can_be_read_again() -> None:
    """Reducing cuts what a base puts out, and leaves what is shared of it: more than a file may ask for."""
    actions = (Action("submit", "a", length=9, max_tokens=1), Action("submit", "b", "a", 30, 40, 2))
    loose = replace(FINDING, scenario=Scenario(SCENARIO.config, actions))
    with pytest.raises(ScenarioError, match="shared is 30: a has at most 10 tokens"):
        scenario_file.parse(loose.scenario.to_dict())
    (found,) = campaign._merge([Tally(findings=[loose])], searches=1, seed=1, seconds=1.0, searched=1.0).findings
    assert [action.shared for action in found.scenario.actions] == [0, 10]
    assert scenario_file.parse(found.scenario.to_dict()).scenario == found.scenario
