"""The house's walls: who may import whom, and that the installed package is the whole of the folders."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

from kvproof.invariants.catalogue import CATALOGUE
from kvproof.severity import HARMS, harm, severity

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("spec", "invariants", "models", "impl", "kvproof")
ALLOWED = {
    "spec": {"spec"},
    "invariants": {"spec", "invariants"},
    "models": {"spec", "invariants", "models"},
    "impl": {"spec", "invariants", "impl"},
}
HEAVY = {"z3", "cvc5", "hypothesis", "torch", "vllm", "msgspec", "typer", "rich", "numpy"}


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported(path: Path, package: str) -> set[str]:
    """Every module that a file imports, wherever in it; relative imports resolved against ``package``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names.add(module)
            # ``from kvproof import spec`` imports a module, too.
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def package_of(path: Path) -> str:
    folder = path.parent.relative_to(ROOT)
    return ".".join(["kvproof", *(folder.parts if folder.parts[0] != "kvproof" else folder.parts[1:])])


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_imports_point_one_way(room: str) -> None:
    wrong = []
    for path in modules(room):
        for name in imported(path, package_of(path)):
            parts = name.split(".")
            if parts[0] != "kvproof" or name == "kvproof":
                continue
            if parts[1] not in ALLOWED[room]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_only_the_command_imports_the_review() -> None:
    by = {
        str(path.relative_to(ROOT))
        for path in modules("kvproof")
        for name in imported(path, package_of(path))
        if f"{name}.".startswith("kvproof.review.")
    }
    assert {name for name in by if not name.startswith("kvproof/review/")} == {"kvproof/cli_spec.py"}


@pytest.mark.parametrize("room", ["spec", "invariants"])
def test_the_inner_rooms_need_only_the_standard_library(room: str) -> None:
    outside = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(room)
        for name in imported(path, package_of(path))
        if name.split(".")[0] not in sys.stdlib_module_names | {"kvproof"}
    }
    assert not outside


def test_no_room_is_imported_by_its_bare_name() -> None:
    """``import spec`` would make a second copy of every module, and of the registries in them."""
    bare = {
        f"{path.relative_to(ROOT)} imports {name}"
        for room in (*ROOMS, "tests")
        for path in modules(room)
        for name in imported(path, package_of(path))
        if name.split(".")[0] in {"spec", "invariants", "models", "impl", "findings"}
    }
    assert not bare


def test_the_root_is_not_on_the_path() -> None:
    assert ROOT not in {Path(entry).resolve() for entry in sys.path}, "run pytest as a command, not with python -m"


@pytest.mark.parametrize("package", ["kvproof", "kvproof.spec", "kvproof.invariants"])
def test_importing_a_package_for_live_assertions_is_light(package: str) -> None:
    code = f"import {package}, pkgutil, importlib, sys\n"
    if package != "kvproof":
        code += f"for m in pkgutil.walk_packages({package}.__path__, '{package}.'): importlib.import_module(m.name)\n"
    code += "print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert not HEAVY & set(done.stdout.split())


def test_every_package_is_mapped() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {package: settings["package-dir"].get(package) for package in settings["package-dir"]}
    found = set()
    for package, folder in folders.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([package, *init.parent.relative_to(ROOT / folder).parts]))
    assert sorted(settings["packages"]) == sorted(found)


def test_every_folder_with_modules_is_a_package() -> None:
    missing = {
        str(path.parent.relative_to(ROOT))
        for room in ROOMS
        for path in modules(room)
        if not (path.parent / "__init__.py").exists()
    }
    assert not missing


def test_every_record_is_in_the_list_of_findings_as_it_is() -> None:
    folder = ROOT / "findings"
    rows = {}
    sections = {}
    section = ""
    for line in (folder / "README.md").read_text(encoding="utf-8").splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and "](" in cells[-1]:
            name = cells[-1].rpartition("(")[2].rstrip(")")
            rows[name] = cells
            sections[name] = section
    records = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")}
    assert rows.keys() == records.keys()
    for name, record in records.items():
        invariant, cause, releases, status, _ = rows[name]
        assert (invariant, cause, status.partition(" ")[0]) == (record["invariant"], record["cause"], record["status"])
        named = record["releases"] if isinstance(record["releases"], list) else [record["releases"]]
        assert releases.startswith(named[0]), name
        assert releases.endswith(named[-1]), name
    assert {name: harm(cells[0]).capitalize() for name, cells in rows.items()} == sections
    order = [
        (severity(invariant), [-n for n in Version(releases.split()[-1]).release])
        for invariant, _, releases, *_ in rows.values()
    ]
    assert order == sorted(order), "the worst first (kvproof/severity.py), and of that the newest release"


def test_every_invariant_has_a_harm() -> None:
    assert {invariant.id for invariant in CATALOGUE if not harm(invariant.id)} == set()
    assert harm("NOBODY.knows") == ""
    assert {severity(invariant.id) for invariant in CATALOGUE} == set(range(len(HARMS)))
