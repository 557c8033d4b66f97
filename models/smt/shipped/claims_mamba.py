"""Claims about ``MambaManager``: what a step is charged, and what it takes (PR 57050)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvproof.models.smt.claim import is_at, tokens
from kvproof.models.smt.shipped.claim import Inputs, Question, ShippedClaim
from kvproof.spec.config import Config, Group
from kvproof.spec.logic import Truth, all_of, count, implies, ite, negate
from kvproof.spec.radix import Position
from kvproof.spec.rules import blocks
from kvproof.spec.rules.blocks import MambaStep
from kvproof.spec.scenario import Action, Scenario

ESTIMATE = "MambaManager.get_num_blocks_to_allocate"
ALLOCATE = "MambaManager.allocate_new_blocks"
ALL = "proved for all block sizes, units, prompts, tables and numbers of speculative blocks"
SMALL = "tables of up to {slots} slots, up to {drafts} speculative blocks, up to {columns} columns; every block size"


@dataclass(frozen=True)
class Step:
    """What a claim leaves on: a partial tail to copy, prefill checkpoints. ``slots``: the longest table, with at most
    ``drafts`` speculative blocks and one column more than slots; 0: any, which an allocation can't be run on."""

    partial: bool = False
    checkpoint: bool = False
    slots: int = 0
    drafts: int = 0

    def small(self) -> str:
        return SMALL.format(slots=self.slots, drafts=self.drafts, columns=self.slots + 1)


