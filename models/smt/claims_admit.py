"""ADMIT: what a step is charged is what it takes, bounded, and unchanged by dry runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvproof.models.smt import mutants
from kvproof.models.smt.claim import Claim, Obligation, Symbols, is_at, tokens
from kvproof.spec.logic import Int, Truth, all_of, ite, negate
from kvproof.spec.radix import Position, Radix
from kvproof.spec.rules import blocks
from kvproof.spec.rules.blocks import AttentionStep, MambaStep

SCOPE = "proved for all block sizes, units, prompts, tables and numbers of speculative blocks"


def _mamba(s: Symbols) -> tuple[MambaStep, Radix, Position, Position, list[tuple[str, Truth]], tuple[Truth, ...]]:
    """A step of a recurrent group, from ``computed`` to ``end`` tokens, with wishes for familiar numbers."""
    grid = s.grid()
    computed, end = s.position("computed", grid), s.position("end", grid)
    step = MambaStep(
        needed=end.blocks_up(),
        computed=computed.blocks_up(),
        held=s.integer("held", 0),
        hits=s.integer("hit_slots", 0),
        speculative=s.integer("speculative", 0),
        first=s.truth("first_allocation"),
        partial=s.truth("partial_tail"),
        checkpoint=s.truth("checkpoint_due"),
    )
    premises = [
        ("the step adds tokens, or only adopts computed ones", all_of(computed <= end, end > grid.zero())),
        ("a step that a scheduler can ask for", blocks.mamba_step_possible(step)),
    ]
    prefer = (
        negate(step.partial),
        all_of(grid.units == 12, grid.unit == 128),
        step.speculative == 1,
        is_at(end, 704547, 1536, 128),
        is_at(computed, 23040, 1536, 128),
        step.held == ite(step.first, 0, 23040 // 1536 + 1),
        step.hits == ite(step.first, step.computed, 0),
    )
    return step, grid, computed, end, premises, prefer


def _step_words(step: MambaStep, grid: Radix, computed: Position, end: Position) -> str:
    due = ", ".join(
        word
        for word, holds in (
            ("first allocation", step.first),
            ("a checkpoint due", step.checkpoint),
            ("a partial tail to copy", step.partial),
        )
        if holds
    )
    return (
        f"block {int(grid.units * grid.unit)}, K {step.speculative}, from {tokens(computed)} to {tokens(end)} tokens, "
        f"table of {step.held} slots, hit of {step.hits} slots{', ' + due if due else ''}"
    )


def mamba_exact(s: Symbols, estimate: Callable[[MambaStep], Int]) -> Obligation:
    """The estimate is what the table's layout takes."""
    step, grid, computed, end, premises, prefer = _mamba(s)
    charged, taken = estimate(step), blocks.mamba_taken(step)
    return Obligation(
        tuple(premises),
        charged == taken,
        lambda: f"{_step_words(step, grid, computed, end)}: charged {charged} new blocks, taken {taken}",
        prefer,
    )


def mamba_bounded(s: Symbols, estimate: Callable[[MambaStep], Int]) -> Obligation:
    """Whatever the prompt, the new part is at most 1 + partial + checkpoint + K on the first allocation (+ external
    state).
    """
    step, grid, computed, end, premises, prefer = _mamba(s)
    charged, bound = estimate(step), blocks.mamba_cap(step)
    return Obligation(
        tuple(premises),
        all_of(charged >= 0, charged <= bound),
        lambda: f"{_step_words(step, grid, computed, end)}: charged {charged} new blocks where {bound} are the most",
        prefer,
    )


def dry_run_pure(s: Symbols, record: Callable[[Truth, Truth, Truth], Truth]) -> Obligation:
    """A real question, then a dry one about other tokens: the allocation still takes what the real one was told."""
    step, grid, computed, end, premises, prefer = _mamba(s)
    due_in_dry_run, before = s.truth("checkpoint_due_in_dry_run"), s.truth("checkpoint_noted_before")
    noted = record(record(before, False, step.checkpoint), True, due_in_dry_run)
    taken = blocks.mamba_taken(replace(step, checkpoint=noted))
    charged = blocks.mamba_estimate(step)
    return Obligation(
        tuple(premises),
        charged == taken,
        lambda: (
            f"{_step_words(step, grid, computed, end)}: charged {charged} new blocks; a dry run about the whole "
            f"sequence then {'noted' if due_in_dry_run else 'cleared'} a checkpoint, and {taken} were taken"
        ),
        prefer,
    )


def attention_exact(s: Symbols, estimate: Callable[[AttentionStep, Int], Int]) -> Obligation:
    """The estimate of a full-attention or window group is what the table's layout takes."""
    step = AttentionStep(
        needed=s.integer("needed", 0),
        computed=s.integer("computed", 0),
        held=s.integer("held", 0),
        hits=s.integer("hit_blocks", 0),
        skipped=s.integer("skipped", 0),
        first=s.truth("first_allocation"),
        partial=s.truth("partial_tail"),
    )
    cap = s.integer("cap", 1)
    charged, taken = estimate(step, cap), blocks.attention_taken(step)
    return Obligation(
        premises=(("a step that a scheduler can ask for", blocks.attention_step_possible(step)),),
        goal=charged == taken,
        say=lambda: (
            f"the step needs {step.needed} blocks, the table has {step.held}, the hit brings {step.hits}"
            f"{', its last one in part' if step.partial else ''}, {step.skipped} lie below the window (cap {cap}): "
            f"charged {charged} new blocks, taken {taken}"
        ),
        prefer=(step.held == 0, step.hits <= 1, step.needed == 20, cap == 5),
    )


