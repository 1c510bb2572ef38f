"""Text whose pairs name their fields: LibFFM's `label field:id:value ...`, or LibSVM with a map.

TensorFlow only decodes `label id:value ...`. So the fields of a LibFFM line are blanked out, in a
whole block of text at once, and kept as numbers beside it. String ids are taken out of the text in
the same way, to be hashed.
"""

import json
import re
from typing import List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from deepfm.errors import BadInput

_COLON, _ZERO, _NINE, _BLANK = (ord(x) for x in ":09 ")
_DIGITS = 6  # at most, in the number of a field


def take(
    text: bytes, with_fields: bool, with_ids: bool
) -> Optional[Tuple[bytes, Sequence[int], List[bytes]]]:
    """Takes fields, string ids, or both out of lines `label [field:]id:value ...`.

    Args:
        text: whole lines.
        with_fields: whether pairs begin with a field.
        with_ids: whether ids are strings.

    Returns:
        (the rest, which TensorFlow can decode; the field of each pair, int32 [n], empty without
        fields; n ids, empty if ids are numbers, which stay in the text), or None if a pair is
        malformed.
    """
    if not (with_fields or with_ids):
        return text, [], []
    text = re.sub(rb"#[^\n]*", b"", text) if b"#" in text else text
    characters = np.frombuffer(text, np.uint8).copy()
    parts = 2 if with_fields else 1  # colons in a pair
    marks = np.flatnonzero((characters <= _BLANK) | (characters == _COLON))
    colons = np.flatnonzero(characters[marks] == _COLON)  # among the marks
    if len(colons) % parts or (len(colons) and not colons[0]):
        return None
    colons = colons.reshape(-1, parts)
    # The colons of a pair follow each other, with a blank before them and the next pair.
    if (np.diff(colons) != 1).any() or (np.diff(colons[:, 0]) <= parts).any():
        return None
    starts, colons = marks[colons[:, 0] - 1] + 1, marks[colons]  # in the text
    fields, ids = [], []
    if with_fields:
        fields = _numbers(characters, starts, colons[:, 0])
        if fields is None:
            return None
        starts = colons[:, 0] + 1
    if with_ids:
        ends = colons[:, -1]
        if (starts == ends).any():
            return None
        ids = [text[a:b] for a, b in zip(starts.tolist(), ends.tolist())]
        _blank(characters, starts, ends)
        characters[ends - 1] = _ZERO
    return characters.tobytes(), fields, ids


def _numbers(characters, starts, ends):
    """Blanks out characters[start : end + 1]; returns the numbers in [start:end], None if bad."""
    lengths = ends - starts
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= _DIGITS:
        return None
    numbers = np.zeros(len(starts), np.int32)
    for i in range(lengths.max() if len(lengths) else 0):
        inside = lengths > i
        where = starts if inside.all() else starts[inside]
        digits = characters[where + i]
        if (digits < _ZERO).any() or (digits > _NINE).any():
            return None
        numbers[inside] = numbers[inside] * 10 + (digits - _ZERO)
    _blank(characters, starts, ends + 1)
    return numbers


def _blank(characters, starts, ends):
    """Overwrites each characters[start:end] with blanks."""
    lengths = ends - starts
    for i in range(lengths.max() if len(lengths) else 0):
        characters[starts[lengths > i] + i] = _BLANK


def num_fields(text: bytes) -> int:
    """The largest field in a block of LibFFM text + 1; malformed lines do not count."""
    taken = take(text, with_fields=True, with_ids=False)
    if taken is not None:
        return int(taken[1].max(initial=-1)) + 1
    # A line is bad; look at the lines one by one.
    return max(
        (num_fields(line + b"\n") for line in text.splitlines() if text != line + b"\n"), default=0
    )


