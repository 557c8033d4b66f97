"""Which functions say the same under other names: only those, since what is called a renaming is not read again."""

from __future__ import annotations

import pytest

from kvproof.review import sources
from kvproof.review.renames import Renamed, Renames


def renamed(old: str, new: str, name: str = "f") -> Renamed | None:
    """The function ``name`` of two files as a renaming."""
    sides = [[("a.py", text)] for text in (old, new)]
    (change,) = sources.changes(*map(sources.functions, sides), [name])
    return Renames(*sides).only(change)


def of_class(flag: str, value: str = "flag", read: str = "", more: str = "") -> str:
    """A class that sets an attribute and reads it in ``f``."""
    return (
        f"class A:\n    def __init__(self, flag, other):\n        self.{flag} = {value}\n{more}"
        f"    def f(self, x):\n        return x if self.{read or flag} else 0\n"
    )


def two_locals(flag: str, value: str) -> str:
    """A class that sets an attribute to one of two local names."""
    start = f"class A:\n    def __init__(self):\n        a, b = g()\n        self.{flag} = {value}\n"
    return f"{start}    def f(self):\n        return self.{flag}\n"


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("def f(a):\n    b = a + 1\n    return b", "def f(a):\n    c = a + 1\n    return c", [("b", "c")]),
        ("def f(a):\n    return a", "def f(count):\n    return count", [("a", "count")]),
        ("def f(a):\n    return [b for b in a]", "def f(a):\n    return [x for x in a]", [("b", "x")]),
        (
            "def f(a):\n    b, c = a\n    return b - c",
            "def f(a):\n    c, b = a\n    return c - b",
            [("b", "c"), ("c", "b")],
        ),
        (
            "def f(a):\n    b = a\n    def g():\n        return b\n    return g",
            "def f(a):\n    c = a\n    def g():\n        return c\n    return g",
            [("b", "c")],
        ),
    ],
)
def test_local_names_may_differ_one_to_one(old: str, new: str, names: list[tuple[str, str]]) -> None:
    found = renamed(old, new)
    assert found is not None
    assert sorted(found.names) == sorted(names)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # A pair that is swapped in what is done, and parameters that trade places: a call may name them.
        ("def f(a, b):\n    return a - b", "def f(a, b):\n    return b - a"),
        ("def f(a, b):\n    return a - b", "def f(b, a):\n    return b - a"),
        ("def f(a):\n    b, c = a\n    return b - c", "def f(a):\n    b, c = a\n    return c - b"),
        # Two names become one, or one becomes two.
        ("def f(a):\n    b, c = a\n    return b + c", "def f(a):\n    b, b = a\n    return b + b"),
        ("def f(a):\n    b = a\n    return b + b", "def f(a):\n    b = a\n    c = b\n    return b + c"),
        # What is global is somebody else's, also where a local name takes its place.
        ("def f(a):\n    return min(a)", "def f(a):\n    return max(a)"),
        ("def f(a):\n    return g(a)", "def f(a):\n    g = a\n    return g(a)"),
        ("def f(a):\n    b = a\n    return g(b)", "def f(a):\n    g = a\n    return g(g)"),
        ("def f(g):\n    return g(h)", "def f(h):\n    return h(h)"),
        # A local name that an inner scope does not mean, and one that is caught and not read.
        ("def f(a):\n    b = a\n    return lambda b: b", "def f(a):\n    c = a\n    return lambda b: c"),
        (
            "def f():\n    try:\n        e = 1\n    except E as e:\n        g(e)",
            "def f():\n    try:\n        x = 1\n    except E as e:\n        g(x)",
        ),
        # A name of an inner scope that is global elsewhere, that calls may name, or that is an attribute.
        ("def f(a):\n    return [b for b in a], lambda: b", "def f(a):\n    return [c for c in a], lambda: c"),
        (
            "def f():\n    def g(b=0):\n        return b\n    return g(b=1)",
            "def f():\n    def g(c=0):\n        return c\n    return g(b=1)",
        ),
        (
            "def f():\n    class C:\n        b = 1\n    return C.b",
            "def f():\n    class C:\n        c = 1\n    return C.b",
        ),
        # A number, an operator, an order, an attribute or a keyword of something else.
        ("def f(a):\n    return a + 1", "def f(a):\n    return a + 1.0"),
        ("def f(a):\n    return a < 1", "def f(a):\n    return a <= 1"),
        ("def f(a):\n    return a.b", "def f(a):\n    return a.c"),
        ("def f(a):\n    return g(b=a)", "def f(a):\n    return g(c=a)"),
        # More parameters, of which one is read, has no default, or comes first.
        ("def f(a):\n    return a", "def f(a, b=0):\n    return a + b"),
        ("def f(a):\n    return a", "def f(a, b):\n    return a"),
        ("def f(a=1):\n    return a", "def f(b=2, a=1):\n    return a"),
        ("def f(a):\n    return a + b", "def f(a, b=0):\n    return a + b"),
        ("def f(a, *rest):\n    return rest", "def f(a, b=0, *rest):\n    return rest"),
        ("def f(a=1):\n    return a", "def f(a=2):\n    return a"),
    ],
)
def test_everything_else_is_a_change(old: str, new: str) -> None:
    assert renamed(old, new) is None
    assert renamed(new, old) is None


