"""Fetching releases: what is kept, what is checked, and what is said when it can't be done.

Small made-up wheels stand for a release; where it matters they go through the real pip, from a folder. One test fetches
a real release.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvproof.impl.vllm import download, fetch, wheel
from kvproof.impl.vllm.fetch import FetchError, release_tree

FILES = {
    "vllm/__init__.py": b"x = 1\n",
    "vllm/v1/core.py": b"y = 2\n",
    "vllm/_C.so": b"\x7fELF" + bytes(5000),
    "vllm-9.0.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: vllm\nVersion: 9.0.0\n",
    "vllm-9.0.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}
RECORD = "vllm-9.0.0.dist-info/RECORD"


def record(files: dict[str, bytes]) -> bytes:
    lines = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
        for name, data in files.items()
    ]
    return "".join([*lines, f"{RECORD},,\n"]).encode()


def make_wheel(
    folder: Path, files: dict[str, bytes] = FILES, recorded: dict[str, bytes] | None = None, tag: str = "py3-none-any"
) -> Path:
    path = folder / f"vllm-9.0.0-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(RECORD, record(files if recorded is None else recorded))
    return path


class Download:
    """Stands for pip: puts a wheel into the folder and counts how often it was asked."""

    def __init__(self, *makers: Callable[[Path], Path]) -> None:
        self.makers = list(makers)
        self.calls = 0

    def __call__(self, version: str, folder: Path, progress: Callable[[str], None]) -> Path:
        maker = self.makers[min(self.calls, len(self.makers) - 1)]
        self.calls += 1
        return maker(folder)


@pytest.fixture
def downloaded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Download]:
    def use(*makers: Callable[[Path], Path]) -> Download:
        double = Download(*(makers or (make_wheel,)))
        monkeypatch.setattr(fetch, "download_wheel", double)
        return double

    return use


def left(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} if cache.exists() else set()


def test_only_sources_and_metadata_are_kept(tmp_path: Path, downloaded: Callable[..., Download]) -> None:
    double = downloaded()
    lines: list[str] = []
    tree = release_tree("9.0.0", tmp_path, lines.append)
    kept = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    assert kept == {*FILES, RECORD} - {"vllm/_C.so"}
    assert (tree / "vllm/__init__.py").read_bytes() == FILES["vllm/__init__.py"]
    assert left(tmp_path) == {"vllm-9.0.0"}
    assert not list(tmp_path.rglob("*.whl"))
    assert lines
    assert release_tree("9.0.0", tmp_path) == tree
    assert double.calls == 1


def test_importing_from_the_tree_does_not_damage_it(tmp_path: Path, downloaded: Callable[..., Download]) -> None:
    double = downloaded()
    tree = release_tree("9.0.0", tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tree)!r}); sys.dont_write_bytecode = False; import vllm.v1.core"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
    assert list(tree.rglob("*.pyc"))
    release_tree("9.0.0", tmp_path)
    assert double.calls == 1


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda home: (home / "tree/vllm/__init__.py").write_bytes(b"x = 7\n"), "vllm/__init__.py has changed"),
        (lambda home: (home / "tree/vllm/v1/core.py").unlink(), "vllm/v1/core.py is missing"),
        (lambda home: (home / "tree/vllm/extra.py").write_text(""), "vllm/extra.py is not part of the release"),
        (lambda home: (home / "tree/torch").symlink_to(home.parent), "torch is not part of the release"),
        (lambda home: (home / "manifest.json").write_text("[" * 100_000), "its manifest can't be read"),
        (lambda home: (home / "manifest.json").unlink(), "its manifest can't be read"),
        (lambda home: (home / "manifest.json").write_text("[]"), "its manifest can't be read"),
        (lambda home: (home / "manifest.json").write_bytes(b"\xff"), "its manifest can't be read"),
        (lambda home: _edit_manifest(home), "its manifest is damaged"),
    ],
)
def test_a_damaged_tree_is_fetched_again(
    tmp_path: Path, downloaded: Callable[..., Download], damage: Callable[[Path], object], says: str
) -> None:
    double = downloaded()
    tree = release_tree("9.0.0", tmp_path)
    damage(tree.parent)
    lines: list[str] = []
    assert release_tree("9.0.0", tmp_path, lines.append) == tree
    assert double.calls == 2
    assert any(says in line for line in lines)
    assert (tree / "vllm/__init__.py").read_bytes() == FILES["vllm/__init__.py"]
    assert left(tmp_path) == {"vllm-9.0.0"}


def _edit_manifest(home: Path) -> None:
    manifest = json.loads((home / wheel.MANIFEST).read_text())
    manifest["files"]["vllm/__init__.py"][1] = "0" * 64
    (home / wheel.MANIFEST).write_text(json.dumps(manifest))


def cut(folder: Path) -> Path:
    path = make_wheel(folder)
    path.write_bytes(path.read_bytes()[:-300])
    return path


def no_record(folder: Path) -> Path:
    path = folder / "vllm-9.0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", b"")
    return path


def unknown_method(folder: Path) -> Path:
    path = make_wheel(folder)
    path.write_bytes(path.read_bytes().replace(b"\x08\x00", b"\x63\x00"))  # deflated; nobody's
    return path


BAD = {
    "cut": cut,
    "unknown_method": unknown_method,
    "no_record": no_record,
    "empty": lambda folder: make_wheel(folder, {}),
    "other_content": lambda folder: make_wheel(folder, {**FILES, "vllm/v1/core.py": b"y = 3\n"}, FILES),
    "not_recorded": lambda folder: make_wheel(folder, {**FILES, "vllm/more.py": b""}, FILES),
    "missing": lambda folder: make_wheel(folder, {"vllm/__init__.py": b"x = 1\n"}, FILES),
    "outside": lambda folder: make_wheel(folder, {**FILES, "../evil.py": b""}),
}


@pytest.mark.parametrize("kind", sorted(BAD))
def test_a_damaged_wheel_is_said_after_a_second_try(
    tmp_path: Path, downloaded: Callable[..., Download], kind: str
) -> None:
    double = downloaded(BAD[kind])
    with pytest.raises(FetchError, match="damaged") as caught:
        release_tree("9.0.0", tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert double.calls == 2
    assert left(tmp_path / "cache") == set()
    assert left(tmp_path) == {"cache"}


def test_a_broken_download_starts_again(tmp_path: Path, downloaded: Callable[..., Download]) -> None:
    double = downloaded(cut, make_wheel)
    assert (release_tree("9.0.0", tmp_path) / "vllm/__init__.py").exists()
    assert double.calls == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_nothing_half_done_is_left(
    tmp_path: Path, downloaded: Callable[..., Download], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    downloaded()

    def stop(path: Path, release: Path) -> None:
        release.mkdir()
        (release / "half").write_text("")
        raise error

    monkeypatch.setattr(fetch, "unpack_sources", stop)
    expected = FetchError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        release_tree("9.0.0", tmp_path)
    assert expected is KeyboardInterrupt or "no room in the cache folder" in str(caught.value)
    assert left(tmp_path) == set()
    monkeypatch.undo()


def test_what_a_killed_run_left_is_removed(tmp_path: Path, downloaded: Callable[..., Download]) -> None:
    downloaded()
    (tmp_path / "vllm-9.0.0.part-dead").mkdir()
    (tmp_path / "vllm-9.0.0.part-dead" / "big.whl").write_text("")
    release_tree("9.0.0", tmp_path)
    assert left(tmp_path) == {"vllm-9.0.0"}


def test_a_cache_that_can_not_be_written_is_said(tmp_path: Path, downloaded: Callable[..., Download]) -> None:
    downloaded()
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(FetchError, match=r"can't write to the cache folder .*file is no folder.*KVPROOF_CACHE"):
            release_tree("9.0.0", place)


def test_a_filled_cache_may_be_read_only(
    tmp_path: Path, downloaded: Callable[..., Download], monkeypatch: pytest.MonkeyPatch
) -> None:
    downloaded()
    tree = release_tree("9.0.0", tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    assert release_tree("9.0.0", tmp_path) == tree
    with pytest.raises(FetchError, match="Read-only file system"):
        release_tree("9.0.1", tmp_path)


def test_two_runs_at_once_fetch_once(tmp_path: Path, downloaded: Callable[..., Download]) -> None:
    started = threading.Event()
    go = threading.Event()

    def slowly(folder: Path) -> Path:
        started.set()
        go.wait()
        return make_wheel(folder)

    double = downloaded(slowly)
    trees: list[Path] = []
    waiting: list[str] = []

    def say(line: str) -> None:
        waiting.append(line)
        go.set()

    first = threading.Thread(target=lambda: trees.append(release_tree("9.0.0", tmp_path)))
    first.start()
    started.wait()
    trees.append(release_tree("9.0.0", tmp_path, say))
    first.join()
    assert double.calls == 1
    assert len(set(trees)) == 1
    assert any("another run" in line for line in waiting)


@pytest.mark.parametrize("version", ["", "latest", "0.33.0; rm", "../0.33.0", "0.33.0/x", "-r"])
def test_a_version_that_is_none_is_refused(tmp_path: Path, version: str) -> None:
    with pytest.raises(FetchError, match="not a vLLM release number"):
        release_tree(version, tmp_path)


def test_the_cache_folder_is_the_users_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPROOF_CACHE", str(tmp_path))
    assert fetch.cache_folder() == tmp_path
    monkeypatch.delenv("KVPROOF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert fetch.cache_folder() == tmp_path / "xdg" / "kvproof"
    monkeypatch.setenv("KVPROOF_CACHE", "~nobody.at.all/cache")
    with pytest.raises(FetchError, match=r"there is no cache folder ~nobody\.at\.all/cache"):
        release_tree("9.0.0")


@pytest.fixture
def local_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The real pip, pointed at a folder instead of an index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_pip_fetches_from_a_folder_of_wheels(local_index: Path, tmp_path: Path) -> None:
    make_wheel(local_index)
    tree = release_tree("9.0.0", tmp_path / "cache")
    assert (tree / "vllm/v1/core.py").read_bytes() == FILES["vllm/v1/core.py"]
    assert list(local_index.iterdir()), "the user's own wheel stays"


def test_a_wheel_for_a_newer_system_serves(local_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shown with a tag that no present system accepts by itself, but that is on the list of tags to ask for."""
    make_wheel(local_index, tag="py3-none-manylinux_2_99_x86_64")
    with pytest.raises(
        FetchError, match=r"pip finds no vLLM 9\.0\.0.*PIP_NO_INDEX is set.* PIP_FIND_LINKS, .*wheels: unset"
    ):
        release_tree("9.0.0", tmp_path / "cache")
    monkeypatch.setattr(download, "_ANY_LINUX", ("--platform", "manylinux_2_99_x86_64"))
    assert (release_tree("9.0.0", tmp_path / "cache") / "vllm/__init__.py").exists()


