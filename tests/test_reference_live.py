"""Live assertions: they stop an engine where it breaks, hand over a scenario, and change nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvproof import cli
from kvproof.impl.reference.live import AssertingEngine, EngineStopped, Mode
from kvproof.impl.reference.mutants import MUTANTS
from kvproof.impl.reference.null_model import NullModel
from kvproof.impl.reference.planting import Mutant, wrap
from kvproof.impl.reference.request import Request
from kvproof.impl.reference.subject import Driver, NullTeacher, ReferenceSubject
from kvproof.models.stateful.replay import replay
from kvproof.spec.config import Config, Group
from kvproof.spec.events import StepEnd
from kvproof.spec.scenario import Action, Scenario
from kvproof.spec.subject import Observer

FULL, RECURRENT = Group("full", 16), Group("mamba", 32)
CONFIG = Config((FULL, RECURRENT), 40, 8, 64, speculative=2, eagle=True, full_sequence_must_fit=False)
STORE = Config((FULL, RECURRENT), 60, 8, 64, connector="async", divergent_hits=True, load_steps=2)
MODES: tuple[Mode, ...] = ("off", "touched", "full")
BY_ID = {mutant.id: mutant for mutant in MUTANTS}


def test_the_example_of_the_documentation_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parent.parent / "docs" / "live.md").read_text(encoding="utf-8")
    (program, says) = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL)[0]
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert done.stdout == says
    monkeypatch.chdir(tmp_path)
    assert cli.run(["replay", "finding.json", "--on", "reference"]) == 0


class Traffic:
    """A server's day: conversations, siblings, an abort. The same for every engine of a configuration."""

    def __init__(self, engine: AssertingEngine) -> None:
        self.engine = engine
        self.ends: list[StepEnd] = []
        self.requests: list[Request] = []

    def run(self) -> None:
        fresh = 0
        for turn in range(12):
            base = self.requests[-(turn % 3) - 1].tokens if turn % 4 and len(self.requests) > 2 else []
            fresh += 10_000
            prompt = [*base[: len(base) - turn % 2], *range(fresh, fresh + 21 + 9 * (turn % 5))][:140]
            store = self.engine.config.connector != "none" and turn % 2
            claimed, missing = (len(prompt), turn % 3) if store else (0, 0)
            self.requests.append(self.engine.submit(f"r{turn}", prompt, 4 + 5 * (turn % 3), claimed, missing))
            for _ in range(1 + 2 * (turn % 3)):
                self.step()
            if turn == 7 and "r7" in self.engine.scheduler.requests:
                self.engine.abort("r7")
        for _ in range(300):
            if not self.engine.scheduler.requests:
                break
            self.step()

    def step(self) -> None:
        right = len(self.ends) % 3
        self.ends.append(
            self.engine.step(lambda request, count: NullTeacher().drafts(request, min(right, count), count))
        )


def engine(config: Config, mode: Mode, mutant: Mutant | None = None) -> AssertingEngine:
    made = AssertingEngine(config, NullModel(), mode)
    if mutant is not None:
        mutant.plant(made)
    return made


