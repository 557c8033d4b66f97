"""Exploring a scope by the code that was generated for it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvproof.models.explore.encoding import Encoding
from kvproof.models.explore.native import build
from kvproof.models.explore.native.build import Unavailable
from kvproof.models.explore.scope import Move, Scope

NOBODY = (1 << 64) - 1


@dataclass(frozen=True)
class NativeExplored:
    """What an exploration visited. ``complete``: nothing new appeared any more; otherwise it ended at ``depth``.

    ``faults`` are the moves in which the machine did what no rule allows (:class:`kvproof.spec.machine.blocks.Faulty`):
    the state's bytes and the move, for whoever wants to carry it out with the catalogue judging. Nothing follows from
    them, as where moves are judged. ``digest`` names the set of states, as :func:`digest_of` does.
    """

    scope: Scope
    states: int
    transitions: int
    depth: int
    complete: bool
    seconds: float
    faults: tuple[tuple[bytes, Move], ...]
    _states: tuple[bytes, ...] = ()

    def states_bytes(self) -> Sequence[bytes]:
        """Every state."""
        return self._states

    @property
    def digest(self) -> str:
        return digest_of(self._states)


def digest_of(states: Sequence[bytes]) -> str:
    """What names a set of states."""
    return hashlib.sha256(b"".join(sorted(len(one).to_bytes(2, "big") + one for one in states))).hexdigest()


def explore_native(
    scope: Scope,
    *,
    most: int = 5_000_000,
    workers: int = 1,
    symmetry: bool = True,
    texts: Mapping[str, str] | None = None,
    keep: bool = True,
) -> NativeExplored:
    """Visit every state of ``scope`` with nobody judging, level by level, until there are ``most`` of them.

    The same states as :func:`kvproof.models.explore.search.explore` visits. ``workers`` are threads. ``texts`` take the
    place of modules, for whoever wants to see that a change is noticed. ``keep`` the states' bytes.

    Raises :class:`Unavailable` where there is no compiler or no mypy, ``Untranslatable`` for sources that have no
    translation, and whatever the machine would raise in Python.
    """
    search = Search(scope, workers, symmetry, texts)
    try:
        began = time.perf_counter()
        depth, states = 0, search.count()
        while states < most and search.waiting():
            search.level()
            depth, states = depth + 1, search.count()
        seconds = time.perf_counter() - began
        return NativeExplored(scope, states, search.transitions(), depth, not search.waiting(), seconds,
                              tuple(search.faults()), tuple(search.states()) if keep else ())  # fmt: skip
    finally:
        search.close()


class Search:
    """A search under way. One at a time: end it with :meth:`close`."""

    def __init__(self, scope: Scope, workers: int, symmetry: bool, texts: Mapping[str, str] | None = None) -> None:
        if workers < 1:
            raise ValueError("there must be a worker")
        made = _generated(scope, symmetry, texts)
        self.scope, self.workers = scope, workers
        self.encoding = Encoding(scope, symmetry)
        self.library = build.load(made.text)
        self._questions = [_Question(one) for one in made.questions]
        self._raised: BaseException | None = None
        self._ask = build.ASK(self._answer)  # kept: the library calls it as long as it is open
        self._handle: int | None = self.library.search_open(workers, self._ask)
        if self._handle is None:
            raise self._raised or MemoryError("the search can't begin")

    def _answer(self, number: int, numbers: Any, answer: Any) -> int:
        try:
            self._questions[number].answer(numbers, answer)
        except BaseException as error:
            self._raised = error
            return -1
        return 0

    def level(self) -> None:
        """Look at every state of the level."""
        self.library.search_level(self._handle)
        state, move = ctypes.c_uint64(), ctypes.c_uint32()
        failure = self.library.search_failure(self._handle, ctypes.byref(state), ctypes.byref(move))
        if failure is None:
            return
        if self._raised is not None:
            raise self._raised
        if failure == b"MemoryError":
            raise MemoryError("there is no memory for more states: visit fewer of them")
        if state.value == NOBODY:
            raise RuntimeError(f"the generated explorer can't begin: {failure.decode()}")
        told = self.state(state.value)[0]
        self._as_python_would(told, move.value)
        raise RuntimeError(f"the generated explorer stops at state {told.hex()}, move {move.value} of those possible: "
                           f"{failure.decode()}, which Python does not raise there")  # fmt: skip

    def _as_python_would(self, state: bytes, move: int) -> None:
        """Raise what the machine raises, in Python."""
        world, machine = self.encoding.decode(state), self.scope.machine()
        machine.become(world)
        self.scope.carry_out(machine, list(self.scope.possible(world))[move])
        self.encoding.encode(world)

    def waiting(self) -> int:
        """States of this level."""
        return int(self.library.search_waiting(self._handle))

    def count(self) -> int:
        return sum(self._counts())

    def _counts(self) -> list[int]:
        return [int(self.library.search_count(self._handle, place)) for place in range(self.workers)]

    def transitions(self) -> int:
        return int(self.library.search_transitions(self._handle))

    def state(self, number: int) -> tuple[bytes, int, int]:
        """A state's bytes, the number of the one that it was first reached from, and the place of the move there."""
        size, parent, move = ctypes.c_uint32(), ctypes.c_uint64(), ctypes.c_uint32()
        index, place = divmod(number, self.workers)
        data = self.library.search_state(
            self._handle, place, index, ctypes.byref(size), ctypes.byref(parent), ctypes.byref(move)
        )
        return ctypes.string_at(data, size.value), parent.value, move.value

    def states(self) -> Iterator[bytes]:
        """The bytes of every state."""
        for place in range(self.workers):
            size = self.library.search_dump(self._handle, place, None)
            buffer = ctypes.create_string_buffer(max(1, size))
            self.library.search_dump(self._handle, place, buffer)
            told, at = memoryview(buffer), 0
            while at < size:
                length = int.from_bytes(told[at : at + 4], "little")
                yield bytes(told[at + 4 : at + 4 + length])
                at += 4 + length

    def faults(self) -> Iterator[tuple[bytes, Move]]:
        """States and moves in which the machine was at fault."""
        for place in range(self.workers):
            for number in range(self.library.search_faults(self._handle, place)):
                move = ctypes.c_uint32()
                state = self.state(self.library.search_fault(self._handle, place, number, ctypes.byref(move)))[0]
                yield state, list(self.scope.possible(self.encoding.decode(state)))[move.value]

    def close(self) -> None:
        if self._handle is not None:
            self.library.search_close(self._handle)
            build.unload(self.library)
            self._handle = None


