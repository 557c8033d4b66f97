"""Rendering a planned test: names, constants and calls around the templates."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvproof.impl.vllm.progress import STARVED_AFTER
from kvproof.kvexport import wording
from kvproof.kvexport.imports import imports_of
from kvproof.kvexport.origin import origin
from kvproof.kvexport.plan import Plan
from kvproof.spec.config import Config
from kvproof.spec.finding import Violation
from kvproof.spec.rules.blocks import peak_blocks
from kvproof.spec.scenario import Action, Scenario

WATCHES = {
    "chunks": "chunks",
    "bound": "charges",
    "refused": "refusals",
    "exact": "allocations",
    "dry-real": "allocations",
    "dry-pure": "allocations",
    "lookups": "lookups",
    "reuse": "reuse",
    "events": "events",
    "removals": "removals",
    "malformed": "drafts",
    "cuts": "cuts",
}
"""Checks that wrap the scheduler's own methods, and the template that does it."""

LOOKS = {
    "keys": "keys",
    "stall": "stall",
    "starved": "starved",
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
    priority: bool
    missing: bool
    accept: bool
    finish: bool
    abort: bool
    reset: bool
    preempt: bool
    evict: bool


def render(plan: Plan, scenario: Scenario, violation: Violation | None, subject: str) -> str:
    """The test file's text."""
    environment = _templates()
    known = origin(scenario, violation, subject)
    values = _values(plan, scenario.config, violation, known.releases)
    body = environment.get_template("body.py.jinja").render(values)
    return environment.get_template("test_file.py.jinja").render(
        headline=wording.headline(violation),
        docstring=wording.explanation(scenario, violation, known),
        imports=imports_of(body),
        body=body,
    )


@functools.cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("kvproof.kvexport", "templates"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )


def _values(plan: Plan, config: Config, violation: Violation | None, releases: tuple[str, ...]) -> dict[str, Any]:
    watch = WATCHES.get(plan.check, "")
    method = _method(config)
    drafters = [index for index, group in enumerate(config.groups) if group.drafter]
    marked = method == "mtp" and bool(drafters)
    return {
        "config": config,
        "decodes": _decodes(config, plan.actions),
        "drafts": config.speculative > 0 and _decodes(config, plan.actions),
        "check": plan.check,
        "content": plan.content,
        "recurrent": plan.recurrent,
        "attention": plan.attention,
        "reads": plan.reads,
        "judges_writes": plan.check == "null-writes",
        "checkpoints": plan.recurrent and config.checkpoint_blocks > 0,
        "windows": any(group.kind == "window" for group in config.groups),
        "idle": plan.check == "stall",
        "drain": plan.drain,
        "uses": _uses(config, plan.actions),
        "method": method,
        "marked": marked,
        "drafter_groups": drafters,
        # A lookup that falls short is asked of releases beyond those that it is recorded for, drafter and all.
        "dspark": marked and (plan.check == "reuse" or _may_be(releases, "0.29", "0.30")),
        "architecture": "Qwen3NextForCausalLM" if config.mamba_block else "Qwen3ForCausalLM",
        "retention": _retention(config),
        "watch": f"watch_{watch}.py.jinja" if watch else "",
        "watch_call": f"watch_{watch}(self.scheduler, self.faults)",
        "check_template": f"check_{LOOKS[plan.check]}.py.jinja" if plan.check in LOOKS else "",
        "reuse": dict(violation.where) if violation is not None else {},
        "crossing": violation is not None and violation.cause != "chunk-ends-off-boundary",
        "wide_block": config.mamba_block > min(config.step_tokens, config.long_prefill_threshold or config.step_tokens),
        "exact_fault": _exact_fault(violation),
        "bound_terms": _bound_terms(config, violation),
        "steps": config.load_steps if config.connector == "async" else 1,
        "loads": config.connector == "async" or (config.connector == "sync" and plan.content),
        "peak": _peak(config, plan.actions),
        "starved_after": STARVED_AFTER,
        "constants": _constants(config, plan, marked),
        "calls": _calls(config, plan),
        "name": re.sub(r"\W+", "_", violation.invariant.lower()) if violation is not None else "scenario",
        "promise": wording.docstring(wording.promise(violation)),
    }


def _uses(config: Config, actions: tuple[Action, ...]) -> Uses:
    kinds = {action.kind for action in actions}
    return Uses(
        base=any(action.base for action in actions),
        priority=config.policy == "priority" and any(action.priority for action in actions),
        missing=config.connector != "none" and any(action.missing for action in actions),
        accept=config.speculative > 0 and _decodes(config, actions) and any(action.accept for action in actions),
        finish="finish" in kinds,
        abort="abort" in kinds,
        reset="reset" in kinds,
        preempt="preempt" in kinds,
        evict="evict" in kinds,
    )


def _decodes(config: Config, actions: tuple[Action, ...]) -> bool:
    """Whether any request gets beyond its first token. Without that nothing is ever drafted."""
    return any(action.kind == "submit" and _output(config, action) > 1 for action in actions)


def _output(config: Config, action: Action) -> int:
    """The most tokens that the submitted request puts out."""
    return max(1, min(action.max_tokens, config.max_model_len - _length(config, action)))


def _length(config: Config, action: Action) -> int:
    return min(action.length, config.max_model_len - 1)


def _may_be(releases: tuple[str, ...], *series: str) -> bool:
    """Whether one of the releases is of one of these series; where none is known, any may be."""
    return not releases or any(f"{release}.".startswith(f"{name}.") for release in releases for name in series)


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
    if config.retention == 0 and all(group.kind in ("full", "chunked") for group in config.groups):
        return None
    return config.retention


def _exact_fault(violation: Violation | None) -> str:
    """How the charge relates to what is taken where the violation shows, as an operator."""
    cause = violation.cause if violation is not None else ""
    return ">" if "exceeds-taken" in cause else "<" if "below-taken" in cause else "!="


def _bound_terms(config: Config, violation: Violation | None) -> str:
    """The most new blocks a recurrent group takes in one step, as an expression.

    Charging the drafts once more than due is a fault of its own (cause ``…-by-drafts``): a bound that was exceeded by
    more lets it pass.
    """
    terms = [str(1 + config.checkpoint_blocks), "partial", "external"]
    if config.speculative:
        let_pass = violation is not None and violation.identity == ("ADMIT.mamba-bound", "estimate-beyond-bound")
        terms.append("K" if let_pass else "(K if first else 0)")
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
    if _uses(config, plan.actions).missing:
        lines.append(f"GROUP_BLOCKS = {[group.block_size for group in config.groups]}  # tokens")
    if plan.recurrent or plan.check in ("bound", "refused"):
        recurrent = [index for index, group in groups if group.kind == "mamba"]
        lines.append(f"RECURRENT = {recurrent}  # groups whose block holds one whole state")
    if plan.attention:
        lines.append(f"ATTENTION = { {i: g.block_size for i, g in groups if g.kind != 'mamba'} }  # group: block size")
    if plan.attention and plan.reads:
        windows = {i: g.window for i, g in groups if g.kind == "window"}
        if windows:
            lines.append(f"WINDOWS = {windows}  # group: tokens")
    if any(action.kind == "finish" for action in plan.actions):
        lines.append("STOP = 7  # the token that ends a request")
    return lines


def _calls(config: Config, plan: Plan) -> list[str]:
    accepts = _uses(config, plan.actions).accept
    return [_call(config, action, accepts) for action in plan.actions] + (["engine.drain()"] if plan.drain else [])


def _call(config: Config, action: Action, accepts: bool) -> str:
    name = wording.literal(action.request)
    if action.kind == "submit":
        length = _length(config, action)
        arguments = [name, f"length={length}", f"max_tokens={_output(config, action)}"]
        if action.base:
            arguments += [f"base={wording.literal(action.base)}", f"shared={min(action.shared, length)}"]
        if config.connector != "none" and action.external:
            arguments.append(f"external={action.external}")
        if config.connector != "none" and action.missing:
            arguments.append(f"missing={action.missing}")
        if config.policy == "priority" and action.priority:
            arguments.append(f"priority={action.priority}")
        return f"engine.submit({', '.join(arguments)})"
    if action.kind == "step":
        accept = f"accept={action.accept}" if action.accept and accepts else ""
        times = str(action.times) if action.times != 1 else ""
        return f"engine.step({', '.join(filter(None, [times, accept]))})"
    if action.kind == "evict":
        return f"engine.evict({action.times})"
    if action.kind == "reset":
        return "engine.reset()"
    return f"engine.{action.kind}({name})"
