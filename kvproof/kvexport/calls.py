"""What a test of a scenario does and with which sizes: its constants, and the calls that are the scenario."""

from __future__ import annotations

from dataclasses import dataclass

from kvproof.impl.vllm.images import placed
from kvproof.kvexport import wording
from kvproof.kvexport.plan import Plan
from kvproof.spec.config import Config
from kvproof.spec.scenario import Action

HOST_PAGE = 65_536
"""Bytes of one block in host memory. Nothing is ever written to them: they are what a release divides its memory by."""


@dataclass(frozen=True)
class Uses:
    """What the scenario does beyond submitting and stepping."""

    base: bool
    priority: bool
    images: bool
    unread: bool
    missing: bool
    accept: bool
    finish: bool
    abort: bool
    reset: bool
    running: bool
    store: bool
    preempt: bool
    evict: bool


def uses_of(config: Config, actions: tuple[Action, ...]) -> Uses:
    kinds = {action.kind for action in actions}
    return Uses(
        base=any(action.base for action in actions),
        priority=config.policy == "priority" and any(action.priority for action in actions),
        images=config.image_tokens > 0 and any(action.images for action in actions),
        unread=any(action.unread for action in actions),
        missing=config.connector in ("sync", "async") and any(action.missing for action in actions),
        accept=config.speculative > 0 and decodes(config, actions) and any(action.accept for action in actions),
        finish="finish" in kinds,
        abort="abort" in kinds,
        reset="reset" in kinds,
        running=any(action.running for action in actions),
        store=any(action.store for action in actions),
        preempt="preempt" in kinds,
        evict="evict" in kinds,
    )


def decodes(config: Config, actions: tuple[Action, ...]) -> bool:
    """Whether any request gets beyond its first token. Without that nothing is ever drafted."""
    return any(action.kind == "submit" and _output(config, action) > 1 for action in actions)


def _output(config: Config, action: Action) -> int:
    """The most tokens that the submitted request puts out."""
    return max(1, min(action.max_tokens, config.max_model_len - _length(config, action)))


def _length(config: Config, action: Action) -> int:
    return min(action.length, config.max_model_len - 1)


def retention_of(config: Config) -> int | None:
    """Where no group is sparse, 0 means nothing, and older releases refuse it."""
    if config.retention == 0 and all(group.kind in ("full", "chunked") for group in config.groups):
        return None
    return config.retention


def constants_of(config: Config, plan: Plan, marked: bool) -> list[str]:
    lines = []
    if config.scheduler_block != config.hash_unit:
        lines += [f"BLOCK, HASH_UNIT = {config.scheduler_block}, {config.hash_unit}  # tokens"]
    else:
        lines += [f"BLOCK = HASH_UNIT = {config.scheduler_block}  # tokens"]
    lines += [
        f"NUM_BLOCKS = {config.num_blocks}  # with the null block",
        f"STEP_TOKENS = {config.step_tokens}",
        f"MAX_NUM_SEQS = {config.max_running}",
        f"MAX_MODEL_LEN = {config.max_model_len}",
        f"RETENTION = {retention_of(config)}  # prefix_cache_retention_interval",
    ]
    if config.speculative:
        lines.append(f"K = {config.speculative}  # draft tokens")
    if marked:
        module = "vllm.model_executor.layers.mamba.checkpoint"
        lines += ["# Whether the release tells MTP layers from the model's own: from 0.31."]
        lines += [f'MARKED = bool(importlib.util.find_spec("{module}"))']
    groups = list(enumerate(config.groups))
    if config.image_tokens:
        lines.append(f"IMAGE = {config.image_tokens}  # tokens")
    if config.connector == "offload":
        blocks = config.offload_blocks or 64 * config.num_blocks
        lines.append(f"PAGE, HOST_BLOCKS = {HOST_PAGE}, {blocks}  # of CPU memory")
    if uses_of(config, plan.actions).missing or plan.check in ("offloaded-events", "wipes"):
        lines.append(f"GROUP_BLOCKS = {[group.block_size for group in config.groups]}  # tokens")
    if plan.recurrent or plan.check in ("bound", "refused", "offers"):
        recurrent = [index for index, group in groups if group.kind == "mamba"]
        lines.append(f"RECURRENT = {recurrent}  # groups whose block holds one whole state")
    if plan.check == "offers":
        lines.append(f"FULL = { {i: g.block_size for i, g in groups if g.kind == 'full'} }  # group: block size")
    if plan.attention or plan.check == "rests":
        lines.append(f"ATTENTION = { {i: g.block_size for i, g in groups if g.kind != 'mamba'} }  # group: block size")
    if plan.attention and plan.reads:
        windows = {i: g.window for i, g in groups if g.kind == "window"}
        if windows:
            lines.append(f"WINDOWS = {windows}  # group: tokens")
    if any(action.kind == "finish" for action in plan.actions):
        lines.append("STOP = 7  # the token that ends a request")
    return lines


def calls_of(config: Config, plan: Plan, indent: int) -> list[str]:
    accepts = uses_of(config, plan.actions).accept
    images = _images(config, plan.actions)
    calls = [
        wording.call(f"engine.{action.kind}", _arguments(config, action, accepts, images), indent=indent)
        for action in plan.actions
    ]
    return calls + ([wording.call("engine.drain", [], indent=indent)] if plan.drain else [])


def _images(config: Config, actions: tuple[Action, ...]) -> dict[str, list[int]]:
    """Where images begin in each prompt: those of the prefix that it shares, then its own that fit without overlap."""
    starts: dict[str, list[int]] = {}
    for action in actions:
        if action.kind == "submit" and action.request not in starts:
            length = _length(config, action)
            shared = min(action.shared, length) if action.base in starts else 0
            starts[action.request] = placed(config, action.images, starts.get(action.base, ()), shared, length)
    return starts


def _arguments(config: Config, action: Action, accepts: bool, images: dict[str, list[int]]) -> list[str]:
    name = wording.literal(action.request)
    if action.kind == "submit":
        length = _length(config, action)
        arguments = [name, f"length={length}", f"max_tokens={_output(config, action)}"]
        if action.base:
            arguments += [f"base={wording.literal(action.base)}", f"shared={min(action.shared, length)}"]
        if config.connector in ("sync", "async") and action.external:
            arguments.append(f"external={action.external}")
        if config.connector in ("sync", "async") and action.missing:
            arguments.append(f"missing={action.missing}")
        if config.policy == "priority" and action.priority:
            arguments.append(f"priority={action.priority}")
        if images.get(action.request):
            arguments.append(f"images={images[action.request]}")
        if action.unread:
            arguments.append("unread=True")
        return arguments
    if action.kind == "step":
        accept = f"accept={action.accept}" if action.accept and accepts else ""
        times = str(action.times) if action.times != 1 else ""
        return [argument for argument in (times, accept) if argument]
    if action.kind == "evict":
        return [str(action.times)]
    if action.kind == "reset":
        return ["running=True"] * action.running + ["store=True"] * action.store
    return [name]
