"""LibSVM text: reads its lines, and parses them a batch at a time; see `records.libsvm_text`."""

import functools
from typing import Iterator, Tuple

from deepfm.data.records import check
from deepfm.records import text_blocks
from deepfm.runtime.tf import libsvm_decoder, tf


def numbered(path: str) -> Iterator[Tuple[str, bytes, str]]:
    """Yields (place, line, "") for each record of a file."""
    for number, line in text_blocks.lines(path):
        yield f":{number}", line, ""


def count(path: str) -> int:
    """The number of records of a file."""
    return sum(len(text_blocks.record_starts(text)) for _, text, _ in text_blocks.blocks(path))


def line_chunks(path, files, buffer_bytes, ops):
    """The lines of a file that hold a record, in chunks; for the arguments see Format.read."""

    # TextLineDataset drops every carriage return, and so turns "3:1\r5" into 3:15.
    def blocks(path):
        return (text for _, text, _ in text_blocks.blocks(path.decode(), size=buffer_bytes))

    text = tf.data.Dataset.from_generator(blocks, tf.string, [], [path])
    lines = lambda block: tf.compat.v1.string_split([block], "\n").values
    return ops.pack(text.map(lambda block: drop_blank(lines(block))))


def parse_lines(lines, schema):
    """Parses and checks a batch of LibSVM lines with TensorFlow's decoder.

    Args:
        lines: string [B], none of them blank or only a comment (see `drop_blank`).
        schema: Schema.

    Returns:
        (labels float32 [B], ids int64 [B, F], values float32 [B, F]); with weights also these,
        float32 [B].

    Raises:
        tf.errors.InvalidArgumentError: when run on a batch with a bad line (see `explain_line`).
    """
    # The decoder quotes a line that it refuses, and session.run crashes (a segmentation fault) on a
    # message that is not UTF-8.
    ascii_only = tf.reduce_all(tf.strings.regex_full_match(lines, "[[:ascii:]]*"))
    with tf.control_dependencies([tf.debugging.Assert(ascii_only, ["not ASCII"])]):
        lines = tf.identity(lines)
    if schema.weighted:  # label:weight becomes label 0:weight, and a label alone label 0:1
        once = functools.partial(tf.strings.regex_replace, replace_global=False)
        lines = once(lines, r"^([\s\v]*[^\s\v:]+)([\s\v]|$)", r"\1:1\2")
        lines = once(lines, r"^([\s\v]*[^\s\v:]+):", r"\1 0:")
    # num_features only sets the dense shape, which is not used.
    labels, where, values, _ = libsvm_decoder()(lines, num_features=1, label_dtype=tf.float32)
    rows, ids = tf.cast(where[:, 0], tf.int32), where[:, 1] + schema.id_offset  # of each pair
    weights = []
    if schema.weighted:
        first = tf.not_equal(rows, tf.concat([[-1], rows[:-1]], 0))
        weights, pairs = [tf.boolean_mask(values, first)], tf.where(~first)[:, 0]
        rows, ids, values = (tf.gather(x, pairs) for x in (rows, ids, values))
    n = tf.size(labels)
    lengths = tf.math.bincount(rows, minlength=n)
    shape = tf.stack([n, schema.field_size])
    if not schema.pad:
        with tf.control_dependencies([tf.debugging.assert_equal(lengths, schema.field_size)]):
            ids, values = tf.reshape(ids, shape), tf.reshape(values, shape)
    else:
        checks = [
            tf.debugging.assert_less_equal(lengths, schema.field_size),
            tf.debugging.assert_positive(ids),  # id 0 is reserved for padding
        ]
        with tf.control_dependencies(checks):
            starts = tf.cumsum(lengths, exclusive=True)
        where = tf.stack([rows, tf.range(tf.size(ids)) - tf.gather(starts, rows)], axis=1)
        ids, values = tf.scatter_nd(where, ids, shape), tf.scatter_nd(where, values, shape)
    width = [None, schema.field_size]
    ids, values = tf.ensure_shape(ids, width), tf.ensure_shape(values, width)
    columns = check(labels, ids, values, schema, *weights)
    return columns if schema.with_labels else columns[:3]


def drop_blank(lines):
    """Strips comments (`# ...`) and drops lines that hold nothing else. string [N] -> [B]."""
    lines = tf.strings.regex_replace(lines, r"#\C*", "")  # \C: any byte, even if not UTF-8
    return tf.boolean_mask(lines, tf.logical_not(tf.strings.regex_full_match(lines, r"[\s\v]*")))
