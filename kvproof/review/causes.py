"""What breaks an invariant, on releases of vLLM and on what is ours, cause by cause: what was seen, and what is on
record today.

What was seen is read off the stored searches, which are as old as they are; what is on record is asked anew each time,
so that a cause which was recorded after the search is not called new for ever, and one that the search did not come
across is told all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvproof import findings
from kvproof.datafiles import data_files
from kvproof.review.status import RELEASES, Said, Status, Word

SEARCHES: Mapping[str, tuple[str, str]] = {
    findings.SPECIFICATION: ("explore", "the abstract machine"),
    findings.REFERENCE: ("fuzz reference", "the reference engine"),
    **{release: (f"fuzz {release}", f"vLLM {release}") for release in RELEASES},
}
"""What is searched, as records call it: the stored run that says what was seen, and its name in words."""


@dataclass(frozen=True)
class Record:
    """A finding on record: what it is called, the file that it is in, and what was read. ``replay`` runs its scenario
    on the newest release that it names; it is empty where it has none."""

    file: str
    cause: str
    releases: str
    status: str
    reference: str
    reasoning: str
    source: findings.Record

    @property
    def anchor(self) -> str:
        """The row's name on its page. A cause may have several records, a file has one."""
        return f"record-{self.file.removesuffix('.json')}"

    @property
    def href(self) -> str:
        """Where on the site it is told."""
        return f"{self.source.invariant.partition('.')[0].lower()}.html#{self.anchor}"

    @property
    def replay(self) -> str:
        covered = [release for release in RELEASES if findings.known_for([self.source], release).records]
        return self.replay_on(covered[-1]) if covered else ""

    def replay_on(self, release: str) -> str:
        """The command that shows it again; empty where no scenario is recorded."""
        return f"kvproof replay findings/{self.file} --on vllm=={release}" if self.source.scenario is not None else ""


@dataclass(frozen=True)
class Cause:
    """One way in which an invariant breaks. ``record`` is what covers it there, if anything; ``missed`` says of one
    that is known from its record alone why the stored search does not tell of it."""

    name: str
    witness: str
    record: Record | None
    replay: str
    missed: str = ""


@dataclass(frozen=True)
class SeenOn:
    """What breaks it on a ``subject`` (a release, the reference engine, the abstract machine): ``name`` is the subject
    in words, ``command`` the search that is stored of it, ``made`` its day. What is not on record comes first, what
    the search did not come across last."""

    subject: str
    name: str
    command: str
    made: str
    causes: tuple[Cause, ...]

    @property
    def unrecorded(self) -> int:
        return sum(cause.record is None for cause in self.causes)

    @property
    def missed(self) -> tuple[Cause, ...]:
        """Those that are told from their records alone."""
        return tuple(cause for cause in self.causes if cause.missed)


def records() -> list[Record]:
    """All records with their files, in the order of the files. Raises as :func:`kvproof.findings.load` does."""
    files = data_files(None, findings.PACKAGE, "known findings")
    return [
        Record(
            file=file.name,
            cause=one.cause,
            releases=", ".join([one.releases] if isinstance(one.releases, str) else one.releases),
            status=one.status,
            reference=one.reference,
            reasoning=one.reasoning,
            source=one,
        )
        for file, one in zip(files, findings.load(), strict=True)
    ]


def seen(invariant: str, status: Status, known: Sequence[Record]) -> tuple[SeenOn, ...]:
    """What breaks ``invariant``, subject by subject; those on which nothing does are left out."""
    found = []
    for subject, (run, name) in SEARCHES.items():
        said = status.runs.get(run)
        words = [word for word in (said.words if said is not None else ()) if _is_about(word, invariant)]
        causes = [_cause(word, subject, known) for word in words if _was_seen(word)]
        causes.sort(key=lambda cause: cause.record is not None)
        causes += _recorded(invariant, subject, known, said, {cause.name for cause in causes})
        if causes:
            command = said.command if said is not None else f"kvproof {run}"
            found.append(SeenOn(subject, name, command, said.made if said is not None else "", tuple(causes)))
    return tuple(found)


def _recorded(
    invariant: str, subject: str, known: Sequence[Record], said: Said | None, told: Collection[str]
) -> Iterator[Cause]:
    """What is on record for the subject and was not seen, each cause once."""
    for one in known:
        new = one.source.invariant == invariant and one.cause not in told
        if new and findings.known_for([one.source], subject).records:
            told = {*told, one.cause}
            yield Cause(one.cause, "", one, one.replay_on(subject), _missed(one, said))


def _missed(record: Record, said: Said | None) -> str:
    if said is None:
        return "no search is stored"
    word = said.of("finding", f"{record.source.invariant} {record.cause}")
    gone = word is not None and word.verdict.startswith("gone")
    how = "ran the scenario that was recorded then, which did not show it" if gone else "did not come across it"
    return f"the stored search ({said.command}, {said.made}) {how}"


def _is_about(word: Word, invariant: str) -> bool:
    return word.kind == "finding" and word.id.partition(" ")[0] == invariant


def _was_seen(word: Word) -> bool:
    """Whether a search came across it, or its recorded scenario showed it."""
    return not word.verdict.startswith(("gone", "known: not seen"))


def _cause(word: Word, subject: str, known: Sequence[Record]) -> Cause:
    identity = tuple(word.id.split(" ", 1))
    record = next(
        (one for one in known if one.source.identity == identity and findings.known_for([one.source], subject).records),
        None,
    )
    # Of a known finding the search keeps what is on record, of a new one what it saw.
    witness = word.detail if word.verdict.startswith("new") else ""
    return Cause(identity[1], witness, record, record.replay_on(subject) if record is not None else "")
