"""Rendering a planned test: names, constants and calls around the templates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvproof.kvexport import wording
from kvproof.kvexport.imports import imports_of
from kvproof.kvexport.plan import Plan
from kvproof.spec.config import Config
from kvproof.spec.finding import Violation
from kvproof.spec.rules.blocks import peak_blocks
from kvproof.spec.scenario import Action, Scenario

WATCHES = {
    "bound": "charges",
    "refused": "charges",
    "exact": "allocations",
    "dry-real": "allocations",
    "dry-pure": "allocations",
    "lookups": "lookups",
}
"""Checks that wrap the scheduler's own methods, and the template that does it."""

LOOKS = {
    "keys": "keys",
    "chunks": "chunks",
    "stall": "stall",
    "references": "references",
    "drained": "drained",
    "null": "null",
    "null-count": "null",
}
"""Checks that look at the engine between calls, and the template that does it."""


@dataclass(frozen=True)
class Uses:
    """What the scenario does beyond submitting and stepping."""

    base: bool
    accept: bool
    finish: bool
    abort: bool
    reset: bool
    preempt: bool
    evict: bool


def render(plan: Plan, scenario: Scenario, violation: Violation | None, subject: str) -> str:
    """The test file's text."""
    environment = Environment(
        loader=PackageLoader("kvproof.kvexport", "templates"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    values = _values(plan, scenario.config, violation, subject)
    body = environment.get_template("body.py.jinja").render(values)
    return environment.get_template("test_file.py.jinja").render(
        headline=wording.headline(violation),
        docstring=wording.explanation(scenario, violation, subject),
        imports=imports_of(body),
        body=body,
    )


def _values(plan: Plan, config: Config, violation: Violation | None, subject: str) -> dict[str, Any]:
    watch = WATCHES.get(plan.check, "")
    method = _method(config)
    drafters = [index for index, group in enumerate(config.groups) if group.drafter]
    marked = method == "mtp" and bool(drafters)
    return {
        "config": config,
        "check": plan.check,
        "content": plan.content,
        "recurrent": plan.recurrent,
        "attention": plan.attention,
        "reads": plan.reads,
        "checkpoints": plan.recurrent and config.checkpoint_blocks > 0,
        "windows": any(group.kind == "window" for group in config.groups),
        "idle": plan.check == "stall",
        "drain": plan.drain,
        "uses": _uses(config, plan.actions),
        "method": method,
        "marked": marked,
        "drafter_groups": drafters,
        "dspark": marked and _may_be(subject, "0.29", "0.30"),
        "architecture": "Qwen3NextForCausalLM" if config.mamba_block else "Qwen3ForCausalLM",
        "retention": _retention(config),
        "watch": f"watch_{watch}.py.jinja" if watch else "",
        "watch_call": f"watch_{watch}(self.scheduler, self.faults)",
        "check_template": f"check_{LOOKS[plan.check]}.py.jinja" if plan.check in LOOKS else "",
        "bound_terms": _bound_terms(config, violation),
        "steps": config.load_steps if config.connector == "async" else 1,
        "loads": config.connector == "async" or (config.connector == "sync" and plan.content),
        "peak": _peak(config, plan.actions),
        "constants": _constants(config, plan, marked),
        "calls": [_call(config, action) for action in plan.actions] + (["engine.drain()"] if plan.drain else []),
        "name": re.sub(r"\W+", "_", violation.invariant.lower()) if violation is not None else "scenario",
        "promise": wording.constant("PROMISE", wording.promise(violation)),
    }


def _uses(config: Config, actions: tuple[Action, ...]) -> Uses:
    kinds = {action.kind for action in actions}
    return Uses(
        base=any(action.base for action in actions),
        accept=config.speculative > 0 and any(action.accept for action in actions),
        finish="finish" in kinds,
        abort="abort" in kinds,
        reset="reset" in kinds,
        preempt="preempt" in kinds,
        evict="evict" in kinds,
    )


def _may_be(subject: str, *series: str) -> bool:
    """Whether the subject may be of one of these release series; a checkout may be any."""
    _, known, version = subject.partition("==")
    return not known or any(version == name or version.startswith(f"{name}.") for name in series)


def _method(config: Config) -> str:
    """The drafting method; with EAGLE and a marked group the release has its say (template ``build``)."""
    if not config.speculative:
        return ""
    if config.eagle:
        return "mtp"
    if any(group.drafter for group in config.groups):
        return "draft_model"
    return "ngram"


def _retention(config: Config) -> int | None:
    """Where no group is sparse, 0 means nothing, and older releases refuse it."""
    if config.retention == 0 and all(group.kind == "full" for group in config.groups):
        return None
    return config.retention


def _bound_terms(config: Config, violation: Violation | None) -> str:
    """The most new blocks a recurrent group takes in one step, as an expression.

    Charging the drafts once more than due is a fault of its own (cause ``…-by-drafts``): where it is not the one that
    was found, it is let pass.
    """
    terms = ["1", "partial", "external"]
    if config.checkpoint_blocks:
        terms.append(str(config.checkpoint_blocks))
    if config.speculative:
        drafts_are_the_fault = violation is not None and violation.cause.endswith("-by-drafts")
        terms.append("(K if first else 0)" if drafts_are_the_fault else "K")
    return " + ".join(terms)


def _peak(config: Config, actions: tuple[Action, ...]) -> int:
    """The most blocks that any of the requests holds, alone in an idle pool."""
    totals = [
        min(a.length + a.max_tokens, config.max_model_len) + config.speculative for a in actions if a.kind == "submit"
    ]
    return max((peak_blocks(config, total) for total in totals), default=0)


def _constants(config: Config, plan: Plan, marked: bool) -> list[str]:
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
        f"RETENTION = {_retention(config)}  # prefix_cache_retention_interval",
    ]
    if config.speculative:
        lines.append(f"K = {config.speculative}  # draft tokens")
    if marked:
        module = "vllm.model_executor.layers.mamba.checkpoint"
        lines += ["# Whether the release tells MTP layers from the model's own: from 0.31."]
        lines += [f'MARKED = bool(importlib.util.find_spec("{module}"))']
    groups = list(enumerate(config.groups))
    if plan.recurrent or plan.check in ("bound", "refused"):
        recurrent = [index for index, group in groups if group.kind == "mamba"]
        lines.append(f"RECURRENT = {recurrent}  # groups whose block holds one whole state")
    if plan.attention:
        lines.append(f"ATTENTION = { {i: g.block_size for i, g in groups if g.kind != 'mamba'} }  # group: block size")
    if (plan.attention and plan.reads) or plan.check == "refused":
        windows = {i: g.window for i, g in groups if g.kind == "window"}
        if windows:
            lines.append(f"WINDOWS = {windows}  # group: tokens")
    if any(action.kind == "finish" for action in plan.actions):
        lines.append("STOP = 7  # the token that ends a request")
    return lines


def _call(config: Config, action: Action) -> str:
    name = wording.literal(action.request)
    if action.kind == "submit":
        length = min(action.length, config.max_model_len - 1)
        tokens = max(1, min(action.max_tokens, config.max_model_len - length))
        arguments = [name, f"length={length}", f"max_tokens={tokens}"]
        if action.base:
            arguments += [f"base={wording.literal(action.base)}", f"shared={min(action.shared, length)}"]
        if config.connector != "none" and action.external:
            arguments.append(f"external={action.external}")
        return f"engine.submit({', '.join(arguments)})"
    if action.kind == "step":
        accept = f"accept={action.accept}" if action.accept and config.speculative else ""
        times = str(action.times) if action.times != 1 else ""
        return f"engine.step({', '.join(filter(None, [times, accept]))})"
    if action.kind == "evict":
        return f"engine.evict({action.times})"
    if action.kind == "reset":
        return "engine.reset()"
    return f"engine.{action.kind}({name})"
