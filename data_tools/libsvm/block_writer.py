"""Converts LibSVM or LibFFM text to TFRecord, block by block, in one process of the converter.

A graph of native ops splits a block into lines, parses them, encodes them and writes the records.
Python looks at single rows only if a block is refused: to find the bad lines and write the others.
"""

import functools
from typing import List, Tuple

import tensorflow as tf
import tensorflow.contrib.libsvm  # noqa: F401  loaded before forking, so that processes share it

from data_tools.common import record_files, workers
from data_tools.common.line_blocks import LineRange
from data_tools.libsvm import field_lines, pieces
from data_tools.libsvm.pieces import BlockFacts, Piece
from deepfm.data import libsvm, records
from deepfm.data.plain import libsvm_text

# What `_taken` returns for a block.
_INPUTS = (tf.string, []), (tf.int32, [None]), (tf.string, [None])


@functools.lru_cache(maxsize=1)  # built once per process
def _appender(schema):
    """Makes a function that appends the records of a `_taken` block and returns BlockFacts."""

    def encode(text, fields, strings):
        lines, labels, ids, values, *more = _parse(text, fields, strings, schema)
        weights = more.pop() if schema.weighted else None
        counts = more[0] if more else None
        negative = tf.strings.regex_full_match(lines, r"(?s)[\s\v]*-.*")
        facts = BlockFacts(
            tf.size(labels),
            tf.reduce_sum(labels),
            # The smallest int64 if there is no record; a record may have no id.
            tf.reduce_max(ids if counts is None else tf.pad(ids, [[0, 0], [0, 1]])),
            tf.reduce_any(negative),
            tf.reduce_any(tf.equal(labels, 0) & ~negative),
        )
        return records.encode(labels, ids, values, counts, weights), facts

    return record_files.appender(encode, *_INPUTS)


@functools.lru_cache(maxsize=1)
def _parser(schema):
    parse = lambda *inputs: [x.op for x in _parse(*inputs, schema)]
    return workers.native(parse, *_INPUTS)


def check(text, schema):
    """Refuses (tf.errors.InvalidArgumentError) a text with a bad line."""
    _parser(schema)(*_taken(text, schema))


def _parse(text, named, strings, schema):
    """(lines with a record, labels, ids, values, counts if multi-valued, weights if weighted)."""
    lines = libsvm.drop_blank(tf.compat.v1.string_split([text], "\n").values)
    if _is_plain(schema):
        return (lines, *libsvm.parse_lines(lines, schema, known_ascii=True))
    labels, rows, ids, values = libsvm.decode_lines(lines, schema.id_offset, known_ascii=True)
    weighing = int(schema.weighted)  # pairs of a line that are its weight: the first one
    of_pairs = [tf.shape(ids)]
    if schema.hash_buckets:
        of_pairs.append(tf.shape(strings))
        ids = records.hashed(strings, schema.hash_buckets)
    if schema.named_fields:
        of_pairs.append(tf.shape(named))
        fields = named
    elif schema.field_ids:
        fields = fields_of(ids - schema.id_offset, schema.field_ids)
    else:
        lengths = tf.math.bincount(rows, minlength=tf.size(labels))
        starts = tf.cumsum(lengths, exclusive=True)
        fields = tf.range(tf.size(rows)) - tf.gather(starts, rows) - weighing
        if not schema.pad:
            of_pairs.append(tf.size(labels)[tf.newaxis] * (schema.field_size + weighing))
    with tf.control_dependencies([tf.debugging.assert_equal(x, of_pairs[0]) for x in of_pairs[1:]]):
        rows = tf.identity(rows)
    weights = []
    if weighing:
        found, pairs = libsvm.take_weights(rows, values)
        rows, fields, ids, values = (tf.gather(x, pairs) for x in (rows, fields, ids, values))
        weights = [found]
    ids, values, *counts = place(rows, fields, ids, values, tf.size(labels), schema)
    labels, ids, values, *weights = records.check(labels, ids, values, schema, *weights)
    return (lines, labels, ids, values, *counts, *weights)


def _is_plain(schema):
    """Whether lines are LibSVM with the fields in order."""
    return not (schema.named_fields or schema.field_ids or schema.hash_buckets)


