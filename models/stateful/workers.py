"""Searches in forked processes, so that a release is imported once. Findings come back as they are made."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import Any

from kvproof.models.stateful.drive import Identity, told
from kvproof.models.stateful.notes import Kept, Report, Tally

Check = Callable[[], None]
"""Raises ``KeyboardInterrupt`` if somebody has asked for an end. Called where a search may stop."""

WorkOne = Callable[[int, Report, Callable[[Tally], None], Check], Tally]
"""(worker, report a finding, report progress, check for an interrupt) to the worker's tally."""

Tick = Callable[[int, int, int, frozenset[Identity], tuple[Kept, ...]], None]
"""Told of progress: worker, steps, runs, everything seen, and what was kept since it was told last."""

SECONDS_TO_END = 10.0
"""How long a worker may take to hand over what it has after an interrupt. Then it is killed."""

_SECONDS_BETWEEN_TICKS = 0.5
_SECONDS_BETWEEN_LOOKS = 0.2
_STOPS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Keeps interrupts back while it is entered: they are counted, and :meth:`check` raises where it is safe.

    An exception out of a signal handler comes up anywhere: halfway through a message from a worker, or in a callback of
    the garbage collector, where it is printed and lost. Handlers are asked as ever; only a ``KeyboardInterrupt`` that
    they raise is kept back. The second one gets through at once unless ``patient`` is set: an engine that hangs never
    comes to a check.
    """

    def __init__(self) -> None:
        self.count = 0
        self.patient = False
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _STOPS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handlers[number](number, frame)
        except KeyboardInterrupt:
            self.count += 1
            if self.count > 1 and not self.patient:
                raise

    def check(self) -> None:
        if self.count:
            raise KeyboardInterrupt


def run_workers(
    count: int,
    search: WorkOne,
    found: Report,
    tick: Tick,
    interrupts: Interrupts,
) -> list[Tally]:
    """Run ``search`` in ``count`` forked processes and return their tallies in order.

    An interrupt is passed on, and the tallies that come back are marked; a second one, or :data:`SECONDS_TO_END`, ends
    the workers. A worker that is lost leaves a tally with the findings it had sent and an error that says so.
    """
    interrupts.patient = True
    tallies = [Tally() for _ in range(count)]
    workers = _start(count, search, tallies)
    open_: dict[Any, int] = {receiver: number for number, (receiver, _) in workers.items()}
    passed_on = 0
    deadline = float("inf")
    while open_:
        for ready in wait(list(open_), _SECONDS_BETWEEN_LOOKS):
            number = open_[ready]
            if not _receive(workers[number][0], number, tallies, found, tick):
                del open_[ready]
        if interrupts.count and not passed_on:
            deadline = time.monotonic() + SECONDS_TO_END
            for _, child in workers.values():
                child.terminate()
            for tally in tallies:
                tally.interrupted = True
        elif interrupts.count > passed_on or time.monotonic() > deadline:
            for _, child in workers.values():
                child.kill()
        passed_on = interrupts.count
    for number, (connection, child) in workers.items():
        connection.close()
        child.join()
        if child.exitcode and not passed_on:
            tallies[number].errors.append(f"worker {number} was lost (exit code {child.exitcode})")
    return tallies


def _start(count: int, search: WorkOne, tallies: list[Tally]) -> dict[int, tuple[Connection, BaseProcess]]:
    """The workers that were started, by number: all, or those before an interrupt or before one that can't be."""
    context = multiprocessing.get_context("fork")
    _flush()
    workers: dict[int, tuple[Connection, BaseProcess]] = {}
    # Until a child knows what to do with an interrupt it must not see one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        for number in range(count):
            if signal.sigpending() & set(_STOPS):
                break
            try:
                receiver, sender = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(target=_child, args=(number, search, sender), daemon=True)
                process.start()
            except OSError as error:
                reason = error.strerror or error
                tallies[number].errors.append(
                    f"only {number} of {count} workers could be started ({reason}): use fewer"
                )
                break
            sender.close()
            workers[number] = (receiver, process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return workers


def _receive(
    connection: Connection,
    number: int,
    tallies: list[Tally],
    found: Report,
    tick: Tick,
) -> bool:
    """Take one message. False when the worker has closed its end."""
    try:
        kind, value = connection.recv()
    except (EOFError, OSError):
        return False
    if kind == "finding":
        tallies[number].findings.append(value)
        found(value)
    elif kind == "tick":
        tick(number, *value)
    elif kind == "error":
        tallies[number].errors.append(value)
    else:
        interrupted = tallies[number].interrupted
        tallies[number] = value
        value.interrupted |= interrupted
    return True


def _child(number: int, search: WorkOne, sender: Connection) -> None:
    """A worker's whole life. The parent decides when it is interrupted: by SIGTERM, or by not being there any more."""
    stopping = False
    parent = os.getppid()

    def stop(_: int, __: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    def check() -> None:
        if stopping or os.getppid() != parent:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)
    last = time.monotonic()

    def tick(tally: Tally) -> None:
        nonlocal last
        check()
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_TICKS:
            last = now
            send("tick", tally.so_far())

    def send(kind: str, value: Any) -> None:
        # Without a parent nobody listens; the next tick ends the search.
        with contextlib.suppress(OSError):
            sender.send((kind, value))

    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        check()
        tally = search(number, lambda finding: send("finding", finding), tick, check)
        send("tally", tally)
    except KeyboardInterrupt:
        pass
    except BaseException as error:
        send("error", f"worker {number} failed: {told(error)}")
    finally:
        sender.close()
        _flush()
        os._exit(0)


def _flush() -> None:
    """What is in the buffers must not be written once more by a worker; what nobody can write is no matter here."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.flush()
