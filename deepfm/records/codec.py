"""The codec: decodes and encodes records, a block at a time.

The library of csrc/ does it (library.py). Where there is none, plain Python does as much for a few
records: `tfrecord` for frames, `wire` for tf.train.Examples, `libsvm_text` for lines.

B: records. F: fields. M: the most ids of a record. A place is a byte of the data.
"""

import collections
import ctypes
import functools
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from deepfm.errors import BadInput
from deepfm.records import library, libsvm_text, text_blocks, tfrecord, wire
from deepfm.records.raw.fingerprint import fingerprint64
from deepfm.records.schema import Schema

MOST = library.MOST
_slow = collections.Counter()  # how many it has


class Batch(NamedTuple):
    """The numbers of records; rows are filled up with 0.

    Attributes:
        labels: float32 [B], 0 or 1; of lines -1 where there is a minus sign.
        ids: int64 [B, M], M = F if records have no counts.
        values: float32 [B, M].
        counts: int64 [B, F]; None unless the schema is multi-valued.
        weights: float32 [B]; None unless the schema has weights.
    """

    labels: np.ndarray
    ids: np.ndarray
    values: np.ndarray
    counts: Optional[np.ndarray]
    weights: Optional[np.ndarray]


class _Schema(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "field_size", "limit", "id_offset", "hash_buckets", "pad", "multi_valued",
            "named_fields", "with_labels", "weighted", "num_ranges",
        )
    ] + [("ranges", ctypes.c_void_p)]  # fmt: skip


class _Arrays(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p) for name in (*Batch._fields, "text", "key_starts", "key_ends")
    ]


def _pointer(array):
    return None if array is None else array.ctypes.data


@functools.lru_cache(maxsize=16)
def _schema(schema):
    """(a Schema for the library, the memory that it points to)."""
    ranges = sorted((*pair, field) for field, pair in enumerate(schema.field_ids or ()))
    memory = np.array(ranges or [(0, 0, 0)], np.int64)
    numbers = [int(getattr(schema, name)) for name, _ in _Schema._fields_[:9]]
    return _Schema(*numbers, len(ranges), _pointer(memory)), memory


def _room(rows, pairs, schema):
    """Arrays for records: (labels, ids, values, counts, weights), where ids and values are flat."""
    return Batch(
        np.empty(rows, np.float32),
        np.empty(pairs, np.int64),
        np.empty(pairs, np.float32),
        np.empty([rows, schema.field_size], np.int64) if schema.multi_valued else None,
        np.empty(rows, np.float32) if schema.with_weights else None,
    )


def _batch(found, rows, pairs, schema):
    """The Batch of `rows` records, whose `pairs` ids and values are flat."""
    labels, ids, values, counts, weights = (None if x is None else x[:rows] for x in found)
    ids, values = found.ids[:pairs], found.values[:pairs]
    if counts is None:
        shape = rows, schema.field_size
        return Batch(labels, ids.reshape(shape), values.reshape(shape), counts, weights)
    lengths = counts.sum(axis=1)
    return Batch(labels, *in_rows(lengths, lengths.max(initial=0), ids, values), counts, weights)


def in_rows(lengths: np.ndarray, width: int, *flat: np.ndarray) -> List[np.ndarray]:
    """Rows, [B, width] and filled up with 0, of numbers that lie one row after the other."""
    there = np.arange(width) < lengths[:, np.newaxis]
    rows = [np.zeros(there.shape, numbers.dtype) for numbers in flat]
    for to, numbers in zip(rows, flat):
        to[there] = numbers
    return rows


def accepts(payloads: Sequence[bytes], schema: Schema) -> bool:
    """Whether `decode` finds all of some Examples good."""
    cuts = np.cumsum([0, *map(len, payloads)])
    return decode(b"".join(payloads), cuts[:-1], cuts[1:], schema) is not None


