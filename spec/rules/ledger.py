"""References, holders and the free queue, told for one arbitrary block.

Every action changes a block's references and holders locally. If each keeps "references = holders, and in the free
queue once exactly if there are none" for one arbitrary block, it holds for pools of every size.

Each action is an :class:`Action`: a guard, and the block after it. An engine that acts without the guard is at fault:
double frees (issue 42571: a block listed twice was decremented twice and queued twice, up to 0.23.0) and a null block
whose count drifts (up to 0.32.0) are such.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvproof.spec.logic import Int, Truth, all_of, ite, negate


@dataclass(frozen=True)
class Entry:
    """One block's account. ``queue`` is how many times it is in the free queue.

    Holders: ``tables`` (slots of requests' tables), ``copies`` (ends of copies that have not run), ``holds`` (pins,
    kept checkpoints, deferred frees). ``null`` is the null block, which is in tables without being counted.
    """

    references: Int
    queue: Int
    tables: Int
    copies: Int
    holds: Int
    null: Truth

    @property
    def holders(self) -> Int:
        """How many counted references the holders explain. The null block is never counted."""
        return ite(self.null, 0, self.tables + self.copies + self.holds)


@dataclass(frozen=True)
class Action:
    """What an action needs of a block, and what it leaves."""

    guard: Truth
    after: Entry


def sound(entry: Entry) -> Truth:
    """References equal holders; in the queue once exactly at 0 references; the null block in neither."""
    return all_of(
        entry.tables >= 0,
        entry.copies >= 0,
        entry.holds >= 0,
        entry.references == entry.holders,
        entry.queue == ite(entry.null, 0, ite(entry.references == 0, 1, 0)),
        ite(entry.null, all_of(entry.copies == 0, entry.holds == 0), True),
    )


def _counted(entry: Entry, references: Int) -> Entry:
    """The entry with another count: in the queue if that is 0, out of it otherwise."""
    return replace(entry, references=references, queue=ite(references == 0, 1, 0))


def allocate(entry: Entry) -> Action:
    """Popped from the front of the free queue into a table."""
    return Action(
        all_of(negate(entry.null), entry.queue == 1),
        replace(entry, references=entry.references + 1, queue=entry.queue - 1, tables=entry.tables + 1),
    )


def touch(entry: Entry) -> Action:
    """Hit by a request: one more table slot; off the queue if it was free. A null block is adopted uncounted."""
    counted = _counted(replace(entry, tables=entry.tables + 1), entry.references + 1)
    return Action(True, _unless_null(entry, replace(entry, tables=entry.tables + 1), counted))


def release(entry: Entry) -> Action:
    """A table slot lets go: on finish, abort, preemption, or when the block is no longer needed."""
    counted = _counted(replace(entry, tables=entry.tables - 1), entry.references - 1)
    return Action(entry.tables >= 1, _unless_null(entry, replace(entry, tables=entry.tables - 1), counted))


def pad(entry: Entry) -> Action:
    """Only the null block fills table columns that hold nothing; nothing is counted."""
    return Action(entry.null, replace(entry, tables=entry.tables + 1))


def copy_from_hit(entry: Entry) -> Action:
    """A hit's shared tail becomes a copy source: the table's reference becomes the copy's (copy-on-write, new
    request).
    """
    return Action(
        all_of(negate(entry.null), entry.tables >= 1),
        replace(entry, tables=entry.tables - 1, copies=entry.copies + 1),
    )


def copy_from_running(entry: Entry) -> Action:
    """A running request's own tail becomes a copy source and stays in the table: one more reference."""
    return Action(
        all_of(negate(entry.null), entry.tables >= 1),
        _counted(replace(entry, copies=entry.copies + 1), entry.references + 1),
    )


def copy_to_table(entry: Entry) -> Action:
    """A freshly popped copy target that enters the table: one reference for the table, one for the copy."""
    return Action(
        all_of(negate(entry.null), entry.queue == 1),
        _counted(replace(entry, tables=entry.tables + 1, copies=entry.copies + 1), entry.references + 2),
    )


def copy_to_cache(entry: Entry) -> Action:
    """A freshly popped copy target that is in no table (it keeps a moved key): the copy's reference alone."""
    return Action(
        all_of(negate(entry.null), entry.queue == 1),
        _counted(replace(entry, copies=entry.copies + 1), entry.references + 1),
    )


def copy_done(entry: Entry) -> Action:
    """The copy has run on the device: its end lets go."""
    return Action(entry.copies >= 1, _counted(replace(entry, copies=entry.copies - 1), entry.references - 1))


def hold(entry: Entry) -> Action:
    """A table's reference becomes a hold's: a deferred free, a pin, a kept checkpoint."""
    return Action(
        all_of(negate(entry.null), entry.tables >= 1),
        replace(entry, tables=entry.tables - 1, holds=entry.holds + 1),
    )


def pin(entry: Entry) -> Action:
    """A hold of its own on a block that somebody else may hold too."""
    return Action(negate(entry.null), _counted(replace(entry, holds=entry.holds + 1), entry.references + 1))


def unhold(entry: Entry) -> Action:
    """A hold lets go."""
    return Action(entry.holds >= 1, _counted(replace(entry, holds=entry.holds - 1), entry.references - 1))


def _unless_null(entry: Entry, uncounted: Entry, counted: Entry) -> Entry:
    return Entry(
        references=ite(entry.null, uncounted.references, counted.references),
        queue=ite(entry.null, uncounted.queue, counted.queue),
        tables=ite(entry.null, uncounted.tables, counted.tables),
        copies=ite(entry.null, uncounted.copies, counted.copies),
        holds=ite(entry.null, uncounted.holds, counted.holds),
        null=entry.null,
    )


ACTIONS = {
    "allocate": allocate,
    "touch": touch,
    "release": release,
    "pad": pad,
    "copy from a hit": copy_from_hit,
    "copy from a running block": copy_from_running,
    "copy to a table": copy_to_table,
    "copy to the cache": copy_to_cache,
    "copy done": copy_done,
    "hold": hold,
    "pin": pin,
    "unhold": unhold,
}
"""Every action that changes an account, by its name in reports."""
