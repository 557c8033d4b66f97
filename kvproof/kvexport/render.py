"""Rendering a planned test: names, constants and calls around the templates."""

from __future__ import annotations

import functools
import re
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kvproof.impl.vllm.progress import STARVED_AFTER
from kvproof.kvexport import wording
from kvproof.kvexport.calls import Uses, calls_of, constants_of, decodes, retention_of, uses_of
from kvproof.kvexport.checks import WHOLE
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
    "unread": "unread",
    "reuse": "reuse",
    "events": "events",
    "removals": "removals",
    "malformed": "drafts",
    "cuts": "cuts",
    "preemptions": "preemptions",
    "offloaded-events": "offloaded_events",
    "offers": "offers",
    "serves": "offers",
    "handed": "handed",
    "copied": "stores",
    "chosen": "stores",
    "rests": "rests",
}
"""Checks that wrap the scheduler's own methods, and the template that does it."""

NOTES = {"handed": "handed", "stores": "keys", "rests": "unwiped", "starved": "refused"}
"""Where what such a template sees is noted, unless it is a fault: an attribute of the engine."""

LOOKS = {
    "keys": "keys",
    "writes": "writes",
    "handed": "handed",
    "rests": "rests",
    "wipes": "wipes",
    "counts": "counts",
    "startup": "lone",
    "stall": "stall",
    "starved": "starved",
    "references": "references",
    "drained": "drained",
    "null": "null",
    "null-count": "null",
}
"""Checks that look at the engine between calls, and the template that does it."""


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
    cause = violation.cause if violation is not None else ""
    passed_over = cause.partition("-")[0] if plan.check == "starved" else ""
    watch = "starved" if passed_over == "running" else WATCHES.get(plan.check, "")
    return {
        **_engine(plan, config, releases),
        **_parts(plan, config),
        "check": plan.check,
        "idle": plan.check in ("stall", "startup"),
        "watch": f"watch_{watch}.py.jinja" if watch else "",
        "watch_call": f"watch_{watch}(self.scheduler, self.{NOTES.get(watch, 'faults')})",
        "check_template": f"check_{LOOKS[plan.check]}.py.jinja" if plan.check in LOOKS else "",
        "reuse": dict(violation.where) if violation is not None else {},
        **_lacking(config, violation),
        "crossing": cause != "chunk-ends-off-boundary",
        "passed_over": passed_over,
        "preempts": "preempts-itself" in cause,
        "reset_fails": ".reset_cache-" in cause,
        "over_key": cause.endswith("over-key"),
        "shared": cause.endswith("write-shared"),
        "offers_nothing": cause.endswith("offers-nothing"),
        "lacks": next((what for what in ("state", "attention") if what in cause), ""),
        "exact_fault": _exact_fault(violation),
        "bound_terms": _bound_terms(config, violation),
        "peak": _peak(config, plan.actions),
        "starved_after": STARVED_AFTER,
        "name": re.sub(r"\W+", "_", violation.invariant.lower()) if violation is not None else "scenario",
        "promise": wording.docstring(wording.promise(violation)),
    }


def _engine(plan: Plan, config: Config, releases: tuple[str, ...]) -> dict[str, Any]:
    """What the engine is made of."""
    method = _method(config)
    drafters = [index for index, group in enumerate(config.groups) if group.drafter]
    marked = method == "mtp" and bool(drafters)
    return {
        "config": config,
        "overlapped": config.async_scheduling,
        "offload": config.connector == "offload",
        "double": config.connector in ("sync", "async"),
        "method": method,
        "marked": marked,
        "drafter_groups": drafters,
        "lookahead": config.eagle and config.connector == "none" and config.lookahead_keys,
        # What a lookup finds, or a pool holds, is asked of releases beyond those recorded, drafter and all.
        "dspark": marked and (plan.check in ("reuse", "startup") or _may_be(releases, "0.29", "0.30")),
        "architecture": "Qwen3NextForCausalLM" if config.mamba_block else "Qwen3ForCausalLM",
        "retention": retention_of(config),
        "windows": any(group.kind == "window" for group in config.groups),
        "wide_block": config.mamba_block > min(config.step_tokens, config.long_prefill_threshold or config.step_tokens),
        "constants": constants_of(config, plan, marked),
    }


