"""HIT: how a lookup result is cut, and that a resume boundary has its state."""

from __future__ import annotations

from collections.abc import Callable

from kvproof.models.smt import mutants
from kvproof.models.smt.claim import Claim, Obligation, Symbols
from kvproof.spec.logic import Truth, all_of, any_of, implies, ite, minimum, negate
from kvproof.spec.radix import Position
from kvproof.spec.rules import hits

SCOPE = "proved for all block sizes, units, hits and offers, for one arbitrary group"


def cut_total(s: Symbols, may_cut: Callable[..., Truth]) -> Obligation:
    """A result whose attention groups cover the local hit can always be cut to its block-aligned part."""
    grid = s.grid()
    hit = s.position("hit", grid)
    held, recurrent, cacheable = s.integer("held", 0), s.truth("recurrent"), s.truth("prefix_cacheable")
    endpoint = hit.block
    after = hits.cut_length(endpoint, held, recurrent, cacheable)
    tail: Position = hit.minus(hit.floor_block())
    return Obligation(
        premises=(
            ("the hit ends inside a block, so there is a tail to cut", negate(hit.on_block())),
            (
                "groups that are not recurrent cover the hit",
                any_of(recurrent, negate(cacheable), held >= hit.blocks_up()),
            ),
            ("groups that cache nothing are empty", any_of(cacheable, held == 0)),
        ),
        goal=all_of(
            may_cut(endpoint, held, recurrent, cacheable),
            hits.cut_right(endpoint, held, after, recurrent, cacheable),
        ),
        say=lambda: (
            f"block {int(grid.units * grid.unit)}, unit {grid.unit}: the local hit is {int(hit.value())} tokens, of "
            f"which {int(tail.value())} are a tail inside the last block; the store offers more, so the hit is cut to "
            f"{endpoint} blocks; the {'recurrent' if recurrent else 'attention' if cacheable else 'scratch'} group has "
            f"{held} and the cut is refused"
        ),
        prefer=(
            cacheable,
            all_of(grid.units == 12, grid.unit == 128),
            hit == Position(2, 1, 0, grid),
            held == 1,
        ),
    )


def resume_state(s: Symbols, resume: Callable[..., hits.Resume]) -> Obligation:
    """Wherever a request resumes, its recurrent state is there: at the local boundary, or brought by a load."""
    hit, tail, offered = s.integer("hit", 0), s.integer("tail", 0), s.integer("offered", 0)
    recurrent_depth, agreed, diverged = s.integer("recurrent_depth", 0), s.integer("agreed", 0), s.truth("diverged")
    resumed = resume(hit, tail, agreed, diverged, offered)
    return Obligation(
        premises=(
            ("the tail is part of the hit", tail <= hit),
            (
                "a hit is diverged exactly if the recurrent group is less deep",
                ite(diverged, recurrent_depth < hit, recurrent_depth == hit),
            ),
            ("the agreed boundary is no deeper than any group", agreed <= minimum(recurrent_depth, hit)),
        ),
        goal=hits.resume_has_state(resumed, recurrent_depth, agreed),
        say=lambda: (
            f"attention is {hit} tokens deep, the recurrent group {recurrent_depth}, agreed boundary {agreed}; the "
            f"store offers {offered}: the request resumes at {resumed.boundary}, where there is no recurrent state"
        ),
        prefer=(tail == 0, offered == 0, hit == 64, recurrent_depth == 16, agreed == 16),
    )


def leaves_a_token(s: Symbols, limit_after_drop: bool = True) -> Obligation:
    """A hit leaves a token to compute, with or without EAGLE's drop, though with the drop the scan may match
    everything.
    """
    count, matched, unit = s.integer("tokens", 1), s.integer("matched", 0), s.integer("unit", 1)
    drop = s.truth("eagle")
    hit = hits.after_drop(matched, unit, drop)
    scan = ite(drop, count, hits.hit_limit(count)) if limit_after_drop else count
    return Obligation(
        premises=(("the scan matches at most its limit", matched <= scan),),
        goal=all_of(hit >= 0, hit <= hits.hit_limit(count), implies(drop, hit <= matched)),
        say=lambda: f"{count} tokens, {matched} matched: the hit is {hit} and leaves nothing to compute",
        prefer=(count == 32, matched == 32, unit == 16),
    )


CLAIMS = (
    Claim(
        "HIT.cut-is-total",
        "a lookup result whose non-recurrent groups cover the hit can be cut to its block-aligned part, and the cut "
        "keeps exactly a prefix",
        SCOPE,
        lambda s: cut_total(s, hits.may_cut),
    ),
    Claim(
        "HIT.cut-is-total/before-51468",
        "the cut of 0.27.0: every group must cover the endpoint",
        SCOPE,
        lambda s: cut_total(s, mutants.may_cut_before_51468),
        mutant_of="HIT.cut-is-total",
    ),
    Claim(
        "HIT.resume-has-state",
        "a request resumes only where its recurrent state is: in the cache, or brought by the load",
        "proved for all hits, tails, depths and offers of a store that brings what it claims",
        lambda s: resume_state(s, hits.resume),
    ),
    Claim(
        "HIT.resume-has-state/no-fallback",
        "the attention-deep hit is accepted although the store brings nothing",
        "proved for all hits, tails, depths and offers of a store that brings what it claims",
        lambda s: resume_state(s, mutants.resume_without_fallback),
        mutant_of="HIT.resume-has-state",
    ),
    Claim(
        "HIT.leaves-a-token",
        "a hit is at most tokens − 1, also where EAGLE's scan may match every token before it drops a unit",
        "proved for all prompts and units",
        leaves_a_token,
    ),
    Claim(
        "HIT.leaves-a-token/no-limit",
        "a scan without a drop may match every token",
        "proved for all prompts and units",
        lambda s: leaves_a_token(s, limit_after_drop=False),
        mutant_of="HIT.leaves-a-token",
    ),
)
