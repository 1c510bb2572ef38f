"""Decodes LibSVM and LibFFM text, a block at a time, with numpy alone.

It takes the lines in which `libsvm_text.explain_line` finds no fault.

B: lines with a record. n: id:value pairs. F: fields. M: the most ids of a record.
"""

import re
from typing import Optional

import numpy as np
from oracle import fingerprints
from oracle.decoder import Batch

from data_tools.tables import cell_text as digits
from deepfm.records.libsvm_text import CONTROL, HASH_IN_ID, QUERY, are_numbers, number_of
from deepfm.records.schema import Schema

_COLON, _DOT, _MINUS, _PLUS, _NEWLINE, _HASH = b":.-+\n#"
_IS_BLANK = np.isin(np.arange(256), list(b" \t\n\r\v\f"))
_INTEGERS = re.compile(rb"(?:[0-9]{1,18} )*")
_LONGEST_FIELD = 6  # digits
_LONGEST_NUMBER = 31  # characters
_ONES, _HIGH = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_DOTS = np.uint64(_DOT) * _ONES
_FLAGS = np.array([1 << 8 * i + 7 for i in range(8)], np.uint64)  # of each byte of a word


class BadText(Exception):
    """A line is bad, or holds no integer where one must be."""


class Text:
    """A block of text, of which pieces are read as numbers."""

    def __init__(self, text):
        self.text = text
        self.padded = np.frombuffer(text + bytes(8), np.uint8)
        # A view of every 8 bytes as a number; only indexing it makes a copy.
        self._words = np.ndarray([len(text) + 1], "<u8", self.padded, 0, [1])

    def pieces(self, starts, ends):
        return [self.text[a:b] for a, b in zip(starts.tolist(), ends.tolist())]

    def integers(self, starts, ends):
        """The integers, not negative, in text[start:end]. int64."""
        lengths = ends - starts
        short = lengths <= 8
        shift = ((8 - np.clip(lengths, 1, 8)) * 8).astype(np.uint64)
        ids, good = digits.eight(self._words[starts] << shift, shift)
        if (lengths == 0).any() or not good[short].all():
            raise BadText
        if not short.all():
            pieces = self.pieces(starts[~short], ends[~short])
            if not _INTEGERS.fullmatch(b" ".join([*pieces, b""])):
                pieces = [piece.lstrip(b"0") or b"0" for piece in pieces]
                if not all(piece.isdigit() and len(piece) <= 18 for piece in pieces):
                    raise BadText
            ids[~short] = np.array(pieces).astype(np.int64)
        return ids

    def hashed(self, starts, ends, buckets):
        """The ids of the strings text[start:end], as records.hashed makes them. int64."""
        if (starts == ends).any() or CONTROL.search(self.text):
            raise BadText
        found = fingerprints.of_strings(self._words, starts, ends)
        return 1 + (found % np.uint64(buckets - 1)).astype(np.int64)

    def numbers(self, starts, ends):
        """The numbers in text[start:end], NaN where there is none. float32."""
        first = self.padded[starts]
        signed = (first == _MINUS) | (first == _PLUS)
        begins = starts + signed
        lengths = np.clip(ends - begins, 1, 8)
        words = self._words[begins] << ((8 - lengths) * 8).astype(np.uint64)
        # The lowest byte of a word that is a dot, as the flag of that byte; 0 without a dot.
        x = words ^ _DOTS
        flags = (x - _ONES) & ~x & _HIGH
        flag = flags & (~flags + np.uint64(1))
        dotted = flag != 0
        before = np.where(dotted, (flag >> np.uint64(7)) - np.uint64(1), np.uint64(0))
        behind = ~np.where(dotted, (flag << np.uint64(1)) - np.uint64(1), np.uint64(0))
        words = words & behind | (words & before) << np.uint64(8)
        size = lengths - dotted  # digits
        decimals = np.where(dotted, 7 - np.searchsorted(_FLAGS, flag), 0)
        shift = ((8 - np.clip(size, 1, 8)) * 8).astype(np.uint64)
        whole, good = digits.eight(words, shift)
        doubles = whole / 10.0**decimals  # both exact, so the quotient is rounded once
        doubles = np.where(first == _MINUS, -doubles, doubles)
        good &= (ends - begins == lengths) & (size > 0) & ~_half_way(doubles)
        values = doubles.astype(np.float32)
        if not good.all():
            pieces = self.pieces(starts[~good], ends[~good])
            values[~good] = _slow_numbers(pieces)
        return values


def _half_way(doubles):
    """Whether a float64 may be rounded to either of two float32; see libsvm_text."""
    return doubles.view(np.int64) & (1 << 29) - 1 == 1 << 28


def _slow_numbers(pieces):
    """The numbers in texts of any form. float32."""
    if not are_numbers(pieces):
        return np.array([number_of(piece) for piece in pieces], np.float32)
    doubles = np.array(pieces).astype(np.float64)
    with np.errstate(over="ignore"):
        numbers = doubles.astype(np.float32)
    doubtful = _half_way(doubles) | (np.abs(doubles) < np.finfo(np.float32).tiny)
    for i in np.flatnonzero(doubtful).tolist():
        numbers[i] = number_of(pieces[i])
    return numbers


