"""A subject: what is driven. Configuration in, actions in, observations out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from kvproof.spec.config import Config
from kvproof.spec.events import Observation
from kvproof.spec.scenario import Action
from kvproof.spec.view import View

Observer = Callable[[Observation], None]
"""Called with every observation, in order. It may raise to stop the subject where it stands."""


class Driven(Protocol):
    """One engine under one configuration, alive between actions."""

    @property
    def view(self) -> View: ...

    def apply(self, action: Action) -> bool:
        """Do one action; observations reach the observer. False if the action did not apply (its request is gone)."""

    def drain(self) -> None:
        """Finish or abort everything in flight, so that what is left can be judged (``Drained``)."""

    def live(self) -> tuple[str, ...]:
        """Names of the requests that are waiting or running, oldest first."""


class Subject(Protocol):
    """Something that can be driven, and how it is named on the command line."""

    @property
    def name(self) -> str: ...

    def families(self) -> frozenset[str]:
        """The invariant families that this subject can show; others are not applicable."""

    def lacking(self) -> Mapping[str, str]:
        """Single invariants, by id, that this subject has no mechanism for, each with the reason: not applicable."""

    def start(self, config: Config, observer: Observer | None) -> Driven:
        """A fresh engine. Raises :class:`kvproof.spec.config.ConfigError` where it can't run ``config``."""
