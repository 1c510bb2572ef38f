"""Converts LibSVM or LibFFM text to TFRecord, block by block, in one process of the converter.

A graph of native ops splits a block of plain LibSVM into lines, parses them as training does,
encodes them and writes the records, in two thirds of the time that numpy takes. TensorFlow decodes
neither fields nor strings: `line_writer` writes lines that name them. Python looks at single rows
only if a block is refused: to find the bad lines and write the others.
"""

import functools
from typing import List, Tuple

import tensorflow as tf

from data_tools.common import record_files, workers
from data_tools.common.line_blocks import LineRange
from data_tools.libsvm import line_writer, pieces
from data_tools.libsvm.pieces import BlockFacts, Piece
from deepfm.data import libsvm, records

_TEXT = tf.string, []


@functools.lru_cache(maxsize=1)  # built once per process
def _appender(schema):
    """Makes a function (path, text) that appends the records of ASCII text; it returns facts.

    It raises tf.errors.InvalidArgumentError if a line is bad.
    """

    def encode(text):
        lines, labels, ids, values, *weights = _parse(text, schema)
        negative = tf.strings.regex_full_match(lines, r"(?s)[\s\v]*-.*")
        facts = (
            tf.size(labels),
            tf.reduce_sum(labels),
            tf.reduce_max(ids),  # the smallest int64 if there is no record
            tf.reduce_any(negative),
            tf.reduce_any(tf.equal(labels, 0) & ~negative),
            tf.reduce_min(values, 0),
            tf.reduce_max(values, 0),
        )
        return records.encode(labels, ids, values, None, *weights), facts

    return record_files.appender(encode, _TEXT)


@functools.lru_cache(maxsize=1)
def _parser(schema):
    return workers.native(lambda text: [x.op for x in _parse(text, schema)], _TEXT)


def _parse(text, schema):
    """(lines with a record, labels, ids, values, and weights if weighted)."""
    lines = libsvm.drop_blank(tf.compat.v1.string_split([text], "\n").values)
    return (lines, *libsvm.parse_lines(lines, schema, known_ascii=True))


def convert(task: Tuple[LineRange, List[Piece]], schema):
    """Writes the lines of a range to its pieces; yields what pieces.write does."""
    if schema.named_fields or schema.field_ids or schema.hash_buckets:
        return line_writer.write(task, schema)

    def append(path, text):
        try:
            facts = _appender(schema)(path, text) if text.isascii() else None
        except tf.errors.InvalidArgumentError:
            return None
        return facts and BlockFacts(*(fact if fact.ndim else fact.item() for fact in facts))

    def accepts(text):
        try:
            return text.isascii() and _parser(schema)(text) is not None
        except tf.errors.InvalidArgumentError:
            return False

    return pieces.write(task, append, accepts, schema)
