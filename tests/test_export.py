"""Exported tests: what they contain. That they fail where they should is asked of real releases elsewhere."""

from __future__ import annotations

import ast
import contextlib
import re
import subprocess
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from kvproof import findings, scenario_file
from kvproof.findings import Record
from kvproof.invariants.catalogue import CATALOGUE
from kvproof.kvexport import export_pytest, export_text
from kvproof.kvexport.checks import CHECKS
from kvproof.kvexport.origin import LONGEST, origin
from kvproof.spec.config import Config, Group
from kvproof.spec.finding import Violation
from kvproof.spec.scenario import Action, Scenario, ScenarioError

sys.path.insert(0, str(Path(__file__).parent))
from exportcases import EAGLE, FLIGHT, HOST, IMAGES, LONG, SHORT, TAIL, UNITS

sys.path.pop(0)

ALLOWED = frozenset({"vllm", "pytest", "torch", *sys.stdlib_module_names})

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

SCENARIOS = {
    "eagle": EAGLE,
    "tail": TAIL,
    "long": LONG,
    "mixed": MIXED,
    "window": WINDOW,
    "host": HOST,
    "flight": FLIGHT,
    "images": IMAGES,
    "units": UNITS,
    "short": SHORT,
}
CAUSES = {
    "HIT.only-recurrent-short": "recurrent-short-refused",
    "EVENT.stored-well-formed": "mamba-tokens-of-other-blocks",
    "EVENT.removed-is-gone": "removed-while-carried",
    "SLOT.null-write": "attention-write-to-null",
    "SLOT.exclusive-write": "state-write-over-key",
    "ADMIT.starved": "waiting-request-passed-over",
    "EXT.offload-content": "state-overwritten-before-copy",
    "EXT.offload-offers": "offers-boundary-without-state",
    "EXT.offload-serves": "holds-but-offers-nothing",
    "EXT.counts-what-came": "counts-what-never-came",
}
MORE = (
    ("SLOT.exclusive-write", "state-write-unheld"),
    ("SLOT.key-content", "key-window-wrong"),
    ("SLOT.running-state", "running-window-wrong"),
    ("SLOT.null-write", "state-write-to-null"),
    ("FLOW.no-crash", "scheduler.schedule-MalformedOutput-more-drafts-than-tokens"),
    ("FLOW.no-crash", "scheduler.schedule-MalformedOutput-more-tokens-than-there-are"),
    ("ADMIT.starved", "running-request-passed-over"),
    ("ADMIT.startup", "lone-request-preempts-itself"),
    ("SLOT.exclusive-write", "attention-write-shared"),
    ("HIT.limit", "store-read-for-unread"),
    ("EXT.offload-content", "chosen-full-key-stale"),
    ("EXT.offload-content", "offered-full-key-stale"),
    ("EXT.offload-offers", "offers-attention-it-lacks"),
    ("EXT.offload-offers", "leaves-nothing-to-compute"),
    ("EXT.offload-serves", "holds-more-than-it-offers"),
    ("EVENT.stored-well-formed", "offloaded-full-block-size-of-another-group"),
)
"""Causes that their invariant's test looks for in another way."""
PROMISED: dict[str, str | int] = {"request": "b", "base": "a", "promised": 16}


def broken(invariant: str, cause: str = "", **where: str | int) -> Violation:
    cause = cause or CAUSES.get(invariant, "a-cause")
    return Violation(invariant, cause, 'promised "this"\\ and found """that"""', tuple(where.items()))


def exported() -> dict[str, str]:
    """Every scenario for every invariant that has a test, by a name that is a file's."""
    files = {}
    for number, (invariant, cause) in enumerate([*((invariant, "") for invariant in CHECKS), *MORE]):
        violation = broken(invariant, cause, **PROMISED if invariant.startswith("REUSE") else {})
        written = 0
        names = deque(SCENARIOS)
        names.rotate(number)  # each check with three of them, and each of them with many checks
        for name in names:
            if written == 3:
                break
            with contextlib.suppress(ScenarioError):  # a check may need a store, or no steps in flight
                file = re.sub(r"\W", "_", f"{name}_{invariant}_{cause}")
                files[file] = export_pytest(SCENARIOS[name], violation, "vllm==0.30.0")
                written += 1
        assert written, (invariant, cause)
    plain = [name for name, scenario in SCENARIOS.items() if not scenario.config.async_scheduling and name != "short"]
    files |= {f"{name}_whole": export_pytest(SCENARIOS[name], None, "vllm@here") for name in plain}
    files |= {f"record_{number}": exported_record(record) for number, record in enumerate(findings.load())}
    return files


