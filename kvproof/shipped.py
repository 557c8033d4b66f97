"""``prove --on``: what is proved of a release's own functions, as rows.

Each claim is settled in a process of its own, a few at a time: all of them share the imported release. A counterexample
that a whole engine can reproduce is replayed there, so that it is said which recorded finding it is.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Collection, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvproof import engines, findings, scenario_file, subjects
from kvproof.errors import CheckerError, UsageError, stop
from kvproof.report import Outcome, Report, Row, in_words
from kvproof.spec.config import ConfigError
from kvproof.spec.finding import Finding, Violation
from kvproof.spec.subject import Subject

if TYPE_CHECKING:
    from kvproof.models.smt.shipped import ShippedClaim, ShippedResult

Identity = tuple[str, str]

REFUTED_KNOWN = "refuted (known)"
UNSHOWN = "a whole engine did not show it"
"""In a verdict: no scenario could be run, or the one that was broke nothing of the claim's invariant."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How many processes; where SMT-LIB files go, if anywhere; where scenarios go; the folder of known findings."""

    workers: int
    out: Path | None
    scenarios: Path
    known: Path | None


@dataclasses.dataclass(frozen=True)
class OnRecord:
    """What a refutation is known as: ``identities`` is empty where it is new. ``shown``: a whole engine was seen to
    break the claim's invariant."""

    identities: tuple[Identity, ...]
    shown: bool

    @property
    def verdict(self) -> str:
        """In words, the same wherever it is told."""
        if not self.identities:
            return "refuted"
        return REFUTED_KNOWN if self.shown else f"refuted (known, {UNSHOWN})"

    @property
    def named(self) -> str:
        """The verdict with what it is known as."""
        names = ", ".join(" ".join(identity) for identity in self.identities)
        return self.verdict.replace(")", f": {names})")


def on_record(claim: ShippedClaim, shown: Collection[Identity], known: Collection[Identity]) -> OnRecord:
    """What a refutation of ``claim`` is known as, of what is ``known`` of the release, where its scenario has
    ``shown`` that (empty: none was run, or it showed nothing)."""
    # What the whole engine shows decides; where it was not asked, what such a refutation is recorded as.
    own = {identity for identity in shown if identity[0] == claim.invariant}
    recorded = (own or set(claim.findings)) & set(known)
    return OnRecord(tuple(sorted(recorded)) if own <= recorded else (), bool(own))


def prove(report: Report, target: subjects.Target, options: Options, progress: engines.Progress) -> None:
    """Fill ``report`` with one row per claim. What was settled before an interrupt is in it."""
    if target.kind not in ("installed", "release", "checkout"):
        raise UsageError(f"prove --on is about vLLM's own functions: use vllm, vllm=={subjects.NEWEST} or vllm@PATH")
    known = findings.known_for(findings.load(options.known), target.release).identities
    claims: Sequence[ShippedClaim] = engines.load("kvproof.models.smt.shipped", "CLAIMS")
    subject = subjects.open_subject(target, progress)
    builtins = engines.load("kvproof.models.smt.shipped", "BUILTINS")
    release = engines.load("kvproof.impl.vllm.shipped", "Shipped")(builtins)
    if not claims:
        raise CheckerError("there are no claims to prove")
    rows: dict[int, Row] = {}
    try:
        for index, result in _settled(claims, release, options):
            rows[index] = _row(result, target, subject, known, options, progress)
            progress(f"{result.claim.id} {rows[index].verdict} ({result.paths} paths, {result.seconds:.1f} s)")
    finally:
        # In the order of the claims, and before an interrupt goes on its way.
        report.rows.extend(rows[index] for index in sorted(rows))
        report.facts["claims"] = len(rows)
        report.facts["refuted"] = sum(row.verdict.startswith("refuted") for row in rows.values())
        report.only_known = any(row.outcome == "info" for row in rows.values())


