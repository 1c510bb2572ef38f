"""A tf.train.Example in plain Python: slowly, but to the letter of the format
(https://developers.google.com/protocol-buffers/docs/encoding).

It accepts what `data/records.py` does, and says why not as TensorFlow's Python does.
"""

import contextlib
import struct
from typing import Container, Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

import numpy as np

from deepfm.records.schema import (
    NO_WEIGHT,
    Schema,
    Shape,
    explain_id,
    explain_width,
    is_weight,
    normal,
)

UNEXPLAINED = "not a plainly written tf.train.Example: a feature appears twice or in pieces"
_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)  # wire types
_BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3  # fields of a tf.train.Feature
_MALFORMED = "malformed protocol buffer"


class Feature(NamedTuple):
    """The numbers of a tf.train.Feature, which are of one kind; of strings, how many they are.

    `kind` is the number of its list's field; `plain` says whether it is there once, in one piece.
    """

    int64s: List[int] = []
    floats: List[float] = []
    strings: int = 0
    kind: Optional[int] = None
    plain: bool = False


_EMPTY = Feature([], [])
_SHOWN, _TYPES = 10, ("int64", "float", "bytes")  # features in a sentence, and their types
Features = Dict[str, Feature]


def numbers(serialized: bytes, schema: Schema) -> Optional[tuple]:
    """(label, ids, values, counts, weight) of an Example; None if it breaks the schema, or is
    ambiguous.

    A list of numbers may be packed or not, but may not end in a part without numbers, which
    TensorFlow's decoder refuses; a feature, a message or a list in two parts is refused, too.
    """
    kinds = {"ids": INT64_LIST, "counts": INT64_LIST, "values": FLOAT_LIST}
    kinds.update({"label": FLOAT_LIST} if schema.with_labels else {})
    kinds.update({"weight": FLOAT_LIST} if schema.with_weights else {})
    try:
        found = features_of(serialized, kinds)
    except ValueError:
        return None
    if schema.with_labels and not schema.weighted and "weight" in found:
        return None
    features = {name: found[name] for name in kinds if name in found}
    good = all(x.plain and x.kind == kinds[name] for name, x in features.items())
    there = set(kinds) - {"counts", "weight"} <= set(features)
    if not (good and there) or _explain_numbers(features, schema):
        return None
    counts = features["counts"].int64s if "counts" in features else [1] * schema.field_size
    label = normal(features["label"].floats[0]) > 0 if schema.with_labels else 0
    weight = features["weight"].floats[0] if "weight" in features else 1
    found = label, features["ids"].int64s, features["values"].floats, counts, weight
    return found if counts else None


def _alone(message):
    """Bytes of a message whose one field is `message`."""
    return len(tag(1, len(message))) + len(message)


def shape(serialized: bytes) -> Shape:
    """The Shape of an Example."""
    try:
        features = features_of(serialized)
    except ValueError:
        return Shape()
    counts = features.get("counts", _EMPTY).int64s
    width = len(counts or features.get("ids", _EMPTY).int64s)
    return Shape(width, bool(counts), "weight" in features)


def explain(serialized: bytes, schema: Schema) -> Optional[str]:
    """What is wrong with a serialized Example, and what was expected; None if nothing is."""
    try:
        features = features_of(serialized)
    except ValueError as error:
        return f"not a tf.train.Example ({error})"
    return _explain_schema(features, serialized) or _explain_numbers(features, schema)


def _explain_numbers(features, schema):
    """What is wrong with the numbers of an Example whose lists have the right types."""
    of = lambda name: features.get(name, _EMPTY)
    ids, values = of("ids").int64s, of("values").floats
    schema = schema._replace(pad=False)
    counts = of("counts").int64s or [1] * schema.field_size
    reason = _explain_counts(counts, schema)
    width = schema._replace(field_size=sum(counts))
    for name, found in (("ids", ids), ("values", values)):
        reason = reason or explain_width(len(found), width, name, found[:5])
    if reason:
        return reason
    if schema.with_labels:
        label = of("label").floats
        if of("label").int64s and not label:
            return "label is an int64, not a float; write it as a float (Spark: cast('float'))"
        if len(label) != 1 or normal(label[0]) not in (-1, 0, 1):
            return f"label {label} is not [0], [1] or [-1]"
        reason = "weight" in features and _explain_weights(features["weight"].floats, schema)
        if reason:
            return reason
    for value in values:
        if not np.isfinite(value):
            return f"value {value} is not a finite number"
    for feature_id in ids:
        reason = explain_id(feature_id, schema)
        if reason:
            return reason
    return None


