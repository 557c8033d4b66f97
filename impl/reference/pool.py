"""The pool: references, the free queue, and keys.

A block is in the free queue exactly while nobody counts on it. A free block keeps its keys, so that a later request can
hit it, until it is taken for something else. Blocks without a key are worth nothing to anybody and go to the front of
the queue; those with one go to its end. (As vLLM does from 0.28; before, all of them went to the end.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvproof.spec.tracer import State
from kvproof.spec.view import NULL

KeyName: TypeAlias = tuple[int, State]
"""Group and prefix: what a key says its block can be reused as."""


@dataclass(frozen=True)
class CacheEvent:
    """What whoever mirrors the cache (a router, a store) is told: a key was ``stored`` on a block, or ``removed``."""

    kind: Literal["stored", "removed"]
    block: int
    key: KeyName


class OutOfBlocks(Exception):
    """More blocks were taken than are free: admission let something in that it ought to have refused."""


class Pool:
    """``num_blocks`` blocks, of which block 0 is the null block: never counted, queued, keyed or handed out.

    ``announce`` hears of every key that comes or goes. ``touched`` collects the blocks whose references or keys
    changed, until somebody clears it; ``changes`` counts them, so that "nothing changed" can be asked at no cost.
    ``fresh`` collects what was handed out, for the device to clear.
    """

    def __init__(self, num_blocks: int, announce: Callable[[CacheEvent], None]) -> None:
        self.references = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.keys: list[dict[KeyName, None]] = [{} for _ in range(num_blocks)]
        self.index: dict[KeyName, dict[int, None]] = {}
        self.touched: set[int] = set()
        self.changes = 0
        self.fresh: list[int] = []
        self._announce = announce

    # -- references ---------------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """The first ``count`` blocks of the free queue, each with one reference and without its keys."""
        if count > len(self.free):
            raise OutOfBlocks(f"{count} blocks are wanted and {len(self.free)} are free")
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self.forget(block)
            self.references[block] += 1
            self._touch(block)
        self.fresh += taken
        return taken

    def hold(self, block: int) -> None:
        """One more reference. A free block leaves the queue and keeps its keys: that is what a hit does."""
        if block == NULL:
            return
        if self.references[block] == 0:
            del self.free[block]
        self.references[block] += 1
        self._touch(block)

    def release(self, block: int) -> None:
        """One reference less. At none the block is free, and the sooner taken the less it is worth."""
        if block == NULL:
            return
        self.references[block] -= 1
        self._touch(block)
        if self.references[block] == 0:
            self.free[block] = None
            if not self.keys[block]:
                self.free.move_to_end(block, last=False)

    # -- keys ---------------------------------------------------------------------------------------------------------

    def register(self, block: int, key: KeyName) -> None:
        """``block`` can be reused as ``key``. Its content must be there already."""
        if key not in self.keys[block]:
            self.keys[block][key] = None
            self.index.setdefault(key, {})[block] = None
            self._touch(block)
            self._announce(CacheEvent("stored", block, key))

    def forget(self, block: int) -> None:
        """The block loses its keys: it is about to hold something else."""
        for key in self.keys[block]:
            blocks = self.index[key]
            del blocks[block]
            if not blocks:
                del self.index[key]
            self._announce(CacheEvent("removed", block, key))
        if self.keys[block]:
            self.keys[block] = {}
            self._touch(block)

    def find(self, key: KeyName) -> int | None:
        """A block that can be reused as ``key``, the earliest registered; ``None`` if there is none."""
        blocks = self.index.get(key)
        return next(iter(blocks)) if blocks else None

    def evict(self, blocks: Iterable[int]) -> None:
        """Free blocks lose their keys (and with them their place at the end of the queue)."""
        for block in blocks:
            self.forget(block)
            self.free.move_to_end(block, last=False)

    def _touch(self, block: int) -> None:
        self.touched.add(block)
        self.changes += 1
