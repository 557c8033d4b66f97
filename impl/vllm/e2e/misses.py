"""Public shapes of 0 % hits on a whole vLLM, each beside the same with one thing changed, which hits.

Each is two requests, one after the other, on an engine that vLLM built itself and that loaded kvproof's plug-in by its
entry point. What is looked at is what an operator sees: how many tokens the second request found cached, the line that
was logged about it, and the counters. :data:`SHAPES` says beforehand what these must be; the contrast shows that what
the line blames is what made the difference.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvproof.impl.vllm.e2e.engine import BLOCK, Engine
from kvproof.impl.vllm.e2e.models import MODELS, VOCABULARY, Model
from kvproof.impl.vllm.live.counters import SHORT_HITS, TOKENS_LOST
from kvproof.impl.vllm.live.install import Installed


@dataclass(frozen=True)
class Setting:
    """One engine: a model and what is said to ``vllm.LLM``."""

    model: Model
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Play:
    """A request ``a`` of so many tokens, then a request ``b`` whose first ``shared`` tokens are those of ``a``.

    ``evicted``: in between the drafter's group loses its blocks, as vLLM itself takes keys from blocks.
    """

    first: int
    second: int
    shared: int
    evicted: bool = False


@dataclass(frozen=True)
class Seen:
    """Of ``b``: its cached tokens, the lines said of it, and what was added to the counters by (group kind, rule)."""

    cached: int
    lines: tuple[str, ...]
    hits: Mapping[str, float]
    lost: Mapping[str, float]


@dataclass(frozen=True)
class Shape:
    """A play that finds nothing, and one that does. Settings are named as in :data:`SETTINGS`.

    ``changed`` is what the contrast has different. ``attention`` is what attention alone would serve; ``says`` is the
    line's end: the group, the states around, the reason. ``counts`` is the counters' labels, "kind rule".
    """

    name: str
    setting: str
    play: Play
    changed: str
    other: str
    contrast: Play
    attention: int
    counts: str
    says: str

    @property
    def line(self) -> str:
        head = f"b's lookup of {self.play.second} tokens answers 0 where attention alone serves {self.attention}"
        return f"{head}: {self.says}"

    def wrong(self, seen: Seen, contrast: Seen) -> list[str]:
        """What is not as it must be, in words."""
        expected = ((self.line,), {self.counts: 1}, {self.counts: self.attention})
        found = []
        if seen.cached:
            found.append(f"{seen.cached} tokens were cached: this is no miss")
        if (seen.lines, dict(seen.hits), dict(seen.lost)) != expected:
            found.append(f"said {seen.lines}, counted {seen.hits} and {seen.lost}, and not {expected}")
        if not contrast.cached:
            found.append("the contrast finds nothing either")
        if self.counts in contrast.hits:
            found.append(f"the contrast is short for the same reason: {contrast.lines}")
        return found


# -- the settings -----------------------------------------------------------------------------------------------------


def _drafted(**changes: Any) -> Model:
    """qwen3-next with an MTP head, which is one layer more of full attention and wants experts in every layer."""
    model = MODELS["qwen3-next"]
    head = {"num_nextn_predict_layers": 1, "decoder_sparse_step": 1, **changes}
    return dataclasses.replace(model, name="qwen3-next+MTP", settings={**model.settings, **head})


# With one recurrent layer the groups have one layer each, and the head's is a group of its own.
_SHORT: Final = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_MTP: Final = {"method": "mtp", "num_speculative_tokens": 1}
_KEEP_ALL: Final = {"prefix_cache_retention_interval": None}

_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "": {},  # retention 0 is vLLM's default; a prefill chunk is a block
    ", retention None": _KEEP_ALL,
    ", retention None, one chunk": {**_KEEP_ALL, "max_num_batched_tokens": 16 * BLOCK},
    ", retention 96": {"prefix_cache_retention_interval": 3 * BLOCK},
}

SETTINGS: Final[Mapping[str, Setting]] = {
    **{
        f"{name}{what}": Setting(MODELS[name], it)
        for name in ("granite", "qwen3-next")
        for what, it in _OPTIONS.items()
    },
    "MTP": Setting(_drafted(), {"speculative_config": _MTP}),
    "MTP, nothing dropped": Setting(_drafted(), {"speculative_config": {**_MTP, "disable_eagle_block_drop": True}}),
    "MTP in a group of its own": Setting(_drafted(**_SHORT), {"speculative_config": _MTP}),
}

# -- the shapes -------------------------------------------------------------------------------------------------------

_IN_ONE_CHUNK: Final = "state in the unique part"
_DIVERGES: Final = Play(168, 168, 80)
"""Two whole blocks are shared, and the middle of a third; ``a`` ends a quarter of a block behind its fifth."""


def _of(name: str) -> tuple[Shape, ...]:
    """Those that need no drafter, for one architecture. Group 0 is recurrent in all of them."""
    dense, wide, sparse = (
        f"{name}, {what}" for what in ("retention None", "retention None, one chunk", "retention 96")
    )
    return (
        Shape(
            name="prompt shorter than a block",
            setting=name,
            play=Play(31, 31, 31),
            changed="a prompt of 40 tokens",
            other=name,
            contrast=Play(40, 40, 40),
            attention=16,
            counts="mamba short-prompt",
            says="recurrent group 0 (no state of this prompt), the prompt has no whole block of 32 tokens before its "
            "last token (short-prompt)",
        ),
        Shape(
            name=_IN_ONE_CHUNK,
            setting=wide,
            play=_DIVERGES,
            changed="prefill chunks of a block",
            other=dense,
            contrast=_DIVERGES,
            attention=64,
            counts="mamba unique-part",
            says="recurrent group 0 (nearest state at 160), state 64 was never kept and those of a are in the part not "
            "shared (unique-part)",
        ),
        Shape(
            name="retention 0, divergence in the middle",
            setting=name,
            play=_DIVERGES,
            changed="retention None",
            other=dense,
            contrast=_DIVERGES,
            attention=64,
            counts="mamba retention",
            says="recurrent group 0 (nearest state at 160), state 64 was never kept: retention 0 keeps only those "
            "where a resend resumes or prompts were seen to part (retention)",
        ),
        Shape(
            name="retention 96, divergence before it",
            setting=sparse,
            play=_DIVERGES,
            changed="retention None",
            other=dense,
            contrast=_DIVERGES,
            attention=64,
            counts="mamba retention",
            says="recurrent group 0 (nearest state at 96), state 64 was never kept: retention 96 keeps one per 96 "
            "tokens and those where a resend resumes or prompts were seen to part (retention)",
        ),
    )


SHAPES: Final = (
    # A step that keeps a state inside its tokens is what the CPU build's Mamba2 kernels can't take.
    *(shape for shape in _of("granite") if shape.name != _IN_ONE_CHUNK),
    *_of("qwen3-next"),
    Shape(
        name="drafter: the last block is dropped",
        setting="MTP",
        play=Play(56, 56, 56),
        changed="disable_eagle_block_drop",
        other="MTP, nothing dropped",
        contrast=Play(56, 56, 56),
        attention=32,
        counts="full eagle",
        says="full attention group 2 (nearest blocks at 32), the last 32 tokens of a hit are dropped for the drafter "
        "(eagle)",
    ),
    Shape(
        name="drafter: its group has no blocks",
        setting="MTP in a group of its own",
        play=Play(168, 168, 168, evicted=True),
        changed="the drafter's blocks left alone",
        other="MTP in a group of its own",
        contrast=Play(168, 168, 168),
        attention=160,
        counts="drafter drafter",
        says="drafter group 2 (no blocks of this prompt), the drafter covers 0 of these tokens, and vetoes what the "
        "model itself has (drafter)",
    ),
)


def plays(setting: str) -> list[Play]:
    """What is to be played on that engine, for any shape or as a contrast."""
    mine = [shape.play for shape in SHAPES if shape.setting == setting]
    return list(dict.fromkeys(mine + [shape.contrast for shape in SHAPES if shape.other == setting]))


# -- playing ----------------------------------------------------------------------------------------------------------


class _Said(logging.Handler):
    """What kvproof logs, as an operator reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(setting: str, watching: Callable[[], Installed | None]) -> list[tuple[Play, Seen]]:
    """Build the engine in this process and play on it.

    ``watching`` tells what the plug-in watches once vLLM has loaded it (``KVPROOF`` must be set for that). Raises
    ``RuntimeError`` where it was not loaded, or where something went wrong in the assertions.
    """
    engine = Engine(SETTINGS[setting].model, **SETTINGS[setting].options)
    said = _Said()
    logging.getLogger("kvproof").addHandler(said)
    try:
        installed = watching()
        if installed is None or not installed.engines:
            raise RuntimeError("vLLM did not load kvproof as its plug-in, or KVPROOF is not set")
        found = [(play, _played(engine, play, said, number)) for number, play in enumerate(plays(setting))]
        new = [finding.violation for finding in installed.findings if not finding.known]
        if installed.errors or new:
            raise RuntimeError(f"the assertions say: {installed.errors} {new}")
    finally:
        logging.getLogger("kvproof").removeHandler(said)
        engine.close()
    return found