def documentation(text: str) -> str:
    """The file's docstring, in one line."""
    return " ".join(str(ast.get_docstring(ast.parse(text))).split())


def record_of(invariant: str, cause: str, release: str) -> Record:
    records = findings.known_for(findings.load(), release).records
    return next(record for record in records if record.identity == (invariant, cause))


def recorded(invariant: str, cause: str, release: str) -> str:
    """The export of the record that names this release."""
    return exported_record(record_of(invariant, cause, release))


def exported_record(record: Record) -> str:
    return export_pytest(scenario_of(record), record.violation(), "")


def scenario_of(record: Record) -> Scenario:
    assert record.scenario is not None
    return scenario_file.parse(record.scenario).scenario


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
    assert "class Store(connector_base.KVConnectorBase_V1, connector_base.SupportsHMA)" in bound
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
    told = documentation(export_pytest(LONG, violation, "vllm==0.30.0"))
    for part in ("ADMIT.mamba-bound", "estimate-beyond-bound", "vllm==0.30.0", 'promised "this"', "PR 57050"):
        assert part in told
    assert "imports vLLM (its Python sources are enough), torch and pytest only." in told
    text = export_text(LONG, violation, "vllm==0.30.0")
    assert "submit a: 1600 fresh tokens" in text
    assert "shows on vllm==0.30.0: ADMIT.mamba-bound (estimate-beyond-bound)" in text


def test_a_note_can_not_write_to_the_terminal_by_itself() -> None:
    noted = replace(LONG, note="\x1b[31mred\0\nnext\tline")
    violation = Violation("ADMIT.mamba-bound", "estimate-beyond-bound", "\x1b[2Jwiped", ())
    for text in (
        export_text(noted, violation, "vllm==0.30.0"),
        export_pytest(noted, violation, "vllm==0.30.0"),
        export_pytest(noted, None, "vllm==0.30.0"),
    ):
        assert all(letter.isprintable() for letter in text.replace("\n", ""))
        assert "\N{REPLACEMENT CHARACTER}[31mred" in text
    assert export_text(noted, None, "").endswith("red\N{REPLACEMENT CHARACTER}\nnext    line\n")
    ast.parse(text)


def test_a_record_tells_its_releases_and_what_is_known() -> None:
    told = documentation(recorded("SLOT.chunk-end", "chunk-crosses-boundary", "0.31.0"))
    assert "Found on vLLM 0.30.0 … 0.31.0. Read in 0.30.0 and 0.33.0: _mamba_block_aligned_split decides" in told
    assert "See" not in told
    told = documentation(recorded("HIT.covers", "window-short-at-resume", "0.26.0"))
    assert "Found on vLLM 0.26.0 … 0.33.0. Not confirmed" in told
    record = record_of("SLOT.chunk-end", "chunk-ends-off-boundary", "0.26.0")
    assert record.scenario is not None
    text = export_text(scenario_file.parse(record.scenario).scenario, record.violation(), "")
    assert "shows on vLLM 0.26.0: SLOT.chunk-end (chunk-ends-off-boundary)\n" in text
    assert not any(line and not line.strip() for line in text.splitlines())


def test_what_was_found_on_kvproof_s_own_engine_is_not_said_to_be_vllm_s() -> None:
    for subject, words in (("reference", "reference engine"), ("spec", "abstract machine")):
        told = documentation(export_pytest(LONG, broken("ADMIT.exact"), subject))
        assert f"Found on kvproof's {words}: promised" in told
        assert "not on vLLM" in told
        assert "drives the real scheduler" not in told
        assert f"shows on kvproof's {words}: ADMIT.exact" in export_text(LONG, broken("ADMIT.exact"), subject)
    assert "drives the real scheduler" in documentation(export_pytest(LONG, broken("ADMIT.exact"), "vllm==0.33.0"))


def test_an_explanation_goes_on_to_the_cause_and_ends_with_a_sentence() -> None:
    record = record_of("SLOT.key-content", "full-key-stale", "0.33.0")
    assert record.reasoning in documentation(exported_record(record))
    assert ". " in record.reasoning
    cut = [one for one in findings.load() if one.status == "confirmed" and len(one.reasoning) > LONGEST]
    assert cut
    for record in cut:
        summary = origin(scenario_of(record), record.violation(), "").summary
        said, _, more = summary.partition(" (The rest is in")
        assert more
        assert record.reasoning.startswith(said)
        assert said.endswith(".")
        assert LONGEST // 2 < len(said) <= LONGEST


