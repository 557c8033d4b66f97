"""Block to its holders, kept up with the managers' tables as far as requests are said to have changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvproof.spec.view import Holder


class Holdings:
    """An index over the tables of ``managers`` (one per group). A table is read again when :meth:`follow` names its
    request: what nobody touched costs nothing."""

    def __init__(self, managers: Sequence[Any]) -> None:
        self._managers = managers
        self._tables: dict[tuple[str, int], list[int]] = {}
        self._by_block: dict[int, list[Holder]] = {}

    def of(self, block: int) -> Sequence[Holder]:
        return self._by_block.get(block, ())

    def table(self, request: str, group: int) -> Sequence[int]:
        return self._tables.get((request, group), ())

    def follow(self, requests: Iterable[str]) -> None:
        """Read the tables of these requests again."""
        for group, manager in enumerate(self._managers):
            tables = manager.req_to_blocks
            for name in requests:
                self._follow(name, group, tables.get(name, ()))

    def follow_all(self) -> None:
        """Read every table again."""
        known = {name for name, _ in self._tables}
        self.follow(known | {name for manager in self._managers for name in manager.req_to_blocks})

    def _follow(self, name: str, group: int, blocks: Sequence[Any]) -> None:
        now = [block.block_id for block in blocks]
        before = self._tables.get((name, group))
        if before == now:
            return
        old = before or []
        start = 0
        if len(old) <= len(now) and now[: len(old)] == old:  # tables grow at their end
            start = len(old)
        else:
            for block in old:
                self._drop(block, name, group)
        owner = f"table {name}/{group}"
        for slot in range(start, len(now)):
            if not blocks[slot].is_null:
                self._by_block.setdefault(now[slot], []).append(Holder(owner, now[slot], name, group, slot))
        if now:
            self._tables[name, group] = now
        else:
            self._tables.pop((name, group), None)

    def _drop(self, block: int, name: str, group: int) -> None:
        holders = self._by_block.get(block)
        if holders is None:
            return
        left = [holder for holder in holders if holder.request != name or holder.group != group]
        if left:
            self._by_block[block] = left
        else:
            del self._by_block[block]
