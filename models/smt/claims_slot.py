"""SLOT: where prefill chunks end, and that slot p therefore holds the state after (p+1)·B tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvproof.models.smt import mutants
from kvproof.models.smt.claim import Claim, Obligation, Symbols, is_at, tokens
from kvproof.spec.logic import Truth, all_of, any_of, implies, negate
from kvproof.spec.radix import Position, Radix, choose, later
from kvproof.spec.rules import checkpoint, chunk, slots
from kvproof.spec.rules.chunk import Prefill

SCOPE = "proved for all block sizes, units, prompts and budgets"
Split = Callable[[Prefill], Position]


def _block(grid: Radix) -> int:
    return int(grid.units * grid.unit)


def _chunk(start: Position, end: Position) -> str:
    return f"[{tokens(start)}, {tokens(end)})"


def _sees_boundary(start: Position, end: Position) -> str:
    """How a chunk lies to the block boundaries, in words."""
    block = _block(end.radix)
    where = f"starts on the boundary {tokens(start)}" if start.on_block() else f"starts inside block {start.block}"
    if end.on_block():
        return f"{where} and ends on the boundary {tokens(end)}"
    crossed = "" if end <= start.next_block() else f", crosses {(start.block + 1) * block}"
    return f"{where}{crossed} and ends inside block {end.block}"


def _any_case(s: Symbols) -> tuple[Prefill, list[tuple[str, Truth]]]:
    """A chunk about to be cut, with stops declared anywhere they could be."""
    grid = s.grid()
    names = ("start", "offered", "prefill_end", "prompt", "last_cacheable", "tail", "junction")
    case = Prefill(
        **{name: s.position(name, grid) for name in names},
        fits=s.truth("block_fits_in_a_chunk"),
        exports=s.truth("backend_can_export"),
        junction_inside=s.truth("junction_may_be_inside_a_block"),
    )
    premises = [
        (
            "the chunk is not empty and the prefill not over",
            all_of(case.start < case.offered, case.start < case.prefill_end),
        ),
        ("the prompt is part of the prefill", case.prompt <= case.prefill_end),
        ("the last cacheable position is a block boundary", case.last_cacheable.on_block()),
    ]
    return case, premises


def _request_case(s: Symbols) -> tuple[Prefill, Position, Truth, Truth, list[tuple[str, Truth]]]:
    """A chunk about to be cut, with the stops that follow from a request of so many tokens, with or without EAGLE."""
    case, premises = _any_case(s)
    whole, eagle, partial = s.position("tokens", case.start.radix), s.truth("eagle"), s.truth("partial_hits")
    last = checkpoint.checkpoint_position(whole, eagle, True)
    tail = checkpoint.checkpoint_position(case.prompt, eagle, False)
    one = whole.radix.one_token()
    premises += [
        ("the prompt is part of the request", all_of(case.prompt >= one, case.prompt <= whole)),
        ("the prefill ends at max(prompt, tokens − 1)", case.prefill_end == later(case.prompt, whole.minus(one))),
        ("the chunk does not run past the request", case.offered <= whole),
        ("the last cacheable position is the last boundary, one block less with EAGLE", case.last_cacheable == last),
        ("the tail is the prompt's last reusable unit", case.tail == choose(partial, tail, case.start.radix.zero())),
        ("no junction", case.junction == case.start.radix.zero()),
        ("no checkpoint exports", negate(case.exports)),
    ]
    return case, whole, eagle, partial, premises


def chunk_end(s: Symbols, split: Split, any_stops: bool = True) -> Obligation:
    """Whatever is offered, the chunk that the split grants may end where it ends."""
    if any_stops:
        case, premises = _any_case(s)
        prefer: tuple[Truth, ...] = (split(case) < case.prefill_end, case.fits)
    else:
        case, whole, eagle, partial, premises = _request_case(s)
        prefer = (
            case.start == whole.radix.zero(),
            case.fits,
            eagle,
            negate(partial),
            all_of(whole.radix.units == 100, whole.radix.unit == 16),
            all_of(is_at(whole, 3000, 1600, 16), is_at(case.prompt, 3000, 1600, 16)),
            is_at(case.offered, 364, 1600, 16),
        )
    end = split(case)
    exported = chunk.exports_inside(case)
    legal = chunk.may_end(case.start, end, case.prefill_end, chunk.declared_stops(case), case.fits, exported)

    def say() -> str:
        return (
            f"block {_block(end.radix)}, prompt {tokens(case.prompt)}, prefill ends at {tokens(case.prefill_end)}, "
            f"last cacheable position {tokens(case.last_cacheable)}: offered up to {tokens(case.offered)}, the chunk "
            f"{_chunk(case.start, end)} {_sees_boundary(case.start, end)}; it is not the last chunk and no stop was "
            "declared there"
            if end < case.prefill_end
            else f"block {_block(end.radix)}: the last chunk {_chunk(case.start, end)} "
            f"{_sees_boundary(case.start, end)} without exporting a checkpoint"
        )

    return Obligation(tuple(premises), implies(case.start < end, legal), say, prefer)


def progress(s: Symbols) -> Obligation:
    """A budget that reaches the next boundary, or the end of the prefill, is never answered with an empty chunk."""
    case, premises = _any_case(s)
    enough = any_of(case.offered >= case.start.next_block(), case.offered >= case.prefill_end, negate(case.fits))
    return Obligation(
        tuple(premises),
        implies(enough, case.start < chunk.split(case)),
        lambda: f"offered {_chunk(case.start, case.offered)}, nothing was granted",
    )


def two_chunks(s: Symbols, split: Split) -> Obligation:
    """Two chunks of a fresh prefill, each with its own budget: any one slot then holds what its key promises."""
    case, whole, eagle, partial, premises = _request_case(s)
    grid = whole.radix
    second_offer = s.position("second_offer", grid)
    column = s.integer("slot", 0)
    first_end = split(case)
    second_end = split(replace(case, start=first_end, offered=second_offer))
    untouched = slots.Slot(True, grid.zero())
    after_one = slots.after_chunk(column, untouched, case.start, first_end, False, grid.zero())
    after_two = slots.after_chunk(column, after_one, first_end, second_end, False, grid.zero())
    premises += [
        ("the prefill starts at 0", case.start == grid.zero()),
        (
            "the first chunk is not empty, and leaves a part of the prefill",
            all_of(case.start < first_end, first_end < case.prefill_end),
        ),
        (
            "the second chunk is offered something, and granted it",
            all_of(first_end < second_offer, second_offer <= whole, first_end < second_end),
        ),
    ]

    def say() -> str:
        promised = tokens(slots.promise(column, grid))
        return (
            f"block {_block(grid)}, prompt {tokens(case.prompt)}{', EAGLE on' if eagle else ''}: chunk "
            f"{_chunk(case.start, first_end)} {_sees_boundary(case.start, first_end)}; the next, "
            f"{_chunk(first_end, second_end)}, {_sees_boundary(first_end, second_end)}. Slot {column} is then keyed as "
            f"the state after {promised} tokens and holds the state after {tokens(after_two.state)}"
        )

    return Obligation(
        tuple(premises),
        slots.keeps_promise(column, after_two, second_end),
        say,
        prefer=(
            case.fits,
            eagle,
            negate(partial),
            all_of(grid.units == 100, grid.unit == 16),
            all_of(is_at(whole, 3000, 1600, 16), is_at(case.prompt, 3000, 1600, 16)),
            is_at(case.offered, 364, 1600, 16),
            is_at(second_offer, 3000, 1600, 16),
        ),
    )


def slot_state(s: Symbols, keeps_to_block: Callable[..., Truth], may_key: Callable[..., Truth]) -> Obligation:
    """One legal chunk more keeps the promise of any one slot; by induction, any number of chunks does."""
    grid = s.grid()
    start, end, prefill_end = (s.position(name, grid) for name in ("start", "end", "prefill_end"))
    exported_at = s.position("checkpoint", grid)
    column, exports, aligned = s.integer("slot", 0), s.truth("exports"), s.truth("checkpoint_on_kernel_alignment")
    before = slots.Slot(s.truth("slot_is_null"), s.position("slot_state", grid))
    after = slots.after_chunk(column, before, start, end, exports, exported_at)
    keyable = may_key(column, start, end, exports, exported_at)
    promised = slots.promise(column, grid)
    premises = (
        ("the chunk is not empty", start < end),
        (
            "the slot was right before",
            all_of(slots.keeps_promise(column, before, start), slots.carries_state(column, before, start)),
        ),
        ("the chunk keeps to its block or exports", keeps_to_block(start, end, prefill_end, exports)),
        (
            "an exporting chunk is the last one, and its checkpoint is valid",
            implies(exports, all_of(end >= prefill_end, checkpoint.export_valid(start, end, exported_at, aligned))),
        ),
    )

    def say() -> str:
        export = f", exporting the state at {tokens(exported_at)}" if exports else ""
        return (
            f"block {_block(grid)}: the chunk {_chunk(start, end)}{export} {_sees_boundary(start, end)}; slot {column} "
            f"may be keyed as the state after {tokens(promised)} tokens and holds the state after {tokens(after.state)}"
        )

    return Obligation(
        premises,
        all_of(
            implies(keyable, slots.keeps_promise(column, after, end)),
            slots.carries_state(column, after, end),
        ),
        say,
        prefer=(all_of(grid.units == 4, grid.unit == 8), start.block <= 2, end.block <= 4, exported_at.block <= 4),
    )


def checkpoint_best(s: Symbols, position: Callable[..., Position]) -> Obligation:
    """The checkpoint is exactly where a lookup of the same tokens can land: never later, never a grain too early."""
    grid = s.grid()
    end, drop, by_block = s.position("end", grid), s.truth("eagle"), s.truth("whole_blocks_only")
    found = position(end, drop, by_block)
    one, grain = grid.one_token(), choose(by_block, grid.boundary(1), grid.one_unit())
    # A hit lands on a grain; with EAGLE one more grain must match, and is dropped; a token must be left to compute.
    matched = choose(drop, found.plus(grain), found)
    next_matched = matched.plus(grain)
    proven = choose(drop, end, end.minus(one))
    return Obligation(
        premises=(("there is a token", end >= one),),
        goal=all_of(
            found.on_unit(),
            implies(by_block, found.on_block()),
            found < end,
            any_of(found == grid.zero(), matched <= proven),
            next_matched > proven,
        ),
        say=lambda: (
            f"unit {grid.unit}, block {_block(grid)}, {tokens(end)} tokens{', EAGLE on' if drop else ''}: the "
            f"checkpoint is put at {tokens(found)}, but a lookup could reuse {tokens(found.plus(grain))}"
        ),
        prefer=(negate(by_block), all_of(grid.units == 4, grid.unit == 8), end.block == 1),
    )


def _chunk_claim(split: Callable[[], Split], name: str = "", statement: str = "", **options: Any) -> Claim:
    return Claim(
        "SLOT.chunk-end" + (f"/{name}" if name else ""),
        statement
        or "an intermediate chunk ends on a block boundary or a declared stop, and none that starts inside a block "
        "runs past its end, except a last chunk that exports a checkpoint",
        SCOPE,
        lambda s: chunk_end(s, split(), **options),
        mutant_of="SLOT.chunk-end" if name else "",
    )


CLAIMS = (
    _chunk_claim(lambda: chunk.split),
    _chunk_claim(
        lambda: mutants.split_before_51113,
        "before-51113",
        "the split of 0.26.0: aligned ends are enforced below the last cacheable position only",
        any_stops=False,
    ),
    _chunk_claim(
        lambda: mutants.split_of_45477,
        "as-in-45477",
        "the split of an earlier attempt: realignment only for chunks that start below the last cacheable position",
        any_stops=False,
    ),
    _chunk_claim(
        lambda: mutants.split_export_despite_junction,
        "export-despite-junction",
        "the split with an export exemption that outlives a cut at a junction",
    ),
    Claim(
        "SLOT.chunk-progress",
        "a budget that reaches the next block boundary or the end of the prefill is never answered with an empty chunk",
        SCOPE,
        progress,
    ),
    Claim(
        "SLOT.two-chunks",
        "after two chunks of a fresh prefill, every complete slot holds the state that its full key promises",
        SCOPE,
        lambda s: two_chunks(s, chunk.split),
    ),
    Claim(
        "SLOT.two-chunks/before-51113",
        "the split of 0.26.0, two prefill chunks with budgets of their own",
        SCOPE,
        lambda s: two_chunks(s, mutants.split_before_51113),
        mutant_of="SLOT.two-chunks",
    ),
    Claim(
        "SLOT.slot-state",
        "one more chunk that keeps to its block leaves every keyable slot with the state its key promises (the "
        "induction step)",
        "proved for all block sizes, units, prompts, budgets, slots and numbers of chunks",
        lambda s: slot_state(s, chunk.keeps_to_block, slots.may_key),
    ),
    Claim(
        "SLOT.slot-state/crossing-allowed",
        "chunks may cross the end of the block they start in",
        SCOPE,
        lambda s: slot_state(s, mutants.keeps_to_block_never, slots.may_key),
        mutant_of="SLOT.slot-state",
    ),
    Claim(
        "SLOT.slot-state/left-behind-keyed",
        "the column that an exporting chunk leaves at its mid-block start may be keyed as complete",
        SCOPE,
        lambda s: slot_state(s, chunk.keeps_to_block, mutants.may_key_left_behind),
        mutant_of="SLOT.slot-state",
    ),
    Claim(
        "SLOT.checkpoint-position",
        "a prefill's checkpoint is at the last position that a lookup of the same tokens can resume from",
        "proved for all block sizes, units and prompts",
        lambda s: checkpoint_best(s, checkpoint.checkpoint_position),
    ),
    Claim(
        "SLOT.checkpoint-position/before-57180",
        "the checkpoint of 0.31.0: a token is left out before EAGLE's drop, too",
        "proved for all block sizes, units and prompts",
        lambda s: checkpoint_best(s, mutants.checkpoint_before_57180),
        mutant_of="SLOT.checkpoint-position",
    ),
)
