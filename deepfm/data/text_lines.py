"""The lines of text files, plain or gzip, as they stand there but for a byte order mark."""

import codecs
import gzip
import zlib
from typing import Iterator, Tuple

import tensorflow as tf

from deepfm.errors import BadInput

LONGEST_LINE = 64 << 20  # bytes; beyond it a file is not taken for text


def without_mark(text: bytes, path: str) -> bytes:
    """The first bytes of a text file without the byte order mark that some editors put there.

    Raises:
        BadInput: it is the mark of UTF-16, with a character that is half a NUL behind it.
    """
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and b"\0" in text[2:4]:
        raise BadInput(f"{path}: is UTF-16, as its byte order mark says; save it as UTF-8.")
    return text[len(codecs.BOM_UTF8) :] if text.startswith(codecs.BOM_UTF8) else text


def read_blocks(path: str, size: int = 1 << 20) -> Iterator[bytes]:
    """Yields the text of a file in blocks of about `size` bytes, cut where lines end.

    Raises:
        BadInput: for a .gz file that is not gzip, or is cut short, for a line of over LONGEST_LINE
            bytes, and for UTF-16.
    """
    with tf.io.gfile.GFile(path, "rb") as raw:
        stream = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
        rest, begin = b"", True
        while True:
            try:
                read = stream.read(size)
            except (OSError, EOFError, zlib.error) as error:
                raise BadInput(f"{path}: is not whole as a gzip file ({error})") from error
            at_end = not read
            if begin:
                read, begin = without_mark(read, path), False
            head, newline, tail = read.rpartition(b"\n")
            text, rest = (rest + head + newline, tail) if newline else (b"", rest + read)
            if text:
                yield text
            if at_end:
                if rest:
                    yield rest
                return
            if len(rest) > LONGEST_LINE:
                raise BadInput(f"{path}: has a line of over {LONGEST_LINE} bytes: not LibSVM text.")


def read_lines(path: str) -> Iterator[Tuple[int, bytes]]:
    """Yields (line number from 1, text without comment) of the lines of a file that hold a record.

    Raises:
        BadInput: as `read_blocks` does.
    """
    number = 0
    for block in read_blocks(path):
        for line in block.split(b"\n")[: -1 if block.endswith(b"\n") else None]:
            number += 1
            line = line.partition(b"#")[0]
            if line.strip():
                yield number, line
