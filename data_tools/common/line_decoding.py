"""Decodes the LibSVM lines of a block with TensorFlow."""

import functools
from typing import Iterator, Optional

import tensorflow as tf

from data_tools.common import line_blocks, workers
from data_tools.common.line_blocks import LineRange
from deepfm.data import libsvm, records


def decoded(lines: LineRange, field_size: Optional[int] = None, weighted: bool = False) -> Iterator:
    """Decodes and checks LibSVM lines of field_size pairs each, or of any length without it.

    Args:
        weighted: whether labels may have a weight.

    Yields:
        As line_blocks.decoded; what is decoded is the result of libsvm.decode_lines, with labels 0
        or 1, and if weighted with weights float32 [n].
    """
    return line_blocks.decoded(lines, _decoder(field_size, weighted), field_size, weighted)


@functools.lru_cache(maxsize=2)  # built once per process
def _decoder(field_size, weighted):
    """A function text -> (labels 0 or 1, rows, ids, values), as libsvm.decode_lines returns.

    If weighted, also weights. It returns None if a line is bad.
    """

    def decode(text):
        lines = libsvm.drop_blank(tf.compat.v1.string_split([text], "\n").values)
        lines = libsvm.weights_as_pairs(lines) if weighted else lines
        labels, rows, ids, values = libsvm.decode_lines(lines, known_ascii=True)
        weights = []
        if weighted:
            found, pairs = libsvm.take_weights(rows, values)
            rows, ids, values = (tf.gather(x, pairs) for x in (rows, ids, values))
            weights = [found]
        if field_size:
            lengths = tf.math.bincount(rows, minlength=tf.size(labels))
            with tf.control_dependencies([tf.debugging.assert_equal(lengths, field_size)]):
                rows = tf.identity(rows)
        schema = records.Schema(field_size)
        labels, ids, values, *weights = records.check(labels, ids, values, schema, *weights)
        return (labels, rows, ids, values, *weights)

    run = workers.native(decode, (tf.string, []))

    def decode_ascii(text):
        try:
            return run(text) if text.isascii() else None
        except tf.errors.InvalidArgumentError:
            return None

    return decode_ascii
