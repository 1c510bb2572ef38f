"""The record format: encode and parse, once, for those who write and those who read.

A record is a `tf.train.Example` with `label` float, `ids` int64[F] and `values` float[F], in
TFRecord files; or a line `label id:value id:value ...` of a LibSVM file. Both are parsed a batch at
a time by TensorFlow's native ops. These name no record when they fail: `bad_records` finds the one
that is wrong.

B: records in a batch. F: fields (field_size).
"""

from typing import NamedTuple, Optional

import tensorflow as tf

from deepfm import wire

FRAME = 16  # bytes of a record in its file apart from its payload: length, and two checksums


class Schema(NamedTuple):
    """What every record of a data set must look like.

    Attributes:
        field_size: F, the number of (id, value) pairs of a record.
        feature_size: rows of the embedding table; ids lie in [0, feature_size). None: not checked.
        pad: fill LibSVM rows shorter than F with id 0 and value 0; id 0 is then reserved.
        id_offset: added to each id of a LibSVM row (1 makes 0-based ids 1-based).
    """

    field_size: int
    feature_size: Optional[int] = None
    pad: bool = False
    id_offset: int = 0


def encode(labels, ids, values):
    """Serializes a batch with native ops; equal to `tf.train.Example.SerializeToString`.

    A record is the packed numbers of three lists and what stands before each of them. Floats take 4
    bytes each, so all but the beginning of a record is the same in every row, and that depends on
    nothing but the bytes that the packed ids take: it is looked up.

    Args:
        labels: float32 [B].
        ids: int64 [B, F].
        values: float32 [B, F], F known when the graph is built.

    Returns:
        string [B], serialized `tf.train.Example`s.
    """
    expected = wire.layout(int(values.shape[1]))
    sizes = tf.ones([tf.shape(labels)[0], 1], tf.int32)

    def packed(list_type, numbers):  # [B, n] -> [B]
        n = sizes * int(numbers.shape[1])
        return tf.io.encode_proto(n, [numbers], ["value"], f"tensorflow.{list_type}")

    packed_ids = packed("Int64List", ids)
    start = tf.gather(tf.constant(expected.starts), tf.strings.length(packed_ids))
    packed_label = packed("FloatList", labels[:, tf.newaxis])
    packed_values = packed("FloatList", values)
    return tf.strings.join(
        [
            start, packed_ids, expected.before_label, packed_label,
            expected.before_values, packed_values,
        ]
    )  # fmt: skip


def parse_examples(serialized, schema, with_labels=True):
    """Parses and checks a batch of serialized Examples.

    A batch of what `encode` writes takes few ops; other Examples take 4 times as long. Whatever
    could be read in two ways is refused: a feature that is there twice, or that holds two lists.

    Args:
        serialized: string [B].
        schema: Schema.
        with_labels: False where records may lack a label (inference).

    Returns:
        (labels float32 [B], ids int64 [B, F], values float32 [B, F]); labels are 0 where not read.

    Raises:
        tf.errors.InvalidArgumentError: when run, for a batch with a bad record (see `bad_records`);
            DataLossError where a record is no protocol buffer at all.
    """
    widths = {"ids": (tf.int64, schema.field_size), "values": (tf.float32, schema.field_size)}
    if with_labels:
        widths["label"] = (tf.float32, 1)
    names = list(widths)

    def encoded():
        spec = {name: tf.io.FixedLenFeature([n], dtype) for name, (dtype, n) in widths.items()}
        parsed = tf.io.parse_example(serialized, spec)
        return [parsed[name] for name in names]

    def any_example():
        parsed = wire.decode_any(serialized, widths)
        return [parsed[name] for name in names]

    as_encoded = wire.are_as_encoded(serialized, schema.field_size)
    parsed = dict(zip(names, tf.cond(as_encoded, encoded, any_example)))
    for name, (_, n) in widths.items():
        parsed[name].set_shape([None, n])
    labels = parsed["label"][:, 0] if with_labels else tf.zeros_like(parsed["values"][:, 0])
    return _check(labels, parsed["ids"], parsed["values"], schema)


