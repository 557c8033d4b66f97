"""Exported tests on real releases, where there is no kvproof: they fail where their finding is, and only there.

One process per release, since a release is imported once. Of records whose tests look for the same thing in the same
kind of engine, and were last right to fail on the same release, one is run, unless ``KVPROOF_EVERY_EXPORT`` is set.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from kvproof import findings, scenario_file
from kvproof.findings import Record
from kvproof.impl.vllm.fetch import release_tree
from kvproof.kvexport import export_pytest
from kvproof.kvexport.plan import plan
from kvproof.review.status import RELEASES
from kvproof.spec.config import Config, Group
from kvproof.spec.finding import Violation
from kvproof.spec.scenario import Action, Scenario, ScenarioError

sys.path.insert(0, str(Path(__file__).parent))
from exportcases import EAGLE, LONG, TAIL

sys.path.pop(0)

pytestmark = [pytest.mark.release, pytest.mark.slow]

WRITTEN = {
    "state_key": (EAGLE, "SLOT.key-content", "full-key-stale", "0.26.0"),
    "chunk_end": (EAGLE, "SLOT.chunk-end", "chunk-crosses-boundary", "0.26.0"),
    "cut": (TAIL, "HIT.only-recurrent-short", "recurrent-short-refused", "0.27.0"),
    "crash": (TAIL, "FLOW.no-crash", "", "0.27.0"),
    "bound": (LONG, "ADMIT.mamba-bound", "estimate-beyond-bound", "0.30.0"),
    "refused": (LONG, "ADMIT.refused-though-fits", "", "0.30.0"),
    "stall": (LONG, "ADMIT.stall", "", "0.30.0"),
}
"""Scenarios written by hand: what they show, and the last release that shows it."""

REFUSED = Scenario(
    Config((Group("window", 4, window=6),), num_blocks=4, hash_unit=4, step_tokens=1, connector="async"),
    (Action("submit", "r1", length=13, max_tokens=1, external=4), Action("step", times=4)),
)
"""What the reference engine takes and no release does: more running requests than tokens in a step."""

GIVEN_UP = Scenario(
    Config(
        (Group("full", 4), Group("mamba", 4)), num_blocks=12, hash_unit=4, step_tokens=8, connector="offload",
        async_scheduling=True, retention=None,
    ),
    (
        Action("submit", "r1", length=17, max_tokens=9),
        Action("step"),
        Action("reset", store=True),
        Action("step", times=4),
    ),
)  # fmt: skip
"""A step in flight has chosen what to store when the store is reset: nobody comes upon that any more."""

FIXED = (
    ("0.26.0", "0.27.0", ("SLOT.chunk-end", "chunk-ends-off-boundary")),
    ("0.26.0", "0.27.0", ("SLOT.chunk-end", "chunk-crosses-boundary")),
    ("0.26.0", "0.27.0", ("SLOT.key-content", "full-key-stale")),
    ("0.27.0", "0.28.0", ("HIT.only-recurrent-short", "recurrent-short-refused")),
    ("0.30.0", "0.31.0", ("ADMIT.mamba-bound", "estimate-beyond-bound")),
    ("0.30.0", "0.31.0", ("ADMIT.refused-though-fits", "step-refuses-what-fits-mamba-with-checkpoint")),
    ("0.30.0", "0.31.0", ("ADMIT.refused-though-fits", "whole-sequence-gate-refuses-what-fits-mamba-with-checkpoint")),
    ("0.29.0", "0.30.0", ("REUSE.sibling", "boundary-state-not-kept-with-drafter")),
    ("0.31.0", "0.32.0", ("REUSE.resend", "no-chunk-ended-at-boundary")),
)
"""Last faulty release, first fixed one, the recorded finding: PR 51113, PR 51468, PR 57050, PR 53945, PR 50409."""


@functools.cache
def exports() -> dict[str, str]:
    """The tests that are run, by a name that is a file's."""
    files = {}
    for name, (scenario, invariant, cause, faulty) in WRITTEN.items():
        files[name] = export_pytest(scenario, Violation(invariant, cause or "a-cause", "seen"), f"vllm=={faulty}")
    files["given_up"] = export_pytest(GIVEN_UP, Violation("EXT.offload-content", "chosen-full-key-foreign", "seen"), "")
    files["refused_at_start"] = export_pytest(REFUSED, Violation("ADMIT.exact", "a-cause", "seen"), "reference")
    alike = set()
    fixed = {identity for *_, identity in FIXED}
    for record in findings.load():
        kind = kind_of(record)
        if kind is None:
            continue
        if kind not in alike or record.identity in fixed or os.environ.get("KVPROOF_EVERY_EXPORT"):
            alike.add(kind)
            assert record.scenario is not None
            scenario = scenario_file.parse(record.scenario).scenario
            files[name_of(record)] = export_pytest(scenario, record.violation(), "")
    return files


def kind_of(record: Record) -> tuple[object, ...] | None:
    """What the record's test looks for, in which kind of engine, and the last release that shows it; ``None``: there is
    no test, or no such release."""
    if record.scenario is None or not shows(record):
        return None
    scenario = scenario_file.parse(record.scenario).scenario
    try:
        check = plan(scenario, record.violation()).check
    except ScenarioError:
        return None
    config = scenario.config
    return check, config.connector == "offload", config.async_scheduling, config.image_tokens > 0, shows(record)[-1]


