"""What a lookup may answer, how its result may be cut, and where a request may resume.

Only recurrent groups may be short: their block is a whole state, and an external load can bring the one at the
boundary. A short attention group is a fault and must stay loud (PR 51468, wrong in 0.27.0 and 0.27.1: the cut
asserted that every group covers the endpoint, and killed the engine).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproof.spec.logic import Int, Truth, all_of, any_of, forall, implies, ite, minimum, negate


def hit_limit(tokens: Int) -> Int:
    """The longest hit allowed for a request of ``tokens`` ≥ 1 tokens: one token is left to compute."""
    return tokens - 1


def hit_within(hit: Int, tokens: Int, depths: Sequence[Int]) -> Truth:
    """An agreed hit leaves a token to compute and is no deeper than any group's own depth."""
    return all_of(hit >= 0, hit <= hit_limit(tokens), lambda: forall(depths, lambda depth: hit <= depth))


def after_drop(matched: Int, unit: Int, drop: Truth) -> Int:
    """The hit that remains of ``matched`` tokens when EAGLE drops one unit (a block, or a hash unit), at least 0."""
    return ite(drop, ite(matched < unit, 0, matched - unit), matched)


def may_cut(endpoint: Int, held: Int, recurrent: Truth, cacheable: Truth) -> Truth:
    """Whether a lookup result with ``held`` blocks in this group can be cut to ``endpoint`` blocks.

    Non-recurrent groups that cache prefixes must cover the endpoint; scratch groups (not ``cacheable``) must be empty.
    """
    return ite(cacheable, any_of(recurrent, endpoint <= held), held == 0)


def cut_length(endpoint: Int, held: Int, recurrent: Truth, cacheable: Truth) -> Int:
    """How many of the group's ``held`` blocks remain of a result cut to ``endpoint`` blocks."""
    return ite(cacheable, ite(recurrent, minimum(endpoint, held), endpoint), 0)


def cut_right(endpoint: Int, held: Int, after: Int, recurrent: Truth, cacheable: Truth) -> Truth:
    """``after`` is what a cut may leave: a prefix of what was there, covering the endpoint where it must."""
    return all_of(
        after >= 0,
        after <= held,
        implies(negate(cacheable), after == 0),
        implies(cacheable, after <= endpoint),
        implies(all_of(cacheable, negate(recurrent)), after == endpoint),
        implies(all_of(cacheable, recurrent), after == minimum(endpoint, held)),
    )


@dataclass(frozen=True)
class Resume:
    """Where a request resumes: ``local`` tokens from this cache and ``external`` tokens on top from a store."""

    local: Int
    external: Int

    @property
    def boundary(self) -> Int:
        """The position that counts as computed."""
        return self.local + self.external


def resume(hit: Int, tail: Int, agreed: Int, diverged: Truth, offered: Int) -> Resume:
    """Where a request resumes after a lookup that answered ``hit`` tokens, of which ``tail`` lie inside the last block.

    The store was shown hit − tail and offers ``offered`` tokens from there. If it offers more than the tail, the tail
    is cut and the load covers it; if not, nothing is loaded and the tail stays. If the groups were looked up one by
    one and ``diverged``, a hit without external tokens falls back to ``agreed``, the boundary that every group can
    serve: no state, no resume. With full attention 4 blocks deep and a recurrent group 1 block, block 16: nothing
    offered resumes at 16; 16 tokens offered resume at 80 (PR 51468; the fallback is in releases from 0.27.0).
    """
    superseded = all_of(tail > 0, offered > tail)
    kept = all_of(tail > 0, offered <= tail)
    local = ite(superseded, hit - tail, hit)
    external = ite(kept, 0, offered)
    fallback = all_of(diverged, external == 0)
    return Resume(ite(fallback, agreed, local), ite(fallback, 0, external))


def resume_has_state(resumed: Resume, recurrent_depth: Int, agreed: Int) -> Truth:
    """The resume boundary has its recurrent state: an external load brings it, or the local group's is exactly there.

    ``recurrent_depth`` is the position of the deepest state that the recurrent group's own lookup found, ``agreed``
    that of the boundary every group can serve (a state exists at both; at 0 none is needed).
    """
    return any_of(
        resumed.external > 0,
        resumed.local == 0,
        resumed.local == recurrent_depth,
        resumed.local == agreed,
    )
