"""Methods laid over those of one object.

An attribute set on the object itself would do as well, but others look at an object's attributes, and compare or copy
them. So the object becomes one of a subclass of its own, which has the methods, and its attributes stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Around = Callable[..., Any]


class Overlay:
    """A subclass for one object. ``on`` and ``off`` make it the object's class, and take it away again.

    Where somebody set a method on the object itself, that one is wrapped, on the object.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.plain = type(owner)
        self.laid = type(self.plain.__name__, (self.plain,), {"__module__": self.plain.__module__, "__slots__": ()})
        self._own: dict[str, tuple[Any, Any]] = {}

    def lay(self, name: str, make: Callable[[Any], Around]) -> None:
        """Let ``make(original)`` answer calls of the method ``name``; ``original`` is bound. One that the object does
        not have is left alone."""
        original = getattr(self.owner, name, None)
        if original is None:
            return
        answer = make(original)
        own = getattr(self.owner, "__dict__", {}).get(name)
        if own is not None:
            self._own[name] = (own, answer)
            return
        # As a method it would be handed the object once more: nothing is bound to a static one.
        setattr(self.laid, name, staticmethod(answer))

    def wrap(self, name: str, around: Around, *first: Any) -> None:
        """The same with ``around(original, *first, *args, **kwargs)``."""

        def make(original: Any) -> Around:
            def answer(*args: Any, **kwargs: Any) -> Any:
                return around(original, *first, *args, **kwargs)

            return answer

        self.lay(name, make)

    def on(self) -> None:
        self.owner.__class__ = self.laid
        for name, (_, answer) in self._own.items():
            setattr(self.owner, name, answer)

    def off(self) -> None:
        if type(self.owner) is self.laid:
            self.owner.__class__ = self.plain
        for name, (own, answer) in self._own.items():
            if self.owner.__dict__.get(name) is answer:
                setattr(self.owner, name, own)

    def remove(self, name: str) -> None:
        """Take one method away again."""
        own = self._own.pop(name, None)
        if own is not None:
            setattr(self.owner, name, own[0])
        elif name in self.laid.__dict__:
            delattr(self.laid, name)


def wrap(owner: Any, name: str, around: Around, undo: list[Callable[[], None]]) -> None:
    """Let ``around(original, *args, **kwargs)`` answer calls of one object's method for good; ``undo`` learns how to
    stop it. A method that the release does not have is left alone."""
    overlay = lasting(owner)
    overlay.wrap(name, around)
    overlay.on()
    undo.append(lambda: overlay.remove(name))


def lasting(owner: Any) -> Overlay:
    """The overlay that an object keeps, made if it has none."""
    overlay = type(owner).__dict__.get("_kvproof_overlay")
    if overlay is None:
        overlay = Overlay(owner)
        overlay.laid._kvproof_overlay = overlay  # type: ignore[attr-defined]
    assert isinstance(overlay, Overlay)
    return overlay
