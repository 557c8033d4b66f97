"""Where what was fetched or compiled is kept, from one run to the next."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """``KVPROOF_CACHE``, else the platform's cache folder for a program named kvproof.

    Raises ``RuntimeError``, with the way out, where that is in a home folder and there is none.
    """
    chosen = os.environ.get("KVPROOF_CACHE")
    if chosen:
        return _expanded(chosen)
    if sys.platform == "darwin":
        return _expanded("~/Library/Caches") / "kvproof"
    if sys.platform == "win32":
        return _expanded(os.environ.get("LOCALAPPDATA", "~/AppData/Local")) / "kvproof"
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "kvproof"


def _expanded(folder: str) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise RuntimeError(f"there is no cache folder {folder} ({error}): set KVPROOF_CACHE to a folder") from error