def place(rows, fields, ids, values, num_rows, schema):
    """Puts each pair in the place of its field, wherever it is in the line.

    Args:
        rows: int32 [n], ascending, the record of each pair.
        fields: int32 [n].
        ids: int64 [n].
        values: float32 [n].
        num_rows: int32 [], B.
        schema: records.Schema. Unless it is multi-valued, a field has at most one value, and a
            missing one becomes id 0, value 0, so that no pair may have id 0.

    Returns:
        (ids int64 [B, F], values float32 [B, F]); if multi-valued, ids and values [B, M], padded
        with 0, and counts int32 [B, F].

    Raises:
        tf.errors.InvalidArgumentError: when run, if a pair has no place.
    """
    size = schema.field_size
    inside = tf.reduce_all((fields >= 0) & (fields < size))
    with tf.control_dependencies([tf.debugging.Assert(inside, ["field"])]):
        slots = rows * size + fields
    pairs = slots, ids, values
    in_order = tf.reduce_all(slots[1:] >= slots[:-1])

    def sort():
        order = tf.argsort(slots, stable=True)
        return tuple(tf.gather(x, order) for x in pairs)

    slots, ids, values = tf.cond(in_order, lambda: tuple(map(tf.identity, pairs)), sort)
    if schema.multi_valued:
        counts = tf.math.bincount(slots, minlength=num_rows * size)
        counts = tf.reshape(counts, [-1, size])
        lengths = tf.reduce_sum(counts, axis=1)  # [B]
        column = tf.range(tf.size(slots)) - tf.gather(tf.cumsum(lengths, exclusive=True), rows)
        where = tf.stack([rows, column], axis=1)
        shape = tf.stack([num_rows, tf.maximum(tf.reduce_max(lengths), 0)])  # no rows: max < 0
        return tf.scatter_nd(where, ids, shape), tf.scatter_nd(where, values, shape), counts
    checks = [
        tf.debugging.Assert(tf.reduce_all(slots[1:] > slots[:-1]), ["a field has two values"]),
        tf.debugging.assert_positive(ids),
    ]
    with tf.control_dependencies(checks):
        where, shape = slots[:, tf.newaxis], (num_rows * size)[tf.newaxis]
    width = [-1, size]
    return tuple(tf.reshape(tf.scatter_nd(where, x, shape), width) for x in (ids, values))


def fields_of(ids, ranges: Tuple[Tuple[int, int], ...]):
    """The field whose id range holds each id: int64 [n] -> int32 [n]; -1 if there is none."""
    order = sorted(range(len(ranges)), key=lambda i: ranges[i])
    begins, ends = (tf.constant([ranges[i][j] for i in order], tf.int64) for j in (0, 1))
    found = tf.searchsorted(begins, ids, side="right") - 1
    inside = (found >= 0) & (ids < tf.gather(ends, tf.maximum(found, 0)))
    return tf.where(
        inside, tf.gather(tf.constant(order), tf.maximum(found, 0)), -tf.ones_like(found)
    )


def read_map(path: str) -> Tuple[Tuple[int, int], ...]:
    """Reads fields.json: {"fields": [{"name": "site", "first_id": 14, "last_id": 2065}, ...]}.

    Returns:
        ((first id, last id + 1), ...) for each field, in order.

    Raises:
        BadInput: it is not such a file, or two fields share an id.
    """
    try:
        with tf.io.gfile.GFile(path, "rb") as f:
            found = json.loads(f.read().decode())["fields"]
        ranges = []
        for field in found:
            bounds = field["first_id"], field["last_id"]
            if not all(type(x) is int for x in bounds) or not 0 <= bounds[0] <= bounds[1] < 1 << 62:
                raise ValueError(f"field {len(ranges)} has ids from {bounds[0]} to {bounds[1]}")
            ranges.append((bounds[0], bounds[1] + 1))
        if not ranges:
            raise ValueError("it has no fields")
        order = sorted(range(len(ranges)), key=lambda i: ranges[i])
        for one, other in zip(order, order[1:]):
            if ranges[other][0] < ranges[one][1]:
                raise ValueError(f"fields {one} and {other} share id {ranges[other][0]}")
    except (tf.errors.OpError, OSError) as error:
        raise BadInput(f"--fields={path}: cannot be read ({error}).") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise BadInput(
            f"--fields={path}: is not a field map ({reason}); expected "
            '{"fields": [{"name": "site", "first_id": 14, "last_id": 2065}, ...]}.'
        ) from error
    return tuple(ranges)
