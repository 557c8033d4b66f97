"""The reference engine with floats: whole workloads against runs without any cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from kvproof.impl.reference import flow
from kvproof.impl.reference.model import LOGITS_TOLERANCE, STATE_TOLERANCE, TorchModel, build
from kvproof.impl.reference.mutants import MUTANTS
from kvproof.impl.reference.network import VOCABULARY
from kvproof.impl.reference.request import Request

CPU = torch.device("cpu")
RECURRENT_HITS = ("whole blocks", "partial hits", "checkpoints", "drafts", "tight")
"""Configurations without a window or a store: the control's second request resumes from a local state."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from a second thread, and on a busy machine wait for it a hundred times over."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models() -> dict[str, TorchModel]:
    return {name: build(config, 0, CPU) for name, config in flow.CONFIGS.items()}


def several(model: TorchModel, name: str, seeds: int) -> Counter[str]:
    """What happened in so many workloads, none of which showed anything wrong."""
    happened: Counter[str] = Counter()
    for seed in range(seeds):
        found = flow.run(flow.draw(name, seed), model)
        assert found.wrong == [], f"{name}, seed {seed}"
        assert found.requests == 10
        assert found.state < STATE_TOLERANCE
        assert found.logits < LOGITS_TOLERANCE
        assert found.positions == found.outputs
        happened += found.happened + Counter(outputs=found.outputs, states=found.states)
    return happened


@pytest.mark.parametrize("name", flow.CONFIGS)
def test_nobody_can_tell_that_there_is_a_cache(models: dict[str, TorchModel], name: str) -> None:
    config, happened = flow.CONFIGS[name], several(models[name], name, 3)
    assert happened["outputs"] > 60
    assert happened["states"] > 30
    expected = {"resumed", "follow-up or sibling"}
    if config.partial_hits:
        expected |= {"resumed inside a block"}
    if config.speculative:
        expected |= {"drafts", "drafts accepted"}
        assert happened["drafts accepted"] < happened["drafts"]
    if config.connector != "none":
        expected |= {"resumed from a store", "loads that fell short"}
    if name == "tight":
        assert happened["preempted"] > happened["preempt"]  # for want of blocks, not only because somebody said so
    assert {what for what in expected if not happened[what]} == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", flow.CONFIGS)
def test_nobody_can_tell_in_many_workloads(models: dict[str, TorchModel], name: str) -> None:
    happened = several(models[name], name, 25)
    for what in ("abort", "finish", "preempt", "evict", "reset"):
        assert happened[what], what
    if flow.CONFIGS[name].connector != "none":
        assert happened["diverged"]


@pytest.mark.parametrize("name", RECURRENT_HITS)
def test_the_outputs_depend_on_the_state_that_is_hit(models: dict[str, TorchModel], name: str) -> None:
    """The control: without it "the outputs are right" could mean that they don't depend on what is cached."""
    tries = 10
    changed = sum(flow.zeroing_shows(models[name], seed) for seed in range(tries))
    print(f"{name}: with the state it resumes from zeroed, a request's outputs change in {changed} of {tries} tries")
    assert changed > 0.8 * tries


FLOATS_SEE = {
    "key-named-after-the-slot": "partial hits",
    "keyed-state-is-written-over": "whole blocks",
    "shared-tail-is-not-copied": "partial hits",
    "copies-run-too-late": "partial hits",
    "stale-keys-survive": "tight",
    "diverged-hit-without-state": "partial hits",
    "hit-of-an-earlier-state": "partial hits",
    "short-load-counts": "sync store",
}


@pytest.mark.parametrize("mutant", FLOATS_SEE)
def test_the_floats_alone_show_a_fault(models: dict[str, TorchModel], mutant: str) -> None:
    """With nobody judging the tracers."""
    name = FLOATS_SEE[mutant]
    (planted,) = (m for m in MUTANTS if m.id == mutant)
    scenarios = [flow.draw(name, seed) for seed in range(8)]
    shown = next((s for s in scenarios if flow.run(s, models[name], "off", planted.plant).wrong), None)
    assert shown is not None
    assert flow.run(shown, models[name], "off").wrong == []


@pytest.mark.parametrize(
    ("mutant", "invariant"),
    [("window-is-left-behind", "SLOT.running-state"), ("checkpoint-is-not-held", "TAIL.newest-held")],
)
def test_the_catalogue_judges_while_a_workload_runs(models: dict[str, TorchModel], mutant: str, invariant: str) -> None:
    """What the floats don't show: a window that only the tracers lose, and a state that might be evicted."""
    (planted,) = (m for m in MUTANTS if m.id == mutant)
    scenario = flow.draw("partial hits", 0)
    assert flow.run(scenario, models["partial hits"], "off", planted.plant).wrong == []
    wrong = flow.run(scenario, models["partial hits"], "full", planted.plant).wrong
    assert wrong[0].startswith(invariant)


def test_the_teacher_knows_what_is_right(models: dict[str, TorchModel]) -> None:
    model = models["drafts"]
    teacher = flow.PlainTeacher(model)
    request = Request("r", 20, 8)
    request.extend(list(range(20)))
    right = model.run_plain(request.tokens, 3)
    assert teacher.drafts(request, 3, 3) == right
    one = list(teacher.drafts(request, 1, 3))
    assert one[0] == right[0]
    assert one[1] == (right[1] + 1) % VOCABULARY
    assert teacher.drafts(request, 0, 0) == []


def test_a_workload_is_the_same_again_and_varies() -> None:
    assert flow.draw("drafts", 3) == flow.draw("drafts", 3)
    assert len({flow.draw("drafts", seed).actions for seed in range(5)}) == 5
