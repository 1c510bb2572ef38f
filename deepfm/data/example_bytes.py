"""The bytes of a serialized tf.train.Example: what `records.encode` writes, and a reader of any.

`tf.io.parse_example` is fast but careless. Of a list in two parts, or of two lists in one feature,
it takes the first and drops the rest; of a feature that is there twice it takes the last; it passes
over bytes that belong to nothing; and it quotes what it refuses, on which session.run crashes (a
segmentation fault) where that is not UTF-8. So it gets only records whose every byte, apart from
the numbers, is as `records.encode` writes it. Others go through `decode_any`, which is slower.

B: records in a batch. F: fields. E: features of a record. N: features that are read.
https://developers.google.com/protocol-buffers/docs/encoding
"""

import functools
from typing import List, NamedTuple

import numpy as np
import tensorflow as tf

_FLOAT_LIST, _INT64_LIST = 2, 3  # the numbers of these fields in a tf.train.Feature
_MOST_ID_BYTES = 10
_LONGER = [float(1 << 7 * n) for n in range(1, 5)]  # from each on a length takes one byte more
_TABLED = 4096  # bytes of a list, up to which what stands before it is looked up


class Layout(NamedTuple):
    """What stands before the lists of a record, each a message of its own, in their order.

    Attributes:
        starts: before the ids, by the bytes of their list.
        before_label: before the list of the label.
        before_values: before the list of the values.
        after_ids: bytes from the end of the ids to the end of the record.
    """

    starts: List[bytes]
    before_label: bytes
    before_values: bytes
    after_ids: int


@functools.lru_cache(maxsize=None)
def layout(field_size: int) -> Layout:
    """The Layout of the records of F fields that `records.encode` writes."""
    label_bytes, values_bytes = _list_bytes(4), _list_bytes(4 * field_size)
    before_label = _before_list(b"label", _FLOAT_LIST, label_bytes)
    before_values = _before_list(b"values", _FLOAT_LIST, values_bytes)
    after_ids = len(before_label) + label_bytes + len(before_values) + values_bytes
    most = _list_bytes(_MOST_ID_BYTES * field_size)
    before_ids = [_before_list(b"ids", _INT64_LIST, n) for n in range(most + 1)]
    starts = [_tag(1, len(head) + n + after_ids) + head for n, head in enumerate(before_ids)]
    return Layout(starts, before_label, before_values, after_ids)


def join_lists(lists):
    """Serializes Examples of these lists.

    What stands before a list is looked up, by the bytes that it takes; TensorFlow's encoder takes
    four times as long.

    Args:
        lists: {name: string [B], a serialized FloatList for `label` and `values`, else Int64List}.

    Returns:
        string [B].
    """
    field = lambda name: _FLOAT_LIST if name in ("label", "values") else _INT64_LIST
    sizes = {name: tf.strings.length(x) for name, x in lists.items()}
    longest = tf.reduce_max(tf.stack([tf.reduce_max(n) for n in sizes.values()]))

    def look_up():
        parts = []
        for name, message in lists.items():
            before = [_before_list(name.encode(), field(name), n) for n in range(_TABLED + 1)]
            parts += [tf.gather(tf.constant(before), sizes[name]), message]
        entries = tf.strings.join(parts)
        starts = [_tag(1, n) for n in range(len(lists) * (_TABLED + 40))]
        return tf.strings.join(
            [tf.gather(tf.constant(starts), tf.strings.length(entries)), entries]
        )

    def encode():
        ones = tf.ones_like(sizes["ids"])[:, tf.newaxis]  # [B, 1]
        message = lambda kind, sizes, **fields: tf.io.encode_proto(
            sizes, list(fields.values()), list(fields), f"tensorflow.{kind}"
        )[:, tf.newaxis]  # [B, 1]
        entries = []
        for name, numbers in lists.items():
            kind = "float_list" if field(name) == _FLOAT_LIST else "int64_list"
            feature = message("Feature", ones, **{kind: numbers[:, tf.newaxis]})
            key, sizes_ = tf.fill(tf.shape(ones), name), tf.tile(ones, [1, 2])
            entries.append(message("Features.FeatureEntry", sizes_, key=key, value=feature))
        entries = tf.concat(entries, axis=1)
        features = message("Features", ones * len(lists), feature=entries)
        return message("Example", ones, features=features)[:, 0]

    return tf.cond(longest <= _TABLED, look_up, encode)


