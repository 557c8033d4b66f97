"""For every test: an interrupt interrupts, also where the shell that started the tests ignores it (``make test &``).

And for those that run inside a release: a process of its own, since a process imports one vLLM. Where the release can't
be had they fail, rather than pass for tested; ``-m "not release"`` leaves them out.
"""

from __future__ import annotations

import functools
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import insiders

sys.path.pop(0)

signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.cache
def _answer(version: str, program: Path, arguments: tuple[str, ...], first: bool) -> Any:
    done = (insiders.alone if first else insiders.run)(version, program, *arguments)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def inside() -> Callable[..., Any]:
    """``inside(version, program, *arguments)``: the JSON on the last line that the program prints with that release on
    its path. Each question is asked once. ``first=True``: the program comes before the release is imported."""
    return lambda version, program, *arguments, first=False: _answer(version, Path(program), arguments, first)


@pytest.fixture(scope="session")
def built_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The review as it is made from the stored results: a folder, to be read only."""
    from kvproof.review import site, status

    out = tmp_path_factory.mktemp("site")
    site.build(out, status.load(status.stored_file()))
    return out
