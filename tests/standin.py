"""What answers in the place of a method, with any parameters that can be called as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """``around(original, *arguments)`` answers calls of ``owner.name(*arguments)``, on this one object."""
    setattr(owner, name, partial(around, getattr(owner, name)))