def _before_list(name, field, size):
    """What stands before a list of `size` bytes in a tf.train.Features: entry, key and feature."""
    feature = _tag(field, size)
    entry = _tag(1, len(name)) + name + _tag(2, len(feature) + size) + feature
    return _tag(1, len(entry) + size) + entry


def _list_bytes(packed):
    """The bytes of a list whose packed numbers take so many."""
    return len(_tag(1, packed)) + packed


def _tag(field, size):
    """What stands before `size` bytes of a field of a protocol buffer: its number and the size."""
    head = bytearray([field << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes(head) + bytes([size])


def are_as_encoded(serialized, field_size: int):
    """Whether all records are, apart from their numbers, byte for byte what `encode` writes.

    The length of such a record tells what it must begin with.

    Args:
        serialized: string [B].
        field_size: F.

    Returns:
        bool [].
    """
    expected = layout(field_size)
    heads = {}  # by the bytes of the record
    for packed in range(field_size, _MOST_ID_BYTES * field_size + 1):
        start, size = expected.starts[_list_bytes(packed)], _list_bytes(packed)
        heads[len(start) + size + expected.after_ids] = start + _tag(1, packed)
    longest = max(heads)
    table = tf.constant([heads.get(n, b"") for n in range(longest + 1)])
    length = tf.strings.length(serialized)
    head = tf.gather(table, tf.minimum(length, longest))

    # The label, of which encode writes two, lies between what never differs.
    between = [
        expected.before_label + tf.train.FloatList(value=[label]).SerializeToString()
        + expected.before_values + _tag(1, 4 * field_size)
        for label in (0, 1)
    ]  # fmt: skip
    start = tf.maximum(length - expected.after_ids, 0)
    middle = tf.strings.substr(serialized, start, tf.fill(tf.shape(length), len(between[0])))
    beginning = tf.strings.substr(serialized, tf.zeros_like(length), tf.strings.length(head))
    return tf.reduce_all(
        tf.not_equal(head, "")
        & (length <= longest)
        & tf.equal(beginning, head)
        & (tf.equal(middle, between[0]) | tf.equal(middle, between[1]))
    )


class Lists(NamedTuple):
    """Where the lists of records of several values a field lie, if they are as encoded.

    Attributes:
        as_encoded: bool [], whether every byte apart from the numbers is what `join_lists` writes.
        counts: int32 [B, F].
        ids: string [B], serialized Int64Lists.
        values: string [B], the bytes of the float32s.
        positive: bool [B], whether the label is 1; otherwise it is 0.
    """

    as_encoded: tf.Tensor
    counts: tf.Tensor
    ids: tf.Tensor
    values: tf.Tensor
    positive: tf.Tensor


def find_lists(serialized, field_size: int) -> Lists:
    """Finds the lists of records by their lengths: all but the counts tell where the next begins.

    Args:
        serialized: string [B].
        field_size: F.
    """
    head = lambda n: _tag(1, n) if n else b""  # of a list of n bytes of numbers
    before = lambda name, kind, n: _before_list(name, kind, len(head(n)) + n) + head(n)
    before_label = before(b"label", _FLOAT_LIST, 4)
    length = tf.strings.length(serialized)
    matches = [length < _TABLED]

    def take(at, size):
        """The bytes there, or fewer where the record ends."""
        return tf.strings.substr(serialized, tf.clip_by_value(at, 0, length), tf.maximum(size, 0))

    def look_up(entries, key):
        """entries[key], or what no record holds where there is none; its length."""
        entries = [entries.get(i, b"?") for i in range(_TABLED)]
        where = tf.clip_by_value(key, 0, _TABLED - 1)
        sizes = tf.constant([len(entry) for entry in entries])
        return tf.gather(tf.constant(entries), where), tf.gather(sizes, where)

    def expect(at, wanted, size):
        matches.append(tf.equal(take(at, size), wanted))

    # From the beginning to the counts, from these and the end to the label, then what is between.
    first = before(b"counts", _INT64_LIST, field_size)
    starts = {len(_tag(1, n)) + n: _tag(1, n) + first for n in range(_TABLED)}
    start, at_counts = look_up(starts, length)
    expect(tf.zeros_like(length), start, at_counts)
    counts = raw_bytes(take(at_counts, tf.fill(tf.shape(length), field_size)), field_size)
    counts = tf.cast(tf.ensure_shape(counts, [None, field_size]), tf.int32)
    matches.append(tf.reduce_all(counts < 128, axis=1))  # a byte each
    n = tf.reduce_sum(counts, axis=1)
    at_values = length - 4 * n
    tails = {n: before(b"values", _FLOAT_LIST, 4 * n) for n in range(_TABLED // 4)}
    tail, size = look_up(tails, n)
    expect(at_values - size, tail, size)
    at_label = at_values - size - 4
    label = take(at_label, 4 * tf.ones_like(n))
    positive = tf.equal(label, np.float32(1).tobytes())
    matches.append(positive | tf.equal(label, np.float32(0).tobytes()))
    expect(at_label - len(before_label), before_label, len(before_label) * tf.ones_like(n))
    at_ids, end = at_counts + field_size, at_label - len(before_label)
    whole = {len(before(b"ids", _INT64_LIST, p)) + p: p for p in range(_TABLED)}
    middles = {size: before(b"ids", _INT64_LIST, p) for size, p in whole.items()}
    middle, size = look_up(middles, end - at_ids)
    expect(at_ids, middle, size)
    heads = tf.gather(
        tf.constant([len(head(whole.get(i, 0))) for i in range(_TABLED)]),
        tf.clip_by_value(end - at_ids, 0, _TABLED - 1),
    )
    at_ids += size - heads
    return Lists(
        tf.reduce_all(tf.stack(matches)), counts, take(at_ids, end - at_ids),
        take(at_values, 4 * n), positive,
    )  # fmt: skip


def raw_bytes(strings, size):
    """The bytes of strings, filled up with 0: string [B] -> uint8 [B, size].

    TensorFlow 1.15 writes past the end of its memory where it is to decode wider numbers so.
    """
    return tf.raw_ops.DecodePaddedRaw(input_bytes=strings, fixed_length=size, out_type=tf.uint8)


def _alone(message):
    """The bytes of a message that holds `message` as its one field. string [...] -> int32 [...]."""
    size = tf.strings.length(message)
    # Of a double: an int32 would be rounded to a float to be compared.
    more = tf.raw_ops.Bucketize(input=tf.cast(size, tf.float64), boundaries=_LONGER)
    return 2 + size + more


def decode_any(serialized, widths, optional=()):
    """Reads some features of any serialized tf.train.Examples, to the letter of the format.

    Args:
        serialized: string [B].
        widths: {name of a feature: (tf.int64 or tf.float32, numbers that it must have)}; None for
            as many as there are.
        optional: names that a record may lack; it then has no numbers there.

    Returns:
        ({name: int64 or float32 [B, width], filled up with 0}, {name: int32 [B], how many of these
        are the record's}).

    Raises:
        tf.errors.InvalidArgumentError or DataLossError: when run, for a batch with a record that is
            no Example, or where one of these features is missing, is there twice, or does not hold
            just one list of its type and length. No message quotes the record.
    """
    good = []  # bool [] each, together in one assertion, which takes a dozen ops
    check = lambda each: good.append(tf.reduce_all(each))
    names = list(widths)
    is_int64 = [dtype == tf.int64 for dtype, _ in widths.values()]
    of_kind = [[1, 0] if kind else [0, 1] for kind in is_int64]
    least = [int(name not in optional) for name in names]

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

    # decode_proto takes the last of two messages where a protocol buffer puts them together, so
    # each message must be as long as the one that it holds makes it.
    _, (features,) = decode(serialized, "Example", "features")  # [B]
    check(tf.equal(tf.strings.length(serialized), _alone(features)))
    _, entries = decode_all(features, "Features", "feature", tf.string)  # [B, E]
    _, (keys, values) = decode(entries, "Features.FeatureEntry", "key", "value")  # [B, E]
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

    numbers, counts = {}, {}
    columns = zip(tf.unstack(lists, len(names), 1), tf.unstack(times, len(names), 1))
    for (name, (dtype, width)), (of_name, there) in zip(widths.items(), columns):
        kind = "Int64List" if dtype == tf.int64 else "FloatList"
        counts[name], found = decode_all(of_name, kind, "value", dtype)
        if width is not None:
            check(tf.equal(counts[name], there * width))
            if name in optional:
                found = tf.pad(found, [[0, 0], [0, width - tf.shape(found)[1]]])
            found = tf.reshape(found, [-1, width])
        numbers[name] = found
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(good), ["malformed"])]):
        same = lambda tensors: {name: tf.identity(x) for name, x in tensors.items()}
        return same(numbers), same(counts)