class Planted(ReferenceSubject):
    """The reference with a mutant in it."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__()
        self.mutant = mutant

    def start(self, config: Config, observer: Observer | None) -> Driver:
        driver = super().start(config, observer)
        self.mutant.plant(driver.engine)
        return driver


@pytest.mark.parametrize("config", [CONFIG, STORE], ids=["drafts", "store"])
def test_every_mode_takes_the_same_decisions(config: Config) -> None:
    days = {mode: Traffic(engine(config, mode)) for mode in MODES}
    for day in days.values():
        day.run()
    off = days["off"]
    assert not off.engine.scheduler.requests
    assert len(off.ends) > 40
    for mode in ("touched", "full"):
        assert days[mode].ends == off.ends
        assert [r.tokens for r in days[mode].requests] == [r.tokens for r in off.requests]
        pool, other = off.engine.scheduler.pool, days[mode].engine.scheduler.pool
        assert list(pool.free) == list(other.free)
        assert pool.keys == other.keys
    assert days["off"].engine.monitor.evaluations == {}
    assert days["off"].engine.actions == []
    assert days["touched"].engine.monitor.evaluations.keys() >= {
        "REF.references",
        "SLOT.key-content",
        "TAIL.newest-held",
    }


STOPPED = {
    "rejected-drafts-are-not-rolled-back": (CONFIG, "SLOT.running-state"),
    "window-is-left-behind": (CONFIG, "SLOT.key-content"),
    "keyed-state-is-written-over": (CONFIG, "SLOT.exclusive-write"),
    "checkpoint-is-not-held": (CONFIG, "TAIL.newest-held"),
    "copy-ends-are-leaked": (CONFIG, "REF.references"),
    "removal-is-not-announced": (CONFIG, "EVENT.replays"),
    "short-load-counts": (STORE, "EXT.counts-what-came"),
    "copy-is-not-charged": (CONFIG, "ADMIT.exact"),
}


@pytest.mark.parametrize("mode", ["touched", "full"])
@pytest.mark.parametrize("name", STOPPED)
def test_a_violation_stops_the_engine_with_a_scenario_that_replays(name: str, mode: Mode) -> None:
    config, invariant = STOPPED[name]
    day = Traffic(engine(config, mode, BY_ID[name]))
    with pytest.raises(EngineStopped) as stopped:
        day.run()
    finding = stopped.value.finding
    assert finding.violation.invariant == invariant
    assert finding.violation.witness in str(stopped.value)
    assert finding.subject == "reference"
    assert finding.scenario.config == config
    assert finding.action == len(finding.scenario.actions) - 1
    assert not finding.scenario.forced
    again = replay(Planted(BY_ID[name]), finding.scenario)
    assert again.at(finding.violation.identity) == finding.action, again.text
    assert replay(ReferenceSubject(), finding.scenario).violations == ()


def test_what_was_recorded_happens_again_step_by_step() -> None:
    for config in (CONFIG, STORE):
        day = Traffic(engine(config, "touched"))
        day.run()
        driver = Driver(engine(config, "touched"), NullTeacher())
        ends: list[StepEnd] = []
        wrap(driver.engine, "step", lambda original, *given, ends=ends, **named: ends.append(original(*given, **named)))
        for action in day.engine.scenario().actions:
            assert driver.apply(action)
        # Prompts are numbered anew; what they share is the same, and so is everything that follows from it.
        assert ends == day.ends


def test_an_operator_is_recorded_too() -> None:
    served = engine(CONFIG, "touched")
    served.submit("a", range(30), 4)
    served.submit("b", [*range(20), *range(100, 120)], 4)
    served.step()
    served.preempt("b")
    served.step()
    served.step()
    served.finish("a")
    served.step()
    served.abort("b")
    served.evict(2)
    served.reset()
    assert served.scenario().actions == (
        Action("submit", "a", length=30, max_tokens=4),
        Action("submit", "b", "a", 20, 40, 4),
        Action("step"),
        Action("preempt", "b"),
        Action("step"),
        Action("step", accept=(0,)),  # whoever could have been offered drafts was not
        Action("finish", "a"),
        Action("step", accept=(0,)),
        Action("abort", "b"),
        Action("evict", times=2),
        Action("reset"),
    )
    assert served.scenario().forced


def test_drafts_are_told_row_by_row_also_where_a_row_has_none() -> None:
    """a is still at its prompt while b decodes: what is said of the second request scheduled is b's."""
    driver = Driver(engine(replace(CONFIG, long_prefill_threshold=16), "touched"), NullTeacher())
    for action in (Action("submit", "a", length=100, max_tokens=1), Action("submit", "b", length=3, max_tokens=9),
                   Action("step"), Action("step", accept=(0, 2))):  # fmt: skip
        driver.apply(action)
    b = driver.engine.scheduler.requests["b"]
    assert b.outputs == 1 + 3
    assert driver.engine.accepted == (0, 2)
    assert driver.engine.scenario().actions[-2:] == (Action("step"), Action("step", accept=(0, 2)))