def decode(text: bytes, schema: Schema) -> Optional[Batch]:
    """Decodes and checks whole lines; None if one breaks the schema.

    Lines without a record are passed over. `libsvm_text.explain_line` says what is wrong with a
    line, and `bad_record.find_refused` which ones are bad.
    """
    if schema.hash_buckets and (HASH_IN_ID.search(text) or QUERY.search(text)):
        return None
    try:
        return _decode(Text(re.sub(rb"#[^\n]*", b"", text) if b"#" in text else text), schema)
    except BadText:
        return None


def _decode(block, schema):
    characters = block.padded[:-8]
    blank = _IS_BLANK[np.append(characters, np.uint8(_NEWLINE))]
    edges = np.flatnonzero(np.diff(np.concatenate([[True], blank])))
    starts, ends = edges[::2], edges[1::2]  # of the words
    newlines = np.flatnonzero(characters == _NEWLINE)
    line = np.searchsorted(newlines, starts)
    is_label = np.diff(line, prepend=-1) != 0
    rows = np.cumsum(is_label) - 1  # the record of each word
    labels, weights = _labels(block, starts[is_label], ends[is_label], schema)
    pairs = ~is_label
    rows, starts, ends = rows[pairs], starts[pairs], ends[pairs]
    colons = np.flatnonzero(characters == _COLON)
    first = np.searchsorted(colons, starts)
    parts = 2 if schema.named_fields else 1
    if (np.searchsorted(colons, ends) - first != parts).any():
        raise BadText
    fields = None
    if schema.named_fields:
        if (colons[first] - starts > _LONGEST_FIELD).any():
            raise BadText
        fields = block.integers(starts, colons[first])
        starts, first = colons[first] + 1, first + 1
    at = colons[first]
    if schema.hash_buckets:
        ids = block.hashed(starts, at, schema.hash_buckets)
    else:
        minus = block.padded[starts] == _MINUS
        ids = block.integers(starts + minus, at)
        if ids[minus].any():
            raise BadText
    if (ends - at - 1 > _LONGEST_NUMBER).any() or (ends == at + 1).any():
        raise BadText
    values = block.numbers(at + 1, ends)
    if schema.field_ids:
        fields = fields_of(ids, schema.field_ids)
    ids = ids + schema.id_offset
    if not np.isfinite(values).all() or (ids < 0).any() or (ids >= schema.limit).any():
        raise BadText
    ids, values, counts = _place(rows, fields, ids, values, len(labels), schema)
    return Batch((labels > 0).astype(np.float32), ids, values, counts, weights)


def _labels(block, starts, ends, schema):
    """(labels as written, weights or None) from the first words of lines."""
    weights = None
    if schema.weighted:
        colons = np.flatnonzero(block.padded[:-8] == _COLON)
        first = np.searchsorted(colons, starts)
        given = np.searchsorted(colons, ends) > first
        at = ends.copy()
        at[given] = colons[first[given]]
        weights = np.ones(len(starts), np.float32)
        weights[given] = block.numbers(at[given] + 1, ends[given])
        if (at[given] + 1 == ends[given]).any() or not (
            np.isfinite(weights) & (weights >= 0)
        ).all():
            raise BadText
        ends = at
    if (starts == ends).any():
        raise BadText
    labels = block.numbers(starts, ends)
    if not np.isin(labels, (-1, 0, 1)).all():
        raise BadText
    return labels, weights if schema.with_weights else None


def _place(rows, fields, ids, values, num_rows, schema):
    """Puts each pair in the place of its field; returns (ids, values, counts) as in Batch."""
    size = schema.field_size
    lengths = np.bincount(rows, minlength=num_rows)
    column = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if fields is None:
        fields = column
        if not schema.pad and (lengths != size).any():
            raise BadText
    if ((fields < 0) | (fields >= size)).any():
        raise BadText
    slots = rows * size + fields
    if (slots[1:] < slots[:-1]).any():
        order = np.argsort(slots, kind="stable")
        slots, ids, values = slots[order], ids[order], values[order]
    counts, width = None, size
    if schema.multi_valued:
        counts = np.bincount(slots, minlength=num_rows * size).reshape(num_rows, size)
        width = int(lengths.max(initial=0))
        slots = rows * width + column
    elif (slots[1:] == slots[:-1]).any() or (schema.pad and (ids == 0).any()):
        raise BadText
    placed = []
    for numbers in (ids, values):
        placed.append(np.zeros(num_rows * width, numbers.dtype))
        placed[-1][slots] = numbers
    return (*(x.reshape(num_rows, width) for x in placed), counts)


def fields_of(ids: np.ndarray, ranges) -> np.ndarray:
    """The field whose id range, (first, last + 1), holds each id; -1 if there is none. int64."""
    order = sorted(range(len(ranges)), key=lambda i: ranges[i])
    begins, ends = (np.array([ranges[i][j] for i in order], np.int64) for j in (0, 1))
    found = np.searchsorted(begins, ids, side="right") - 1
    inside = (found >= 0) & (ids < ends[np.maximum(found, 0)])
    return np.where(inside, np.array(order)[np.maximum(found, 0)], -1)