def _generated(scope: Scope, symmetry: bool, texts: Mapping[str, str] | None) -> Any:
    try:
        from kvproof.models.explore.native import generate
    except ImportError as error:
        raise Unavailable("the generated explorer needs mypy, which types the sources: pip install mypy") from error
    program = generate.read(texts) if texts else _program()
    return generate.generate(program, scope, symmetry)


@functools.cache
def _program() -> Any:
    """The sources as they are, read once in a process."""
    from kvproof.models.explore.native import generate

    return generate.read()


class _Question:
    """A Python function that is asked with numbers, and answers with numbers."""

    def __init__(self, asked: Any) -> None:
        module, _, name = asked.fullname.rpartition(".")
        self.function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        self.arguments, self.kind = asked.arguments, asked.answer

    def answer(self, numbers: Any, answer: Any) -> None:
        place = 0

        def take(kind: Any) -> Any:
            nonlocal place
            if kind.name == "tuple":
                return tuple(take(part) for part in kind.parts)
            place += 1
            return bool(numbers[place - 1]) if kind.name == "bool" else int(numbers[place - 1])

        found = self.function(*(take(kind) for kind in self.arguments))
        for at, value in enumerate(_numbers(found, self.kind)):
            answer[at] = value


@dataclass(frozen=True)
class _Number:
    name: str = "int"


_NUMBER = _Number()
"""The kind of what a rule's data class holds: it is written for solvers, and holds numbers here."""


def _numbers(value: Any, kind: Any) -> list[int]:
    """An answer as numbers. Raises ``TypeError`` for one that is not what its type says."""
    if kind.name == "tuple":
        return [one for part, inner in zip(value, kind.parts, strict=True) for one in _numbers(part, inner)]
    if kind.name == "list":
        return [len(value), *(one for part in value for one in _numbers(part, kind.part))]
    if kind.name == "object":
        return [one for name in value.__dataclass_fields__ for one in _numbers(getattr(value, name), _NUMBER)]
    if not isinstance(value, int) or abs(value) >= 1 << 63:
        raise TypeError(f"a rule answers {value!r} where a number is wanted")
    return [int(value)]


__all__ = ["NativeExplored", "Search", "Unavailable", "digest_of", "explore_native"]
