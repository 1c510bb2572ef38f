"""Text in blocks of whole lines.

A line holds a record if it has anything but blanks before its first `#`.
"""

import codecs
import gzip
import zlib
from typing import Iterator, Optional, Tuple

import numpy as np

from deepfm.errors import BadInput
from deepfm.records import library
from deepfm.records.storage import places

LONGEST_LINE = 64 << 20  # bytes; a file with a longer line is not text
_COLON, _NEWLINE = b":\n"


def without_mark(text: bytes, path: str) -> bytes:
    """The first bytes of a text file without the byte order mark that some editors put there.

    Raises:
        BadInput: it is the mark of UTF-16, followed by a character with a NUL byte.
    """
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and b"\0" in text[2:4]:
        raise BadInput(f"{path}: its byte order mark says UTF-16; save it as UTF-8.")
    return text[len(codecs.BOM_UTF8) :] if text.startswith(codecs.BOM_UTF8) else text


def blocks(
    path: str, size: int = 1 << 20, start: int = 0, end: Optional[int] = None
) -> Iterator[Tuple[int, bytes, int]]:
    """Yields blocks of whole lines of a text file: (offset, text, bytes read for it).

    The offset is in bytes of the uncompressed text, and 0 for a text after a byte order mark; the
    bytes read are those of the file on disk. Every line, the file's last too, ends in a newline.

    Args:
        path: the file, local or remote, plain or (by its name) gzip.
        size: bytes to read at once.
        start: offset of the beginning of a line, in uncompressed bytes; 0 for a gzip file.
        end: offset at which to stop, the beginning of a line; None: the end of the file.

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
            wanted = size if end is None else min(size, end - position)
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
