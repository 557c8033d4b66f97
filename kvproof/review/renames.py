"""Which changed functions say the same under other names: a reviewer need not read these again.

Names may differ one to one. A local name is a function's own. An attribute is renamed only where its old name is used
no more, its new one was not used before, both are set by the same statements and are used in the same functions, as
often: another attribute that is read in its place is a change. So is a parameter that trades names with another, since
calls may name it. What a caller passes under a parameter's new name is not looked at.
"""

from __future__ import annotations

import ast
import itertools
import symtable
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvproof.review.sources import Changed, Function, functions, parsed

Files = Sequence[tuple[str, str]]
Pair = tuple[str, str]


@dataclass(frozen=True)
class Renamed:
    """A function that differs by ``names`` (old, new) only, and by parameters that it does not read: those it had, and
    those it has now."""

    change: Changed
    names: tuple[Pair, ...]
    dropped: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """How it differs, in words."""
        parts = [f"{old} → {new}" for old, new in self.names]
        for verb, names in (("no longer takes", self.dropped), ("takes", self.taken)):
            if names:
                parts.append(f"{verb} {', '.join(names)}, which it does not read")
        return "; ".join(parts)


class _DiffersError(Exception):
    """By more than names."""


@dataclass(frozen=True)
class _Use:
    """An attribute of an object: in which class and function, of ``self`` or of something else; ``stored`` is the
    statement that sets it."""

    owner: str
    place: str
    of_self: bool
    stored: ast.stmt | None


class Renames:
    """What is renamed between two sets of files."""

    def __init__(self, before: Files, after: Files) -> None:
        self._sides = (_Side(before), _Side(after))
        self._settled: dict[tuple[str, str, str], bool] = {}

    def apart(self, changed: Iterable[Changed]) -> tuple[list[Changed], list[Renamed]]:
        """Those that differ by more than names, and those that don't."""
        rest, renamed = [], []
        for change in changed:
            found = self.only(change)
            if found is None:
                rest.append(change)
            else:
                renamed.append(found)
        return rest, renamed

    def only(self, change: Changed) -> Renamed | None:
        """The change as a renaming, where it is one."""
        if change.before is None or change.after is None:
            return None
        old, new = _definition(change.before), _definition(change.after)
        scopes = _scopes(change.before), _scopes(change.after)
        dropped, taken = _drop_unread(old, new), _drop_unread(new, old)
        try:
            told = self._pairs(old, new, change.name, scopes)
        except _DiffersError:
            return None
        return Renamed(change, tuple(dict.fromkeys(told)), tuple(dropped), tuple(taken))

    def _pairs(
        self, old: ast.AST, new: ast.AST, place: str, scopes: tuple[Mapping[str, bool], Mapping[str, bool]]
    ) -> list[Pair]:
        """The names that differ between two pieces of code at ``place``. Raises :class:`_DiffersError` where more
        does."""
        there: dict[str, str] = {}
        back: dict[str, str] = {}
        told = []
        for kind, (a, b), more in _walk(old, new):
            if kind == "name":
                if there.setdefault(a, b) != b or back.setdefault(b, a) != a:
                    raise _DiffersError
                _require(a == b or _may_rename(a, b, scopes))
            elif kind == "keyword":
                _require(a == b or self._parameter_renamed(more, a, b))
            else:
                of_self = more == "self"
                owner = place.rpartition(".")[0] if of_self else ""
                _require(a == b or self._attribute_renamed(owner, a, b))
                if a != b:
                    told.append((f"{more}.{a}", f"{more}.{b}"))
            if a != b and kind == "name":
                told.append((a, b))
        return told

    def _parameter_renamed(self, called: str, a: str, b: str) -> bool:
        """Whether every function that is called so had a parameter ``a`` where it has ``b`` now."""
        old, new = (side.parameters(called) for side in self._sides)
        if not old or old.keys() != new.keys():
            return False
        return all(
            a in old[name] and b in new[name] and old[name].index(a) == new[name].index(b)
            and a not in new[name] and b not in old[name]
            for name in old
        )  # fmt: skip

    def _attribute_renamed(self, owner: str, a: str, b: str) -> bool:
        """Whether ``a`` is ``b`` now. ``owner``: the class whose ``self`` has it; empty: some object has it."""
        key = (owner, a, b)
        if key not in self._settled:
            self._settled[key] = True  # what it leads back to is decided here
            self._settled[key] = self._set_alike(owner, a, b)
        return self._settled[key]

    def _set_alike(self, owner: str, a: str, b: str) -> bool:
        before, after = self._sides
        if before.uses(owner, b) or after.uses(owner, a):
            return False
        if before.is_defined(owner, a) or after.is_defined(owner, b):
            return False
        old, new = before.uses(owner, a), after.uses(owner, b)
        if sorted(use.place for use in old) != sorted(use.place for use in new):
            return False
        stores = [[use for use in uses if use.stored is not None] for uses in (old, new)]
        if not stores[0] or [use.place for use in stores[0]] != [use.place for use in stores[1]]:
            return False
        return all(itertools.starmap(self._same_store, zip(*stores, strict=True)))

    def _same_store(self, one: _Use, other: _Use) -> bool:
        assert one.stored is not None
        assert other.stored is not None
        old, new = self._sides[0].scopes(one.place), self._sides[1].scopes(other.place)
        try:
            pairs = [pair for kind, pair, _ in _walk(one.stored, other.stored) if kind == "name" and len(set(pair)) > 1]
            # The rest of the function is not compared, so a name has to be gone to be another's.
            _require(not any(a in new or b in old for a, b in pairs))
            self._pairs(one.stored, other.stored, one.place, (old, new))
        except _DiffersError:
            return False
        return True