def _parts(plan: Plan, config: Config) -> dict[str, Any]:
    """Which parts of the engine, its store and the oracle of contents the scenario needs."""
    uses = uses_of(config, plan.actions)
    answers = decodes(config, plan.actions)
    drafts = config.speculative > 0 and (answers or config.async_scheduling)
    lost = uses.missing and config.connector == "sync"
    loads = config.connector == "async" or (config.connector == "sync" and (plan.content or lost))
    # What a store does after a reset may end the engine once it was seen.
    tried = lost or plan.check in ("crash", "cuts") or (plan.check == "chosen" and uses.store)
    extra = ["priority=priority"] * uses.priority + ["mm_features=features"] * uses.images
    return {
        "uses": uses,
        "extra": extra,
        "submit": _submit(uses, config.connector in ("sync", "async")),
        "tried": tried,
        "calls": calls_of(config, plan, 8 if tried else 4),
        "drain": plan.drain,
        "decodes": answers,
        "drafts": drafts,
        "answered": ", dict(zip(names, answers))" if drafts and plan.recurrent else "",
        "content": plan.content,
        "recurrent": plan.recurrent,
        "attention": plan.attention,
        "convolution": plan.convolution,
        "reads": plan.reads,
        "whole": plan.check in WHOLE,
        "moves": plan.check == "copied" and plan.recurrent,
        "judges_writes": plan.check == "null-writes",
        "checkpoints": plan.recurrent and config.checkpoint_blocks > 0,
        "steps": config.load_steps if config.connector in ("async", "offload") else 1,
        "loads": loads,
        "tables": loads and (plan.content or plan.check in ("rests", "wipes") or lost),
        "lost": lost,
        # Where reads are judged, it is by whether anything is made of them; where only tables are, nothing is spoiled.
        "spoils": lost and plan.content and plan.check not in ("reads", "null-writes"),
        "judges_answers": lost and plan.reads,
        "anew": lost and config.async_scheduling and plan.check in ("reads", "ahead"),
        "owed": lost and plan.check == "keys",
        "under_way": _under_way(config),
    }


def _submit(uses: Uses, stores: bool) -> str:
    """The first line of the engine's method."""
    named = {
        "base=None": uses.base,
        "shared=0": uses.base,
        "external=0": stores,
        "missing=0": uses.missing,
        "priority=0": uses.priority,
        "images=()": uses.images,
        "unread=False": uses.unread,
    }
    used = [name for name, there in named.items() if there]
    return wording.call("def submit", ["self", "name", "length", "max_tokens", *used], ":", indent=4)


def _under_way(config: Config) -> str:
    """Whether a step brought anything, or something is on its way."""
    if config.connector == "async":
        return "names or loads or self.scheduler.connector.loading"
    return "names"


def _lacking(config: Config, violation: Violation | None) -> dict[str, Any]:
    """Which keys the group that is named lacks for what was promised, and whether a chunk had ended there.

    None where no group is named, or where it is drafters that drop some: then any lookup that falls short counts.
    """
    nothing: dict[str, Any] = {"lacked": [], "ended": None}
    where = dict(violation.where) if violation is not None else {}
    number, promised = where.get("group"), where.get("promised")
    if violation is None or not isinstance(number, int) or not isinstance(promised, int):
        return nothing
    group = config.groups[number]
    if group.kind == "mamba":
        return {"lacked": [promised], "ended": not violation.cause.startswith("no-chunk-ended")}
    if config.eagle:
        return nothing
    size, first = group.block_size, group.first_read(promised) // group.block_size
    ends = list(range((first + 1) * size, promised + 1, size))
    return {"lacked": ends + [promised] * (promised % size > 0), "ended": None}


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
    return "ngram_gpu" if config.async_scheduling else "ngram"


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
