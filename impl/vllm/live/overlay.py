"""Methods laid over those of one object.

An attribute set on the object itself would do as well, but others look at an object's attributes, and compare or copy
them. So the object is one of a subclass of its own, which has the methods, and its attributes stay as they were.

An object that exists can be made one of another class, but the interpreter then finds its attributes the slow way for
good, which costs a scheduler some 7 % of each step. :func:`lay_from_birth` has objects made in their own class.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

from kvproof.impl.vllm.live.derive import Unsupported

Around = Callable[..., Any]


def extensible(cls: type) -> bool:
    """Whether nobody notices that a class is extended: it has no metaclass and no ``__init_subclass__`` of its own."""
    quiet = all("__init_subclass__" not in vars(one) for one in cls.__mro__ if one is not object)
    return quiet and type(cls) in (type, ABCMeta)


class Overlay:
    """A subclass of ``plain`` for one object: for ``owner``, or for one made here. Raises :class:`Unsupported`."""

    def __init__(self, plain: type, owner: Any = None) -> None:
        if not extensible(plain):
            raise Unsupported(f"{plain.__name__} minds being extended")
        self.plain: Any = plain
        self.laid = type(plain.__name__, (plain,), {"__module__": plain.__module__, "__slots__": (),
                                                    "__reduce_ex__": _reduced, "_kvproof_overlay": self})  # fmt: skip
        if owner is not None:
            owner.__class__ = self.laid
        self.owner = object.__new__(self.laid) if owner is None else owner
        self._own: dict[str, Any] = {}

    def lay(self, name: str, make: Callable[[Any], Around]) -> None:
        """Let ``make(original)`` answer calls of the method ``name``; ``original`` is bound. One that the object does
        not have is left alone. Where somebody set a method on the object itself, that one is wrapped, on the object."""
        original = getattr(self.owner, name, None)
        if original is None:
            return
        answer = make(original)
        own = getattr(self.owner, "__dict__", {}).get(name)
        if own is not None:
            self._own[name] = own
            setattr(self.owner, name, answer)
            return
        # As a method it would be handed the object once more: nothing is bound to a static one.
        setattr(self.laid, name, staticmethod(answer))

    def wrap(self, name: str, around: Around) -> None:
        """The same with ``around(original, *args, **kwargs)``."""

        def make(original: Any) -> Around:
            def answer(*args: Any, **kwargs: Any) -> Any:
                return around(original, *args, **kwargs)

            return answer

        self.lay(name, make)

    def remove(self, name: str) -> None:
        """Take one method away again."""
        own = self._own.pop(name, None)
        if own is not None:
            setattr(self.owner, name, own)
        elif name in self.laid.__dict__:
            delattr(self.laid, name)


def given(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    """An argument, by place or by name; ``None`` where it was left out."""
    return args[place] if len(args) > place else kwargs.get(name)


def wrap(owner: Any, name: str, around: Around, undo: list[Callable[[], None]]) -> None:
    """Let ``around(original, *args, **kwargs)`` answer calls of one object's method for good; ``undo`` learns how to
    stop it. A method that the release does not have is left alone."""
    overlay = lasting(owner)
    overlay.wrap(name, around)
    undo.append(lambda: overlay.remove(name))


def lasting(owner: Any) -> Overlay:
    """The overlay that an object keeps, made if it has none."""
    overlay = type(owner).__dict__.get("_kvproof_overlay") or Overlay(type(owner), owner)
    assert isinstance(overlay, Overlay)
    return overlay


def lay_from_birth(cls: Any, undo: list[Callable[[], None]]) -> None:
    """Let every object of ``cls`` made from now on have an overlay, with nothing laid over it yet.

    What ``undo`` leaves behind is a ``__new__`` that makes plain objects: the interpreter does not quite forget that
    there was one. A class that has its own is left alone.
    """
    if cls.__new__ in (object.__new__, _plain):
        cls.__new__ = staticmethod(_laid)
        undo.append(lambda: setattr(cls, "__new__", staticmethod(_plain)))


def _laid(cls: type, *_: Any, **__: Any) -> Any:
    return Overlay(cls).owner if extensible(cls) else object.__new__(cls)


def _plain(cls: type, *_: Any, **__: Any) -> Any:
    return object.__new__(cls)


def _reduced(owner: Any, protocol: Any) -> Any:
    """A copy, or what is pickled, is one of the plain class, and nobody watches it."""
    overlay = lasting(owner)
    make, arguments, *state = overlay.plain.__reduce_ex__(owner, protocol)
    if arguments and arguments[0] is overlay.laid:
        make, arguments = _plain, (overlay.plain, *arguments[1:])
    return make, arguments, *state


def listening(
    original: Any, hooks: Any, when: str, hear: Callable[[Any, dict[str, Any]], None], **names: Any
) -> Around:
    """``original`` with its own parameters, that calls ``hear(answer, arguments by name)`` if ``when`` holds.

    ``when`` is an expression of ``answer``, ``hooks``, ``names`` and ``before``, which is ``hooks.changes`` before the
    call. For methods that are called for each request in each step: a function written out costs a tenth of one that
    takes and passes on whatever it is given.
    """
    parameters = inspect.signature(original).parameters.values()
    taken: list[str] = []
    passed: list[str] = []
    named: list[str] = []
    for one in parameters:
        stars = "*" if one.kind == one.VAR_POSITIONAL else "**" if one.kind == one.VAR_KEYWORD else ""
        if one.kind == one.KEYWORD_ONLY and not any(text.startswith("*") for text in taken):
            taken.append("*")
        taken.append(f"{stars}{one.name}" + (f"=_defaults[{one.name!r}]" if one.default is not one.empty else ""))
        passed.append(f"{one.name}={one.name}" if one.kind == one.KEYWORD_ONLY else f"{stars}{one.name}")
        named += [] if stars == "*" else [f"**{one.name}" if stars else f"{one.name!r}: {one.name}"]
    namespace = {**names, "hooks": hooks, "_original": original, "_hear": hear,
                 "_defaults": {one.name: one.default for one in parameters}}  # fmt: skip
    exec(
        f"def answering({', '.join(taken)}):\n"
        f"    before = hooks.changes\n"
        f"    answer = _original({', '.join(passed)})\n"
        f"    if {when}:\n"
        f"        _hear(answer, {{{', '.join(named)}}})\n"
        f"    return answer\n",
        namespace,
    )
    answering: Around = namespace["answering"]
    return answering