def test_off_judges_and_records_nothing() -> None:
    broken = engine(CONFIG, "off", BY_ID["window-is-left-behind"])
    Traffic(broken).run()
    assert broken.scenario() == Scenario(CONFIG, (), "recorded by a live engine")


@pytest.mark.parametrize("name", ["free-block-is-counted", "free-block-has-wrong-content"])
def test_only_full_looks_at_what_nobody_touched(name: str) -> None:
    """A fault that no step has anything to do with: touched sees it when somebody comes across it, or never."""

    def damage(served: AssertingEngine) -> None:
        pool = served.scheduler.pool
        if name == "free-block-is-counted":
            pool.references[list(pool.free)[-1]] += 1
        else:
            block = next(block for block in pool.free if any(group == 1 for group, _ in pool.keys[block]))
            served.memory.marks[block] = -1

    large = Config((FULL, RECURRENT), 2_000, 8, 64)  # above what is judged whole in every mode
    for mode in ("touched", "full"):
        served = engine(large, mode)
        served.submit("a", range(50), 1)
        while served.scheduler.requests:
            served.step()
        damage(served)
        served.submit("b", range(500, 550), 1)
        if mode == "touched":
            served.step()
            with pytest.raises(EngineStopped):
                served.audit()
        else:
            with pytest.raises(EngineStopped):
                served.step()


# -- what a step costs ------------------------------------------------------------------------------------------------


class Untouchable(Mapping[Any, Any]):
    """A mapping that may be asked and not walked."""

    def __init__(self, inner: Mapping[Any, Any], count: Callable[[], None]) -> None:
        self._inner, self._count = inner, count

    def __getitem__(self, key: Any) -> Any:
        self._count()
        return self._inner[key]

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("the whole map is walked")

    def __len__(self) -> int:
        return len(self._inner)


PER_BLOCK = (
    "references",
    "queued",
    "keys",
    "announced",
    "mamba_content",
    "attention_content",
    "broken_keys",
    "sharers",
)
PER_STEP = ("tails", "requests", "touched", "arriving", "holders_of", "prefix")
WHOLE = ("free_queue", "holders", "tables", "bookkeeping", "idle")


def counted(blocks: int) -> tuple[Counter[str], list[StepEnd]]:
    """How often the view was asked what, in a day on a pool of so many blocks."""
    config = Config((FULL, RECURRENT), blocks, 8, 64, speculative=2, eagle=True)
    served = engine(config, "touched")
    asked: Counter[str] = Counter()

    def count(original: Callable[..., Any], *arguments: Any, of: str = "") -> Any:
        asked[of] += 1
        return original(*arguments)

    for name in (*PER_BLOCK, *PER_STEP):
        wrap(served.view, name, lambda original, *arguments, of=name: count(original, *arguments, of=of))
    for name in WHOLE:
        wrap(served.view, name, lambda original, *arguments, of=name: pytest.fail(f"{of} looks at the whole pool"))
    wrap(
        served.view,
        "lookup_map",
        lambda original: Untouchable(original(), lambda: asked.update(["looked up"])),
    )
    # The watcher was given the view's own methods when the engine was made.
    served.watcher._sharers, served.watcher._broken_keys = served.view.sharers, served.view.broken_keys  # type: ignore
    day = Traffic(served)
    day.run()
    return asked, day.ends


def test_what_touched_looks_at_does_not_depend_on_the_pool() -> None:
    small, large = counted(2_000), counted(20_000)
    assert small == large
    steps = len(small[1])
    assert steps > 40
    assert small[0]["references"] < 100 * steps
    assert set(PER_BLOCK) - {"attention_content"} <= set(small[0])