def name_of(record: Record) -> str:
    return re.sub(r"\W+", "_", "_".join(("record", *record.identity, shows(record)[-1])))


def shows(record: Record) -> list[str]:
    """The releases that the record is of, oldest first."""
    return [release for release in RELEASES if findings.known_for([record], release).records]


def asked(release: str) -> dict[str, str]:
    """Of the tests those that say something about ``release``: they are of it, or of the last release before it, or it
    is the newest one."""
    last = {"refused_at_start": list(RELEASES), "given_up": [RELEASES[0]]}
    last |= {name: [faulty] for name, (*_, faulty) in WRITTEN.items()}
    last |= {name_of(record): shows(record) for record in findings.load() if shows(record)}
    return {name: text for name, text in exports().items() if release in (*last[name], *after(last[name][-1]))}


BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "kvproof":
            raise ModuleNotFoundError("there is no kvproof here", name=name)

sys.meta_path.insert(0, Blocker())
"""


@functools.cache
def outcomes(release: str) -> dict[str, str]:
    """How each test that is asked ends on ``release``: "passes", "fails" (it says what it found), "skips", or "dies" of
    something else, as one may on a release that it is not about."""
    with tempfile.TemporaryDirectory() as place:
        folder, blocked = Path(place), Path(place, "blocked")
        for test, text in asked(release).items():
            (folder / f"test_{test}.py").write_text(text)
        blocked.mkdir()
        (blocked / "sitecustomize.py").write_text(BLOCKER)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(blocked), str(release_tree(release))]),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        seen = subprocess.run(
            [sys.executable, "-c", "import kvproof"], env=environment, capture_output=True, cwd=folder
        )
        assert b"there is no kvproof here" in seen.stderr
        options = ["-p", "no:cacheprovider", "--rootdir", ".", "--junitxml", "out.xml", "."]
        command = [sys.executable, "-m", "pytest", *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        ends = {}
        for case in ElementTree.parse(folder / "out.xml").iter("testcase"):
            failure = case.find("failure")
            said = failure is not None and "Found:" in str(failure.get("message"))
            end = "passes" if failure is None else "fails" if said else "dies"
            name = str(case.get("classname")).rpartition(".")[2].removeprefix("test_")
            ends[name] = end if case.find("skipped") is None else "skips"
            assert case.find("error") is None, done.stdout
    assert ends.keys() == asked(release).keys()
    return ends


def after(release: str) -> list[str]:
    """The next release and the newest one."""
    later = RELEASES[RELEASES.index(release) + 1 :]
    return [*later[:1], *later[-1:]]


@pytest.mark.parametrize("release", RELEASES)
def test_a_scenario_written_by_hand_fails_on_the_last_faulty_release_only(release: str) -> None:
    wanted = {name: "fails" for name, (*_, faulty) in WRITTEN.items() if release == faulty}
    wanted |= {name: "passes" for name, (*_, faulty) in WRITTEN.items() if release in after(faulty)}
    assert {name: outcomes(release)[name] for name in wanted} == wanted


@pytest.mark.parametrize("release", RELEASES)
def test_a_configuration_that_the_release_refuses_is_skipped(release: str) -> None:
    assert outcomes(release)["refused_at_start"] == "skips"


@pytest.mark.parametrize("release", [RELEASES[0], RELEASES[-1]])
def test_what_a_reset_of_the_store_gave_up_is_not_judged(release: str) -> None:
    assert outcomes(release)["given_up"] == "passes"


@pytest.mark.parametrize(("faulty", "fixed", "identity"), FIXED)
def test_a_recorded_fault_fails_on_the_faulty_release_and_passes_on_the_fixed_one(
    faulty: str, fixed: str, identity: tuple[str, str]
) -> None:
    records = [record for record in findings.load() if record.identity == identity]
    (name,) = (name_of(record) for record in records if shows(record)[-1:] == [faulty])
    assert outcomes(faulty)[name] == "fails"
    assert outcomes(fixed)[name] == "passes"


@pytest.mark.parametrize("release", RELEASES)
def test_a_record_fails_where_it_is_recorded_and_passes_where_its_finding_is_gone(release: str) -> None:
    records = [record for record in findings.load() if shows(record) and name_of(record) in exports()]
    wanted = {name_of(record): "fails" for record in findings.known_for(records, release).records}
    assert wanted
    # What is known there counts whether a test of it is run or not; such a test can't tell causes apart.
    known = findings.known_for(findings.load(), release)
    still = [(record.invariant, record.scenario) for record in known.records]
    for record in records:
        gone = record.identity not in known.identities and (record.invariant, record.scenario) not in still
        if gone and release in after(shows(record)[-1]):
            wanted[name_of(record)] = "passes"
    ends = {name: outcomes(release)[name] for name in wanted}
    # A test may say that it can't be asked on a release that is not known to be at fault.
    wanted = {name: end for name, end in wanted.items() if (end, ends[name]) != ("passes", "skips")}
    assert {name: ends[name] for name in wanted} == wanted
