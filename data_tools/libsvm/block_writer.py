"""LibSVM or LibFFM text to TFRecord, a block at a time: what a process of the converter does.

One graph of native ops splits a block into lines, parses them, encodes them and writes the records.
Python sees no row, unless a block is refused: then it finds the bad lines and writes the others.
"""

import functools
import re
from typing import List, NamedTuple, Optional

import tensorflow as tf
import tensorflow.contrib.libsvm  # noqa: F401  loaded before processes fork, which then share it

from data_tools.common import line_blocks, record_files, workers
from data_tools.common.line_blocks import LineRange
from data_tools.libsvm import field_lines
from deepfm.data import bad_records, libsvm, records


class Piece(NamedTuple):
    """A contiguous part of an output file.

    Attributes:
        path: its own, temporary file.
        output: the index of the output file.
        rows: the rows of the range that it takes; None: all of them.
    """

    path: str
    output: int
    rows: Optional[int] = None


class Conversion(NamedTuple):
    """Lines of an input and the pieces that they go to, in order: what is one task."""

    lines: LineRange
    pieces: List[Piece]


class BlockFacts(NamedTuple):
    """What is known of the records of a block.

    Attributes:
        rows: records that were written.
        positives: those with label 1.
        max_id: the largest id, negative where there is no record.
        negative: whether a label is written with a minus sign.
        zero: whether a label is 0.
    """

    rows: int
    positives: int
    max_id: int
    negative: bool
    zero: bool


class BadBlock(Exception):
    """A block holds a bad line, or (in a comment, perhaps) a character that is not ASCII."""


class BlockWriter:
    """The graph that writes a block of LibSVM text as TFRecords.

    Args:
        schema: what each line must look like.
    """

    def __init__(self, schema):
        graph = tf.Graph()
        self._schema = schema
        with graph.as_default():
            self._text = tf.compat.v1.placeholder(tf.string, [])
            lines = tf.compat.v1.string_split([self._text], "\n").values
            lines = libsvm.drop_blank(lines)
            self._taken = tf.compat.v1.placeholder(tf.int32, [None], name="fields")
            self._strings = tf.compat.v1.placeholder(tf.string, [None], name="ids")
            labels, ids, values, *counts = self._parse(lines, schema)
            negative = tf.strings.regex_full_match(lines, r"(?s)[\s\v]*-.*")
            self._checked = [labels.op, ids.op, values.op]
            self._facts = [
                tf.size(labels),
                tf.reduce_sum(labels),
                # The smallest int64 where there is no record; a record may have no id.
                tf.reduce_max(tf.pad(ids, [[0, 0], [0, 1]]) if counts else ids),
                tf.reduce_any(negative),
                tf.reduce_any(tf.equal(labels, 0) & ~negative),
            ]
            encode = records.encode_multi_valued if counts else records.encode
            self._appender = record_files.RecordAppender(encode(labels, ids, values, *counts))
        self._session = workers.one_thread_session(graph)

    def _parse(self, lines, schema):
        """What `records` parses of lines, with counts where fields may hold several values."""
        if not (schema.named_fields or schema.field_ids or schema.hash_buckets):
            return libsvm.parse_lines(lines, schema, known_ascii=True)
        labels, rows, ids, values = libsvm.decode_lines(lines, schema.id_offset, known_ascii=True)
        of_pairs = [tf.shape(ids)]
        if schema.hash_buckets:
            of_pairs.append(tf.shape(self._strings))
            ids = records.hashed(self._strings, schema.hash_buckets)
        if schema.named_fields:
            of_pairs.append(tf.shape(self._taken))
            fields = self._taken
        elif schema.field_ids:
            fields = field_lines.fields_of(ids - schema.id_offset, schema.field_ids)
        else:
            lengths = tf.math.bincount(rows, minlength=tf.size(labels))
            starts = tf.cumsum(lengths, exclusive=True)
            fields = tf.range(tf.size(rows)) - tf.gather(starts, rows)
            if not schema.pad:
                of_pairs.append(tf.size(labels)[tf.newaxis] * schema.field_size)
        with tf.control_dependencies(
            [tf.debugging.assert_equal(x, of_pairs[0]) for x in of_pairs[1:]]
        ):
            rows = tf.identity(rows)
        ids, values, *counts = field_lines.place(rows, fields, ids, values, tf.size(labels), schema)
        return (*records.check(labels, ids, values, schema), *counts)

    def _feed(self, text):
        """What is fed of a block of lines.

        Raises:
            BadBlock: a pair is of another form, or not ASCII.
        """
        schema = self._schema
        if schema.hash_buckets and libsvm.HASH_IN_ID.search(text):
            raise BadBlock
        if schema.named_fields or schema.hash_buckets:
            text = re.sub(rb"#[^\n]*", b"", text) if b"#" in text else text
        taken = field_lines.take(text, schema.named_fields, bool(schema.hash_buckets))
        if taken is None or not taken.text.isascii():
            raise BadBlock
        feed = {self._text: taken.text}
        if taken.fields is not None:
            feed[self._taken] = taken.fields
        if taken.ids is not None:
            feed[self._strings] = taken.ids
        return feed

    def append(self, text, path):
        """Appends the records of `text` to a file; returns BlockFacts.

        Raises:
            BadBlock: a line is bad; `accepts` helps to find which.
            OSError: the file cannot be written.
        """
        feed = self._feed(text)
        try:
            facts = self._appender.run(self._session, path, feed, self._facts)
        except tf.errors.InvalidArgumentError:
            raise BadBlock from None
        return BlockFacts(*(fact.item() for fact in facts))

    def accepts(self, lines):
        """Whether none of the lines is bad."""
        try:
            self._session.run(self._checked, self._feed(b"\n".join(lines) + b"\n"))
        except (BadBlock, tf.errors.InvalidArgumentError):
            return False
        return True


