"""Builds and loads the library of the compiled operators in csrc/.

It is stored beside TensorFlow in site-packages, or in the folder that the environment variable
DEEPFM_KERNELS_DIR names. Its name has a hash of its sources, so that a library built from other
sources is never loaded.

https://github.com/tensorflow/docs/blob/r1.15/site/en/guide/create_op.md
"""

import concurrent.futures
import functools
import glob
import math
import os
import subprocess
import sys
import time
from typing import Optional

from deepfm.records import library as of_records
from deepfm.records.build import build_once, compiler
from deepfm.runtime.tf import tf

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "csrc")
_OPTIONS = [
    *of_records.OPTIONS,
    "-Wno-psabi",  # vectors of other processors are never handed over
]


def library() -> str:
    """The path of the library built from these sources, whether it exists or not."""
    options = [tf.version.VERSION, tf.version.GIT_VERSION, _OPTIONS]
    shared = glob.glob(f"{of_records.SOURCES}/*.h")  # which the operators include
    return next(of_records.paths_of("kernels", options, [*glob.glob(f"{_FOLDER}/*"), *shared]))


@functools.lru_cache(maxsize=None)
def raw_ops():
    """The operators as loaded from the library; csrc/ describes their inputs."""
    return tf.load_op_library(library())


def build(seconds: Optional[float] = None, useless: Optional[int] = None) -> str:
    """Compiles the library unless it is there, in 11 s on 2 free cores, and returns its path.

    While one process of a host compiles, others wait and then take what it has made. The
    compiler's messages go to standard error.

    Args:
        seconds: how long this may take; None: as long as it needs.
        useless: the version of a library that was found, but cannot be loaded.

    Raises:
        OSError: there is no compiler, or the folder cannot be written.
        subprocess.CalledProcessError: it does not compile.
        subprocess.TimeoutExpired: it takes longer than `seconds`.
    """
    path = library()
    build_once(path, _compile, seconds, useless)
    return path


def _compile(path, end):
    """Compiles the library as `path`, in a folder for it alone, until the time `end`."""
    folder = os.path.dirname(path)

    def run(*words):
        left = end - time.monotonic()
        timeout = None if left == math.inf else max(left, 0)
        words = [*compiler(), *_OPTIONS, *words]
        subprocess.run(words, check=True, stdout=sys.stderr, timeout=timeout)

    flags = [*tf.sysconfig.get_compile_flags(), "-I", of_records.SOURCES]
    sources = sorted(glob.glob(f"{_FOLDER}/*.cc"), key=os.path.getsize)
    # TensorFlow's headers take longer to compile than our code, so only two units include them.
    units = [os.path.join(folder, f"{half}.cc") for half in (0, 1)]
    for half, unit in enumerate(units):
        with open(unit, "w") as f:
            f.writelines(f'#include "{source}"\n' for source in sources[half::2])
    objects = [f"{unit}.o" for unit in units]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compile_one = lambda unit, made: run("-c", *flags, unit, "-o", made)
        list(pool.map(compile_one, units, objects))
    run("-shared", *objects, "-o", path, *tf.sysconfig.get_link_flags())
