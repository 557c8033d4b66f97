"""The commit that results are of."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
from pathlib import Path


@functools.cache
def revision() -> str:
    """The hash of the commit that is checked out; empty where kvproof is no checkout."""
    spec = importlib.util.find_spec("kvproof.spec")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations))).parent
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
