"""The file that a recording engine writes: JSON lines, whole steps at a time, and never more than its bound.

A trace is ``FILE`` and, once it grew, ``FILE.1`` (the one before) up to ``FILE.3``. Each begins with a header and, all
but the first ever, with a snapshot from which checking can start.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

SCHEMA: Final = 1
"""Changes when an old reader would misread a new file."""

MARK: Final = "kvproof_trace"
FILES: Final = 4
"""A trace is kept in so many files, the oldest of which is dropped."""

Snapshot = Callable[[], Sequence[Sequence[Any]]]


class TraceFile:
    """``limit`` is in bytes, for all files together. ``header`` is what each file begins with, besides what belongs to
    the file itself. ``snapshot`` gives the lines after the header of a later file.

    A step is written at once. What can't be written is taken back, so that no file has half a line inside, and
    ``failed`` says why nothing is written any more. A snapshot that is larger than a file's share makes files larger.
    """

    def __init__(self, path: Path, limit: int, header: dict[str, Any], snapshot: Snapshot) -> None:
        self.path, self.header, self.snapshot = path, header, snapshot
        self.failed = ""
        self.part = 0
        self._share = max(1, limit // FILES)
        self._encoder = msgspec.json.Encoder()
        self._run = secrets.token_hex(8)
        self._size = 0
        self._due = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open(os.O_EXCL)
        self._begin(())

    def write(self, lines: Sequence[Sequence[Any]]) -> None:
        """Append one step's lines, and go on in another file if this one is full. Raises nothing."""
        if self.failed or not lines:
            return
        try:
            self._append(self._encoder.encode_lines(lines))
            if self._size > self._due:
                self._rotate()
        except OSError as error:
            self.failed = f"{self.path}: {error.strerror or error}"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)
        self.failed = self.failed or "closed"

    def _open(self, how: int = 0) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | how, 0o600)

    def _append(self, data: bytes) -> None:
        view, written = memoryview(data), 0
        try:
            while written < len(data):
                written += os.write(self._file, view[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += written

    def _begin(self, lines: Sequence[Sequence[Any]]) -> None:
        head = {MARK: SCHEMA, "run": self._run, "part": self.part, **self.header}
        self._append(self._encoder.encode_lines([head, *lines]))
        self._due = max(self._share, 2 * self._size)

    def _rotate(self) -> None:
        os.close(self._file)
        for number in range(FILES - 1, 0, -1):
            older = Path(f"{self.path}.{number}")
            newer = Path(f"{self.path}.{number - 1}") if number > 1 else self.path
            if newer.exists():
                os.replace(newer, older)
        self.part += 1
        self._size = 0
        self._file = self._open()
        self._begin(self.snapshot())
