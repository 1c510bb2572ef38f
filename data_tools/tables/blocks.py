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
import sys
from typing import Any, Callable, Iterator, Optional, Sequence, Union

import numpy as np

from deepfm.errors import BadInput, listed
from deepfm.records import schema
from deepfm.records.raw import cells as rules
from deepfm.records.schema import BadRecord

VERSION = "12.0.1"  # of pyarrow, the last for Python 3.7
UNEXPLAINED = "cannot be read as a record"  # though no fault is found
_INTEGER, _DECIMAL = b"-0123456789", b"-0123456789.eE"


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
        return "is not UTF-8" if newline else "is not UTF-8 (save the file so)"
    return None


def integers(text: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The integers in text[start:end], as cells.integer finds them, int64; raises BadRows."""
    import pyarrow as pa

    cells, letters = _cells(text, starts, ends)
    if not letters.translate(None, _INTEGER) and (ends - starts).max(initial=0) <= rules.DIGITS:
        with contextlib.suppress(pa.ArrowInvalid):
            return numpy_of(cells.cast(pa.int64()), np.int64)
    return each(text, starts, ends, rules.integer, np.int64)


def numbers(text: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The numbers in text[start:end], as cells.number finds them, float64; raises BadRows."""
    import pyarrow as pa
    import pyarrow.compute as pc

    cells, letters = _cells(text, starts, ends)
    if not letters.translate(None, _DECIMAL):
        long = cells.filter(pa.array(ends - starts > rules.DIGITS))
        long = pc.ascii_ltrim(long, characters="-0.")  # few are long without these
        long = long.filter(pc.greater(pc.binary_length(long), rules.DIGITS))
        digits = pc.utf8_length(pc.replace_substring_regex(long, rules.NO_DIGITS, ""))
        if (pc.max(digits).as_py() or 0) > rules.DIGITS:
            raise BadRows
        with contextlib.suppress(pa.ArrowInvalid):
            found = numpy_of(cells.cast(pa.float64()), np.float64)
            if np.isfinite(found).all():
                return found + 0.0  # -0.0 is 0
    return each(text, starts, ends, rules.number, np.float64)


def each(text: bytes, starts: np.ndarray, ends: np.ndarray, read: Callable, kind) -> np.ndarray:
    """What `read` finds in text[start:end], by the distinct ones; raises BadRows if it is None."""
    texts, which = distinct(text, starts, ends)
    found = list(map(read, texts.to_pylist()))
    if None in found:
        raise BadRows
    return np.array(found, kind)[which]


def distinct(text: bytes, starts: np.ndarray, ends: np.ndarray):
    """(the distinct texts among text[start:end], a pyarrow Array of large_string; int32 [n], which
    each is); raises BadRows if one is not UTF-8."""
    cells = _cells(text, starts, ends)[0].dictionary_encode()
    return cells.dictionary, numpy_of(cells.indices, np.int32)


def numpy_of(array, kind) -> np.ndarray:
    """A pyarrow Array of numbers without nulls; its own to_numpy looks for pandas each time."""
    at = array.offset * np.dtype(kind).itemsize
    return np.ndarray([len(array)], kind, array.buffers()[1], at)


def weights(numbers: np.ndarray) -> np.ndarray:
    """The weights of examples in a column of numbers, float32; raises BadRows if one is none."""
    found = schema.normal(numbers)
    if not np.isfinite(found).all() or (found < 0).any():
        raise BadRows
    return found


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
