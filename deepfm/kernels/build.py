"""Builds the library of the compiled operators from csrc/.

It is stored beside TensorFlow in site-packages, under a name with a hash of its sources, so that a
library built from other sources is never loaded.

https://github.com/tensorflow/docs/blob/r1.15/site/en/guide/create_op.md
"""

import concurrent.futures
import glob
import hashlib
import os
import shlex
import subprocess
import tempfile

import tensorflow as tf

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "csrc")
_OPTIONS = [
    "-std=c++14", "-O3", "-DNDEBUG", "-fPIC", "-fno-math-errno", "-fno-trapping-math",
    "-Wno-psabi",  # vectors of other processors are never handed over
    "-ffp-contract=off",  # same results on processors with and without fused multiply-add
]  # fmt: skip


def library() -> str:
    """The path of the library built from these sources, whether it exists or not."""
    digest = hashlib.sha256(repr([tf.version.VERSION, tf.version.GIT_VERSION, _OPTIONS]).encode())
    for path in sorted(glob.glob(f"{_FOLDER}/*.cc") + glob.glob(f"{_FOLDER}/*.h")):
        with open(path, "rb") as f:
            digest.update(f.read())
    beside = os.path.dirname(tf.sysconfig.get_lib())
    return os.path.join(beside, "deepfm_kernels", f"kernels-{digest.hexdigest()[:16]}.so")


def build() -> str:
    """Compiles the library, which takes half a minute, and returns its path.

    Raises:
        OSError: there is no compiler, or the folder cannot be written.
        subprocess.CalledProcessError: it does not compile; the compiler has printed why.
    """
    path = library()
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    run = lambda *words: subprocess.run([*compiler, *_OPTIONS, *words], check=True)
    flags = tf.sysconfig.get_compile_flags()
    sources = sorted(glob.glob(f"{_FOLDER}/*.cc"))
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        objects = [os.path.join(unfinished, os.path.basename(x) + ".o") for x in sources]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            compile_one = lambda source, made: run("-c", *flags, source, "-o", made)
            list(pool.map(compile_one, sources, objects))
        made = os.path.join(unfinished, "kernels.so")
        run("-shared", *objects, "-o", made, *tf.sysconfig.get_link_flags())
        os.rename(made, path)
    return path