def _taken(text, schema):
    """A block as field_lines.take returns it; raises InvalidArgumentError if that refuses it."""
    if schema.hash_buckets and libsvm_text.HASH_IN_ID.search(text):
        raise tf.errors.InvalidArgumentError(None, None, "'#' in an id")
    if schema.weighted and not _is_plain(schema):
        text = libsvm_text.weights_as_pairs_of(text, b"0:0:" if schema.named_fields else b"0:")
    taken = field_lines.take(text, schema.named_fields, bool(schema.hash_buckets))
    if taken is None or not taken[0].isascii():
        raise tf.errors.InvalidArgumentError(None, None, "a malformed pair, or not ASCII")
    return taken


def place(rows, fields, ids, values, num_rows, schema):
    """Puts each pair in the place of its field, wherever it is in the line.

    Args:
        rows: int32 [n], ascending, the record of each pair.
        fields: int32 [n].
        ids: int64 [n].
        values: float32 [n].
        num_rows: int32 [], B.
        schema: records.Schema. Unless it is multi-valued, a field has at most one value, and a
            missing one becomes id 0, value 0, so that no pair may have id 0.

    Returns:
        (ids int64 [B, F], values float32 [B, F]); if multi-valued, ids and values [B, M], padded
        with 0, and counts int32 [B, F].

    Raises:
        tf.errors.InvalidArgumentError: when run, if a pair has no place.
    """
    size = schema.field_size
    inside = tf.reduce_all((fields >= 0) & (fields < size))
    with tf.control_dependencies([tf.debugging.Assert(inside, ["field"])]):
        slots = rows * size + fields
    pairs = slots, ids, values
    in_order = tf.reduce_all(slots[1:] >= slots[:-1])

    def sort():
        order = tf.argsort(slots, stable=True)
        return tuple(tf.gather(x, order) for x in pairs)

    slots, ids, values = tf.cond(in_order, lambda: tuple(map(tf.identity, pairs)), sort)
    if schema.multi_valued:
        counts = tf.math.bincount(slots, minlength=num_rows * size)
        counts = tf.reshape(counts, [-1, size])
        lengths = tf.reduce_sum(counts, axis=1)  # [B]
        column = tf.range(tf.size(slots)) - tf.gather(tf.cumsum(lengths, exclusive=True), rows)
        where = tf.stack([rows, column], axis=1)
        shape = tf.stack([num_rows, tf.maximum(tf.reduce_max(lengths), 0)])  # no rows: max < 0
        return tf.scatter_nd(where, ids, shape), tf.scatter_nd(where, values, shape), counts
    checks = [
        tf.debugging.Assert(tf.reduce_all(slots[1:] > slots[:-1]), ["a field has two values"]),
        tf.debugging.assert_positive(ids),
    ]
    with tf.control_dependencies(checks):
        where, shape = slots[:, tf.newaxis], (num_rows * size)[tf.newaxis]
    width = [-1, size]
    return tuple(tf.reshape(tf.scatter_nd(where, x, shape), width) for x in (ids, values))


def fields_of(ids, ranges: Tuple[Tuple[int, int], ...]):
    """The field whose id range holds each id: int64 [n] -> int32 [n]; -1 if there is none."""
    order = sorted(range(len(ranges)), key=lambda i: ranges[i])
    begins, ends = (tf.constant([ranges[i][j] for i in order], tf.int64) for j in (0, 1))
    found = tf.searchsorted(begins, ids, side="right") - 1
    inside = (found >= 0) & (ids < tf.gather(ends, tf.maximum(found, 0)))
    return tf.where(
        inside, tf.gather(tf.constant(order), tf.maximum(found, 0)), -tf.ones_like(found)
    )


def convert(task: Tuple[LineRange, List[Piece]], schema):
    """Writes the lines of a range to its pieces; yields what pieces.write does."""

    def append(path, text):
        try:
            facts = _appender(schema)(path, *_taken(text, schema))
        except tf.errors.InvalidArgumentError:
            return None
        return BlockFacts(*(fact.item() for fact in facts))

    def accepts(text):
        try:
            check(text, schema)
        except tf.errors.InvalidArgumentError:
            return False
        return True

    return pieces.write(task, append, accepts, schema)
