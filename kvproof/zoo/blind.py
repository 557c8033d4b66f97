"""``kvproof zoo blind``: are the faults found by somebody who knows nothing of them?

A release is searched by ``kvproof fuzz`` with the same options as any other, nothing recorded as known, in a process
that can't read the zoo (:data:`SEALED`). Only afterwards its findings are held against what the release is known for: a
fault is found if a finding breaks the same invariant and its reduced scenario is gone on the first release that was
corrected. One search serves all faults of its release. It is short at first; a long one, from the same seed, is for
what the short one missed.
"""

from __future__ import annotations

import functools
import importlib.resources
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvproof.engines import Progress
from kvproof.errors import USAGE, CheckerError, UsageError
from kvproof.fuzzing import FuzzRecord, NewFinding
from kvproof.impl.vllm.fetch import cache_folder
from kvproof.options import MOST_SEEDS, MOST_STEPS, write_file
from kvproof.report import Report, Row
from kvproof.spec.scenario import Scenario
from kvproof.zoo.code import code_hash, seed_of
from kvproof.zoo.fault import PACKAGE, Fault, nothing_of, ordered
from kvproof.zoo.replays import Shown, replay_all
from kvproof.zoo.results import Blind, Results, stamp

SEALED = """
import os, sys
sealed = [os.path.realpath(folder) for folder in sys.argv.pop(1).split(os.pathsep)]
def watch(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], (str, bytes, os.PathLike)):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if any(path == folder or path.startswith(folder + os.sep) for folder in sealed):
            os.write(2, f"kvproof: error: a blind search reads {path}\\n".encode())
            os._exit(3)
sys.addaudithook(watch)
from kvproof.__main__ import main
main()
"""
"""``kvproof`` as it is, but the process ends where anything in these folders is opened or listed. Its workers are
forked from it, and watched as well."""


@dataclass(frozen=True)
class Options:
    """``seconds`` for a first search, ``long`` for what it missed (0: never). ``commit`` decides the seeds."""

    seconds: float
    long: float
    workers: int
    seeds: int
    commit: str
    again: bool = False


def blind(report: Report, faults: Sequence[Fault], results: Results, options: Options, progress: Progress) -> None:
    """Search the faulty releases, and fill ``report`` with what was found and what was missed. An interrupt leaves
    what was done in ``results``, in the cache of searches, and in the report, and so does a release that can't be
    driven here. Raises :class:`UsageError` where nothing can be searched for."""
    wanted = searchable(faults)
    if not wanted:
        raise UsageError(f"there is nothing to search for: {nothing_of(faults)}")
    seeds = [seed_of(options.commit, index) for index in range(options.seeds)]
    limits = [options.seconds, *([options.long] if options.long > options.seconds else [])]
    try:
        for release in ordered({fault.blind_release for fault in wanted}):
            having = [fault for fault in wanted if fault.blind_release == release]
            for seed in seeds:
                for limit in limits:
                    left = [fault for fault in having if options.again or _open(fault, seed, limit, results)]
                    if limit != limits[0]:
                        left = [fault for fault in left if results.blind[fault.id, release, seed].seen is None]
                    if left:
                        _search_and_judge(release, seed, limit, left, results, options, progress)
    except KeyboardInterrupt:
        report.interrupted = True
    except UsageError as error:
        report.problem = "; ".join(filter(None, [report.problem, str(error)]))
    report.facts.update(faults=len(wanted), **_fill(report, wanted, seeds, results))
    report.facts.update(seeds=",".join(map(str, seeds)), code=code_hash())


def commit_of(results: Results) -> str:
    """The commit that stored searches by this code have their seeds from; empty where there are none.

    A commit that changes nothing in how it is searched is no reason to search anew.
    """
    commits = Counter(
        search.revision
        for search in results.blind.values()
        if search.code == code_hash() and search.revision and search.seed in _seeds_of(search.revision)
    )
    return commits.most_common(1)[0][0] if commits else ""


@functools.cache
def _seeds_of(commit: str) -> frozenset[int]:
    return frozenset(seed_of(commit, index) for index in range(MOST_SEEDS))


