"""Blocks of rows of a table, CSV or Parquet, and which of their rows are bad.

A block is one for `schema.sifted`, with at least one row. It has the cells of some columns, the
attribute `starts` (int64 [B]: where each row is, by which rows are divided into splits), and the
methods

    block.texts()      (bytes, int64 [columns, B] where in them each cell begins, where it ends)
    block.integers(column), block.numbers(column), block.lists(column)
    block.row(i)       (its cells or None, the row in a sentence or what is wrong with it)

of which those of a whole column raise BadRows if a row is bad. A cell is bytes of text, or in
Parquet a number, a list of numbers or None for a null.

B: rows of a block.
"""

import contextlib
import re
import sys
from typing import Any, Callable, Iterator, Optional, Sequence, Union

import numpy as np

from deepfm.errors import BadInput, listed
from deepfm.records import schema
from deepfm.records.libsvm_text import number_of
from deepfm.records.raw import cells as rules
from deepfm.records.schema import BadRecord

VERSION = "12.0.1"  # of pyarrow, the last for Python 3.7
UNEXPLAINED = "cannot be read as a record"  # though no fault is found
_INTEGER, _DECIMAL = b"-0123456789", b"-0123456789.eE"
_CHARACTERS = 31  # of a number, at most
_SIGNED, _ZERO = 9, re.compile(r"-(0+\.?0*|\.0+)")  # a zero that keeps its sign, its length at most
_TINY = np.finfo(np.float32).tiny


class BadRows(Exception):
    """A block holds a row that is bad."""


def need_arrow(path: str):
    """Refuses (BadInput) a table where pyarrow, which makes numbers of its cells, is missing."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise BadInput(
            f"{path}: reading a table needs pyarrow, which is not installed; run "
            f"'{sys.executable} -m pip install pyarrow=={VERSION}'."
        ) from error


def sifted(
    block, accept: Callable[[Any], Any], explain: Callable[[Any, int], Optional[str]]
) -> Iterator[Union[BadRecord, Any]]:
    """As `schema.sifted`, with an `accept` that raises BadRows if a row is bad."""

    def accepted(some):
        with contextlib.suppress(BadRows):
            return accept(some)

    return schema.sifted(block, accepted, explain, UNEXPLAINED, trusted=True)


def find(path: str, name: str, names: Sequence[str], about: str) -> int:
    """The place, from 0, of a column among those of a file; BadInput if there is no such one.

    Args:
        about: what the sentence says behind the name.
    """
    alike = [i for i, x in enumerate(names) if x == name]
    alike = alike or [i for i, x in enumerate(names) if x.lower() == name.lower()]
    if len(alike) != 1:
        what = "several columns" if alike else "no column"
        raise BadInput(f"{path}: has {what} {name} {about}; its columns are {listed(names, 20)}.")
    return alike[0]


def quoted(raw: bytes, limit: int = 60) -> str:
    """A text in a sentence."""
    text = raw.decode("utf-8", "replace")
    return repr(text if len(text) <= limit else text[: limit - 4] + " ...")


def fault(text: bytes, newline: str = "") -> Optional[str]:
    """What makes bytes no text for cells, None if nothing does.

    Args:
        newline: how a sentence names a newline where none may be; empty: newlines end the rows.
    """
    if b"\0" in text or newline and b"\n" in text:
        return f"holds a NUL character{newline}"
    try:
        text.decode()
    except UnicodeDecodeError:
        return "is not UTF-8"
    return None


def integers(text: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The integers in text[start:end], int64; raises BadRows if one is none or too long."""
    import pyarrow as pa

    cells, letters = _cells(text, starts, ends)
    if letters.translate(None, _INTEGER):
        raise BadRows
    try:
        return numpy_of(cells.cast(pa.int64()), np.int64)
    except pa.ArrowInvalid:
        raise BadRows from None


def distinct(text: bytes, starts: np.ndarray, ends: np.ndarray):
    """(the distinct texts among text[start:end], a pyarrow Array of large_string; int32 [n], which
    each is); raises BadRows if one is not UTF-8."""
    cells = _cells(text, starts, ends)[0].dictionary_encode()
    return cells.dictionary, numpy_of(cells.indices, np.int32)


def decimals(text: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The numbers in text[start:end], as cells.number finds them, float64; raises BadRows."""
    import pyarrow as pa
    import pyarrow.compute as pc

    cells, letters = _cells(text, starts, ends)
    if not letters.translate(None, _DECIMAL):
        long = cells.filter(pa.array(ends - starts > rules.DIGITS))
        digits = pc.utf8_length(pc.replace_substring_regex(long, rules.NO_DIGITS, ""))
        if (pc.max(digits).as_py() or 0) > rules.DIGITS:
            raise BadRows
        try:
            found = numpy_of(cells.cast(pa.float64()), np.float64)
            if np.isfinite(found).all():
                return found + 0.0  # -0.0 is 0
        except pa.ArrowInvalid:
            pass
    found = list(map(rules.number, cells.to_pylist()))
    if None in found:
        raise BadRows
    return np.array(found, np.float64)


def numbers(text: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """What libsvm_text.number_of finds in text[start:end]. float32."""
    import pyarrow as pa

    cells, letters = _cells(text, starts, ends)
    if not letters.translate(None, _DECIMAL) and (ends - starts).max(initial=0) <= _CHARACTERS:
        try:
            found = normal(numpy_of(cells.cast(pa.float32()), np.float32))
            return np.where((found == 0) & (ends - starts > _SIGNED), np.float32(0), found)
        except pa.ArrowInvalid:
            pass
    cells = cells.dictionary_encode()
    zero = lambda text: len(text) <= _SIGNED and _ZERO.fullmatch(text)
    found = [-0.0 if zero(x) else number_of(x.encode()) for x in cells.dictionary.to_pylist()]
    return np.array(found, np.float32)[numpy_of(cells.indices, np.int32)]


def numpy_of(array, kind) -> np.ndarray:
    """A pyarrow Array of numbers without nulls; its own to_numpy looks for pandas each time."""
    at = array.offset * np.dtype(kind).itemsize
    return np.ndarray([len(array)], kind, array.buffers()[1], at)


def normal(x: np.ndarray) -> np.ndarray:
    """float32 without denormal numbers, which TensorFlow reads as 0."""
    with np.errstate(invalid="ignore"):  # NaN
        return np.where((np.abs(x) < _TINY) & (x != 0), np.float32(0), x)


def _cells(text, starts, ends):
    """text[start:end] as pyarrow's large_string, and its bytes."""
    import pyarrow as pa

    offsets = np.append(0, np.cumsum(ends - starts))
    index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], ends - starts)
    letters = np.frombuffer(text, np.uint8)[index].tobytes()
    if fault(letters):
        raise BadRows
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(letters)]
    return pa.Array.from_buffers(pa.large_string(), len(starts), buffers), letters
