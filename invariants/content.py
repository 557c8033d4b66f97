"""What a block holds, compared with what was promised: in words that stay the same for the same fault."""

from __future__ import annotations

from dataclasses import dataclass

from kvproof.spec.config import Group
from kvproof.spec.tracer import EMPTY, State, length_of, show
from kvproof.spec.view import Key, View


@dataclass(frozen=True)
class Mismatch:
    """``cause`` is a slug, ``witness`` names promised and found."""

    cause: str
    witness: str


def relation(view: View, promised: State, found: State | None) -> str:
    """How a wrong state relates to the promised one.

    ``missing``: nothing was ever written. ``stale``: an earlier state of the same prefix. ``overrun``: a later state of
    a sequence that goes through the promised one. ``foreign``: another prefix.
    """
    if found is None:
        return "missing"
    if length_of(found) < length_of(promised):
        way = view.prefix(promised)
        if found == EMPTY or (way is not None and way[length_of(found) - 1] == found):
            return "stale"
    elif length_of(found) > length_of(promised):
        way = view.prefix(found)
        if way is not None and way[length_of(promised) - 1] == promised:
            return "overrun"
    return "foreign"


def key_kind(key: Key, group: Group) -> str:
    """``full`` or ``partial`` for recurrent groups, ``attention`` for the others."""
    if group.kind != "mamba":
        return "attention"
    return "partial" if length_of(key.state) % group.block_size else "full"


def key_mismatch(view: View, block: int, key: Key) -> Mismatch | bool:
    """Why ``block`` does not hold what ``key`` promises. ``True``: it does. ``False``: the subject can't tell."""
    group = view.config.groups[key.group]
    if group.kind == "mamba":
        return _state_mismatch(view, block, key, group)
    return _tokens_mismatch(view, block, key, group)


def _state_mismatch(view: View, block: int, key: Key, group: Group) -> Mismatch | bool:
    content = view.mamba_content(block)
    if content is None:
        return False
    window = content.window[0] if content.window else None
    if content.temporal == key.state and window == key.state:
        return True
    kind = key_kind(key, group)
    promise = f"block {block} is keyed as {show(key.state)} for group {key.group} but"
    if content.temporal != key.state:
        how = relation(view, key.state, content.temporal)
        return Mismatch(f"{kind}-key-{how}", f"{promise} holds {show(content.temporal)}")
    # How far off the window is depends on the run, not on the fault: one cause.
    return Mismatch("key-window-wrong", f"{promise} its convolution window is that of {show(window)}")


def _tokens_mismatch(view: View, block: int, key: Key, group: Group) -> Mismatch | bool:
    """The key after n tokens covers the positions of its own block up to n − 1; what lies beyond is free."""
    content = view.attention_content(block, key.group)
    if content is None:
        return False
    prefix = view.prefix(key.state)
    promise = f"block {block} is keyed as {show(key.state)} for group {key.group} but"
    if prefix is None:
        return Mismatch("attention-key-of-no-request", f"{promise} no request has that prefix")
    end = length_of(key.state)
    first = (end - 1) // group.block_size * group.block_size
    wanted = prefix[first:end]
    found = content[: end - first]
    if list(found) == list(wanted):
        return True
    for offset, promised in enumerate(wanted):
        there = found[offset] if offset < len(found) else None
        if there != promised:
            how = "missing" if there is None else token_relation(promised, there)
            return Mismatch(
                f"attention-key-{how}",
                f"{promise} at position {first + offset} it holds {show(there)} instead of {show(promised)}",
            )
    return True


def token_relation(promised: State, found: State) -> str:
    """``position`` where a key/value of another position lies there, ``foreign`` where that of another prefix does."""
    return "position" if length_of(promised) != length_of(found) else "foreign"
