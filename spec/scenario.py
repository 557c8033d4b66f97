"""A scenario: one configuration and a list of actions. The currency of the house.

The fuzzer shrinks to one, solvers emit one, ``replay`` runs one on any subject, ``export`` turns one into a test.
As JSON it is flat and small; ``VERSION`` changes when the meaning of an old file would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvproof.spec.config import MOST_TOKENS, Config, Group

VERSION = 1

ActionKind = Literal["submit", "step", "finish", "abort", "preempt", "evict", "reset"]
FORCED: frozenset[str] = frozenset({"preempt", "evict"})
"""Actions that no client or model can cause directly. A finding that needs one stays unconfirmed."""

MOST_ACTIONS: Final = 10_000
MOST_STEPS: Final = 65_536
"""The most engine steps in one action."""

MOST_PROMPT_TOKENS: Final = 4 * MOST_TOKENS
"""The most tokens of all prompts of a scenario together, each rounded up to whole blocks."""

MOST_ACCEPTED: Final = 1_024
"""The most entries of ``accept``, and the largest of them."""

MOST_IMAGES: Final = 64
"""The most images in one prompt."""

MOST_LETTERS: Final = 100
"""The longest name of a request."""

ACTION_BOUNDS: Final[Mapping[str, int]] = {
    "shared": MOST_TOKENS,
    "length": MOST_TOKENS,
    "max_tokens": MOST_TOKENS,
    "external": MOST_TOKENS,
    "missing": MOST_TOKENS,
    "times": MOST_STEPS,
    "priority": MOST_TOKENS,
}
"""The largest value of each number in an action."""


class ScenarioError(ValueError):
    """A scenario that can't be read or run. The message says what to do."""


@dataclass(frozen=True)
class Action:
    """One thing that happens to an engine. :data:`ACTION_BOUNDS` has the largest value of each number.

    ``submit``: ``request`` arrives. Its prompt is the first ``shared`` tokens of ``base``'s sequence (prompt and output
    so far, at most all of it), then fresh tokens up to ``length``. ``max_tokens`` bounds its output. ``external`` is
    how many tokens of the prompt an external store says it holds (0: none); of those it is asked for, the last
    ``missing`` never arrive. ``priority`` counts where the engine serves by it: the lowest first.
    ``images`` are the positions from which on images take the place of fresh tokens, where the model takes any.
    ``unread``: nothing of it may be read from a cache (as for log probabilities of its prompt).

    ``step``: the engine takes ``times`` steps. ``accept`` is the number of drafts that the model accepts for each
    running request, cycled over the requests in the order scheduled (capped by what was drafted).

    ``finish``: the model ends ``request`` with its next token. ``abort``: the client goes away.
    ``reset``: the operator clears the prefix cache (no effect while blocks are in use). ``running``: whoever runs loses
    its blocks for that (no effect while others hold any). ``store``: what the connector stores is cleared as well.
    ``preempt`` (forced): ``request`` loses its blocks and waits again.
    ``evict`` (forced): the ``times`` blocks at the front of the free queue (0: all) lose their keys.
    """

    kind: ActionKind
    request: str = ""
    base: str = ""
    shared: int = 0
    length: int = 0
    max_tokens: int = 0
    external: int = 0
    missing: int = 0
    times: int = 1
    accept: tuple[int, ...] = ()
    priority: int = 0
    images: tuple[int, ...] = ()
    unread: bool = False
    running: bool = False
    store: bool = False

    @property
    def rare(self) -> bool:
        """Whether it asks for what no other subject than vLLM has."""
        return self.unread or self.running or self.store

    @property
    def forced(self) -> bool:
        return self.kind in FORCED

    def __str__(self) -> str:
        if self.kind == "submit":
            if not self.base:
                origin = f"{self.length} fresh tokens"
            elif self.shared >= self.length:
                origin = f"the first {self.length} tokens of {self.base}"
            else:
                origin = f"{self.shared} tokens of {self.base} + {self.length - self.shared} fresh"
            store = f", store holds {self.external}" if self.external else ""
            store += f" and loses {self.missing}" if self.missing else ""
            store += f", priority {self.priority}" if self.priority else ""
            store += f", images at {', '.join(map(str, self.images))}" if self.images else ""
            store += ", nothing of it read from a cache" if self.unread else ""
            return f"submit {self.request}: {origin}, up to {self.max_tokens} out{store}"
        if self.kind == "step":
            drafts = f", accept {'/'.join(map(str, self.accept))} drafts" if self.accept else ""
            return f"step ×{self.times}{drafts}" if self.times != 1 or drafts else "step"
        if self.kind == "evict":
            return f"evict {self.times or 'all'} (forced)"
        if self.kind == "reset":
            store = " and the store" if self.store else ""
            return f"reset the prefix cache{store}{', whoever runs starts over' if self.running else ''}"
        return f"{self.kind} {self.request}{' (forced)' if self.forced else ''}"


@dataclass(frozen=True)
class Scenario:
    """A configuration, and what happens to it."""

    config: Config
    actions: tuple[Action, ...]
    note: str = ""

    @property
    def forced(self) -> bool:
        """Whether any action comes from outside what clients, models and the scheduler can do."""
        return any(action.forced for action in self.actions)

    def trimmed(self) -> Scenario:
        """The same without ``shared`` tokens that their base can never have: what is beyond them is fresh anyway."""
        most = {a.request: a.length + a.max_tokens for a in self.actions if a.kind == "submit"}
        actions = tuple(
            dataclasses.replace(a, shared=most[a.base]) if a.shared > most.get(a.base, a.shared) else a
            for a in self.actions
        )
        return dataclasses.replace(self, actions=actions)

    def text(self) -> str:
        """The scenario as a conversation, one line per action."""
        c = self.config
        groups = ", ".join(
            f"{g.kind} {g.block_size}" + (f"/{g.window}" if g.window else "") + (" (drafter)" if g.drafter else "")
            for g in c.groups
        )
        head = [f"groups: {groups}; hash unit {c.hash_unit}; {c.num_blocks} blocks; {c.step_tokens} tokens a step"]
        default = Config(groups=(), num_blocks=0, hash_unit=0, step_tokens=0)
        extras = [
            f"{field.name} {getattr(c, field.name)}"
            for field in dataclasses.fields(Config)
            if field.name not in ("groups", "num_blocks", "hash_unit", "step_tokens")
            and getattr(c, field.name) != getattr(default, field.name)
        ]
        if extras:
            head.append("with " + ", ".join(extras))
        return "\n".join([*head, *(f"{i:3}. {action}" for i, action in enumerate(self.actions, 1))])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: defaults of actions are left out, those of the configuration are kept."""
        blank = Action("step")
        actions = [
            {
                f.name: _plain(getattr(a, f.name))
                for f in dataclasses.fields(a)
                if f.name == "kind" or getattr(a, f.name) != getattr(blank, f.name)
            }
            for a in self.actions
        ]
        data: dict[str, Any] = {"kvproof_scenario": VERSION, "config": dataclasses.asdict(self.config)}
        if self.note:
            data["note"] = self.note
        data["actions"] = actions
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Scenario:
        """The scenario that :meth:`to_dict` wrote. The caller has validated shapes and the version."""
        raw = dict(data["config"])
        raw["groups"] = tuple(Group(**group) for group in raw["groups"])
        lists = ("accept", "images")
        actions = tuple(Action(**{**a, **{name: tuple(a.get(name, ())) for name in lists}}) for a in data["actions"])
        return cls(Config(**raw), actions, data.get("note", ""))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
