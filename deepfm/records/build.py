"""Compiles the library of the codec.

    python -m deepfm.records.build            builds it, and prints where it is
    python -m deepfm.records.build aarch64    likewise, for other machines of this kind

CXX or g++ compiles it, or else the package ziglang, a compiler in a wheel.
"""

import functools
import hashlib
import importlib.util
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from typing import Callable, Dict, List, Optional

from deepfm.records import atomic_files, library
from deepfm.records.library import ADVICE, OPTIONS, SOURCES, Unavailable


def build(machine: str = "", useless: Optional[Dict[str, Optional[int]]] = None) -> str:
    """Compiles the library unless it is there, and returns its path.

    Args:
        machine: the kind of machine that it must run on, x86_64 or aarch64, with any Linux since
            2012, for which ziglang compiles; empty: this one.
        useless: {path: version} of those that were found, but cannot be loaded.

    Raises:
        Unavailable: it cannot be.
    """
    reason = "no folder can be written"
    make = functools.partial(_compile, machine)
    for path in library.paths(machine):
        try:
            build_once(path, make, useless=(useless or {}).get(path))
            return path
        except OSError as error:
            reason = error
    raise Unavailable(str(reason))


def build_once(
    path: str,
    make: Callable[[str, float], None],
    seconds: Optional[float] = None,
    useless: Optional[int] = None,
):
    """Has a file made by one process of a host, while others wait and then take what it has made.

    One that is there already is taken too, unless its version is the useless one.

    Args:
        make: makes it under another path, until a time.monotonic().
        seconds: how long this may take; None: as long as it needs.

    Raises:
        OSError: the folder cannot be written.
        subprocess.TimeoutExpired: it takes longer than `seconds`.
    """
    if library.version(path) not in (None, useless):
        return
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    end = time.monotonic() + (math.inf if seconds is None else seconds)
    with open(os.path.join(folder, "lock"), "w") as lock:
        while not atomic_files.lock(lock.fileno(), if_unknown=True):
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("another process", seconds)
            time.sleep(0.1)
        if library.version(path) not in (None, useless):
            return
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            made = os.path.join(unfinished, os.path.basename(path))
            make(made, end)
            atomic_files.replace(made, path)


def compiler() -> List[str]:
    """The command of the compiler for this machine alone."""
    return shlex.split(os.environ.get("CXX", "g++"))


def _compile(machine, path, end):
    """Compiles the library for a machine, and puts a hash of its content behind it."""
    reason = ADVICE
    for command in _compilers(machine):
        words = [*command, *OPTIONS, "-shared", os.path.join(SOURCES, "codec.cc"), "-o", path]
        try:
            subprocess.run(words, check=True, stdout=sys.stderr, env=_environment(path))
            break
        except (OSError, subprocess.CalledProcessError) as error:
            reason = f"{error}; {ADVICE}"
    else:
        raise Unavailable(reason)
    with open(path, "rb+") as f:
        digest = hashlib.sha256(f.read()).digest()
        f.write(digest)


def _compilers(machine):
    """The commands that may compile for a machine, or for this one if that is empty."""
    if not machine:
        yield compiler()
    if importlib.util.find_spec("ziglang"):
        target = f"{machine or platform.machine()}-linux-gnu.2.17"
        yield [sys.executable, "-m", "ziglang", "c++", "-target", target]


def _environment(path):
    """The environment for a compiler: ziglang needs a folder to keep what it compiles."""
    home = os.path.expanduser("~")
    spare = {} if os.access(home, os.W_OK) else {"ZIG_GLOBAL_CACHE_DIR": os.path.dirname(path)}
    return {**os.environ, "ZIG_LOCAL_CACHE_DIR": os.path.dirname(path), **spare}


if __name__ == "__main__":
    try:
        print(build(*sys.argv[1:2]))
    except Unavailable as error:
        sys.exit(f"The codec cannot be compiled: {error}.")
