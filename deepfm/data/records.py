"""The record format: encode and parse, once, for those who write and those who read.

A record is a `tf.train.Example` with `label` float, `ids` int64[F] and `values` float[F], in
TFRecord files; or a line `label id:value id:value ...` of a LibSVM file. Both are parsed a batch at
a time by TensorFlow's native ops. These name no record when they fail: `bad_records` finds the one
that is wrong.

Where a field may hold several values, or none, an Example also has `counts` int64[F], how many of
its ids and values belong to each field: first those of field 0, then those of field 1, and so on.
A record without `counts` has one of each field.

B: records in a batch. F: fields (field_size). M: the most ids of a record of the batch.
"""

from typing import NamedTuple, Optional, Tuple

import tensorflow as tf

from deepfm.data import example_bytes
from deepfm.kernels import bindings
from deepfm.runtime.memory import MAX_NUMBER

FRAME = 16  # bytes of a record in its file apart from its payload: length, and two checksums


class Schema(NamedTuple):
    """What every record of a data set must look like.

    Attributes:
        field_size: F, the number of (id, value) pairs of a record.
        feature_size: rows of the embedding table; ids lie in [0, feature_size). None: as many as a
            table can have.
        pad: fill LibSVM rows shorter than F with id 0 and value 0; id 0 is then reserved.
        id_offset: added to each id of a LibSVM row (1 makes 0-based ids 1-based).
        multi_valued: whether a field may hold several values, or none.
        named_fields: whether the pairs of a line name their fields (LibFFM's `field:id:value`).
        field_ids: for each field (its first id, its last id + 1), where lines are LibSVM whose ids
            tell their fields; these are the ids as written.
        hash_buckets: the ids of a line are strings, of which `hashed` makes ids; 0: numbers.
    """

    field_size: int
    feature_size: Optional[int] = None
    pad: bool = False
    id_offset: int = 0
    multi_valued: bool = False
    named_fields: bool = False
    field_ids: Optional[Tuple[Tuple[int, int], ...]] = None
    hash_buckets: int = 0

    @property
    def limit(self) -> int:
        """What all ids have to lie below."""
        return self.feature_size or MAX_NUMBER


def hashed(strings, buckets):
    """The ids of strings, the same in conversion and in serving: string [...] -> int64 [...].

    FarmHash's Fingerprint64 (https://github.com/google/farmhash), modulo one less than `buckets`:
    id 0 stays free for what is missing. Different strings may get the same id.
    """
    return 1 + tf.strings.to_hash_bucket_fast(strings, buckets - 1)


def parse(raw, data_format, schema, with_labels=True, compiled=False):
    """Parses and checks a batch of raw records.

    Args:
        raw: string [B]; packed where compiled.
        data_format: "tfrecord" or "libsvm".
        schema: Schema.
        with_labels: False where TFRecords may lack a label.
        compiled: whether a compiled kernel parses the batches that it can.

    Returns:
        ({"feat_ids": int64 [B, F], "feat_vals": float32 [B, F]}, labels float32 [B]); where fields
        may hold several values int64 and float32 [B, M], and "feat_counts" int32 [B, F].

    Raises:
        As `parse_lines` and `parse_examples` do.
    """
    strings = lambda: bindings.unpack(raw) if compiled else raw
    if data_format == "libsvm":
        slow = lambda: parse_lines(strings(), schema)
    elif schema.multi_valued:
        slow = lambda: parse_multi_valued(strings(), schema, with_labels)
    else:
        slow = lambda: parse_examples(strings(), schema, with_labels)
    fast = _compiled(raw, data_format, schema, with_labels) if compiled else None
    if fast is None:
        labels, *found = slow()
    else:
        labels, *found = tf.cond(fast[0], lambda: fast[1:], slow)
    return dict(zip(["feat_ids", "feat_vals", "feat_counts"], found)), labels


def _compiled(raw, data_format, schema, with_labels):
    """(whether it could, labels, ids, values) of a compiled kernel; None where there is none."""
    bounds = schema.field_size, schema.limit
    if data_format == "libsvm":
        return None if schema.pad else tuple(bindings.parse_lines(raw, *bounds, schema.id_offset))
    if schema.multi_valued:
        return None
    good, labels, *found = bindings.parse(raw, *bounds)
    return (good, labels if with_labels else tf.zeros_like(labels), *found)


def nothing(data_format, schema):
    """What `parse`, which does not take it, would make of a batch of no records."""
    multi_valued = schema.multi_valued and data_format == "tfrecord"
    width = 0 if multi_valued else schema.field_size
    features = {"feat_ids": tf.zeros([0, width], tf.int64), "feat_vals": tf.zeros([0, width])}
    if multi_valued:
        features["feat_counts"] = tf.zeros([0, schema.field_size], tf.int32)
    return features, tf.zeros([0])


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
    expected = example_bytes.layout(int(values.shape[1]))
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
        # Whose `counts` are not one each means something else by its ids.
        of_fields = {"counts": (tf.int64, schema.field_size)}
        parsed, sizes = example_bytes.decode_any(serialized, {**widths, **of_fields}, ["counts"])
        ones = tf.equal(parsed["counts"], 1) | tf.equal(sizes["counts"], 0)[:, tf.newaxis]
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(ones), ["counts"])]):
            parsed = {name: tf.identity(parsed[name]) for name in names}
        return [parsed[name] for name in names]

    as_encoded = example_bytes.are_as_encoded(serialized, schema.field_size)
    parsed = dict(zip(names, tf.cond(as_encoded, encoded, any_example)))
    for name, (_, n) in widths.items():
        parsed[name].set_shape([None, n])
    labels = parsed["label"][:, 0] if with_labels else tf.zeros_like(parsed["values"][:, 0])
    return check(labels, parsed["ids"], parsed["values"], schema)


