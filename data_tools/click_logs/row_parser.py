"""Parses raw rows to one number per cell, a block at a time and without looping over rows.

A cell's number is its key: equal cells of a field have equal keys. The key of a text of up to 8
bytes is its bytes as a big-endian number; LONG stands for any longer text, which is kept beside it.
MISSING is an empty cell. The key of an integer or a bucket is its two's complement with the sign
bit flipped, so these sort like numbers; that of a float64 is its bits, the sign bit flipped, or all
of a negative one. That of a hash is the index of its bucket + 1.

B: rows of a block. F: fields.
"""

import itertools
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from data_tools.tables import blocks
from data_tools.tables.blocks import BadRows, numpy_of, quoted
from deepfm.records import codec
from deepfm.records.raw import cells as rules
from deepfm.records.raw import feature_map
from deepfm.records.raw.column_kinds import (
    BUCKETS,
    CATEGORY,
    HASH,
    LABEL,
    LIST,
    NUMBER,
    RANGED,
    WEIGHT,
    Column,
)
from deepfm.records.schema import NO_WEIGHT, is_weight

Key = Union[int, bytes]  # of a cell, or the text of a LONG one
TIME = "time"  # a kind of column, only to divide rows
MISSING, LONG = 0, 2**64 - 1  # UTF-8 text never has the byte 255
ZERO = 1 << 63  # the key of the integer 0
_SIGN = np.uint64(ZERO)
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)  # the first n bytes of a cell


class Layout(NamedTuple):
    """What is read of a row, in the order of the cells.

    Attributes:
        first: the Columns of the label, the weight and the key, as far as there are such.
        columns: the Column of each field.
        by: one more, of kind TIME or HASH, by whose cells rows are divided; () for none.
        missing: texts of up to 8 bytes that stand for an empty cell.
    """

    first: Tuple[Column, ...]
    columns: Tuple[Column, ...]
    by: Tuple[Column, ...] = ()
    missing: Tuple[str, ...] = ()


class Members(NamedTuple):
    """The categories in the cells of a field of lists; n of all rows.

    Attributes:
        lengths: int64 [B], how many each cell has.
        keys: uint64 [n].
        long: (int64 [m] indices, m texts) of those that are LONG.
        weights: float32 [n].
    """

    lengths: np.ndarray
    keys: np.ndarray
    long: Tuple[np.ndarray, List[bytes]]
    weights: np.ndarray


class Rows(NamedTuple):
    """The rows of a block.

    Attributes:
        starts: int64 [B], the byte of the file where each begins; in Parquet its number.
        labels: float32 [B], 0 or 1; 0 if the file has no labels.
        keys: uint64 [F, B]; of a field of lists only whether a cell is MISSING. One more row is of
            the column by which rows are divided.
        long: {field: (int64 [n] rows, n texts)} for the cells that are LONG.
        lists: {field: Members}.
        weights: float32 [B]; None if rows have none.
        names: (text, int64 [B], int64 [B]): text[start:end] is the key of each row; None: no keys.
    """

    starts: np.ndarray
    labels: np.ndarray
    keys: np.ndarray
    long: Dict[int, Tuple[np.ndarray, List[bytes]]]
    lists: Dict[int, Members] = {}
    weights: Optional[np.ndarray] = None
    names: Optional[Tuple[bytes, np.ndarray, np.ndarray]] = None


def parse(block, layout: Layout) -> Rows:
    """The Rows of a block whose cells are texts; raises BadRows if one is bad."""
    text, starts, ends = block.texts()
    padded = np.frombuffer(text + bytes(8), np.uint8)
    labels, weights, names = np.zeros(len(block), np.float32), None, None
    for column, begin, end in zip(layout.first, starts, ends):
        if column.kind == LABEL:
            labels = _labels(text, padded, begin, end, column, layout.missing)
        elif column.kind == WEIGHT:
            weights = blocks.weights(blocks.numbers(text, begin, end))
        else:
            names = text, begin, end
    starts, ends = starts[len(layout.first) :], ends[len(layout.first) :]
    # A view of every 8 bytes of the text as a number; only indexing it makes a copy.
    words = np.ndarray([len(text) + 1], "<u8", padded, 0, [1])
    keys = words[starts]  # [F, B]
    keys &= _MASKS[np.minimum(ends - starts, 8)]
    if layout.missing:
        markers = [int.from_bytes(mark.encode(), "little") for mark in layout.missing]
        there = ~(np.isin(keys, np.array(markers, np.uint64)) & (ends - starts <= 8))
        ends = np.where(there, ends, starts)
        keys *= there
    columns, lists = (*layout.columns, *layout.by), {}
    like = lambda field: columns[field]._replace(name="")
    for column, which in itertools.groupby(range(len(columns)), like):  # consecutive fields
        run = list(which)
        cells = slice(run[0], run[-1] + 1)
        if column.kind == LIST:
            for field in run:
                lists[field] = _members(column, text, starts[field], ends[field])
                keys[field] = lists[field].lengths > 0
        else:
            keys[cells] = _keys(column, text, keys[cells], starts[cells], ends[cells])
    long = _long(text, starts, ends - starts, columns)
    return Rows(block.starts, labels, keys, long, lists, weights, names)


