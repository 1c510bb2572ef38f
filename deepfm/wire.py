"""The bytes of a serialized tf.train.Example: what `records.encode` writes, and a reader of any.

`tf.io.parse_example` is fast but careless. Of a list in two parts, or of two lists in one feature,
it takes the first and drops the rest; of a feature that is there twice it takes the last; it passes
over bytes that belong to nothing; and it quotes what it refuses, on which session.run crashes (a
segmentation fault) where that is not UTF-8. So it gets only records whose every byte, apart from
the numbers, is as `records.encode` writes it. Others go through `decode_any`, which is slower.

B: records in a batch. F: fields. E: features of a record.
https://developers.google.com/protocol-buffers/docs/encoding
"""

import functools
from typing import List, NamedTuple

import tensorflow as tf

_FLOAT_LIST, _INT64_LIST = 2, 3  # the numbers of these fields in a tf.train.Feature
_MOST_ID_BYTES = 10


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


def _alone(message):
    """The bytes of a message that holds `message` as its one field. string [...] -> int32 [...]."""
    size = tf.strings.length(message)
    return 2 + size + tf.add_n([tf.cast(size >= 1 << 7 * n, tf.int32) for n in range(1, 5)])


def decode_any(serialized, widths):
    """Reads some features of any serialized tf.train.Examples, to the letter of the format.

    Args:
        serialized: string [B].
        widths: {name of a feature: (tf.int64 or tf.float32, numbers that it must have)}.

    Returns:
        {name: int64 or float32 [B, width]}.

    Raises:
        tf.errors.InvalidArgumentError or DataLossError: when run, for a batch with a record that is
            no Example, or where one of these features is missing, is there twice, or does not hold
            just one list of its type and length. No message quotes the record.
    """
    checks = []
    check = lambda good: checks.append(tf.debugging.Assert(tf.reduce_all(good), ["malformed"]))

    def decode(message, kind, *fields, dtype=tf.string):
        """(numbers of each field, values of each field): int32 [..., fields], [[..., numbers]]."""
        return tf.io.decode_proto(message, f"tensorflow.{kind}", fields, [dtype] * len(fields))

    # decode_proto takes the last of two messages where a protocol buffer puts them together, so
    # each message must be as long as the one that it holds makes it.
    _, (features,) = decode(serialized, "Example", "features")  # [B, 1]
    check(tf.equal(tf.strings.length(serialized), _alone(features[:, 0])))
    _, (entries,) = decode(features[:, 0], "Features", "feature")  # [B, E]
    _, entry = decode(entries, "Features.FeatureEntry", "key", "value")
    keys, values = (x[..., 0] for x in entry)  # [B, E]
    whole = tf.equal(tf.strings.length(entries), _alone(keys) + _alone(values))
    numbers = {}
    for name, (dtype, width) in widths.items():
        named = tf.equal(keys, name)
        check(tf.equal(tf.reduce_sum(tf.cast(named, tf.int32), axis=1), 1))
        check(whole | ~named)
        feature = tf.boolean_mask(values, named)  # [B]
        kind = "Int64List" if dtype == tf.int64 else "FloatList"
        field = "int64_list" if dtype == tf.int64 else "float_list"
        sizes, (found,) = decode(feature, "Feature", field)
        check(tf.equal(sizes[:, 0], 1))
        check(tf.equal(tf.strings.length(feature), _alone(found[:, 0])))
        sizes, (numbers[name],) = decode(found[:, 0], kind, "value", dtype=dtype)
        check(tf.equal(sizes, width))
    with tf.control_dependencies(checks):
        return {name: tf.reshape(x, [-1, widths[name][1]]) for name, x in numbers.items()}
