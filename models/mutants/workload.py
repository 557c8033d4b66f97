"""What a live engine is put through to see whether its assertions notice a fault: fixed, and the same on any machine.

The same conversation (:func:`crowd`) is held under configurations that differ in what is on, with sizes small enough
that every few tokens cross a boundary; what it does not come across has a scenario of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvproof.spec.config import Config, Group
from kvproof.spec.rules.blocks import peak_blocks
from kvproof.spec.scenario import Action, Scenario

_HYBRID = (Group("full", 4), Group("mamba", 8))
_TWO_STATES = (Group("full", 4), Group("mamba", 8), Group("mamba", 8))
_WINDOWS = (Group("full", 8), Group("window", 2, window=6), Group("mamba", 8))
_EAGLE = (Group("full", 4, drafter=True), Group("mamba", 8))
_EAGLE_WINDOW = (Group("full", 8), Group("mamba", 8), Group("window", 2, window=5, drafter=True))
_ATTENTION = (Group("full", 4), Group("window", 4, window=9))

_PLAIN = Config(_HYBRID, num_blocks=120, hash_unit=2, step_tokens=24, max_running=4)

CONFIGURATIONS: dict[str, Config] = {
    "chunks": replace(_PLAIN, step_tokens=11, retention=None),
    "chunks below a block": replace(_PLAIN, step_tokens=7),
    "one block at a time": replace(_PLAIN, long_prefill_threshold=8, retention=16),
    "whole blocks only": replace(_PLAIN, hash_unit=4, groups=(Group("full", 4), Group("mamba", 4)), retention=None),
    "drafts": replace(_PLAIN, speculative=3, retention=None),
    "EAGLE": replace(_PLAIN, groups=_EAGLE, speculative=2, eagle=True, step_tokens=13),
    "EAGLE in a window": replace(_PLAIN, groups=_EAGLE_WINDOW, speculative=2, eagle=True),
    "checkpoints": replace(_PLAIN, checkpoint_blocks=1, checkpoint_alignment=2, step_tokens=40),
    "checkpoints and drafts": replace(
        _PLAIN, groups=_TWO_STATES, checkpoint_blocks=1, checkpoint_alignment=2, speculative=2, step_tokens=19
    ),
    "windows": replace(_PLAIN, groups=_WINDOWS, step_tokens=17, retention=None),
    "attention only": replace(_PLAIN, groups=_ATTENTION, hash_unit=4),
    "asynchronous store": replace(_PLAIN, connector="async", load_steps=3, retention=None),
    "asynchronous store, groups apart": replace(
        _PLAIN, groups=_TWO_STATES, connector="async", load_steps=2, divergent_hits=True
    ),
    "synchronous store": replace(_PLAIN, connector="sync", divergent_hits=True, speculative=1),
}
"""What is on, by name. Pools are roomy; :func:`workload` holds the same in tight ones, too."""


def new(name: str, length: int, out: int, store: int = 0, missing: int = 0) -> Action:
    """A request with a prompt that nobody has sent."""
    return Action("submit", name, length=length, max_tokens=out, external=store, missing=missing)


def after(name: str, base: str, shared: int, length: int, out: int, store: int = 0, missing: int = 0) -> Action:
    """A request whose first ``shared`` tokens are those of ``base``."""
    return Action("submit", name, base, shared, length, out, store, missing)


def step(times: int, *accept: int) -> Action:
    return Action("step", times=times, accept=accept)


def crowd(config: Config) -> Iterator[Action]:
    """Conversations that share prefixes: follow-ups, siblings that part at every kind of position, some of them aborted
    while they run or load, between resets. Stores hold more, less and as much as the cache, and lose some of it."""
    block, unit, stored = config.scheduler_block, config.hash_unit, config.connector != "none"
    cuts = (block, 2 * block + unit, 3 * block, 3 * block - 1, 4 * block + unit, unit, 2 * block - unit, 4 * block + 1)
    accepts = ((), (0,), (1, 0), (config.speculative,))
    for turn, cut in enumerate(cuts):
        base, sibling, third, other = f"a{turn}", f"b{turn}", f"c{turn}", f"d{turn}"
        length = 4 * block + (0, 1, unit, unit + 1, block - 1, 2 * unit)[turn % 6]
        held = length // block * block if stored else 0
        accept = accepts[turn % 4]
        yield new(base, length, unit + 2 + turn, held if turn % 3 == 1 else 0, block if turn % 6 == 4 else 0)
        yield step(2 + turn % 3, *accept)
        yield after(sibling, base, min(cut, length), length + block - 1, block, held if turn % 2 else 0)
        yield step(1)
        if turn % 4 == 1:
            yield Action("abort", sibling)
        yield after(third, base, min(cut, length), min(cut, length) + 2 * block, 2, held, unit if turn % 2 else 0)
        yield step(3, *accept)
        yield after(other, base, length + unit + 2, length + 2 * block + unit, 2 * block)
        yield step(2 + turn % 4, *accepts[(turn + 1) % 4])
        if turn % 4 == 1:
            yield Action("abort", other)
        if turn % 4 == 3:
            yield Action("finish", sibling)
        yield step(12 if turn % 2 else 40, *accepts[(turn + 2) % 4])
        yield after(f"f{turn}", base, length, length, 1)
        yield after(f"e{turn}", other, 5 * block, 5 * block + unit + 1, block)
        yield step(1)
        if turn == 5:
            yield step(60)
            yield Action("reset")


def _full_of_loads() -> Scenario:
    """Two requests with long loads that fill the pool between them: the second one's must yield, or nobody goes on."""
    groups = (Group("full", 4), Group("mamba", 4))
    config = Config(groups, num_blocks=77, hash_unit=4, step_tokens=12, speculative=1, connector="async")
    return Scenario(config, (new("a", 129, 4, 68), new("b", 157, 1, 156), step(11)), "a pool full of loads")


def _long_prompt_in_windows() -> Scenario:
    """A prompt whose window blocks would fill the pool if none were given back: it fits, since they are."""
    config = replace(_PLAIN, groups=_ATTENTION, hash_unit=4, num_blocks=30, max_running=2)
    return Scenario(config, (new("a", 72, 4), step(8)), "a long prompt in windows")


def workload() -> tuple[Scenario, ...]:
    """Every scenario, the plainest first."""
    scenarios = [_full_of_loads(), _long_prompt_in_windows()]
    for pool in ("roomy", "pressed", "tight"):
        for name, config in CONFIGURATIONS.items():
            peak = peak_blocks(config, 8 * config.scheduler_block)
            blocks = {"roomy": config.num_blocks, "pressed": 2 * peak, "tight": peak + 1}[pool]
            sized = replace(config, num_blocks=max(blocks, config.smallest_pool()))
            scenarios.append(Scenario(sized, tuple(crowd(sized)), f"{name}, {pool} pool"))
    return tuple(scenarios)
