"""Small worlds that the Promela model and the abstract machine both visit whole, and the words in which it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvproof.models.explore.scope import Prompt, Scope
from kvproof.spec.config import Config, Group
from kvproof.spec.machine.dialect import SPECIFICATION

_CONFIG = Config(
    groups=(Group("full", 2), Group("mamba", 2)),
    num_blocks=6,
    hash_unit=1,
    step_tokens=3,
    max_running=2,
    max_model_len=8,
    retention=0,
)

WORLDS: dict[str, Scope] = {
    scope.name: scope
    for scope in (
        # Hits end inside blocks: shared tails are copied before they are written.
        Scope("inside", _CONFIG, (Prompt(2), Prompt(3, 0, 2))),
        # Blocks of four units: a tail lies anywhere in one.
        Scope("wide", replace(_CONFIG, groups=(Group("full", 4), Group("mamba", 4)), step_tokens=8, max_model_len=12),
              (Prompt(2), Prompt(6, 0, 1))),
        # Hits end at blocks' ends only.
        Scope("whole", replace(_CONFIG, num_blocks=5, hash_unit=2, step_tokens=4), (Prompt(2), Prompt(3, 0, 2)),
              outputs=2),
        # Two may enter whom the pool does not hold to their end: one gives way within a step.
        Scope("crowded", replace(_CONFIG, num_blocks=5, step_tokens=4), (Prompt(2), Prompt(3, 0, 2)), outputs=2),
        # Both prompts take several steps.
        Scope("prefills", _CONFIG, (Prompt(3), Prompt(4, 0, 2))),
        # Two run at once and count on the same blocks.
        Scope("shared", replace(_CONFIG, num_blocks=7, hash_unit=2, step_tokens=4), (Prompt(3), Prompt(4, 0, 3)),
              outputs=2, moves=frozenset({"abort"})),
        # One request at a time that puts out enough to outgrow its states.
        Scope("alone", replace(_CONFIG, num_blocks=5, step_tokens=4), (Prompt(3), Prompt(4, 0, 3)), requests=1,
              outputs=4),
        # As crowded, with a block more: the most states, for the sake of speeds.
        Scope("roomy", replace(_CONFIG, step_tokens=4), (Prompt(2), Prompt(3, 0, 2)), outputs=2),
    )
}  # fmt: skip
"""Without symmetry: blocks have their names, and each order of the free queue is a state of its own."""


def definitions(scope: Scope) -> Mapping[str, int]:
    """The macros that make ``cache.pml`` this world.

    Raises :class:`ValueError` for worlds that the model does not have.
    """
    config = scope.config
    kinds = [group.kind for group in config.groups]
    sizes = {group.block_size for group in config.groups}
    reason = (
        "groups other than one full-attention and one recurrent one, in this order, of one block size"
        if kinds != ["full", "mamba"] or len(sizes) > 1
        else "drafts, a store, a retention interval other than 0, a gate that is off or a limit on long prefills"
        if config.speculative
        or config.connector != "none"
        or config.retention != 0
        or not config.full_sequence_must_fit
        or config.long_prefill_threshold
        else "prompts other than two, of which the second begins like the first and then goes on by itself"
        if not _two_prompts(scope)
        else "dialect but the specification's"
        if scope.dialect != SPECIFICATION
        else "moves other than abort, preempt and evict"
        if not scope.moves <= {"abort", "preempt", "evict"}
        else "more requests than two, more blocks than eight or more columns than four"
        if scope.requests > 2 or config.num_blocks > 8 or _longest(scope) > 4 * sizes.pop()
        else ""
    )
    if reason:
        raise ValueError(f"the Promela model has no {reason}")
    first, second = scope.prompts
    return {
        "BLOCKS": config.num_blocks, "BLOCK": config.mamba_block, "UNIT": config.hash_unit, "STEP": config.step_tokens,
        "RUNNING": config.max_running, "MODEL": config.max_model_len, "REQUESTS": scope.requests,
        "OUTPUTS": scope.outputs, "LEN0": first.length, "LEN1": second.length, "SHARED": second.shared,
        **{move.upper(): 1 for move in sorted(scope.moves)},
    }  # fmt: skip


def _two_prompts(scope: Scope) -> bool:
    if len(scope.prompts) != 2:
        return False
    first, second = scope.prompts
    return first.base < 0 and second.base == 0 and 0 <= second.shared <= first.length and second.shared < second.length


def _longest(scope: Scope) -> int:
    return min(scope.config.max_model_len, max(prompt.length for prompt in scope.prompts) + scope.outputs)
