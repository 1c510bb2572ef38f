"""Cuts text files into ranges of whole lines, reads these in blocks, and finds bad lines."""

import contextlib
import functools
from typing import Callable, Iterator, List, NamedTuple, Optional, Tuple

from deepfm.records import libsvm_text
from deepfm.records.bad_record import BadRecord, find_refused, marked
from deepfm.records.storage import places

BLOCK = 1 << 20  # bytes read at once
TASK = 16 << 20  # bytes of an uncompressed file that a process takes as one task


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


def read_blocks(lines: LineRange) -> Iterator[Tuple[int, bytes, int]]:
    """Yields (start, text, bytes read) for each block of the lines; see libsvm_text.blocks."""
    return libsvm_text.blocks(lines.path, BLOCK, lines.start, lines.end)


def first_text(path: str) -> bytes:
    """The first block of a file."""
    with contextlib.closing(read_blocks(LineRange(path))) as blocks:
        return next(blocks, (0, b"", 0))[1]


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
    count = lambda: sum(text.count(b"\n") for _, text, _ in read_blocks(before))
    return functools.lru_cache(maxsize=1)(lambda: 1 + count() if lines.start else 1)


def sift(
    path: str,
    text: bytes,
    number: int,
    accepts: Callable[[bytes], bool],
    explain: Callable[[bytes], Optional[str]],
    content: Callable[[bytes], bytes] = libsvm_text.without_comment,
) -> Iterator[BadRecord]:
    """Yields a BadRecord for each line of a block that the parser refuses; returns the others.

    Args:
        path: the file's path.
        text: the block.
        number: the number of its first line.
        accepts: whether the parser accepts a text; it refuses one with a bad line.
        explain: says what is wrong with a line, or returns None for a good one.
        content: returns the part of a line to parse.

    Returns:
        {index: content} of the lines that are good or hold no record.
    """
    contents = {i: content(line) for i, line in enumerate(text.split(b"\n"))}
    rows = [i for i, line in contents.items() if line.strip()]
    accepted = lambda lines: accepts(b"\n".join(lines) + b"\n")
    refused = find_refused(accepted, [contents[i] for i in rows], explain)
    bad = (BadRecord(path, f":{number + rows[i]}", reason) for i, reason in refused)
    for record in marked(bad, len(rows)):
        del contents[int(record.place[1:]) - number]
        yield record
    return contents
