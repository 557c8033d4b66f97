"""Where a prefill chunk ends, and which states are worth keeping.

The rules are the specification's (:mod:`kvproof.spec.rules.chunk`, :mod:`kvproof.spec.rules.checkpoint`): here they are
asked with numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvproof.impl.reference.request import Request
from kvproof.spec.config import Config
from kvproof.spec.radix import Position, Radix
from kvproof.spec.rules.checkpoint import checkpoint_position, export_valid, on_alignment
from kvproof.spec.rules.chunk import Prefill, declared_stops, exports_inside, split


@dataclass(frozen=True)
class Chunk:
    """Tokens up to ``end`` are computed in this step. ``checkpoint`` is where inside it a state is exported (0: none).

    ``stops`` are the positions inside the offered chunk at which it may be made to end, apart from block boundaries.
    """

    end: int
    checkpoint: int = 0
    stops: tuple[int, ...] = ()


@lru_cache(maxsize=1 << 14)
def reusable(block: int, unit: int, known: int, eagle: bool, whole_blocks: bool) -> int:
    """The last position from which a request with the same ``known`` tokens could resume; 0: none."""
    radix = Radix.of(block, unit)
    position = checkpoint_position(Position.on(known, radix), eagle, whole_blocks)
    return int(position.value())


@lru_cache(maxsize=1 << 14)
def _cut(
    block: int,
    unit: int,
    start: int,
    offered: int,
    prefill_end: int,
    known: int,
    stops: tuple[int, int, int],
    limit: int,
    checkpoint: int,
    alignment: int,
    inside: bool,
) -> Chunk:
    radix = Radix.of(block, unit)

    def on(tokens: int) -> Position:
        return Position.on(tokens, radix)

    exports = alignment > 0 and bool(
        export_valid(on(start), on(offered), on(checkpoint), on_alignment(start, checkpoint, alignment))
    )
    last_cacheable, tail, junction = stops
    case = Prefill(
        start=on(start),
        offered=on(offered),
        prefill_end=on(prefill_end),
        prompt=on(known),
        last_cacheable=on(last_cacheable),
        tail=on(tail),
        junction=on(junction),
        fits=block <= limit,
        exports=exports,
        junction_inside=inside,
    )
    end = int(split(case).value())
    declared = sorted({int(stop.value()) for stop in declared_stops(case)} - {start})
    return Chunk(end, checkpoint if exports_inside(case) else 0, tuple(declared))


class Chunks:
    """The chunk rules under one configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        threshold = config.long_prefill_threshold
        self.limit = min(config.step_tokens, threshold) if threshold else config.step_tokens
        self.recurrent = any(group.kind == "mamba" for group in config.groups)

    def declare(self, request: Request, agreed: int, reach: int) -> None:
        """On admission: the positions whose states a later request can resume from.

        The tail serves whoever sends the same tokens again and more. The junction serves siblings: up to there
        attention has the prefix from others, and only a state was missing.
        """
        config = self.config
        if not self.recurrent:
            return
        block, unit = config.mamba_block, config.hash_unit
        request.tail = reusable(block, unit, request.known, config.eagle, not config.partial_hits)
        request.last_cacheable = request.tail // block * block
        grain = unit if config.partial_hits else block
        junction = min(reach, request.known - 1) // grain * grain
        request.junction = junction if junction > agreed else 0

    def cut(self, request: Request, start: int, budget: int) -> Chunk:
        """How far the next chunk of a prefill goes. Its end may be ``start``: wait for a larger budget."""
        config = self.config
        offered = min(request.known, start + min(budget, self.limit))
        if not self.recurrent:
            return Chunk(offered)
        return _cut(
            config.mamba_block,
            config.hash_unit,
            start,
            offered,
            request.prefill_end,
            request.known,
            (request.last_cacheable, request.tail, request.junction),
            self.limit,
            request.tail,
            config.checkpoint_alignment if config.checkpoint_blocks and offered == request.known else 0,
            config.partial_hits,
        )

    def wanted(self, request: Request, position: int) -> bool:
        """Whether the state at ``position`` is worth a key: a replay boundary, or one that retention asks for."""
        if position <= 0:
            return False
        if position in (request.tail, request.last_cacheable, request.junction):
            return True
        interval = self.config.retention
        if position % self.config.mamba_block or interval == 0:
            return False
        return interval is None or position % interval == 0