def searchable(faults: Iterable[Fault]) -> list[Fault]:
    """Those that a release has and a scenario shows."""
    return [fault for fault in faults if fault.reached and fault.kind != "mutant"]


def _open(fault: Fault, seed: int, limit: float, results: Results) -> bool:
    """Whether a search of ``limit`` seconds could say more than what is there."""
    known = results.blind.get((fault.id, fault.blind_release, seed))
    return known is None or not known.fresh(fault) or (known.seen is None and known.limit < limit)


def _fill(report: Report, faults: Sequence[Fault], seeds: Sequence[int], results: Results) -> dict[str, int]:
    """A row for each fault and seed. Returns how many faults were found from every seed, how many were missed from one,
    and how many of the others were not searched for from all, as after an interrupt."""
    counts = {"found": 0, "missed": 0, "unsearched": 0}
    for fault in faults:
        stored = [results.blind.get((fault.id, fault.blind_release, seed)) for seed in seeds]
        done = [search for search in stored if search is not None and search.fresh(fault)]
        missed = any(search.seen is None for search in done)
        counts["missed" if missed else "found" if len(done) == len(seeds) else "unsearched"] += 1
        for search in done:
            name = f"{fault.id} {search.release} seed {search.seed}"
            if search.seen is None:
                detail = f"{fault.title}: not found in {search.limit:g} s; {search.detail}"
                report.rows.append(Row("run", name, "missed", "undetermined", detail))
            else:
                gone = f", gone on {search.gone_on}" if search.gone_on else ""
                actions = len((search.scenario or {}).get("actions", ()))
                detail = f"{search.invariant} ({search.cause}) in {actions} actions{gone}"
                report.rows.append(Row("run", name, "found blind", "pass", detail, seconds=search.seen))
    return counts


# -- searching ---------------------------------------------------------------------------------------------------------


def search(release: str, seed: int, seconds: float, workers: int, progress: Progress) -> FuzzRecord:
    """The findings of one search that was told nothing. Kept in the cache: the same search is not made twice.

    Raises :class:`CheckerError` where it came to nothing, :class:`UsageError` where the release can't be driven here.
    """
    kept = cache_folder() / "zoo" / code_hash() / f"vllm-{release}-seed{seed}-{seconds:g}s-{workers}w.json"
    if kept.exists():
        try:
            return msgspec.json.decode(kept.read_bytes(), type=FuzzRecord)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            progress(f"{kept} is damaged: searching again")
    progress(f"vllm=={release}: searching for {seconds:g} s from seed {seed}")
    with tempfile.TemporaryDirectory(prefix="kvproof-zoo-") as folder:
        record = Path(folder) / "record.json"
        done = subprocess.run(
            command(release, seed, seconds, workers, Path(folder), record), check=False, stdout=subprocess.DEVNULL
        )
        if not record.exists():
            kind = UsageError if done.returncode == USAGE else CheckerError
            raise kind(f"kvproof fuzz vllm=={release} gave no result (exit code {done.returncode})")
        made = msgspec.json.decode(record.read_bytes(), type=FuzzRecord)
        if made.interrupted:
            raise KeyboardInterrupt
        write_file(kept, record.read_text(encoding="utf-8"))
    return made


def command(release: str, seed: int, seconds: float, workers: int, folder: Path, record: Path) -> list[str]:
    """The one command line: only the release and the seed differ."""
    nothing = folder / "nothing-known"
    nothing.mkdir(exist_ok=True)
    fuzz = ["fuzz", f"vllm=={release}", "--seed", str(seed), "--seconds", f"{seconds:g}", "--workers", str(workers)]
    fuzz += ["--steps", str(MOST_STEPS), "--findings", str(nothing)]
    fuzz += ["--out", str(folder / "found"), "--json", str(record)]
    return [sys.executable, "-P", "-c", SEALED, os.pathsep.join(map(str, sealed_folders())), *fuzz]


def sealed_folders() -> list[Path]:
    """Where the zoo is: its data, this package, earlier searches, and, in a checkout, results."""
    data = Path(str(importlib.resources.files(PACKAGE)))
    results = data.parent / "bench" / "results"
    return [data, Path(__file__).parent, cache_folder() / "zoo", *([results] if results.is_dir() else [])]


