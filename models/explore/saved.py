"""What was explored, in a file: to go on from where an exploration was stopped.

One line of JSON says what it is of; the states and how each was reached follow as plain numbers, and then a hash of all
that. Nothing in it is run.
"""

from __future__ import annotations

import functools
import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvproof.models.explore.scope import Scope
from kvproof.models.explore.shard import Shard
from kvproof.models.sources import hash_of

FORMAT = 2
DIGEST = hashlib.sha256().digest_size

DECIDING = ("kvproof.models.explore.search",)
"""Where it is decided which states there are, and what is held to be broken."""


def fingerprint(scope: Scope) -> str:
    """What the file is of: everything that decides which states there are, apart from code."""
    # A set comes in another order in every process.
    told = repr((replace(scope, moves=frozenset()), sorted(scope.moves)))
    return hashlib.sha256(told.encode()).hexdigest()


@functools.cache
def code() -> str:
    """A hash of the sources of :data:`DECIDING` and all that they import of kvproof."""
    return hash_of(*DECIDING)


def save(file: Path, shard: Shard, depth: int) -> None:
    """Write ``file`` whole or not at all. Raises ``OSError``."""
    monitor = shard.judge.monitor
    head = {
        "kvproof_states": FORMAT,
        "scope": shard.scope.name,
        "fingerprint": fingerprint(shard.scope),
        "code": code(),
        "symmetry": shard.encoding.symmetry,
        "depth": depth,
        "states": len(shard.states),
        "frontier": len(shard.frontier),
        "ahead": len(shard.ahead),
        "transitions": shard.transitions,
        "taken": dict(shard.taken),
        "evaluations": dict(monitor.evaluations) if monitor is not None else None,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.{id(shard):x}.new")
    try:
        with beside.open("wb") as out:
            digest = hashlib.sha256()
            for part in _parts(shard, head):
                digest.update(part)
                out.write(part)
            out.write(digest.digest())
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def _parts(shard: Shard, head: dict[str, Any]) -> Iterator[bytes]:
    yield json.dumps(head).encode() + b"\n"
    yield array("H", map(len, shard.states)).tobytes()
    yield b"".join(shard.states)
    yield shard.parents.tobytes() + shard.moves.tobytes()
    yield array("Q", [*shard.frontier, *shard.ahead]).tobytes()


def load(file: Path, shard: Shard) -> int:
    """Fill ``shard`` from ``file``. Answers the depth; 0 where there is no such file.

    Raises ``ValueError`` for a file that is damaged, of another scope, or of a scope or code that has changed since.
    """
    try:
        if file.exists() and not file.is_file():  # a pipe would keep whoever reads it waiting
            raise ValueError(f"can't go on from {file}: it is no regular file: name another folder")
        data = file.read_bytes()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise ValueError(f"can't go on from {file}: {error.strerror or error}: name another folder") from error
    line, _, rest = data.partition(b"\n")
    try:
        head = json.loads(line)
        if not isinstance(head, dict) or head.get("kvproof_states") != FORMAT:
            raise ValueError("not written by this kvproof")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"can't go on from {file}: it holds no exploration ({error}): remove it") from error
    if hashlib.sha256(memoryview(data)[:-DIGEST]).digest() != data[-DIGEST:]:
        raise ValueError(f"can't go on from {file}: it is damaged: remove it")
    judged = shard.judge.monitor is not None
    same = head.get("fingerprint") == fingerprint(shard.scope) and head.get("symmetry") == shard.encoding.symmetry
    if not same or (head.get("evaluations") is not None) != judged:
        raise ValueError(f"can't go on from {file}: it is of scope {head.get('scope')} as it was then, and not of "
                         f"{shard.scope.name} as it is now: remove it or name another folder")  # fmt: skip
    if head.get("code") != code():
        raise ValueError(f"can't go on from {file}: other code judged what is in it: remove it or name another folder")
    try:
        return _fill(shard, head, rest[:-DIGEST])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"can't go on from {file}: it is damaged ({error}): remove it") from error


def _fill(shard: Shard, head: dict[str, Any], data: bytes) -> int:
    count, waiting = int(head["states"]), int(head["frontier"]) + int(head["ahead"])
    sizes, parents, moves, ahead = array("H"), array("Q"), array("I"), array("Q")
    place = sizes.itemsize * count
    sizes.frombytes(data[:place])
    states = []
    for size in sizes:
        states.append(data[place : place + size])
        place += size
    for numbers, length in ((parents, count), (moves, count), (ahead, waiting)):
        end = place + numbers.itemsize * length
        numbers.frombytes(data[place:end])
        place = end
    if place != len(data) or not count or len(set(states)) != count or (ahead and max(ahead) >= count):
        raise ValueError("its parts do not fit together")
    shard.states, shard.parents, shard.moves = states, parents, moves
    shard.index = {state: index for index, state in enumerate(states)}
    shard.frontier, shard.ahead = list(ahead[: head["frontier"]]), list(ahead[head["frontier"] :])
    shard.transitions, shard.taken = int(head["transitions"]), Counter(head["taken"])
    if shard.judge.monitor is not None:
        shard.judge.monitor.evaluations.update(head["evaluations"])
    return int(head["depth"])
