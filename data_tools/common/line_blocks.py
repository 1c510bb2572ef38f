"""Reads text files in blocks of whole lines, and decodes the LibSVM lines of a block."""

import functools
from typing import Callable, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
import tensorflow as tf

from data_tools.common import workers
from deepfm.data import libsvm, records
from deepfm.data.plain import libsvm_text
from deepfm.data.plain.bad_record import BadRecord, find_refused
from deepfm.data.plain.text_blocks import record_starts, without_comment

BLOCK = 1 << 20  # bytes read at once
TASK = 16 << 20  # bytes of an uncompressed file that a process takes as one task

_NEWLINE = ord("\n")


class LineRange(NamedTuple):
    """Consecutive whole lines of a file.

    Attributes:
        path: a local or s3:// file.
        start: byte of the uncompressed text where the first line begins; 0 for a gzip file.
        end: byte where the line after the last one begins; None: the end of the file.
    """

    path: str
    start: int = 0
    end: Optional[int] = None


def read_blocks(lines: LineRange) -> Iterator[Tuple[int, bytes, int]]:
    """Yields (start, text, bytes read) for each block of the lines; see libsvm.read_blocks."""
    return libsvm.read_blocks(lines.path, BLOCK, lines.start, lines.end)


def lines_from(path: str, begin: int, end: int) -> Optional[LineRange]:
    """The lines of a file that begin in bytes [begin, end); None if there are none.

    A gzip file cannot be split, so its range is always the whole file.
    """
    if path.endswith(".gz"):
        return LineRange(path)
    size = tf.io.gfile.stat(path).length
    start = _next_line(path, begin) if begin else 0
    stop = _next_line(path, end) if end < size else None
    return None if start in (stop, size) else LineRange(path, start, stop)


def cut(path: str, size: int) -> List[LineRange]:
    """Splits a file of `size` bytes into one LineRange per task; a gzip file is one task."""
    starts = range(0, 1 if path.endswith(".gz") else size, TASK)
    return list(filter(None, (lines_from(path, start, start + TASK) for start in starts)))


def _next_line(path, position):
    """The byte where the first line at or after `position` begins, in an uncompressed file."""
    with libsvm.open_file(path) as f:
        f.seek(position - 1)
        return position - 1 + len(f.readline())


def numbering(lines: LineRange) -> Callable[[], int]:
    """A function that returns the number, from 1, of the first line of a range.

    The first call reads the file up to there, so callers wait until they find a bad line.
    """
    before = lines._replace(start=0, end=lines.start)
    count = lambda: sum(text.count(b"\n") for _, text, _ in read_blocks(before))
    return functools.lru_cache(maxsize=1)(lambda: 1 + count() if lines.start else 1)


def sift(path, text, number, parse, explain, content=without_comment):
    """Yields a BadRecord for each line of a block that the parser refuses; returns the others.

    Args:
        path: the file's path.
        text: the block.
        number: the number of its first line.
        parse: parses lines given as one text; raises InvalidArgumentError if any line is bad.
        explain: says what is wrong with a line, or returns None for a good one.
        content: returns the part of a line to parse.

    Returns:
        {index: content} of the lines that are good or hold no record.
    """

    def accepts(lines):
        try:
            parse(b"\n".join(lines) + b"\n")
        except tf.errors.InvalidArgumentError:
            return False
        return True

    found = {i: content(line) for i, line in enumerate(text.split(b"\n"))}
    rows = [i for i, line in found.items() if line.strip()]
    for i, reason in find_refused(accepts, [found[i] for i in rows], explain):
        del found[rows[i]]
        yield BadRecord(path, f":{number + rows[i]}", reason)
    return found


def decoded(lines: LineRange, field_size: Optional[int] = None, weighted: bool = False) -> Iterator:
    """Decodes and checks LibSVM lines of field_size pairs each, or of any length without it.

    Args:
        weighted: whether labels may have a weight.

    Yields:
        For each block, a BadRecord per bad line, and then a tuple for its n good lines: (text of
        the block; the bytes in it where each line begins and ends, int64 [n] each; the result of
        libsvm.decode_lines, with labels 0 or 1, and if weighted with weights float32 [n]; bytes of
        the file read).
    """
    decode, first, lines_before = _decoder(field_size, weighted), numbering(lines), 0
    explain = lambda line: libsvm_text.explain_line(
        line, records.Schema(field_size or len(line.split()) - 1, weighted=weighted)
    )
    for _, text, read in read_blocks(lines):
        starts = record_starts(text)
        newlines = np.flatnonzero(np.frombuffer(text, np.uint8) == _NEWLINE)
        line = np.searchsorted(newlines, starts)  # the index of each record's line
        try:
            found = decode(text)
        except tf.errors.InvalidArgumentError:
            good = yield from sift(lines.path, text, first() + lines_before, decode, explain)
            kept = np.isin(line, list(good))
            starts, line, found = starts[kept], line[kept], decode(b"\n".join(good.values()))
        yield text, starts, newlines[line] + 1, found, read
        lines_before += len(newlines)


@functools.lru_cache(maxsize=2)  # built once per process
def _decoder(field_size, weighted):
    """A function text -> (labels 0 or 1, rows, ids, values), as libsvm.decode_lines returns.

    If weighted, also weights.
    """

    def decode(text):
        lines = libsvm.drop_blank(tf.compat.v1.string_split([text], "\n").values)
        lines = libsvm.weights_as_pairs(lines) if weighted else lines
        labels, rows, ids, values = libsvm.decode_lines(lines, known_ascii=True)
        weights = []
        if weighted:
            found, pairs = libsvm.take_weights(rows, values)
            rows, ids, values = (tf.gather(x, pairs) for x in (rows, ids, values))
            weights = [found]
        if field_size:
            lengths = tf.math.bincount(rows, minlength=tf.size(labels))
            with tf.control_dependencies([tf.debugging.assert_equal(lengths, field_size)]):
                rows = tf.identity(rows)
        schema = records.Schema(field_size)
        labels, ids, values, *weights = records.check(labels, ids, values, schema, *weights)
        return (labels, rows, ids, values, *weights)

    run = workers.native(decode, (tf.string, []))

    def decode_ascii(text):
        if not text.isascii():
            raise tf.errors.InvalidArgumentError(None, None, "not ASCII")
        return run(text)

    return decode_ascii
