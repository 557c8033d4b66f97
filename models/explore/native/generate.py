"""The C++ of one scope: everything that an exploration without a judge can come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from mypy.nodes import Decorator, FuncDef

from kvproof.models.explore.encoding import Encoding
from kvproof.models.explore.native.functions import Function
from kvproof.models.explore.native.kinds import Untranslatable
from kvproof.models.explore.native.program import EXPLORER, Program, read
from kvproof.models.explore.native.translator import Question, Translator
from kvproof.models.explore.scope import Scope

ENTRIES = {
    "first_machine": f"{EXPLORER}.scope.Scope.machine",
    "become": "kvproof.spec.machine.machine.Machine.become",
    "possible": f"{EXPLORER}.scope.Scope.possible",
    "carry_out": f"{EXPLORER}.scope.Scope.carry_out",
    "copy_of": "kvproof.spec.machine.world.World.copy",
    "empty_world": "kvproof.spec.machine.world.World.empty",
    "encode": f"{EXPLORER}.encoding.Encoding.encode",
    "decode": f"{EXPLORER}.encoding.Encoding.decode",
}
"""What the search calls."""


@dataclass(frozen=True)
class Generated:
    """C++, and what it asks in Python."""

    text: str
    questions: tuple[Question, ...]


def objects_of(scope: Scope, symmetry: bool) -> dict[str, Any]:
    """The objects that there is one of in a scope, by class."""
    machine = scope.machine()
    encoding = Encoding(scope, symmetry)
    known = (scope, encoding, scope.config, scope.dialect, machine.sizes)
    return {f"{type(one).__module__}.{type(one).__qualname__}": one for one in known}


def functions(program: Program, objects: Mapping[str, Any], entries: Mapping[str, str]) -> Generated:
    """C++ for ``entries``, C++ names of functions, and whatever they reach. Raises :class:`Untranslatable`."""
    translator = Translator(program, objects)
    names = []
    for name, fullname in entries.items():
        node = program.look_up(fullname)
        assert isinstance(node, FuncDef | Decorator)
        names.append(f"static constexpr auto {name} = {translator.signature(node).name};")
    bodies: list[str] = []
    while translator.waiting:
        bodies += Function(translator, translator.waiting.popleft()).lines()
    questions = translator.question_lines()
    lines = [
        *translator.class_lines(),
        *translator.constants.lines,
        *translator.prototypes(),
        *questions,
        *bodies,
        *names,
    ]
    return Generated("\n".join(lines) + "\n", tuple(translator.questions))


def generate(program: Program, scope: Scope, symmetry: bool = True) -> Generated:
    """The whole of it, the search included."""
    made = functions(program, objects_of(scope, symmetry), ENTRIES)
    here = resources.files(__package__)
    runtime, search = ((here / name).read_text(encoding="utf-8") for name in ("runtime.hpp", "search.hpp"))
    return Generated(f"{runtime}\n{made.text}\n{search}", made.questions)


__all__ = ["Generated", "Untranslatable", "functions", "generate", "read"]