def test_a_record_of_what_shows_when_all_is_drained_drains_too() -> None:
    data = {
        "invariant": "REF.drained",
        "cause": "blocks-held",
        "scenario": scenario_file.to_data(replace(TAIL, config=replace(TAIL.config, connector="none"))),
    }
    for drained in (True, False):
        loaded = scenario_file.parse({**data, "drained": drained})
        assert loaded.finding is not None
        violation = broken("SLOT.key-content", group=1)
        text = export_pytest(loaded.scenario, violation, "vllm==0.27.0", loaded.finding.action)
        assert ("engine.drain()" in text) is drained


def test_a_cause_that_is_too_long_for_the_headline_follows_it() -> None:
    cause = "single_type_kv_cache_manager.find_longest_cache_hit-AssertionError-slidingwindowmanager-does-not-support"
    headline, _, rest = str(
        ast.get_docstring(ast.parse(export_pytest(TAIL, broken("FLOW.no-crash", cause), "")))
    ).partition("\n")
    assert headline == "FLOW.no-crash does not hold."
    assert f"Cause: {cause}." in rest.replace("-\n", "-")


def test_a_scenario_that_nobody_knows_says_no_more_than_it_is() -> None:
    told = documentation(export_pytest(EAGLE, Violation("SLOT.chunk-end", "chunk-ends-off-boundary", ""), ""))
    assert "Found on" not in told
    assert "Found:" not in told


def test_a_reference_is_that_of_the_release() -> None:
    stale = broken("SLOT.key-content", "full-key-stale", group=1)
    assert "See PR 51113." in documentation(export_pytest(EAGLE, stale, "vllm==0.26.0"))
    assert "51113" not in documentation(export_pytest(EAGLE, stale, "vllm==0.33.0"))
    unknown = broken("SLOT.key-content", "partial-key-position", group=1)
    assert "not surely of this fault" in documentation(export_pytest(EAGLE, unknown, "vllm==0.28.0"))
    # A rule that comes from no change or issue names none.
    worded = broken("REF.null-count", "null-count-positive")
    assert "design rule" not in documentation(export_pytest(EAGLE, worded, "vllm==0.28.0"))


def test_the_groups_that_a_record_is_about_are_in_its_cause() -> None:
    for release in ("0.26.0", "0.30.0", "0.33.0"):
        assert "ATTENTION" not in recorded("SLOT.key-content", "full-key-stale", release)
    assert "RECURRENT" not in recorded("SLOT.key-content", "attention-key-missing", "0.26.0")
    assert "ATTENTION" not in recorded("HIT.covers", "mamba-short-at-resume", "0.26.0")
    assert "RECURRENT" not in recorded("HIT.covers", "full-short-at-resume", "0.26.0")


def test_requests_that_end_with_their_first_token_need_no_drafts() -> None:
    text = recorded("SLOT.key-content", "full-key-stale", "0.26.0")
    assert "num_speculative_blocks=K" in text
    for absent in ("def propose", "def next_token", "DraftTokenIds", "drafts ="):
        assert absent not in text


def test_what_a_record_says_was_promised_is_asked_for() -> None:
    resend = recorded("REUSE.resend", "lookup-of-one-group-passes-over-with-drafter-with-store", "0.33.0")
    assert 'request.request_id == "r2"' in resend
    assert "answer[1] < 4" in resend
    assert "answer[1] < 8" in recorded("REUSE.sibling", "window-of-one-token", "0.26.0")
    with pytest.raises(ScenarioError, match="--as text"):
        export_pytest(EAGLE, broken("REUSE.resend", "lookup-passes-over"), "vllm==0.33.0")


def test_a_record_of_events_listens_to_them() -> None:
    for kind in ("mamba", "window"):
        told = recorded("EVENT.stored-well-formed", f"{kind}-tokens-of-other-blocks", "0.33.0")
        assert "enable_kv_cache_events=True" in told
        assert "watch_events(self.scheduler, self.faults)" in told


def test_a_store_offers_what_the_scenario_s_store_does() -> None:
    units = replace(TAIL, config=replace(TAIL.config, offers="unit"))
    assert "held // HASH_UNIT * HASH_UNIT" in export_pytest(units, None, "")
    assert "held // BLOCK * BLOCK" in export_pytest(TAIL, None, "")
    prompts = recorded("SLOT.attention-read", "attention-without-block", "0.33.0")
    assert "max(0, prompt - num_computed_tokens)" in prompts
    assert "self.held[request.request_id] = 0" in prompts


