"""Workers on a Ray cluster instead of forked ones: the same tasks, seeds and shares, and so the same findings.

A worker opens the subject itself (it fetches and imports a release where it runs), and posts each finding when it is
made. One that is lost is started again from its seed; what it had posted is kept in any case.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvproof.errors import UsageError

if TYPE_CHECKING:
    from kvproof.models.stateful.campaign import Spread, Task
    from kvproof.models.stateful.notes import Report, Tally
    from kvproof.models.stateful.workers import Interrupts, Tick

LOCAL = "local"
RETRIES = 3
_SECONDS_BETWEEN_LOOKS = 0.3
_SECONDS_BETWEEN_QUESTIONS = 1.0
_SECONDS_TO_END = 15.0
_SECONDS_TO_ANSWER = 10.0


@contextlib.contextmanager
def ray_workers(address: str, subject: str, workers: int, say: Callable[[str], None]) -> Iterator[Spread]:
    """How to spread tasks about ``subject`` (as named on the command line) over the cluster at ``address``; ``local``
    starts one here with ``workers`` processes.

    Raises :class:`UsageError` where Ray is not installed, or no cluster answers.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError("Ray is not installed: pip install 'kvproof[ray]', or leave out --ray") from error
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    given: dict[str, Any] = {"num_cpus": workers + 1} if address == LOCAL else {}
    say(f"starting Ray with {workers} workers" if address == LOCAL else f"joining Ray at {address}")
    _require_somebody(address)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address, log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR, **given)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise UsageError(f"no Ray cluster at {address}: {str(error).splitlines()[0]}") from error
    except SystemExit as error:  # what its handler makes of a request for an end
        raise KeyboardInterrupt from error
    finally:
        for number, handler in handlers.items():  # Ray has its own, which exits on the spot
            signal.signal(number, handler)
    try:
        yield lambda tasks, found, tick, interrupts: _spread(ray, subject, tasks, found, tick, interrupts)
    finally:
        ray.shutdown()


def _require_somebody(address: str) -> None:
    """Raise :class:`UsageError` where nobody listens: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or "://" in address.removeprefix("ray://"):
        return
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 2**16):
        raise UsageError(f"no Ray cluster at {address}: {port!r} is no port: write it as in 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_ANSWER).close()
    except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
        raise UsageError(f"no Ray cluster at {address}: {error}") from error


class _Mailbox:
    """What workers have posted, and whether they are to stop. An actor: it lives in a process of its own."""

    def __init__(self) -> None:
        self.posted: list[tuple[int, str, Any]] = []
        self.stopping = False

    def post(self, worker: int, kind: str, value: Any) -> None:
        self.posted.append((worker, kind, value))

    def take(self) -> list[tuple[int, str, Any]]:
        taken, self.posted = self.posted, []
        return taken

    def stop(self) -> None:
        self.stopping = True

    def stopped(self) -> bool:
        return self.stopping


def _work(task: Task, subject: str, mailbox: Any) -> Tally:
    """One task, where Ray runs it."""
    import ray

    from kvproof import subjects
    from kvproof.models.stateful.campaign import do

    last = time.monotonic()

    def post(kind: str, value: Any) -> None:
        ray.get(mailbox.post.remote(task.worker, kind, value))

    def check() -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_QUESTIONS:
            last = time.monotonic()
            if ray.get(mailbox.stopped.remote()):
                raise KeyboardInterrupt

    told = last

    def tick(tally: Tally) -> None:
        nonlocal told
        if time.monotonic() - told >= _SECONDS_BETWEEN_QUESTIONS:
            told = time.monotonic()
            post("tick", tally.so_far())

    post("process", os.getpid())
    opened = subjects.open_subject(subjects.parse(subject), lambda _: None)
    return do(task, opened, lambda finding: post("finding", finding), tick, check, began=time.monotonic())


def _spread(
    ray: Any, subject: str, tasks: Sequence[Task], found: Report, tick: Tick, interrupts: Interrupts
) -> list[Tally]:
    from kvproof.models.stateful.drive import told
    from kvproof.models.stateful.notes import Tally

    interrupts.patient = True
    mailbox = ray.remote(num_cpus=0)(_Mailbox).remote()
    remote = ray.remote(num_cpus=1, max_retries=RETRIES)(_work)
    running = {remote.remote(task, subject, mailbox): place for place, task in enumerate(tasks)}
    tallies = [Tally() for _ in tasks]

    def read() -> None:
        for worker, kind, value in ray.get(mailbox.take.remote()):
            if kind == "finding":
                tallies[worker].findings.append(value)
                found(value)
            elif kind == "tick":
                tick(worker, *value)

    deadline = float("inf")
    while running:
        done, _ = ray.wait(list(running), num_returns=1, timeout=_SECONDS_BETWEEN_LOOKS)
        read()
        for one in done:
            place = running.pop(one)
            try:
                whole: Tally = ray.get(one)
            except Exception as error:
                tallies[place].errors.append(f"worker {place} was lost: {told(error)}")
            else:
                # What an earlier start of it had posted, and this one did not come across again.
                kept = [finding for finding in tallies[place].findings if finding not in whole.findings]
                whole.findings = [*whole.findings, *(one for one in kept if tasks[place].phase == "search")]
                tallies[place] = whole
        if interrupts.count and deadline == float("inf"):
            deadline = time.monotonic() + _SECONDS_TO_END
            ray.get(mailbox.stop.remote())
        if time.monotonic() > deadline:
            for one in running:
                ray.cancel(one, force=True)
            break
    read()
    for tally in tallies:
        tally.interrupted |= interrupts.count > 0
    return tallies
