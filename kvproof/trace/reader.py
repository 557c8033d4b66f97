"""Reading a trace: its header, and one event per line. What is no trace is refused with the line that shows it.

A line is a list. Its first entry says what happened; the others follow here (``r`` and ``s`` are the numbers of
sequences, −1 is nobody; a request is its sequence):

- ``seq`` s, id, base, shared, length: a request's tokens. The first ``shared`` are those of ``base``, the others fresh.
- ``known`` s, id, runs: the same amid a run; the numbers of its tokens, each the first and how many count up from it.
- ``grow`` s, numbers: tokens that came to be its own unsampled. ``forget`` [s …]: they are not spoken of any more.
- ``submit`` r, prompt, max_tokens; ``offer`` r, depth, asynchronous, divergent; ``abort`` r; ``reset``;
  ``gone`` r, stopped: what clients, store, operator and model did.
- ``begin`` step: a schedule begins. ``take`` ``hold`` ``free`` block, r, references [, queued]: its count changed.
- ``key`` block, r, s, tokens, group, noted, step: a block is a key for the first ``tokens`` of s (−1: of nobody known),
  due when that step has run (−1: now). ``unkey`` block, r: it carries no key any more.
- ``table`` r, group, start, stop, blocks: the slots [start, stop) of a table were replaced.
- ``lookup``, ``truncate``, ``resume``, ``split``, ``ask``, ``allocate``: the calls of :mod:`kvproof.spec.events`.
- ``miss`` r, fields: a lookup that fell short (:class:`kvproof.impl.vllm.live.why.Miss`).
- ``step`` step, rows, order, copies, zeroed, finished, preempted, exports: the scheduler's output. A row is
  r, computed, tokens [, drafts, blocks, how]; how is 0: its table grows, 1: it is new, 2: it comes back.
- ``ran`` step, [[r, numbers] …]: what was sampled. ``end`` step, free, null references, [[r, length] …]: the step is
  over, and all that was sampled was kept but for these.
- ``passing`` [[owner, block] …]: who else holds blocks from now on. ``idle`` lines: nothing runs; what is left.
- ``crash`` location, error, line. ``stop`` why: the recording ended. ``snapshot`` step, ``trust`` [r …]: a later file
  begins; what these had until then is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from kvproof.errors import UsageError
from kvproof.impl.vllm.live.tracefile import MARK, SCHEMA
from kvproof.spec.config import Config, Group

Line = list[Any]

_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_LONGEST: Final = 64_000_000
_MOST_BLOCKS: Final = 1 << 26


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    kvproof_trace: int
    run: str
    part: int
    subject: str
    config: Config
    lacking: dict[str, str]
    contents: bool


@dataclass(frozen=True)
class Trace:
    """One file. ``part`` counts the files of one ``run`` from 0."""

    path: Path
    run: str
    part: int
    subject: str
    config: Config
    lacking: dict[str, str]
    contents: bool

    @property
    def release(self) -> str:
        return self.subject.removeprefix("vllm==")

    def events(self, note: Any) -> Iterator[tuple[int, Line]]:
        """The lines after the header, numbered from 2 as an editor does. ``note`` is told of a torn last line.

        Raises :class:`UsageError` for a line that is no event.
        """
        decode = msgspec.json.Decoder().decode
        with _opened(self.path) as file:
            file.readline()
            for number, raw in enumerate(file, 2):
                if raw[-1:] != b"\n":
                    note(f"{self.path}: the last line is torn, as a crash leaves it: left out")
                    return
                try:
                    line = decode(raw)
                except _UNREADABLE as error:
                    raise broken(self.path, number, f"it is not JSON ({error})") from error
                if type(line) is not list or not line or type(line[0]) is not str:
                    raise broken(self.path, number, "it is no event")
                yield number, line


def broken(path: Path, number: int, why: str) -> UsageError:
    """What to say of a line that can't be read."""
    return UsageError(f"{path}: line {number} is damaged: {why}: check the part before it (head -n {number - 1})")


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror or error}") from error


def read(path: Path) -> Trace:
    """The header of ``path``. Raises :class:`UsageError` if it is no trace, or one of another schema."""
    with _opened(path) as file:
        try:
            raw = file.readline(_LONGEST)
        except OSError as error:
            raise UsageError(f"can't read {path}: {error.strerror or error}") from error
    if not raw.strip():
        raise UsageError(f"{path}: not a kvproof trace: it is empty")
    try:
        data = msgspec.json.decode(raw)
    except _UNREADABLE as error:
        zipped = " (it is compressed: gunzip it first)" if raw[:2] == b"\x1f\x8b" else ""
        raise UsageError(f"{path}: not a kvproof trace: its first line is not JSON{zipped}") from error
    version = data.get(MARK) if isinstance(data, dict) else None
    if type(version) is not int:
        raise UsageError(f"{path}: not a kvproof trace: its first line has no {MARK!r} (KVPROOF=record writes one)")
    if version != SCHEMA:
        way = "upgrade kvproof" if version > SCHEMA else "check it with the kvproof that wrote it"
        raise UsageError(f"{path}: a trace of schema {version}, this kvproof reads {SCHEMA}: {way}")
    try:
        header = msgspec.convert(data, _Header)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: its header is damaged: {str(error).replace('`', '')}") from error
    if (
        not header.config.groups
        or not 0 < header.config.num_blocks < _MOST_BLOCKS
        or any(g.block_size < 1 for g in header.config.groups)
    ):
        raise UsageError(f"{path}: its header is damaged: no engine has such a configuration")
    return Trace(path, header.run, header.part, header.subject, header.config, header.lacking, header.contents)


def arrange(paths: Sequence[Path]) -> list[list[Trace]]:
    """The files of ``paths`` as runs, each in the order in which they were written and without a gap.

    A gap makes two runs of one: the later starts from its snapshot.
    """
    traces = [read(path) for path in dict.fromkeys(paths)]
    order = {run: i for i, run in enumerate(dict.fromkeys(trace.run for trace in traces))}
    traces.sort(key=lambda trace: (order[trace.run], trace.part))
    runs: list[list[Trace]] = []
    for trace in traces:
        last = runs[-1][-1] if runs else None
        if last is not None and (last.run, last.part + 1) == (trace.run, trace.part):
            runs[-1].append(trace)
        elif last is None or (last.run, last.part) != (trace.run, trace.part):
            runs.append([trace])
    return runs


__all__ = ["Config", "Group", "Line", "Trace", "arrange", "broken", "read"]
