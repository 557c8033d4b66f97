"""Claims about ``Scheduler._mamba_block_aligned_split``: where a prefill chunk may end (PR 51113)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvproof.models.smt.claim import is_at, tokens
from kvproof.models.smt.shipped.claim import Inputs, Question, ShippedClaim
from kvproof.spec.config import Config, Group
from kvproof.spec.logic import Truth, all_of, any_of, implies, negate
from kvproof.spec.radix import Position, choose, later
from kvproof.spec.rules import checkpoint, chunk
from kvproof.spec.scenario import Action, Scenario

FUNCTION = "Scheduler._mamba_block_aligned_split"
EXEMPT = ", unless it is the last one and may export a checkpoint inside itself"
ALL = "proved for all block sizes, prompts, resume positions and budgets"


@dataclass(frozen=True)
class Features:
    """What a claim leaves on. Everything that is off is a premise of the claim."""

    fits: bool = True
    partial: bool = False
    junction: bool = False
    junction_inside: bool = False
    checkpoint: bool = False
    lookahead: bool = False

    def premises(self) -> list[str]:
        said = [
            "a block fits in the step's token limit" if self.fits else "",
            "" if self.partial else "no partial hits",
            "" if self.junction else "no junction",
            "" if self.checkpoint else "no prefill checkpoints",
            "" if self.lookahead else "no hash lookahead",
        ]
        return list(filter(None, said))


class _Case:
    """A chunk about to be cut, as the rules see it and as the function does."""

    def __init__(self, s: Inputs, features: Features) -> None:
        self.s, self.features = s, features
        grid = self.grid = s.grid() if features.partial or features.checkpoint else s.blocks_only()
        self.zero, self.one = grid.zero(), grid.one_token()
        self.start, self.offered = s.position("start", grid), s.position("offered_end", grid)
        self.prompt, self.tokens = s.position("prompt", grid), s.position("tokens", grid)
        self.limit = s.position("step_tokens", grid)
        self.drop: Truth = s.truth("eagle")
        self.junction = s.position("junction", grid) if features.junction else self.zero
        self.inside: Truth = s.truth("junction_may_be_inside_a_block") if features.junction_inside else False
        self.lookahead = s.position("hash_lookahead", grid) if features.lookahead else self.zero
        self.prefill_end = later(self.prompt, self.tokens.minus(self.one))
        self.fits: Truth = grid.boundary(1) <= self.limit

    def premises(self) -> tuple[tuple[str, Truth], ...]:
        told: list[tuple[str, Truth]] = [
            (
                "something is offered, within the request",
                all_of(self.start < self.offered, self.offered <= self.tokens),
            ),
            ("the prompt is part of the request", all_of(self.one <= self.prompt, self.prompt <= self.tokens)),
            ("no more is offered than the step's token limit", self.offered.minus(self.start) <= self.limit),
            ("the prefill is not over", self.start < self.prefill_end),
            ("no long-prefill threshold below the limit", True),
        ]
        if self.features.fits:
            told.append(("a block fits in the step's token limit", self.fits))
        if self.features.junction_inside:
            told.append(("a junction inside a block is kept only with EAGLE", implies(self.inside, self.drop)))
        told += [(text, True) for text in self.features.premises() if "fits" not in text]
        return tuple(told)

    def granted(self, release: Any) -> Any:
        s, grid = self.s, self.grid
        start, end = s.tokens(self.start), s.tokens(self.offered)
        return release.split(
            computed=start,
            offered=end - start,
            prompt=s.tokens(self.prompt),
            tokens=s.tokens(self.tokens),
            block=s.block(grid),
            unit=s.unit(grid) if self.features.partial or self.features.checkpoint else s.block(grid),
            drop=s.flag(self.drop),
            limit=s.tokens(self.limit),
            junction=s.tokens(self.junction),
            partial=self.features.partial,
            junction_inside=s.flag(self.inside),
            alignment=s.alignment("kernel_alignment") if self.features.checkpoint else None,
            lookahead=s.tokens(self.lookahead),
        )

    def end(self, granted: Any) -> Position:
        """Where the chunk ends that was granted."""
        return self.s.position_of(self.s.tokens(self.start) + granted, self.grid)

    def stops(self) -> list[Position]:
        """Declared stops inside a block: the prompt's last unit boundary, or one unit lower, and the junction.

        Every release stops at one of these: which one has changed with EAGLE's rule (PR 57180).
        """
        stops = []
        if self.features.partial:
            for last in (self.prompt, self.prompt.minus(self.one), self.prompt.minus(self.lookahead)):
                floor = last.floor_unit()
                stops += [floor, floor.minus(self.grid.one_unit())]
        if self.features.junction:
            stops += [self.junction, self.start.plus_blocks(self.junction.minus(self.start).block)]
        return stops

    def exports(self, end: Position, release: Any) -> Truth:
        """Whether the chunk that ends at ``end`` exports a checkpoint: valid for it, by the specification's rule."""
        if not self.features.checkpoint:
            return False
        if release.version >= (0, 32):
            look = self.lookahead if self.features.lookahead else None
            at = checkpoint.checkpoint_position(self.prefill_end, self.drop, not self.features.partial, look)
        else:
            # Up to 0.31 the position was counted in units, and EAGLE's drop was taken from the length − 1.
            last = checkpoint.checkpoint_position(self.prefill_end, False, False)
            at = choose(self.drop, last.minus(self.grid.one_unit()).at_least_zero(), last)
        aligned = self.s.aligned("kernel_alignment", at.minus(self.start))
        return checkpoint.export_valid(self.start, end, at, aligned)

    def say(self, granted: Any) -> str:
        block = int(self.grid.units * self.grid.unit)
        words = [f"block {block}"]
        if self.features.partial or self.features.checkpoint:
            words.append(f"unit {int(self.grid.unit)}")
        words += [f"step limit {tokens(self.limit)}", f"prompt {tokens(self.prompt)} of {tokens(self.tokens)} tokens"]
        words += ["EAGLE on"] if self.drop else []
        words += [f"junction at {tokens(self.junction)}"] if self.junction > self.zero else []
        start, offered = tokens(self.start), tokens(self.offered)
        if granted is None:
            return f"{', '.join(words)}: offered [{start}, {offered})"
        end = start + int(granted)
        at = "ends on a boundary" if end % block == 0 else f"ends inside block {end // block}"
        crossed = (
            f"crosses {(start // block + 1) * block} from inside a block and "
            if start % block and (end > (start // block + 1) * block)
            else ""
        )
        return (
            f"{', '.join(words)}: offered [{start}, {offered}), the chunk [{start}, {end}) {crossed}{at}; the prefill "
            f"ends at {tokens(self.prefill_end)}"
        )

    def prefer(self) -> tuple[Truth, ...]:
        """A fresh request, offered one token less than a block, in an engine whose step is one block."""
        grid, block = self.grid, 16
        sizes = grid.unit == block if type(grid.units) is int else all_of(grid.units == 4, grid.unit == 4)
        unit = block if type(grid.units) is int else 4
        return (
            all_of(self.tokens.block <= 4, self.limit.block <= 4),
            sizes,
            self.start == self.zero,
            self.tokens == self.prompt,
            self.drop,
            is_at(self.limit, block, block, unit),
            is_at(self.offered, block - 1, block, unit),
            is_at(self.prompt, block + 1, block, unit),
        )

    def scenario(self, granted: Any) -> Scenario | None:
        """Two prefills that share a step: the first leaves the second what it was offered."""
        block, limit = int(self.grid.units * self.grid.unit), tokens(self.limit)
        offered, first = tokens(self.offered), tokens(self.limit) - tokens(self.offered)
        simple = not (self.features.partial or self.junction > self.zero or self.features.checkpoint)
        if not simple or tokens(self.start) or tokens(self.prompt) != tokens(self.tokens) or not 0 < first < block:
            return None
        if offered >= tokens(self.tokens) or tokens(self.prompt) > 65536:
            return None
        config = Config(
            groups=(Group("full", block), Group("mamba", block)),
            num_blocks=2 * (tokens(self.prompt) // block + 4) + 1,
            hash_unit=block,
            step_tokens=limit,
            max_model_len=max(1024, 2 * tokens(self.prompt)),
            speculative=1 if self.drop else 0,
            eagle=bool(self.drop),
        )
        actions = (
            Action("submit", request="first", length=first, max_tokens=1),
            Action("submit", request="second", length=tokens(self.prompt), max_tokens=1),
            Action("step", times=tokens(self.prompt) // max(int(granted), 1) + 2),
        )
        return Scenario(config, actions, note=self.say(granted))


def chunk_end(features: Features) -> Any:
    """An intermediate chunk ends where it may, and none crosses a boundary from inside a block."""

    def ask(s: Inputs, release: Any) -> Question:
        case = _Case(s, features)

        def goal(granted: Any) -> Truth:
            end = case.end(granted)
            legal = chunk.may_end(
                case.start, end, case.prefill_end, case.stops(), case.fits, case.exports(end, release)
            )
            return all_of(end >= case.start, end <= case.offered, implies(case.start < end, legal))

        return Question(
            case.premises(),
            lambda: case.granted(release),
            goal,
            case.say,
            case.prefer(),
            scenario=case.scenario,
        )

    return ask


def progress(features: Features) -> Any:
    """A budget that reaches the next boundary, or the request's end, is never answered with an empty chunk."""

    def ask(s: Inputs, release: Any) -> Question:
        case = _Case(s, features)
        # With a part of the request left over, what does not reach a boundary may have to wait for a larger budget.
        enough = any_of(case.offered >= case.start.next_block(), case.offered >= case.tokens, negate(case.fits))
        return Question(
            case.premises(),
            lambda: case.granted(release),
            lambda granted: implies(enough, case.start < case.end(granted)),
            lambda granted: f"{case.say(granted)}; nothing was granted",
            case.prefer(),
        )

    return ask


def _needs(features: Features) -> Any:
    def absent(release: Any) -> str:
        if features.checkpoint and not release.has_checkpoints:
            return "this release exports no checkpoints by a rule of its own"
        if features.lookahead and not release.has_lookahead_hashes:
            return "this release's keys cover no tokens after their boundary"
        if features.junction_inside and not release.has_checkpoints:
            return "this release keeps no junction inside a block"
        if not features.fits and release.version < (0, 27):
            return "this release refuses a block wider than a step"
        return ""

    return absent


_SETS = {
    "plain": (Features(), "resumes anywhere, with and without EAGLE"),
    "wide-block": (Features(fits=False), "blocks wider than a step"),
    "junction": (Features(junction=True), "a junction anywhere"),
    "partial": (Features(partial=True), "partial hits"),
    "partial-junction": (Features(partial=True, junction=True, junction_inside=True), "partial hits and a junction"),
    "checkpoint": (Features(checkpoint=True), "prefill checkpoints"),
    "checkpoint-partial": (Features(partial=True, checkpoint=True), "prefill checkpoints and partial hits"),
    "checkpoint-junction": (Features(checkpoint=True, junction=True), "prefill checkpoints and a junction"),
    "lookahead": (Features(partial=True, lookahead=True), "partial hits and hash lookahead of any length"),
}

CLAIMS = (
    *(
        ShippedClaim(
            f"SPLIT.chunk-end/{name}",
            FUNCTION,
            "an intermediate chunk ends on a boundary or a declared stop, and none that starts inside a block crosses "
            f"its end{EXEMPT if features.checkpoint else ''}: {words}",
            ALL if not (features.partial or features.checkpoint) else ALL.replace("block sizes", "block sizes, units"),
            chunk_end(features),
            "SLOT.chunk-end",
            (("SLOT.chunk-end", "chunk-ends-off-boundary"), ("SLOT.chunk-end", "chunk-crosses-boundary")),
            _needs(features),
            small=name in ("plain", "wide-block", "junction"),
        )
        for name, (features, words) in _SETS.items()
    ),
    ShippedClaim(
        "SPLIT.progress/plain",
        FUNCTION,
        "a budget that reaches a boundary, or the request's end, is granted a part",
        ALL,
        progress(Features()),
    ),
)

__all__ = ["CLAIMS", "Features", "chunk_end", "progress"]
