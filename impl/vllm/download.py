"""Downloading one release's wheel with pip, and saying in one line why that did not work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvproof.impl.vllm.fetch_error import FetchError

Progress = Callable[[str], None]
_REPORT_EVERY_SECONDS = 5.0
# Only the Python files of the wheel are used, so a wheel for another C library or processor serves as well.
_LINUXES = ("_2_28", "_2_31", "_2_34", "_2_35", "_2_39", "2014", "1")
_ANY_LINUX = tuple(option for tag in _LINUXES for option in ("--platform", f"manylinux{tag}_x86_64"))
_NO_NETWORK = re.compile(
    r"Retrying \(Retry|NewConnectionError|Max retries|name resolution|Network is unreachable|Proxy|SSLError|Timeout"
)


def download_wheel(version: str, folder: Path, progress: Progress) -> Path:
    """The wheel of vLLM ``version``, downloaded into ``folder``.

    Raises :class:`FetchError` when the release or the index can't be had, and ``OSError`` when ``folder`` is full.
    """
    progress(f"downloading the wheel of vLLM {version} (about 340 MB; only its Python sources are kept)")
    code, text = _pip(version, folder, progress, ())
    if code and "No matching distribution" in text and not _NO_NETWORK.search(text):
        retry_code, retry_text = _pip(version, folder, progress, _ANY_LINUX)
        if not retry_code or "from versions: none" in text:
            code, text = retry_code, retry_text
    if code:
        raise _explain(version, text)
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise FetchError(
            f"pip reported success but left no wheel of vLLM {version}: try `pip download vllm=={version}`"
        )
    return wheels[0]


def _pip(version: str, folder: Path, progress: Progress, options: Sequence[str]) -> tuple[int, str]:
    """Run ``pip download`` and report how much has arrived. Returns its exit code and what it printed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", *options, "--dest", str(folder), f"vllm=={version}"]
    # pip's own scratch files belong into the folder that is watched, and removed whatever happens.
    environment = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=environment,
        cwd=folder,
    )
    try:
        while True:
            try:
                text, _ = process.communicate(timeout=_REPORT_EVERY_SECONDS)
                return process.returncode, text
            except subprocess.TimeoutExpired:
                progress(f"downloading vLLM {version}: {_megabytes(folder)} MB so far")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _megabytes(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(where, name)).st_size
            except OSError:
                continue  # pip moves its files while they are counted
    return total // 1_000_000


def _explain(version: str, text: str) -> Exception:
    """The error to raise for what pip printed."""
    if "No module named pip" in text:
        return FetchError(f"{sys.executable} has no pip, which fetches releases: run `{sys.executable} -m ensurepip`")
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return OSError(28, "No space left on device")
    if _NO_NETWORK.search(text):
        return FetchError(
            f"can't reach the package index to fetch vLLM {version}: connect once (a fetched release is kept), "
            "or point pip at a folder with the wheel (PIP_FIND_LINKS)"
        )
    if "No matching distribution" in text:
        found = re.search(r"from versions: ([^)]*)\)", text)
        versions = [v.strip() for v in found.group(1).split(",")] if found else []
        known = [v for v in versions if v and v != "none"]
        if not known:
            return FetchError(f"pip finds no vLLM {version}, nor any other: {_where_pip_looks()}")
        return FetchError(f"there is no vLLM release {version}: the newest that pip finds are {', '.join(known[-4:])}")
    if "DO NOT MATCH THE HASHES" in text:
        return FetchError(f"the wheel of vLLM {version} arrived damaged (its hash differs): try again")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return FetchError(f"pip can't fetch vLLM {version}: {(errors or lines or ['it said nothing'])[-1]}")


def _where_pip_looks() -> str:
    """What keeps pip from the index, where that is easily told."""
    if os.environ.get("PIP_NO_INDEX", "").lower() not in ("", "0", "no", "false", "off", "n", "f"):
        folder = os.environ.get("PIP_FIND_LINKS")
        only = f"only in PIP_FIND_LINKS, {folder}" if folder else "nowhere, since PIP_FIND_LINKS is not set either"
        return f"PIP_NO_INDEX is set, so pip looks {only}: unset it, or put the wheel there"
    return "check the network, and the index or folder that pip is configured to use (`pip config list` shows it)"
