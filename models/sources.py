"""The code that a result depends on: some modules, all that they import, and a hash of those sources.

Imports are read and not run, wherever they stand in a file: those in functions count, too. What is imported by a name
that is put together at run time is not seen, and neither are data files nor other people's packages.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path


def closure(*roots: str) -> dict[str, Path]:
    """The files of ``roots``, of the packages they are in, of whatever these import of the same top-level package, and
    so on, by module. Raises ``ValueError`` for a root that is no module."""
    ours = {root.partition(".")[0] for root in roots}
    found: dict[str, Path] = {}
    left = list(roots)
    while left:
        name = left.pop()
        if name in found or name.partition(".")[0] not in ours:
            continue
        file = _file(name)
        if file is not None:
            found[name] = file
            left += [name.rpartition(".")[0], *_imported(file, name)]
        elif name in roots:
            raise ValueError(f"{name} is no module")
    return found


def hash_of(*roots: str) -> str:
    """A hash of the names and sources of the :func:`closure`, in hexadecimal digits."""
    digest = hashlib.sha256()
    for name, file in sorted(closure(*roots).items()):
        source = file.read_bytes()
        digest.update(f"{name} {len(source)}\0".encode() + source)
    return digest.hexdigest()


def _file(name: str) -> Path | None:
    """The source of a module. ``None``: no module is called so; what is imported may be a name in one.

    The folder of ``kvproof.spec`` is not ``kvproof/spec``, so Python finds that; below it nothing must be imported.
    """
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(".".join([top, *rest[:1]])) if top else None
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if len(rest) < 2:
        places = [Path(spec.origin)] if spec.origin else []
    else:
        below = [folder.joinpath(*rest[1:]) for folder in folders]
        places = [place for path in below for place in (path / "__init__.py", path.with_name(f"{path.name}.py"))]
    return next((place for place in places if place.is_file()), None)


def _imported(file: Path, name: str) -> Iterator[str]:
    package = name.split(".")[: None if file.name == "__init__.py" else -1]
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # ``from kvproof import spec`` imports a module, too.
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))