def _explain_schema(features, serialized):
    """Which features an Example has, if it has no ids or no values, or of another type."""
    ids, values = (features.get(name, Feature(strings=1)) for name in ("ids", "values"))
    if not (ids.strings or ids.floats or values.strings or values.int64s):
        return None
    is_sequence = any(number == 2 for number, _, _ in _fields(serialized))
    shown = []
    for name, x in sorted(features.items()):
        kinds = [f"{n} {k}" for n, k in zip((len(x.int64s), len(x.floats), x.strings), _TYPES) if n]
        shown.append(f"{repr(name[:40])[1:-1]} ({' '.join(kinds) or 'empty'})")
    found = ", ".join(shown[:_SHOWN] + ["..."] * (len(shown) > _SHOWN)) or "none"
    found = f"a tf.train.SequenceExample with {found}" if is_sequence else found
    return (
        "expected the features label (float), ids (int64) and values (float), found "
        f"{found}; write them under these names and types"
    )


def _explain_weights(weights, schema):
    """What is wrong with the feature `weight` of a record."""
    if not schema.weighted:
        return (
            "has a weight, but by dataset.json, or without it by the first record, examples have "
            "none (train.py reads them with --example_weights, ignores them with "
            "--noexample_weights)"
        )
    if len(weights) != 1:
        return f"weight {weights[:5]} is not one number (a float)"
    return None if is_weight(weights[0]) else f"weight {weights[0]:g} {NO_WEIGHT}"


def _explain_counts(counts, schema):
    reason = explain_width(len(counts), schema, "counts", counts[:5])
    if not reason and min(counts) < 0:
        reason = f"counts hold {min(counts)}, which is negative"
    if not reason and not schema.multi_valued and set(counts) != {1}:
        other = next(n for n in counts if n != 1)
        reason = f"field {counts.index(other)} has {other} values (--multi_valued reads them)"
    return reason


def features_of(serialized: bytes, names: Optional[Container[str]] = None) -> Features:
    """The features of an Example, merged as protocol buffers merge what comes in parts.

    Args:
        serialized: the Example.
        names: the features that count; others are not looked into. None: all.

    Raises:
        ValueError: it is not one.
    """
    found, messages = {}, _messages(serialized, 1)
    alone = [_alone(message) for message in messages] == [len(serialized)]
    for entry in (entry for message in messages for entry in _messages(message, 1)):
        key, value = ((_messages(entry, i) or [b""])[-1] for i in (1, 2))
        name = _text(key) if names is None else key.decode("utf-8", "replace")
        if names is not None and name not in names:
            found[name] = _EMPTY
            continue
        feature = _feature(_messages(entry, 2))
        whole = alone and name not in found and len(entry) == _alone(key) + _alone(value)
        found[name] = feature._replace(plain=whole and feature.plain)  # the last of a key counts
    return found


def key(serialized: bytes) -> bytes:
    """The `key` of an Example; empty if it has none."""
    with contextlib.suppress(ValueError):  # it is no Example
        for entry in (entry for x in _messages(serialized, 1) for entry in _messages(x, 1)):
            if _messages(entry, 1)[-1:] == [b"key"]:
                lists = [x for value in _messages(entry, 2) for x in _messages(value, _BYTES_LIST)]
                return next((x for part in lists for x in _messages(part, 1)), b"")
    return b""


def _text(raw):
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(_MALFORMED) from error


def _feature(values):
    """The Feature of the messages that make it."""
    kind, parts = None, []
    for value in values:
        for number, wire_type, content in _fields(value):
            if wire_type == _BYTES and number in (_BYTES_LIST, FLOAT_LIST, INT64_LIST):
                parts = [*parts, content] if number == kind else [content]
                kind = number  # of several kinds the last counts
    if kind == _BYTES_LIST:
        return Feature([], [], sum(len(_messages(part, 1)) for part in parts), kind)
    lists = [x for part in parts for x in _fields(part) if x[0] == 1]
    plain = len(parts) == 1 and sum(map(len, values)) == _alone(parts[0])
    plain = plain and lists[-1:] != [(1, _BYTES, b"")]
    if kind == INT64_LIST:
        return Feature(sum((_int64s(part) for part in parts), []), [], 0, kind, plain)
    floats = sum((_floats(part) for part in parts), []) if kind == FLOAT_LIST else []
    return Feature([], floats, 0, kind, plain)


