"""The vLLM plug-in: invariants asserted inside a running server, if its environment asks for it.

vLLM calls :func:`register` in each of its processes. Unless ``KVPROOF`` is set it returns at once: nothing is imported
and nothing is changed.

``KVPROOF``
    ``touched`` judges each step by what it touched, ``full`` everything in every step. ``record`` judges nothing and
    writes what happens to a file, without a word of any text: ``kvproof trace check`` judges it elsewhere, ``kvproof
    why`` says which lookups fell short.
``KVPROOF_REACTION``
    ``log`` (unless set) says what broke and goes on, ``raise`` stops the engine there, ``dump`` writes the report to a
    file and logs one line.
``KVPROOF_DIR``
    where files go; ``kvproof-findings`` in the working directory unless set.
``KVPROOF_TRACE_MB``
    how large a recorded trace may become, in 10⁶ bytes; 256 unless set. Then the oldest quarter is dropped.

Whatever is reported is written as a scenario file that ``kvproof replay`` runs, as far as a scenario can tell it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

if TYPE_CHECKING:
    from kvproof.impl.vllm.live.install import Installed
    from kvproof.impl.vllm.live.report import Reported
    from kvproof.impl.vllm.live.why import Miss

logger = logging.getLogger("kvproof")

MODE: Final = "KVPROOF"
REACTION: Final = "KVPROOF_REACTION"
FOLDER: Final = "KVPROOF_DIR"
TRACE: Final = "KVPROOF_TRACE_MB"
OFF: Final = ("", "0", "off")
MISSES_TOLD: Final = 20
"""Short hits of one group kind and rule that are told line by line; the rest is counted."""

installed: Installed | None = None
"""What :func:`register` turned on in this process."""


def register() -> None:
    """What vLLM calls. Never raises: a server must not fail to start for the sake of its assertions."""
    global installed
    if installed is not None or os.environ.get(MODE, "").lower() in OFF:
        return
    _speak()
    try:
        installed = start(os.environ)
    except Exception as error:
        logger.error("kvproof: not turned on: %s", error)


def start(environ: Mapping[str, str]) -> Installed:
    """Turn assertions on as ``environ`` says. Raises :class:`ValueError` for a value that means nothing."""
    from kvproof.impl.vllm.live import install as live

    mode = _choice(environ, MODE, "touched", get_args(live.Mode))
    if mode == "record":
        return _record(environ)
    reaction = _choice(environ, REACTION, "log", get_args(live.Reaction))
    teller = Teller(Path(environ.get(FOLDER) or "kvproof-findings"), reaction)
    found = live.install(
        mode, reaction, _known(), teller.finding, teller.miss, lambda text: logger.warning("kvproof: %s", text)
    )
    atexit.register(_sum_up, found)
    logger.info("kvproof: assertions are on (%s, on a violation: %s, files in %s)", mode, reaction, teller.folder)
    return found


def _sum_up(found: Installed) -> None:
    """At the end, in the process that had an engine (a server has others, which load the plug-in, too)."""
    if found.engines or found.findings or found.errors:
        logger.info("kvproof: process %d: %s", os.getpid(), found.summary())


def _record(environ: Mapping[str, str]) -> Installed:
    """Record instead of judging."""
    from kvproof.impl.vllm.live import install as live
    from kvproof.impl.vllm.live.record import MEGABYTES, RecordTo

    folder = Path(environ.get(FOLDER) or "kvproof-findings")
    text = environ.get(TRACE) or str(MEGABYTES)
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = 0.0
    if not 1 <= megabytes <= 1e6:
        raise ValueError(f"{TRACE}={text!r} means nothing: use a number of megabytes from 1 to 1000000")
    probe = folder / ".kvproof"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{FOLDER}: nothing can be written to {folder} ({error.strerror or error})") from error
    found = live.install(
        "record",
        on_warning=lambda text: logger.warning("kvproof: %s", text),
        record=RecordTo(folder, megabytes),
    )
    logger.info("kvproof: recording to %s, at most %g MB an engine (kvproof trace check reads it)", folder, megabytes)
    return found


def _choice(environ: Mapping[str, str], name: str, default: str, values: tuple[str, ...]) -> Any:
    value = environ.get(name, "").lower() or default
    if value not in values:
        raise ValueError(f"{name}={environ[name]!r} means nothing: use one of {', '.join(values)}")
    return value


def _known() -> frozenset[tuple[str, str]]:
    """Identities that are recorded of this release."""
    from kvproof import findings
    from kvproof.impl.vllm.drift import release

    return findings.known_for(findings.load(), release().name).identities


def _speak() -> None:
    """Make what is said visible where nobody configured logging for us."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


class Teller:
    """Says what was found, and leaves a file of it."""

    def __init__(self, folder: Path, reaction: str) -> None:
        self.folder, self.reaction = folder, reaction
        self._told: dict[tuple[str, str], int] = {}
        self._files = 0

    def finding(self, found: Reported) -> None:
        """A violation: its text and its scenario."""
        lines = found.lines()
        if found.known:
            lines[0] = f"known: {lines[0]}"
        lines.append(f"  {self._replay(found)}")
        text = "\n".join(lines)
        if self.reaction == "dump":
            path = self._path(found).with_suffix(".txt")
            if self._write(path, text + "\n"):
                known = "known: " if found.known else ""
                logger.error("kvproof: %s%s: %s", known, found.violation.invariant, path)
                return
        logger.error("kvproof: %s", text)

    def miss(self, miss: Miss) -> None:
        """A lookup that ended short."""
        key = (miss.kind, miss.rule)
        told = self._told[key] = self._told.get(key, 0) + 1
        if told <= MISSES_TOLD:
            more = " (further ones like this are only counted)" if told == MISSES_TOLD else ""
            logger.info("kvproof: %s%s", miss.line(), more)

    def _replay(self, found: Reported) -> str:
        """Write the scenario. What to do with it, or why there is none."""
        from kvproof import scenario_file

        if found.finding is None:
            return "no scenario: there was no scheduler"
        path = self._path(found)
        try:
            scenario_file.save(path, found.finding.scenario, found.finding)
        except OSError as error:
            return f"no scenario: {path} can't be written ({error.strerror}): set {FOLDER} to another folder"
        if not found.replays:
            return f"the scenario is only the beginning of what happened: {path}"
        return f"replay: {scenario_file.replay_command(str(path), found.subject)}"

    def _path(self, found: Reported) -> Path:
        broken = found.violation
        name = f"{broken.invariant.lower().replace('.', '-')}-{broken.cause}"[:100]
        return self.folder / f"{name}-{os.getpid()}-step{found.step}.json"

    def _write(self, path: Path, text: str) -> bool:
        from kvproof import scenario_file

        try:
            scenario_file.write_whole(path, text)
        except OSError:
            return False
        return True
