"""Hooks on one block pool: which blocks change, when their keys come and go, and what happened to them lately.

The methods wrapped are those through which every release from 0.26 to 0.33 changes a block: ``get_new_blocks``,
``touch``, ``free_blocks``, ``unpin_blocks``, ``reset_prefix_cache``, and the two that every key goes through
(``_insert_block_hash``, ``_remove_cached_block_hashes``). ``cache_full_blocks`` and ``cache_partial_block`` say whose
keys those are, so that they have a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvproof.impl.vllm.live.blockhistory import BlockHistory
from kvproof.impl.vllm.live.naming import Names
from kvproof.impl.vllm.live.overlay import wrap
from kvproof.spec.view import Holder

DUE = -1
"""When the content of a key was due that did not appear while a step was being scheduled."""


class PoolHooks:
    """``changes`` counts changes, ``touched`` collects the blocks they were made to until somebody clears it.

    ``inside`` is above 0 while a scheduler or manager is at work: what is taken meanwhile is theirs to account for.
    ``scheduling`` is the number of the step that is being scheduled, :data:`DUE` if none is.
    """

    def __init__(self, pool: Any, names: Names, history: BlockHistory) -> None:
        self.pool, self.names, self.history = pool, names, history
        self.changes = 0
        self.touched: set[int] = set()
        self.inside = 0
        self.scheduling = DUE
        self.keyed: dict[int, int] = {}
        """Block to the step in which its newest key appeared, as long as that step has not run."""
        self.stamps: dict[int, int] = {}
        """Block to the step since whose scheduling its references are what they are."""
        self.stamp = 0
        self.outside: dict[int, int] = {}
        """References taken on blocks by nobody's bookkeeping: by a test, or an operator."""
        self.who = ""
        self.on_key: Callable[[bool, bytes], None] | None = None
        self.on_reset: Callable[[], None] | None = None
        self.guard: Callable[..., None] = _plainly
        """Does work of ours, and lets nothing out that goes wrong in it."""
        self.undo: list[Callable[[], None]] = []
        for name in ("get_new_blocks", "touch", "free_blocks", "unpin_blocks", "reset_prefix_cache",
                     "cache_full_blocks", "cache_partial_block",
                     "_insert_block_hash", "_remove_cached_block_hashes"):  # fmt: skip
            wrap(pool, name, getattr(self, f"_on_{name.strip('_')}"), self.undo)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """A scheduler or manager works meanwhile."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def settled(self, step: int) -> None:
        """The step has run: the content of the keys that it made is due."""
        if self.keyed:
            self.keyed = {block: at for block, at in self.keyed.items() if at > step}

    def held_outside(self) -> Iterable[Holder]:
        return (Holder("call from outside", block) for block, n in self.outside.items() for _ in range(n))

    def _change(self, blocks: Iterable[Any], what: str, references: int) -> None:
        self.guard(self._changed, blocks, what, references)

    def _changed(self, blocks: Iterable[Any], what: str, references: int) -> None:
        self.changes += 1
        note, who, outside = self.history.note, self.who, not self.inside
        for block in blocks:
            if block.is_null:
                continue
            number = block.block_id
            self.touched.add(number)
            self.stamps[number] = self.stamp
            note(number, what, who)
            if references and (outside or number in self.outside):
                self._account(number, references, outside)

    def _account(self, block: int, references: int, outside: bool) -> None:
        left = self.outside.get(block, 0)
        if outside or (references < 0 and left):
            self.outside[block] = max(0, left + references)
            if not self.outside[block]:
                del self.outside[block]

    # -- the wrapped methods ------------------------------------------------------------------------------------------

    def _on_get_new_blocks(self, original: Any, num_blocks: int) -> Any:
        blocks = original(num_blocks)
        if blocks:
            self._change(blocks, "taken", 1)
        return blocks

    def _on_touch(self, original: Any, blocks: Any, *args: Any) -> Any:
        answer = original(blocks, *args)
        flat = [b for part in blocks for b in part] if blocks and isinstance(blocks[0], list | tuple) else blocks
        if flat:
            self._change(flat, "held", 1)
        return answer

    def _on_free_blocks(self, original: Any, ordered_blocks: Iterable[Any]) -> Any:
        blocks = list(ordered_blocks)
        answer = original(blocks)
        if blocks:
            self._change(blocks, "freed", -1)
        return answer

    def _on_unpin_blocks(self, original: Any, blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        listed = list(blocks)
        answer = original(listed, *args, **kwargs)
        self._change(listed, "freed", -1)
        return answer

    def _on_reset_prefix_cache(self, original: Any) -> Any:
        keyed = [block for block in self.pool.blocks if block.block_hash is not None]
        answer = original()
        if answer:
            self._change(keyed, "unkeyed", 0)
            self.keyed.clear()
            if self.on_reset is not None:
                self.on_reset()
        return answer

    def _on_cache_full_blocks(self, original: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.guard(self.about_to_key, request)
        return original(request, *args, **kwargs)

    _on_cache_partial_block = _on_cache_full_blocks

    def about_to_key(self, request: Any) -> None:
        self.who = request.request_id
        self.names.learn(request)

    def _on_insert_block_hash(self, original: Any, raw: bytes, block: Any, *args: Any, **kwargs: Any) -> Any:
        number = block.block_id
        known = block.block_hash == raw or self.pool.cached_block_hash_to_block.contain(raw, number)
        answer = original(raw, block, *args, **kwargs)
        if not known:  # otherwise nothing new is promised
            self.guard(self._keyed, number, raw)
        return answer

    def _keyed(self, number: int, raw: bytes) -> None:
        self.changes += 1
        self.touched.add(number)
        if self.scheduling != DUE:
            self.keyed[number] = self.scheduling
        self.history.note(number, "keyed", self.who, self.names.state(raw))
        if self.on_key is not None:
            self.on_key(True, bytes(raw))

    def _on_remove_cached_block_hashes(self, original: Any, block: Any) -> Any:
        removed = original(block)
        if removed:
            self.guard(self._unkeyed, block.block_id, removed)
        return removed

    def _unkeyed(self, number: int, removed: Sequence[bytes]) -> None:
        self.changes += 1
        self.touched.add(number)
        self.keyed.pop(number, None)
        self.history.note(number, "unkeyed", self.who, self.names.state(removed[0]))
        if self.on_key is not None:
            for raw in removed:
                self.on_key(False, bytes(raw))


def _plainly(work: Callable[..., None], *arguments: object) -> None:
    work(*arguments)
