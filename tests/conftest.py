"""For every test: an interrupt interrupts, also where the shell that started the tests ignores it (``make test &``).

And for those that run inside a release: a process of its own, since a process imports one vLLM. Where the release can't
be had they fail, rather than pass for tested; ``-m "not release"`` leaves them out.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)


def _tree(version: str) -> Path:
    """The release's sources: ``$KVPROOF_RELEASES/<version>`` where that is set, else fetched and cached."""
    folder = os.environ.get("KVPROOF_RELEASES")
    if folder:
        return Path(folder, version)
    from kvproof.impl.vllm.fetch import release_tree

    return release_tree(version)


@functools.cache
def _answer(version: str, program: Path, arguments: tuple[str, ...]) -> Any:
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [sys.executable, program, *arguments],
        env={**os.environ, **quiet, "PYTHONPATH": str(_tree(version))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def inside() -> Callable[..., Any]:
    """``inside(version, program, *arguments)``: the JSON on the last line that the program prints with that release on
    its path. Each question is asked once."""
    return lambda version, program, *arguments: _answer(version, Path(program), arguments)
