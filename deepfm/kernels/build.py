"""Builds and loads the library of the compiled operators in csrc/.

It is stored beside TensorFlow in site-packages, or in the folder that the environment variable
DEEPFM_KERNELS_DIR names. Its name has a hash of its sources, so that a library built from other
sources is never loaded.

https://github.com/tensorflow/docs/blob/r1.15/site/en/guide/create_op.md
"""

import concurrent.futures
import fcntl
import functools
import glob
import hashlib
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from typing import Optional

import tensorflow as tf

from deepfm.runtime import atomic_files

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "csrc")
_OPTIONS = [
    "-std=c++14", "-O3", "-DNDEBUG", "-fPIC", "-fno-math-errno", "-fno-trapping-math",
    "-Wno-psabi",  # vectors of other processors are never handed over
    "-ffp-contract=off",  # same results on processors with and without fused multiply-add
]  # fmt: skip
if os.environ.get("DEEPFM_SANITIZE"):  # tests/sanitize.sh
    _OPTIONS += ["-O1", "-g", "-fsanitize=address,undefined"]


def library() -> str:
    """The path of the library built from these sources, whether it exists or not."""
    digest = hashlib.sha256(repr([tf.version.VERSION, tf.version.GIT_VERSION, _OPTIONS]).encode())
    for path in sorted(glob.glob(f"{_FOLDER}/*.cc") + glob.glob(f"{_FOLDER}/*.h")):
        with open(path, "rb") as f:
            digest.update(f.read())
    beside = os.path.join(os.path.dirname(tf.sysconfig.get_lib()), "deepfm_kernels")
    folder = os.environ.get("DEEPFM_KERNELS_DIR") or beside
    return os.path.join(folder, f"kernels-{digest.hexdigest()[:16]}.so")


@functools.lru_cache(maxsize=None)
def raw_ops():
    """The operators as loaded from the library; csrc/ describes their inputs."""
    return tf.load_op_library(library())


def build(seconds: Optional[float] = None) -> str:
    """Compiles the library, which takes 11 s on 2 free cores, and returns its path.

    While one process of a host compiles, others wait and then take what it has made. The
    compiler's messages go to standard error.

    Args:
        seconds: how long this may take; None: as long as it needs.

    Raises:
        OSError: there is no compiler, or the folder cannot be written.
        subprocess.CalledProcessError: it does not compile.
        subprocess.TimeoutExpired: it takes longer than `seconds`.
    """
    path = library()
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    end = time.monotonic() + (math.inf if seconds is None else seconds)
    before = _changed(path)
    with open(os.path.join(folder, "lock"), "w") as lock:
        while not _locked(lock):
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("another process", seconds)
            time.sleep(0.1)
        if _changed(path) == before:
            _compile(path, end)
    return path


def _changed(path):
    """When a file was last written; None if it does not exist."""
    return os.stat(path).st_mtime_ns if os.path.exists(path) else None


def _locked(file):
    """Locks a file until it is closed, or its process ends; returns whether that worked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _compile(path, end):
    """Compiles the library at `path`, until the time `end`."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))

    def run(*words):
        left = end - time.monotonic()
        timeout = None if left == math.inf else max(left, 0)
        subprocess.run(
            [*compiler, *_OPTIONS, *words], check=True, stdout=sys.stderr, timeout=timeout
        )

    flags = tf.sysconfig.get_compile_flags()
    sources = sorted(glob.glob(f"{_FOLDER}/*.cc"), key=os.path.getsize)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as unfinished:
        # TensorFlow's headers take longer to compile than our code, so only two units include them.
        units = [os.path.join(unfinished, f"{half}.cc") for half in (0, 1)]
        for half, unit in enumerate(units):
            with open(unit, "w") as f:
                f.writelines(f'#include "{source}"\n' for source in sources[half::2])
        objects = [f"{unit}.o" for unit in units]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            compile_one = lambda unit, made: run("-c", *flags, unit, "-o", made)
            list(pool.map(compile_one, units, objects))
        made = os.path.join(unfinished, "kernels.so")
        run("-shared", *objects, "-o", made, *tf.sysconfig.get_link_flags())
        atomic_files.replace(made, path)