def test_an_unknown_release_names_the_newest(local_index: Path, tmp_path: Path) -> None:
    make_wheel(local_index)
    with pytest.raises(FetchError, match=r"there is no vLLM release 9\.1\.0: the newest that pip finds are 9\.0\.0"):
        release_tree("9.1.0", tmp_path / "cache")
    assert left(tmp_path / "cache") == set()


def test_where_pip_looks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = "ERROR: No matching distribution found for vllm==9.0.0 (from versions: none)"
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "true")
    assert "PIP_NO_INDEX is set, so pip looks nowhere" in str(download._explain("9.0.0", nothing))
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    assert "`pip config list` shows it" in str(download._explain("9.0.0", nothing))


def test_no_network_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(FetchError, match=r"can't reach the package index .*PIP_FIND_LINKS") as caught:
        release_tree("9.0.0", tmp_path)
    assert "\n" not in str(caught.value)
    assert left(tmp_path) == set()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", "arrived damaged"),
        ("WARNING: a\nERROR: the moon is full\n", "pip can't fetch vLLM 9.0.0: the moon is full"),
        ("", "it said nothing"),
    ],
)
def test_other_failures_of_pip_are_one_line(text: str, says: str) -> None:
    message = str(download._explain("9.0.0", text))
    assert says in message
    assert "\n" not in message


