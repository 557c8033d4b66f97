"""Which writes of a step others would see."""

from __future__ import annotations

from kvproof.spec.tracer import State, length_of
from kvproof.spec.view import View


def broken_keys(view: View, block: int) -> list[State]:
    """The keys of ``block`` that its content does not match now. What the view can't tell counts as right."""
    broken = []
    for key in view.keys(block):
        group, length = view.config.groups[key.group], length_of(key.state)
        if group.kind == "mamba":
            content = view.mamba_content(block)
            good = content is None or content.temporal == key.state
        else:
            prefix, tokens = view.prefix(key.state), view.attention_content(block, key.group)
            first = (length - 1) // group.block_size * group.block_size
            good = prefix is None or tokens is None or list(tokens[: length - first]) == list(prefix[first:length])
        if not good:
            broken.append(key.state)
    return broken


def sharers(view: View, block: int, writer: str, holders: set[str]) -> set[str]:
    """Those of ``holders`` who would see a write of ``writer``'s to ``block`` that they should not.

    An attention block that this very step completes and keys may be shared within the step: in every layer the keys and
    values are written before any are read. Recurrent blocks have no such order.
    """
    if len(holders) < 2 or not view.pending(block) or broken_keys(view, block):
        return holders
    recurrent = any(view.config.groups[key.group].kind == "mamba" for key in view.keys(block))
    return holders if recurrent else {writer}