def _labels(text, characters, starts, ends, column, missing):
    if not column.positive:
        labels = characters[starts] - np.uint8(ord("0"))
        if not ((ends - starts != 1).any() or (labels > 1).any()):
            return labels.astype(np.float32)
    read = lambda x: label_of(x, column, missing)
    return blocks.each(text, starts, ends, read, np.float32)


def label_of(text: str, column: Column, missing: Sequence[str]) -> Optional[float]:
    """The label that a text says, 0 or 1; None if it says none."""
    number, positive = rules.number(text), column.positive
    if not text or text in missing or not positive and number not in (0, 1):
        return None
    if not positive:
        return number
    same = number is not None and number in map(rules.number, positive)
    return float(same or text in positive)


def _keys(column, text, first, starts, ends):
    """The keys of cells.

    Args:
        column: any Column of these cells; not of kind INTEGER, which became BUCKETS or SCALED.
        text: of the block.
        first: uint64, the first 8 bytes of each cell, little-endian.
        starts, ends: where in the text the cells are.
    """
    if column.kind == CATEGORY:
        return np.where(ends - starts > 8, np.uint64(LONG), first.byteswap())
    found = _of_distinct(_KEYS_OF.get(column.kind, _moments), column, text, first, starts, ends)
    if column.kind == TIME and (found == MISSING).any():
        raise BadRows
    return found


def _of_distinct(keys_of, column, text, keys, starts, ends):
    """The keys of cells by those of the distinct ones, MISSING for an empty one.

    Args:
        keys_of: (column, text, starts, ends) -> uint64 keys of cells that are not empty.
    """
    import pyarrow as pa

    there, found = ends > starts, np.full(keys.shape, MISSING, np.uint64)
    starts, sizes = starts[there], (ends - starts)[there]
    # Many are the same, and those of up to 8 bytes have the same key.
    alone = ~np.arange(len(starts), dtype=np.uint64)
    cells = pa.array(np.where(sizes > 8, alone, keys[there])).dictionary_encode()
    codes, which = numpy_of(cells.indices, np.int32), np.empty(len(cells.dictionary), np.int64)
    which[codes] = np.arange(len(codes))
    starts, sizes = starts[which], sizes[which]
    found[there] = keys_of(column, text, starts, starts + sizes)[codes]
    return found


def _integers(column, text, starts, ends):
    found = blocks.integers(text, starts, ends)
    if column.kind == BUCKETS:  # as feature_map.bucket
        logs = np.log(np.maximum(found, 3))
        found = np.where(found > 2, np.floor(logs * logs).astype(np.int64), found - 3)
    return found.view(np.uint64) ^ _SIGN


def _numbers(column, text, starts, ends):
    return _keys_of(blocks.numbers(text, starts, ends))


def _keys_of(numbers):
    bits = numbers.view(np.uint64)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def _times(column, text, starts, ends):
    try:
        return _numbers(column, text, starts, ends)
    except BadRows:
        return _keys_of(blocks.each(text, starts, ends, time_of, np.float64))


def time_of(text: str) -> Optional[float]:
    """What orders rows by a time: seconds since 1970 of ISO 8601, or a number; None for neither."""
    at = rules.moment(text, "iso")
    return rules.number(text) if at is None else (at - rules.EPOCH).total_seconds()


def numbers_of(keys: np.ndarray) -> np.ndarray:
    """The numbers that keys other than MISSING stand for. float64."""
    return np.where(keys & _SIGN, keys ^ _SIGN, ~keys).view(np.float64)


def _buckets(column, text, starts, ends):
    found = codec.fingerprints(text, starts, ends)
    return found % np.uint64(column.buckets) + np.uint64(1)


def _moments(column, text, starts, ends):
    key = lambda cell: key_of(column.kind, feature_map.text_of(column, cell))
    read = lambda cell: None if feature_map.explain_cell(column, cell) else key(cell)
    return blocks.each(text, starts, ends, read, np.uint64)


