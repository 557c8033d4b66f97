"""What a router hears of a cache: the batches that the scheduler publishes, replayed as whoever mirrors them does.

Events name keys by their hash and group, not by block: a key is cached or it is not. What a hash stands for can be
read off it, since the requests' keys are made to be decodable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from kvproof.impl.vllm.cacheview import CacheView
from kvproof.spec.events import Removed, Stored
from kvproof.spec.tracer import EMPTY, State, advance, decode_key, length_of

Named = tuple[int, bytes]
"""A key as events name it: its group (−1: not said) and the prefix hash."""

OWN = (None, "GPU")
"""The media of the cache itself. What is offloaded is another matter: it is announced, and not replayed here."""

_BITS = 64


class CacheEvents:
    """Listens to one scheduler's publisher, and knows what a router would take for cached.

    ``step_over`` and ``in_the_end`` return what was published since, judged against the cache as it is then; the view
    asks :meth:`announced`.
    """

    def __init__(self, scheduler: Any, view: CacheView) -> None:
        self._view = view
        self._pool = view.pool
        self._told: set[Named] = set()
        self._heard: list[Any] = []
        self._offloaded: list[Any] = []
        self._carried: dict[int, set[Named]] = {}
        publisher = scheduler.kv_event_publisher
        publish = publisher.publish

        def heard(batch: Any) -> None:
            for event in batch.events:
                if getattr(event, "medium", None) in OWN:
                    self._heard.append(event)
                elif getattr(event, "block_size", 0):  # 0: it says which keys they are and no more
                    self._offloaded.append(event)
            publish(batch)

        publisher.publish = heard
        view.listener = self

    def step_over(self) -> list[Stored | Removed]:
        """The step's events are out: replay them."""
        events, self._heard = self._heard, []
        offloaded, self._offloaded = self._offloaded, []
        read = [self._read(event, [(0, _bytes(each)) for each in event.block_hashes], True) for event in offloaded]
        return [*self._replay(events), *read]

    def in_the_end(self) -> list[Stored | Removed]:
        """The run is over: what is queued would go out with the next step."""
        return self._replay([*self._heard, *self._pool.kv_event_queue])

    def announced(self, block: int) -> Collection[tuple[int, State]]:
        """The keys that a router takes for cached, and that ``block`` carries or was the last to carry."""
        there = {_named(raw) for raw in self._view.raw_keys(block)}
        left = {key for key in self._carried.get(block, ()) if key in self._told and not self._blocks(key)}
        self._carried[block] = there | left
        return {(group, decode_key(key)) for group, key in (there & self._told) | left}

    # -- replaying ----------------------------------------------------------------------------------------------------

    def _replay(self, events: Iterable[Any]) -> list[Stored | Removed]:
        stored: list[tuple[Any, list[Named]]] = []
        last: dict[Named, bool] = {}
        for event in events:
            name = type(event).__name__
            if name == "AllBlocksCleared":
                self._told.clear()
                last.clear()
            elif name == "BlockStored":
                keys = [(_group(event), _bytes(each)) for each in event.block_hashes]
                stored.append((event, keys))
                last.update(dict.fromkeys(keys, True))
            elif name == "BlockRemoved":
                last.update(dict.fromkeys(((_group(event), _bytes(each)) for each in event.block_hashes), False))
        answers: list[Stored | Removed] = []
        for key, there in last.items():
            carriers = self._blocks(key)
            if not there:
                answers.append(Removed(key[0], decode_key(key[1]), carriers))
            # One who forgets it although a block carries it is told apart by the answer, and here left as he should be.
            if there or carriers:
                self._told.add(key)
            else:
                self._told.discard(key)
            self._view.touch(carriers)
        for event, keys in stored:
            gone = [key for key in keys if last.get(key) and not self._blocks(key)]
            answers.append(replace(self._read(event, keys), gone=tuple(decode_key(key) for _, key in gone)))
            self._told.difference_update(gone)
        return answers

    def _read(self, event: Any, keys: list[Named], offloaded: bool = False) -> Stored:
        parent = EMPTY if event.parent_block_hash is None else self._known(_bytes(event.parent_block_hash))
        reached: list[State] = []
        if parent is not None:
            state = parent
            for position, token in enumerate(event.token_ids, 1):
                state = advance(state, token)
                if position % event.block_size == 0:
                    reached.append(state)
        return Stored(
            group=_group(event),
            keys=tuple(self._known(key) for _, key in keys),
            parent=parent,
            tokens=len(event.token_ids),
            block_size=event.block_size,
            reached=tuple(reached),
            offloaded=offloaded,
        )

    def _known(self, key: bytes) -> State | None:
        """What the hash stands for; ``None`` where no request ever had such a prefix."""
        state = decode_key(key)
        return state if length_of(state) and state in self._view.known else None

    def _blocks(self, key: Named) -> tuple[int, ...]:
        """The blocks that a lookup of the key could return."""
        group, name = key
        groups = range(len(self._view.config.groups)) if group < 0 else (group,)
        found: list[int] = []
        for each in groups:
            value = self._pool.cached_block_hash_to_block._cache.get(name + each.to_bytes(4, "big"))
            blocks = value.values() if isinstance(value, dict) else () if value is None else (value,)
            found += [block.block_id for block in blocks]
        return tuple(found)


def _named(raw: bytes) -> Named:
    return int.from_bytes(raw[32:36], "big"), raw[:32]


def _group(event: Any) -> int:
    group = getattr(event, "group_idx", None)
    return -1 if group is None else int(group)


def _bytes(key: bytes | int) -> bytes:
    """A hash as it is published: the bytes themselves, or the number that their last 64 bits are."""
    return key if isinstance(key, bytes) else (key & ((1 << _BITS) - 1)).to_bytes(32, "big")
