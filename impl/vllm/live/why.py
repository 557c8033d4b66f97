"""Why a prefix-cache lookup found so little: which group vetoed, what states it has, which rule kept no better one.

A hybrid hit is the shortest group's. Nothing is logged when one group cuts off what all others have cached, so a
configuration or a traffic pattern that never hits looks like any other. :func:`explain` compares what a lookup answered
with what the model's full attention alone would have served, and says in one line what stood in between.

It is asked when a request is looked up for admission, never while it decodes, and changes nothing but the history. A
lookup that answered as much as attention has costs one probe of the pool and a few dictionary entries per recurrent
block of the prompt; one that fell short costs a few dictionary lookups per hash unit of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kvproof.impl.vllm.live.keyhistory import START_STEP, KeyHistory, Prompt
from kvproof.impl.vllm.live.whygroups import Cache, CacheGroup, Chain, Kind, common, floor, read
from kvproof.spec.config import Config

__all__ = ["KeyHistory", "Kind", "Miss", "Rule", "explain", "never_hits"]

Rule = Literal[
    "retention",
    "alignment",
    "eagle",
    "short-prompt",
    "short-share",
    "evicted",
    "unique-part",
    "chunk-end",
    "pending",
    "external",
    "drafter",
    "unknown",
]
"""What kept no better state.

- ``retention``: the boundary is not one that the retention interval keeps. Whatever it is (0: vLLM's own default from
  0.30.0 on), two kinds are kept: the boundary at which the same prompt would resume if it came again, and those at
  which a later prompt was seen to leave an earlier one. A number adds one per so many tokens; ``None`` keeps every one.
- ``alignment``: a hit has to end on a block (or unit), or states are kept on blocks only.
- ``eagle``: what would serve it is in the unit that EAGLE drops.
- ``short-prompt``, ``short-share``: the prompt, or what it shares, is shorter than one recurrent block.
- ``evicted``: it was keyed and is gone.
- ``unique-part``: boundaries are all kept, but chunks of the earlier prompt ended only in the part not shared.
- ``chunk-end``: no chunk ended there, and no later state of an earlier prompt is known either.
- ``pending``: the earlier request has not come that far yet, or keys it in this very step.
- ``external``: the store supplied tokens, but fewer than attention has here.
- ``drafter``: the drafter's group has no blocks for the prefix.
- ``unknown``: every group has what the hit needs.

