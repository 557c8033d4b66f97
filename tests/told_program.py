"""What a release announces and promises, run inside a process that has imported it: ``told_program.py RELEASE``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from kvproof import subjects
from kvproof.models.stateful.drive import Run, standard_watchers
from kvproof.spec.config import Config, Group
from kvproof.spec.scenario import Action, Scenario
from kvproof.spec.subject import Subject

HYBRID = (Group("full", 16), Group("mamba", 16))
SMALL = (Group("full", 4), Group("mamba", 4))

EVENTS = Config(groups=HYBRID, num_blocks=64, hash_unit=16, step_tokens=48, retention=None, cache_events=True)
SPARSE = Scenario(EVENTS, (Action("submit", "r1", length=49, max_tokens=1), Action("step", times=3)))
"""A chunk of three blocks, of which the recurrent group keeps the last."""

PLAIN = Config(groups=(Group("full", 4),), num_blocks=9, hash_unit=4, step_tokens=16, retention=None, cache_events=True)
EVICTING = Scenario(
    PLAIN,
    tuple(
        action
        for name in ("r1", "r2", "r3", "r4")
        for action in (Action("submit", name, length=14, max_tokens=3), Action("step", times=8))
    ),
)
"""Keys come and go: each request needs room that an earlier one left keys in."""

TWICE = Scenario(
    PLAIN,
    (
        Action("submit", "r1", length=6, max_tokens=4),
        Action("submit", "r2", base="r1", shared=6, length=6, max_tokens=4),
        Action("step", times=6),
        Action("submit", "r3", length=21, max_tokens=1),
        Action("step", times=4),
    ),
)
"""Two requests of the same prompt say the same, and so fill a block each; then room is taken from one of the two."""

NULL_COUNTED = Scenario(
    Config(groups=HYBRID, num_blocks=42, hash_unit=16, step_tokens=64, max_model_len=640, retention=None),
    (Action("submit", "r1", length=639, max_tokens=1), Action("step", times=16)),
)
"""640 tokens take 40 blocks and two states: with the null block that is one block too few."""

FITS = Scenario(
    Config(groups=HYBRID, num_blocks=43, hash_unit=16, step_tokens=64, max_model_len=640, retention=None),
    NULL_COUNTED.actions,
)

COPIES = Scenario(
    Config(groups=SMALL, num_blocks=5, hash_unit=1, step_tokens=16, max_model_len=8, retention=None),
    (
        Action("submit", "r1", length=6, max_tokens=1),
        Action("step", times=6),
        Action("submit", "r2", base="r1", shared=6, length=7, max_tokens=1),
        Action("step", times=6),
    ),
)
"""The second request hits inside a block, which takes a copy: one block per group more than its own tokens."""

AHEAD = Scenario(
    Config(
        groups=(Group("full", 4), Group("mamba", 8)),
        num_blocks=23,
        hash_unit=4,
        step_tokens=16,
        max_running=8,
        speculative=3,
        eagle=True,
    ),
    (
        Action("submit", "r1", length=17, max_tokens=1),
        Action("submit", "r2", base="r1", shared=12, length=12, max_tokens=1),
        Action("submit", "r3", base="r1", shared=17, length=17, max_tokens=1),
        Action("submit", "r4", base="r1", shared=16, length=18, max_tokens=1),
        Action("submit", "r5", base="r2", shared=12, length=13, max_tokens=1),
        Action("submit", "r6", base="r3", shared=17, length=18, max_tokens=1),
        Action("step", times=4),
    ),
)
"""Keys cover the token after their block, too: what the first request left at 16 goes, and the fourth's block of the
same 16 tokens, which another one follows, is not what the sixth looks for."""

SCENARIOS = {
    "ahead": AHEAD,
    "sparse": SPARSE,
    "evicting": EVICTING,
    "twice": TWICE,
    "null counted": NULL_COUNTED,
    "fits": FITS,
    "copies": COPIES,
}


def run(subject: Subject, scenario: Scenario, spoil: Callable[[Any], None] | None = None) -> dict[str, Any]:
    """What a scenario shows, on an engine that ``spoil`` has broken."""
    watcher = standard_watchers(subject)(frozenset(), False)
    run = Run(subject, scenario.config, watcher)
    if spoil is not None:
        spoil(run.driven)
    for action in scenario.actions:
        run.do(action)
    run.drain()
    assert not run.error, run.error
    shown = sorted({violation.identity for violation in watcher.violations})
    return {"shown": shown, "evaluations": dict(watcher.evaluations)}


def says_nothing_of_what_goes(driven: Any) -> None:
    driven.scheduler.kv_cache_manager.block_pool._emit_block_removed_events = lambda hashes: None


def says_half_of_what_comes(driven: Any) -> None:
    publisher = driven.scheduler.kv_event_publisher
    publish = publisher.publish

    def half(batch: Any) -> None:
        batch.events = [e for i, e in enumerate(batch.events) if i % 2 or type(e).__name__ != "BlockStored"]
        publish(batch)

    publisher.publish = half


def counts_more_hits(driven: Any) -> None:
    manager = driven.scheduler.kv_cache_manager
    make = manager.make_prefix_cache_stats

    def more() -> Any:
        stats = make()
        stats.hits = stats.queries + 1
        return stats

    manager.make_prefix_cache_stats = more


def counts_a_part_twice(driven: Any) -> None:
    add = driven.scheduler.add_request

    def wrong(request: Any) -> None:
        put = request.prefill_stats.set
        request.prefill_stats.set = lambda **counts: put(**{**counts, "num_local_cached_tokens": -4})
        add(request)

    driven.scheduler.add_request = wrong


PLANTED = {
    "says nothing of what goes": (EVICTING, says_nothing_of_what_goes),
    "says half of what comes": (EVICTING, says_half_of_what_comes),
    "counts more hits": (EVICTING, counts_more_hits),
    "counts a part twice": (EVICTING, counts_a_part_twice),
}

if __name__ == "__main__":
    subject = subjects.open_subject(subjects.parse(f"vllm=={sys.argv[1]}"), lambda line: None)
    answers = {name: run(subject, scenario) for name, scenario in SCENARIOS.items()}
    answers |= {name: run(subject, scenario, spoil) for name, (scenario, spoil) in PLANTED.items()}
    answers["limit"] = {"blocks": subject.startup_limit(FITS.config)}
    print(json.dumps(answers))
