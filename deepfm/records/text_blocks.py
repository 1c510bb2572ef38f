"""Text in blocks of whole lines, and files of it cut into ranges of them.

A line holds a record if it has anything but blanks before its first `#`.
"""

import codecs
import copy
import functools
import gzip
import re
import zlib
from typing import Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from deepfm.errors import BadInput
from deepfm.records import library
from deepfm.records.storage import places

BLOCK = 1 << 20  # bytes read at once
TASK = 16 << 20  # bytes of an uncompressed file that a process takes as one task
LONGEST_LINE = 64 << 20  # bytes; a file with a longer line is not text
_RECORD = re.compile(rb"[ \t\r\v\f]*[^\s#]")
_BEFORE_RECORD = np.frombuffer(b" \t\r\v\f\n#", np.uint8)  # or in place of it
_NAMED = re.compile(rb"([0-9]{1,6}):[^:]*:[^:]*")
(_NEWLINE,) = b"\n"


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
                raise BadInput(f"{path}: has a line of over {LONGEST_LINE:,} bytes: no text.")


def _lines_from(path, begin, end) -> Optional[LineRange]:
    """The lines of a file that begin in bytes [begin, end); None if there are none."""
    if path.endswith(".gz"):
        return LineRange(path)
    size = places.of(path).size(path)
    start = _next_line(path, begin) if begin else 0
    stop = _next_line(path, end) if end < size else None
    return None if start in (stop, size) else LineRange(path, start, stop)


def cut(files: Sequence, size: int) -> List[Optional[LineRange]]:
    """Cuts DataFiles into a LineRange for each `size` bytes; None for those where no line begins.

    A gzip file cannot be cut, so its range is always the whole file.
    """
    starts = lambda file: range(0, 1 if file.path.endswith(".gz") else file.bytes, size)
    parts = [(file.path, start) for file in files for start in starts(file)]
    find = lambda part: _lines_from(*part, part[1] + size)
    return places.each(files[0].path if files else "", find, parts)


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


def without_comment(line: bytes) -> bytes:
    """The line up to its first `#`."""
    return line.partition(b"#")[0]


def lines(path: str) -> Iterator[Tuple[int, bytes]]:
    """Yields (line number from 1, text without comment) for each line of a file with a record."""
    number = 0
    for _, text, _ in blocks(path):
        for line in text.split(b"\n")[:-1]:
            number += 1
            line = without_comment(line)
            if line.strip():
                yield number, line


def newlines(text: bytes) -> int:
    """How many newlines there are in a text; bytes.count takes five times as long."""
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == _NEWLINE))


def record_starts(text: bytes) -> np.ndarray:
    """The byte in a block where each line that holds a record begins. int64 [records]."""
    characters = np.frombuffer(text, np.uint8)
    starts = np.append(0, np.flatnonzero(characters == _NEWLINE) + 1)
    starts = starts[starts < len(text)]
    holds = ~np.isin(characters[starts], _BEFORE_RECORD)
    odd = np.flatnonzero(~holds)
    holds[odd] = [bool(_RECORD.match(text, start)) for start in starts[odd].tolist()]
    return starts[holds]


class Lines:
    """The lines of a block of text that hold a record: a block for `schema.sifted`.

    Args:
        path: the file.
        text: whole lines; there may be others between those that hold a record.
        offset: the byte of the file where the text begins.
        before: how many lines of a range come before the text.
        first: returns the number of the range's first line; called for a bad line.
    """

    def __init__(self, path: str, text: bytes, offset: int, before: int, first: Callable[[], int]):
        self.path, self.text = path, text
        self._offset, self._before, self._first = offset, before, first
        self._where = None

    @property
    def where(self) -> np.ndarray:
        """Of each record the bytes of the text where its line begins and where it ends, the byte of
        the file where it begins, and how many lines of the range come before. int64 [4, B]."""
        if self._where is None:
            newlines = np.flatnonzero(np.frombuffer(self.text, np.uint8) == _NEWLINE)
            begins, lines = self._records(newlines)
            ends = newlines[lines] + 1
            self._where = np.stack([begins, ends, self._offset + begins, self._before + lines])
        return self._where

    def _records(self, newlines):
        """(the byte where the line of each record begins, its number in the text)."""
        begins = record_starts(self.text)
        return begins, np.searchsorted(newlines, begins)

    @property
    def starts(self) -> np.ndarray:
        """The byte of the file where each record's line begins. int64 [B]."""
        return self.where[2]

    def __len__(self):
        return self.where.shape[1]

    def take(self, index: Sequence[int]) -> "Lines":
        """A block of the records of these indices."""
        taken = copy.copy(self)
        begins, ends, *of_file = self.where[:, np.array(index, np.int64)]
        taken.text = b"".join([self.text[a:b] for a, b in zip(begins.tolist(), ends.tolist())])
        cuts = np.append(0, np.cumsum(ends - begins))
        taken._where = np.stack([cuts[:-1], cuts[1:], *of_file])
        return taken

    def line(self, i: int) -> bytes:
        """The line of a record, without its newline."""
        begin, end = self.where[:2, i].tolist()
        return self.text[begin : end - 1]

    def place(self, i: int) -> str:
        """The place of a record as in a BadRecord."""
        return f":{self._first() + self.where[3, i]}"


def read(lines: LineRange) -> Iterator[Tuple[int, Lines]]:
    """Yields (bytes of the file read, a block) for the lines of a range."""
    first, before = numbering(lines), 0
    for offset, text, size in blocks(*lines):
        yield size, Lines(lines.path, text, offset, before, first)
        before += newlines(text)


def most_fields(text: bytes, named: bool = False) -> int:
    """The most fields that a line of a block needs, as far as its text tells.

    That is as many as it has pairs; or if these name their fields, the largest + 1. A line with a
    pair that names none does not count.
    """
    if library.load():
        return library.call("deepfm_most_fields", text, len(text), int(named))
    lines = (without_comment(line).split()[1:] for line in text.split(b"\n"))
    if not named:
        return max(sum(b":" in pair for pair in pairs) for pairs in lines)
    lines = ([_NAMED.fullmatch(pair) for pair in pairs] for pairs in lines)
    return max((1 + int(pair[1]) for pairs in lines if all(pairs) for pair in pairs), default=0)
