"""Runs inside one release: its own scheduler, its own lookups, and what :mod:`kvproof.impl.vllm.live.why` says of each.

``python tests/why_plays.py`` with the release on ``PYTHONPATH``. Prints one JSON object: per play and request, what was
said of each of its lookups.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from kvproof.impl.vllm.live.why import KeyHistory, explain, never_hits
from kvproof.spec.config import Config, Group
from kvproof.spec.scenario import Action


def config(*groups: Group, unit: int = 64, **changes: Any) -> Config:
    settings: dict[str, Any] = {"num_blocks": 200, "step_tokens": 512, "max_model_len": 2048, "retention": 0}
    return Config(groups=groups or (Group("full", 64), Group("mamba", 64)), hash_unit=unit, **{**settings, **changes})


def submit(name: str, length: int, base: str = "", shared: int = 0, **more: Any) -> Action:
    return Action("submit", name, base=base, shared=shared, length=length, max_tokens=2, **more)


@dataclass(frozen=True)
class Unkey:
    """The group's blocks lose their keys, or those of ``tokens`` tokens only."""

    group: int
    tokens: int = 0


STEPS = Action("step", times=8)
FINE = (Group("full", 16), Group("mamba", 64))
WINDOWED = (Group("full", 64), Group("window", 64, window=100))
DRAFTED = (Group("full", 16), Group("mamba", 64), Group("full", 16, drafter=True))
TOGETHER = (Group("full", 64, drafter=True), Group("mamba", 64))
"""As MTP heads have it that reuse the model's own kind of layer: both are in one group, and it is flagged."""
EAGLE: dict[str, Any] = {"eagle": True, "speculative": 1}
STORE: dict[str, Any] = {**EAGLE, "connector": "sync"}
"""From 0.33 on a hit is dropped for the drafter only where there is a connector."""

PLAYS: dict[str, tuple[Config, tuple[Action | Unkey, ...]]] = {
    "prompt shorter than a block": (config(), (submit("a", 40), STEPS, submit("b", 40, "a", 40), STEPS)),
    "shared part shorter than a block": (config(), (submit("a", 200), STEPS, submit("b", 200, "a", 40), STEPS)),
    "shared part shorter than a block, units finer": (
        config(*FINE, unit=16),
        (submit("a", 200), STEPS, submit("b", 200, "a", 56), STEPS),
    ),
    "state in the unique part": (
        config(retention=None),
        (submit("a", 400), STEPS, submit("b", 400, "a", 200), STEPS, submit("c", 400, "a", 200), STEPS),
    ),
    "divergence in the middle": (
        config(),
        (submit("a", 400), STEPS, submit("b", 400, "a", 200), STEPS, submit("c", 400, "a", 200), STEPS),
    ),
    "one state per 256 tokens": (
        config(retention=256, step_tokens=64),
        (submit("a", 600), Action("step", times=16), submit("b", 600, "a", 450), STEPS),
    ),
    "drafter as a veto": (
        config(*DRAFTED, unit=16, **EAGLE),
        (submit("a", 200), STEPS, Unkey(2), submit("b", 200, "a", 200), STEPS),
    ),
    "eagle": (
        config(Group("full", 64), **STORE, retention=None),
        (submit("a", 128), STEPS, submit("b", 200, "a", 128), STEPS),
    ),
    "drafter's layer in the model's own group": (
        config(*TOGETHER, **STORE),
        (submit("a", 100), STEPS, submit("b", 100, "a", 100), STEPS),
    ),
    "attention evicted, drafter's layer in its group": (
        config(*TOGETHER, **STORE),
        (submit("a", 400), STEPS, Unkey(0), submit("b", 400, "a", 400), STEPS),
    ),
    "evicted": (
        config(),
        (submit("a", 400), STEPS, Unkey(1), submit("b", 400, "a", 400), STEPS),
    ),
    "evicted, a state below left": (
        config(retention=None, step_tokens=64),
        (submit("a", 400), STEPS, Unkey(1, 384), submit("b", 400, "a", 400), STEPS),
    ),
    "window evicted": (
        config(*WINDOWED, retention=None),
        (submit("a", 400), STEPS, Unkey(1, 384), submit("b", 400, "a", 400), STEPS),
    ),
    "window evicted, one block of it": (
        config(*WINDOWED, retention=None),
        (submit("a", 400), STEPS, Unkey(1, 320), submit("b", 400, "a", 400), STEPS),
    ),
    "window evicted in the unit to drop": (
        config(*WINDOWED, retention=None, **STORE),
        (submit("a", 400), STEPS, Unkey(1, 192), submit("b", 400, "a", 200), STEPS),
    ),
    "tail evicted": (
        config(unit=16),
        (submit("a", 440), STEPS, Unkey(1, 432), submit("b", 440, "a", 440), STEPS),
    ),
    "state in the unit to drop": (
        config(retention=None, step_tokens=192, **STORE),
        (submit("a", 400), STEPS, submit("b", 400, "a", 200), STEPS),
    ),
    "eagle, units finer": (
        config(*FINE, unit=16, retention=None, step_tokens=64, **STORE),
        (submit("a", 400), STEPS, submit("b", 400, "a", 80), STEPS),
    ),
    "window never kept": (
        config(*WINDOWED),
        (submit("a", 400), STEPS, submit("b", 400, "a", 200), STEPS),
    ),
    "pending": (
        config(step_tokens=256, long_prefill_threshold=128),
        (submit("a", 400), submit("b", 400, "a", 400), STEPS),
    ),
    "pending, drafted": (
        config(step_tokens=256, long_prefill_threshold=128, **STORE),
        (submit("a", 400), submit("b", 400, "a", 400), STEPS),
    ),
    "running, but ends elsewhere": (
        config(step_tokens=256, long_prefill_threshold=128),
        (submit("a", 400), submit("b", 400, "a", 200), STEPS),
    ),
    "given up": (
        config(step_tokens=128),
        (submit("a", 400), Action("step"), Action("abort", "a"), submit("b", 400, "a", 400), STEPS),
    ),
    "junction pending": (
        config(step_tokens=256, long_prefill_threshold=128),
        (submit("a", 400), STEPS, submit("c", 400, "a", 200), submit("b", 400, "a", 200), STEPS),
    ),
    "a latest prompt that shares less": (
        config(*FINE, unit=16),
        (submit("a", 400), STEPS, submit("c", 40, "a", 16), STEPS, submit("b", 200, "a", 56), STEPS),
    ),
    "alignment": (
        config(*FINE, unit=16, retention=None, step_tokens=64),
        (submit("a", 400), STEPS, submit("b", 400, "a", 180), STEPS),
    ),
    "store shorter": (
        config(connector="sync"),
        (submit("a", 400), STEPS, Unkey(1), submit("b", 400, "a", 400, external=128), STEPS),
    ),
    "healthy": (
        config(),
        (submit("a", 400), STEPS, submit("b", 400, "a", 400), STEPS, submit("c", 700, "b", 400), STEPS,
         submit("new", 400), STEPS),
    ),
    "healthy, units finer": (
        config(*FINE, unit=16, step_tokens=1024),
        (submit("a", 400), STEPS, submit("b", 400, "a", 400), STEPS, submit("short", 40), STEPS,
         submit("again", 40, "short", 40), STEPS, submit("new", 400), STEPS),
    ),
    "healthy, drafted": (
        config(*DRAFTED, unit=16, **EAGLE),
        (submit("a", 200), STEPS, submit("new", 200), STEPS),
    ),
    "store reaches further": (
        config(connector="sync"),
        (submit("a", 400), STEPS, Unkey(1), submit("b", 400, "a", 400, external=400), STEPS),
    ),
    "two at once": (config(), (submit("a", 385), submit("b", 385, "a", 385), STEPS)),
    "no prompt is long enough": (config(max_model_len=64), (submit("a", 63), STEPS, submit("b", 63, "a", 63), STEPS)),
    "just long enough": (config(max_model_len=66), (submit("a", 65), STEPS, submit("b", 65, "a", 65), STEPS)),
    "long enough but for the drop": (
        config(Group("full", 64), **STORE, max_model_len=128),
        (submit("a", 127), STEPS, submit("b", 127, "a", 127), STEPS),
    ),
    "attention evicted as well": (
        config(), (submit("a", 400), STEPS, Action("evict", times=0), submit("b", 400, "a", 400), STEPS),
    ),
}  # fmt: skip