def encode_multi_valued(labels, ids, values, counts):
    """Serializes a batch whose fields hold any number of values.

    Args:
        labels: float32 [B].
        ids: int64 [B, M], filled up with anything.
        values: float32 [B, M], likewise.
        counts: int32 [B, F].

    Returns:
        string [B], serialized `tf.train.Example`s.
    """
    sizes = tf.reduce_sum(counts, axis=1, keepdims=True)  # [B, 1]
    ones = tf.ones_like(sizes)

    def packed(list_type, n, numbers):  # [B, at most n] -> [B]
        return tf.io.encode_proto(n, [numbers], ["value"], f"tensorflow.{list_type}")

    all_fields = ones * int(counts.shape[1])
    lists = {
        "counts": packed("Int64List", all_fields, tf.cast(counts, tf.int64)),
        "ids": packed("Int64List", sizes, ids),
        "label": packed("FloatList", ones, labels[:, tf.newaxis]),
        "values": packed("FloatList", sizes, values),
    }
    return example_bytes.join_lists(lists)


def parse_multi_valued(serialized, schema, with_labels=True):
    """Parses and checks a batch of Examples whose fields hold any number of values.

    Args:
        serialized: string [B].
        schema: Schema.
        with_labels: False where records may lack a label (inference).

    Returns:
        (labels float32 [B], ids int64 [B, M], values float32 [B, M], counts int32 [B, F]); what
        fills up a row is 0.

    Raises:
        As `parse_examples` does.
    """
    lists = example_bytes.find_lists(serialized, schema.field_size)

    def encoded():
        longest = tf.reduce_max(tf.reduce_sum(lists.counts, axis=1))
        sizes, (ids,) = tf.io.decode_proto(lists.ids, "tensorflow.Int64List", ["value"], [tf.int64])
        values = example_bytes.raw_bytes(lists.values, 4 * tf.maximum(longest, 1))
        values = tf.bitcast(tf.reshape(values, [tf.size(serialized), -1, 4]), tf.float32)
        sizes, labels = sizes[:, 0], tf.cast(lists.positive, tf.float32)
        # Where no record has a value the decoder still makes a column.
        ids, values = ids[:, :longest], values[:, :longest]
        return labels, ids, values, tf.cast(lists.counts, tf.int64), sizes, sizes

    def any_example():
        widths = {
            "ids": (tf.int64, None), "values": (tf.float32, None),
            "counts": (tf.int64, schema.field_size),
        }  # fmt: skip
        if with_labels:
            widths["label"] = (tf.float32, 1)
        found, sizes = example_bytes.decode_any(serialized, widths, optional=["counts"])
        told = tf.equal(sizes["counts"], schema.field_size)
        counts = tf.where(told, found["counts"], tf.ones_like(found["counts"]))
        labels = found["label"][:, 0] if with_labels else tf.zeros_like(sizes["ids"], tf.float32)
        return labels, found["ids"], found["values"], counts, sizes["ids"], sizes["values"]

    labels, ids, values, counts, num_ids, num_values = tf.cond(
        lists.as_encoded, encoded, any_example
    )
    counts.set_shape([None, schema.field_size])
    of_record = tf.cast(num_ids, tf.int64)
    checks = [
        tf.debugging.assert_non_negative(counts),
        # One by one, as a sum of large ones might come round to the right one.
        tf.debugging.assert_less_equal(counts, of_record[:, tf.newaxis]),
        tf.debugging.assert_equal(tf.reduce_sum(counts, axis=1), of_record),
        tf.debugging.assert_equal(num_ids, num_values),
    ]
    with tf.control_dependencies(checks):
        counts = tf.cast(counts, tf.int32)
    return (*check(labels, ids, values, schema), counts)


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
    return check(labels, tf.ensure_shape(ids, width), tf.ensure_shape(values, width), schema)


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


def check(labels, ids, values, schema):
    """A batch with labels as 0 or 1, or an InvalidArgumentError for a record out of bounds."""
    known = tf.equal(labels, 0.0) | tf.equal(tf.abs(labels), 1.0)
    checks = [
        tf.debugging.Assert(tf.reduce_all(known), ["label"]),
        tf.debugging.Assert(tf.reduce_all(tf.math.is_finite(values)), ["value"]),
        tf.debugging.Assert(tf.reduce_all(ids >= 0), ["negative id"]),
        tf.debugging.Assert(tf.reduce_all(ids < schema.limit), ["id"]),
    ]
    with tf.control_dependencies(checks):
        return tf.cast(labels > 0, tf.float32), tf.identity(ids), tf.identity(values)
