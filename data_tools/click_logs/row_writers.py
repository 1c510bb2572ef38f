"""Writes encoded rows, block by block, in each record format."""

import functools

import tensorflow as tf

from data_tools.click_logs.feature_map import STEPS
from data_tools.common import record_files
from data_tools.libsvm.line_format import line_writer
from deepfm.data import formats, records


def _write_tfrecords(field_size, feature_size):
    width = [None, field_size]
    encode = lambda labels, ids, values: (records.encode(labels, ids, values), ())
    inputs = (tf.float32, [None]), (tf.int64, width), (tf.float32, width)
    return record_files.appender(encode, *inputs)


def _write_libsvm(field_size, feature_size):
    to_lines = line_writer(feature_size, STEPS)

    def append(path, labels, ids, values):
        with open(path, "ab") as f:
            f.write(to_lines(ids, values, labels > 0))

    return append


WRITERS = {formats.TFRECORD.name: _write_tfrecords, formats.LIBSVM.name: _write_libsvm}


@functools.lru_cache(maxsize=1)  # built once per process
def writer(output_format: str, field_size: int, feature_size: int):
    """A function that appends rows to a file; it raises OSError if it cannot write.

    Args:
        output_format: a key of WRITERS.
        field_size: F.
        feature_size: ids are below this.

    Returns:
        A function (path, labels float32 [B], ids int64 [B, F], values float32 [B, F]) -> None.
    """
    return WRITERS[output_format](field_size, feature_size)
