"""The code that results depend on: what is held to be of it, and that a change of it is seen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvproof.models.explore import saved
from kvproof.models.sources import closure, hash_of
from kvproof.revision import folder_of
from kvproof.zoo import code

FILES = {
    "__init__.py": "",
    "a.py": "def f():\n    from somewhere.inner import b\n    return b\n",
    "inner/__init__.py": "from . import c\n",
    "inner/b.py": "import json\nfrom ..d import D\n",
    "inner/c.py": "",
    "inner/unused.py": "",
    "d.py": "class D: ...\n",
    "e.py": "from somewhere import a\n",
}


@pytest.fixture
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        file = tmp_path / "somewhere" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "somewhere"
    sys.modules.pop("somewhere", None)


def test_a_closure_is_what_is_imported_wherever_it_is(somewhere: Path) -> None:
    inside = {"a.py", "__init__.py", "inner/__init__.py", "inner/b.py", "inner/c.py", "d.py"}
    assert set(closure("somewhere.a").values()) == {somewhere / name for name in inside}
    with pytest.raises(ValueError, match=r"somewhere\.z is no module"):
        closure("somewhere.a", "somewhere.z")


@pytest.mark.parametrize("name", FILES)
def test_a_hash_changes_with_what_it_covers_and_with_nothing_else(somewhere: Path, name: str) -> None:
    before, covered = hash_of("somewhere.a"), somewhere / name in closure("somewhere.a").values()
    (somewhere / name).write_text(FILES[name] + "x = 1\n")
    assert (hash_of("somewhere.a") != before) == covered


def test_what_a_search_runs_is_covered_and_what_it_never_loads_is_not() -> None:
    covered = closure(*code.RUN)
    for name in (
        "impl.vllm.device",
        "impl.vllm.offload",
        "impl.reference.scheduler",
        "invariants.catalogue",
        "invariants.slot",
        "models.mutants.workload",
        "models.stateful.search",
        "models.stateful.shrink",
        "spec.rules.hits",
    ):
        assert f"kvproof.{name}" in covered
    others = ("kvproof.models.smt", "kvproof.models.explore", "kvproof.models.promela", "kvproof.impl.vllm.live")
    assert not {name for name in covered if name.startswith(others)}


def test_the_whole_catalogue_is_covered_twice() -> None:
    """Every module of invariants is, by both: a family that was left out would change its mind unseen."""
    all_of_them = set(folder_of("invariants").rglob("*.py"))
    assert all_of_them <= set(closure(*code.RUN).values()) & set(closure(*saved.DECIDING).values())
