"""Where a prefill chunk may end (align mode).

Recurrent state reaches memory at chunk ends only. Slot p of a request's table is keyed as "the state after (p+1)·B
tokens", so a chunk must not leave a state in slot p that was taken anywhere else and then run past the block's end.

Where it comes from: PR 51113, in releases from 0.27.0. Before it, aligned ends were enforced only below the last
cacheable position, which EAGLE moves back one block (to 0 for short prompts); past that any end was accepted, and a
chunk ending mid-block was followed by one that crossed the block's end (issue 43559). The exemption for a last chunk
that exports a checkpoint inside itself is in releases from 0.30.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproof.spec.logic import Truth, all_of, any_of, implies, negate
from kvproof.spec.radix import Position, Radix, choose, first_inside, later


def ends_on_stop(
    start: Position,
    end: Position,
    prefill_end: Position,
    stops: Sequence[Position],
    fits: Truth,
) -> Truth:
    """An intermediate chunk ends on a block boundary or on a declared stop; inside a block too wide for one chunk,
    anywhere.

    ``fits`` is whether a whole block fits in the largest chunk that the configuration allows. Where it does not, a
    chunk may end in the block it started in. The last chunk (``end >= prefill_end``) may end anywhere: decoding
    carries its slot on to the boundary.
    """
    return implies(
        end < prefill_end,
        lambda: any_of(
            end.on_block(),
            any_of(*(end == stop for stop in stops)),
            all_of(negate(fits), end.block == start.block),
        ),
    )


def keeps_to_block(start: Position, end: Position, prefill_end: Position, exports: Truth) -> Truth:
    """A chunk that starts inside a block does not run past that block's end.

    Unless it is the last one and ``exports`` a checkpoint inside itself: then the column it leaves behind must be null
    or stay unkeyed (:func:`kvproof.spec.rules.slots.may_key`). A chunk that starts on a boundary may cross others: the
    columns it skips have never held a state and are null.
    """
    return any_of(
        start.on_block(),
        end <= start.next_block(),
        all_of(end >= prefill_end, exports),
    )


def may_end(
    start: Position,
    end: Position,
    prefill_end: Position,
    stops: Sequence[Position],
    fits: Truth,
    exports: Truth,
) -> Truth:
    """Whether the prefill chunk [start, end) may end at ``end``: :func:`ends_on_stop` and :func:`keeps_to_block`.

    ``start < prefill_end`` and ``start < end``. An empty chunk (wait for more budget) is always allowed and is not
    asked.
    """
    return all_of(
        ends_on_stop(start, end, prefill_end, stops, fits),
        lambda: keeps_to_block(start, end, prefill_end, exports),
    )


def may_end_at(
    block: int, unit: int, start: int, end: int, prefill_end: int, stops: Sequence[int], limit: int, exports: bool
) -> bool:
    """:func:`may_end` for plain token counts; ``limit`` is the largest chunk that the configuration allows."""
    radix = Radix.of(block, unit)
    declared = [Position.on(stop, radix) for stop in stops]
    first, last, whole = (Position.on(n, radix) for n in (start, end, prefill_end))
    return bool(may_end(first, last, whole, declared, block <= limit, exports))


@dataclass(frozen=True)
class Prefill:
    """One chunk about to be cut. Positions are counted from the request's first token.

    ``offered`` is where the chunk would end by budget alone. ``prefill_end`` is max(prompt, tokens − 1), so that a
    resumed request replaying its output counts. ``last_cacheable`` is the last block boundary a lookup can reuse;
    ``tail`` the prompt's last reusable hash-unit boundary and ``junction`` where a shared prefix ends that a sparse
    group has not cached (0: none). ``junction_inside`` is whether a junction's state can be kept inside a block.
    ``exports`` is whether the backend can export a checkpoint from [start, offered)
    (:func:`kvproof.spec.rules.checkpoint.export_valid`).
    """

    start: Position
    offered: Position
    prefill_end: Position
    prompt: Position
    last_cacheable: Position
    tail: Position
    junction: Position
    fits: Truth
    exports: Truth
    junction_inside: Truth = False


def junction_stop(case: Prefill) -> Position:
    """Where the chunk stops for the junction: there, or whole blocks from the start; ``start`` itself where it
    doesn't.
    """
    whole_blocks = case.start.plus_blocks(case.junction.minus(case.start).block)
    stop = choose(all_of(case.junction_inside, case.junction <= case.prompt), case.junction, whole_blocks)
    return choose(case.junction.strictly_between(case.start, case.offered), stop, case.start)


def declared_stops(case: Prefill) -> tuple[Position, ...]:
    """The positions at which this chunk is made to end early, other than block boundaries. ``start`` means: none."""
    tail = choose(all_of(case.last_cacheable < case.tail, case.tail < case.prompt), case.tail, case.start)
    return (case.last_cacheable, tail, junction_stop(case))


def exports_inside(case: Prefill) -> Truth:
    """Whether the chunk keeps its full length and exports a checkpoint: it is the last one and no junction cuts it.

    The last condition is this specification's: a chunk cut at a junction is not the last one any more, so an exemption
    granted to the whole of it must not be used by the part.
    """
    junction = junction_stop(case)
    return all_of(
        case.exports,
        case.offered >= case.prefill_end,
        negate(junction.strictly_between(case.start, case.offered)),
    )


def split(case: Prefill) -> Position:
    """Where the chunk ends. ``start`` is the answer "not in this step: wait for a larger budget".

    The rule after PR 51113 with the checkpoint exemption: up to ``prefill_end`` ends are floored to blocks (unless the
    block is wider than any chunk, and none of its ends is in reach), a chunk starting inside a block stops at that
    block's end, and declared stops are taken in order.
    """
    exporting = exports_inside(case)
    aligned = case.offered.floor_block()
    floored = all_of(case.offered < case.prefill_end, any_of(aligned > case.start, case.fits))
    end = choose(floored, aligned, case.offered)
    realign = choose(case.start.on_block(), case.start, case.start.next_block())
    cut = first_inside([realign, *declared_stops(case)], case.start, end)
    return later(choose(exporting, case.offered, cut), case.start)
