"""Text in blocks of whole lines, and files of it cut into ranges of them.

A line holds a record if it has anything but blanks before its first `#`.
"""

import codecs
import contextlib
import functools
import gzip
import zlib
from typing import Callable, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from deepfm.errors import BadInput
from deepfm.records import library
from deepfm.records.storage import places

BLOCK = 1 << 20  # bytes read at once
TASK = 16 << 20  # bytes of an uncompressed file that a process takes as one task
LONGEST_LINE = 64 << 20  # bytes; a file with a longer line is not text
_COLON, _NEWLINE = b":\n"


class LineRange(NamedTuple):
    """Consecutive whole lines of a file.

    Attributes:
        path: the file, local or remote.
        start: byte of the uncompressed text where the first line begins; 0 for a gzip file.
        end: byte where the line after the last one begins; None: the end of the file.
    """

    path: str
    start: int = 0
    end: Optional[int] = None


def without_mark(text: bytes, path: str) -> bytes:
    """The first bytes of a text file without the byte order mark that some editors put there.

    Raises:
        BadInput: it is the mark of UTF-16, followed by a character with a NUL byte.
    """
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and b"\0" in text[2:4]:
        raise BadInput(f"{path}: its byte order mark says UTF-16; save it as UTF-8.")
    return text[len(codecs.BOM_UTF8) :] if text.startswith(codecs.BOM_UTF8) else text


def blocks(
    path: str, start: int = 0, end: Optional[int] = None, size: Optional[int] = None
) -> Iterator[Tuple[int, bytes, int]]:
    """Yields blocks of whole lines of a text file: (offset, text, bytes read for it).

    The offset is in bytes of the uncompressed text, and 0 for a text after a byte order mark; the
    bytes read are those of the file on disk. Every line, the file's last too, ends in a newline.

    Args:
        path: the file, local or remote, plain or (by its name) gzip.
        start, end: as in a LineRange.
        size: bytes to read at once; None: BLOCK.

    Raises:
        BadInput: the gzip file is damaged, a line is longer than any record, or the text is UTF-16.
    """
    with places.of(path).open_file(path) as raw:
        compressed = path.endswith(".gz")
        stream = gzip.GzipFile(fileobj=raw) if compressed else raw
        if start:
            stream.seek(start)
        rest, position, mark, told = b"", start, 0, raw.tell()
        while True:
            wanted = size or BLOCK
            wanted = wanted if end is None else min(wanted, end - position)
            try:
                read = stream.read(wanted) if wanted else b""
            except (OSError, EOFError, zlib.error) as error:
                if compressed:
                    message = f"{path}: the gzip file is damaged or cut short ({error})."
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
                yield 0 if at == mark else at, text, now - told
                told = now
            if at_end:
                return
            if len(rest) > LONGEST_LINE:
                raise BadInput(f"{path}: has a line of over {LONGEST_LINE} bytes: not LibSVM text.")


def first_text(path: str) -> bytes:
    """The first block of a file."""
    with contextlib.closing(blocks(path)) as found:
        return next(found, (0, b"", 0))[1]


def lines_from(path: str, begin: int, end: int) -> Optional[LineRange]:
    """The lines of a file that begin in bytes [begin, end); None if there are none.

    A gzip file cannot be split, so its range is always the whole file.
    """
    if path.endswith(".gz"):
        return LineRange(path)
    size = places.of(path).size(path)
    start = _next_line(path, begin) if begin else 0
    stop = _next_line(path, end) if end < size else None
    return None if start in (stop, size) else LineRange(path, start, stop)


def cut(path: str, size: int) -> List[LineRange]:
    """Splits a file of `size` bytes into one LineRange per task; a gzip file is one task."""
    starts = range(0, 1 if path.endswith(".gz") else size, TASK)
    found = places.each(path, lambda start: lines_from(path, start, start + TASK), starts)
    return list(filter(None, found))


def _next_line(path, position):
    """The byte where the first line at or after `position` begins, in an uncompressed file."""
    with places.of(path).open_file(path) as f:
        f.seek(position - 1)
        return position - 1 + len(f.readline())


def numbering(lines: LineRange) -> Callable[[], int]:
    """A function that returns the number, from 1, of the first line of a range.

    The first call reads the file up to there, so callers wait until they find a bad line.
    """
    before = lines._replace(start=0, end=lines.start)
    count = lambda: sum(text.count(b"\n") for _, text, _ in blocks(*before))
    return functools.lru_cache(maxsize=1)(lambda: 1 + count() if lines.start else 1)


def lines(path: str) -> Iterator[Tuple[int, bytes]]:
    """`numbered` of the file at a path."""
    return numbered(blocks(path))


def without_comment(line: bytes) -> bytes:
    """The line up to its first `#`."""
    return line.partition(b"#")[0]


def numbered(blocks: Iterable[Tuple[int, bytes, int]]) -> Iterator[Tuple[int, bytes]]:
    """Yields (line number from 1, text without comment) for each line that holds a record.

    Args:
        blocks: those of a whole file, as `blocks` yields them.
    """
    number = 0
    for _, text, _ in blocks:
        for line in text.split(b"\n")[:-1]:
            number += 1
            line = without_comment(line)
            if line.strip():
                yield number, line


def newlines(text: bytes, begin: int = 0, end: Optional[int] = None) -> int:
    """How many newlines there are in text[begin:end]; bytes.count takes five times as long."""
    return int(np.count_nonzero(np.frombuffer(text, np.uint8)[begin:end] == _NEWLINE))


def record_starts(text: bytes) -> np.ndarray:
    """The byte in a block where each line that holds a record begins. int64 [records]."""
    if library.load():
        starts = np.empty(newlines(text) + 1, np.int64)
        found = library.call("deepfm_record_starts", text, len(text), starts, len(starts))
        return starts[:found]
    starts, at = [], 0
    for line in text.split(b"\n"):
        if without_comment(line).strip():
            starts.append(at)
        at += len(line) + 1
    return np.array(starts, np.int64)


def longest_record(text: bytes, starts: np.ndarray, weighted: bool = False) -> int:
    """The most `:` in any record of a block, without comments: the pairs of its longest row.

    Args:
        weighted: whether labels may have a weight, whose `:` does not count.
    """
    if not len(starts):
        return 0
    if weighted:
        lines = (without_comment(line).split() for line in text.split(b"\n"))
        return max(sum(word.count(b":") for word in words[1:]) for words in lines)
    if b"#" in text:
        return max(without_comment(line).count(b":") for line in text.split(b"\n"))
    colons = np.flatnonzero(np.frombuffer(text, np.uint8) == _COLON)
    return int(np.diff(np.searchsorted(colons, np.append(starts, len(text)))).max())