class _Side:
    """The files before, or after: their functions, classes and attributes."""

    def __init__(self, files: Files) -> None:
        self.functions = functions(files)
        self._seen = _Seen()
        for _, text in files:
            if (tree := parsed(text)) is not None:
                self._seen.visit(tree)
        self._families = _families(self._seen.bases)

    def scopes(self, place: str) -> Mapping[str, bool]:
        found = self.functions.get(place)
        return _scopes(found) if found is not None else {}

    def parameters(self, called: str) -> dict[str, list[str]]:
        """Of each function or class that a call by this name may mean."""
        return {
            name: [one.arg for one in _arguments(_definition(function))]
            for name, function in self.functions.items()
            if name in (called, f"{called}.__init__") or name.endswith(f".{called}")
        }

    def uses(self, owner: str, attribute: str) -> list[_Use]:
        """Of an attribute of ``owner`` and of those that it shares it with, and what may be one: where it is set from
        elsewhere. Of no class (empty), all uses."""
        found = self._seen.uses.get(attribute, [])
        return [use for use in found if not owner or (self._kin(owner, use.owner) if use.of_self else use.stored)]

    def is_defined(self, owner: str, attribute: str) -> bool:
        """Whether it is a method or property, or is asked for by its name as a text."""
        classes = self._seen.members.get(attribute, ())
        return attribute in self._seen.asked or any(not owner or self._kin(owner, name) for name in classes)

    def _kin(self, one: str, other: str) -> bool:
        return self._families.get(one, one) == self._families.get(other, other)