With a sparse retention interval a boundary that no chunk ended at counts as ``retention``: which chunks a finished
request was cut into is not known.
"""

NAMES = {"full": "full attention", "window": "sliding window", "mamba": "recurrent", "drafter": "drafter"}
SPARSE = "where a resend resumes or prompts were seen to part"
THINGS = {"full": "blocks", "window": "window", "mamba": "state", "drafter": "blocks"}


@dataclass(frozen=True)
class Miss:
    """One lookup that fell short. Positions and lengths are in tokens.

    ``attention`` is what the model's own full-attention groups alone would serve, EAGLE's drop not counted; where there
    are none, or nothing shorter than a block is ever keyed, it is what an earlier prompt shares with this one.
    ``wanted`` is the best boundary a hit could have ended on (0: there is none). ``nearest_below`` and
    ``nearest_above`` are the boundaries around it that the group can serve; above may be one of the earlier prompt's
    own. ``because`` says ``rule`` with its numbers.
    """

    request: str
    prompt: int
    answered: int
    attention: int
    wanted: int
    group: int
    kind: Kind
    nearest_below: int | None
    nearest_above: int | None
    rule: Rule
    because: str

    @property
    def lost(self) -> int:
        """The tokens that are computed again although attention has them."""
        return self.attention - self.answered

    def line(self) -> str:
        """One sentence."""
        near = [f"{n}" for n in (self.nearest_below, self.nearest_above) if n is not None]
        what = THINGS[self.kind]
        nearest = f"nearest {what} at {' and '.join(near)}" if near else f"no {what} of this prompt"
        return (
            f"{self.request}'s lookup of {self.prompt} tokens answers {self.answered} where attention alone serves "
            f"{self.attention}: {NAMES[self.kind]} group {self.group} ({nearest}), {self.because} ({self.rule})"
        )


def explain(
    manager: Any,
    request: Any,
    answered: int,
    history: KeyHistory,
    *,
    limit: int | None = None,
    external: int | None = None,
) -> Miss | None:
    """Why the lookup of ``request`` answered no more than ``answered`` tokens; ``None`` if attention has no more.

    To be asked right after the lookup, before blocks are allocated. ``limit`` is the longest hit that the lookup was
    allowed, if less than all tokens but one. ``external`` is how many tokens an external store supplies on top
    (``None``: there is no store). ``manager`` is a real ``KVCacheManager``; nothing of it is changed.
    """
    if not manager.enable_caching or getattr(request, "skip_reading_prefix_cache", False):
        return None
    cache = read(manager)
    if not cache.groups:
        return None
    longest = int(request.num_tokens) - 1
    chain = Chain(request.block_hashes, cache.unit)
    prompt = cache.prompt(request, chain)
    lookup = _Lookup(
        cache, chain, prompt, answered, longest if limit is None else min(longest, limit), history, external or 0
    )
    miss = lookup.explain(longest + 1)
    if miss is not None:
        # The engine notes where the shared part ends, and lets this request keep its state there for the next one.
        inside = getattr(manager, "mamba_shared_prefix_checkpoint", False)
        junction = miss.wanted if inside else floor(miss.wanted, common(cache.alignment, cache.widest.block))
        if junction:
            prompt.junction = junction
            prompt.marks[junction] = chain.at(junction)
    history.asked(prompt)
    return miss


class _Lookup:
    """One lookup under examination."""

    def __init__(
        self, cache: Cache, chain: Chain, prompt: Prompt, answered: int, limit: int, history: KeyHistory, external: int
    ) -> None:
        self.cache, self.chain, self.prompt, self.history = cache, chain, prompt, history
        self.answered, self.limit, self.external = answered, limit, external
        self.other: Prompt | None = None
        """The latest earlier prompt that shares the beginning of this one."""

    def explain(self, tokens: int) -> Miss | None:
        attention = self.attention()
        if attention <= self.answered + self.external:
            return None
        wanted = self.wanted(attention)
        group, below, above, rule, because = self.blame(attention, wanted)
        if self.external:
            rule, because = "external", f"and the external store brings {self.external} tokens more, which ends below"
        return Miss(
            request=self.prompt.name,
            prompt=tokens,
            answered=self.answered,
            attention=attention,
            wanted=wanted,
            group=group.index,
            kind=group.kind,
            nearest_below=below,
            nearest_above=above,
            rule=rule,
            because=because,
        )

    # -- what attention has -------------------------------------------------------------------------------------------

    def attention(self) -> int:
        full = self.cache.full
        reach = min((group.depth(self.chain, self.answered, self.limit) for group in full), default=0)
        if full and reach <= self.answered and reach >= self.cache.alignment:
            return reach
        shared, self.other = self.shared(max(reach, 0 if full else self.limit))
        if reach < self.cache.alignment and not self.shares_a_block():  # what ends before a boundary is never keyed
            digests = self.prompt.start[: self.limit // START_STEP]
            found = self.history.earlier(reversed(digests), self.prompt.name)
            if found is not None:
                reach = max(reach, (len(digests) - found[0]) * START_STEP)
                self.other = self.other or found[1]
        return reach if full else max(reach, shared)

    def shares_a_block(self) -> bool:
        """Whether an earlier prompt shares the first boundary: then it is not shortness that hides it."""
        first = self.cache.alignment
        return self.chain.end >= first and self.history.earlier((self.chain.at(first),), self.prompt.name) is not None

    def shared(self, up_to: int) -> tuple[int, Prompt | None]:
        """How much of this prompt an earlier one had, as far as boundaries tell, and which."""
        ends = [end for end in sorted(self.prompt.marks, reverse=True) if end <= up_to]
        found = self.history.earlier((self.prompt.marks[end] for end in ends), self.prompt.name)
        if found is None:
            return 0, None
        return ends[found[0]], found[1]

    def wanted(self, attention: int) -> int:
        """The best boundary that attention leaves once EAGLE has dropped its unit."""
        left = attention
        for group in self.cache.groups:
            if not group.drops or group.caches != "full":
                continue
            margin = group.drops if len(self.cache.groups) > 1 else 0
            deep = group.depth(self.chain, min(attention, self.answered), self.limit + margin)
            if deep >= attention:
                left = min(left, deep - group.drops)
        return max(0, floor(left, self.cache.alignment))

    # -- who has less -------------------------------------------------------------------------------------------------

    def blame(self, attention: int, wanted: int) -> tuple[CacheGroup, int | None, int | None, Rule, str]:
        cache, chain, alignment = self.cache, self.chain, self.cache.alignment
        found: list[tuple[int, CacheGroup, list[int]]] = []
        for group in cache.groups if wanted > self.answered else ():
            if group.kind == "full":
                continue
            if group.caches == "full":
                deep = group.depth(chain, 0, self.limit)
                if deep < attention and floor(max(0, deep - group.drops), alignment) < wanted:
                    found.append((deep, group, [deep] if deep else []))
                continue
            served = group.served(chain, self.answered, alignment)
            if wanted not in served:
                found.append((max((p for p in served if p < wanted), default=0), group, served))
        if not found:
            return self.cut(attention, wanted)
        below, group, served = min(found, key=lambda item: (item[0], item[1].index))
        above = min((p for p in served if p > wanted), default=None)
        dropped = above is not None and above <= attention
        above = above if above is not None else self.elsewhere(group, wanted)
        rule, because = self.rule(group, below, wanted, above, dropped)
        return group, below or None, above, rule, because

    def elsewhere(self, group: CacheGroup, wanted: int) -> int | None:
        """The first state above ``wanted`` that the group has of the earlier prompt, where this one does not share."""
        if self.other is None or group.caches == "full":
            return None
        theirs = ((p, h) for p, h in self.other.marks.items() if p > wanted and not self.has(p, h))
        return min((position for position, hash in theirs if group.holds(hash)), default=None)

    def has(self, position: int, hash: bytes) -> bool:
        """Whether this request's prefix of ``position`` tokens is the one with that hash."""
        return position <= self.chain.end and self.chain.at(position) == hash

    def cut(self, attention: int, wanted: int) -> tuple[CacheGroup, int | None, int | None, Rule, str]:
        """No group lacks the best boundary: the boundary itself is the limit, or nothing that can be seen."""
        alignment, best = self.cache.alignment, floor(attention, self.cache.alignment)
        group = self.cache.widest
        above = self.elsewhere(group, wanted)
        if wanted > self.answered:
            if self.of_this_step(wanted):
                return group, self.answered or None, wanted, "pending", f"state {wanted} is keyed in this very step"
            return group, wanted, above, "unknown", "though every group has what a hit there needs"
        if best > self.answered:
            group = max(self.cache.groups, key=lambda g: (g.drops, -g.index))
            why = f"the last {group.drops} tokens of a hit are dropped for the drafter"
            return group, wanted or None, best, "eagle", why
        if best:
            return group, best, above, "alignment", f"a hit ends on a multiple of {alignment} tokens"
        return (group, None, above, *self.too_short(alignment))

    def too_short(self, block: int) -> tuple[Rule, str]:
        if self.limit < block:
            return "short-prompt", f"the prompt has no whole block of {block} tokens before its last token"
        return "short-share", f"the part shared with an earlier prompt is shorter than one block of {block} tokens"

    # -- why it has no more -------------------------------------------------------------------------------------------

    def rule(self, group: CacheGroup, below: int, wanted: int, above: int | None, dropped: bool) -> tuple[Rule, str]:
        what, retention = THINGS[group.kind], self.cache.retention
        if group.kind == "drafter":
            return "drafter", f"the drafter covers {below} of these tokens, and vetoes what the model itself has"
        gone = self.gone(group, below, wanted)
        if gone:
            return "evicted", gone
        if dropped:
            return "eagle", f"{what} {above} is in the last unit, which is dropped for the drafter"
        waits = self.waits()
        if waits:
            return "pending", waits
        step = common(self.cache.alignment, group.block)
        if floor(wanted, step) <= self.answered:
            if not floor(wanted, step):
                return self.too_short(step)
            return "alignment", f"a {what} is kept on multiples of {step} tokens and at the end of a prompt"
        forgot = " (or kept too long ago to be remembered)" if self.history.forgot else ""
        if retention is not None and (not retention or floor(wanted, retention) <= self.answered):
            kept = f"one per {retention} tokens and those {SPARSE}" if retention else f"only those {SPARSE}"
            return "retention", f"{what} {wanted} was never kept: retention {retention} keeps {kept}{forgot}"
        if above is not None:
            where = f"those of {self.other.name}" if self.other is not None else "those kept"
            return "unique-part", f"{what} {wanted} was never kept and {where} are in the part not shared{forgot}"
        return "chunk-end", f"{what} {wanted} was never kept: no chunk of an earlier prompt ended there{forgot}"

    def gone(self, group: CacheGroup, below: int, wanted: int) -> str:
        """The deepest key up to ``wanted`` that the group had once; an empty string if it had none."""
        if group.caches == "mamba":
            positions = range(wanted, below, -self.cache.alignment)
        else:
            last = min(wanted + group.drops, self.chain.end)
            positions = range(last, group.first_needed(wanted) * group.block, -group.block)
        for position in positions:
            hash = self.chain.at(position)
            before = self.history.gone(group.index, hash)
            if before is not None and not group.holds(hash):
                kept = f"in step {before.kept}" if before.kept >= 0 else "once"
                return f"{THINGS[group.kind]} {position} was kept {kept} and is gone since step {before.gone}"
        return ""

    def waits(self) -> str:
        """Whether the earlier request will keep a state in the shared part but has not come to it yet."""
        if self.other is None:
            return ""
        name, tokens, unit = self.other.name, self.other.tokens, self.cache.alignment
        drop = unit if any(group.drops for group in self.cache.groups) else 0
        ends = {floor(tokens - 1, unit) - drop, floor(tokens, unit) - drop}
        for position in sorted({self.other.junction, *ends}):
            hash = self.other.marks.get(position)
            if hash is None or not self.answered < position <= self.limit or not self.has(position, hash):
                continue
            if self.cache.computing(name, position):
                return f"{name} is still computing the prefix and has not come to {position}"
        return ""

    def of_this_step(self, position: int) -> bool:
        for group in self.cache.groups:
            now = getattr(group.manager, "cached_blocks_this_step", ())
            if self.chain.at(position) + group.suffix in now:
                return True
        return False