class _Case:
    """One step of one request: from ``computed`` to ``end`` tokens."""

    def __init__(self, s: Inputs, kind: Step) -> None:
        self.s, self.kind = s, kind
        grid = self.grid = s.grid() if kind.partial or kind.checkpoint else s.blocks_only()
        self.computed, self.end = s.position("computed", grid), s.position("end", grid)
        self.prefill_end = s.position("prefill_end", grid)
        self.held, self.speculative = s.integer("held", 0), s.integer("speculative", 0)
        self.evictable = s.integer("evictable_hits", 0)
        self.first: Truth = s.truth("first_allocation")
        self.eagle: Truth = s.truth("eagle") if kind.checkpoint else False
        self.tail: Truth = s.truth("own_tail_to_copy") if kind.partial else False
        self.hits = ite(self.first, self.computed.blocks_up(), 0)
        self.partial: Truth = ite(self.first, negate(self.computed.on_block()), self.tail) if kind.partial else False

    def step(self, checkpoint: bool) -> MambaStep:
        """The step as the rules count it. ``checkpoint`` is what the release itself decided."""
        return MambaStep(
            needed=self.end.blocks_up(),
            computed=self.computed.blocks_up(),
            held=self.held,
            hits=self.hits,
            speculative=self.speculative,
            first=self.first,
            partial=self.partial,
            checkpoint=checkpoint,
        )

    def premises(self) -> tuple[tuple[str, Truth], ...]:
        later = negate(self.first)
        told: list[tuple[str, Truth]] = [
            ("the step computes tokens", self.computed < self.end),
            ("a first allocation has no table yet", implies(self.first, self.held == 0)),
            (
                "a later one has its running and speculative slots, the running one at the computed position or after",
                implies(
                    later,
                    all_of(
                        self.computed > self.grid.zero(),
                        self.held >= 1 + self.speculative,
                        self.held - self.speculative >= self.computed.blocks_up(),
                    ),
                ),
            ),
            (
                "no fewer columns than the table has already (charges below 0 are a claim of their own)",
                implies(later, self.end.blocks_up() + self.speculative >= self.held),
            ),
            ("nothing comes from outside: the local hit reaches the computed position", True),
            ("align mode", True),
            (
                "the hit was not made in this very step (such a request waits: it is charged more than the pool has)",
                True,
            ),
        ]
        if self.kind.checkpoint:
            told.append(
                (
                    "with checkpoints, the running slot is the one of the computed position",
                    implies(later, self.held == self.computed.blocks_up() + self.speculative),
                )
            )
        else:
            told.append(("no prefill checkpoints", True))
        if self.kind.partial:
            told.append(("a first allocation copies no tail of its own", implies(self.first, negate(self.tail))))
        else:
            told.append(("no partial tail", implies(self.first, self.computed.on_block())))
        if self.kind.slots:
            told.append(
                (
                    f"{self.kind.small()}; the tail to copy is in the running slot",
                    all_of(
                        self.held <= self.kind.slots,
                        self.speculative <= self.kind.drafts,
                        self.end.blocks_up() <= self.kind.slots + 1,
                    ),
                )
            )
        return tuple(told)

    # -- the release's side -------------------------------------------------------------------------------------------

    def manager(self, release: Any) -> Any:
        s, grid = self.s, self.grid
        return release.mamba(
            block=s.block(grid),
            unit=self._unit(),
            grain=self._unit() if self.kind.partial else s.block(grid),
            speculative=s.count(self.speculative),
            drop=s.flag(self.eagle),
            alignment=s.alignment("kernel_alignment") if self.kind.checkpoint else None,
        )

    def _unit(self) -> Any:
        return self.s.unit(self.grid) if self.kind.partial or self.kind.checkpoint else self.s.block(self.grid)

    def estimate(self, release: Any, dry: bool = False) -> Any:
        """The estimate with tables of any length: of a slot, only whether it is null is ever asked."""
        s, manager = self.s, self.manager(release)
        running = self.held - self.speculative - 1
        manager.req_to_blocks["r"] = release.blocks(manager, s.table(self.held, lambda at: at < running))
        hits = release.blocks(manager, s.table(self.hits, lambda at: at < self.hits - 1))
        manager._allocated_block_reqs = s.members(negate(self.first), "r")
        manager._partial_hit_reqs = s.members(self.tail, "r")
        # How many hit blocks nobody holds is a number of its own in the charge: any number.
        manager._get_num_evictable_blocks = lambda blocks: s.count(self.evictable)
        computed = s.tokens(self.computed)
        return release.estimate(
            manager,
            end=s.tokens(self.end),
            hits=hits,
            computed=computed,
            local=computed,
            prefill_end=s.tokens(self.prefill_end),
            dry=dry,
        )

    def estimate_and_take(self, release: Any) -> tuple[Any, int]:
        """The estimate with real blocks, then the allocation: what was charged, and what left the pool."""
        s, manager = self.s, self.manager(release)
        pool, speculative = manager.block_pool, int(s.count(self.speculative))
        manager.num_speculative_blocks = speculative
        hits: list[Any] = []
        if bool(s.flag(self.first)):
            columns = int(s.count(self.computed.blocks_up()))
            hits = release.blocks(manager, [True] * (columns - 1) + [False] * (columns > 0))
            if hits:
                # Nobody holds the hit any more: it is in the free queue, with its content.
                pool.free_blocks([hits[-1]])
        else:
            held = int(s.count(self.held))
            running = held - speculative - 1
            table = release.blocks(manager, [True] * running + [False] * (speculative + 1))
            manager.req_to_blocks["r"].extend(table)
            manager._allocated_block_reqs.add("r")
            if bool(s.flag(self.tail)):
                manager._partial_hit_reqs["r"] = (running, table[running])
        computed = s.tokens(self.computed)
        free = pool.get_num_free_blocks()
        answer = release.estimate(
            manager,
            end=s.tokens(self.end),
            hits=hits,
            computed=computed,
            local=computed,
            prefill_end=s.tokens(self.prefill_end),
        )
        if hits:
            release.adopt(manager, hits, computed)
        release.allocate(manager, s.tokens(self.end))
        return answer, int(free - pool.get_num_free_blocks())

    # -- words --------------------------------------------------------------------------------------------------------

    def say(self) -> str:
        due = "first allocation" if self.first else f"a table of {self.held} slots"
        unit = f", unit {int(self.grid.unit)}" if self.kind.partial or self.kind.checkpoint else ""
        return (
            f"block {int(self.grid.units * self.grid.unit)}{unit}, K {self.speculative}, {due}, from "
            f"{tokens(self.computed)} to {tokens(self.end)} tokens{', EAGLE on' if self.eagle else ''}"
            f"{', a partial tail to copy' if self.partial else ''}"
        )

    def prefer(self) -> tuple[Truth, ...]:
        """Small blocks, a second step, a prompt of several blocks."""
        plain = type(self.grid.units) is int
        block, unit = 4, 4
        sizes = self.grid.unit == 4 if plain else all_of(self.grid.units == 1, self.grid.unit == 4)
        return (
            self.end.block <= 8,
            sizes,
            self.speculative == 0,
            self.evictable == 0,
            negate(self.first),
            negate(self.eagle),
            negate(self.partial),
            is_at(self.computed, 8, block, unit),
            is_at(self.end, 17, block, unit),
            self.prefill_end == self.end,
        )

    def scenario(self, answer: Any) -> Scenario | None:
        """A prompt whose second step exports a checkpoint, in a pool of its own."""
        block = int(self.grid.units * self.grid.unit)
        start, end = tokens(self.computed), tokens(self.end)
        plain = self.kind.checkpoint and not (self.partial or self.first or self.eagle or self.speculative)
        if not plain or end - start > 65536 or not answer.checkpoint or block != int(self.grid.unit):
            return None
        # The first step takes the whole blocks that fit into the limit, and must not end the prompt.
        limit = end - start
        if limit < block or limit // block * block != start:
            limit = max(end - start, start)
            if limit // block * block != start or limit >= end:
                return None
        config = Config(
            groups=(Group("full", block), Group("mamba", block)),
            num_blocks=2 * (end // block + 8),
            hash_unit=block,
            step_tokens=limit,
            max_model_len=max(1024, 2 * end),
            checkpoint_blocks=1,
            checkpoint_alignment=1,
        )
        actions = (Action("submit", request="r", length=end, max_tokens=1), Action("step", times=2))
        return Scenario(config, actions, note=self.say())


def exact(kind: Step, goal: Callable[[_Case, Any], Truth], words: Callable[[_Case, Any], str]) -> Any:
    """A claim about the estimate alone."""

    def ask(s: Inputs, release: Any) -> Question:
        case = _Case(s, kind)
        return Question(
            case.premises(),
            lambda: case.estimate(release),
            lambda answer: goal(case, answer),
            lambda answer: case.say() if answer is None else f"{case.say()}{words(case, answer)}",
            case.prefer(),
            scenario=case.scenario,
        )

    return ask


def _charged(case: _Case, answer: Any) -> Any:
    return case.s.number_of(answer.total) - case.evictable


def _is_taken(case: _Case, answer: Any) -> Truth:
    return _charged(case, answer) == blocks.mamba_taken(case.step(answer.checkpoint))


def _taken_words(case: _Case, answer: Any) -> str:
    due = ", a checkpoint due" if answer.checkpoint else ""
    taken = blocks.mamba_taken(case.step(answer.checkpoint))
    return f"{due}: charged {_charged(case, answer)} new blocks, the table takes {taken}"


def _within(case: _Case, answer: Any) -> Truth:
    return _charged(case, answer) <= _most(case, answer)


def _most(case: _Case, answer: Any) -> Any:
    """The bound that does not depend on the prompt. What a step takes exactly is MAMBA.estimate-exact's."""
    return 1 + count(case.partial) + int(answer.checkpoint) + case.speculative


def _within_words(case: _Case, answer: Any) -> str:
    due = ", a checkpoint due" if answer.checkpoint else ""
    return f"{due}: charged {_charged(case, answer)} new blocks where {_most(case, answer)} are the most"


def never_negative(s: Inputs, release: Any) -> Question:
    """Whatever a request holds, a step is charged no less than nothing: charges of groups are added up."""
    case = _Case(s, Step())
    premises = [(text, truth) for text, truth in case.premises() if not text.startswith("no fewer columns")]
    drafts = Position(0, 0, case.speculative, case.grid)
    premises += [
        ("a block holds more than one step's drafts", case.speculative < case.grid.unit),
        (
            "the table was made for the computed position and at most K drafts that were rejected since",
            implies(
                negate(case.first),
                case.grid.boundary(case.held - case.speculative - 1) < case.computed.plus(drafts),
            ),
        ),
    ]
    return Question(
        tuple(premises),
        lambda: case.estimate(release),
        lambda answer: _charged(case, answer) >= 0,
        lambda answer: case.say() if answer is None else f"{case.say()}: charged {_charged(case, answer)} new blocks",
        (
            case.end.block <= 4,
            case.grid.unit == 16,
            case.speculative == 3,
            case.evictable == 0,
            case.held == 5,
            is_at(case.computed, 14, 16, 16),
            is_at(case.end, 15, 16, 16),
        ),
        scenario=lambda answer: _rejected_drafts(case),
    )


def _rejected_drafts(case: _Case) -> Scenario | None:
    """A request brings K drafts over a block's end, all are rejected, and a request before it leaves it one token.

    The request before it prefills 12 blocks that are wider than a step: at the end of each it needs a single token and
    leaves the rest to the other. Then it decodes, with drafts of its own.
    """
    if (int(case.grid.unit), case.speculative, tokens(case.computed), tokens(case.end)) != (16, 3, 14, 15):
        return None
    config = Config(
        groups=(Group("full", 16), Group("mamba", 16)),
        num_blocks=300,
        hash_unit=16,
        step_tokens=5,
        max_running=2,
        speculative=3,
    )
    actions = (
        Action("submit", request="before", length=192, max_tokens=8),
        Action("submit", request="r", length=3, max_tokens=24),
        Action("step", times=52, accept=(0,)),
    )
    return Scenario(config, actions, note=case.say())


def dry_is_real(kind: Step) -> Any:
    """A dry question about the same tokens answers what the real one does, and leaves nothing noted."""

    def ask(s: Inputs, release: Any) -> Question:
        case = _Case(s, kind)
        return Question(
            case.premises(),
            lambda: (case.estimate(release, dry=True), case.estimate(release)),
            lambda both: all_of(
                _charged(case, both[0]) == _charged(case, both[1]), not both[0].changed, not both[0].checkpoint
            ),
            lambda both: (
                case.say()
                if both is None
                else f"{case.say()}: a dry run says {_charged(case, both[0])}, the real one {_charged(case, both[1])}"
            ),
            case.prefer(),
        )

    return ask


def taken(kind: Step) -> Any:
    """What the shipped allocation takes from the pool is what the shipped estimate charged."""

    def ask(s: Inputs, release: Any) -> Question:
        case = _Case(s, kind)
        return Question(
            case.premises(),
            lambda: case.estimate_and_take(release),
            lambda both: s.number_of(both[0].total) == both[1],
            lambda both: (
                case.say()
                if both is None
                else f"{case.say()}{', a checkpoint due' * both[0].checkpoint}: charged {both[0].total} blocks "
                f"(hits that leave the queue included), taken {both[1]}"
            ),
            case.prefer(),
        )

    return ask


_KINDS = {
    "plain": (Step(), "no partial tail, no checkpoint"),
    "partial": (Step(partial=True), "a partial tail to copy or not"),
    "checkpoint": (Step(checkpoint=True), "a prefill checkpoint or not"),
    "both": (Step(partial=True, checkpoint=True), "a partial tail and a prefill checkpoint, or not"),
}

_BOUND = (("ADMIT.mamba-bound", "estimate-beyond-bound"),)


def _exceeds(kind: Step) -> tuple[tuple[str, str], ...]:
    told = [("with-partial", kind.partial), ("with-checkpoint", kind.checkpoint)]
    return tuple(("ADMIT.exact", f"mamba-estimate-exceeds-taken-{what}") for what, on in told if on)


def _beyond_layout(kind: Step) -> tuple[tuple[str, str], ...]:
    # Where a step with a checkpoint does not move its speculative blocks, K more are charged, and taken.
    by_drafts = ("ADMIT.mamba-bound", "estimate-beyond-bound-by-drafts")
    return (*_exceeds(kind), *([by_drafts] if kind.checkpoint else []))


def _small(kind: Step) -> Step:
    """The same with tables that an allocation can be run on, smaller where there are more paths."""
    sizes = {(True, True): (3, 1), (False, True): (4, 2)}
    return Step(kind.partial, kind.checkpoint, *sizes.get((kind.partial, kind.checkpoint), (5, 2)))


def _absent(kind: Step) -> Callable[[Any], str]:
    def absent(release: Any) -> str:
        if kind.checkpoint and not release.has_checkpoints:
            return "this release exports no checkpoints by a rule of its own"
        return ""

    return absent


CLAIMS = (
    *(
        ShippedClaim(
            f"MAMBA.estimate-bounded/{name}",
            ESTIMATE,
            f"a step, the first or a later one, is charged at most 1 + partial + checkpoint + K new blocks: {words}",
            ALL,
            exact(kind, _within, _within_words),
            "ADMIT.mamba-bound",
            _BOUND,
            _absent(kind),
        )
        for name, (kind, words) in _KINDS.items()
    ),
    *(
        ShippedClaim(
            f"MAMBA.estimate-exact/{name}",
            ESTIMATE,
            f"what is charged is what the table's layout takes: {words}",
            ALL,
            exact(kind, _is_taken, _taken_words),
            "ADMIT.exact",
            _beyond_layout(kind),
            _absent(kind),
        )
        for name, (kind, words) in _KINDS.items()
    ),
    ShippedClaim(
        "MAMBA.estimate-not-negative",
        ESTIMATE,
        "a step is never charged less than nothing",
        ALL,
        never_negative,
        "ADMIT.exact",
        (("ADMIT.exact", "mamba-estimate-negative-and-below-taken"),),
    ),
    ShippedClaim(
        "MAMBA.dry-run-pure",
        ESTIMATE,
        "a dry run answers what the real question is answered, and notes nothing",
        ALL,
        dry_is_real(Step(partial=True, checkpoint=True)),
        "ADMIT.exact",
        absent=_absent(Step(checkpoint=True)),
    ),
    *(
        ShippedClaim(
            f"MAMBA.taken/{name}",
            f"{ALLOCATE} after get_num_blocks_to_allocate",
            f"what is charged leaves the pool: {words}",
            f"bounded: {_small(kind).small()}",
            taken(_small(kind)),
            "ADMIT.exact",
            _exceeds(kind),
            _absent(kind),
            most_values=8,
            small=not kind.checkpoint,
        )
        for name, (kind, words) in _KINDS.items()
    ),
)

__all__ = ["CLAIMS"]
