"""Programs inside a release, each in a process of its own: a copy of one that has imported the release already.

An import of vLLM takes longer than most of what tests ask of it, so there is one for all programs that a file of tests
starts. What a program does to the release, or to its own process, goes with it.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kvproof.impl.vllm.fetch import release_tree

SERVE = """
import json, os, runpy, sys

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from kvproof.impl.vllm.absent import stand_in

stand_in()
import vllm.v1.core.sched.scheduler
import kvproof.impl.vllm.subject, kvproof.models.stateful.replay

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        answers.close()
        for number, name in enumerate(job["files"]):
            os.dup2(os.open(name, os.O_WRONLY if number else os.O_RDONLY), number)
        sys.stdin = open(0, closefd=False)
        os.environ.clear()
        os.environ.update(job["environment"])
        sys.argv = job["command"]
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
"""
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
KEPT = 4
"""Releases that stay imported, the last ones asked: each takes half a gigabyte."""

_servers: dict[str, subprocess.Popen[str]] = {}


def run(
    release: str, program: Path | str, *arguments: str, given: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """``python program arguments`` (or ``python -c``, where ``program`` is one itself) with ``given`` on its standard
    input, in an environment in which ``import vllm`` is that of ``release``, and in which it has been imported."""
    server = _server(release)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place, name) for name in ("given", "out", "err")]
        for file, text in zip(files, (given, "", ""), strict=True):
            file.write_text(text, encoding="utf-8")
        if isinstance(program, str):
            source, program = program, Path(place, "program.py")
            program.write_text(source, encoding="utf-8")
        command = [str(program), *arguments]
        job = {"files": [*map(str, files)], "command": command, "environment": {**_environment(release), **environment}}
        print(json.dumps(job), file=server.stdin, flush=True)
        code = server.stdout.readline()
        assert code, f"vLLM {release} did not start (exit code {server.wait()})"
        out, err = (file.read_text(encoding="utf-8") for file in files[1:])
    return subprocess.CompletedProcess(command, int(code), out, err)


def alone(release: str, program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same for a program that has something to do before the release is imported."""
    command = [sys.executable, str(program), *arguments]
    return subprocess.run(command, env=_environment(release), capture_output=True, text=True, check=False)


def tree(release: str) -> Path:
    """The release's sources: ``$KVPROOF_RELEASES/<version>`` where that is set, else fetched and cached."""
    folder = os.environ.get("KVPROOF_RELEASES")
    return Path(folder, release) if folder else release_tree(release)


def _environment(release: str) -> dict[str, str]:
    return {**os.environ, **QUIET, "PYTHONPATH": str(tree(release))}


def _server(release: str) -> subprocess.Popen[str]:
    server = _servers.pop(release, None)
    while len(_servers) >= KEPT:
        _stop(next(iter(_servers)))
    if server is None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        server = subprocess.Popen([sys.executable, "-P", "-c", SERVE], env=_environment(release), **pipes)
    _servers[release] = server
    return server


def _stop(release: str) -> None:
    server = _servers.pop(release)
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


@atexit.register
def _stop_all() -> None:
    for release in list(_servers):
        _stop(release)
