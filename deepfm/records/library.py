"""Builds and loads the library of the codec: the C++ in csrc/, behind a C ABI.

    python -m deepfm.records.library            builds it, and prints where it is
    python -m deepfm.records.library aarch64    likewise, for other machines of this kind

CXX or g++ compiles it, or else the package ziglang, a compiler in a wheel. It is kept in the folder
that DEEPFM_KERNELS_DIR names, or else beside site-packages, in the user's cache, or in a temporary
folder. Its name has a hash of its sources, and it ends in a hash of its content, so that one that
was cut off is not loaded. In the archive for Spark, it is there already (scripts/zip_for_spark.py).
"""

import contextlib
import ctypes
import functools
import glob
import hashlib
import importlib.util
import itertools
import logging
import math
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from typing import Callable, Iterator, List, Optional, Sequence

from deepfm.records import atomic_files

SOURCES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "csrc")
OPTIONS = [
    "-std=c++14", "-O3", "-DNDEBUG", "-fPIC", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=off",  # same results on processors with and without fused multiply-add
]  # fmt: skip
if os.environ.get("DEEPFM_SANITIZE"):  # tests/sanitize.sh
    OPTIONS += ["-O1", "-g", "-fsanitize=address,undefined"]
MOST = 100000  # records of a process that plain Python decodes, and that it encodes
ADVICE = "install g++, or the package ziglang ('pip install ziglang')"
_HASH = 32  # bytes


class Unavailable(Exception):
    """There is no library, for the reason that it says."""


@functools.lru_cache(maxsize=None)
def load() -> Optional[ctypes.CDLL]:
    """The library, built if need be; None if there is none, which a warning says once."""
    try:
        loader = globals().get("__loader__")
        return _unpacked(loader) if hasattr(loader, "archive") else _built()
    except Unavailable as error:
        logging.getLogger(__name__).warning(
            "There is no compiled codec (%s): data tools read and write records by plain Python, "
            "slowly, and at most %s in a process.", error, f"{MOST:,}"
        )  # fmt: skip
        return None


def call(function: str, *arguments) -> int:
    """A function of the library; arrays and structures are handed over by their addresses."""
    words = []
    for each in arguments:
        if isinstance(each, bytes):
            words.append(ctypes.c_char_p(each))
        elif hasattr(each, "ctypes"):  # an array of numpy
            words.append(ctypes.c_void_p(each.ctypes.data))
        elif isinstance(each, int):
            words.append(ctypes.c_int64(each))
        else:
            words.append(ctypes.byref(each))
    called = getattr(load(), function)
    called.restype = ctypes.c_int64
    return called(*words)


def _built():
    for path in filter(os.path.exists, _paths("")):
        with contextlib.suppress(OSError):
            return _open(path)
    try:
        return _open(build(again=True))
    except OSError as error:
        raise Unavailable(f"the library cannot be loaded ({error})") from error


def _open(path):
    """Loads the library at a path; raises OSError if it is cut off, or for another machine."""
    with open(path, "rb") as f:
        content = f.read()
    if hashlib.sha256(content[:-_HASH]).digest() != content[-_HASH:]:
        raise OSError(f"{path} is damaged")
    return ctypes.CDLL(path)


def _unpacked(loader):
    """The library in the archive that this module is in, loaded from beside it or a cache."""
    machine = platform.machine()
    try:
        there = f"deepfm/records/codec-{machine}.so"  # as scripts/zip_for_spark.py gives it
        content = loader.get_data(os.path.join(loader.archive, there))
    except OSError as error:
        raise Unavailable(
            f"{loader.archive} has none for {machine}; make it by scripts/zip_for_spark.py where "
            "the package ziglang is installed"
        ) from error
    name, reason = f"codec-{content[-_HASH:].hex()[:16]}.so", None
    beside = os.path.dirname(os.path.abspath(loader.archive))
    for folder in itertools.chain([beside], _folders()):
        path = os.path.join(folder, name)
        try:
            with contextlib.suppress(OSError):  # not there, or cut off
                return _open(path)
            os.makedirs(folder, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as unfinished:
                unfinished.write(content)
            os.replace(unfinished.name, path)
            return _open(path)
        except OSError as error:
            reason = error
    raise Unavailable(f"that of {loader.archive} cannot be loaded ({reason})")


def _folders() -> Iterator[str]:
    """Where a library may be kept, the best first; the last is made, and rarely asked for."""
    if os.environ.get("DEEPFM_KERNELS_DIR"):
        yield os.environ["DEEPFM_KERNELS_DIR"]
        return
    yield os.path.join(sysconfig.get_paths()["purelib"], "deepfm_kernels")
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    yield os.path.join(caches, "deepfm_kernels")
    shared = os.path.join(tempfile.gettempdir(), f"deepfm_kernels-{os.getuid()}")
    os.makedirs(shared, mode=0o700, exist_ok=True)
    state = os.lstat(shared)
    if state.st_uid == os.getuid() and not state.st_mode & 0o022:  # no other user put it there
        yield shared


def build(machine: str = "", again: bool = False) -> str:
    """Compiles the library unless it is there, and returns its path.

    Args:
        machine: the kind of machine that it must run on, x86_64 or aarch64, with any Linux since
            2012, for which ziglang compiles; empty: this one.
        again: whether it is to be compiled in any case.

    Raises:
        Unavailable: it cannot be.
    """
    reason = "no folder can be written"
    for path in _paths(machine):
        if os.path.exists(path) and not again:
            return path
        try:
            build_once(path, functools.partial(_compile, machine))
            return path
        except OSError as error:
            reason = error
    raise Unavailable(str(reason))


def _paths(machine):
    """Where the library for a kind of machine may be, the best first."""
    name = f"codec-{machine or platform.machine()}"
    return paths_of(name, [OPTIONS, machine], glob.glob(f"{SOURCES}/*"))


def paths_of(name: str, options: list, sources: Sequence[str]) -> Iterator[str]:
    """Where a library that is built from these sources with these options may be, the best first.

    The name ends in a hash of both.
    """
    digest = hashlib.sha256(repr(options).encode())
    for path in sorted(sources):
        with open(path, "rb") as f:
            digest.update(f.read())
    return (os.path.join(x, f"{name}-{digest.hexdigest()[:16]}.so") for x in _folders())


def build_once(path: str, make: Callable[[str, float], None], seconds: Optional[float] = None):
    """Has a file made by one process of a host, while others wait and then take what it has made.

    Args:
        make: makes it under another path, until a time.monotonic().
        seconds: how long this may take; None: as long as it needs.

    Raises:
        OSError: the folder cannot be written.
        subprocess.TimeoutExpired: it takes longer than `seconds`.
    """
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    end = time.monotonic() + (math.inf if seconds is None else seconds)
    before = _changed(path)
    with open(os.path.join(folder, "lock"), "w") as lock:
        while not atomic_files.lock(lock.fileno(), if_unknown=True):
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("another process", seconds)
            time.sleep(0.1)
        if _changed(path) != before:
            return
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            made = os.path.join(unfinished, os.path.basename(path))
            make(made, end)
            atomic_files.replace(made, path)


def _changed(path):
    """When a file was last written; None if it does not exist."""
    return os.stat(path).st_mtime_ns if os.path.exists(path) else None


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