def _families(bases: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Of each class a name that all have in common that inherit from one another."""
    family = {name: name for name in bases}
    for name, above in bases.items():
        for base in above:
            if base in family and family[base] != family[name]:
                old, new = family[name], family[base]
                family.update({one: new for one, its in family.items() if its == old})
    return family


class _Seen(ast.NodeVisitor):
    """What is seen in files: classes with their bases, in which of them a method is, attributes by name."""

    def __init__(self) -> None:
        self.bases: dict[str, list[str]] = {}
        self.members: dict[str, list[str]] = {}
        self.asked: set[str] = set()
        self.uses: dict[str, list[_Use]] = {}
        self._owner = self._place = ""
        self._statement: ast.stmt | None = None

    def visit(self, node: ast.AST) -> None:
        before = self._owner, self._place, self._statement
        if isinstance(node, ast.ClassDef):
            self.bases.setdefault(node.name, []).extend(filter(None, map(_last_name, node.bases)))
            self._owner = self._place = node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if self._place == self._owner:
                self._place = f"{self._owner}.{node.name}".removeprefix(".")
                self.members.setdefault(node.name, []).append(self._owner)
        elif isinstance(node, ast.stmt):
            self._statement = node
        elif isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            self._use(node.attr, of_self, not isinstance(node.ctx, ast.Load))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and self._owner == self._place != "":
            # A field or class attribute; without a value it is declared and not set.
            if not isinstance(self._statement, ast.AnnAssign) or self._statement.value is not None:
                self._use(node.id, True, True)
        elif isinstance(node, ast.Call) and _last_name(node.func) in ("getattr", "setattr", "hasattr"):
            self.asked |= {str(one.value) for one in node.args if isinstance(one, ast.Constant)}
        self.generic_visit(node)
        self._owner, self._place, self._statement = before

    def _use(self, attribute: str, of_self: bool, stored: bool) -> None:
        # What an assertion reads it for changes nothing that it holds.
        if not isinstance(self._statement, ast.Assert):
            use = _Use(self._owner, self._place, of_self, self._statement if stored else None)
            self.uses.setdefault(attribute, []).append(use)


def _require(fine: bool) -> None:
    if not fine:
        raise _DiffersError


def _walk(old: ast.AST, new: ast.AST) -> Iterator[tuple[str, Pair, str]]:
    """Names of two pieces of code of one form, side by side: their kind, both, and what they belong to: of an
    attribute its object, of a keyword what is called. Raises :class:`_DiffersError` where the forms differ."""
    _require(type(old) is type(new))
    if isinstance(old, ast.Name) and isinstance(new, ast.Name):
        yield "name", (old.id, new.id), ""
    elif isinstance(old, ast.arg) and isinstance(new, ast.arg):
        yield "name", (old.arg, new.arg), ""
    elif isinstance(old, ast.Attribute) and isinstance(new, ast.Attribute):
        yield from _walk(old.value, new.value)
        yield "attribute", (old.attr, new.attr), ast.unparse(old.value)
    elif isinstance(old, ast.Call) and isinstance(new, ast.Call):
        yield from _walk(old.func, new.func)
        yield from _both(old.args, new.args)
        _require(len(old.keywords) == len(new.keywords))
        for one, other in zip(old.keywords, new.keywords, strict=True):
            _require((one.arg is None) == (other.arg is None))
            yield from _walk(one.value, other.value)
            if one.arg is not None and other.arg is not None:
                yield "keyword", (one.arg, other.arg), _last_name(old.func)
    elif isinstance(old, ast.Constant) and isinstance(new, ast.Constant):
        _require(type(old.value) is type(new.value) and old.value == new.value)
    else:
        for name in old._fields:
            if name not in ("ctx", "type_comment"):
                yield from _both(getattr(old, name, None), getattr(new, name, None))


def _both(old: object, new: object) -> Iterator[tuple[str, Pair, str]]:
    _require(type(old) is type(new))
    if isinstance(old, ast.AST) and isinstance(new, ast.AST):
        yield from _walk(old, new)
    elif isinstance(old, list) and isinstance(new, list):
        _require(len(old) == len(new))
        for one, other in zip(old, new, strict=True):
            yield from _both(one, other)
    else:
        _require(old == new)
        if isinstance(old, str):  # a name that no Name stands for, as of what is caught: it stays
            yield "name", (old, old), ""


def _may_rename(a: str, b: str, scopes: tuple[Mapping[str, bool], Mapping[str, bool]]) -> bool:
    """Whether both are local names; of parameters, that they don't trade places."""
    old, new = scopes
    if a not in old or b not in new or old[a] != new[b]:
        return False
    return not old[a] or not (new.get(a, False) or old.get(b, False))


def _scopes(function: Function) -> dict[str, bool]:
    """The local names of a function, and of each whether it is a parameter. What is global anywhere in it, or a
    parameter of what is defined in it (which may be called by that name), is none."""
    name = _definition(function).name
    whole = next(one for one in symtable.symtable(function.text, "", "exec").get_children() if one.get_name() == name)
    local = {symbol.get_name(): symbol.is_parameter() for symbol in whole.get_symbols() if not symbol.is_global()}
    fixed = {symbol.get_name() for symbol in whole.get_symbols() if symbol.is_global()}
    ahead = list(whole.get_children())
    while ahead:
        scope = ahead.pop()
        ahead += scope.get_children()
        for symbol in scope.get_symbols():
            if symbol.is_global() or symbol.is_parameter() or scope.get_type() == "class":
                fixed.add(symbol.get_name())
            else:
                local.setdefault(symbol.get_name(), False)
    return {name: parameter for name, parameter in local.items() if name not in fixed}


def _definition(function: Function) -> ast.FunctionDef:
    (node,) = ast.parse(function.text).body
    assert isinstance(node, ast.FunctionDef)
    return node


def _arguments(node: ast.FunctionDef) -> list[ast.arg]:
    given = node.args
    return [*given.posonlyargs, *given.args, *filter(None, [given.vararg]), *given.kwonlyargs,
            *filter(None, [given.kwarg])]  # fmt: skip


def _drop_unread(node: ast.FunctionDef, other: ast.FunctionDef) -> list[str]:
    """Take out parameters that ``other`` has not and that the function does not read, from the end, with a default:
    whoever calls it need not know of them. Returns their names."""
    read = {one.id for part in node.body for one in ast.walk(part) if isinstance(one, ast.Name)}
    known = {one.arg for one in _arguments(other)}
    dropped = []
    given = node.args
    while given.defaults and not given.vararg and given.args and given.args[-1].arg not in read | known:
        if len(given.args) <= len(other.args.args):
            break  # it has another name there
        dropped.append(given.args.pop().arg)
        given.defaults.pop()
    for argument, default in list(zip(given.kwonlyargs, given.kw_defaults, strict=True)):
        more = len(given.kwonlyargs) > len(other.args.kwonlyargs)
        if more and default is not None and argument.arg not in read | known:
            at = given.kwonlyargs.index(argument)
            dropped.append(argument.arg)
            del given.kwonlyargs[at], given.kw_defaults[at]
    return dropped


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
