"""The bytes of a serialized tf.train.Example: what `records.encode` writes, and a reader of any.

`tf.io.parse_example` is fast but careless. If a list comes in two parts, or a feature has two
lists, it takes the first and drops the rest; if a feature occurs twice it takes the last; it
ignores stray bytes; and it quotes what it refuses, which crashes session.run (a segmentation fault)
if that is not UTF-8. So it is not used. `find_lists` is as fast, for records whose every byte,
apart from the numbers, is as `records.encode` writes it; all others go through `decode_any`, which
is slower.

B: records in a batch. F: fields. E: features of a record. N: features that we read.
https://developers.google.com/protocol-buffers/docs/encoding
"""

from typing import NamedTuple, Sequence

import numpy as np
import tensorflow as tf

from deepfm.records.encoder import FLOAT_LIST, INT64_LIST, before_list, list_header, tag

_LONGER = [float(1 << 7 * n) for n in range(1, 5)]  # at each, a length takes one byte more


def _most_bytes(field_size, multi_valued):
    """The longest record, in bytes, whose headers are looked up in tables."""
    # An id takes up to 10 bytes, a value 4.
    return 4096 if multi_valued else min(14 * field_size + 128, 1 << 16)


def join_lists(lists, field_size: int):
    """Serializes Examples of these lists.

    The header of a list depends on its length alone, and comes from a table; TensorFlow's encoder
    takes four times as long.

    Args:
        lists: {name: string [B], a serialized Int64List for `counts` and `ids`, else FloatList}.
        field_size: F.

    Returns:
        string [B].
    """
    field = lambda name: INT64_LIST if name in ("counts", "ids") else FLOAT_LIST
    sizes = {name: tf.strings.length(x) for name, x in lists.items()}
    longest = tf.reduce_max(tf.stack([tf.reduce_max(n) for n in sizes.values()]))
    most = _most_bytes(field_size, "counts" in lists)

    def look_up():
        parts = []
        for name, message in lists.items():
            before = [before_list(name.encode(), field(name), n) for n in range(most + 1)]
            parts += [tf.gather(tf.constant(before), sizes[name]), message]
        total = tf.add_n([tf.strings.length(part) for part in parts])
        starts = tf.constant([tag(1, n) for n in range(len(lists) * (most + 40))])
        return tf.strings.join([tf.gather(starts, total), *parts])

    def encode():
        ones = tf.ones_like(sizes["ids"])[:, tf.newaxis]  # [B, 1]
        message = lambda kind, sizes, **fields: tf.io.encode_proto(
            sizes, list(fields.values()), list(fields), f"tensorflow.{kind}"
        )[:, tf.newaxis]  # [B, 1]
        entries = []
        for name, numbers in lists.items():
            kind = "float_list" if field(name) == FLOAT_LIST else "int64_list"
            feature = message("Feature", ones, **{kind: numbers[:, tf.newaxis]})
            key, sizes_ = tf.fill(tf.shape(ones), name), tf.tile(ones, [1, 2])
            entries.append(message("Features.FeatureEntry", sizes_, key=key, value=feature))
        entries = tf.concat(entries, axis=1)
        features = message("Features", ones * len(lists), feature=entries)
        return message("Example", ones, features=features)[:, 0]

    return tf.cond(longest <= most, look_up, encode)


class Lists(NamedTuple):
    """Where the lists of records are, if the records are as encoded.

    Attributes:
        as_encoded: bool [], whether every byte apart from the numbers is as `join_lists` writes it.
        counts: int32 [B, F], the number of values of each field.
        ids: string [B], serialized Int64Lists.
        values: string [B], the bytes of the float32s.
        positive: bool [B], whether the label is 1, not 0.
        weights: [float32 [B]] of weighted records, else empty.
    """

    as_encoded: tf.Tensor
    counts: tf.Tensor
    ids: tf.Tensor
    values: tf.Tensor
    positive: tf.Tensor
    weights: Sequence[tf.Tensor]


