"""Text files as blocks of whole lines, and where in a block the records are.

A line holds a record where something other than blanks stands before its first `#`.
"""

import gzip
import zlib
from typing import Iterator, NamedTuple, Optional

import numpy as np
import tensorflow as tf

from deepfm.data.text_lines import LONGEST_LINE, without_mark
from deepfm.errors import BadInput

BLOCK = 1 << 20  # bytes read at once

_BLANK, _HASH, _COLON, _NEWLINE = 32, ord("#"), ord(":"), ord("\n")


class Block(NamedTuple):
    """Whole lines of a file.

    Attributes:
        start: where it begins, in bytes of the uncompressed text; 0 after a byte order mark.
        text: the lines; each ends in a newline, also the file's last.
        read: bytes of the file, as it lies on the disk, that were read for it.
    """

    start: int
    text: bytes
    read: int


def read_blocks(path: str, start: int = 0, end: Optional[int] = None) -> Iterator[Block]:
    """Yields the blocks of a file, plain or (by its name) gzip.

    Args:
        path: a local or s3:// file.
        start: where a line begins, in bytes of the uncompressed text; 0 where the file is gzip.
        end: where to stop, at the begin of a line; None: at the end of the file.

    Raises:
        BadInput: the gzip file is damaged, a line is longer than any record, or the text is UTF-16.
    """
    compressed = path.endswith(".gz")
    with open_file(path) as raw:
        stream = gzip.GzipFile(fileobj=raw) if compressed else raw
        if start:
            stream.seek(start)
        rest, position, mark, told = b"", start, 0, raw.tell()
        while True:
            size = BLOCK if end is None else min(BLOCK, end - position)
            try:
                read = stream.read(size) if size else b""
            except (OSError, EOFError, zlib.error) as error:
                if compressed:
                    message = f"{path}: is not whole as a gzip file ({error})."
                    raise BadInput(message) from error
                raise
            at_end, begins = not read, position == 0
            position += len(read)
            if begins:
                read = without_mark(read, path)
                mark = position - len(read)  # bytes
            head, newline, tail = read.rpartition(b"\n")
            text, rest = (rest + head + newline, tail) if newline else (b"", rest + read)
            at = position - len(rest) - len(text)
            if rest and at_end:  # the file's last line lacks its newline
                text, rest = rest + b"\n", b""
            if text:
                now = raw.tell()
                yield Block(0 if at == mark else at, text, now - told)
                told = now
            if at_end:
                return
            if len(rest) > LONGEST_LINE:
                raise BadInput(f"{path}: has a line of over {LONGEST_LINE} bytes: not LibSVM text.")


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


def next_line(path: str, position: int) -> int:
    """Where the first line begins at or after a byte of a plain file."""
    with open_file(path) as f:
        f.seek(position - 1)
        return position - 1 + len(f.readline())


def line_number(path: str, position: int) -> int:
    """The number, from 1, of the line that begins at a byte of a plain file."""
    return 1 + sum(b.text.count(b"\n") for b in read_blocks(path, 0, position)) if position else 1


def open_file(path: str):
    """A local or s3:// file, for reading bytes."""
    return tf.io.gfile.GFile(path, "rb") if "://" in path else open(path, "rb")


def _content(line):
    return line.partition(b"#")[0].strip()