def _played(engine: Engine, play: Play, said: _Said, number: int) -> Seen:
    rng = random.Random(number)
    engine.reset()
    first = [rng.randrange(VOCABULARY) for _ in range(play.first)]
    new = [rng.randrange(VOCABULARY) for _ in range(play.second - play.shared)]
    if new and play.shared < play.first and new[0] == first[play.shared]:
        new[0] = (new[0] + 1) % VOCABULARY
    engine.serve(f"a.{number}", first, 2)
    if play.evicted:
        _evict_drafter(engine)
    said.lines.clear()
    before = _counters()
    answer = engine.serve(f"b.{number}", first[: play.shared] + new, 2)
    hits, lost = (_more(then, now) for then, now in zip(before, _counters(), strict=True))
    # The engine makes a request's name unique by eight digits behind it.
    lines = [re.sub(rf"\b([ab])\.{number}-[0-9a-f]{{8}}", r"\1", line) for line in said.lines]
    return Seen(
        answer.cached, tuple(line.removeprefix("kvproof: ") for line in lines if "'s lookup of " in line), hits, lost
    )


def _evict_drafter(engine: Engine) -> None:
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    (drafter,) = (index for index, group in enumerate(groups) if group.is_eagle_group)
    suffix = drafter.to_bytes(4, "big")
    blocks = [b.block_id for b in engine.pool.blocks if b.block_hash is not None and b.block_hash.endswith(suffix)]
    if not blocks:
        raise RuntimeError("the drafter's group has no keyed blocks")
    engine.pool.evict_blocks(set(blocks))


def _counters() -> list[dict[str, float]]:
    """The two counters in prometheus' own registry, by "kind rule"."""
    registry = importlib.import_module("prometheus_client").REGISTRY
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    return [
        {f"{s.labels['group']} {s.labels['rule']}": s.value for s in samples if s.name == name}
        for name in (SHORT_HITS, TOKENS_LOST)
    ]


def _more(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}


def select(names: Sequence[str]) -> list[Shape]:
    """The shapes whose first engine runs one of these models; all, if none is named."""
    return [shape for shape in SHAPES if not names or SETTINGS[shape.setting].model.name in names]
