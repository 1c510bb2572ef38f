"""Writes encoded rows, a block at a time, to TFRecord or LibSVM files."""

import functools

import tensorflow as tf

from data_tools.click_logs.feature_map import STEPS
from data_tools.common import record_files, workers
from data_tools.libsvm.line_format import LineFormat
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
            examples = records.encode(self._labels, self._ids, self._values)
            self._appender = record_files.RecordAppender(examples)
        self._session = workers.one_thread_session(graph)

    def append(self, path, labels, ids, values):
        """Appends rows to a file: float32 [B], int64 [B, F], float32 [B, F].

        Raises:
            OSError: it cannot be written.
        """
        feed = {self._labels: labels, self._ids: ids, self._values: values}
        self._appender.run(self._session, path, feed)


class LibsvmWriter:
    """Appends rows to LibSVM files.

    Args:
        feature_size: ids lie below it.
    """

    def __init__(self, feature_size):
        self._format = LineFormat(feature_size, STEPS)

    def append(self, path, labels, ids, values):
        """As TFRecordWriter.append."""
        with open(path, "ab") as f:
            f.write(self._format.text(ids, values, labels > 0))


@functools.lru_cache(maxsize=1)  # a process makes one, and keeps it
def writer(output_format: str, field_size: int, feature_size: int):
    """The writer of a format: tfrecord or libsvm."""
    return TFRecordWriter(field_size) if output_format == "tfrecord" else LibsvmWriter(feature_size)