def test_priorities_and_loads_that_fall_short_are_played() -> None:
    first, *rest = LONG.actions
    high = Scenario(replace(LONG.config, policy="priority"), (replace(first, priority=2), *rest))
    text = export_pytest(high, broken("FLOW.no-crash"), "")
    assert 'policy="priority",' in text
    assert "priority=2)" in text
    short = Scenario(replace(LONG.config, load_report="block"), (replace(first, missing=16), *rest))
    text = export_pytest(short, broken("FLOW.no-crash"), "")
    assert "missing=16)" in text
    assert "invalid_block_ids=" in text
    with pytest.raises(ScenarioError, match="--as text"):  # who reads what did not come is not told apart
        export_pytest(short, broken("SLOT.attention-read"), "")


def test_a_check_is_of_the_cause_that_was_found() -> None:
    ends = recorded("SLOT.chunk-end", "chunk-ends-off-boundary", "0.26.0")
    crosses = recorded("SLOT.chunk-end", "chunk-crosses-boundary", "0.26.0")
    assert "end not in stops" in ends
    assert "crosses" not in ends
    assert "if crosses:" in crosses
    assert "stops" not in crosses
    exact = "mamba-estimate-{}-taken-with-external-state"
    assert "charged > taken" in recorded("ADMIT.exact", exact.format("exceeds"), "0.33.0")
    assert "charged < taken" in recorded("ADMIT.exact", exact.format("below"), "0.33.0")


def test_an_engine_that_dies_of_something_else_says_nothing_of_the_cut() -> None:
    cut = recorded("HIT.only-recurrent-short", "recurrent-short-refused", "0.27.0")
    assert "watch_cuts(self.scheduler, self.faults)" in cut
    assert "pytest.skip(" in cut
    assert "died of something else" not in export_pytest(TAIL, broken("FLOW.no-crash"), "vllm==0.27.0")


def test_a_chunk_may_end_in_a_block_that_no_chunk_can_fill() -> None:
    wide = Scenario(Config((Group("full", 16), Group("mamba", 64)), 20, 16, 32), EAGLE.actions)
    assert "no chunk can fill" in export_pytest(wide, broken("SLOT.chunk-end", "chunk-ends-off-boundary"), "")
    assert "no chunk can fill" not in export_pytest(EAGLE, broken("SLOT.chunk-end", "chunk-ends-off-boundary"), "")


@pytest.mark.parametrize("number", [51113, 51468, 57050])
def test_the_tests_of_faults_that_were_fixed_are_short(number: int) -> None:
    records = [r for r in findings.load() if r.reference == f"PR {number}" and not r.invariant.startswith("EXT.")]
    assert records
    for record in records:
        assert record.scenario is not None
        most = 315 if record.scenario["config"].get("connector") == "async" else 275  # a store that loads meanwhile
        assert recorded(*record.identity, record.releases[-1]).count("\n") <= most


def test_forced_actions_are_owned_up_to() -> None:
    assert "from outside" in documentation(export_pytest(MIXED, None, "vllm==0.33.0"))


@pytest.mark.parametrize("invariant", sorted({entry.id for entry in CATALOGUE} - set(CHECKS)))
def test_what_no_test_shows_is_refused(invariant: str) -> None:
    with pytest.raises(ScenarioError, match="--as text"):
        export_pytest(EAGLE, broken(invariant), "vllm==0.26.0")


def test_every_check_is_of_an_invariant_in_the_catalogue() -> None:
    assert set(CHECKS) <= {entry.id for entry in CATALOGUE}


@pytest.mark.parametrize(
    ("invariant", "cause"),
    [("SLOT.key-content", "key-window-wrong"), ("SLOT.running-state", "running-window-wrong"),
     ("HIT.only-recurrent-short", "short-cut-silently"), ("HIT.limit", "hit-deeper-than-a-group-at-connector"),
     ("SLOT.null-write", "mamba-write-to-null"), ("SLOT.exclusive-write", "state-write-shared"),
     ("FLOW.no-crash", "scheduler.schedule-MalformedOutput-tokens-of-nobody")],
)  # fmt: skip
def test_a_cause_that_a_test_cannot_see_is_refused(invariant: str, cause: str) -> None:
    with pytest.raises(ScenarioError, match="--as text"):
        export_pytest(EAGLE, broken(invariant, cause), "vllm==0.26.0")
