"""Parses raw rows to one number per cell, a block at a time and without looping over rows.

A cell's number is its key: equal cells of a field have equal keys. The key of a text of up to 8
bytes is its bytes as a big-endian number; LONG stands for any longer text, which is kept beside it.
MISSING is an empty cell. The key of an integer or a bucket is its two's complement with the sign
bit flipped, so these sort like numbers.

B: rows of a block. F: fields.
"""

import itertools
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple, Union

import numpy as np

from data_tools.click_logs import feature_map
from data_tools.click_logs.column_kinds import BUCKETS, CATEGORY, HOUR, Column
from data_tools.tables import blocks
from data_tools.tables.blocks import BadRows, numpy_of, quoted

Key = Union[int, bytes]  # of a cell, or the text of a LONG one
MISSING, LONG = 0, 2**64 - 1  # UTF-8 text never has the byte 255
ZERO = 1 << 63  # the key of the integer 0
_MINUS = ord("-")
_SIGN = np.uint64(ZERO)
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)  # the first n bytes of a cell
_DIGITS = 18  # of an integer, at most


class Layout(NamedTuple):
    """What the cells of a row are: that of the label, if it is `labelled`, and those of the fields.

    `columns` has the Column of each field.
    """

    labelled: bool
    columns: Tuple[Column, ...]


class Rows(NamedTuple):
    """The rows of a block.

    Attributes:
        starts: int64 [B], the byte of the file where each begins; in Parquet its number.
        labels: float32 [B], 0 or 1; 0 if the file has no labels.
        keys: uint64 [F, B].
        long: {field: (int64 [n] rows, n texts)} for the cells that are LONG.
    """

    starts: np.ndarray
    labels: np.ndarray
    keys: np.ndarray
    long: Dict[int, Tuple[np.ndarray, List[bytes]]]


def parse(block, layout: Layout) -> Rows:
    """The Rows of a block whose cells are texts; raises BadRows if one is bad."""
    text, starts, ends = block.texts()
    padded = np.frombuffer(text + bytes(8), np.uint8)
    labels = np.zeros(len(block), np.float32)
    if layout.labelled:
        labels = _labels(padded, starts[0], ends[0])
        starts, ends = starts[1:], ends[1:]
    lengths = ends - starts
    # A view of every 8 bytes of the text as a number; only indexing it makes a copy.
    words = np.ndarray([len(text) + 1], "<u8", padded, 0, [1])
    keys = words[starts]  # [F, B]
    keys &= _MASKS[np.minimum(lengths, 8)]
    kind_of = lambda field: layout.columns[field].kind
    for kind, which in itertools.groupby(range(len(keys)), kind_of):  # consecutive fields
        run = list(which)
        cells = slice(run[0], run[-1] + 1)
        keys[cells] = _keys(kind, text, keys[cells], starts[cells], ends[cells])
    return Rows(block.starts, labels, keys, _long(text, starts, lengths, layout.columns))


def _labels(characters, starts, ends):
    labels = characters[starts] - np.uint8(ord("0"))
    if (ends - starts != 1).any() or (labels > 1).any():
        raise BadRows
    return labels.astype(np.float32)


def _keys(kind, text, first, starts, ends):
    """The keys of cells of a kind.

    Args:
        kind: a kind from column_kinds except INTEGER, which has become BUCKETS or SCALED.
        text: of the block.
        first: uint64, the first 8 bytes of each cell, little-endian.
        starts, ends: where in the text the cells are.
    """
    lengths = ends - starts
    if kind == CATEGORY:
        return np.where(lengths > 8, np.uint64(LONG), first.byteswap())
    x = _integers(kind, text, first, starts, ends)
    if kind == HOUR:
        if ((lengths != 0) & (lengths != 8)).any() or ((first & np.uint64(0xFF)) == _MINUS).any():
            raise BadRows
        return (first.byteswap() & np.uint64(0xFFFF)) << np.uint64(48)
    return np.where(lengths == 0, np.uint64(MISSING), x.view(np.uint64) ^ _SIGN)


def _integers(kind, text, keys, starts, ends):
    """The integers in cells, or their buckets; 0 for an empty one. int64, with the keys' shape."""
    import pyarrow as pa

    there, x = ends > starts, np.zeros(keys.shape, np.int64)
    starts, sizes = starts[there], (ends - starts)[there]
    # Many are the same, and those of up to 8 bytes have the same key.
    alone = ~np.arange(len(starts), dtype=np.uint64)
    cells = pa.array(np.where(sizes > 8, alone, keys[there])).dictionary_encode()
    codes, which = numpy_of(cells.indices, np.int32), np.empty(len(cells.dictionary), np.int64)
    which[codes] = np.arange(len(codes))
    starts, sizes = starts[which], sizes[which]
    minus = np.frombuffer(text, np.uint8)[starts] == _MINUS
    if (sizes - minus > _DIGITS).any():
        raise BadRows
    found = blocks.integers(text, starts, starts + sizes)
    if kind == BUCKETS:  # as feature_map.bucket
        logs = np.log(np.maximum(found, 3))
        found = np.where(found > 2, np.floor(logs * logs).astype(np.int64), found - 3)
    x[there] = found[codes]
    return x


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
    if layout.labelled:
        label, *cells = cells
        if label not in (b"0", b"1"):
            return f"label {quoted(label)} is not 0 or 1: {shown}"
    for column, cell in zip(layout.columns, cells):
        reason = feature_map.explain_cell(column.kind, cell.decode()) if cell else None
        if reason:
            return f"{column.name} {reason}: {shown}"
    return None
