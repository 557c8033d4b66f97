"""Exported tests: what engines are made of beyond a scheduler, and why some scenarios have no test."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvproof import cli, scenario_file
from kvproof.kvexport import export_pytest
from kvproof.spec.config import Config, Group
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.scenario import Action, Scenario, ScenarioError

sys.path.insert(0, str(Path(__file__).parent))
from exportcases import EAGLE, FLIGHT, HOST, IMAGES, LONG, SHORT, SHORT_IN_FLIGHT, TAIL, UNITS

sys.path.pop(0)


def written(scenario: Scenario, invariant: str, cause: str, **where: str | int) -> str:
    text = export_pytest(scenario, Violation(invariant, cause, "", tuple(where.items())), "vllm==0.33.0")
    ast.parse(text)
    return text


def test_offloading_is_the_release_s_own_down_to_the_copy() -> None:
    text = written(HOST, "EXT.offload-serves", "holds-but-offers-nothing")
    assert 'kv_connector="OffloadingConnector"' in text
    assert '"self_describing_kv_events": True' in text
    assert "self.worker = make_worker(self.scheduler, self.memory)" in text
    assert "PAGE, HOST_BLOCKS = 65536, 2560" in text
    assert "watch_offers(self.scheduler, self.faults)" in text
    for absent in ("class Store", "class Device", "self.device", "external"):
        assert absent not in text


def test_what_is_copied_is_looked_at_when_it_is_copied() -> None:
    text = written(HOST, "EXT.offload-content", "state-overwritten-before-copy")
    assert "HostMemory(self.device, self.check_stored)" in text
    assert "self.move_state(" in text
    assert text.index("self.entries.pop(block, None)") < text.index("self.move_state(")
    chosen = written(HOST, "EXT.offload-content", "chosen-full-key-stale")
    assert "self.check_chosen(output)" in chosen
    assert "self.copying" not in chosen
    assert "self.move_state(" not in chosen


def test_a_hand_over_is_looked_at_when_its_step_has_run() -> None:
    text = written(TAIL, "EXT.offload-content", "offered-full-key-stale")
    assert "watch_handed(self.scheduler, self.handed)" in text
    assert text.index("self.scheduler.update_from_output(") < text.index("self.check_handed(self.handed)")
    assert "self.check_handed(handed)" in written(FLIGHT, "EXT.offload-content", "offered-full-key-stale")


@pytest.mark.parametrize(
    ("cause", "said"),
    [("offers-boundary-without-state", "no state of group"), ("offers-attention-it-lacks", "holds no block up to"),
     ("leaves-nothing-to-compute", "into a state that has it already")],
)  # fmt: skip
def test_an_offer_is_judged_by_its_cause(cause: str, said: str) -> None:
    text = written(HOST, "EXT.offload-offers", cause)
    assert said in text
    assert text.count("faults.append(") == 1


def test_what_a_store_could_serve_takes_each_group_s_blocks() -> None:
    text = written(HOST, "EXT.offload-serves", "holds-more-than-it-offers")
    assert "for boundary in range(start // 8 * 8, end, 8):" in text
    assert "first = max(start, end - 16)" in text
    assert "yield 2, end" in text
    assert "if offered and computed + offered < end:" in text


def test_steps_in_flight_are_those_of_the_release_s_asynchronous_scheduler() -> None:
    text = written(FLIGHT, "SLOT.key-content", "full-key-stale", group=1)
    for line in (
        "async_scheduling=True,",
        "make = config.scheduler_config.get_scheduler_cls()",
        'method="ngram", num_speculative_tokens=K',
        'config.method = "ngram_gpu"',
        "if len(self.flying) < 2 and more:",
        "keyed = self.keyed()",
        "engine.step(5, accept=(1,))",
        'engine.finish("a")',
    ):
        assert line in text
    assert "update_draft_token_ids" not in text  # drafts stay on the device
    assert "sched.scheduler import Scheduler" not in text


def test_images_stand_where_they_fit_and_are_inherited() -> None:
    text = written(IMAGES, "ADMIT.stall", "running-request-starves-in-idle-pool")
    assert 'engine.submit("a", length=40, max_tokens=2, images=[4, 20])' in text
    assert 'engine.submit("b", length=48, max_tokens=2, base="a", shared=24, images=[4, 30])' in text
    assert "IMAGE = 6  # tokens" in text
    assert "mm_features=features" in text
    assert "encoder_cache_manager" in text
    assert "MultiModalFeatureSpec" not in written(LONG, "ADMIT.stall", "")


def test_a_start_up_promise_is_the_release_s_own() -> None:
    text = written(EAGLE, "ADMIT.startup", "lone-request-starves")
    assert "plans.get_kv_cache_configs(" in text
    assert "if not starts(engine.scheduler):" in text
    assert "and nothing runs for 3 steps" in text
    assert "loses its blocks 3 times" in written(EAGLE, "ADMIT.startup", "lone-request-preempts-itself")


def test_the_rest_of_a_block_is_wiped_before_a_load_ends_in_it() -> None:
    text = written(UNITS, "EXT.rest-wiped", "rest-of-loaded-block-dirty")
    assert "self.unwiped -= {*(output.new_block_ids_to_zero or ())}" in text
    assert "self.check_rests(loads)" in text
    assert "class Device" not in text


def test_a_step_in_flight_wipes_nothing_that_a_load_writes_to() -> None:
    text = written(FLIGHT, "EXT.zero-spares-load", "block-of-load-wiped")
    assert "later = [load for batch in self.flying for load in batch[2]]" in text
    assert "self.check_wipes(output, [*self.loads, *loads, *later])" in text
    assert "GROUP_BLOCKS = [8, 8]" in text
    one_by_one = written(TAIL, "EXT.zero-spares-load", "block-of-load-wiped")
    assert "self.check_wipes(output, self.scheduler.connector.loading)" in one_by_one


def test_a_store_that_has_to_be_asked_again_is_played_where_engines_die() -> None:
    late = replace(FLIGHT, config=replace(FLIGHT.config, offer_delay=1))
    text = written(late, "FLOW.no-crash", "somewhere-RuntimeError")
    assert "if self.asked[request.request_id] <= 1:" in text
    assert "self.asked = collections.Counter()" in text
    assert "self.asked" not in written(FLIGHT, "FLOW.no-crash", "somewhere-RuntimeError")
    with pytest.raises(ScenarioError, match="a test has none of offer_delay"):
        written(late, "EXT.zero-spares-load", "block-of-load-wiped")


def test_a_convolution_window_is_written_before_checkpoint_and_state() -> None:
    text = written(UNITS, "SLOT.key-content", "key-window-wrong", group=1)
    window = text.index("self.put_window(table, -(-end // BLOCK) - 1")
    checkpoint = text.index("self.put(table, column, prefix(tokens, position))")
    assert window < checkpoint < text.index("self.put(table, -(-end // BLOCK) - 1, prefix(tokens, end))")
    assert "put_window" not in written(UNITS, "SLOT.key-content", "full-key-stale", group=1)


def test_what_a_synchronous_load_did_not_bring_is_owed_and_said() -> None:
    text = written(SHORT, "SLOT.key-content", "attention-key-missing")
    for line in (
        "missing=1)",
        'kv_load_failure_policy="recompute"',
        "invalid_block_ids=self.scheduler.connector.failed(loads)",
        "self.owe(loads)",
        "if number in self.owed():",
        "pytest.skip(",
    ):
        assert line in text
    over = written(SHORT, "SLOT.exclusive-write", "attention-write-over-key")
    assert "self.check_writes()" in over
    assert "owed" not in over
    assert "self.check_writes(keyed)" in written(SHORT_IN_FLIGHT, "SLOT.exclusive-write", "attention-write-over-key")


def test_what_is_read_without_being_there_counts_where_its_answer_is_taken() -> None:
    text = written(SHORT_IN_FLIGHT, "SLOT.attention-read", "attention-foreign")
    assert "if self.requests[name].num_output_tokens > had[name]:" in text
    assert "self.anew |= {name for name, *_, lost in loads if lost}" in text
    assert (
        text.index("had = {") < text.index("self.scheduler.update_from_output(") < text.index("in self.device.misread")
    )
    for absent in ("spoiled", "faults.append(\n", "Device(self.faults)"):
        assert absent not in text
    assert "misread" not in written(FLIGHT, "SLOT.attention-read", "attention-foreign")


def test_a_state_that_comes_of_one_that_never_came_is_worth_nothing() -> None:
    config = replace(SHORT_IN_FLIGHT.config, groups=(Group("full", 4), Group("mamba", 4)))
    text = written(replace(SHORT_IN_FLIGHT, config=config), "SLOT.running-state", "running-state-missing")
    spoilt = text.index("if name in self.misread:")
    assert text.index("self.misread.clear()") < text.index("self.read_state(name,") < spoilt
    assert spoilt < text.index("tokens = [None] * len(tokens)") < text.index("self.put(table,")
    assert "its answer is taken" in text
    assert "tokens = [None]" not in written(FLIGHT, "SLOT.running-state", "running-state-missing")


def test_what_a_load_did_not_bring_does_not_count() -> None:
    text = written(SHORT, "EXT.counts-what-came", "counts-what-never-came")
    assert "if lost and counted > max(start, end - lost):" in text
    assert text.index("self.scheduler.update_from_output(") < text.index("self.check_counts(loads)")
    states = replace(SHORT, config=replace(SHORT.config, groups=(Group("full", 4), Group("mamba", 4))))
    assert "if lost and counted > start:" in written(states, "EXT.counts-what-came", "counts-what-never-came")


def test_whoever_runs_may_be_made_to_start_over_and_the_store_be_cleared() -> None:
    both = (*HOST.actions, Action("reset", running=True), Action("reset", running=True, store=True))
    text = written(replace(HOST, actions=both), "FLOW.no-crash", "scheduler.reset_cache-AssertionError")
    for line in (
        "def reset(self, running=False, store=False):",
        "if running and self.others_hold():",
        "self.scheduler.reset_prefix_cache(running, store)",
        "    engine.reset(running=True)\n",
        "    engine.reset(running=True, store=True)\n",
        'pytest.fail(f"Found: a reset fails with {error!r}")',
    ):
        assert line in text
    assert "contextlib" not in text
    store = replace(HOST, actions=(*HOST.actions, Action("reset", store=True)))
    chosen = written(store, "EXT.offload-content", "chosen-attention-key-position")
    assert "self.chosen.clear()" in chosen
    assert "if not engine.faults:" in chosen
    text = written(store, "FLOW.no-crash", "scheduler.schedule-AssertionError")
    assert "self.scheduler.reset_prefix_cache(False, store)" in text
    # Whoever asked for a reset hears of what it raises, and the engine goes on: that ends only a test of just that.
    assert "contextlib.suppress(Exception):\n            self.scheduler.reset_prefix_cache(" in text
    assert "contextlib.suppress" in chosen
    assert 'pytest.fail(f"Found: the engine died of {error!r}")' in text
    assert "others_hold" not in text
    flying = replace(FLIGHT, actions=(*FLIGHT.actions, Action("reset", running=True), Action("step")))
    assert "if running and (self.flying or self.others_hold()):" in written(flying, "FLOW.no-crash", "")


def test_a_token_that_never_comes_is_not_to_be_run() -> None:
    cause = "scheduler.schedule-MalformedOutput-more-tokens-than-there-are"
    text = written(SHORT_IN_FLIGHT, "FLOW.no-crash", cause)
    assert "if end > known and rows[name][1] == current:" in text
    assert "self.anew |= {name for name, *_, lost in loads if lost}" in text
    assert "class Device" not in text
    drafted = replace(SHORT_IN_FLIGHT, config=replace(SHORT_IN_FLIGHT.config, speculative=2))
    assert "if end - count > known and rows[name][1] == current:" in written(drafted, "FLOW.no-crash", cause)
    assert "anew" not in written(FLIGHT, "FLOW.no-crash", cause)


def test_a_write_to_the_null_block_is_looked_for_in_the_groups_that_its_cause_names() -> None:
    state = written(UNITS, "SLOT.null-write", "state-write-to-null")
    assert "if 0 in table[column : column + 1]:" in state
    assert "ATTENTION" not in state
    assert "if 0 in table[column : column + 1 + len(drafts)]:" in written(
        EAGLE, "SLOT.null-write", "state-write-to-null"
    )
    attention = written(UNITS, "SLOT.null-write", "attention-write-to-null")
    assert "goes to the null block" in attention
    assert "RECURRENT" not in attention


def test_a_release_that_can_not_have_the_configuration_is_not_held_to_what_it_promises() -> None:
    promised: dict[str, str | int] = {"request": "b", "base": "a", "promised": 16}
    asked = 'if not hasattr(kv, "is_mamba_prefill_checkpoint_valid"):'
    assert asked in written(LONG, "REUSE.resend", "lookup-passes-over-with-store", **promised)
    assert asked not in written(TAIL, "REUSE.resend", "lookup-passes-over-with-store", **promised)
    wide = replace(TAIL, config=replace(TAIL.config, step_tokens=32))
    refused = "this release refuses the configuration"
    assert refused in written(wide, "REUSE.resend", "lookup-passes-over-with-store", **promised)
    assert refused not in written(TAIL, "REUSE.resend", "lookup-passes-over-with-store", **promised)


def test_a_configuration_that_is_refused_at_start_up_is_skipped_and_an_option_of_another_name_is_not() -> None:
    text = written(TAIL, "FLOW.no-crash", "scheduler.schedule-AssertionError")
    made = text[text.index("        engine = Engine(monkeypatch)") : text.index("engine.submit(")]
    assert "except ValueError as error:" in made
    assert 'pytest.skip(f"this release does not start with this configuration: {error}")' in made
    assert made.index("raise  #") < made.index("pytest.skip(")


def test_a_lookup_that_falls_short_is_judged_by_its_cause_where_the_group_is_known() -> None:
    promised: dict[str, str | int] = {"request": "b", "base": "a", "promised": 16}
    plain = written(TAIL, "REUSE.resend", "tail-state-not-kept-with-store", **promised)
    assert "lacks" not in plain
    kept = written(TAIL, "REUSE.resend", "tail-state-not-kept-with-store", **promised, group=1)
    assert "return 16 in ends and (16, 1) not in cached()" in kept
    ended = written(TAIL, "REUSE.resend", "no-chunk-ended-at-tail-with-store", **promised, group=1)
    assert "return 16 not in ends and (16, 1) not in cached()" in ended
    full = written(TAIL, "REUSE.resend", "full-not-kept-with-store", **{**promised, "promised": 70}, group=0)
    assert "for end in [64, 70])" in full
    own = written(TAIL, "REUSE.sibling", "tail-state-not-kept-with-store", **{**promised, "base": "b"}, group=1)
    assert "b is preempted: while nothing of its prompt is lost" in own


def test_a_prompt_of_which_nothing_may_be_read_is_computed() -> None:
    first, *rest = TAIL.actions
    unread = replace(TAIL, actions=(replace(first, unread=True), *rest))
    text = written(unread, "HIT.limit", "store-read-for-unread")
    assert 'engine.submit("a", length=214, max_tokens=1, unread=True)' in text
    assert "prompt_logprobs=0 if unread else None," in text
    assert "watch_unread(self.scheduler, self.faults)" in text
    assert "watch_lookups" not in text
    for other in (written(TAIL, "HIT.limit", "store-read-for-unread"), written(TAIL, "HIT.limit", "hit-beyond-limit")):
        assert "prompt_logprobs" not in other
    assert "watch_unread" not in other


def test_a_long_call_is_laid_out_as_ruff_does() -> None:
    first, *rest = SHORT.actions
    name = "a-request-whose-name-is-rather-long"
    long = replace(SHORT, actions=(first, replace(first, request=name, base="a", shared=8), *rest))
    text = written(long, "SLOT.key-content", "attention-key-missing")
    assert (
        f"""        engine.submit(
            "{name}",
            length=14,
            max_tokens=3,
            base="a",
            shared=8,
            external=8,
            missing=1,
        )
