"""The reference engine's bookkeeping, on a model that only follows prefixes: what it keeps, and that nothing leaks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from kvproof.impl.reference.completion import complete
from kvproof.impl.reference.engine import Engine
from kvproof.impl.reference.mutants import MUTANTS
from kvproof.impl.reference.null_model import NullModel
from kvproof.impl.reference.request import Request, Status
from kvproof.impl.reference.step import Step
from kvproof.impl.reference.subject import NullTeacher, ReferenceSubject
from kvproof.invariants.monitor import Monitor
from kvproof.models.stateful import campaign
from kvproof.spec.config import Config, ConfigError, Group
from kvproof.spec.events import Event, Lookup, Observation, Resume, Stall
from kvproof.spec.view import NULL

FULL, RECURRENT = Group("full", 8), Group("mamba", 32)
HYBRID = Config((FULL, RECURRENT), num_blocks=96, hash_unit=8, step_tokens=128)
TEACHER = NullTeacher()


class Rig:
    """An engine under judgement, everything it said, and fresh tokens. ``stop``: a violation raises."""

    def __init__(self, config: Config, mutant: str = "", stop: bool = True) -> None:
        self.monitor, self.events = Monitor(stop=stop), list[Event]()
        self.engine = Engine(config, NullModel(), self._observe)
        self.scheduler, self.pool = self.engine.scheduler, self.engine.scheduler.pool
        self.fresh_tokens = 0
        for planted in MUTANTS:
            if planted.id == mutant:
                planted.plant(self.engine)

    def _observe(self, observation: Observation) -> None:
        self.events.append(observation.event)
        self.monitor(observation)

    def fresh(self, count: int) -> list[int]:
        self.fresh_tokens += 1_000
        return list(range(self.fresh_tokens, self.fresh_tokens + count))

    def submit(self, name: str, prompt: Sequence[int], outputs: int, claimed: int = 0, missing: int = 0) -> Request:
        return self.engine.submit(name, prompt, outputs, claimed, missing)

    def until(self, over: Callable[[], bool], right: int = 0) -> None:
        for _ in range(500):
            if over():
                return
            self.engine.step(lambda request, count: TEACHER.drafts(request, min(right, count), count))
        raise AssertionError("it never happens")

    def finish(self, request: Request, right: int = 0) -> None:
        self.until(lambda: request.status is Status.FINISHED, right)

    def drain(self) -> None:
        """Let everything end; nothing may be left of it."""
        self.until(lambda: not self.scheduler.requests and not self.scheduler.store.flying)
        self.check_empty()

    def check_empty(self) -> None:
        assert set(self.pool.references) == {0}
        assert sorted(self.pool.free) == list(range(1, self.engine.config.num_blocks))
        assert self.engine.view.bookkeeping() == []
        assert self.monitor.audit(self.engine.view) == []

    def hits(self, request: Request) -> list[int]:
        """What its lookups answered, in order."""
        return [e.tokens for e in self.events if isinstance(e, Lookup) and e.request == request.name]

    def resumes(self, request: Request) -> list[tuple[int, int]]:
        """Where it resumed: local and external tokens, in order."""
        return [(e.local, e.external) for e in self.events if isinstance(e, Resume) and e.request == request.name]

    def schedule(self, right: int = 0) -> Step:
        step = self.scheduler.schedule(lambda request, count: TEACHER.drafts(request, min(right, count), count))
        self.engine.view.scheduled()
        return step


def check_outputs(*requests: Request) -> None:
    """Each request says what the model says without any cache."""
    for request in requests:
        plain = Request("plain", request.prompt, 0)
        plain.extend(request.tokens[: request.prompt])
        plain.extend(list(TEACHER.drafts(plain, request.outputs, request.outputs)))
        assert request.tokens == plain.tokens, request.name


# -- the tail of a conversation ---------------------------------------------------------------------------------------


def follow_up(attention: int, mutant: str = "") -> tuple[Rig, Request, Request]:
    """Three turns of a conversation. While the second one decodes, prefills take every block that is free."""
    groups = (Group("full", attention), RECURRENT)
    config = Config(groups, num_blocks=96, hash_unit=8, step_tokens=256, speculative=3, eagle=True)
    rig = Rig(config, mutant, stop=not mutant)
    first = rig.submit("first", rig.fresh(150), 8)
    rig.finish(first)
    second = rig.submit("second", [*first.tokens, *rig.fresh(26)], 40)
    rig.until(lambda: second.outputs > 0)
    assert rig.resumes(second) == [(first.tail, 0)]
    assert first.tail % 32 != 0  # inside a block: the second turn keys no boundary of its own
    others = [rig.submit(f"other {i}", rig.fresh(330), 1) for i in range(8)]
    rig.until(lambda: all(other.status is Status.FINISHED for other in others))
    assert second.status is Status.RUNNING
    rig.finish(second)
    third = rig.submit("third", [*second.tokens, *rig.fresh(20)], 4)
    rig.engine.step()
    return rig, second, third


@pytest.mark.parametrize("attention", [8, 16, 32])
def test_the_next_turn_resumes_at_the_tail(attention: int) -> None:
    rig, second, third = follow_up(attention)
    assert second.tail == (second.prompt // 8 - 1) * 8  # EAGLE puts it one unit below the last unit boundary
    assert rig.hits(third) == [second.tail]
    rig.drain()
    check_outputs(second, third)


@pytest.mark.parametrize("attention", [8, 16, 32])
def test_without_a_hold_the_next_turn_hits_nothing(attention: int) -> None:
    rig, second, third = follow_up(attention, "checkpoint-is-not-held")
    assert rig.hits(third) == [0]
    assert ("TAIL.newest-held", "newest-state-evictable") in {v.identity for v in rig.monitor.violations}
    rig.drain()
    check_outputs(second, third)


ABORTS = [("owner", "sibling"), ("sibling", "owner"), ("sibling",), ("owner",)]


@pytest.mark.parametrize("when", ["scheduled", "executed"])
@pytest.mark.parametrize("order", ABORTS, ids="-then-".join)
def test_aborts_with_copies_queued_leave_nothing(order: tuple[str, ...], when: str) -> None:
    abort_with_copies_queued(Rig(HYBRID_16), order, when)


HYBRID_16 = Config((Group("full", 16), RECURRENT), num_blocks=96, hash_unit=8, step_tokens=128)


def test_a_copy_whose_ends_stay_counted_is_noticed() -> None:
    with pytest.raises(AssertionError):
        abort_with_copies_queued(Rig(HYBRID_16, "copy-ends-are-leaked"), ABORTS[0], "scheduled")


def abort_with_copies_queued(rig: Rig, order: tuple[str, ...], when: str) -> None:
    owner = rig.submit("owner", rig.fresh(42), 30)
    rig.until(lambda: owner.outputs > 1)
    assert owner.tail == 40
    rig.submit("sibling", [*owner.tokens[:42], *rig.fresh(30)], 30)
    step = rig.schedule()
    assert [part.request.name for part in step.rows] == ["owner", "sibling"]
    ((source, target),) = step.copies
    assert rig.pool.references[source] >= 2  # the owner's table, and the copy
    assert rig.pool.references[target] == 2  # the sibling's table, and the copy
    if when == "executed":
        outcomes = rig.engine.device.execute(step, None)
    running = {block for name in order for block in rig.scheduler.planner.blocks(rig.scheduler.requests[name])}
    for name in order:
        rig.engine.abort(name)
    assert not {source, target, *running} & set(rig.pool.free)  # the step may still touch them
    if when == "scheduled":
        outcomes = rig.engine.device.execute(step, None)
    complete(rig.scheduler, step, outcomes, [])
    if len(order) == 2:
        rig.check_empty()
    rig.drain()


MEDDLED = {
    "drafts": Config((Group("full", 16), RECURRENT), 60, 4, 64, speculative=2, eagle=True),
    "sync store": Config((Group("full", 16), RECURRENT), 60, 8, 64, connector="sync", divergent_hits=True),
    "async store": Config((Group("full", 16), RECURRENT), 60, 8, 64, connector="async", load_steps=2),
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", MEDDLED)
def test_aborts_and_preemptions_between_the_parts_of_a_step_leave_nothing(name: str, seed: int) -> None:
    rig, rng = Rig(MEDDLED[name]), random.Random(seed)
    engine, requests = rig.engine, list[Request]()

    def meddle() -> None:
        if rig.scheduler.requests and rng.random() < 0.15:
            rng.choice([engine.abort, engine.preempt])(rng.choice(list(rig.scheduler.requests)))

    for _ in range(50):
        if rng.random() < 0.5:
            base = rng.choice(requests[-4:]).tokens if requests and rng.random() < 0.7 else []
            prompt = [*base[: rng.randrange(len(base) + 1)], *rig.fresh(rng.randrange(1, 60))][:120]
            claimed = rng.choice((0, len(prompt))) if engine.config.connector != "none" else 0
            missing = rng.choice((0, 0, 1, 40)) if claimed else 0
            requests.append(rig.submit(f"r{len(requests)}", prompt, rng.randrange(1, 20), claimed, missing))
        right = rng.randrange(engine.config.speculative + 1)
        step = rig.schedule(right)
        meddle()
        outcomes = engine.device.execute(step, None)
        meddle()
        arrived = rig.scheduler.store.arrived()
        for flight in arrived:
            engine.device.load(flight)
        complete(rig.scheduler, step, outcomes, arrived)
        engine.view.step_has_run(engine.device.written)
        assert [broken for broken in rig.monitor.audit(engine.view) if broken.invariant != "REF.drained"] == []
    rig.drain()
    check_outputs(*requests)


# -- giving way -------------------------------------------------------------------------------------------------------


def test_the_newest_gives_way_and_goes_on_where_it_was() -> None:
    rig = Rig(Config((FULL, RECURRENT), num_blocks=27, hash_unit=8, step_tokens=128, full_sequence_must_fit=False))
    old, new = rig.submit("old", rig.fresh(80), 60), rig.submit("new", rig.fresh(60), 30)
    rig.until(lambda: new.status is Status.RUNNING and new.outputs > 3)
    rig.until(lambda: new.status is Status.WAITING)
    assert new.computed == 0
    assert new.outputs > 3
    assert rig.pool.references.count(0) > 1
    rig.drain()
    check_outputs(old, new)
    assert rig.resumes(new) == [(new.prompt // 8 * 8, 0)]  # by what it had keyed itself


def test_a_request_gives_up_its_own_checkpoint_before_it_gives_up() -> None:
    """Alone in a pool that holds its blocks but not its checkpoint besides."""
    rig = Rig(Config((FULL, RECURRENT), num_blocks=16, hash_unit=8, step_tokens=128, full_sequence_must_fit=False))
    request = rig.submit("r", rig.fresh(60), 53)
    rig.until(lambda: request.recurrent[1].held is not None)
    rig.until(lambda: request.recurrent[1].held is None)
    assert request.status is Status.RUNNING
    rig.drain()
    check_outputs(request)
    stuck = Rig(rig.engine.config, "own-checkpoint-never-yields", stop=False)
    stuck.submit("r", stuck.fresh(60), 53)
    with pytest.raises(AssertionError, match="it never happens"):
        stuck.drain()
    assert any(isinstance(event, Stall) for event in stuck.events)


def test_nobody_overtakes_who_waits() -> None:
    rig = Rig(Config((FULL, RECURRENT), num_blocks=20, hash_unit=8, step_tokens=256))
    first = rig.submit("first", rig.fresh(70), 8)
    large, small = rig.submit("large", rig.fresh(90), 1), rig.submit("small", rig.fresh(8), 1)
    rig.until(lambda: first.status is Status.FINISHED)
    assert small.status is Status.WAITING
    rig.drain()
    check_outputs(first, large, small)


# -- external loads ---------------------------------------------------------------------------------------------------


def store(kind: str, **more: object) -> Config:
    return Config((FULL, RECURRENT), num_blocks=96, hash_unit=8, step_tokens=128, connector=kind, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_load_is_resumed_from_and_can_be_hit(kind: str) -> None:
    rig = Rig(store(kind))
    request = rig.submit("r", rig.fresh(100), 3, claimed=100)
    rig.finish(request)
    assert rig.resumes(request) == [(0, 96)]
    again = rig.submit("again", request.tokens[:99], 3)
    rig.finish(again)
    assert rig.resumes(again) == [(96, 0)]
    rig.drain()
    check_outputs(request, again)


def test_an_aborted_load_keeps_its_blocks_until_it_is_over() -> None:
    rig = Rig(store("async", load_steps=3))
    rig.submit("r", rig.fresh(100), 3, claimed=100)
    rig.engine.step()
    (written,) = rig.engine.view.arriving().values()
    assert len(written) == 96 // 8 + 1
    rig.engine.abort("r")
    assert not written & set(rig.pool.free)
    assert "fenced blocks: r" in rig.engine.view.bookkeeping()
    other = rig.submit("other", rig.fresh(60), 8)
    rig.engine.step()
    assert not written & set(rig.pool.free)
    rig.engine.step()
    assert rig.scheduler.store.flying == {}
    assert not written & {block for table in other.tables for block in table}
    assert written <= set(rig.pool.free)
    rig.drain()
    check_outputs(other)


@pytest.mark.parametrize("missing", [1, 40, 96])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_load_that_falls_short_counts_for_nothing(kind: str, missing: int) -> None:
    rig = Rig(store(kind))
    request = rig.submit("r", rig.fresh(100), 3, claimed=100, missing=missing)
    rig.until(lambda: "r" in rig.scheduler.store.distrusted)
    assert request.computed == 0
    assert set(rig.pool.references) == {0}
    assert rig.pool.index == {}
    rig.engine.step()
    assert request.status is Status.RUNNING
    assert rig.resumes(request) == [(0, 96)]  # not once more: the second time it starts from nothing
    rig.drain()
    check_outputs(request)


@pytest.mark.parametrize(("claimed", "expected"), [(0, (40, 0)), (63, (40, 0)), (64, (32, 32)), (171, (32, 128))])
def test_a_load_replaces_a_tail_inside_a_block_if_it_brings_more(claimed: int, expected: tuple[int, int]) -> None:
    rig = Rig(store("sync"))
    first = rig.submit("first", rig.fresh(41), 1)
    rig.finish(first)
    request = rig.submit("r", [*first.tokens[:41], *rig.fresh(130)], 2, claimed)
    rig.finish(request)
    assert rig.resumes(request) == [expected]
    rig.drain()
    check_outputs(request)


def test_attention_may_reach_deeper_than_the_state_if_a_store_has_the_rest() -> None:
    """Full attention 4 blocks deep and a recurrent group 1, block 16: 16 without the store, 80 with 16 tokens of it."""
    groups = (Group("full", 16), Group("mamba", 16))
    for claimed, expected in ((0, (16, 0)), (80, (64, 16))):
        rig = Rig(Config(groups, 96, 16, step_tokens=16, connector="sync", divergent_hits=True, retention=None))
        first = rig.submit("first", rig.fresh(70), 1)
        rig.finish(first)
        states = [first.states[position] for position in (32, 48, 64)]
        deep = [b for b in rig.pool.free if any(g == 1 and state in states for g, state in rig.pool.keys[b])]
        rig.pool.evict(deep)
        request = rig.submit("r", [*first.tokens[:70], *rig.fresh(30)], 2, claimed=claimed)
        rig.finish(request)
        assert rig.resumes(request) == [expected]
        rig.drain()
        check_outputs(first, request)


# -- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exporting", [False, True])
def test_a_checkpoint_is_exported_inside_the_last_chunk(exporting: bool) -> None:
    extra = {"checkpoint_blocks": 1, "checkpoint_alignment": 8} if exporting else {}
    rig = Rig(Config((FULL, RECURRENT), num_blocks=96, hash_unit=8, step_tokens=128, **extra))
    request = rig.submit("r", rig.fresh(100), 4)
    step = rig.schedule()
    (part,) = step.rows
    assert [save.position for save in part.row.saves] == ([96, 100] if exporting else [96])
    complete(rig.scheduler, step, rig.engine.device.execute(step, rig.engine.watcher), [])
    assert request.outputs == int(exporting)  # without an export the prefill takes one step more
    rig.finish(request)
    again = rig.submit("again", [*request.tokens[:100], *rig.fresh(5)], 2)
    rig.finish(again)
    assert rig.resumes(again) == [(96, 0)]
    rig.drain()
    check_outputs(request, again)


def test_the_second_of_three_siblings_leaves_a_state_at_the_junction() -> None:
    rig = Rig(HYBRID)
    common = rig.fresh(67)
    siblings = [rig.submit(f"r{i}", [*common, *rig.fresh(40)], 2) for i in range(1)]
    rig.finish(siblings[0])
    for i in (1, 2):
        siblings.append(rig.submit(f"r{i}", [*common, *rig.fresh(40)], 2))
        rig.finish(siblings[-1])
    assert [rig.hits(sibling) for sibling in siblings] == [[0], [0], [64]]
    assert [sibling.junction for sibling in siblings] == [0, 64, 0]
    rig.drain()
    check_outputs(*siblings)


@pytest.mark.parametrize(("retention", "expected"), [(None, [32, 64, 96]), (0, [96]), (64, [64, 96])])
def test_retention_says_which_boundaries_get_a_key(retention: int | None, expected: list[int]) -> None:
    rig = Rig(Config((FULL, RECURRENT), 96, 8, step_tokens=32, retention=retention))
    request = rig.submit("r", rig.fresh(100), 1)
    rig.finish(request)
    keyed = {request.states.index(state) for group, state in rig.pool.index if group == 1}
    assert sorted(keyed) == expected


def test_a_window_lets_go_of_what_it_has_passed() -> None:
    window = Group("window", 8, window=20)
    rig = Rig(Config((window, Group("mamba", 16)), num_blocks=40, hash_unit=8, step_tokens=32))
    request = rig.submit("r", rig.fresh(90), 60)
    rig.until(lambda: request.outputs > 0)
    while request.status is Status.RUNNING:
        table = request.tables[0]
        passed = (request.computed - 19) // 8
        assert all(block == NULL for block in table[:passed])
        assert all(block != NULL for block in table[passed:])
        assert len(table) - passed <= 4
        rig.engine.step()
    rig.drain()
    check_outputs(request)


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_drafts_that_are_rejected_leave_no_trace(right: int) -> None:
    rig = Rig(Config((FULL, RECURRENT), 96, 8, 128, speculative=3))
    request = rig.submit("r", rig.fresh(50), 40)
    rig.until(lambda: request.outputs > 0)
    while request.status is Status.RUNNING:
        own, before = request.recurrent[1], request.outputs
        assert rig.engine.memory.state_at(own.running) == (request.states[request.computed],) * 2
        assert request.known == request.computed + 1
        assert len(own.scratch) <= 4
        rig.engine.step(lambda request, count: TEACHER.drafts(request, min(right, count), count))
        assert request.outputs == min(40, before + 1 + right)
    rig.drain()
    check_outputs(request)


# -- requests and operators -------------------------------------------------------------------------------------------


def test_a_request_that_makes_no_sense_is_refused() -> None:
    rig = Rig(HYBRID)
    rig.submit("r", rig.fresh(10), 1)
    with pytest.raises(ValueError, match="there is a request r already: choose another name"):
        rig.submit("r", rig.fresh(10), 1)
    for length in (0, 1024):
        with pytest.raises(ValueError, match=f"other has {length} tokens: 1 to 1023 are possible"):
            rig.submit("other", rig.fresh(length), 1)
    with pytest.raises(ConfigError):
        ReferenceSubject().start(Config((FULL, RECURRENT), 96, 8, 128, async_scheduling=True), None)


def test_the_cache_is_cleared_only_while_nothing_is_in_use() -> None:
    rig = Rig(HYBRID)
    request = rig.submit("r", rig.fresh(50), 3)
    rig.engine.step()
    assert not rig.engine.reset()
    rig.finish(request)
    assert rig.pool.index
    assert rig.engine.reset()
    assert rig.pool.index == {}
    again = rig.submit("again", request.tokens[:50], 3)
    rig.drain()
    assert rig.hits(again) == [0]
    check_outputs(request, again)


def test_a_request_ends_when_it_is_told_to_or_at_the_longest_sequence() -> None:
    rig = Rig(Config((FULL, RECURRENT), 96, 8, 128, max_model_len=64))
    told, long = rig.submit("told", rig.fresh(20), 30), rig.submit("long", rig.fresh(60), 30)
    rig.until(lambda: told.outputs == 2)
    rig.engine.finish("told")
    rig.drain()
    assert (told.outputs, told.tokens[-1]) == (3, rig.engine.device.EOS)
    assert (long.known, long.outputs) == (64, 4)
    check_outputs(long)


# -- everything that is not known ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_campaign_finds_nothing() -> None:
    found = campaign.run(ReferenceSubject(), seed=1, steps=3000)
    assert found.findings == ()
    assert found.errors == ()
    assert found.steps >= 3000
    silent = {"FLOW.no-crash", "SLOT.key-content", "REF.references", "TAIL.newest-held", "EXT.counts-what-came"}
    assert {name for name in silent if not found.evaluations.get(name)} == set()
