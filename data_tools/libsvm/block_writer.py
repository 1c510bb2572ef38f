"""Converts LibSVM or LibFFM text to TFRecord, block by block, in one process of the converter.

A graph of native ops splits a block into lines, parses them, encodes them and writes the records.
Python looks at single rows only if a block is refused: to find the bad lines and write the others.
"""

import functools
from typing import List, NamedTuple, Optional, Tuple

import tensorflow as tf
import tensorflow.contrib.libsvm  # noqa: F401  loaded before forking, so that processes share it

from data_tools.common import line_blocks, line_decoding, record_files, workers
from data_tools.common.line_blocks import LineRange
from data_tools.libsvm import field_lines
from deepfm.data import libsvm, records
from deepfm.data.plain import libsvm_text, text_blocks


class Piece(NamedTuple):
    """A contiguous part of an output file.

    Attributes:
        path: the temporary file for it alone.
        output: the index of the output file.
        rows: how many rows of the range it takes; None: all of them.
    """

    path: str
    output: int
    rows: Optional[int] = None


class BlockFacts(NamedTuple):
    """Facts about the records of a block.

    Attributes:
        rows: records written.
        positives: how many of them have label 1.
        max_id: the largest id, negative if there is no record.
        negative: whether a label has a minus sign.
        zero: whether a label is 0.
    """

    rows: int
    positives: int
    max_id: int
    negative: bool
    zero: bool


# What `_taken` returns for a block.
_INPUTS = (tf.string, []), (tf.int32, [None]), (tf.string, [None])


@functools.lru_cache(maxsize=1)  # built once per process
def _appender(schema):
    """Makes a function that appends the records of a `_taken` block and returns BlockFacts."""

    def encode(text, fields, strings):
        lines, labels, ids, values, *more = _parse(text, fields, strings, schema)
        weights = more.pop() if schema.weighted else None
        counts = more[0] if more else None
        negative = tf.strings.regex_full_match(lines, r"(?s)[\s\v]*-.*")
        facts = BlockFacts(
            tf.size(labels),
            tf.reduce_sum(labels),
            # The smallest int64 if there is no record; a record may have no id.
            tf.reduce_max(ids if counts is None else tf.pad(ids, [[0, 0], [0, 1]])),
            tf.reduce_any(negative),
            tf.reduce_any(tf.equal(labels, 0) & ~negative),
        )
        return records.encode(labels, ids, values, counts, weights), facts

    return record_files.appender(encode, *_INPUTS)


@functools.lru_cache(maxsize=1)
def _parser(schema):
    parse = lambda *inputs: [x.op for x in _parse(*inputs, schema)]
    return workers.native(parse, *_INPUTS)


def check(text, schema):
    """Refuses (tf.errors.InvalidArgumentError) a text with a bad line."""
    _parser(schema)(*_taken(text, schema))


def _parse(text, named, strings, schema):
    """(lines with a record, labels, ids, values, counts if multi-valued, weights if weighted)."""
    lines = libsvm.drop_blank(tf.compat.v1.string_split([text], "\n").values)
    if _is_plain(schema):
        return (lines, *libsvm.parse_lines(lines, schema, known_ascii=True))
    labels, rows, ids, values = libsvm.decode_lines(lines, schema.id_offset, known_ascii=True)
    weighing = int(schema.weighted)  # pairs of a line that are its weight: the first one
    of_pairs = [tf.shape(ids)]
    if schema.hash_buckets:
        of_pairs.append(tf.shape(strings))
        ids = records.hashed(strings, schema.hash_buckets)
    if schema.named_fields:
        of_pairs.append(tf.shape(named))
        fields = named
    elif schema.field_ids:
        fields = field_lines.fields_of(ids - schema.id_offset, schema.field_ids)
    else:
        lengths = tf.math.bincount(rows, minlength=tf.size(labels))
        starts = tf.cumsum(lengths, exclusive=True)
        fields = tf.range(tf.size(rows)) - tf.gather(starts, rows) - weighing
        if not schema.pad:
            of_pairs.append(tf.size(labels)[tf.newaxis] * (schema.field_size + weighing))
    with tf.control_dependencies([tf.debugging.assert_equal(x, of_pairs[0]) for x in of_pairs[1:]]):
        rows = tf.identity(rows)
    weights = []
    if weighing:
        found, pairs = libsvm.take_weights(rows, values)
        rows, fields, ids, values = (tf.gather(x, pairs) for x in (rows, fields, ids, values))
        weights = [found]
    ids, values, *counts = field_lines.place(rows, fields, ids, values, tf.size(labels), schema)
    labels, ids, values, *weights = records.check(labels, ids, values, schema, *weights)
    return (lines, labels, ids, values, *counts, *weights)


def _is_plain(schema):
    """Whether lines are LibSVM with the fields in order."""
    return not (schema.named_fields or schema.field_ids or schema.hash_buckets)


def _taken(text, schema):
    """A block as field_lines.take returns it; raises InvalidArgumentError if that refuses it."""
    if schema.hash_buckets and libsvm_text.HASH_IN_ID.search(text):
        raise tf.errors.InvalidArgumentError(None, None, "'#' in an id")
    if schema.weighted and not _is_plain(schema):
        text = libsvm_text.weights_as_pairs_of(text, b"0:0:" if schema.named_fields else b"0:")
    taken = field_lines.take(text, schema.named_fields, bool(schema.hash_buckets))
    if taken is None or not taken[0].isascii():
        raise tf.errors.InvalidArgumentError(None, None, "a malformed pair, or not ASCII")
    return taken


def convert(task: Tuple[LineRange, List[Piece]], schema):
    """Writes the lines of a range to its pieces, in order.

    Yields:
        For each block, a BadRecord per bad line, which is not written, and then (bytes
        of the input file read, (index of the output file, BlockFacts)).
    """
    append = lambda path, text: _appender(schema)(path, *_taken(text, schema))
    parse, explain, content = (
        functools.partial(f, schema=schema)
        for f in (check, libsvm_text.explain_line, _without_comment)
    )
    lines, pieces = task
    path, first = lines.path, line_blocks.numbering(lines)
    for piece, text, lines_before, read in _cut(lines, pieces):
        try:
            facts = append(piece.path, text)
        except tf.errors.InvalidArgumentError:
            number = first() + lines_before
            good = yield from line_decoding.sift(path, text, number, parse, explain, content)
            facts = append(piece.path, b"\n".join(good.values()))
        yield read, (piece.output, BlockFacts(*(fact.item() for fact in facts)))


def _without_comment(line, schema):
    """A line without its comment, unless that may have been meant as part of an id."""
    content = text_blocks.without_comment(line)
    doubtful = schema.hash_buckets and content.strip() and libsvm_text.HASH_IN_ID.search(line)
    return line if doubtful else content


def _cut(lines, pieces):
    """Yields (piece, text, lines of the range before it, bytes read) for each block of a piece."""
    pieces = iter(pieces)
    piece = next(pieces)
    left, lines_before = piece.rows, 0
    for _, text, read in line_blocks.read_blocks(lines):
        starts = [] if left is None else text_blocks.record_starts(text)
        row = begin = 0
        while left is not None and row + left <= len(starts):
            row += left
            end = starts[row] if row < len(starts) else len(text)
            yield piece, text[begin:end], lines_before, read
            lines_before += text.count(b"\n", begin, end)
            begin, read = end, 0
            piece = next(pieces, None)
            if piece is None:  # no rows are left
                return
            left = piece.rows
        if begin < len(text):
            yield piece, text[begin:], lines_before, read
            lines_before += text.count(b"\n", begin)
            left = None if left is None else left - (len(starts) - row)
