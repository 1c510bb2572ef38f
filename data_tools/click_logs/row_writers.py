"""Writes encoded rows, a block at a time, to TFRecord or LibSVM files."""

import functools
import os
import shutil

import numpy as np
import tensorflow as tf

from data_tools import make_synthetic
from data_tools.click_logs.feature_map import STEPS
from data_tools.libsvm import block_writer
from deepfm.data import records

SUFFIXES = {"tfrecord": ".tfrecords", "libsvm": ".libsvm"}


class TFRecordWriter:
    """Appends rows to TFRecord files, by native ops.

    Args:
        field_size: F.
    """

    def __init__(self, field_size):
        graph = tf.Graph()
        with graph.as_default():
            width = [None, field_size]
            self._labels = tf.compat.v1.placeholder(tf.float32, [None])
            self._ids = tf.compat.v1.placeholder(tf.int64, width)
            self._values = tf.compat.v1.placeholder(tf.float32, width)
            self._path = tf.compat.v1.placeholder(tf.string, [])
            examples = records.encode(self._labels, self._ids, self._values)
            self._size = tf.reduce_sum(tf.strings.length(examples) + records.FRAME)
            examples = tf.data.Dataset.from_tensor_slices(examples)
            self._write = tf.data.experimental.TFRecordWriter(self._path).write(examples)
        # One thread: what a machine has of cores is used by more processes.
        config = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=1, inter_op_parallelism_threads=1
        )
        self._session = tf.compat.v1.Session(graph=graph, config=config)

    def append(self, path, labels, ids, values):
        """Appends rows to a file: float32 [B], int64 [B, F], float32 [B, F].

        Raises:
            OSError: it cannot be written.
        """
        block = f"{path}.block"
        feed = {self._path: block, self._labels: labels, self._ids: ids, self._values: values}
        try:
            size, _ = self._session.run([self._size, self._write], feed)
        except tf.errors.OpError as error:  # which cannot be sent to another process
            raise OSError(error.message) from None
        block_writer.await_size(block, size)
        with open(path, "ab") as whole, open(block, "rb") as part:
            shutil.copyfileobj(part, whole, block_writer.COPY)
        os.remove(block)


class LibsvmWriter:
    """Appends rows to LibSVM files.

    Args:
        feature_size: ids lie below it.
    """

    def __init__(self, feature_size):
        self._id_text = np.arange(feature_size).astype(f"S{len(str(feature_size))}")
        self._value_text = np.array([f"{i / STEPS:g}" for i in range(STEPS + 1)], "S6")

    def append(self, path, labels, ids, values):
        """As TFRecordWriter.append."""
        texts = self._id_text, self._value_text
        with open(path, "ab") as f:
            f.write(make_synthetic.format_rows(ids, values, labels > 0, *texts))


@functools.lru_cache(maxsize=1)  # a process makes one, and keeps it
def writer(output_format: str, field_size: int, feature_size: int):
    """The writer of a format: tfrecord or libsvm."""
    return TFRecordWriter(field_size) if output_format == "tfrecord" else LibsvmWriter(feature_size)
