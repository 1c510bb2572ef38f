"""Decodes the LibSVM lines of a block with TensorFlow."""

import functools
from typing import Iterator, Optional

import numpy as np
import tensorflow as tf

from data_tools.common import workers
from data_tools.common.line_blocks import LineRange, numbering, read_blocks, sift
from deepfm.data import libsvm, records
from deepfm.data.plain import libsvm_text
from deepfm.data.plain.text_blocks import record_starts

_NEWLINE = ord("\n")


def decoded(lines: LineRange, field_size: Optional[int] = None, weighted: bool = False) -> Iterator:
    """Decodes and checks LibSVM lines of field_size pairs each, or of any length without it.

    Args:
        weighted: whether labels may have a weight.

    Yields:
        For each block, a BadRecord per bad line, and then a tuple for its n good lines: (text of
        the block; the bytes in it where each line begins and ends, int64 [n] each; the result of
        libsvm.decode_lines, with labels 0 or 1, and if weighted with weights float32 [n]; bytes of
        the file read).
    """
    decode, first, lines_before = _decoder(field_size, weighted), numbering(lines), 0
    explain = lambda line: libsvm_text.explain_line(
        line, records.Schema(field_size or len(line.split()) - 1, weighted=weighted)
    )
    for _, text, read in read_blocks(lines):
        starts = record_starts(text)
        newlines = np.flatnonzero(np.frombuffer(text, np.uint8) == _NEWLINE)
        line = np.searchsorted(newlines, starts)  # the index of each record's line
        found = decode(text)
        if found is None:
            number, accepts = first() + lines_before, lambda text: decode(text) is not None
            good = yield from sift(lines.path, text, number, accepts, explain)
            kept = np.isin(line, list(good))
            starts, line, found = starts[kept], line[kept], decode(b"\n".join(good.values()))
        yield text, starts, newlines[line] + 1, found, read
        lines_before += len(newlines)


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