def hook(pool: Any, history: KeyHistory) -> None:
    """Tell the history what the pool keys and unkeys: all keys go through these two methods."""
    insert, remove = pool._insert_block_hash, pool._remove_cached_block_hashes

    def inserted(key: bytes, *args: Any, **kwargs: Any) -> None:
        insert(key, *args, **kwargs)
        history.registered(int.from_bytes(key[-4:], "big"), bytes(key[:-4]))

    def removed(block: Any) -> Any:
        keys = remove(block)
        for key in keys:
            history.removed(int.from_bytes(key[-4:], "big"), bytes(key[:-4]))
        return keys

    pool._insert_block_hash, pool._remove_cached_block_hashes = inserted, removed


def unkey(pool: Any, what: Unkey) -> None:
    mine = [b for b in pool.blocks if b.block_hash is not None and b.block_hash[-4:] == what.group.to_bytes(4, "big")]
    blocks = [b for b in mine if not what.tokens or b.block_hash_num_tokens == what.tokens]
    assert blocks
    pool.evict_blocks({block.block_id for block in blocks})


def play(subject: Any, settings: Config, actions: tuple[Action | Unkey, ...]) -> dict[str, Any]:
    driver = subject.start(settings, None)
    manager, said, history = driver.scheduler.kv_cache_manager, {}, KeyHistory()
    hook(manager.block_pool, history)
    schedule, look_up = driver.scheduler.schedule, manager.get_computed_blocks

    def scheduled(*args: Any) -> Any:
        history.step_starts()
        return schedule(*args)

    def looked_up(request: Any, *args: Any, **kwargs: Any) -> Any:
        answer = look_up(request, *args, **kwargs)
        last[:] = [request, answer[1]]
        if settings.connector == "none":
            note(*last)
        return answer

    def note(request: Any, answered: int, external: int | None = None) -> None:
        miss = explain(manager, request, answered, history, external=external)
        found = {**dataclasses.asdict(miss), "line": miss.line(), "lost": miss.lost} if miss is not None else None
        less = explain(manager, request, 0, history)  # as if the release had found nothing
        told = {"answered": answered, "miss": found, "of nothing": less.rule if less is not None else None}
        said.setdefault(request.request_id, []).append(told)

    ask_store, last = driver.store.offer, []

    def asked_store(request: str, *args: Any) -> int:
        offered = int(ask_store(request, *args))
        note(*last, offered)
        return offered

    driver.scheduler.schedule, manager.get_computed_blocks, driver.store.offer = scheduled, looked_up, asked_store
    for action in actions:
        if isinstance(action, Unkey):
            unkey(manager.block_pool, action)
        else:
            assert driver.apply(action)
    assert not driver.dead
    return {**said, "never": never_hits(manager)}


def main() -> None:
    from kvproof.impl.vllm.subject import VllmSubject

    subject = VllmSubject(None, "vllm")
    print(json.dumps({name: play(subject, *it) for name, it in PLAYS.items()}))


if __name__ == "__main__":
    main()
