"""Loads the library of the codec: the C++ in csrc/, behind a C ABI; `build` compiles it.

It is kept in the folder that DEEPFM_KERNELS_DIR names, or else beside site-packages, in the user's
cache, or in a temporary folder. Its name has a hash of its sources, and it ends in a hash of its
content, so that one that was cut off is not loaded. In the archive for Spark, it is there already
(scripts/zip_for_spark.py).
"""

import contextlib
import ctypes
import functools
import glob
import hashlib
import itertools
import logging
import os
import platform
import sysconfig
import tempfile
from typing import Iterator, Optional, Sequence

SOURCES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "csrc")
OPTIONS = [
    "-std=c++14", "-O3", "-DNDEBUG", "-fPIC", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=off",  # same results on processors with and without fused multiply-add
]  # fmt: skip
if os.environ.get("DEEPFM_SANITIZE"):  # tests/sanitize.sh
    OPTIONS += ["-O1", "-g", "-fsanitize=address,undefined"]
MOST = 100000  # records of a process that plain Python decodes, and that it encodes
ADVICE = "install g++, or the package ziglang ('pip install ziglang')"
HASH = 32  # bytes at the end of the library


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


def version(path: str) -> Optional[int]:
    """What tells a file from one that takes its place; None if there is none."""
    with contextlib.suppress(OSError):
        return os.stat(path).st_mtime_ns


def _built():
    useless = {}
    for path in paths(""):  # which makes a folder for the last
        useless[path] = version(path)
        with contextlib.suppress(OSError):  # not there, or no good
            return _open(path)
    from deepfm.records import build  # which is rarely needed

    try:
        return _open(build.build(useless=useless))
    except OSError as error:
        raise Unavailable(f"the library cannot be loaded ({error})") from error


def _open(path):
    """Loads the library at a path; raises OSError if it is cut off, or for another machine."""
    with open(path, "rb") as f:
        content = f.read()
    if hashlib.sha256(content[:-HASH]).digest() != content[-HASH:]:
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
    name, reason = f"codec-{content[-HASH:].hex()[:16]}.so", None
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


def paths(machine):
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