def parse_lines(lines, schema, known_ascii=False):
    """Parses and checks a batch of LibSVM lines with the native decoder.

    Args:
        lines: string [B], none of them blank or only a comment (see `drop_blank`).
        schema: Schema.
        known_ascii: the caller has made sure of it (see `decode_lines`).

    Returns:
        (labels float32 [B], ids int64 [B, F], values float32 [B, F]).

    Raises:
        tf.errors.InvalidArgumentError: when run, for a batch with a bad line (see `bad_records`).
    """
    labels, rows, ids, values = decode_lines(lines, schema.id_offset, known_ascii)
    n = tf.size(labels)
    lengths = tf.math.bincount(rows, minlength=n)
    shape = tf.stack([n, schema.field_size])
    if not schema.pad:
        with tf.control_dependencies([tf.debugging.assert_equal(lengths, schema.field_size)]):
            ids, values = tf.reshape(ids, shape), tf.reshape(values, shape)
    else:
        checks = [
            tf.debugging.assert_less_equal(lengths, schema.field_size),
            tf.debugging.assert_positive(ids),  # id 0 is the padding's
        ]
        with tf.control_dependencies(checks):
            starts = tf.cumsum(lengths, exclusive=True)
        where = tf.stack([rows, tf.range(tf.size(ids)) - tf.gather(starts, rows)], axis=1)
        ids, values = tf.scatter_nd(where, ids, shape), tf.scatter_nd(where, values, shape)
    width = [None, schema.field_size]
    return _check(labels, tf.ensure_shape(ids, width), tf.ensure_shape(values, width), schema)


def decode_lines(lines, id_offset=0, known_ascii=False):
    """Decodes a batch of LibSVM lines of any length, as they are; n is the batch's pairs.

    Args:
        lines: string [B], none of them blank or only a comment (see `drop_blank`).
        id_offset: added to each id.
        known_ascii: the caller has made sure of it. Otherwise it is checked, for a tenth of the
            time: the decoder quotes the line that it refuses, and session.run crashes (a
            segmentation fault) on a message that is not UTF-8.

    Returns:
        (labels float32 [B] as written, rows int32 [n], ids int64 [n], values float32 [n]); pair i
        belongs to line rows[i], in the order of the line.

    Raises:
        tf.errors.InvalidArgumentError: when run, for a batch with a line that is not LibSVM.
    """
    from tensorflow.contrib import libsvm  # only LibSVM's readers pay for loading contrib

    if not known_ascii:
        ascii_only = tf.reduce_all(tf.strings.regex_full_match(lines, "[[:ascii:]]*"))
        with tf.control_dependencies([tf.debugging.Assert(ascii_only, ["not ASCII"])]):
            lines = tf.identity(lines)
    # num_features only sets the dense shape, which is not used.
    pairs, labels = libsvm.decode_libsvm(lines, num_features=1, label_dtype=tf.float32)
    rows = tf.cast(pairs.indices[:, 0], tf.int32)
    return labels, rows, pairs.indices[:, 1] + id_offset, pairs.values


def drop_blank(lines):
    """Strips comments (`# ...`) and drops the lines that hold nothing else. string [N] -> [B]."""
    lines = tf.strings.regex_replace(lines, r"#\C*", "")  # \C: any byte, also where not UTF-8
    return tf.boolean_mask(lines, tf.logical_not(tf.strings.regex_full_match(lines, r"[\s\v]*")))


def _check(labels, ids, values, schema):
    """The batch with labels as 0 or 1, or an InvalidArgumentError for a record out of bounds."""
    known = tf.equal(labels, 0.0) | tf.equal(tf.abs(labels), 1.0)
    checks = [
        tf.debugging.Assert(tf.reduce_all(known), ["label"]),
        tf.debugging.Assert(tf.reduce_all(tf.math.is_finite(values)), ["value"]),
        tf.debugging.Assert(tf.reduce_all(ids >= 0), ["negative id"]),
        # Without feature_size the largest id + 1 will be it, and has to be an int64.
        tf.debugging.Assert(tf.reduce_all(ids < (schema.feature_size or tf.int64.max)), ["id"]),
    ]
    with tf.control_dependencies(checks):
        return tf.cast(labels > 0, tf.float32), tf.identity(ids), tf.identity(values)
