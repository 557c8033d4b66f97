"""Claims about attention groups' estimates, about cutting a lookup's result, and about checkpoint positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvproof.models.smt.claim import tokens
from kvproof.models.smt.shipped.claim import Inputs, Question, ShippedClaim
from kvproof.spec.logic import Truth, all_of, any_of, implies, ite, negate, same
from kvproof.spec.radix import Position
from kvproof.spec.rules import blocks, checkpoint, hits
from kvproof.spec.rules.blocks import AttentionStep

ESTIMATE = "SingleTypeKVCacheManager.get_num_blocks_to_allocate"


class _Attention:
    """One step of a full-attention or window group, in blocks of its own."""

    def __init__(self, s: Inputs, window: bool) -> None:
        self.s = s
        grid = self.grid = s.blocks_only()
        names = ("local", "computed", "end", "slots_end")
        self.local, self.computed, self.end, self.slots_end = (s.position(name, grid) for name in names)
        self.window: Position | None = s.position("window", grid) if window else None
        self.held, self.evictable = s.integer("held", 0), s.integer("evictable_hits", 0)
        self.first: Truth = s.truth("first_allocation")
        self.found: Truth = s.truth("lookup_found_something")
        self.hits = ite(all_of(self.first, self.found), self.local.blocks_up(), 0)
        skipped = blocks.window_skipped(self.computed, self.window).block if self.window is not None else 0
        self.step = AttentionStep(
            needed=self.slots_end.blocks_up(),
            computed=self.computed.blocks_up(),
            held=self.held,
            hits=self.hits,
            skipped=skipped,
            first=self.first,
            partial=all_of(self.first, self.hits > 0, negate(self.local.on_block())),
        )

    def premises(self) -> tuple[tuple[str, Truth], ...]:
        zero = self.grid.zero()
        told = [
            ("the local hit is part of what is computed", self.local <= self.computed),
            ("the step computes tokens, and has slots for them", all_of(self.computed < self.end, True)),
            ("slots for lookahead come after the step's own", self.end <= self.slots_end),
            ("a step that a scheduler can ask for", blocks.attention_step_possible(self.step)),
            ("nothing is found without a local hit", implies(self.found, self.local > zero)),
            ("a local hit is found in this group", implies(negate(self.found), self.local == zero)),
            (
                "what comes from outside starts on a block boundary",
                any_of(self.local == self.computed, self.local.on_block()),
            ),
        ]
        if self.window is not None:
            told.append(("the window holds a token", self.window > zero))
        return tuple(told)

    def estimate(self, release: Any) -> Any:
        s, grid = self.s, self.grid
        block = s.block(grid)
        if self.window is None:
            manager = release.full(block=block, unit=block)
        else:
            manager = release.window(block=block, unit=block, window=s.tokens(self.window))
        manager.req_to_blocks["r"] = release.blocks(manager, s.table(self.held, lambda at: False))
        manager.num_cached_block = s.members(negate(self.first), "r")
        hits = release.blocks(manager, s.table(self.hits, lambda at: False))
        manager._get_num_evictable_blocks = lambda blocks: s.count(self.evictable)
        return release.estimate(
            manager,
            end=s.tokens(self.end),
            end_with_lookahead=s.tokens(self.slots_end),
            hits=hits,
            computed=s.tokens(self.computed),
            local=s.tokens(self.local),
        )

    def charged(self, answer: Any) -> Any:
        """New blocks alone. A request that has allocated before is not asked about hits."""
        return self.s.number_of(answer.total) - ite(self.first, self.evictable, 0)

    def say(self, answer: Any) -> str:
        window = f", window {tokens(self.window)}" if self.window is not None else ""
        due = "first allocation" if self.first else f"a table of {self.held} slots"
        words = (
            f"block {int(self.grid.unit)}{window}, {due}, local hit {tokens(self.local)}, computed "
            f"{tokens(self.computed)}, slots up to {tokens(self.slots_end)}"
        )
        if answer is None:
            return words
        taken = blocks.attention_taken(self.step)
        return f"{words}: charged {self.charged(answer)} new blocks, the table takes {taken}"


def attention_exact(window: bool) -> Callable[[Inputs, Any], Question]:
    """What an attention group charges is what its table takes."""

    def ask(s: Inputs, release: Any) -> Question:
        case = _Attention(s, window)
        return Question(
            case.premises(),
            lambda: case.estimate(release),
            lambda answer: case.charged(answer) == blocks.attention_taken(case.step),
            case.say,
            (case.end.block <= 6, case.grid.unit == 16),
        )

    return ask


def position_exact(partial: bool) -> Callable[[Inputs, Any], Question]:
    """The checkpoint position is the last one that a lookup of these tokens can resume from."""

    def ask(s: Inputs, release: Any) -> Question:
        grid = s.grid() if partial else s.blocks_only()
        end = s.position("tokens", grid)
        # Up to 0.31 EAGLE's drop was taken from the length − 1: one grain lower at exact multiples.
        drop: Truth = s.truth("eagle") if release.version >= (0, 32) else False
        look = s.position("hash_lookahead", grid) if release.has_lookahead_hashes else None
        right = checkpoint.checkpoint_position(end, drop, not partial, look)
        premises = [("there is a token", end > grid.zero())]
        if release.version < (0, 32):
            premises.append(("EAGLE off: its drop had another rule up to 0.31", True))
        return Question(
            tuple(premises),
            lambda: release.checkpoint_position(
                s.tokens(end),
                s.unit(grid) if partial else s.block(grid),
                s.flag(drop),
                0 if look is None else s.tokens(look),
            ),
            lambda answer: s.position_of(answer, grid) == right,
            lambda answer: (
                f"unit {int(grid.unit)}, {tokens(end)} tokens{', EAGLE on' if drop else ''}"
                f"{'' if look is None else f', lookahead {tokens(look)}'}: "
                f"{answer} where the last position to resume from is {tokens(right)}"
            ),
            (end.block <= 4,),
        )

    return ask


def position_reusable(s: Inputs, release: Any) -> Question:
    """With EAGLE or without: a lookup of these tokens can resume from the checkpoint position, on a unit boundary."""
    grid = s.grid()
    end, drop = s.position("tokens", grid), s.truth("eagle")
    last = checkpoint.checkpoint_position(end, drop, False)

    def goal(answer: Any) -> Truth:
        at = s.position_of(answer, grid)
        return all_of(at <= last, at.on_unit(), grid.zero() <= at)

    return Question(
        (("there is a token", end > grid.zero()),),
        lambda: release.checkpoint_position(s.tokens(end), s.unit(grid), s.flag(drop)),
        goal,
        lambda answer: f"unit {int(grid.unit)}, {tokens(end)} tokens{', EAGLE on' if drop else ''}: {answer}",
        (end.block <= 4,),
    )


def valid_exact(s: Inputs, release: Any) -> Question:
    """Whether a chunk can export a checkpoint, as the specification says."""
    grid = s.grid()
    start, end, at = (s.position(name, grid) for name in ("start", "end", "checkpoint"))
    aligned = s.aligned("kernel_alignment", at.minus(start))
    right = checkpoint.export_valid(start, end, at, aligned)

    def goal(answer: Any) -> Truth:
        return same(bool(answer) if type(answer) is bool else answer.term, right)

    return Question(
        (("the chunk is not empty", start < end), ("the alignment is positive", True)),
        lambda: release.checkpoint_valid(
            s.tokens(start), s.tokens(end), s.tokens(at), s.unit(grid), s.block(grid), s.alignment("kernel_alignment")
        ),
        goal,
        lambda answer: (
            f"block {int(grid.units * grid.unit)}, unit {int(grid.unit)}, chunk [{tokens(start)}, {tokens(end)}), "
            f"checkpoint {tokens(at)}: {answer} where the specification says {bool(right)}"
        ),
        (end.block <= 4, at.block <= 4),
    )


KINDS = ("full", "window", "mamba")


def cut(s: Inputs, release: Any) -> Question:
    """A lookup's result is cut where it may be, to what it may leave, and refused elsewhere."""
    grid = s.blocks_only()
    endpoint = s.position("endpoint", grid)
    held = {kind: s.integer(f"{kind}_blocks", 0) for kind in KINDS}
    may = all_of(*(hits.may_cut(endpoint.block, held[kind], kind == "mamba", True) for kind in KINDS))

    def run() -> tuple[dict[str, int], bool]:
        found = {kind: int(s.count(held[kind])) for kind in KINDS}
        return release.cut(s.block(grid), found, s.tokens(endpoint))  # type: ignore[no-any-return]

    def goal(answer: tuple[dict[str, int], bool]) -> Truth:
        left, pure = answer
        right = (hits.cut_right(endpoint.block, held[k], left[k], k == "mamba", True) for k in KINDS)
        return all_of(may, pure, *right)

    return Question(
        (
            ("the endpoint is a block boundary", endpoint.on_block()),
            (
                "at most 3 blocks in each group and at the endpoint",
                all_of(*(n <= 3 for n in (endpoint.block, *held.values()))),
            ),
            ("one full-attention, one window and one recurrent group, all of which cache prefixes", True),
        ),
        run,
        goal,
        lambda answer: (
            f"block {int(grid.unit)}, endpoint {tokens(endpoint)}, blocks found {held}"
            f"{'' if answer is None else f': left {answer[0]}'}"
        ),
        (grid.unit == 16, endpoint.block == 2, held["full"] == 3, held["window"] == 3),
        refusal_allowed=negate(may),
    )