# -- judging -----------------------------------------------------------------------------------------------------------


def _search_and_judge(
    release: str, seed: int, limit: float, faults: Sequence[Fault], results: Results, options: Options,
    progress: Progress,
) -> None:  # fmt: skip
    record = search(release, seed, limit, options.workers, progress)
    progress(f"vllm=={release}: {len(record.findings)} findings in {record.steps} steps: {_listed(record)}")
    told = replayed_where_fixed(record, faults, progress)
    for fault in faults:
        seen = detection(fault, record, told)
        common = {"release": release, "seed": seed, "workers": options.workers, "limit": limit, **stamp(fault)}
        if seen is None:
            results.add(Blind(**common, detail=_instead(fault, record, told)))
        else:
            found = seen.finding
            results.add(
                Blind(
                    **common,
                    seen=seen.seen,
                    invariant=found["invariant"],
                    cause=found["cause"],
                    scenario=found["scenario"],
                    gone_on=fault.fixed_release,
                )
            )
        verdict = "missed" if seen is None else f"found after {seen.seen} s"
        progress(f"{fault.id} on {release}, {limit:g} s: {verdict}")


Told = dict[tuple[str, int], Shown]
"""What the scenario of a finding (by number) showed on a release."""


def replayed_where_fixed(record: FuzzRecord, faults: Iterable[Fault], progress: Progress) -> Told:
    """The findings that could be of ``faults``, each on the first release that was corrected.

    Raises :class:`UsageError` where that can't be driven here.
    """
    wanted: dict[str, dict[str, Scenario]] = {}
    for fault in faults:
        for number, found in _candidates(fault, record):
            if fault.fixed_release:
                scenario = Scenario.from_dict(found.finding["scenario"])
                wanted.setdefault(fault.fixed_release, {})[str(number)] = scenario
    told = {
        (release, int(name)): shown
        for release, scenarios in wanted.items()
        for name, shown in replay_all(release, scenarios, progress)
    }
    problem = next((shown.problem for shown in told.values() if shown.problem), "")
    if problem:
        raise UsageError(problem)
    return told


def detection(fault: Fault, record: FuzzRecord, told: Told) -> NewFinding | None:
    """The finding that shows ``fault``, the first that was seen."""
    gone = [
        found
        for number, found in _candidates(fault, record)
        if found.seen is not None
        and (
            not fault.fixed_release or told[fault.fixed_release, number].lacks(found.invariant, found.finding["action"])
        )
    ]
    return min(gone, key=lambda found: found.seen or 0.0, default=None)


def _candidates(fault: Fault, record: FuzzRecord) -> Iterator[tuple[int, NewFinding]]:
    """Findings of an invariant that the fault breaks. Where no release tells them apart, the cause must be the same."""
    everything = [*record.findings, *(other for found in record.findings for other in found.others)]
    for number, found in enumerate(everything):
        invariant, cause = found.invariant, found.finding["cause"]
        if any(s.invariant == invariant and (fault.fixed_release or s.cause == cause) for s in fault.signs):
            yield number, found


def _instead(fault: Fault, record: FuzzRecord, told: Told) -> str:
    """Of a miss: what was seen, and what of it is not gone."""
    near = []
    for number, found in _candidates(fault, record):
        shown = told.get((fault.fixed_release, number))
        why = "another violation ended its replay" if shown is not None and shown.spoiled else "it is not gone"
        if shown is not None and shown.error:
            why = f"its replay failed: {shown.error}"
        near.append(f"{found.invariant} ({found.finding['cause']}) came up, but on {fault.fixed_release} {why}")
    if near:
        return "; ".join(near)
    errors = f"; errors: {'; '.join(record.errors)}" if record.errors else ""
    return f"{record.steps} steps showed {_listed(record)}{errors}"


def _listed(record: FuzzRecord) -> str:
    return ", ".join(f"{found.invariant} ({found.finding['cause']})" for found in record.findings) or "nothing"
