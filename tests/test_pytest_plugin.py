"""The pytest plug-in: which test fails, what it says, and that a run which judged nothing does not look judged.

The tests that it judges here run in a pytest of their own, on a real release. What breaks an invariant there is a hand
that reaches into a real cache: a reference that nobody holds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from insiders import tree

sys.path.pop(0)

VERSION = "0.33.0"

ENGINE = '''
import pytest

@pytest.fixture
def engine():
    return Engine()

class Engine:
    """A scheduler, and a hand that breaks it. Nothing of vLLM is imported before it is made."""

    def __init__(self):
        from kvproof.impl.vllm.configuration import make_request, make_scheduler, model_output
        from kvproof.spec.config import Config, Group

        self.output = model_output
        self.scheduler = make_scheduler(Config(groups=(Group("full", 4),), num_blocks=12, hash_unit=4, step_tokens=64))
        keys = lambda request: [
            bytes([n]) * 32 for n in range(len(request.block_hashes) + 1, request.num_tokens // 4 + 1)
        ]
        self.scheduler.add_request(make_request("r1", range(100, 110), 8, keys))

    def step(self):
        output = self.scheduler.schedule()
        done = {name: [7] for name in output.num_scheduled_tokens}
        self.scheduler.update_from_output(output, self.output(output, done))

    def corrupt(self):
        self.scheduler.kv_cache_manager.block_pool.blocks[1].ref_cnt += 1

    def breaks(self):
        self.step()
        self.corrupt()
        for _ in range(4):
            self.step()
'''

TESTS = """
import sys
import unittest

import pytest
from conftest import Engine

def test_imports_it_first():
    assert "vllm" not in sys.modules  # kvproof does not import it before a test does
    Engine().breaks()

def test_holds(engine):
    for _ in range(6):
        engine.step()

def test_breaks(engine):
    engine.breaks()

def test_swallows(engine):
    try:
        engine.breaks()
    except Exception:
        pass

def test_fails_of_its_own(engine):
    try:
        engine.breaks()
    except Exception:
        pass
    assert 1 == 2, "its own"

def test_skips(engine):
    try:
        engine.breaks()
    except Exception:
        pytest.skip("it does not work here")

class TestUnit(unittest.TestCase):
    def test_skips_in_unittest(self):
        try:
            Engine().breaks()
        except Exception:
            self.skipTest("it does not work here")

@pytest.mark.xfail(reason="known")
def test_is_expected_to_fail(engine):
    engine.breaks()

@pytest.fixture
def broken(engine):
    try:
        engine.breaks()
    except Exception:
        pass

def test_setup(broken):
    pass

@pytest.fixture
def breaking(engine):
    yield
    try:
        engine.breaks()
    except Exception:
        pass

def test_teardown(breaking):
    pass
"""

OUTSIDE = """
def pytest_runtest_logfinish():
    try:
        Engine().breaks()
    except Exception:
        pass
"""


class Run:
    """A pytest run in a process of its own: its exit code, what it printed, and kvproof's report if it wrote one."""

    def __init__(self, folder: Path, *arguments: str, release: bool = True, **files: str) -> None:
        # Of its own: whatever lies in the folders above is somebody else's.
        (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        path = {"PYTHONPATH": str(tree(VERSION))} if release else {}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        done = subprocess.run(
            [Path(sys.executable).parent / "pytest", "-p", "kvproof.pytest", "-p", "no:cacheprovider", *arguments],
            env={**inherited, **quiet, **path},
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
        )
        self.code, self.out = done.returncode, done.stdout + done.stderr
        report = folder / "report.json"
        self.report: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}

    def said_of(self, test: str) -> str:
        """What was told of one test that failed."""
        parts = self.out.split("\n____")
        return next((part for part in parts if part.partition("\n")[0].rstrip("_").endswith(f"{test} ")), "")

    def outcome(self, test: str) -> str:
        lines = [line.split() for line in self.out.splitlines()]
        return next(line[0] for line in reversed(lines) if len(line) > 1 and line[1].endswith(f"::{test}"))


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("judged")
    return Run(
        folder, "-rA", "--kvproof=full", "--kvproof-report=report.json", "test_it.py", conftest=ENGINE, test_it=TESTS
    )


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "outcome", "says"),
    [
        ("test_imports_it_first", "FAILED", "InvariantBroken: REF.references"),
        ("test_breaks", "FAILED", "InvariantBroken: REF.references"),
        ("test_swallows", "FAILED", "No exception came through"),
        ("test_fails_of_its_own", "FAILED", "its own"),
        ("test_skips", "FAILED", "No exception came through"),
        ("test_skips_in_unittest", "FAILED", "No exception came through"),
        ("test_setup", "ERROR", "No exception came through"),
        ("test_teardown", "ERROR", "No exception came through"),
    ],
)
def test_the_test_in_which_it_breaks_fails_and_says_so(judged: Run, test: str, outcome: str, says: str) -> None:
    assert judged.outcome(test) == outcome
    said = judged.said_of(test)
    assert says in said
    assert "REF.references (" in said
    assert "  where: block 1" in said
    assert "  must hold: " in said