"""
        in text
    )
    assert (
        """    def submit(
        self, name, length, max_tokens, base=None, shared=0, external=0, missing=0
    ):
"""
        in text
    )


def test_outputs_are_stored_where_the_scenario_s_store_does() -> None:
    outputs = replace(HOST, config=replace(HOST.config, offload_outputs=True))
    assert '"offload_prompt_only": False,' in written(outputs, "EXT.offload-content", "chosen-attention-key-missing")
    assert "offload_prompt_only" not in written(HOST, "EXT.offload-content", "chosen-attention-key-missing")


def test_keys_that_end_with_their_block_take_a_release_that_has_others() -> None:
    promised: dict[str, str | int] = {"request": "b", "base": "a", "promised": 16}
    plain = replace(EAGLE, config=replace(EAGLE.config, lookahead_keys=False))
    text = written(plain, "REUSE.resend", "lookup-passes-over", **promised)
    assert "config.disable_lookahead_block_hashes = True" in text
    assert "pytest.skip(" in text
    assert "num_hash_lookahead_tokens" not in text
    text = written(EAGLE, "REUSE.resend", "lookup-passes-over", **promised)
    assert "num_hash_lookahead_tokens" in text
    assert "disable_lookahead_block_hashes" not in text


def test_a_block_is_shared_where_others_held_it_before_the_step() -> None:
    text = written(SHORT, "SLOT.exclusive-write", "attention-write-shared")
    assert (
        text.index("shared = self.shared()")
        < text.index("self.scheduler.schedule()")
        < text.index("shared &= self.shared()")
        < text.index("self.check_writes(shared)")
    )
    assert "self.held()" not in text


def test_what_a_failed_load_leaves_is_charged_for_and_read() -> None:
    hybrid = replace(SHORT, config=replace(SHORT.config, groups=(Group("full", 4), Group("mamba", 4))))
    exact = written(hybrid, "ADMIT.exact", "mamba-estimate-negative-and-below-taken")
    assert "charged < taken" in exact
    assert "invalid_block_ids=self.scheduler.connector.failed(loads)" in exact
    assert "the engine died of something else" in exact
    assert "class Device" not in exact
    assert exact.index("self.faults.clear()") < exact.index("self.scheduler.update_from_output(")
    exporting = replace(hybrid, config=replace(hybrid.config, checkpoint_blocks=1, checkpoint_alignment=4))
    exact = written(exporting, "ADMIT.exact", "mamba-estimate-negative-and-below-taken-with-checkpoint")
    assert 'if not hasattr(kv, "is_mamba_prefill_checkpoint_valid"):' in exact
    state = written(hybrid, "HIT.same-step", "state-of-this-step-hit")
    assert "self.misread[name] = (" in state
    assert state.index("had = {") < state.index("self.scheduler.update_from_output(")
    assert "if self.requests[name].num_output_tokens > had[name]:" in state
    assert "self.short |= any(lost for *_, lost in loads)" in state
    assert "self.faults.append(\n" not in state


@pytest.mark.parametrize(
    ("scenario", "invariant", "cause", "reason"),
    [
        (TAIL, "EXT.offload-offers", "offers-boundary-without-state", "with the offloading connector alone"),
        (EAGLE, "EXT.offload-content", "offered-full-key-stale", "without a connector nothing is handed over"),
        (TAIL, "EXT.rest-wiped", "rest-of-loaded-block-dirty", "where asynchronous loads end with a unit"),
        (HOST, "EXT.zero-spares-load", "block-of-load-wiped", "a test of it looks at asynchronous loads of a store"),
        (FLIGHT, "ADMIT.stall", "", "a test of it has no steps in flight (async_scheduling)"),
        (
            FLIGHT,
            "SLOT.exclusive-write",
            "state-write-unheld",
            "a test of it has no steps in flight (async_scheduling)",
        ),
        (HOST, "ADMIT.stall", "", "does not tell waiting for host memory from standing still"),
        (SHORT, "SLOT.exclusive-write", "state-write-over-key", "has no group of the kind that it is about"),
        (SHORT, "SLOT.attention-read", "", "looks at keys, writes, charges and counts alone"),
        (
            FLIGHT,
            "SLOT.exclusive-write",
            "attention-write-shared",
            "a test of it has no steps in flight (async_scheduling)",
        ),
        (replace(TAIL, config=replace(TAIL.config, send_steps=2)), "ADMIT.stall", "", "a test has none of send_steps"),
        (
            replace(HOST, actions=(*HOST.actions, Action("reset", store=True))),
            "EXT.offload-serves",
            "holds-but-offers-nothing",
            "does not follow resets of the store",
        ),
        (
            replace(TAIL, actions=(*TAIL.actions, Action("reset", running=True))),
            "ADMIT.stall",
            "",
            "does not tell requests that were made to start over from those that stand still",
        ),
        (SHORT_IN_FLIGHT, "EXT.counts-what-came", "counts-what-never-came", "no steps in flight"),
        (TAIL, "EXT.counts-what-came", "counts-what-never-came", "looks at synchronous loads that fall short"),
        (SHORT, "EXT.counts-what-came", "counts-beyond-claim", "sees only what ends in counts-what-never-came"),
        (SHORT, "FLOW.no-crash", "MalformedOutput-more-tokens-than-there-are", "without steps in flight"),
        (EAGLE, "SLOT.key-content", "key-window-wrong", "does not follow convolution windows through drafts"),
        (EAGLE, "REUSE.resend", "lookup-passes-over", "does not say which request was promised how many tokens"),
        (EAGLE, "TAIL.hold-newest", "", "no test is written for TAIL.hold-newest"),
        (EAGLE, "HIT.only-recurrent-short", "short-cut-silently", "a test of it sees only what ends in refused"),
    ],
)
def test_what_no_test_shows_is_refused_with_the_reason(
    scenario: Scenario, invariant: str, cause: str, reason: str
) -> None:
    with pytest.raises(ScenarioError) as refused:
        written(scenario, invariant, cause)
    said = str(refused.value)
    assert reason in said
    assert said.endswith(": use --as text")
    assert "\n" not in said


@pytest.mark.parametrize("missing", [4, 0])
def test_asynchronous_loads_that_fall_short_are_played_for_crashes_alone(missing: int) -> None:
    first, *rest = LONG.actions
    config: Config = replace(LONG.config, load_report="block")
    played = Scenario(config, (replace(first, missing=missing), *rest))
    assert ("invalid_block_ids" in written(played, "FLOW.no-crash", "")) is bool(missing)
    if missing:
        with pytest.raises(ScenarioError, match="looks at crashes alone"):
            written(played, "SLOT.key-content", "full-key-stale")


def test_the_command_says_the_reason_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    violation = Violation("ADMIT.stall", "waiting-request-starves-in-idle-pool", "")
    file = tmp_path / "f.json"
    scenario_file.save(file, FLIGHT, Finding(violation, "vllm==0.33.0", FLIGHT, 1))
    assert cli.run(["export", str(file), "-o", str(tmp_path / "test_it.py")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "kvproof: error: ADMIT.stall (waiting-request-starves-in-idle-pool): "
        "a test of it has no steps in flight (async_scheduling): use --as text"
    ]
    assert not (tmp_path / "test_it.py").exists()
