"""Reads one serialized tf.train.Example in plain Python: slowly, but to the letter of the format.

Accepts what `example_bytes.decode_any` does, and says why not as TensorFlow's Python does.
https://developers.google.com/protocol-buffers/docs/encoding
"""

import struct
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

import numpy as np

from deepfm.records.encoder import FLOAT_LIST, INT64_LIST, tag
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
_BYTES_LIST = 1  # as FLOAT_LIST
_MALFORMED = "malformed protocol buffer"


class Feature(NamedTuple):
    """The numbers of a tf.train.Feature, which are of one kind; of strings, how many they are."""

    int64s: List[int] = []
    floats: List[float] = []
    strings: int = 0


_EMPTY = Feature([], [])
_SHOWN, _TYPES = 10, ("int64", "float", "bytes")  # features in a sentence, and their types
Features = Dict[str, Feature]


def lists(serialized: bytes, schema: Schema) -> Optional[Features]:
    """The features of an Example that is unambiguous and has what the schema needs, else None.

    A list of numbers may be packed or not, but may not end in a part without numbers, which
    TensorFlow's decoder refuses; a feature, a message or a list in two parts is refused, too.
    """
    kinds = {"ids": INT64_LIST, "counts": INT64_LIST, "values": FLOAT_LIST}
    kinds.update({"label": FLOAT_LIST} if schema.with_labels else {})
    kinds.update({"weight": FLOAT_LIST} if schema.with_weights else {})
    try:
        features = _plain_lists(serialized, kinds, schema.with_labels and not schema.weighted)
    except ValueError:
        return None
    optional = {"counts", "weight"}
    return features if features is not None and set(kinds) - optional <= set(features) else None


def _plain_lists(serialized, kinds, refuse_weight):
    (features,) = _messages(serialized, 1) or [b""]
    if len(serialized) != _alone(features):
        return None
    found = {}
    for entry in _messages(features, 1):
        key, value = ((_messages(entry, i) or [b""])[-1] for i in (1, 2))
        name = key.decode("utf-8", "replace")
        if refuse_weight and name == "weight":
            return None
        if name not in kinds:
            continue
        if name in found or len(entry) != _alone(key) + _alone(value):
            return None
        messages = {kind: _messages(value, kind) for kind in (FLOAT_LIST, INT64_LIST)}
        if [len(x) for x in messages.values()] != [int(kind == kinds[name]) for kind in messages]:
            return None
        (numbers,) = messages[kinds[name]]
        parts = [(wire_type, part) for i, wire_type, part in _fields(numbers) if i == 1]
        if len(value) != _alone(numbers) or parts[-1:] == [(_BYTES, b"")]:
            return None
        found[name] = _feature(kinds[name], [numbers])
    return found


def _alone(message):
    """Bytes of a message whose one field is `message`."""
    return len(tag(1, len(message))) + len(message)


def shape(serialized: bytes) -> Shape:
    """The Shape of an Example."""
    try:
        features = read(serialized)
    except ValueError:
        return Shape()
    counts = features.get("counts", _EMPTY).int64s
    width = len(counts or features.get("ids", _EMPTY).int64s)
    return Shape(width, bool(counts), "weight" in features)


def explain(serialized: bytes, schema: Schema) -> Optional[str]:
    """What is wrong with a serialized Example, and what was expected; None if nothing is."""
    try:
        features = read(serialized)
    except ValueError as error:
        return f"not a tf.train.Example ({error})"
    reason = _explain_schema(features, serialized)
    if reason:
        return reason
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
    kinds = {name: (len(x.int64s), len(x.floats), x.strings) for name, x in features.items()}
    shown = [
        f"{name[:40]} ({' '.join(f'{n} {k}' for n, k in zip(kinds[name], _TYPES) if n) or 'empty'})"
        for name in sorted(features)
    ]
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


def read(serialized: bytes) -> Features:
    """The features of an Example, merged as protocol buffers merge what comes in parts.

    Raises:
        ValueError: it is not one.
    """
    found = {}
    for features in _messages(serialized, 1):
        for entry in _messages(features, 1):
            key = _text((_messages(entry, 1) or [b""])[-1])
            found[key] = _EMPTY  # the last entry of a key counts
            kind, parts = None, []
            for value in _messages(entry, 2):
                for number, wire_type, content in _fields(value):
                    if wire_type == _BYTES and number in (_BYTES_LIST, FLOAT_LIST, INT64_LIST):
                        parts = [*parts, content] if number == kind else [content]
                        kind = number  # of several kinds the last counts
            found[key] = _feature(kind, parts)
    return found


def _text(raw):
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(_MALFORMED) from error


def _feature(kind, parts):
    if kind == _BYTES_LIST:
        return Feature([], [], sum(len(_messages(part, 1)) for part in parts))
    if kind == INT64_LIST:
        return Feature(sum((_int64s(part) for part in parts), []), [])
    return Feature([], sum((_floats(part) for part in parts), []) if kind == FLOAT_LIST else [])


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


def _field(message, at):
    """(number, wire type, content, the place behind it) of the field at a place."""
    key, at = _varint(message, at)
    number, wire_type = key >> 3, key & 7
    if not 0 < number < 1 << 29 or wire_type > _FIXED32:
        raise ValueError(_MALFORMED)
    if wire_type == _VARINT:
        return (number, wire_type, *_varint(message, at))
    if wire_type == _END_GROUP:
        return number, wire_type, b"", at
    if wire_type == _GROUP:
        while True:
            other, kind, _, at = _field(message, at)
            if kind == _END_GROUP:
                if other != number:
                    raise ValueError(_MALFORMED)
                return number, wire_type, b"", at
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