def _int64s(message):
    numbers = []
    for number, wire_type, content in _fields(message):
        if number == 1 and wire_type == _VARINT:
            numbers.append(content)
        elif number == 1 and wire_type == _BYTES:
            at = 0
            while at < len(content):
                found, at = _varint(content, at)
                numbers.append(found)
    return [x - (1 << 64) if x >> 63 else x for x in numbers]


def _floats(message):
    raw = b""
    for number, wire_type, content in _fields(message):
        if number == 1 and wire_type in (_FIXED32, _BYTES):
            if len(content) % 4:
                raise ValueError(_MALFORMED)
            raw += content
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def _messages(message, number) -> List[bytes]:
    """The contents of a message's fields of this number that are bytes."""
    return [x for i, wire_type, x in _fields(message) if i == number and wire_type == _BYTES]


def _fields(message) -> Iterator[Tuple[int, int, Union[int, bytes]]]:
    """Yields (number, wire type, content) of a message's fields; ValueError if it is none."""
    at = 0
    while at < len(message):
        number, wire_type, content, at = _field(message, at)
        if wire_type == _END_GROUP:
            raise ValueError(_MALFORMED)
        yield number, wire_type, content


def _field(message, at, depth=100):
    """(number, wire type, content, the place behind it) of the field at a place, within which there
    may be so many groups in each other."""
    key, at = _varint(message, at)
    number, wire_type = key >> 3, key & 7
    if not 0 < number < 1 << 29 or wire_type > _FIXED32:
        raise ValueError(_MALFORMED)
    if wire_type == _VARINT:
        return (number, wire_type, *_varint(message, at))
    if wire_type == _END_GROUP:
        return number, wire_type, b"", at
    if wire_type == _GROUP:
        while depth:
            other, kind, _, at = _field(message, at, depth - 1)
            if kind == _END_GROUP:
                if other != number:
                    raise ValueError(_MALFORMED)
                return number, wire_type, b"", at
        raise ValueError(_MALFORMED)
    size = {_FIXED64: 8, _FIXED32: 4}.get(wire_type)
    if size is None:
        size, at = _varint(message, at)
    if at + size > len(message):
        raise ValueError(_MALFORMED)
    return number, wire_type, message[at : at + size], at + size


def _varint(message, at):
    """(the uint64 at a place, the place behind it)."""
    number = 0
    for i in range(10):
        if at + i >= len(message):
            break
        number |= (message[at + i] & 127) << 7 * i
        if message[at + i] < 128:
            return number & (1 << 64) - 1, at + i + 1
    raise ValueError(_MALFORMED)


def write(label, ids, values, counts=None, weight=None, key=b"") -> bytes:
    """Serializes a tf.train.Example as `SerializeToString` does; for the arguments see codec."""
    int64s = lambda numbers: b"".join(_as_varint(int(x) & (1 << 64) - 1) for x in numbers)
    floats = lambda numbers: np.asarray(numbers, "<f4").tobytes()
    parts = [] if counts is None else [("counts", INT64_LIST, int64s(counts))]
    parts += [("ids", INT64_LIST, int64s(ids))]
    parts += [("key", _BYTES_LIST, key)] if key else []
    parts += [("label", FLOAT_LIST, floats([label]))]
    parts += [("values", FLOAT_LIST, floats(values))]
    parts += [] if weight is None else [("weight", FLOAT_LIST, floats([weight]))]
    field = lambda number, content: tag(number, len(content)) + content
    entries = (
        field(1, name.encode()) + field(2, field(kind, field(1, raw) if raw else b""))
        for name, kind, raw in parts
    )
    return field(1, b"".join(field(1, entry) for entry in entries))


def _as_varint(number):
    """A number from 0 to 2^64 - 1 in groups of 7 bits, the lowest first."""
    groups = bytearray()
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes(groups) + bytes([number])


def tag(field: int, size: int) -> bytes:
    """The header of `size` bytes of a protocol buffer's field: its number and the size."""
    return bytes([field << 3 | _BYTES]) + _as_varint(size)
