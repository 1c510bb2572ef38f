"""Parses records with TensorFlow's operators, a batch at a time.

A record is a `tf.train.Example` with `label` float, `ids` int64[F] and `values` float[F], in
TFRecord files; or a line `label id:value id:value ...` of a LibSVM file (`libsvm`). The operators
do not say which record they failed at: `bad_records` finds it.

If a field may hold several values, or none, an Example also has `counts` int64[F]: how many of its
ids and values belong to each field, first those of field 0, then those of field 1, and so on.
A record without `counts` has one id and value per field.

If examples are weighted, an Example also has `weight` float[1], finite and not negative; a line
begins with `label:weight`. In such data a record without one weighs 1.

B: records in a batch. F: fields (field_size). M: the most ids of a record of the batch.
"""

import tensorflow as tf

from deepfm.data import example_bytes
from deepfm.records import wire
from deepfm.records.schema import Schema  # noqa: F401  records.Schema


def hashed(strings, buckets):
    """The ids of strings, the same in conversion and in serving: string [...] -> int64 [...].

    FarmHash's Fingerprint64 (https://github.com/google/farmhash), modulo `buckets` - 1: id 0 is
    kept for missing values. Different strings may get the same id.
    """
    return 1 + tf.strings.to_hash_bucket_fast(strings, buckets - 1)


def parse(serialized, schema):
    """Parses and checks a batch of serialized Examples.

    Anything ambiguous is refused: a feature that occurs twice, or that holds two lists.

    Args:
        serialized: string [B].
        schema: Schema.

    Returns:
        (labels float32 [B], ids int64 [B, F], values float32 [B, F]).
        For a multi-valued schema (labels, ids int64 [B, M], values float32 [B, M], counts int32
        [B, F]), rows filled up with 0. With weights, they follow: float32 [B].

    Raises:
        tf.errors.InvalidArgumentError: when run, for a batch with a bad record (see `bad_records`);
            DataLossError if a record is not a protocol buffer at all.
    """
    fields = schema.field_size
    # The decoder takes no empty batch, and makes a column even if no record has a value.
    ids, counts = ([], [0] * fields) if schema.multi_valued else ([0] * fields, None)
    one_more = tf.concat([serialized, [wire.write(0, ids, ids, counts)]], 0)
    found = example_bytes.decode_any(one_more, fields, schema.with_labels, schema.with_weights)
    labels, ids, values, counts, num_ids, num_values, *weights = (x[:-1] for x in found)
    longest = tf.reduce_max(found[4]) if schema.multi_valued else fields
    ids, values = ids[:, :longest], values[:, :longest]
    counts.set_shape([None, fields])
    of_record = tf.cast(num_ids, tf.int64)
    if schema.multi_valued:
        # One by one, because a sum of large counts might overflow to the right one.
        good = (counts >= 0) & (counts <= of_record[:, tf.newaxis])
    else:
        good = tf.equal(counts, 1)  # with other counts the ids mean something else
    same = tf.equal(tf.reduce_sum(counts, axis=1), of_record) & tf.equal(num_ids, num_values)
    checks = [example_bytes.assert_rows(x, "wrong number of ids or values") for x in (good, same)]
    with tf.control_dependencies(checks):
        counts = tf.cast(counts, tf.int32)
        if not schema.multi_valued:
            width = [-1, fields]
            ids, values = tf.reshape(ids, width), tf.reshape(values, width)
            return check(labels, ids, values, schema, *weights)
    labels, ids, values, *weights = check(labels, ids, values, schema, *weights)
    return (labels, ids, values, counts, *weights)


def check(labels, ids, values, schema, *weights):
    """A batch with labels as 0 or 1, or an InvalidArgumentError for a record out of bounds."""
    known = tf.equal(labels, 0.0) | tf.equal(tf.abs(labels), 1.0)
    checks = [example_bytes.assert_rows(known, "label"), *check_pairs(ids, values, schema)]
    for each in weights:
        checks.append(example_bytes.assert_rows(tf.math.is_finite(each) & (each >= 0), "weight"))
    with tf.control_dependencies(checks):
        return (tf.cast(labels > 0, tf.float32), *map(tf.identity, (ids, values, *weights)))


def check_pairs(ids, values, schema):
    """The ops that fail for an id or a value out of bounds; they name the first row."""
    good = {
        "value that is not a finite number": tf.math.is_finite(values),
        f"feature id not in [0, {schema.limit})": (ids >= 0) & (ids < schema.limit),
    }
    return [example_bytes.assert_rows(each, what) for what, each in good.items()]
