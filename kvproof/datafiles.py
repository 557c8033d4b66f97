"""Data files: JSON that comes with kvproof as a package of its own, or a folder of somebody's in its place."""

from __future__ import annotations

import importlib.resources
from importlib.resources.abc import Traversable
from pathlib import Path

from kvproof.errors import UsageError


def data_files(folder: Path | None, package: str, what: str) -> list[Traversable]:
    """The JSON files of ``folder``, or else of ``package``, by name. ``what`` they are is for the error.

    Raises :class:`UsageError` where there is no such folder, or it can't be read.
    """
    if folder is not None and not folder.is_dir():
        found = "a file is there" if folder.exists() else "nothing is there"
        raise UsageError(f"no folder of {what} at {folder}: {found}")
    place = folder if folder is not None else importlib.resources.files(package)
    try:
        return sorted((f for f in place.iterdir() if f.name.endswith(".json")), key=lambda f: f.name)
    except OSError as error:
        raise UsageError(f"the {what} in {place} can't be read: {error.strerror or error}") from error
