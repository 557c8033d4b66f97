"""Where an implementation does otherwise than the specification says, one switch for each way.

A machine that speaks a release's dialect takes that release's decisions, its faults included: conformance is judged
against it, and exploring it finds, in the smallest world, what the fault leads to. Without a dialect the machine is the
specification. The reference engine has a dialect, too: it keeps the same rules in other ways, which are no faults.
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
    not limited. Up to 0.30.0 it is, and in the reference engine.

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

    The rest is on in every release of vLLM, and off in the reference engine:

    ``moves_states``: a recurrent state lies in its block's slot of a table, and moves on from slot to slot. In the
    reference engine it is read from one block and saved into others (:mod:`kvproof.spec.machine.unmoved`), and what a
    step supersedes is given back with that step instead of with the next allocation.

    ``lets_go``: a request counts on what it runs on alone. In the reference engine it also holds the newest state that
    it could be resumed from, and gives that up, key and all, before it is preempted for a block of its own.

    ``keys_ahead``: keys are made with the allocation, and whoever hits one waits for its content. In the reference
    engine they are made once the content is there, and nobody has to wait.

    ``replaces_keys``: a key for more tokens takes the place of the one that a block has. In the reference engine a
    block is found under both: what a shorter one promises is still there.

    ``keys_prompt_alone``: inside a block, attention is keyed at the last position from which the prompt can be resumed.
    In the reference engine also one unit beyond it, and at the junction.

    ``stops_by_prompt``: where chunks stop, and what is worth a key, follows from the prompt. In the reference engine it
    follows from all that is known when the request is admitted, so that one that was preempted can be resumed late.

    ``steps_to_junction``: a chunk stops whole blocks from its start below a junction. In the reference engine it stops
    at the junction itself where hits may end inside blocks.

    ``hits_as_keyed``: attention is matched key by key, whole blocks and then the last key inside the next one, and a
    hit takes the blocks so found. In the reference engine any key of the prefix that covers a slot will do, the one at
    the hit's end first.

    ``asks_once``: with a store and groups that may diverge, the groups are looked up one by one, and together if they
    part and nothing is loaded. In the reference engine together first, and then attention alone: the junction is
    declared even if a load covers it, and a state that lies deeper than attention changes nothing.

    ``drafts_count``: drafts are tokens like any, and requests are preempted for them. In the reference engine a request
    goes on without them where they find no room.

    ``drafts_with_samples``: drafts are proposed with what was sampled, so that a request which was preempted has none
    for its last known token. In the reference engine they are asked for whenever a request decodes.

    ``pads_admitted``: a request that enters with one token left is padded to a whole decoding step. In the reference
    engine it enters with that token.

    ``limits_decoding``: the limit for long prefills holds for decoding steps, too. In the reference engine it does not.

    ``spares_last``: no draft is computed at the last position of the model length. In the reference engine one is.

    ``keeps_arrived``: a request whose load has arrived keeps its blocks. In the reference engine it gives way to one
    that runs and finds no block, and, where nothing runs, to the first in line.

    ``reserves_for_prefills``: an asynchronous load leaves room for unfinished prefills and their first decoding step.
    In the reference engine for the known tokens of all that hold blocks, those that decode included.

    ``queues_loads_apart``: requests that wait for a load, or for one block more after it, are asked before all others.
    In the reference engine they keep their place.

    ``frees_at_once``: who goes leaves its blocks at once, group by group. In the reference engine when the step is over
    that may still touch them, and attention first.
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
    moves_states: bool = True
    lets_go: bool = True
    keys_ahead: bool = True
    replaces_keys: bool = True
    keys_prompt_alone: bool = True
    stops_by_prompt: bool = True
    steps_to_junction: bool = True
    hits_as_keyed: bool = True
    asks_once: bool = True
    drafts_count: bool = True
    drafts_with_samples: bool = True
    pads_admitted: bool = True
    limits_decoding: bool = True
    spares_last: bool = True
    keeps_arrived: bool = True
    reserves_for_prefills: bool = True
    queues_loads_apart: bool = True
    frees_at_once: bool = True

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for what the machine does not describe: states that are not moved come with the other
        ways of holding and keying them, or not at all."""
        for name in ("keys_ahead", "frees_at_once"):
            if getattr(self, name) != self.moves_states:
                raise ValueError(f"{name} and moves_states differ: turn them off together")
        for name in ("lets_go", "replaces_keys", "keys_prompt_alone", "keeps_arrived", "queues_loads_apart"):
            if self.moves_states and not getattr(self, name):
                raise ValueError(f"{name} is off where states are moved: turn moves_states off, too")


SPECIFICATION = Dialect()
SWITCHES = tuple(field.name for field in fields(Dialect))
"""The names of all ways in which implementations differ."""

REFERENCE = Dialect(
    spares_lone_prefill=False,
    moves_states=False,
    lets_go=False,
    keys_ahead=False,
    replaces_keys=False,
    keys_prompt_alone=False,
    stops_by_prompt=False,
    steps_to_junction=False,
    hits_as_keyed=False,
    asks_once=False,
    drafts_count=False,
    drafts_with_samples=False,
    pads_admitted=False,
    limits_decoding=False,
    spares_last=False,
    keeps_arrived=False,
    reserves_for_prefills=False,
    queues_loads_apart=False,
    frees_at_once=False,
)
"""What the reference engine speaks."""


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
"""The release from which on each switch is on."""

_IN_NONE = {"charges_external_state", "waits_for_copied_tail", "charges_no_less_than_nothing"}
"""Switches that are on in no release up to 0.33.0. Those that are in neither place are on in all of them."""


def dialect_of(release: tuple[int, ...]) -> Dialect:
    """What a release of vLLM speaks, by its version as numbers. One that is not known speaks as the newest that is."""
    switches = {name: name not in _IN_NONE and release >= _SINCE.get(name, ()) for name in SWITCHES}
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
