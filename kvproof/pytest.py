"""A pytest plug-in: the catalogue of invariants, asserted during anybody's tests of vLLM.

``pytest -p kvproof.pytest --kvproof=full`` and every scheduler and cache that a test makes is watched while the test
uses it. The test in which an invariant breaks fails and says which one, also where the code under test swallowed the
exception. At the end a section tells how often each invariant was judged with something to judge: a run that judged
nothing says so.

vLLM is watched from the end of the collection on, so nothing of it is imported before the tests' own imports; where a
test imports it first, from the moment that import is complete. What a test runs in a process of its own is watched only
if that process is forked, and its findings fail the test only by the exception that they raise there.

Exit status as pytest's, and in the place of 0: 1 after a finding outside of any test, 3 after an error inside kvproof.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal

import pytest

from kvproof.errors import FOUND, MET, UNDETERMINED, UsageError, explain, require_file
from kvproof.invariants.catalogue import CATALOGUE, by_id

if TYPE_CHECKING:
    from kvproof.impl.vllm.live.install import Installed, Mode
    from kvproof.impl.vllm.live.report import Reported

_CACHE: Final = "vllm.v1.core.block_pool"
"""The module without which there is no cache: everything that is watched imports it."""

_MOST_TOLD: Final = 5
"""Findings that a failing test tells in full."""

_WENT_ON: Final = "  No exception came through: the code under test went on."

Phase = Literal["setup", "call", "teardown"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvproof", "invariants of vLLM's prefix cache")
    group.addoption(
        "--kvproof",
        choices=("touched", "full"),
        help="judge vLLM's cache while the tests use it: the blocks that a step touched, or the whole pool every time",
    )
    group.addoption(
        "--kvproof-report",
        type=Path,
        metavar="FILE",
        help="write what was judged and found to FILE (JSON)",
    )


def pytest_configure(config: pytest.Config) -> None:
    mode, report = config.getoption("--kvproof"), config.getoption("--kvproof-report")
    if mode is None:
        if report is not None:
            raise pytest.UsageError("--kvproof-report has nothing to report: add --kvproof=touched or --kvproof=full")
        return
    if report is not None:
        try:
            require_file(report, "kvproof's report")
        except UsageError as error:
            raise pytest.UsageError(str(error)) from error
    config.pluginmanager.register(Plugin(config, mode, report), "kvproof-live")


def text_of(found: Reported) -> str:
    """A finding as a failing test tells it: what was seen, where and since when, and what must hold instead."""
    lines = found.lines()
    with contextlib.suppress(KeyError):  # of no catalogue: the witness has to do
        lines.insert(1, f"  must hold: {by_id(found.violation.invariant).statement}")
    return "kvproof: " + "\n".join(lines)


def data_of(found: Reported, test: str, phase: str) -> dict[str, Any]:
    """A finding as plain data: with a scenario as :meth:`Finding.to_dict` has it, and what is known besides."""
    broken = found.violation
    return {
        "test": test,
        "phase": phase,
        "invariant": broken.invariant,
        "cause": broken.cause,
        "witness": broken.witness,
        "where": dict(broken.where),
        "subject": found.subject,
        "step": found.step,
        "since": found.since,
        "history": list(found.history),
        "replays": found.replays,
        **(found.finding.to_dict() if found.finding is not None else {}),
    }


def tell(findings: Sequence[Reported]) -> list[str]:
    """What a test tells of its findings: the first of each invariant and cause, and how many more there were."""
    first = {finding.violation.identity: finding for finding in reversed(findings)}
    texts = [text_of(finding) for finding in findings if first[finding.violation.identity] is finding]
    more = len(findings) - min(len(texts), _MOST_TOLD)
    return [*texts[:_MOST_TOLD], *([f"kvproof: and {more} more in this test"] if more else [])]


@dataclass
class Told:
    """What a run established. ``findings`` are as :func:`data_of` has them (no test: none was running); ``unwatched``
    counts the caches that were left alone, by reason. Plain data, so that processes that share the tests can send it.
    """

    installed: bool = False
    evaluations: Counter[str] = field(default_factory=Counter)
    not_applicable: dict[str, str] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    unwatched: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def to_data(self) -> dict[str, Any]:
        return {
            "kvproof_pytest": 1,
            "installed": self.installed,
            "evaluations": dict(sorted(self.evaluations.items())),
            "never_judged": self.never_judged(),
            "not_applicable": self.not_applicable,
            "asked": sorted(self.asked),
            "unwatched": dict(self.unwatched),
            "errors": self.errors,
            "findings": self.findings,
        }

    def add(self, data: Mapping[str, Any]) -> None:
        """Add what another process told (:meth:`to_data`)."""
        self.installed |= data["installed"]
        self.evaluations.update(data["evaluations"])
        self.not_applicable.update(data["not_applicable"])
        self.asked.update(data["asked"])
        self.unwatched.update(data["unwatched"])
        self.errors += data["errors"]
        self.findings += data["findings"]

    def never_judged(self) -> list[str]:
        """Invariants that some cache can show and that never had anything to judge."""
        return [entry.id for entry in CATALOGUE if entry.id in self.asked and not self.evaluations[entry.id]]


class _Imports(importlib.abc.MetaPathFinder):
    """Calls ``then`` once, when vLLM's cache has been imported, at the end of the outermost import of vLLM's modules.

    Not sooner: these import each other in circles, and half of a module may be missing until then.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._depth = 0
        self._lock = threading.Lock()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "vllm" or self not in sys.meta_path:
            return None
        # Those before this one have been asked already.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                # Other loaders may be shared between modules.
                if isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                    self._attend(spec.loader)
                return spec
        return None

    def _attend(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            with self._lock:
                self._depth += 1
            try:
                execute(module)
            finally:
                with self._lock:
                    self._depth -= 1
                    complete = self._depth == 0 and _CACHE in sys.modules and self in sys.meta_path
                    if complete:
                        sys.meta_path.remove(self)
                if complete:
                    self._then()

        loader.exec_module = exec_module


class Plugin:
    """One pytest session that is watched."""

    def __init__(self, config: pytest.Config, mode: Mode, report: Path | None) -> None:
        self.config, self.mode, self.report = config, mode, report
        self.told = Told()
        self._installed: Installed | None = None
        self._collected = False
        self._taken = self._errors_taken = 0
        self._broken: list[Reported] = []
        self._imports = _Imports(self._arrived)
        if _CACHE not in sys.modules:
            sys.meta_path.insert(0, self._imports)

    # -- watching -----------------------------------------------------------------------------------------------------

    def _arrived(self) -> None:
        if self._collected:
            self._install()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        if self.config.option.collectonly:
            return
        self._collected = True
        if _CACHE in sys.modules:
            self._install()

    def _install(self) -> None:
        if self.told.installed:
            return
        try:
            from kvproof.impl.vllm.live.install import install

            self._installed = install(self.mode, "raise")
            self.told.installed = True
        except Exception as error:
            # Not raised: somebody's import of vLLM may be under way, which is not at fault.
            self.told.errors.append(f"this vLLM can't be watched: {explain(error)[0]}")

    def pytest_unconfigure(self) -> None:
        if self._imports in sys.meta_path:
            sys.meta_path.remove(self._imports)
        if self._installed is not None:
            self._installed.uninstall()

    # -- judging ------------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._judged(item, "setup"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._judged(item, "call"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._judged(item, "teardown"))

    def _judged(self, item: pytest.Item, phase: Phase) -> Generator[None, Any, Any]:
        """Run one phase of a test; if something broke in it, see to it that it fails and says so."""
        self._take("", "")  # since the last phase
        self._broken = []
        try:
            answer = yield
        except BaseException as error:
            self._broken = self._take(item.nodeid, phase)
            for text in tell(self._broken):
                error.add_note(text)
            raise
        self._broken = self._take(item.nodeid, phase)
        if self._broken:
            pytest.fail("\n".join([*tell(self._broken), _WENT_ON]), pytrace=False)
        return answer

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A test that skips itself after something broke has failed; one that is expected to fail has done so."""
        report = yield
        if self._broken and report.skipped and not hasattr(report, "wasxfail"):
            report.outcome = "failed"
            report.longrepr = "\n".join([*tell(self._broken), _WENT_ON])
        return report

    def _take(self, test: str, phase: str) -> list[Reported]:
        """Put findings, and errors inside kvproof, since the last call down to ``test``. Returns the findings."""
        if self._installed is None:
            return []
        new = self._installed.findings[self._taken :]
        self._taken += len(new)
        errors = self._installed.errors[self._errors_taken :]
        self._errors_taken += len(errors)
        self.told.errors += [f"{error} (in {test or 'no test'})" for error in errors]
        self.told.findings += [data_of(finding, test, phase) for finding in new]
        return new

    # -- telling ------------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._take("", "")
        if self._installed is not None:
            self.told.evaluations.update(self._installed.evaluations)
            self.told.not_applicable.update(self._installed.not_applicable)
            self.told.asked |= self._installed.asked
            self.told.unwatched.update(self._installed.unwatched)
        output = getattr(self.config, "workeroutput", None)
        if output is not None:  # one of several processes that share the tests (pytest-xdist)
            output["kvproof"] = json.dumps(self.told.to_data())
            return
        if self.report is not None:
            self._save(self.report)
        if session.exitstatus == MET:
            loose = any(not finding["test"] for finding in self.told.findings)
            session.exitstatus = FOUND if loose else UNDETERMINED if self.told.errors else MET

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """One of the processes that share the tests is done."""
        sent = getattr(node, "workeroutput", {}).get("kvproof")
        if sent is None:
            self.told.errors.append(f"process {node.gateway.id} ended without telling what it judged")
        else:
            self.told.add(json.loads(sent))

    def _save(self, report: Path) -> None:
        from kvproof.scenario_file import write_whole

        data = {**self.told.to_data(), "mode": self.mode}
        try:
            write_whole(report, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            self.told.errors.append(f"can't write the report to {report}: {error.strerror or error}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        told, out = self.told, terminalreporter
        if self.config.option.collectonly:
            return
        out.section(f"kvproof, {self.mode}")
        if not told.installed and not told.errors:
            out.write_line("vLLM's cache was not imported: nothing was judged", yellow=True)
            return
        if told.installed:
            self._tell_counts(out)
        for error in told.errors:
            out.write_line(f"error inside kvproof, which judges no more there: {error}", red=True)
        first: dict[tuple[str, str], dict[str, Any]] = {}
        times: Counter[tuple[str, str]] = Counter()
        for finding in told.findings:
            identity = (finding["invariant"], finding["cause"])
            first.setdefault(identity, finding)
            times[identity] += 1
        if told.installed and not first:
            out.write_line("no finding", green=not told.errors)
        for identity, finding in first.items():
            place = f"first in {finding['test']} ({finding['phase']})" if finding["test"] else "outside of any test"
            out.write_line(f"finding: {identity[0]} ({identity[1]}), {times[identity]}×, {place}", red=True)
            out.write_line(f"  {finding['witness']}")

    def _tell_counts(self, out: pytest.TerminalReporter) -> None:
        out.write_line("judged, with something to judge:")
        names = [entry.id for entry in CATALOGUE]
        width = max(map(len, names))
        for name in [*names, *sorted(self.told.evaluations.keys() - set(names))]:
            if self.told.evaluations[name]:
                out.write_line(f"  {name:{width}} {self.told.evaluations[name]:10,}")
        if not +self.told.evaluations:
            out.write_line("  nothing", yellow=True)
        never = self.told.never_judged()
        if never:
            out.write_line(f"never judged: {', '.join(never)}", yellow=True)
        judged = {part for name in self.told.asked for part in (name, name.partition(".")[0])}
        for name, why in self.told.not_applicable.items():
            if name in judged:  # it does apply to another cache of this run
                continue
            out.write_line(f"not applicable: {name}: {why}")
        for why, times in self.told.unwatched.items():
            out.write_line(f"not watched: {times} caches: {why}", yellow=True)
