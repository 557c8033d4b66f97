"""REF: every action keeps one arbitrary block's account sound, and thereby the pool's, whatever its size."""

from __future__ import annotations

from collections.abc import Callable

from kvproof.models.smt import mutants
from kvproof.models.smt.claim import Claim, Obligation, Symbols
from kvproof.spec.logic import Truth, all_of, ite, negate
from kvproof.spec.rules import ledger
from kvproof.spec.rules.ledger import Action, Entry

SCOPE = "proved for one arbitrary block and any number of holders, hence for pools of every size"


def _entry(s: Symbols) -> Entry:
    return Entry(
        references=s.integer("references"),
        queue=s.integer("times_in_queue"),
        tables=s.integer("tables"),
        copies=s.integer("copies"),
        holds=s.integer("holds"),
        null=s.truth("null_block"),
    )


def _words(entry: Entry) -> str:
    return (
        f"{entry.references} references, {entry.queue} times in the queue, held by {entry.tables} table slots, "
        f"{entry.copies} copy ends and {entry.holds} holds"
    )


def keeps_sound(s: Symbols, name: str, action: Callable[[Entry], Action]) -> Obligation:
    """From a sound account, where its guard allows it, the action leads to a sound one."""
    before = _entry(s)
    done = action(before)
    few: tuple[Truth, ...] = tuple(all_of(n >= 0, n <= 2) for n in (before.tables, before.copies, before.holds))
    return Obligation(
        premises=(("the account was sound", ledger.sound(before)), ("the action's guard holds", done.guard)),
        goal=ledger.sound(done.after),
        say=lambda: (
            f"{'the null block' if before.null else 'a block'} with {_words(before)}; "
            f"after “{name}”: {_words(done.after)}"
        ),
        prefer=(negate(before.null), *few, before.references == 0),
    )


def initially_sound(s: Symbols) -> Obligation:
    """A fresh pool: every block free and queued once, the null block neither."""
    null = s.truth("null_block")
    queue = s.integer("times_in_queue")
    entry = Entry(references=0, queue=queue, tables=0, copies=0, holds=0, null=null)
    return Obligation(
        premises=(("every block but the null block is queued once", _queued_once(null, queue)),),
        goal=ledger.sound(entry),
        say=lambda: _words(entry),
    )


def _queued_once(null: Truth, queue: object) -> Truth:
    return queue == ite(null, 0, 1)


def _slug(name: str) -> str:
    return name.replace(" ", "-")


def _mutant(of: str, name: str, statement: str, action: Callable[[Entry], Action]) -> Claim:
    parent = f"REF.{_slug(of)}"
    return Claim(f"{parent}/{name}", statement, SCOPE, lambda s: keeps_sound(s, of, action), mutant_of=parent)


def _action(name: str) -> Claim:
    return Claim(
        f"REF.{_slug(name)}",
        f"“{name}” keeps references = holders, and a block in the free queue once exactly if it has none",
        SCOPE,
        lambda s: keeps_sound(s, name, ledger.ACTIONS[name]),
    )


CLAIMS = (
    Claim("REF.fresh-pool", "a fresh pool's accounts are sound", SCOPE, initially_sound),
    *(_action(name) for name in ledger.ACTIONS),
    _mutant("release", "double-free", "a reference is given back that nobody holds", mutants.release_unguarded),
    _mutant(
        "release", "listed-twice", "a block listed twice in one release is queued twice", mutants.release_listed_twice
    ),
    _mutant("release", "null-counted", "the null block's count goes down with each slot", mutants.release_counts_null),
    _mutant("copy done", "leak", "a copy's end lets go and the block is not queued", mutants.copy_done_forgets_queue),
    _mutant("touch", "stays-queued", "a hit block stays in the free queue", mutants.touch_leaves_queued),
)