def test_what_is_new_or_gone_is_no_renaming() -> None:
    changed = sources.changes(*map(sources.functions, ([("a.py", "def f(): pass")], [("a.py", "def g(): pass")])), "fg")
    assert [change.how for change in changed] == ["gone", "new"]
    assert Renames([], []).apart(changed) == (changed, [])


def test_a_parameter_that_is_not_read_is_told() -> None:
    found = renamed("def f(a):\n    return a", "def f(a, b=0, *, c=1):\n    return a")
    assert found is not None
    assert found.told == "takes b, c, which it does not read"
    found = renamed("def f(a, b=0):\n    return a", "def f(c):\n    return c")
    assert found is not None
    assert found.told == "a → c; no longer takes b, which it does not read"
    found = renamed("def f(a, b=0):\n    return a", "def f(a, c=0):\n    return a")
    assert found is not None
    assert found.told == "b → c"


def test_a_keyword_follows_its_parameter() -> None:
    called = "def g({0}):\n    return {0}\n"
    call = "def f(a):\n    return g({}=a)\n"
    old, new = (called.format(name) + call.format(name) for name in ("b", "c"))
    assert renamed(old, new) is not None
    # The function takes another: the call means something else.
    assert renamed(old, "def g(c, b=0):\n    return b\n" + call.format("c")) is None
    places = ("def g(b, d):\n    return b - d\n", "b"), ("def g(d, c):\n    return d - c\n", "c")
    old, new = (f"{function}def f(a):\n    return g({name}=a, d=1)\n" for function, name in places)
    assert renamed(old, new) is None, "it is another one of the two"
    two = "def g(b, c):\n    return b - c\n"
    assert renamed(two + "def f(a):\n    return g(b=a, c=1)\n", two + "def f(a):\n    return g(c=a, b=1)\n") is None


def test_an_attribute_is_renamed_where_it_is_set_by_the_same() -> None:
    found = renamed(of_class("old"), of_class("new"), "A.f")
    assert found is not None
    assert found.told == "self.old → self.new"
    # Also where its value has another name now, which is a parameter's.
    other = of_class("new").replace("flag", "wanted")
    assert renamed(of_class("old"), other, "A.f") is not None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # It is set to something else, or by nobody that is seen.
        (of_class("old"), of_class("new", "not flag")),
        (of_class("old"), of_class("new", "other")),
        (of_class("old", read="unset"), of_class("old", read="unknown")),
        (two_locals("old", "a"), two_locals("new", "b")),
        # Another attribute, that there was before, is read in its place; or the old one is still there.
        (
            of_class("old", more="        self.new = other\n"),
            of_class("old", more="        self.new = other\n", read="new"),
        ),
        (of_class("old"), of_class("new", more="        self.old = other\n")),
        # It is set once more, from elsewhere, or is used where it was not.
        (of_class("old"), of_class("new", more="        self.new = other\n")),
        (of_class("old"), of_class("new") + "def g(a):\n    a.new = 1\n"),
        (of_class("old"), of_class("new") + "    def h(self):\n        self.new.clear()\n"),
        # It is a method, or is asked for by its name.
        (of_class("old"), of_class("new") + "    def new(self):\n        pass\n"),
        (of_class("old"), of_class("new") + "def g(a):\n    return getattr(a, 'new')\n"),
    ],
)
def test_another_attribute_in_its_place_is_a_change(old: str, new: str) -> None:
    assert renamed(old, new, "A.f") is None
    assert renamed(new, old, "A.f") is None


def test_attributes_are_those_of_a_class_and_of_its_kin() -> None:
    base = "class Base:\n    def __init__(self, flag):\n        self.{0} = flag\n"
    derived = "class A(Base):\n    def f(self):\n        return self.{0}\n"
    foreign = "class Other:\n    def new(self):\n        return self.new\n"
    found = renamed(*(foreign + base.format(name) + derived.format(name) for name in ("old", "new")), "A.f")
    assert found is not None, "another class may have that name"
    kin = "class B(Base):\n    def g(self):\n        return self.new\n"
    assert renamed(*(kin + base.format(name) + derived.format(name) for name in ("old", "new")), "A.f") is None


def test_an_attribute_of_another_object_has_to_be_the_only_one_of_its_name() -> None:
    owner = "class M:\n    def __init__(self, flag):\n        self.{0} = flag\n"
    text = f"{owner}class A:\n    def f(self):\n        return self.m.{{0}}\n"
    assert renamed(text.format("old"), text.format("new"), "A.f") is not None
    other = "class C:\n    def g(self):\n        return self.new\n"
    assert renamed(other + text.format("old"), other + text.format("new"), "A.f") is None
