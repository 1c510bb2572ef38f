"""Decodes the Examples of many records at once, with numpy alone.

Records whose every byte, apart from the numbers, is as `encoder` writes it are found by their
lengths, as in `example_bytes.find_lists`; `wire` reads all others, one by one.

B: records. F: fields. M: the most ids of a record. A place is a byte of the data.
"""

from typing import Callable, List, NamedTuple, Optional, Sequence

import numpy as np
from oracle.encoder import FLOAT_LIST, INT64_LIST, list_header, tag

from deepfm.records import wire
from deepfm.records.schema import Schema

_SMALLEST_NORMAL = np.finfo(np.float32).tiny


class Batch(NamedTuple):
    """The numbers of records; rows are filled up with 0.

    Attributes:
        labels: float32 [B], 0 or 1.
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


def accepts(payloads: Sequence[bytes], schema: Schema, most_others: Optional[int] = None) -> bool:
    """Whether `decode` finds all of some Examples good."""
    cuts = np.cumsum([0, *map(len, payloads)])
    return decode(b"".join(payloads), cuts[:-1], cuts[1:], schema, most_others) is not None


def decode(
    data, starts: np.ndarray, ends: np.ndarray, schema: Schema, most_others: Optional[int] = None
) -> Optional[Batch]:
    """Decodes and checks the Examples data[start:end]; None if one breaks the schema.

    `wire.explain` says what is wrong with one, and `bad_record.find_refused` which ones are bad.

    Args:
        data: bytes.
        starts, ends: int64 [B].
        schema: Schema.
        most_others: None is returned, too, if more records than this are not as encoded, each of
            which takes 0.1 ms or more.
    """
    data = np.frombuffer(data if len(data) else b"\0", np.uint8)
    found = _find_lists(data, starts, ends, schema)
    good, rows = found.as_encoded, len(starts)
    others = {}
    if most_others is not None and rows - good.sum() > most_others:
        return None
    for i in np.flatnonzero(~good).tolist():
        others[i] = wire.lists(data[starts[i] : ends[i]].tobytes(), schema)
        if others[i] is None or not _fits(others[i], schema):
            return None
    width = max([*found.counts[good].sum(axis=1), *(len(x["ids"].int64s) for x in others.values())],
                default=0)  # fmt: skip
    width = width if schema.multi_valued else schema.field_size
    ids, values = np.zeros([rows, width], np.int64), np.zeros([rows, width], np.float32)
    labels, weights = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    counts = np.ones([rows, schema.field_size], np.int64)
    counts[good] = found.counts[good]
    there = np.arange(width) < counts.sum(axis=1)[:, np.newaxis]
    there[~good] = False
    ids[there], values[there] = found.ids, _floats(data, found.values[good], there[good])
    if schema.with_labels:
        labels[good] = _floats(data, found.labels[good], np.ones([good.sum(), 1], bool))
    if schema.with_weights:
        weights[good] = found.weights[good]
    for i, lists in others.items():
        n = len(lists["ids"].int64s)
        ids[i, :n], values[i, :n] = lists["ids"].int64s, lists["values"].floats
        counts[i] = lists["counts"].int64s if "counts" in lists else 1
        labels[i] = lists["label"].floats[0] if schema.with_labels else 0
        weights[i] = lists["weight"].floats[0] if "weight" in lists else 1
    labels, plain_weights = _normal(labels), _normal(weights)
    if not (
        np.isin(labels, (-1, 0, 1)).all()
        and np.isfinite(values).all()
        and (np.isfinite(weights) & (plain_weights >= 0)).all()
        and 0 <= ids.min(initial=0) <= ids.max(initial=0) < schema.limit
    ):
        return None
    return Batch(
        (labels > 0).astype(np.float32),
        ids,
        values,
        counts if schema.multi_valued else None,
        weights if schema.with_weights else None,
    )


def _fits(lists, schema):
    """Whether the lists of a record have the lengths that its counts and the schema ask for."""
    ids, counts = lists["ids"].int64s, [1] * schema.field_size
    if "counts" in lists:
        counts = lists["counts"].int64s
    for name in {"label", "weight"}.intersection(lists):
        if len(lists[name].floats) != 1:
            return False
    allowed = range(len(ids) + 1) if schema.multi_valued else (1,)
    return (
        len(counts) == schema.field_size
        and all(n in allowed for n in counts)
        and sum(counts) == len(ids) == len(lists["values"].floats)
    )


def _normal(numbers):
    """Numbers as TensorFlow's threads see them; see schema.normal."""
    return np.where(np.abs(numbers) < _SMALLEST_NORMAL, np.float32(0), numbers)


class _Lists(NamedTuple):
    """Where the numbers of records are.

    Attributes:
        as_encoded: bool [B]; what follows counts only where it is true.
        counts: int64 [B, F].
        ids: int64 [n], those of all records as encoded.
        labels, values: the places where they begin, int64 [B].
        weights: float32 [B].
    """

    as_encoded: np.ndarray
    counts: np.ndarray
    ids: np.ndarray
    labels: np.ndarray
    values: np.ndarray
    weights: np.ndarray


