"""Where releases of vLLM do otherwise than the specification says, one switch for each way.

A machine that speaks a release's dialect takes that release's decisions, its faults included: conformance is judged
against it, and exploring it finds, in the smallest world, what the fault leads to. Without a dialect the machine is the
specification.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Dialect:
    """Each switch is on in the specification.

    ``charges_external_state``: an external load brings the recurrent state at its end, which takes a block of its own.
    Up to 0.33.0 at least that block is not asked for (while a local hit that is not adopted is), and an allocation may
    fail halfway.

    ``waits_for_copied_tail``: a hit that ends inside an attention block is copied ahead of the forward, so a block that
    this very step writes can't be its source yet. Up to 0.33.0 at least only recurrent hits wait for their content.

    ``keys_accepted``: blocks that accepted drafts complete are keyed after that step. Up to 0.32.0 they are keyed with
    the next allocation.

    ``leaves_token``: the last position worth stopping at leaves a token to compute, for a resend can't resume beyond
    it. Up to 0.31.0 it is the last boundary of all tokens, and an identical resend of a prompt that ends on it finds
    nothing there.

    ``knows_keyed_tail``: a state that is keyed already is not keyed again. Up to 0.32.0 it is, and whoever hits it has
    to wait for the next step.

    ``retires_across_gaps``: all states below the one at the computed position are given back. Up to 0.29.0 a null slot
    ends the search, and only the running state of the step before is looked for apart.

    ``grows_without_blocks``: a request has had its first allocation even if that took no recurrent block. Up to 0.27.0
    it has not, and what it is charged next counts the blocks for drafts again.

    ``spares_lone_prefill``: the limit for long prefills keeps one from starving others, so a request that is alone is
    not limited. Up to 0.30.0 it is.

    ``pads_resumed``: a request with one token left is padded to a whole decoding step if it has computed tokens, even
    if nobody else runs. Up to 0.29.0 only where others run.

    ``pads_where_room``: it is padded only if the model length has room for that. Up to 0.28.0 it is not admitted at all
    where the length has none, and keeps the padding that an aligned chunk has cut.

    ``reserves_slots``: an asynchronous load leaves room for what unfinished prefills need, their first decoding step
    included, as attention slots. In 0.31.0 a block for each of them, and up to 0.30.0 nothing for decoding (switch
    ``reserves_decoding``).

    ``rewinds_at_end``: what a model said to drafts beyond its last token does not count as computed. Up to 0.32.0 it
    does when the request goes, and a state that it has not outgrown is given back first.

    ``asks_apart_when_told``: with a store, groups are looked up one by one only where the store says that it can bring
    what is missing. Up to 0.27.0 always.

    ``leaves_moved_tail``: a tail that was moved to a copy is held by nobody once the copy has run. In 0.27 and 0.28,
    with a store, its request holds it until it goes, for the store to save.

    ``cuts_recurrent_short``: a lookup that is cut for a load's sake may have fewer recurrent blocks than its end (PR
    51468). In 0.27 that killed the engine.

    ``charges_no_less_than_nothing``: a table that is longer than needed costs nothing. Up to 0.33.0 at least it costs
    less than nothing (ADMIT.exact, mamba-estimate-negative-and-below-taken).

    ``charges_what_is_due``: the cap on what a recurrent step can take is a cap (PR 57050). Up to 0.30.0 it takes the
    place of any number above 0, also where only a copy is due.

    ``stops_in_every_block``: chunk ends are aligned up to the end of the prefill (PR 51113). Up to 0.26.0 only up to
    the last cacheable position, and a chunk that starts beyond it crosses a block's end.
    """

    charges_external_state: bool = True
    waits_for_copied_tail: bool = True
    keys_accepted: bool = True
    leaves_token: bool = True
    knows_keyed_tail: bool = True
    retires_across_gaps: bool = True
    grows_without_blocks: bool = True
    spares_lone_prefill: bool = True
    pads_resumed: bool = True
    pads_where_room: bool = True
    reserves_slots: bool = True
    reserves_decoding: bool = True
    rewinds_at_end: bool = True
    asks_apart_when_told: bool = True
    leaves_moved_tail: bool = True
    cuts_recurrent_short: bool = True
    charges_no_less_than_nothing: bool = True
    charges_what_is_due: bool = True
    stops_in_every_block: bool = True


SPECIFICATION = Dialect()
SWITCHES = tuple(field.name for field in fields(Dialect))
"""The names of all ways in which releases differ."""


_SINCE: dict[str, tuple[int, ...]] = {
    "keys_accepted": (0, 33),
    "leaves_token": (0, 32),
    "knows_keyed_tail": (0, 33),
    "retires_across_gaps": (0, 30),
    "grows_without_blocks": (0, 28),
    "spares_lone_prefill": (0, 31),
    "pads_resumed": (0, 30),
    "pads_where_room": (0, 29),
    "reserves_slots": (0, 32),
    "reserves_decoding": (0, 31),
    "rewinds_at_end": (0, 33),
    "asks_apart_when_told": (0, 28),
    "leaves_moved_tail": (0, 29),
    "cuts_recurrent_short": (0, 28),
    "charges_what_is_due": (0, 31),
    "stops_in_every_block": (0, 27),
}
"""The release from which on each switch is on. Those that are missing are on in none."""


def dialect_of(release: tuple[int, ...]) -> Dialect:
    """What a release of vLLM speaks, by its version as numbers. One that is not known speaks as the newest that is."""
    switches = {name: release >= _SINCE[name] if name in _SINCE else False for name in SWITCHES}
    if release < (0, 27):  # what 0.27 began with
        switches["leaves_moved_tail"] = switches["cuts_recurrent_short"] = True
    return Dialect(**switches)


def split_before_51113(block: int, start: int, offered: int, last: int, tail: int, prompt: int, junction: int) -> int:
    """Where a chunk ended before PR 51113: ends are aligned below the last cacheable position alone."""
    end = offered // block * block if offered < last else offered
    following = (start // block + 1) * block
    stops = [
        following if start % block and following <= last else 0,
        last,
        tail if last < tail < prompt else 0,
        start + (junction - start) // block * block if start < junction < end else 0,
    ]
    return max(start, min((stop for stop in stops if start < stop < end), default=end))