def decode(data: bytes, starts: np.ndarray, ends: np.ndarray, schema: Schema) -> Optional[Batch]:
    """Decodes and checks the Examples data[start:end]; None if one breaks the schema.

    `wire.explain` says what is wrong with one, and `schema.find_refused` which ones are bad.
    starts, ends: int64 [B].
    """
    rows = len(starts)
    if not library.load():
        _count("decodes", rows)
        found = (wire.numbers(data[a:b], schema) for a, b in zip(starts.tolist(), ends.tolist()))
        return _slowly(found, schema)
    starts, ends = (np.ascontiguousarray(x, np.int64) for x in (starts, ends))
    if rows and (starts.min() < 0 or ends.max() > len(data) or (starts > ends).any()):
        return None
    # An id takes a byte, a value 4.
    pairs = int((ends - starts).sum()) // 5 if schema.multi_valued else 0
    pairs = pairs or rows * schema.field_size
    room, used = _room(rows, pairs, schema), ctypes.c_int64()
    to = _Arrays(*map(_pointer, room))
    bad = library.call("deepfm_decode", data, starts, ends, rows, _schema(schema)[0], to, used)
    return None if bad >= 0 else _batch(room, rows, used.value, schema)


def decode_lines(text: bytes, schema: Schema) -> Optional[Batch]:
    """Decodes and checks whole lines of LibSVM or LibFFM text; None if one breaks the schema.

    Lines without a record are passed over. `libsvm_text.explain_line` says what is wrong with a
    line, and `schema.find_refused` which ones are bad.
    """
    if not library.load():
        lines = [line for line in text.split(b"\n") if text_blocks.without_comment(line).strip()]
        _count("decodes", len(lines))
        return _slowly((libsvm_text.numbers(line, schema) for line in lines), schema)
    rows = text_blocks.newlines(text) + 1
    # A pair takes a blank, an id, a colon and a value.
    pairs = len(text) // 4 if schema.multi_valued else rows * schema.field_size
    room = _room(rows, pairs, schema)
    to, made, used = _Arrays(*map(_pointer, room)), ctypes.c_int64(), ctypes.c_int64()
    bad = library.call("deepfm_decode_lines", text, len(text), _schema(schema)[0], to, made, used)
    return None if bad >= 0 else _batch(room, made.value, used.value, schema)


def _count(what, rows):
    """Counts records of which plain Python decodes or encodes only a few."""
    _slow[what] += rows
    if _slow[what] > MOST:
        raise BadInput(
            f"without the compiled codec, a process {what} at most {MOST} records; "
            f"{library.ADVICE}, and for Spark zip the code anew (scripts/zip_for_spark.py)."
        )


def _slowly(records: Iterator, schema) -> Optional[Batch]:
    """The Batch of records that plain Python has decoded; None if one of them is bad."""
    rows = []
    for record in records:
        if record is None:
            return None
        rows.append(record)
    labels, ids, values, counts, weights = zip(*rows) if rows else ([],) * 5
    room = _room(len(rows), sum(map(len, ids)), schema)
    for to, numbers in zip(room, (labels, sum(ids, []), sum(values, []), counts, weights)):
        if to is not None and len(rows):
            to[:] = numbers
    return _batch(room, len(rows), len(room.ids), schema)


def encode(
    labels: np.ndarray,
    ids: np.ndarray,
    values: np.ndarray,
    counts: Optional[np.ndarray] = None,
    weights: Optional[np.ndarray] = None,
    keys: Optional[Tuple[bytes, np.ndarray, np.ndarray]] = None,
) -> Tuple[bytes, np.ndarray]:
    """Encodes a batch as the frames of a TFRecord file.

    Byte for byte what `tf.train.Example.SerializeToString` and TensorFlow's TFRecordWriter write.

    Args:
        labels: float32 [B].
        ids: int64 [B, F], or with `counts` [B, M]; whatever fills up a row is ignored.
        values: float32, likewise.
        counts: int [B, F], the number of values of each field; None if each has one.
        weights: float32 [B]; None if examples are not weighted.
        keys: (text, int64 [B], int64 [B]): text[start:end] is the key of each, empty for none.

    Returns:
        (the frames, one after the other; bytes of each, int64 [B]).
    """
    types = np.float32, np.int64, np.float32, np.int64, np.float32
    arrays = labels, ids, values, counts, weights
    batch = Batch(
        *(x if x is None else np.ascontiguousarray(x, t) for x, t in zip(arrays, types))
    )  # fmt: skip
    rows, width = batch.ids.shape
    if not library.load():
        _count("encodes", rows)
        return _encode_slowly(batch, keys)
    fields = 0 if counts is None else counts.shape[1]
    # Ids and counts take up to 10 bytes, values 4; all names, lengths, label and weight below 256.
    room = rows * (tfrecord.FRAME + 256 + 10 * fields + 14 * width)
    text, *places = keys or (None, None, None)
    if keys:
        places = [np.ascontiguousarray(x, np.int64) for x in places]
        room += int((places[1] - places[0]).sum())
    frames, sizes = np.empty(room, np.uint8), np.empty(rows, np.int64)
    address = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p)
    given = _Arrays(*map(_pointer, batch), address, *map(_pointer, places))
    bad = library.call("deepfm_encode", given, rows, width, fields, frames, room, sizes)
    if bad >= 0:
        raise ValueError(f"row {bad} has other counts than ids")
    return frames[room - sizes.sum() :].tobytes(), sizes


