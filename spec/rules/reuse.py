"""What a lookup has to find at least, while nothing of a prefix is lost.

A request that has been prefilled leaves states behind at few positions. Which ones follows from the configuration and
from what the request did: its replay boundary, at which the splitter stops for the sake of whoever sends the prompt
again, and the ends of its chunks, as far as the retention interval keeps them. A later prompt that shares enough of it
has to resume at the deepest of them, or beyond.

All of it is a lower bound on purpose: what a release may or may not keep (junctions, states that decoding passes) is
not promised. With EAGLE a release drops the last unit of what the drafting groups match, or (from 0.33.0, without a
store) looks one token ahead instead and reaches deeper: the promise is the lesser of both, and the replay boundary is
promised only to prompts that share the earlier one whole, since the two ways put it in different places.

Where it comes from: replay boundaries were put where a resend lands by PRs 53945 and 54713 (0.30.0; issues 53595,
52371), the splitter stops there for prompts that fill whole blocks from 0.32.0 on (issue 50235), where the EAGLE drop
is taken from the whole length, too (PR 57180). Draft models have no recurrent layers, so that recurrent groups never
drop anything (PRs 47861, 57616).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvproof.spec.config import Config, Group
from kvproof.spec.logic import Int, Truth
from kvproof.spec.radix import Position, Radix
from kvproof.spec.rules.checkpoint import checkpoint_position


def serves(boundary: Int, matched: Int, dropped: Int) -> Truth:
    """Whether a group that matches ``matched`` tokens, and drops ``dropped`` of them, covers a hit of ``boundary``."""
    return boundary + dropped <= matched


def interval_keeps(boundary: int, retention: int | None) -> bool:
    """Whether the state at this block boundary stays for the retention interval's sake: ``None`` keeps all of them."""
    return retention is None or (retention > 0 and boundary % retention == 0)


def replay_boundary(config: Config, prompt: int) -> int:
    """Where a prompt of that many tokens can be resumed when it is sent again; 0: nowhere.

    With partial hits it is a hash unit, else a block. With EAGLE and windows under a sparse retention it is a block
    either way: windows are kept where whole blocks end.
    """
    windows = any(group.kind == "window" for group in config.groups)
    sparse = windows and config.eagle and config.retention is not None
    whole = sparse or not config.partial_hits
    radix = Radix.of(config.scheduler_block, config.hash_unit)
    return int(checkpoint_position(Position.on(prompt, radix), config.eagle, whole).value())


def drops(config: Config, group: Group) -> int:
    """How many tokens of what it matches a group drops for the drafter's sake.

    Only groups with draft layers do: those that are marked, or all but the recurrent ones where none is.
    """
    marked = any(other.drafter for other in config.groups)
    if not config.eagle or group.kind == "mamba" or (marked and not group.drafter):
        return 0
    return config.hash_unit if config.partial_hits and group.kind == "full" else group.block_size


def matches(config: Config, group: Group, prompt: int, shared: int) -> int:
    """How deep an attention group has a prompt's tokens for a lookup that shares ``shared`` of them: whole blocks, and
    with partial hits the prompt's last unit."""
    whole = shared // group.block_size * group.block_size
    if not config.partial_hits or group.kind != "full":
        return whole
    last = prompt if drops(config, group) else prompt - 1
    tail = last // config.hash_unit * config.hash_unit
    return max(whole, tail) if tail <= shared else whole


@dataclass
class Past:
    """What an earlier request did: a prompt of ``prompt`` tokens, computed from ``start`` on (up to there it was a hit)
    in chunks that ended at ``ends``, all of it."""

    prompt: int
    start: int = 0
    ends: list[int] = field(default_factory=list)


def kept(config: Config, past: Past) -> Iterator[tuple[int, bool]]:
    """Where states of this past stay, and whether only prompts that share the whole of it can count on one.

    The first is where it would be resumed itself. A past that started deeper than that left its state to others, and
    whoever sends the same prompt again starts there, too.
    """
    replay = replay_boundary(config, past.prompt)
    yield max(replay, past.start), config.eagle or past.start > replay
    for end in past.ends:
        if end % config.scheduler_block == 0 and interval_keeps(end, config.retention):
            yield end, False


def promised(config: Config, past: Past, shared: int, tokens: int) -> int:
    """How many tokens a lookup of ``tokens`` that shares the first ``shared`` with this past finds at least.

    ``shared`` is at most ``tokens``, and what is shared of the past is of its prompt. 0: nothing is promised.
    """
    shared = min(shared, past.prompt)
    best = 0
    for boundary, whole in kept(config, past):
        if boundary <= best or boundary >= tokens or boundary > shared or (whole and shared < past.prompt):
            continue
        if all(_covers(config, group, boundary, past.prompt, shared) for group in config.groups):
            best = boundary
    return best


def _covers(config: Config, group: Group, boundary: int, prompt: int, shared: int) -> bool:
    if group.kind == "mamba":
        return True
    return bool(serves(boundary, matches(config, group, prompt, shared), drops(config, group)))


def longest(config: Config, pasts: Sequence[tuple[Past, int]], tokens: int) -> tuple[int, int]:
    """The most that any of these pasts promises, each with how much of it is shared, and which (−1: none does)."""
    best, which = 0, -1
    for index, (past, shared) in enumerate(pasts):
        found = promised(config, past, shared, tokens)
        if found > best:
            best, which = found, index
    return best, which
