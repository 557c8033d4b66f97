"""Searches in forked processes, so that a release is imported once. Findings come back as they are made."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from kvproof.models.stateful.search import Tally
from kvproof.spec.finding import Finding

SearchOne = Callable[[int, Callable[[Finding], None], Callable[[Tally], None]], Tally]
"""(worker, report a finding, report progress) to the worker's tally."""

_SECONDS_BETWEEN_TICKS = 0.5
_STOPS = (signal.SIGINT, signal.SIGTERM)


def run_workers(
    count: int, search: SearchOne, found: Callable[[Finding], None], tick: Callable[[int, int, int], None]
) -> list[Tally]:
    """Run ``search`` in ``count`` forked processes and return their tallies in order.

    An interrupt is passed on, and the tallies that come back are marked. A worker that is lost leaves a tally with the
    findings it had sent and an error that says so.
    """
    context = multiprocessing.get_context("fork")
    sys.stdout.flush()
    sys.stderr.flush()
    workers: list[tuple[Connection, BaseProcess]] = []
    # Until a child knows what to do with an interrupt it must not see one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        for number in range(count):
            receiver, sender = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(target=_child, args=(number, search, sender), daemon=True)
            process.start()
            sender.close()
            workers.append((receiver, process))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    tallies = [Tally() for _ in range(count)]
    open_: dict[Any, int] = {receiver: number for number, (receiver, _) in enumerate(workers)}
    interrupts = 0
    while open_:
        try:
            for ready in wait(list(open_)):
                number = open_[ready]
                if not _receive(workers[number][0], number, tallies, found, tick):
                    del open_[ready]
        except KeyboardInterrupt:
            interrupts += 1
            for _, child in workers:
                if interrupts == 1:
                    child.terminate()
                else:
                    child.kill()
            for tally in tallies:
                tally.interrupted = True
    for number, (connection, child) in enumerate(workers):
        connection.close()
        child.join()
        if child.exitcode and not interrupts:
            tallies[number].errors.append(f"worker {number} was lost (exit code {child.exitcode})")
    return tallies


def _receive(
    connection: Connection,
    number: int,
    tallies: list[Tally],
    found: Callable[[Finding], None],
    tick: Callable[[int, int, int], None],
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


def _child(number: int, search: SearchOne, sender: Connection) -> None:
    """A worker's whole life. The parent decides when it is interrupted: by SIGTERM, or by not being there any more."""
    stopping = False
    parent = os.getppid()

    def stop(_: int, __: FrameType | None) -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)
    told = time.monotonic()

    def tick(tally: Tally) -> None:
        nonlocal told
        # An interrupt that arrives in a destructor or a callback is swallowed there: so it is asked for, too.
        if stopping or os.getppid() != parent:
            raise KeyboardInterrupt
        now = time.monotonic()
        if now - told >= _SECONDS_BETWEEN_TICKS:
            told = now
            send("tick", (tally.steps, tally.examples))

    def send(kind: str, value: Any) -> None:
        # Without a parent nobody listens; the next tick ends the search.
        with contextlib.suppress(OSError):
            sender.send((kind, value))

    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        tally = search(number, lambda finding: send("finding", finding), tick)
        stopping = True
        send("tally", tally)
    except KeyboardInterrupt:
        pass
    except BaseException as error:
        text = traceback.format_exception_only(error)[-1].strip()
        send("error", f"worker {number} failed: {text}")
    finally:
        sender.close()
        sys.stdout.flush()
        os._exit(0)
