"""Where the sources are, and the commit that results are of."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
from pathlib import Path


def folder_of(room: str) -> Path:
    """The folder of ``spec``, ``invariants`` and so on, as it is imported."""
    spec = importlib.util.find_spec(f"kvproof.{room}")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


@functools.cache
def revision() -> str:
    """The hash of the commit that is checked out; empty where kvproof is no checkout."""
    root = folder_of("spec").parent
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
