"""Planting: how one method of one engine is made to go wrong from outside.

Nothing of this is reachable from a healthy engine, so that the engine's own code has no switches in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, Literal

from kvproof.impl.reference.engine import Engine

Group = Literal["S1", "S2", "S3", "S4", "others"]
"""What a fault breaks. S1: slot p holds the state at (p + 1) · B. S2: only recurrent groups may be short. S3: the
estimate is what is taken. S4: references are holders, and the newest reusable state is held."""


@dataclass(frozen=True)
class Mutant:
    """``id`` names it, ``fault`` says in one sentence what is wrong, ``mirrors`` which public fault it is one of."""

    id: str
    group: Group
    fault: str
    mirrors: str
    plant: Callable[[Engine], None]


PLANTED: list[Mutant] = []
"""Every mutant whose module has been imported."""


def mutant(group: Group, fault: str, mirrors: str) -> Callable[[Callable[[Engine], None]], Callable[[Engine], None]]:
    """Register a planter under its own name."""

    def register(plant: Callable[[Engine], None]) -> Callable[[Engine], None]:
        PLANTED.append(Mutant(plant.__name__.replace("_", "-"), group, fault, mirrors, plant))
        return plant

    return register


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """``owner.name(*args)`` becomes ``around(original, *args)``, on this one object.

    Raises ``TypeError`` where ``around`` can't be called as the method is (all by position, and what has a default left
    out or by name): it would fall over, which any checker notices, and nothing would be known of the fault that was
    meant.
    """
    original = getattr(owner, name)
    theirs, (_, *ours) = (list(signature(f).parameters.values()) for f in (original, around))
    optional = {p.name: p for p in theirs if p.default is not Parameter.empty}
    needed = [p for p in theirs if p.name not in optional]
    try:
        for given, named in ((theirs, {}), (needed, {}), (needed, optional)):
            signature(around).bind(original, *given, **named)
    except TypeError as error:
        takes, wanted = (", ".join(map(str, parameters)) for parameters in (ours, theirs))
        raise TypeError(f"{around.__qualname__} takes {takes}, and {name} {wanted}: {error}") from None
    setattr(owner, name, lambda *args, **more: around(original, *args, **more))
