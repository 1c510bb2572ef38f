"""Text files as blocks of whole lines, and where in a block the records are.

A line holds a record where something other than blanks stands before its first `#`.
"""

from typing import Iterator, List, NamedTuple, Optional

import numpy as np
import tensorflow as tf

from deepfm.data import libsvm

BLOCK = 1 << 20  # bytes read at once
TASK = 16 << 20  # bytes of a plain file that a process works on as one task

_BLANK, _HASH, _COLON, _NEWLINE = 32, ord("#"), ord(":"), ord("\n")


class LineRange(NamedTuple):
    """Whole lines of a file that follow one another.

    Attributes:
        path: a local or s3:// file.
        start: where the first line begins, in bytes of the uncompressed text; 0 where the file is
            gzip.
        end: where the line after the last begins; None: to the end of the file.
    """

    path: str
    start: int = 0
    end: Optional[int] = None


class LineBlock(NamedTuple):
    """Some lines of a file, as they are read at once.

    Attributes:
        start: where it begins, in bytes of the uncompressed text; 0 after a byte order mark.
        text: the lines; each ends in a newline, also the file's last.
        read: bytes of the file, as it lies on the disk, that were read for it.
    """

    start: int
    text: bytes
    read: int


def read_blocks(path: str, start: int = 0, end: Optional[int] = None) -> Iterator[LineBlock]:
    """Yields the blocks of a LineRange of a file, plain or (by its name) gzip.

    Raises:
        BadInput: the gzip file is damaged, a line is longer than any record, or the text is UTF-16.
    """
    for block in libsvm.read_blocks(path, BLOCK, start, end):
        yield LineBlock(*block)


def record_starts(text: bytes) -> np.ndarray:
    """Where in a block the lines begin that hold a record. int64 [records]."""
    characters = np.frombuffer(text, np.uint8)
    newlines = np.flatnonzero(characters == _NEWLINE)
    starts = np.concatenate([[0], newlines[:-1] + 1])
    first = characters[starts]
    doubtful = np.flatnonzero((first <= _BLANK) | (first == _HASH))
    blank = [i for i in doubtful if not _content(text[starts[i] : newlines[i]])]
    return np.delete(starts, blank) if blank else starts


def longest_record(text: bytes, starts: np.ndarray) -> int:
    """The most `:` in a record of a block, comments apart: the pairs of its longest row."""
    if not len(starts):
        return 0
    if b"#" in text:
        return max(_content(line).count(b":") for line in text.split(b"\n"))
    colons = np.flatnonzero(np.frombuffer(text, np.uint8) == _COLON)
    return int(np.diff(np.searchsorted(colons, np.append(starts, len(text)))).max())


def lines_from(path: str, begin: int, end: int) -> Optional[LineRange]:
    """The lines of a plain file that begin from a byte on and before another; None without any."""
    size = tf.io.gfile.stat(path).length
    start = _next_line(path, begin) if begin else 0
    stop = _next_line(path, end) if end < size else None
    return None if start in (stop, size) else LineRange(path, start, stop)


def cut(path: str, size: int) -> List[LineRange]:
    """The lines of a file of `size` bytes: of a plain one a LineRange for each task."""
    if path.endswith(".gz"):
        return [LineRange(path)]
    return list(filter(None, (lines_from(path, i, i + TASK) for i in range(0, size, TASK))))


def _next_line(path, position):
    """Where the first line begins at or after a byte of a plain file."""
    with libsvm.open_file(path) as f:
        f.seek(position - 1)
        return position - 1 + len(f.readline())


def line_number(path: str, position: int) -> int:
    """The number, from 1, of the line that begins at a byte of a plain file."""
    return 1 + sum(b.text.count(b"\n") for b in read_blocks(path, 0, position)) if position else 1


def _content(line):
    return line.partition(b"#")[0].strip()