def never_hits(engine: Any) -> str | None:
    """Why no prompt can ever hit in this engine, with the way out; ``None`` if one can.

    ``engine`` is a real ``KVCacheManager`` or a :class:`~kvproof.spec.config.Config`. Whatever is said is certain;
    that a prompt can hit does not mean that yours do.
    """
    if isinstance(engine, Config):
        alignment = engine.hash_unit if engine.partial_hits else engine.scheduler_block
        return _too_long(alignment, 0, 0, engine.max_model_len)
    if not engine.enable_caching:
        return "prefix caching is off: no prompt ever hits (enable_prefix_caching turns it on)"
    cache = read(engine)
    if not cache.groups:
        return "no cache group of this model takes part in prefix caching: no prompt ever hits"
    drop = max((group.drops for group in cache.groups if group.caches == "full"), default=0)
    ahead = int(getattr(engine.coordinator.block_pool, "num_hash_lookahead_tokens", 0))
    return _too_long(cache.alignment, drop, ahead, int(engine.max_model_len))


def _too_long(alignment: int, drop: int, ahead: int, max_model_len: int) -> str | None:
    # A prompt leaves room for one token of output, and a hit leaves one token of the prompt (or more: those that the
    # hash of the last boundary looks ahead, or those of the unit that EAGLE drops) to compute.
    shortest = alignment + max(1, drop, ahead)
    if shortest <= max_model_len - 1:
        return None
    also = f", and {drop} more are dropped for the drafter" if drop else ""
    return (
        f"no prompt can ever hit: a hit ends on a multiple of {alignment} tokens{also}, so that only prompts of "
        f"{shortest} tokens can have one, and max_model_len {max_model_len} allows {max_model_len - 1} "
        f"(raise it to {shortest + 1}, or choose a smaller block or prefix_match_unit)"
    )