def _exports(release: Any) -> str:
    return "" if release.has_checkpoints else "this release exports no checkpoints by a rule of its own"


CLAIMS = (
    ShippedClaim(
        "ATTENTION.estimate-exact/full",
        f"{ESTIMATE} (full attention)",
        "what is charged is what the table's layout takes, external tokens and partial hits included",
        "proved for all block sizes, prompts, hits and tables",
        attention_exact(False),
        "ADMIT.exact",
    ),
    ShippedClaim(
        "ATTENTION.estimate-exact/window",
        f"{ESTIMATE} (sliding window)",
        "what is charged is what the table's layout takes, external tokens and partial hits included",
        "proved for all block sizes, windows, prompts, hits and tables",
        attention_exact(True),
        "ADMIT.exact",
    ),
    ShippedClaim(
        "HIT.cut",
        "KVCacheManager.truncate_computed_blocks",
        "a lookup's result is cut to its endpoint wherever only recurrent groups are short, and nothing else changes",
        "bounded: at most 3 blocks in each group; every block size",
        cut,
        "HIT.only-recurrent-short",
        (("HIT.only-recurrent-short", "recurrent-short-refused"),),
        lambda release: "" if release.truncates else "this release does not cut lookups",
        most_values=4,
    ),
    *(
        ShippedClaim(
            f"CHECKPOINT.position/{name}",
            "get_mamba_prefill_checkpoint_position",
            f"it is the last {name} boundary that a lookup of these tokens can resume from",
            "proved for all grains and lengths",
            position_exact(partial),
            absent=_exports,
        )
        for name, partial in (("block", False), ("unit", True))
    ),
    ShippedClaim(
        "CHECKPOINT.position-reusable",
        "get_mamba_prefill_checkpoint_position",
        "a lookup can resume from it, with EAGLE, too",
        "proved for all grains and lengths",
        position_reusable,
        absent=_exports,
    ),
    ShippedClaim(
        "CHECKPOINT.valid",
        "is_mamba_prefill_checkpoint_valid",
        "a chunk can export a checkpoint exactly where the specification says so",
        "proved for all block sizes, units, chunks and alignments",
        valid_exact,
        absent=_exports,
    ),
)

__all__ = ["CLAIMS"]