def _encode_slowly(batch, keys):
    frames = []
    text, *places = keys or (b"", *2 * [np.zeros(len(batch.labels), np.int64)])
    keys = (text[a:b] for a, b in zip(*places))
    for label, ids, values, *more in zip(*(x for x in batch if x is not None)):
        counts = more[0] if batch.counts is not None else None
        weight = more[-1] if batch.weights is not None else None
        n = len(ids) if counts is None else counts.sum()
        row = wire.write(label, ids[:n], values[:n], counts, weight, next(keys))
        frames.append(tfrecord.framed(row))
    return b"".join(frames), np.array([len(frame) for frame in frames], np.int64)


def scan(data: bytes) -> Tuple[np.ndarray, np.ndarray, int]:
    """The good frames of a TFRecord file at the beginning of data.

    Returns:
        (starts, ends int64 [n]; why the next one is none: CUT_OFF, which may be because nothing
        follows, CORRUPT or ABSURD_LENGTH).
    """
    if not library.load():
        return tfrecord.scan(data)
    room, why = len(data) // tfrecord.FRAME + 1, ctypes.c_int64()
    starts, ends = np.empty(room, np.int64), np.empty(room, np.int64)
    n = library.call("deepfm_scan", data, len(data), starts, ends, room, why)
    return starts[:n], ends[:n], why.value


def next_header(data: bytes, at: int = 0) -> int:
    """The first place from `at` on where a frame's header may begin; -1 if there is none."""
    if library.load():
        return library.call("deepfm_next_header", data, len(data), at)
    return next((i for i in range(at, len(data)) if tfrecord.is_header(data[i : i + 12])), -1)


def keys(data: bytes, starts: np.ndarray, ends: np.ndarray) -> List[bytes]:
    """The `key` of each Example data[start:end], int64 [B] each; empty where there is none."""
    if not library.load():
        return [wire.key(data[a:b]) for a, b in zip(starts.tolist(), ends.tolist())]
    starts, ends = (np.ascontiguousarray(x, np.int64) for x in (starts, ends))
    found = np.empty([2, len(starts)], np.int64)
    library.call("deepfm_keys", data, starts, ends, len(starts), found[0], found[1])
    return [data[a:b] for a, b in zip(*found.tolist())]


def fingerprints(text: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """FarmHash's Fingerprint64 of each text[start:end]: int64 [n] -> uint64 [n]."""
    if not library.load():
        found = [fingerprint64(text[a:b]) for a, b in zip(starts.tolist(), ends.tolist())]
        return np.array(found, np.uint64)
    starts, ends = np.ascontiguousarray(starts, np.int64), np.ascontiguousarray(ends, np.int64)
    found = np.empty(len(starts), np.uint64)
    library.call("deepfm_fingerprints", text, starts, ends, len(starts), found)
    return found


def number_lines(numbers: np.ndarray) -> str:
    """The text of numbers, each as "%.9g" on a line of its own: float32 [n] -> str."""
    if not library.load():
        return "%.9g\n" * len(numbers) % tuple(numbers.tolist())
    numbers = np.ascontiguousarray(numbers, np.float32)
    text = np.empty(16 * len(numbers), np.uint8)
    size = library.call("deepfm_lines", numbers, len(numbers), text)
    return text[:size].tobytes().decode("ascii")
