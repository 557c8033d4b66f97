"""Exported tests: what they contain, and that they fail on the faulty release and pass on the fixed one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from kvproof.invariants.catalogue import CATALOGUE
from kvproof.kvexport import export_pytest, export_text
from kvproof.kvexport.plan import CHECKS
from kvproof.spec.config import Config, Group
from kvproof.spec.finding import Violation
from kvproof.spec.scenario import Action, Scenario, ScenarioError

ALLOWED = frozenset({"vllm", "pytest", "torch", *sys.stdlib_module_names})

EAGLE = Scenario(
    Config(
        (Group("full", 16, drafter=True), Group("mamba", 16)), 64, 16, 20, speculative=1, eagle=True, retention=None
    ),
    (
        Action("submit", "a", length=16, max_tokens=4),
        Action("submit", "b", length=20, max_tokens=4),
        Action("step", times=3),
    ),
)
"""Two prompts share a step of 20 tokens: the second one's first chunk ends inside a block (PR 51113)."""

TAIL = Scenario(
    Config(
        (Group("full", 64), Group("mamba", 64)), 10, 16, 512, retention=None, connector="async", divergent_hits=True
    ),
    (
        Action("submit", "a", length=214, max_tokens=1),
        Action("step", times=3),
        Action("submit", "c", length=100, max_tokens=1),
        Action("step", times=3),
        Action("submit", "b", base="a", shared=214, length=300, max_tokens=1, external=256),
        Action("step", times=3),
    ),
)
"""c takes the blocks of a's recurrent states, which are first in the free queue; b then hits a's attention blocks up to
the partial tail at 208, and the store offers more than the tail (PR 51468)."""

LONG = Scenario(
    Config(
        (Group("full", 64), Group("mamba", 64)),
        40,
        16,
        512,
        checkpoint_blocks=1,
        checkpoint_alignment=16,
        connector="async",
        max_model_len=4096,
    ),
    (Action("submit", "a", length=1600, max_tokens=4, external=128), Action("step", times=8)),
)
"""A request that holds loaded blocks and needs a checkpoint is charged for its whole length (PR 57050)."""

MIXED = Scenario(
    Config(
        (Group("full", 16, drafter=True), Group("mamba", 32)), 40, 16, 100, speculative=3, eagle=True, connector="sync"
    ),
    (
        Action("submit", "a", length=100, max_tokens=9, external=64),
        Action("step", times=4, accept=(0, 2)),
        Action("submit", "b", base="a", shared=90, length=120, max_tokens=9),
        Action("step", times=2, accept=(1,)),
        Action("finish", "a"),
        Action("step", times=2),
        Action("preempt", "b"),
        Action("step"),
        Action("reset"),
        Action("submit", 'say "c"', length=50, max_tokens=5),
        Action("step"),
        Action("abort", 'say "c"'),
        Action("evict", times=3),
        Action("step", times=4),
    ),
)
"""Every kind of action at once."""

WINDOW = Scenario(
    Config((Group("full", 32), Group("window", 16, window=40), Group("mamba", 32)), 60, 16, 64, retention=0),
    (
        Action("submit", "a", length=100, max_tokens=9),
        Action("step", times=4),
        Action("submit", "b", base="a", shared=98, length=150, max_tokens=9),
        Action("step", times=9),
    ),
)

SCENARIOS = {"eagle": EAGLE, "tail": TAIL, "long": LONG, "mixed": MIXED, "window": WINDOW}
CAUSES = {"HIT.only-recurrent-short": "recurrent-short-refused"}


def broken(invariant: str, cause: str = "", **where: str | int) -> Violation:
    cause = cause or CAUSES.get(invariant, "a-cause")
    return Violation(invariant, cause, 'promised "this"\\ and found """that"""', tuple(where.items()))