_block_writer = functools.lru_cache(maxsize=1)(BlockWriter)  # a process makes one, and keeps it


def convert(conversion, schema):
    """Writes the pieces of a Conversion.

    Yields:
        (bytes of the input file read, (index of the output file, BlockFacts)) for each block, and
        before it a bad_records.BadRecord for each of its bad lines, which are not written.
    """
    path = conversion.lines.path
    writer = _block_writer(schema)
    first_line = None  # its number costs a look at the file up to there; only bad lines need it
    for piece, text, lines_before, read in _cut(conversion):
        try:
            facts = writer.append(text, piece.path)
        except BadBlock:
            if first_line is None:
                first_line = line_blocks.line_number(path, conversion.lines.start)
            lines = {
                number: _without_comment(line, schema)
                for number, line in enumerate(text.split(b"\n"), start=first_line + lines_before)
            }
            for number, reason in _bad_lines(writer, lines, schema):
                del lines[number]
                yield bad_records.BadRecord(path, f":{number}", reason)
            facts = writer.append(b"\n".join(lines.values()), piece.path)
        yield read, (piece.output, facts)


def _without_comment(line, schema):
    """A line without its comment; with it where that may have been meant to be an id."""
    content = line.partition(b"#")[0]
    doubtful = schema.hash_buckets and content.strip() and libsvm.HASH_IN_ID.search(line)
    return line if doubtful else content


def _cut(conversion):
    """Yields (piece, text, lines of the range before it, bytes read) for each block of a piece."""
    pieces = iter(conversion.pieces)
    piece = next(pieces)
    left, lines_before = piece.rows, 0
    for _, text, read in line_blocks.read_blocks(*conversion.lines):
        starts = [] if left is None else line_blocks.record_starts(text)
        row = begin = 0
        while left is not None and row + left <= len(starts):
            row += left
            end = starts[row] if row < len(starts) else len(text)
            yield piece, text[begin:end], lines_before, read
            lines_before += text.count(b"\n", begin, end)
            begin, read = end, 0
            piece = next(pieces, None)
            if piece is None:  # the rest holds no row
                return
            left = piece.rows
        if begin < len(text):
            yield piece, text[begin:], lines_before, read
            lines_before += text.count(b"\n", begin)
            left = None if left is None else left - (len(starts) - row)


def _bad_lines(writer, lines, schema):
    """Yields (number, reason) of what the writer refuses of {number: line without comment}."""
    numbers = [number for number, line in lines.items() if line.strip()]
    candidates = [lines[number] for number in numbers]
    explain = lambda line: libsvm.explain_line(line, schema)
    for i, reason in bad_records.find_refused(writer.accepts, candidates, explain):
        yield numbers[i], reason
