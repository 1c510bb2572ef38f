"""Writes records to TFRecord files block by block, and joins files."""

import functools
import gzip
import os
import time
from typing import Callable, Iterator, List, Sequence, Tuple

import tensorflow as tf

from data_tools.common import workers
from deepfm.records.schema import FRAME

COPY = 1 << 20  # bytes copied at once
FLUSH_SECONDS = 60.0  # how long to wait for a written block to reach its file
GZIP_LEVEL = 4


def appender(encode: Callable, *inputs) -> Callable:
    """Makes a function that appends records to a file with native ops.

    Args:
        encode: tensors -> (serialized Examples, string [B]; facts about them).
        inputs: dtype and shape of each tensor, as for workers.native.

    Returns:
        A function (path, *arrays) -> facts. It raises tf.errors.InvalidArgumentError, and writes
        nothing, if an op refuses the arrays, and OSError if the file cannot be written.
    """

    def write(path, *tensors):
        examples, facts = encode(*tensors)
        size = tf.reduce_sum(tf.cast(tf.strings.length(examples) + FRAME, tf.int64))
        dataset = tf.data.Dataset.from_tensor_slices(examples)
        return facts, size, tf.data.experimental.TFRecordWriter(path).write(dataset)

    write_block = workers.native(write, (tf.string, []), *inputs)

    def append(path, *arrays):
        block = f"{path}.block"
        try:
            facts, size, _ = write_block(block, *arrays)
        except tf.errors.InvalidArgumentError:
            raise
        except tf.errors.OpError as error:  # cannot be pickled for another process
            raise OSError(error.message) from None
        await_size(block, size)
        with open(path, "ab") as whole:
            for _ in _move([block], whole):
                pass
        return facts

    return append


def await_size(path, size):
    """Waits until a file that TFRecordWriter wrote has all its bytes.

    TensorFlow 1.15's op reports that it is done before it flushes and closes its file. Until then,
    or for ever if the flush fails (a full disk), the last records are missing.
    """
    deadline = time.monotonic() + FLUSH_SECONDS
    while os.path.getsize(path) < size:
        if time.monotonic() > deadline:
            raise OSError(f"{path}: {os.path.getsize(path)} of {size} bytes written; disk full?")
        time.sleep(1e-4)


def join(files: Sequence[Tuple[List[str], str]], compress: bool, num_workers: int):
    """For each (paths of parts, path), joins the parts in order and deletes them."""
    title = "Compressing" if compress else "Joining"
    size = sum(os.path.getsize(part) for parts, _ in files for part in parts)
    work = functools.partial(_join, compress=compress)
    with workers.results(work, files, num_workers, title, size) as copied:
        for _ in copied:
            pass


def _join(job, compress) -> Iterator[Tuple[int, None]]:
    parts, path = job
    if compress:
        # One gzip member per file: TensorFlow reads the first and ignores the rest.
        with open(path, "wb") as raw, gzip.GzipFile("", "wb", GZIP_LEVEL, raw, mtime=0) as whole:
            yield from _move(parts, whole)
        return
    yield os.path.getsize(parts[0]), None
    os.rename(parts[0], path)
    with open(path, "ab") as whole:
        yield from _move(parts[1:], whole)


def _move(parts, whole):
    """Moves the content of files to an open one; yields (bytes, None) for each block copied."""
    for part in parts:
        with open(part, "rb") as f:
            for block in iter(lambda f=f: f.read(COPY), b""):
                whole.write(block)
                yield len(block), None
        os.remove(part)
