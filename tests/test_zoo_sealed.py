"""A blind search knows nothing of the zoo: no import leads there, and a process that reads it is ended."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

from kvproof.zoo import blind

ROOT = Path(__file__).resolve().parent.parent


def test_nothing_that_searches_imports_the_zoo() -> None:
    """Only the commands of the zoo do, when they run."""
    allowed = {"kvproof/cli_zoo.py"}
    importing = set()
    for room in ("spec", "invariants", "models", "impl", "kvproof"):
        for path in (ROOT / room).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith("kvproof/zoo/"):
                continue
            text = path.read_text(encoding="utf-8")
            modules = {
                f"{getattr(node, 'module', '') or ''}.{alias.name}"
                for node in ast.walk(ast.parse(text))
                if isinstance(node, (ast.Import, ast.ImportFrom))
                for alias in node.names
            }
            words = [*modules, *(word for word in ("bench/results", "kvproof.faults") if word in text)]
            if any(word.startswith(("kvproof.zoo", "kvproof.faults", "bench/results")) for word in words):
                importing.add(name)
    assert importing <= allowed


def sealed(tmp_path: Path, *arguments: str, first: str = "") -> subprocess.CompletedProcess[str]:
    folders = ":".join(map(str, blind.sealed_folders()))
    command = [sys.executable, "-P", "-c", first + blind.SEALED, folders, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)


def test_a_search_that_reads_the_zoo_ends(tmp_path: Path) -> None:
    for reading in (
        "import kvproof.zoo.fault",
        "import importlib.resources as r; list(r.files('kvproof.faults').iterdir())",
        f"open({str(ROOT / 'zoo' / 'z01.json')!r})",
        f"open({str(ROOT / 'kvproof' / '..' / 'zoo' / 'z01.json')!r}, 'rb')",
        f"import os; os.listdir({str(ROOT / 'bench' / 'results')!r})",
        f"import os, pathlib; os.fork() or pathlib.Path({str(ROOT / 'zoo' / 'z01.json')!r}).read_text(); os.wait()",
    ):
        program = blind.SEALED.replace("from kvproof.__main__", f"{reading}\nfrom kvproof.__main__")
        folders = ":".join(map(str, blind.sealed_folders()))
        command = [sys.executable, "-P", "-c", program, folders, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert "a blind search reads" in done.stderr, reading


def test_a_sealed_search_is_the_same_search(tmp_path: Path) -> None:
    """Without the zoo it finds as much, from the same seed: nothing is read, and nothing missing."""
    arguments = ["fuzz", "spec", "--seed", "3", "--steps", "300", "--workers", "1", "--out", "found"]
    plain = subprocess.run([sys.executable, "-P", "-m", "kvproof", *arguments, "--json", "plain.json"], cwd=tmp_path)
    done = sealed(tmp_path, *arguments, "--json", "sealed.json")
    assert done.returncode == plain.returncode, done.stderr
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "sealed"))
    for changing in ("seconds", "ended"):
        first.pop(changing), second.pop(changing)
    assert first == second
    assert first["steps"] >= 300
