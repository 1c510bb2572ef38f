"""Parses records with TensorFlow's operators, a batch at a time.

A record is a `tf.train.Example` with `label` float, `ids` int64[F] and `values` float[F], in
TFRecord files; or a line `label id:value id:value ...` of a LibSVM file (`libsvm`). The operators
do not say which record they failed at: `bad_records` finds it.

If a field may hold several values, or none, an Example also has `counts` int64[F]: how many of its
ids and values belong to each field, first those of field 0, then those of field 1, and so on.
A record without `counts` has one id and value per field.

If examples are weighted, an Example also has `weight` float[1], finite and not negative; a line
begins with `label:weight`. In such data a record without one weighs 1.

`tf.io.parse_example` is fast but careless. If a list comes in two parts, or a feature has two
lists, it takes the first and drops the rest; if a feature occurs twice it takes the last; it
ignores stray bytes; and it quotes what it refuses, which crashes session.run (a segmentation fault)
if that is not UTF-8. So it is not used.

B: records in a batch. F: fields (field_size). M: the most ids of a record of the batch. E: features
of a record. N: features that we read.
https://developers.google.com/protocol-buffers/docs/encoding
"""

from deepfm.records import wire
from deepfm.records.schema import Schema  # noqa: F401  records.Schema
from deepfm.runtime.tf import tf

_LONGER = [float(1 << 7 * n) for n in range(1, 5)]  # at each, a length takes one byte more


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
    found = _decode_any(one_more, fields, schema.with_labels, schema.with_weights)
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
    checks = [assert_rows(x, "wrong number of ids or values") for x in (good, same)]
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
    checks = [assert_rows(known, "label"), *check_pairs(ids, values, schema)]
    for each in weights:
        checks.append(assert_rows(tf.math.is_finite(each) & (each >= 0), "weight"))
    with tf.control_dependencies(checks):
        return (tf.cast(labels > 0, tf.float32), *map(tf.identity, (ids, values, *weights)))


def check_pairs(ids, values, schema):
    """The ops that fail for an id or a value out of bounds; they name the first row."""
    good = {
        "value that is not a finite number": tf.math.is_finite(values),
        f"feature id not in [0, {schema.limit})": (ids >= 0) & (ids < schema.limit),
    }
    return [assert_rows(each, what) for what, each in good.items()]


def assert_rows(good, what: str):
    """The op that fails, naming the first row, unless all of bool [B] or [B, ...] is True."""
    row = tf.cast(tf.where(~good)[:1, 0], tf.int32)
    return tf.debugging.Assert(tf.reduce_all(good), [what, "in row", row])


def _alone(message):
    """Bytes of a message whose one field is `message`. string [...] -> int32 [...]."""
    size = tf.strings.length(message)
    # As a double: an int32 would be rounded to a float before it is compared.
    more = tf.raw_ops.Bucketize(input=tf.cast(size, tf.float64), boundaries=_LONGER)
    return 2 + size + more


def _decode_any(serialized, field_size: int, with_labels: bool, weighted: bool = False):
    """Reads any serialized tf.train.Examples, to the letter of the format.

    Args:
        serialized: string [B].
        field_size: F.
        with_labels: whether records must hold a label; if so, an unexpected weight is refused.
        weighted: whether records may hold a weight.

    Returns:
        (labels float32 [B], ids int64 [B, most ids of a record], values float32 [B, most values],
        counts int64 [B, F], ids of each record int32 [B], values of each int32 [B]); ids and values
        are filled up with 0, counts are 1 if a record has none. If weighted, also weights float32
        [B], 1 if a record has none.

    Raises:
        tf.errors.InvalidArgumentError or DataLossError: when run, for a batch with a record that is
            not an Example, or in which one of these features is missing, occurs twice, or does not
            hold exactly one list of its type and length. No message quotes the record.
    """
    good = []  # bool [B] each, together in one assertion, which takes a dozen ops
    check = lambda each: good.append(tf.reduce_all(each, axis=tf.range(1, tf.rank(each))))
    names = ["ids", "counts", "values", *["label"] * with_labels, *["weight"] * weighted]
    is_int64 = [name in ("ids", "counts") for name in names]
    of_kind = [[1, 0] if kind else [0, 1] for kind in is_int64]
    least = [int(name not in ("counts", "weight")) for name in names]

    def decode(message, kind, *fields):
        """(numbers of each field, the one message of each): int32 [..., fields], [string [...]]."""
        sizes, found = tf.io.decode_proto(
            message, f"tensorflow.{kind}", fields, [tf.string] * len(fields)
        )
        return sizes, [tf.squeeze(x, -1) for x in found]

    def decode_all(message, kind, field, dtype):
        """(int32 [B], all values of a repeated field [B, numbers])."""
        sizes, (found,) = tf.io.decode_proto(message, f"tensorflow.{kind}", [field], [dtype])
        return tf.squeeze(sizes, -1), found

    # decode_proto takes the last of two messages where a protocol buffer would merge them, so each
    # message must be exactly as long as the one that it holds requires.
    _, (features,) = decode(serialized, "Example", "features")  # [B]
    check(tf.equal(tf.strings.length(serialized), _alone(features)))
    _, entries = decode_all(features, "Features", "feature", tf.string)  # [B, E]
    _, (keys, values) = decode(entries, "Features.FeatureEntry", "key", "value")  # [B, E]
    if with_labels and not weighted:
        check(tf.not_equal(keys, "weight"))
    named = tf.equal(tf.expand_dims(keys, 2), names)  # [B, E, N]
    whole = tf.equal(tf.strings.length(entries), _alone(keys) + _alone(values))
    check(whole | ~tf.reduce_any(named, axis=2))
    times = tf.reduce_sum(tf.cast(named, tf.int32), axis=1)  # [B, N]
    check((times >= least) & (times <= 1))
    feature = tf.compat.v2.where(named, tf.expand_dims(values, 2), "")
    feature = tf.strings.reduce_join(feature, axis=1)  # [B, N]
    sizes, (int64s, floats) = decode(feature, "Feature", "int64_list", "float_list")
    check(tf.equal(sizes, tf.expand_dims(times, 2) * of_kind))
    lists = tf.compat.v2.where(is_int64, int64s, floats)
    check(tf.equal(tf.strings.length(feature), times * _alone(lists)))

    columns = tf.unstack(lists, len(names), 1)
    num_ids, ids = decode_all(columns[0], "Int64List", "value", tf.int64)
    num_counts, counts = decode_all(columns[1], "Int64List", "value", tf.int64)
    num_values, values = decode_all(columns[2], "FloatList", "value", tf.float32)
    labels = tf.zeros(tf.shape(num_ids))
    if with_labels:
        num_labels, labels = decode_all(columns[3], "FloatList", "value", tf.float32)
        check(tf.equal(num_labels, 1))
    check(tf.equal(num_counts, times[:, 1] * field_size))
    counts = tf.pad(counts, [[0, 0], [0, field_size - tf.shape(counts)[1]]])
    counts = tf.where(num_counts > 0, counts, tf.ones_like(counts))
    weights = []
    if weighted:
        num_weights, found = decode_all(columns[-1], "FloatList", "value", tf.float32)
        check(tf.equal(num_weights, times[:, -1]))
        weights = [tf.where(num_weights > 0, found[:, 0], tf.ones_like(found[:, 0]))]
    what = "not a tf.train.Example with ids (int64) and values (float), once each,"
    with tf.control_dependencies([assert_rows(tf.reduce_all(good, axis=0), what)]):
        found = tf.reshape(labels, [-1]), ids, values, counts, num_ids, num_values
        return tuple(map(tf.identity, (*found, *weights)))
