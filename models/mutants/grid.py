"""A rule on plain numbers: small arguments of every type that rules take, and what it answers."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType, GeneratorType, ModuleType
from typing import Any

from kvproof.models.mutants.workload import CONFIGURATIONS
from kvproof.spec.logic import No
from kvproof.spec.radix import Position, Radix
from kvproof.spec.rules.blocks import AttentionStep, MambaStep, attention_step_possible, mamba_step_possible
from kvproof.spec.rules.checkpoint import export_column_free
from kvproof.spec.rules.chunk import Prefill
from kvproof.spec.rules.hits import cut_right, hit_within
from kvproof.spec.rules.ledger import sound

CALLS = 4_000
"""How many arguments a rule is tried on, the same ones every time. Positions reach five blocks, counts seven."""

JUDGES = (mamba_step_possible, attention_step_possible, sound, hit_within, cut_right, export_column_free)
"""What says itself what can be: asked about what can't, too, and about less of everything."""

_ODD = replace(
    CONFIGURATIONS["windows"], async_scheduling=True, max_model_len=7, step_tokens=3, speculative=1, connector="async"
)
_CONFIGURATIONS = (
    *CONFIGURATIONS.values(),
    _ODD,
    replace(_ODD, async_scheduling=False, step_tokens=2, speculative=3),
    replace(CONFIGURATIONS["EAGLE in a window"], hash_unit=1),
)

Arguments = tuple[Any, ...]


def arguments(module: ModuleType, function: FunctionType) -> list[Arguments]:
    """What to call the function with, as far as it may be called so. ``KeyError`` for a type that is not known here."""
    draw = _Draw(module, random.Random(function.__qualname__), function in JUDGES)
    owner = function.__qualname__.rpartition(".")[0]
    parameters = inspect.signature(function).parameters
    kinds = [owner if name == "self" else str(parameter.annotation) for name, parameter in parameters.items()]
    return [draw.call(kinds) for _ in range(CALLS)]


def answers(function: Callable[..., Any], calls: list[Arguments]) -> list[object]:
    """What the function answers, in a form that compares."""
    return [_answer(function, call) for call in calls]


def _answer(function: Callable[..., Any], call: Arguments) -> object:
    try:
        return plain(function(*call))
    except Exception as error:
        return type(error).__name__


def plain(value: object) -> object:
    """The value as tuples and numbers. A false truth is false, with or without a witness."""
    if isinstance(value, No):
        return False
    if isinstance(value, Position):
        return value.block, value.unit, value.offset
    if dataclasses.is_dataclass(value):
        return tuple(plain(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, tuple | list | GeneratorType):
        return tuple(plain(part) for part in value)
    return value


class _Draw:
    """Draws values by the annotations of ``module``. ``anything``: also what no scheduler can ask."""

    def __init__(self, module: ModuleType, source: random.Random, anything: bool) -> None:
        self._module, self._random, self._anything = module, source, anything
        self._radix, self._most = Radix(1, 1), 1

    def call(self, kinds: Sequence[str]) -> Arguments:
        self._most = self._random.choice((2, 5))
        self._radix = Radix(self._random.choice((1, 2, 4)), self._random.choice((1, 2, 3)))
        return tuple(self._value(kind) for kind in kinds)

    def _value(self, kind: str) -> Any:
        draw, radix = self._random, self._radix
        match kind:
            case "Int":
                return draw.randrange(-1, self._most) if self._anything else draw.randrange(8)
            case "int":
                return draw.randrange(33)
            case "Truth" | "bool":
                return draw.random() < 0.5
            case "Radix":
                return radix
            case "Position":
                return Position.on(draw.randrange(5 * radix.units * radix.unit + 2), radix)
            case "Config":
                return draw.choice(_CONFIGURATIONS)
            case "Group":
                return draw.choice(draw.choice(_CONFIGURATIONS).groups)
            case _ if kind.startswith(("Sequence[", "list[")):
                return [self._value(kind[kind.index("[") + 1 : -1]) for _ in range(draw.randrange(3))]
            case _ if kind.startswith("tuple["):
                return tuple(self._value(part) for part in kind[6:-1].split(", "))
            case _ if kind.endswith(" | None"):
                return draw.choice((None, self._value(kind.removesuffix(" | None"))))
        made = vars(self._module)[kind]
        while True:
            value = made(*(self._value(str(field.type)) for field in dataclasses.fields(made)))
            if self._anything or _possible(value):
                return value


def _possible(value: object) -> bool:
    """Whether a scheduler can ask this: what a rule answers elsewhere is nobody's business."""
    match value:
        case MambaStep():
            return bool(mamba_step_possible(value))
        case AttentionStep():
            return bool(attention_step_possible(value))
        case Prefill():
            return bool(value.start < value.offered) and bool(value.start < value.prefill_end)
    return True
