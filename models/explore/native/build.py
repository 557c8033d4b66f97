"""From C++ to a library that is loaded: compiled once, and kept by what it was made of."""

from __future__ import annotations

import _ctypes
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvproof.spec.cache_folder import cache_folder

FLAGS = ("-std=c++20", "-O3", "-shared", "-fPIC", "-pthread", "-w")


class Unavailable(RuntimeError):
    """There is no way to translate or compile here. The message says what to install."""


def compiler() -> str:
    """The C++ compiler: ``CXX``, else what the system has. Raises :class:`Unavailable`."""
    for name in (os.environ.get("CXX") or "", "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found is not None:
            return found
    raise Unavailable("the generated explorer needs a C++ compiler: install g++ or clang++, or set CXX")


def compiled(text: str, *more: str) -> Path:
    """The library of a C++ text: from the cache, or compiled now, with ``more`` flags. Raises :class:`Unavailable`."""
    flags = (*FLAGS, *more)
    program = compiler()
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    name = hashlib.sha256("\0".join((text, program, version, *flags)).encode()).hexdigest()[:32]
    try:
        folder = cache_folder() / "explore"
    except RuntimeError as error:
        raise Unavailable(str(error)) from error
    target = folder / f"{name}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            source, made = Path(work) / "explore.cpp", Path(work) / "explore.so"
            source.write_text(text, encoding="utf-8")
            done = subprocess.run([program, *flags, "-o", made, source], capture_output=True, text=True, check=False)
            if done.returncode:
                raise Unavailable(f"{program} does not compile what was generated (a compiler of C++20 is needed): "
                                  f"{_first_error(done.stderr)}")  # fmt: skip
            made.replace(target)
    except OSError as error:
        raise Unavailable(f"can't keep the compiled explorer in {folder} ({error.strerror or error}): "
                          "set KVPROOF_CACHE to a folder") from error  # fmt: skip
    return target


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["no reason given"]
    return lines[0][-300:]


ASK = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int64))


def load(text: str) -> ctypes.CDLL:
    """The library of a C++ text, its functions typed. Give it back with :func:`unload`."""
    try:
        library = ctypes.CDLL(str(compiled(text)))
    except OSError as error:
        if "static TLS" not in str(error):  # others that were loaded have taken it all
            raise
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
