"""The rules on plain integers: against brute force with ``//`` and ``%``, and on the numbers of the public faults."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproof.spec import logic
from kvproof.spec.config import Config, Group
from kvproof.spec.radix import Position, Radix, earlier, first_inside, later
from kvproof.spec.rules import blocks, checkpoint, chunk, hits, ledger, slots
from kvproof.spec.rules.blocks import AttentionStep, MambaStep
from kvproof.spec.rules.chunk import Prefill

GRIDS = st.tuples(st.integers(1, 6), st.integers(1, 9)).map(lambda pair: Radix(*pair))
TOKENS = st.integers(0, 400)


def size(grid: Radix) -> int:
    return int(grid.units * grid.unit)


def ceil(tokens: int, block: int) -> int:
    return -(-tokens // block)


# Connectives.


def test_forall_remembers_the_witness_and_stops_there() -> None:
    seen: list[int] = []

    def small(n: int) -> bool:
        seen.append(n)
        return n < 3

    answer = logic.forall(range(10), small)
    assert not answer
    assert logic.witness(answer) == (3,)
    assert seen == [0, 1, 2, 3]


def test_witnesses_pass_through_the_connectives() -> None:
    rows = [("a", [1, 2]), ("b", [1, 9])]
    answer = logic.all_of(True, lambda: logic.forall(rows, lambda row: logic.forall(row[1], lambda n: n < 5)))
    assert logic.witness(answer) == (rows[1], 9)
    assert logic.negate(answer) is True
    assert logic.witness(logic.implies(True, lambda: answer)) == (rows[1], 9)


def test_later_parts_are_not_evaluated_in_vain() -> None:
    def never() -> bool:
        raise AssertionError("evaluated")

    assert not logic.all_of(False, never)
    assert logic.any_of(True, never)
    assert logic.implies(False, never)


@given(st.lists(st.integers(), min_size=1))
def test_minimum_and_maximum(numbers: list[int]) -> None:
    assert logic.minimum(*numbers) == min(numbers)
    assert logic.maximum(*numbers) == max(numbers)


@given(st.booleans(), st.booleans())
def test_truth_tables(a: bool, b: bool) -> None:
    assert logic.implies(a, b) == ((not a) or b)
    assert logic.same(a, b) == (a is b)
    assert logic.count(a, b, True) == a + b + 1
    assert logic.ite(a, 1, 2) == (1 if a else 2)


# Positions: the digits are // and %.


@given(TOKENS, TOKENS, GRIDS)
def test_positions_compare_and_add_as_their_numbers(a: int, b: int, grid: Radix) -> None:
    x, y = Position.on(a, grid), Position.on(b, grid)
    assert x.well_formed()
    assert x.value() == a
    assert (x < y, x <= y, x == y, x != y, x > y, x >= y) == (a < b, a <= b, a == b, a != b, a > b, a >= b)
    assert x.plus(y).well_formed()
    assert x.plus(y).value() == a + b
    assert x.minus(y).value() == a - b
    assert bool(x.minus(y).well_formed()) == (a >= b)
    assert x.minus(y).at_least_zero().value() == max(a - b, 0)
    assert (earlier(x, y).value(), later(x, y).value()) == (min(a, b), max(a, b))


@given(TOKENS, GRIDS)
def test_boundaries_are_floors_and_ceilings(n: int, grid: Radix) -> None:
    x, block, unit = Position.on(n, grid), size(grid), grid.unit
    assert x.floor_block().value() == n // block * block
    assert x.ceil_block().value() == ceil(n, block) * block
    assert x.floor_unit().value() == n // unit * unit
    assert x.ceil_unit().value() == ceil(n, unit) * unit
    assert x.next_block().value() == (n // block + 1) * block
    assert x.blocks_up() == ceil(n, block)
    assert (bool(x.on_block()), bool(x.on_unit())) == (n % block == 0, n % unit == 0)
    assert (grid.one_token().value(), grid.one_unit().value()) == (1, unit)


@given(TOKENS, TOKENS, st.lists(TOKENS, max_size=4), GRIDS)
def test_first_stop_inside(start: int, end: int, stops: list[int], grid: Radix) -> None:
    found = first_inside([Position.on(s, grid) for s in stops], Position.on(start, grid), Position.on(end, grid))
    assert found.value() == min((s for s in stops if start < s < end), default=end)


def test_a_unit_that_does_not_divide_the_block_is_refused() -> None:
    with pytest.raises(ValueError, match="unit 5 does not divide block 16"):
        Position.of(3, 16, 5)


# Chunk ends.


def split_in_integers(
    *,
    block: int,
    start: int,
    offered: int,
    prefill_end: int,
    prompt: int,
    last: int,
    tail: int,
    junction: int,
    fits: bool,
    exports: bool,
    inside: bool,
) -> int:
    """The split rule again, by floor division."""
    stop = 0
    if start < junction < offered:
        stop = junction if inside and junction <= prompt else start + (junction - start) // block * block
    if exports and offered >= prefill_end and not start < stop < offered:
        return offered
    end = offered
    if end < prefill_end and (end // block * block > start or fits):
        end = end // block * block
    stops = [last, stop, tail if last < tail < prompt else 0]
    if start % block:
        stops.append((start // block + 1) * block)
    return max(min((s for s in stops if start < s < end), default=end), start)


@st.composite
def prefills(draw: st.DrawFn) -> tuple[Prefill, dict[str, int | bool]]:
    grid = draw(GRIDS)
    prefill_end = draw(st.integers(1, 8 * size(grid)))
    start = draw(st.integers(0, prefill_end - 1))
    numbers: dict[str, int | bool] = {
        "start": start,
        "offered": draw(st.integers(start + 1, prefill_end + 4)),
        "prefill_end": prefill_end,
        "prompt": draw(st.integers(1, prefill_end)),
        "last": draw(st.integers(0, 8)) * size(grid),
        "tail": draw(st.integers(0, prefill_end)),
        "junction": draw(st.one_of(st.just(0), st.integers(0, prefill_end))),
        "fits": draw(st.booleans()),
        "exports": draw(st.booleans()),
        "inside": draw(st.booleans()),
    }
    at = {name: Position.on(int(n), grid) for name, n in numbers.items() if not isinstance(n, bool)}
    case = Prefill(
        start=at["start"],
        offered=at["offered"],
        prefill_end=at["prefill_end"],
        prompt=at["prompt"],
        last_cacheable=at["last"],
        tail=at["tail"],
        junction=at["junction"],
        fits=numbers["fits"],
        exports=numbers["exports"],
        junction_inside=numbers["inside"],
    )
    return case, {**numbers, "block": size(grid)}


@given(prefills())
def test_split_is_its_integer_version(drawn: tuple[Prefill, dict[str, int | bool]]) -> None:
    case, numbers = drawn
    assert chunk.split(case).value() == split_in_integers(**numbers)  # type: ignore[arg-type]


@given(prefills())
def test_split_ends_where_a_chunk_may_end(drawn: tuple[Prefill, dict[str, int | bool]]) -> None:
    case, _ = drawn
    end = chunk.split(case)
    stops = chunk.declared_stops(case)
    assert end == case.start or chunk.may_end(
        case.start, end, case.prefill_end, stops, case.fits, chunk.exports_inside(case)
    )


def test_the_first_chunks_of_issue_43559() -> None:
    grid = Radix.of(1600, 16)
    whole = Position.on(3000, grid)
    case = Prefill(
        start=grid.zero(),
        offered=Position.on(364, grid),
        prefill_end=whole,
        prompt=whole,
        last_cacheable=checkpoint.checkpoint_position(whole, True, True),
        tail=grid.zero(),
        junction=grid.zero(),
        fits=True,
        exports=False,
    )
    assert case.last_cacheable.value() == 0
    assert chunk.split(case).value() == 0  # wait: a mid-block end here poisoned slot 0
    assert not chunk.may_end_at(1600, 16, 0, 364, 3000, [0], 8192, False)
    assert not chunk.may_end_at(1600, 16, 364, 3000, 3000, [0], 8192, False)
    assert chunk.may_end_at(1600, 16, 364, 1600, 3000, [0], 8192, False)


def test_a_block_wider_than_any_chunk_is_filled_inside() -> None:
    assert chunk.may_end_at(1600, 16, 0, 512, 3000, [], 512, False)
    assert not chunk.may_end_at(1600, 16, 1536, 2048, 3000, [], 512, False)
    assert chunk.may_end_at(1600, 16, 1536, 1600, 3000, [], 512, False)


def test_only_an_exporting_last_chunk_leaves_its_block() -> None:
    assert chunk.may_end_at(32, 8, 16, 90, 90, [], 512, True)
    assert not chunk.may_end_at(32, 8, 16, 90, 91, [90], 512, True)


# Slots, by running whole prefills.


@given(GRIDS, st.integers(1, 120), st.lists(st.integers(1, 60), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_whole_prefills_keep_every_slot(
    grid: Radix, prompt: int, budgets: list[int], eagle: bool, partial: bool
) -> None:
    whole, zero = Position.on(prompt, grid), grid.zero()
    columns = whole.blocks_up()
    table = [slots.Slot(True, zero)] * columns
    start, last = zero, checkpoint.checkpoint_position(whole, eagle, True)
    tail = checkpoint.checkpoint_position(whole, eagle, False) if partial else zero
    for budget in budgets:
        if start == whole:
            break
        offered = earlier(start.plus(Position.on(budget, grid)), whole)
        fits = size(grid) <= max(budgets)
        end = chunk.split(Prefill(start, offered, whole, whole, last, tail, zero, fits, False))
        if end == start:
            continue
        table = [slots.after_chunk(p, slot, start, end, False, zero) for p, slot in enumerate(table)]
        start = end
        for p, slot in enumerate(table):
            assert slots.keeps_promise(p, slot, start)
            assert slots.carries_state(p, slot, start)


# Checkpoints.


@given(st.integers(1, 400), GRIDS, st.booleans(), st.booleans(), st.integers(0, 5))
def test_checkpoint_position(n: int, grid: Radix, drop: bool, by_block: bool, lookahead: int) -> None:
    grain = size(grid) if by_block else grid.unit
    left = 0 if drop else max(1, lookahead)
    expected = max((n - left) // grain * grain - (grain if drop else 0), 0)
    ahead = Position.on(lookahead, grid) if lookahead else None
    assert checkpoint.checkpoint_position(Position.on(n, grid), drop, by_block, ahead).value() == expected


@given(TOKENS, st.integers(1, 200), TOKENS, GRIDS, st.integers(0, 4))
def test_export_validity(start: int, length: int, at: int, grid: Radix, alignment: int) -> None:
    end, block, unit = start + length, size(grid), grid.unit
    aligned = checkpoint.on_alignment(start, at, alignment)
    expected = (
        alignment > 0
        and (at - start) % alignment == 0
        and start % unit == 0
        and ceil(end, block) - 2 > (start - 1) // block
        and start + unit <= at
        and start < at < end
    )
    x, y, z = (Position.on(n, grid) for n in (start, end, at))
    assert bool(checkpoint.export_valid(x, y, z, aligned)) == expected


# Blocks.


@st.composite
def mamba_steps(draw: st.DrawFn) -> MambaStep:
    speculative, first = draw(st.integers(0, 4)), draw(st.booleans())
    computed = draw(st.integers(0, 12))
    held = 0 if first else computed + draw(st.integers(0, 2)) + speculative + (0 if computed else 1)
    needed = max(computed, 1) + draw(st.integers(0, 12))
    columns = computed if first else held - speculative
    return MambaStep(
        needed=needed,
        computed=computed,
        held=held,
        hits=draw(st.integers(0, computed)) if first else 0,
        speculative=speculative,
        first=first,
        partial=draw(st.booleans()),
        checkpoint=needed - 2 >= columns and draw(st.booleans()),
    )


def taken_from_a_table(step: MambaStep) -> int:
    """Lay the table out slot by slot, as lists, and count what the pool must give."""
    null, taken = "null", 0
    if step.first:
        table = [null] * (step.computed - 1) + ["state"] * (step.computed > 0)
        taken += step.hits < step.computed
    else:
        table = [null] * (step.held - step.speculative - 1) + ["state"] + ["scratch"] * step.speculative
    scratch = set() if step.first else set(range(len(table) - step.speculative, len(table)))
    running = step.needed - 1
    kept = running - bool(step.checkpoint)
    while len(table) < kept:
        table.append(null)
    for column in sorted(scratch):
        if column < kept:
            table[column] = null
            table.append("scratch")
    while len(table) < step.needed + step.speculative:
        table.append("new")
        taken += 1
    return taken + bool(step.partial)


@given(mamba_steps())
def test_mamba_estimate_is_what_the_table_takes(step: MambaStep) -> None:
    assert blocks.mamba_step_possible(step)
    assert blocks.mamba_estimate(step) == blocks.mamba_taken(step) == taken_from_a_table(step)
    assert 0 <= blocks.mamba_estimate(step) <= blocks.mamba_cap(step)


def test_a_local_state_below_an_external_one_is_not_adopted() -> None:
    """Block 8: a local hit of 16 tokens and 8 external ones, up to 28; then nothing local at all."""
    step = MambaStep(needed=4, computed=3, held=0, hits=2, speculative=0, first=True, partial=False, checkpoint=False)
    assert blocks.mamba_charge(step, evictable=1) == blocks.mamba_taken(step) == 2
    assert blocks.mamba_charge(replace(step, hits=3), evictable=1) == blocks.mamba_taken(step) == 2
    assert blocks.mamba_estimate(replace(step, hits=3)) == 1


@pytest.mark.parametrize("block", [896, 1536])
@pytest.mark.parametrize("speculative", [0, 1, 4])
@pytest.mark.parametrize("prompt", [25121, 704547])
def test_the_sizes_of_pr_57050(block: int, speculative: int, prompt: int) -> None:
    held = ceil(23040, block) + speculative
    step = MambaStep(ceil(prompt, block), 0, held, 0, speculative, False, False, True)
    assert blocks.mamba_step_possible(step)
    assert blocks.mamba_estimate(step) == blocks.mamba_taken(step) == 2


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_attention_estimate_is_what_the_table_takes(
    more: int, hit: int, external: int, skip: int, partial: bool
) -> None:
    computed = hit + external
    needed, skipped = max(computed + more, 1), min(skip, computed)
    first = AttentionStep(needed, computed, 0, hit, skipped, True, partial and hit > 0)
    table = max(skipped, hit)
    assert blocks.attention_step_possible(first)
    assert blocks.attention_estimate(first) == blocks.attention_taken(first) == needed - table + first.partial
    later_step = AttentionStep(needed, computed, computed + 1, 0, skipped, False, False)
    assert blocks.attention_estimate(later_step) == blocks.attention_taken(later_step) == max(needed - computed - 1, 0)


@given(TOKENS, st.integers(0, 50), st.integers(1, 60), st.integers(0, 60), st.integers(1, 12))
def test_window_blocks(settled: int, running: int, window: int, slack: int, block: int) -> None:
    grid, end = Radix(1, block), max(settled + running, 1)
    at = [Position.on(n, grid) for n in (settled, end, window, running + slack, end + slack)]
    held = blocks.window_held(at[0], at[1], at[2])
    skipped = max(0, settled - window + 1)
    assert held == len({n // block for n in range(skipped // block * block, end)})
    cap = blocks.window_cap(at[2], at[3], at[4])
    assert cap == ceil(min(window - 1 + running + slack, end + slack), block) + 1
    assert held <= blocks.window_gate(at[1], cap)


def hybrid(**changes: object) -> Config:
    base = Config(
        groups=(Group("full", 16), Group("window", 16, window=24), Group("mamba", 16)),
        num_blocks=64,
        hash_unit=16,
        step_tokens=32,
        speculative=2,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@given(mamba_steps(), st.booleans(), st.booleans())
def test_a_peak_covers_every_first_allocation(step: MambaStep, connected: bool, fine: bool) -> None:
    unit = 8 if fine else 16
    config = hybrid(
        groups=(Group("mamba", 16),),
        hash_unit=unit,
        speculative=step.speculative,
        checkpoint_blocks=int(step.checkpoint),
        connector="sync" if connected else "none",
    )
    partial = step.partial and fine and step.hits > 0
    hit = step.hits if connected else step.computed
    first = replace(step, first=True, held=0, hits=hit, partial=partial, checkpoint=False)
    evictable = 1 if hit and hit == step.computed else 0
    needed = blocks.mamba_estimate(first) + evictable
    assert needed <= blocks.peak_blocks(config, step.needed * 16)


def test_peaks_do_not_grow_with_the_prompt_where_memory_is_constant() -> None:
    config = hybrid(max_model_len=1 << 20)
    groups = config.groups
    short, long = ([blocks.group_peak(config, g, n) for g in groups] for n in (1000, 100_000))
    assert short[1:] == long[1:]
    assert (short[0], long[0]) == (math.ceil(1000 / 16), math.ceil(100_000 / 16))
    assert blocks.peak_blocks(config, 1000) == sum(short)


# Hits.


@pytest.mark.parametrize(("offered", "boundary"), [(0, 16), (16, 80)])
def test_the_decision_table_of_pr_51468(offered: int, boundary: int) -> None:
    """Full attention 4 blocks deep against 1 recurrent block, block 16."""
    resumed = hits.resume(hit=64, tail=0, agreed=16, diverged=True, offered=offered)
    assert resumed.boundary == boundary
    assert hits.resume_has_state(resumed, recurrent_depth=16, agreed=16)


@pytest.mark.parametrize(
    ("offered", "local", "external"),
    [(0, 3200, 0), (100, 3200, 0), (128, 3200, 0), (129, 3072, 129), (1536, 3072, 1536)],
)
def test_a_tail_is_cut_only_for_more(offered: int, local: int, external: int) -> None:
    resumed = hits.resume(hit=3200, tail=128, agreed=3200, diverged=False, offered=offered)
    assert (resumed.local, resumed.external) == (local, external)


def test_only_recurrent_groups_may_be_short() -> None:
    assert hits.may_cut(2, 1, recurrent=True, cacheable=True)
    assert not hits.may_cut(2, 1, recurrent=False, cacheable=True)
    assert hits.may_cut(2, 0, recurrent=False, cacheable=False)
    assert not hits.may_cut(2, 1, recurrent=False, cacheable=False)


@given(st.integers(0, 9), st.integers(0, 9), st.booleans(), st.booleans())
def test_a_cut_is_a_prefix(endpoint: int, held: int, recurrent: bool, cacheable: bool) -> None:
    if hits.may_cut(endpoint, held, recurrent, cacheable):
        after = hits.cut_length(endpoint, held, recurrent, cacheable)
        assert after == len(range(held)[: endpoint if cacheable else 0])
        assert hits.cut_right(endpoint, held, after, recurrent, cacheable)
        assert not hits.cut_right(endpoint, held, after + 1, recurrent, cacheable)


def test_a_hit_deeper_than_a_group_is_named() -> None:
    assert logic.witness(hits.hit_within(32, 64, [48, 16])) == (16,)
    assert not hits.hit_within(64, 64, [64])
    assert hits.hit_within(48, 64, [48, 64])


# References.


def test_any_sequence_of_guarded_actions_keeps_the_account() -> None:
    """All accounts with few holders, and every action on each."""
    tried = 0
    for null in (False, True):
        for tables in range(3):
            for copies in range(1 if null else 3):
                for holds in range(1 if null else 3):
                    references = 0 if null else tables + copies + holds
                    queue = 0 if null else int(references == 0)
                    entry = ledger.Entry(references, queue, tables, copies, holds, null)
                    assert ledger.sound(entry)
                    for action in ledger.ACTIONS.values():
                        done = action(entry)
                        if done.guard:
                            assert ledger.sound(done.after), (entry, done.after)
                            tried += 1
    assert tried > 100


@pytest.mark.parametrize("field", ["references", "queue", "tables"])
def test_an_account_that_is_off_by_one_is_not_sound(field: str) -> None:
    entry = ledger.Entry(1, 0, 1, 0, 0, False)
    assert ledger.sound(entry)
    assert not ledger.sound(replace(entry, **{field: getattr(entry, field) + 1}))