def window_peak(s: Symbols, cap_rule: Callable[..., Int], inside: bool = True) -> Obligation:
    """What a window group ever holds for a request is at most what the whole-sequence gate charged for it."""
    grid = s.blocks_only()
    names = ("computed", "end", "whole", "window", "in_flight", "model_length")
    computed, end, whole, window, in_flight, model_length = (s.position(name, grid) for name in names)
    one = grid.one_token()
    held = blocks.window_held(computed, end, window)
    charged = blocks.window_gate(whole, cap_rule(window, in_flight, model_length))
    premises = [
        ("the window holds a token, and so does the step", all_of(window >= one, end >= one)),
        ("unsettled tokens are within the limit", all_of(computed <= end, end <= computed.plus(in_flight))),
        ("no slot beyond the model's length", all_of(end <= model_length, whole >= one, whole <= model_length)),
    ]
    if inside:
        premises.append(("no slot beyond the sequence that was charged", end <= whole))
    return Obligation(
        tuple(premises),
        held <= charged,
        lambda: (
            f"block {grid.unit}, window {tokens(window)}, at most {tokens(in_flight)} tokens in flight, model length "
            f"{tokens(model_length)}: with {tokens(computed)} tokens settled and slots up to {tokens(end)} the request "
            f"holds {held} blocks; the gate charged {charged} for its {tokens(whole)} tokens"
        ),
        prefer=(
            grid.unit == 4,
            model_length == Position(10, 0, 0, grid),
            window == Position(1, 0, 0, grid),
            whole == Position(2, 0, 0, grid),
        ),
    )


def _exact_claim(estimate: Callable[[], Callable[[MambaStep], Int]], name: str = "", statement: str = "") -> Claim:
    return Claim(
        "ADMIT.mamba-exact" + (f"/{name}" if name else ""),
        statement or "a recurrent group's estimate equals the blocks that its allocation takes at the same arguments",
        SCOPE,
        lambda s: mamba_exact(s, estimate()),
        mutant_of="ADMIT.mamba-exact" if name else "",
    )


CLAIMS = (
    _exact_claim(lambda: blocks.mamba_estimate),
    _exact_claim(
        lambda: mutants.mamba_estimate_before_57050,
        "before-57050",
        "the estimate of 0.30.0: the constant is not applied where a request that holds blocks needs a checkpoint",
    ),
    _exact_claim(
        lambda: mutants.mamba_estimate_without_external,
        "external-state-not-charged",
        "an estimate without the block for a state that an external load brings",
    ),
    Claim(
        "ADMIT.mamba-bounded",
        "a recurrent group's new blocks are at most 1 + partial + checkpoint + K on the first allocation, + 1 for an "
        "external state, whatever the prompt",
        SCOPE,
        lambda s: mamba_bounded(s, blocks.mamba_estimate),
    ),
    Claim(
        "ADMIT.mamba-bounded/before-57050",
        "the estimate of 0.30.0 is bounded whatever the prompt",
        SCOPE,
        lambda s: mamba_bounded(s, mutants.mamba_estimate_before_57050),
        mutant_of="ADMIT.mamba-bounded",
    ),
    Claim(
        "ADMIT.dry-run-pure",
        "a dry run between a real estimate and its allocation changes nothing of what is taken",
        SCOPE,
        lambda s: dry_run_pure(s, blocks.recorded_checkpoint),
    ),
    Claim(
        "ADMIT.dry-run-pure/dry-run-records",
        "a dry run notes whether a checkpoint is due",
        SCOPE,
        lambda s: dry_run_pure(s, mutants.dry_run_records),
        mutant_of="ADMIT.dry-run-pure",
    ),
    Claim(
        "ADMIT.attention-exact",
        "a full-attention or window group's estimate equals the blocks that its allocation takes at the same arguments",
        "proved for all tables, hits, windows and prompts",
        lambda s: attention_exact(s, lambda step, cap: blocks.attention_estimate(step)),
    ),
    Claim(
        "ADMIT.attention-exact/before-41282",
        "the whole-sequence gate's cap is applied to a single step",
        "proved for all tables, hits, windows and prompts",
        lambda s: attention_exact(s, mutants.attention_estimate_before_41282),
        mutant_of="ADMIT.attention-exact",
    ),
    Claim(
        "ADMIT.attention-exact/copy-not-charged",
        "the copy of a partial tail is not charged",
        "proved for all tables, hits, windows and prompts",
        lambda s: attention_exact(s, mutants.attention_estimate_without_copy),
        mutant_of="ADMIT.attention-exact",
    ),
    Claim(
        "ADMIT.window-peak",
        "while a request stays within the sequence that the gate charged, its window group never holds more than that",
        "proved for all block sizes, windows, in-flight limits, model lengths and prompts",
        lambda s: window_peak(s, blocks.window_cap),
    ),
    Claim(
        "ADMIT.window-peak/window-on-boundary",
        "the window is taken to start on a block boundary",
        "proved for all block sizes, windows, in-flight limits, model lengths and prompts",
        lambda s: window_peak(s, mutants.window_cap_aligned),
        mutant_of="ADMIT.window-peak",
    ),
    Claim(
        "ADMIT.window-peak/beyond-the-sequence",
        "slots beyond the sequence that was charged (lookahead, output) are covered as well",
        "proved for all block sizes, windows, in-flight limits, model lengths and prompts",
        lambda s: window_peak(s, blocks.window_cap, inside=False),
        mutant_of="ADMIT.window-peak",
    ),
)