@pytest.mark.release
@pytest.mark.slow
def test_a_test_that_is_expected_to_fail_has_done_so(judged: Run) -> None:
    assert judged.outcome("test_is_expected_to_fail") == "XFAIL"


@pytest.mark.release
@pytest.mark.slow
def test_a_good_test_passes_and_the_run_tells_what_it_judged(judged: Run) -> None:
    assert judged.code == 1
    assert judged.outcome("test_holds") == "PASSED"
    section = judged.out.partition(" kvproof, full ")[2]
    evaluations = judged.report["evaluations"]
    assert evaluations["REF.references"] > 0
    lines = [line.split() for line in section.splitlines()]
    assert ["REF.references", f"{evaluations['REF.references']:,}"] in lines
    assert "not applicable: TAIL: " in section
    assert "error" not in section.partition("short test summary")[0]
    assert "SLOT.chunk-end" not in evaluations  # there is no recurrent group
    for finding in judged.report["findings"]:
        assert finding["invariant"].startswith("REF.")
        assert finding["test"].startswith("test_it.py::")
    phases = {finding["test"].rpartition("::")[2]: finding["phase"] for finding in judged.report["findings"]}
    assert "test_holds" not in phases
    assert phases["test_setup"] == "setup"
    assert phases["test_teardown"] == "teardown"
    assert phases["test_swallows"] == "call"


@pytest.mark.release
@pytest.mark.slow
def test_what_breaks_outside_of_any_test_fails_the_run(tmp_path: Path) -> None:
    test = "def test_holds(engine): engine.step()\n"
    run = Run(tmp_path, "--kvproof=touched", conftest=ENGINE + OUTSIDE, test_it=test)
    assert run.code == 1
    assert "1 passed" in run.out
    assert "finding: REF.references (" in run.out
    assert "outside of any test" in run.out


@pytest.mark.release
@pytest.mark.slow
def test_a_vllm_that_cannot_be_watched_is_an_error_and_not_a_pass(tmp_path: Path) -> None:
    """Here one without a scheduler. The test itself, which does not need it, is not at fault."""
    (tmp_path / "vllm" / "v1" / "core").mkdir(parents=True)
    for folder in ("vllm", "vllm/v1", "vllm/v1/core"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "vllm" / "v1" / "core" / "block_pool.py").touch()
    test = "def test_it():\n    import vllm.v1.core.block_pool\n"
    run = Run(tmp_path, "--kvproof=full", "-o", "pythonpath=.", release=False, test_it=test)
    assert run.code == 3
    assert "1 passed" in run.out
    assert "this vLLM can't be watched: " in run.out


def test_without_vllm_nothing_is_judged_and_the_run_says_so(tmp_path: Path) -> None:
    test = "def test_it():\n    import sys\n    assert not any(n.startswith('vllm') for n in sys.modules)\n"
    run = Run(tmp_path, "--kvproof=full", "--kvproof-report=report.json", release=False, test_it=test)
    assert run.code == 0
    assert "vLLM's cache was not imported: nothing was judged" in run.out
    assert run.report["installed"] is False
    assert run.report["evaluations"] == {}


def test_without_the_option_nothing_happens(tmp_path: Path) -> None:
    run = Run(tmp_path, release=False, test_it="def test_it(): pass\n")
    assert run.code == 0
    assert "kvproof" not in run.out.replace(str(tmp_path), "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--kvproof-report=r.json",), "add --kvproof=touched or --kvproof=full"),
        (("--kvproof=full", "--kvproof-report=."), "it is a folder: name a file"),
        (("--kvproof=everything",), "choose from"),
    ],
)
def test_bad_usage_is_refused_up_front(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    run = Run(tmp_path, *arguments, release=False, test_it="def test_it(): pass\n")
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert says in run.out
    assert "Traceback" not in run.out