def test_a_full_disk_while_pip_downloads_is_the_folders_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        download,
        "_pip",
        lambda *_: (1, "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"),
    )
    with pytest.raises(FetchError, match="no room in the cache folder"):
        release_tree("9.0.0", tmp_path)


def test_ctrl_c_while_pip_runs_leaves_nothing(tmp_path: Path) -> None:
    """A real interrupt of a real process, while pip waits for an index that never answers."""
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        environment = {
            **os.environ,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/simple",
        }
        code = (
            "from pathlib import Path; from kvproof.impl.vllm.fetch import release_tree; "
            f"release_tree('9.0.0', Path({str(tmp_path)!r}), lambda line: print(line, flush=True))"
        )
        with subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert "downloading" in process.stdout.readline()
            while not any(path.name.startswith("vllm-9.0.0.part-") for path in tmp_path.iterdir()):
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert process.wait() != 0
    assert left(tmp_path) == set()


@pytest.mark.release
@pytest.mark.slow
def test_a_real_release_is_fetched_and_kept(tmp_path: Path) -> None:
    lines: list[str] = []
    tree = release_tree("0.33.0", tmp_path, lines.append)
    assert (tree / "vllm/v1/core/sched/scheduler.py").is_file()
    assert not list(tmp_path.rglob("*.so"))
    assert not list(tmp_path.rglob("*.whl"))
    assert left(tmp_path) == {"vllm-0.33.0"}
    again: list[str] = []
    assert release_tree("0.33.0", tmp_path, again.append) == tree
    assert again == []
