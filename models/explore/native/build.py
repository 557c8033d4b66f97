"""From C++ to a library that is loaded: compiled once, and kept by what it was made of."""

from __future__ import annotations

import _ctypes
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvproof.spec.cache_folder import cache_folder

FLAGS = ("-std=c++20", "-O3", "-shared", "-fPIC", "-pthread", "-w")


_DIGEST = hashlib.sha256().digest_size


class Unavailable(RuntimeError):
    """There is no way to translate or compile here. The message says what to install."""


def compiler() -> list[str]:
    """The C++ compiler, with arguments of its own: ``CXX``, else what the system has. Raises :class:`Unavailable`."""
    wanted = os.environ.get("CXX", "").strip()
    try:
        words = shlex.split(wanted)
    except ValueError as error:
        raise Unavailable(f"CXX is {wanted!r}, which is no command ({error}): set it to a C++ compiler") from error
    for name in [words[0]] if words else ["c++", "g++", "clang++"]:
        found = shutil.which(name)
        if found is not None:
            return [found, *words[1:]]
    if words:
        raise Unavailable(f"CXX is {wanted!r}, and there is no {words[0]}: set it to a C++ compiler, or unset it")
    raise Unavailable("the generated explorer needs a C++ compiler: install g++ or clang++, or set CXX")


def compiled(text: str, *more: str) -> Path:
    """The library of a C++ text: from the cache, or compiled now, with ``more`` flags. Raises :class:`Unavailable`."""
    flags = (*FLAGS, *more)
    program = compiler()
    try:
        version = subprocess.run([*program, "--version"], capture_output=True, check=False).stdout.decode(
            errors="replace"
        )
    except OSError as error:
        raise Unavailable(
            f"{program[0]} can't be run ({error.strerror or error}): set CXX to a C++ compiler"
        ) from error
    made_of = (text, *program, version, platform.machine(), *flags)
    name = hashlib.sha256("\0".join(made_of).encode(errors="replace")).hexdigest()[:32]
    try:
        folder = cache_folder() / "explore"
    except RuntimeError as error:
        raise Unavailable(str(error)) from error
    target = folder / f"{name}.so"
    if _is_whole(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            source, made = Path(work) / "explore.cpp", Path(work) / "explore.so"
            source.write_text(text, encoding="utf-8")
            done = subprocess.run([*program, *flags, "-o", made, source], capture_output=True, check=False)
            if done.returncode or not made.exists():
                reason = _first_error(done.stderr.decode(errors="replace"))
                raise Unavailable(f"{' '.join(program)} does not compile what was generated (a compiler of C++20 is "
                                  f"needed): {reason}")  # fmt: skip
            with made.open("ab") as library:
                library.write(hashlib.sha256(made.read_bytes()).digest())
            made.replace(target)
    except OSError as error:
        raise Unavailable(f"can't keep the compiled explorer in {folder} ({error.strerror or error}): "
                          "set KVPROOF_CACHE to a folder") from error  # fmt: skip
    return target


def _is_whole(library: Path) -> bool:
    """Whether it is there as it was compiled, by the digest after its end: half a library would end the process."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["no reason given"]
    return lines[0][-300:]


ASK = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int64))


def load(text: str) -> ctypes.CDLL:
    """The library of a C++ text, its functions typed. Give it back with :func:`unload`. Raises :class:`Unavailable`."""
    file = compiled(text)
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        if "static TLS" not in str(error):
            raise Unavailable(f"the compiled explorer can't be loaded ({error}): set KVPROOF_CACHE to a folder that "
                              "programs may be run from") from error  # fmt: skip
        # Others that were loaded have taken it all.
        library = ctypes.CDLL(str(compiled(text, "-DWITHOUT_STATIC_TLS")))
    u64, u32, handle = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p
    to_u64, to_u32 = ctypes.POINTER(u64), ctypes.POINTER(u32)
    types: dict[str, tuple[object, list[object]]] = {
        "open": (handle, [u64, ASK]),
        "close": (None, [handle]),
        "level": (None, [handle]),
        "waiting": (u64, [handle]),
        "count": (u64, [handle, u64]),
        "transitions": (u64, [handle]),
        "failure": (ctypes.c_char_p, [handle, to_u64, to_u32]),
        "state": (ctypes.c_void_p, [handle, u64, u64, to_u32, to_u64, to_u32]),
        "dump": (u64, [handle, u64, ctypes.c_void_p]),
        "faults": (u64, [handle, u64]),
        "fault": (u64, [handle, u64, u64, to_u32]),
    }
    for name, (returns, arguments) in types.items():
        function = getattr(library, f"search_{name}")
        function.restype, function.argtypes = returns, arguments
    return library


def unload(library: ctypes.CDLL) -> None:
    """Nobody calls it any more."""
    _ctypes.dlclose(library._handle)