def exported() -> dict[str, str]:
    """Every scenario for every invariant that has a test, by a name that is a file's."""
    files = {
        f"{name}_{invariant}".replace(".", "_").replace("-", "_"): export_pytest(
            scenario, broken(invariant), "vllm==0.30.0"
        )
        for name, scenario in SCENARIOS.items()
        for invariant in CHECKS
    }
    return {**files, **{f"{name}_whole": export_pytest(SCENARIOS[name], None, "vllm@here") for name in SCENARIOS}}


def imported(text: str) -> set[str]:
    """The top-level modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def test_every_file_stands_alone_and_is_clean(tmp_path: Path) -> None:
    files = exported()
    for name, text in files.items():
        assert imported(text) <= ALLOWED, name
        assert "\n\n\n\n" not in text
        assert text.endswith("\n")
        (tmp_path / f"test_{name}.py").write_text(text)
    ruff = [sys.executable, "-m", "ruff"]
    rules = ["--select", "E,F,I,UP,B,SIM", "--ignore", "B905", "--config", 'lint.isort.known-first-party=["vllm"]']
    width = ["--isolated", "--no-cache", "--line-length", "88", str(tmp_path)]
    for command in (["check", "--output-format", "concise", *rules], ["format", "--check"]):
        done = subprocess.run([*ruff, *command, *width], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_file_has_only_what_its_finding_needs() -> None:
    keys = export_pytest(EAGLE, broken("SLOT.key-content", group=1), "vllm==0.26.0")
    assert "class Device" in keys
    assert "SpeculativeConfig(" in keys
    for absent in ("Connector", "ATTENTION", "def drain", "def finish", "accept=", "base=", "watch_", "exported"):
        assert absent not in keys
    bound = export_pytest(LONG, broken("ADMIT.mamba-bound"), "vllm==0.30.0")
    assert "class Store(KVConnectorBase_V1, SupportsHMA)" in bound
    assert "watch_charges(" in bound
    for absent in ("Device(", "SpeculativeConfig", "check_keys", "accept="):
        assert absent not in bound
    both = export_pytest(EAGLE, broken("SLOT.key-content"), "vllm==0.26.0")
    assert "ATTENTION = {0: 16}" in both


def test_the_scenario_reads_as_it_was_written() -> None:
    text = export_pytest(MIXED, broken("SLOT.key-content", group=1), "vllm==0.33.0")
    calls = text[text.index("def test_slot_key_content") :]
    for line in (
        'engine.submit("a", length=100, max_tokens=9, external=64)',
        "engine.step(4, accept=(0, 2))",
        'engine.submit("b", length=120, max_tokens=9, base="a", shared=90)',
        "engine.step(2, accept=(1,))",
        'engine.finish("a")',
        'engine.preempt("b")',
        "engine.step()",
        "engine.reset()",
        """engine.abort('say "c"')""",
        "engine.evict(3)",
    ):
        assert f"    {line}\n" in calls


def test_later_actions_are_left_out_and_the_end_is_looked_at() -> None:
    early = export_pytest(TAIL, broken("SLOT.key-content", group=1), "vllm==0.27.0", 1)
    assert early.count("engine.submit(") == 1
    assert "engine.drain()" not in early
    assert "engine.drain()" in export_pytest(TAIL, broken("SLOT.key-content", group=1), "vllm==0.27.0", 6)
    assert "engine.drain()" in export_pytest(TAIL, broken("REF.drained"), "vllm==0.27.0", 5)


def test_the_text_says_what_broke() -> None:
    violation = broken("ADMIT.mamba-bound", "estimate-beyond-bound")
    documentation = " ".join(str(ast.get_docstring(ast.parse(export_pytest(LONG, violation, "vllm==0.30.0")))).split())
    for part in ("ADMIT.mamba-bound", "estimate-beyond-bound", "vllm==0.30.0", 'promised "this"', "PR 57050"):
        assert part in documentation
    text = export_text(LONG, violation, "vllm==0.30.0")
    assert "submit a: 1600 fresh tokens" in text
    assert "shows on vllm==0.30.0: ADMIT.mamba-bound (estimate-beyond-bound)" in text


def test_forced_actions_are_owned_up_to() -> None:
    assert "from outside" in str(ast.get_docstring(ast.parse(export_pytest(MIXED, None, "vllm==0.33.0"))))


@pytest.mark.parametrize("invariant", sorted({entry.id for entry in CATALOGUE} - set(CHECKS)))
def test_what_no_test_shows_is_refused(invariant: str) -> None:
    with pytest.raises(ScenarioError, match="--as text"):
        export_pytest(EAGLE, broken(invariant), "vllm==0.26.0")


def test_every_check_is_of_an_invariant_in_the_catalogue() -> None:
    assert set(CHECKS) <= {entry.id for entry in CATALOGUE}


@pytest.mark.parametrize(
    ("invariant", "cause"),
    [("SLOT.key-content", "key-window-wrong"), ("SLOT.running-state", "running-window-wrong"),
     ("HIT.only-recurrent-short", "short-cut-silently"), ("HIT.limit", "hit-deeper-than-a-group-at-connector")],
)  # fmt: skip
def test_a_cause_that_a_test_cannot_see_is_refused(invariant: str, cause: str) -> None:
    with pytest.raises(ScenarioError, match="--as text"):
        export_pytest(EAGLE, broken(invariant, cause), "vllm==0.26.0")


FINDINGS = {
    "state_key": (EAGLE, broken("SLOT.key-content", "full-key-stale", group=1), "0.26.0", "0.27.0"),
    "chunk_end": (EAGLE, broken("SLOT.chunk-end", "chunk-crosses-boundary"), "0.26.0", "0.27.0"),
    "cut": (TAIL, broken("HIT.only-recurrent-short", "recurrent-short-refused"), "0.27.0", "0.28.0"),
    "crash": (TAIL, broken("FLOW.no-crash"), "0.27.0", "0.28.0"),
    "bound": (LONG, broken("ADMIT.mamba-bound", "estimate-beyond-bound"), "0.30.0", "0.31.0"),
    "refused": (LONG, broken("ADMIT.refused-though-fits"), "0.30.0", "0.31.0"),
    "stall": (LONG, broken("ADMIT.stall"), "0.30.0", "0.31.0"),
}
"""Scenario, violation, the last release that shows it and the first one that does not."""

NEWEST = "0.33.0"
RELEASES = sorted({release for *_, faulty, fixed in FINDINGS.values() for release in (faulty, fixed)} | {NEWEST})

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "kvproof":
            raise ModuleNotFoundError("there is no kvproof here", name=name)

sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("release", RELEASES)
def test_files_fail_on_the_faulty_release_and_pass_on_the_fixed_one(release: str, tmp_path: Path) -> None:
    from kvproof.impl.vllm.fetch import release_tree

    wanted: dict[str, bool] = {}
    for name, (scenario, violation, faulty, fixed) in FINDINGS.items():
        if release in (faulty, fixed, NEWEST):
            (tmp_path / f"test_{name}.py").write_text(export_pytest(scenario, violation, f"vllm=={faulty}"))
            wanted[name] = release != faulty
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(BLOCKER)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(blocked), str(release_tree(release))]),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    seen = subprocess.run([sys.executable, "-c", "import kvproof"], env=environment, capture_output=True, cwd=tmp_path)
    assert b"there is no kvproof here" in seen.stderr
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", ".", "--junitxml", "out.xml", "."],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    passed = {}
    for case in ElementTree.parse(tmp_path / "out.xml").iter("testcase"):
        failure = case.find("failure")
        passed[str(case.get("classname")).rpartition(".")[2].removeprefix("test_")] = failure is None
        assert case.find("error") is None, done.stdout
        assert failure is None or "Found:" in str(failure.get("message")), done.stdout
    assert passed == wanted, done.stdout