def _find_lists(data, starts, ends, schema) -> _Lists:
    rows, field_size = len(starts), schema.field_size
    weights, end_of_values = np.ones(rows, np.float32), ends
    if schema.weighted:
        header = list_header(b"weight", FLOAT_LIST, 4)
        size = len(header) + 4
        there = _match(data, ends - size, ends - starts, lambda n: header if n >= size else b"?")
        there &= ends - starts >= size
        end_of_values = ends - size * there
        weights[there] = _floats(data, ends[there] - 4, np.ones([there.sum(), 1], bool))

    # First the counts, then from these and the end of the values the label, then the ids.
    first = list_header(b"counts", INT64_LIST, field_size) if schema.multi_valued else b""
    head = lambda n: tag(1, _inside(n, lambda p: tag(1, p)) or 0) + first
    good = _match(data, starts, ends - starts, head)
    at_ids = starts + _of_each(ends - starts, lambda n: len(head(n)))
    counts = np.ones([rows, field_size], np.int64)
    if schema.multi_valued:
        counts[:] = _bytes(data, at_ids, field_size)
        good &= (counts < 128).all(axis=1)  # a byte each
        at_ids = at_ids + field_size
    n = counts.sum(axis=1)
    values = end_of_values - 4 * n
    header = lambda n: list_header(b"values", FLOAT_LIST, 4 * n)
    labels = values - _of_each(n, lambda n: len(header(n))) - 4
    good &= _match(data, labels + 4, n, header)
    before_label = list_header(b"label", FLOAT_LIST, 4)
    end_of_ids = labels - len(before_label)
    good &= _match(data, end_of_ids, n, lambda n: before_label)
    good &= end_of_ids >= at_ids
    header = lambda n: list_header(b"ids", INT64_LIST, n)
    inside = lambda n: _inside(n, header)
    room = np.where(good, end_of_ids - at_ids, 0)
    good &= _match(data, at_ids, room, lambda n: b"?" if inside(n) is None else header(inside(n)))
    size = _of_each(room, lambda n: inside(n) or 0)
    good, ids = _varints(data, end_of_ids - size, size, n, good)
    return _Lists(good, counts, ids, labels, values, weights)


def _inside(size: int, header: Callable[[int], bytes]) -> Optional[int]:
    """The p for which p bytes behind header(p) are `size` bytes; None if there is none."""
    for p in range(max(size - 40, 0), size + 1):
        if len(header(p)) + p == size:
            return p
    return None


def _of_each(keys, function):
    """function(key) of each key, int64 [B], called once for equal keys."""
    distinct, of_row = np.unique(keys, return_inverse=True)
    return np.array([function(key) for key in distinct.tolist()], np.int64)[of_row]


def _bytes(data, places, size):
    """The `size` bytes at each place; where the data end before, any others. uint8 [B, size]."""
    at = places[:, np.newaxis] + np.arange(size)
    return data[np.clip(at, 0, max(len(data) - 1, 0), out=at)]


def _match(data, places, keys, header):
    """Whether header(key) is at each place. bool [B]."""
    distinct, of_row = np.unique(keys, return_inverse=True)
    headers: List[bytes] = [header(key) for key in distinct.tolist()]
    width = max(map(len, headers), default=0)
    wanted = np.frombuffer(b"".join(x.ljust(width, b"\0") for x in headers), np.uint8)
    outside = np.arange(width) >= np.array([len(x) for x in headers])[:, np.newaxis]
    same = _bytes(data, places, width) == wanted.reshape(len(headers), width)[of_row]
    return (same | outside[of_row]).all(axis=1) & (places >= 0)


def _floats(data, places, there):
    """The float32s from each place on, as many as are there: places [B], there [B, M] -> [n]."""
    rows, columns = np.nonzero(there)
    # A view of every 4 bytes as a number; only indexing it makes a copy.
    numbers = np.ndarray([max(len(data) - 3, 0)], "<f4", data, 0, [1])
    return numbers[places[rows] + 4 * columns]


def _varints(data, places, sizes, numbers, good):
    """Decodes Base 128 varints, of records that are good.

    Args:
        data: uint8.
        places: where they begin, int64 [B].
        sizes: their bytes, int64 [B].
        numbers: how many there must be, int64 [B].
        good: bool [B].

    Returns:
        (good, without the records that do not hold as many; the varints of those that are).
    """
    arguments, which = (places, sizes, numbers), np.flatnonzero(good)
    places, sizes, numbers = (x[good] for x in arguments)
    ends = np.cumsum(sizes)
    content = data[np.arange(sizes.sum()) + np.repeat(places - (ends - sizes), sizes)]
    last = np.concatenate([[-1], np.flatnonzero(content < 128)])
    lengths = np.diff(last)
    of_records = np.searchsorted(last, ends) - np.searchsorted(last, ends - sizes)
    whole = (of_records == numbers) & (np.append(content, np.uint8(0))[ends - 1] < 128)
    if lengths.max(initial=0) > 10:
        record = np.searchsorted(ends, last[1:][lengths > 10], side="right")
        whole[np.minimum(record, len(whole) - 1)] = False
    if not whole.all():
        good = good.copy()
        good[which[~whole]] = False
        return _varints(data, *arguments, good)
    found = np.zeros(len(lengths), np.uint64)
    for i in range(lengths.max(initial=0)):
        some = lengths > i
        digits = content[last[:-1][some] + 1 + i] & np.uint8(127)
        found[some] |= digits.astype(np.uint64) << np.uint64(7 * i)
    return good, found.view(np.int64)
