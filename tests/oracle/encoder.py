"""Encodes records as the frames of a TFRecord file, with numpy alone.

Byte for byte what `records.encode` and TensorFlow's TFRecordWriter write. Every record is a row of
a matrix in which each of its parts has the width of the longest; what is not part of it is left
out at the end, for all records at once. `example_bytes` explains the layout.

B: records. F: fields. M: the most ids of a record.
"""

from typing import List, NamedTuple, Optional, Tuple

import numpy as np
from oracle import crc32c

from deepfm.records.schema import FRAME
from deepfm.records.wire import HEADER

FLOAT_LIST, INT64_LIST = 2, 3  # the numbers of these fields in a tf.train.Feature

_ROWS = 1 << 12  # records at once: they stay in the processor's cache


class _Part(NamedTuple):
    """A part of all records: uint8 [B, width], and which bytes of it belong to a record, bool."""

    content: np.ndarray
    there: np.ndarray


def encode(
    labels: np.ndarray,
    ids: np.ndarray,
    values: np.ndarray,
    counts: Optional[np.ndarray] = None,
    weights: Optional[np.ndarray] = None,
) -> Tuple[bytes, np.ndarray]:
    """Encodes a batch.

    Args:
        labels: float32 [B].
        ids: int64 [B, F], or with `counts` [B, M]; whatever fills up a row is ignored.
        values: float32, likewise.
        counts: int [B, F], the number of values of each field; None if each has one.
        weights: float32 [B]; None if examples are not weighted.

    Returns:
        (the frames, one after the other; bytes of each, int64 [B]).
    """
    frames, sizes = [b""], [np.zeros(0, np.int64)]
    for first in range(0, len(labels), _ROWS):
        some = slice(first, first + _ROWS)
        arrays = (None if x is None else x[some] for x in (labels, ids, values, counts, weights))
        for kept, found in zip((frames, sizes), _encode(*arrays)):
            kept.append(found)
    return b"".join(frames), np.concatenate(sizes)


def _encode(labels, ids, values, counts, weights):
    rows, width = ids.shape
    there = np.ones(ids.shape, bool)
    if counts is not None:
        there = np.arange(width) < counts.sum(axis=1)[:, np.newaxis]
    parts: List[_Part] = []
    if counts is not None:
        parts += _list(b"counts", INT64_LIST, _varints(counts, np.ones(counts.shape, bool)))
    parts += _list(b"ids", INT64_LIST, _varints(ids, there))
    parts += _list(b"label", FLOAT_LIST, _floats(labels[:, np.newaxis]))
    parts += _list(b"values", FLOAT_LIST, _floats(values, there))
    if weights is not None:
        parts += _list(b"weight", FLOAT_LIST, _floats(weights[:, np.newaxis]))
    total = sum(part.there.sum(axis=1) for part in parts)
    start = _by_size(total, lambda n: tag(1, n))
    sizes = total + start.there.sum(axis=1) + FRAME
    room = lambda width: _Part(np.zeros([rows, width], np.uint8), np.ones([rows, width], bool))
    parts = [room(HEADER), start, *parts, room(FRAME - HEADER)]
    content, there = (np.concatenate(x, axis=1) for x in zip(*parts))
    frames = content[there]
    _fill_in(frames, sizes)
    return frames.tobytes(), sizes


def _fill_in(frames, sizes):
    """Writes the lengths and checksums of frames, uint8, whose payloads are there."""
    ends = np.cumsum(sizes)
    starts = ends - sizes
    lengths = (sizes - FRAME).astype("<u8").view(np.uint8).reshape(-1, 8)
    frames[starts[:, np.newaxis] + np.arange(8)] = lengths
    for at, begins, stops in ((8, 0, 8), (None, HEADER, None)):
        stops = starts + stops if stops else ends - 4
        crc = crc32c.masked(frames, starts + begins, stops).astype("<u4")
        place = starts + at if at else stops
        frames[place[:, np.newaxis] + np.arange(4)] = crc.view(np.uint8).reshape(-1, 4)


def _varints(numbers, there):
    """Numbers as Base 128 varints, 7 bits in a byte, the lowest first."""
    x = numbers.astype(np.int64).view(np.uint64)
    most = max(int(x.max(initial=0, where=there)).bit_length() + 6, 7) // 7
    content = np.empty([*x.shape, most], np.uint8)
    kept = np.empty(content.shape, bool)
    for i in range(most):
        rest = x >> np.uint64(7 * i) if i else x
        more = rest > np.uint64(127)
        content[..., i] = (rest & np.uint64(127)) | (more.astype(np.uint8) << 7)
        kept[..., i] = there & (rest > 0) if i else there
    return _Part(content.reshape(len(x), -1), kept.reshape(len(x), -1))


def _floats(numbers, there=None):
    raw = np.ascontiguousarray(numbers, "<f4").view(np.uint8)  # [B, 4 M]
    return _Part(raw, np.ones(raw.shape, bool) if there is None else np.repeat(there, 4, axis=1))


def _list(name, field, numbers):
    """The Parts of a list: its header, and its numbers."""
    sizes = numbers.there.sum(axis=1)
    return _by_size(sizes, lambda n: list_header(name, field, n)), numbers


def _by_size(sizes, header):
    """The Part header(size) of each record."""
    sizes, of_row = np.unique(sizes, return_inverse=True)
    headers = [header(n) for n in sizes.tolist()]
    width = max(map(len, headers))
    content = np.frombuffer(b"".join(h.ljust(width, b"\0") for h in headers), np.uint8)
    there = np.arange(width) < np.array([len(h) for h in headers])[:, np.newaxis]
    return _Part(content.reshape(-1, width)[of_row], there[of_row])


def list_header(name: bytes, field: int, size: int) -> bytes:
    """What precedes `size` bytes of numbers in a tf.train.Features: entry, key, feature, list."""
    packed = tag(1, size) if size else b""
    return before_list(name, field, len(packed) + size) + packed


def before_list(name: bytes, field: int, size: int) -> bytes:
    """The header of a list of `size` bytes in a tf.train.Features: entry, key and feature."""
    feature = tag(field, size)
    entry = tag(1, len(name)) + name + tag(2, len(feature) + size) + feature
    return tag(1, len(entry) + size) + entry


def tag(field: int, size: int) -> bytes:
    """The header of `size` bytes of a protocol buffer's field: its number and the size."""
    head = bytearray([field << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes(head) + bytes([size])