def find_lists(serialized, field_size: int, multi_valued: bool, weighted: bool = False) -> Lists:
    """Finds the lists of records by their lengths: each, apart from the counts, gives the next.

    Args:
        serialized: string [B].
        field_size: F.
        multi_valued: whether they have counts; otherwise each field has one value.
        weighted: whether they may have a weight; without one a record weighs 1.
    """
    head = lambda n: tag(1, n) if n else b""  # of a list of n bytes of numbers
    before_label = list_header(b"label", FLOAT_LIST, 4)
    length, most = tf.strings.length(serialized), _most_bytes(field_size, multi_valued)
    matches = [length < most]

    def take(at, size):
        """The bytes there, or fewer if the record ends."""
        size = tf.maximum(size, 0) + tf.zeros_like(length)
        return tf.strings.substr(serialized, tf.clip_by_value(at, 0, length), size)

    def look_up(entries, key):
        """(entries[key], or a string that no record holds if there is none; its length)."""
        entries = [entries.get(i, b"?") for i in range(most)]
        found = tf.gather(tf.constant(entries), tf.clip_by_value(key, 0, most - 1))
        return found, tf.strings.length(found)

    end_of_values, weights = length, []
    if weighted:  # the last list, if it is there, and always of one size
        before_weight = list_header(b"weight", FLOAT_LIST, 4)
        size = len(before_weight) + 4
        there = tf.equal(take(length - size, len(before_weight)), before_weight)
        bits = tf.reshape(raw_bytes(take(length - 4, 4), 4), [-1, 4])
        weights = [tf.where(there, tf.bitcast(bits, tf.float32), tf.ones_like(length, tf.float32))]
        end_of_values -= size * tf.cast(there, tf.int32)

    # First the counts, then from these and the end of the values the label, then the ids.
    first = list_header(b"counts", INT64_LIST, field_size) if multi_valued else b""
    starts = {len(tag(1, n)) + n: tag(1, n) + first for n in range(most)}
    start, at_ids = look_up(starts, length)
    matches.append(tf.equal(take(tf.zeros_like(length), at_ids), start))
    counts, n = tf.ones([tf.size(length), field_size], tf.int32), field_size
    if multi_valued:
        counts = raw_bytes(take(at_ids, field_size), field_size)
        counts = tf.cast(tf.ensure_shape(counts, [None, field_size]), tf.int32)
        matches.append(tf.reduce_all(counts < 128, axis=1))  # a byte each
        at_ids += field_size
        n = tf.reduce_sum(counts, axis=1)
    between = [
        {
            n: before_label + label + list_header(b"values", FLOAT_LIST, 4 * n)
            for n in range(most // 4)
        }
        for label in (bytes(4), np.float32(1).tobytes())
    ]
    (negative, size), (positive, _) = (look_up(entries, n) for entries in between)
    at_values = end_of_values - 4 * n
    end = at_values - size  # of the ids
    found = take(end, size)
    positive = tf.equal(found, positive)
    matches.append(positive | tf.equal(found, negative))
    whole = {len(list_header(b"ids", INT64_LIST, p)) + p: p for p in range(most)}
    middles = {size: list_header(b"ids", INT64_LIST, p) for size, p in whole.items()}
    middle, size = look_up(middles, end - at_ids)
    matches.append(tf.equal(take(at_ids, size), middle))
    matches.append(end - at_ids - size >= n)  # a byte for each id, at least
    _, size_of_head = look_up({size: head(p) for size, p in whole.items()}, end - at_ids)
    at_ids += size - size_of_head
    return Lists(
        tf.reduce_all(tf.stack(matches)), counts, take(at_ids, end - at_ids),
        take(at_values, 4 * n), positive, weights,
    )  # fmt: skip


def assert_rows(good, what: str):
    """The op that fails, naming the first row, unless all of bool [B] or [B, ...] is True."""
    row = tf.cast(tf.where(~good)[:1, 0], tf.int32)
    return tf.debugging.Assert(tf.reduce_all(good), [what, "in row", row])


def raw_bytes(strings, size):
    """The bytes of strings, filled up with 0: string [B] -> uint8 [B, size].

    TensorFlow 1.15 writes past the end of its memory if it decodes wider numbers this way.
    """
    return tf.raw_ops.DecodePaddedRaw(input_bytes=strings, fixed_length=size, out_type=tf.uint8)


def _alone(message):
    """Bytes of a message whose one field is `message`. string [...] -> int32 [...]."""
    size = tf.strings.length(message)
    # As a double: an int32 would be rounded to a float before it is compared.
    more = tf.raw_ops.Bucketize(input=tf.cast(size, tf.float64), boundaries=_LONGER)
    return 2 + size + more


def decode_any(serialized, field_size: int, with_labels: bool, weighted: bool = False):
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