# {kind: the function of the keys of cells that are not empty}; others are moments.
_KEYS_OF = {
    TIME: _times, HASH: _buckets, NUMBER: _numbers,
    **dict.fromkeys((BUCKETS, *RANGED), _integers),
}  # fmt: skip


def _members(column, text, starts, ends):
    """The Members of cells."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists, codes = blocks.distinct(text, starts, ends)
    lists = pc.split_pattern(lists, column.separator)
    texts = pc.utf8_trim_whitespace(lists.flatten())
    owner = np.repeat(np.arange(len(lists)), np.diff(numpy_of(lists.offsets, np.int32)))
    filled = pc.not_equal(texts, "")
    texts, owner = texts.filter(filled), owner[np.array(filled)]
    lengths = np.bincount(owner, minlength=len(lists))
    if column.length:
        within = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        texts, owner = texts.filter(pa.array(within < column.length)), owner[within < column.length]
        lengths = np.minimum(lengths, column.length)
    texts = texts.dictionary_encode()
    which = numpy_of(texts.indices, np.int32)
    found, weights = texts.dictionary.to_pylist(), np.ones(len(texts.dictionary), np.float32)
    if column.weights:
        pairs = [feature_map.members(column, x)[0] for x in found]
        found, weights = [x for x, _ in pairs], np.array([x for _, x in pairs], np.float32)
        if np.isnan(weights).any():
            raise BadRows
    keys = [key_of(LIST, x) for x in found]
    short = np.array([LONG if isinstance(key, bytes) else key for key in keys], np.uint64)
    # From the distinct lists to the cells.
    first = np.cumsum(lengths) - lengths
    of_cells = lengths[codes]
    at = np.repeat(first[codes] - (np.cumsum(of_cells) - of_cells), of_cells)
    which = which[at + np.arange(len(at))]
    long = np.flatnonzero(short[which] == np.uint64(LONG)) if len(short) else which
    return Members(of_cells, short[which], (long, [keys[i] for i in which[long]]), weights[which])


def integers_of(keys: np.ndarray) -> np.ndarray:
    """The integers of a scaled field, or the codes of buckets, that keys stand for. int64."""
    return (keys ^ _SIGN).view(np.int64)


def key_of(kind: str, text: str) -> Key:
    """The key of a text in a vocabulary; a long text is its own."""
    if kind == BUCKETS:
        return feature_map.bucket_code(text) + ZERO
    raw = text.encode()
    return raw if len(raw) > 8 else int.from_bytes(raw.ljust(8, b"\0"), "big")


def bytes_of(key: Key) -> bytes:
    """The text of a key, in UTF-8."""
    return key if isinstance(key, bytes) else key.to_bytes(8, "big").rstrip(b"\0")


def texts_of(kind: str, keys: Iterable[Key]) -> List[str]:
    """The texts in a vocabulary of keys."""
    if kind == BUCKETS:
        return [feature_map.bucket_text(key - ZERO) for key in keys]
    return [bytes_of(key).decode() for key in keys]


def _long(text, starts, lengths, columns):
    texts = {}
    for field in np.flatnonzero((lengths > 8).any(axis=1)):
        if columns[field].kind == CATEGORY:
            rows = np.flatnonzero(lengths[field] > 8)
            first, size = starts[field][rows], lengths[field][rows]
            texts[int(field)] = rows, [text[a : a + n] for a, n in zip(first, size)]
    return texts


def explain(block, row: int, layout: Layout) -> Optional[str]:
    """What is wrong with a row of a block, and what was expected; None if it is good."""
    cells, shown = block.row(row)
    if cells is None:
        return shown
    for column, cell in zip((*layout.first, *layout.columns, *layout.by), cells):
        reason = _explain(column, cell, layout.missing)
        if reason:
            return f"{reason}: {shown}"
    return None


def _explain(column, cell, missing):
    text = cell.decode()
    if column.kind == LABEL and label_of(text, column, missing) is None:
        what = "is missing" if column.positive else "is not 0 or 1"
        return f"label {quoted(cell)} {what}"
    if column.kind == WEIGHT:
        number = rules.number(text)
        bad = number is None or not is_weight(np.float32(number))
        return f"weight {quoted(cell)} {NO_WEIGHT}" if bad else None
    if column.kind == TIME and time_of(text) is None:
        return f"{column.name} {quoted(cell)} is neither a number nor ISO 8601"
    reason = text and text not in missing and feature_map.explain_cell(column, text)
    return f"{column.name} {reason}" if reason else None