def _settled(claims: Sequence[ShippedClaim], release: Any, options: Options) -> Iterator[tuple[int, ShippedResult]]:
    """Each claim's number and result, as they come. Whatever ends this ends the processes."""
    context = multiprocessing.get_context("fork")
    # What takes longest goes first, so that it does not run alone at the end.
    waiting = sorted(enumerate(claims), key=lambda numbered: numbered[1].small)
    running: dict[Connection, tuple[int, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < options.workers:
                index, claim = waiting.pop(0)
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_settle, args=(claim, release, options.out, there), daemon=True)
                process.start()
                there.close()
                running[here] = (index, process)
            for ready in wait(list(running), timeout=1.0):
                assert isinstance(ready, Connection)
                index, process = running.pop(ready)
                try:
                    told = ready.recv()
                except EOFError:
                    told = {"verdict": "error", "premises": (), "seconds": 0.0, "note": "the process was killed"}
                process.join()
                yield index, _result(claims[index], told)
            stop.check()
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _result(claim: ShippedClaim, told: dict[str, Any]) -> ShippedResult:
    made = engines.load("kvproof.models.smt.shipped", "ShippedResult")
    return made(claim, **told)  # type: ignore[no-any-return]


def _settle(claim: ShippedClaim, release: Any, out: Path | None, there: Connection) -> None:
    """In a process of its own: settle the claim and send what came out, without the claim, whose functions can't be."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, too, and ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    settle = engines.load("kvproof.models.smt.shipped", "settle")
    result = settle(claim, release, out)
    told = {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name != "claim"}
    there.send(told)
    there.close()
    os._exit(0)  # what the release registered for its own end is not this process's


def _row(
    result: ShippedResult,
    target: subjects.Target,
    subject: Subject,
    known: frozenset[Identity],
    options: Options,
    progress: engines.Progress,
) -> Row:
    claim = result.claim
    verdict, outcome, lines = _judge(result)
    text = ""
    shown: set[Identity] = set()
    if result.verdict == "refuted":
        shown, told = _replayed(result, target, subject, options, progress)
        found = on_record(claim, shown, known)
        if found.identities:
            verdict, outcome = found.named, "info"
        text = "\n".join([*lines, *told])
    return Row(
        kind="proof",
        id=claim.id,
        verdict=verdict,
        outcome=outcome,
        detail="\n".join(lines),
        statement=claim.statement,
        text=text,
        seconds=result.seconds,
        subject=target.text,
        data={
            "function": claim.function,
            "scope": claim.scope,
            "premises": "; ".join(result.premises),
            "paths": result.paths,
            "counterexample": result.counterexample,
            "scenario": None if result.scenario is None else result.scenario.to_dict(),
            "shown": [list(identity) for identity in sorted(shown)],
            "note": result.note,
        },
    )


def _judge(result: ShippedResult) -> tuple[str, Outcome, list[str]]:
    claim = result.claim
    lines = [f"{claim.function}: {claim.statement}"]
    if result.note.startswith("absent: "):
        return "not applicable", "skip", [*lines, result.note.removeprefix("absent: ")]
    if result.verdict in ("proved", "bounded"):
        covered = claim.scope if result.verdict == "proved" or claim.most_values else f"bounded: {claim.scope}"
        lines.append(f"{covered} (z3, cvc5 agree; {result.paths} paths cover the premises)")
        outcome: Outcome = "pass"
    elif result.verdict == "refuted":
        lines.append(f"counterexample, run on the real function: {result.counterexample}")
        outcome = "fail"
    else:
        lines.append(result.note)
        outcome = "error" if result.verdict == "error" else "undetermined"
    if result.premises:
        lines.append(f"premises: {'; '.join(result.premises)}")
    return result.verdict, outcome, lines


def _replayed(
    result: ShippedResult, target: subjects.Target, subject: Subject, options: Options, progress: engines.Progress
) -> tuple[set[Identity], list[str]]:
    """What the whole engine shows of a counterexample, and where its scenario is kept."""
    scenario = result.scenario
    if scenario is None:
        return set(), ["as a call of the function only: no scenario was made of it"]
    try:
        seen = engines.replay(subject, scenario)
    except ConfigError as error:
        return set(), [f"the release refuses the scenario's configuration: {error}"]
    shown = {violation.identity for violation in seen.violations}
    own: Violation | None = next((v for v in seen.violations if v.invariant == result.claim.invariant), None)
    found = None if own is None else Finding(own, target.text, scenario, len(scenario.actions))
    name = f"{target.text.replace('==', '-').partition('@')[0]}-{result.claim.id.replace('/', '-')}.json"
    file = options.scenarios / name
    says = ", ".join(" ".join(i) for i in sorted(shown)) or "nothing"
    lines = [scenario.text(), f"the whole engine shows: {says}"]
    try:
        scenario_file.save(file, scenario, found)
    except OSError as error:
        progress(f"can't keep {file}: {error.strerror or error}")
        return shown, [*lines, "not kept"]
    return shown, [*lines, f"kept in {file}", f"replay: {scenario_file.replay_command(str(file), target.text)}"]


def show(report: Report) -> None:
    """Write every claim with its verdict, then the result line."""
    from kvproof.streams import write

    lines = [f"kvproof {report.command} --on {report.subject}"]
    for row in report.rows:
        timing = f" ({row.data['paths']} paths, {row.seconds:.1f} s)" if row.data.get("paths") else ""
        lines += ["", f"  {row.id}: {in_words(row.verdict, row.data)}{timing}"]
        lines += [f"    {line}" for line in (row.text or row.detail).splitlines()]
    write("\n".join([*lines, "", report.result_line(), ""]))
