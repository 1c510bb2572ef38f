"""LibSVM text: its lines, parsed a batch at a time, and what is wrong with one of them.

A line is `label id:value id:value ...`, with what LibFFM writes as `label field:id:value ...` for
the converter alone. Nothing from a `#` on counts, nor a line without a record.
"""

import codecs
import fractions
import gzip
import re
import zlib
from typing import Iterator, Optional, Tuple

import numpy as np
import tensorflow as tf

from deepfm.data.records import Schema, check, explain_id, explain_width, normal
from deepfm.errors import BadInput

LONGEST_LINE = 64 << 20  # bytes; beyond it a file is not taken for text
UNEXPLAINED = "refused by TensorFlow's decoder"  # though the plain reader finds nothing wrong
HASH_IN_ID = re.compile(rb"[^\s]#|[ \t]#\S")  # which begins a comment, or was meant to be an id's
_ID = re.compile(rb"-?[0-9]+")
_FIELD = re.compile(rb"[0-9]{1,6}")
_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_HEXADECIMAL = re.compile(rb"[+-]?0[xX][0-9a-fA-F]+")
_NUMBER_CHARACTERS = 31  # what TensorFlow's decoder reads of a number at most
_INT64_MAX = np.iinfo(np.int64).max


def without_mark(text: bytes, path: str) -> bytes:
    """The first bytes of a text file without the byte order mark that some editors put there.

    Raises:
        BadInput: it is the mark of UTF-16, with a character that is half a NUL behind it.
    """
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and b"\0" in text[2:4]:
        raise BadInput(f"{path}: UTF-16, by its byte order mark; save it as UTF-8.")
    return text[len(codecs.BOM_UTF8) :] if text.startswith(codecs.BOM_UTF8) else text


def open_file(path: str):
    """A local or s3:// file, for reading bytes."""
    return tf.io.gfile.GFile(path, "rb") if "://" in path else open(path, "rb")


def read_blocks(
    path: str, size: int = 1 << 20, start: int = 0, end: Optional[int] = None
) -> Iterator[Tuple[int, bytes, int]]:
    """Yields (where it begins, text, bytes read for it) of blocks of whole lines of a text file.

    The begin is in bytes of the uncompressed text, and 0 after a byte order mark; the bytes read
    are those of the file as it lies on the disk. Each line ends in a newline, also the file's last.

    Args:
        path: a local or s3:// file, plain or (by its name) gzip.
        size: bytes that are read at once.
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
            wanted = size if end is None else min(size, end - position)
            try:
                read = stream.read(wanted) if wanted else b""
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
                yield 0 if at == mark else at, text, now - told
                told = now
            if at_end:
                return
            if len(rest) > LONGEST_LINE:
                raise BadInput(f"{path}: has a line of over {LONGEST_LINE} bytes: not LibSVM text.")


def read_lines(path: str) -> Iterator[Tuple[int, bytes]]:
    """Yields (line number from 1, text without comment) of the lines of a file that hold a record.

    Raises:
        BadInput: as `read_blocks` does.
    """
    number = 0
    for _, text, _ in read_blocks(path):
        for line in text.split(b"\n")[:-1]:
            number += 1
            line = line.partition(b"#")[0]
            if line.strip():
                yield number, line


def numbered(path: str) -> Iterator[Tuple[str, bytes, str]]:
    """Yields (place, line, "") for each record of a file."""
    for number, line in read_lines(path):
        yield f":{number}", line, ""


def read(path, files, buffer_bytes, ops):
    """The lines of a file that hold a record, in chunks; the arguments are those of Format.read."""

    # TextLineDataset leaves out every carriage return, and makes 3:15 of "3:1\r5".
    def blocks(path):
        return (text for _, text, _ in read_blocks(path.decode(), buffer_bytes))

    text = tf.data.Dataset.from_generator(blocks, tf.string, [], [path])
    lines = lambda block: tf.compat.v1.string_split([block], "\n").values
    return ops.pack(text.map(lambda block: drop_blank(lines(block))))


def parse_lines(lines, schema, known_ascii=False):
    """Parses and checks a batch of LibSVM lines with the native decoder.

    Args:
        lines: string [B], none of them blank or only a comment (see `drop_blank`).
        schema: Schema.
        known_ascii: the caller has made sure of it (see `decode_lines`).

    Returns:
        (labels float32 [B], ids int64 [B, F], values float32 [B, F]).

    Raises:
        tf.errors.InvalidArgumentError: when run, for a batch with a bad line (see `explain_line`).
    """
    labels, rows, ids, values = decode_lines(lines, schema.id_offset, known_ascii)
    n = tf.size(labels)
    lengths = tf.math.bincount(rows, minlength=n)
    shape = tf.stack([n, schema.field_size])
    if not schema.pad:
        with tf.control_dependencies([tf.debugging.assert_equal(lengths, schema.field_size)]):
            ids, values = tf.reshape(ids, shape), tf.reshape(values, shape)
    else:
        checks = [
            tf.debugging.assert_less_equal(lengths, schema.field_size),
            tf.debugging.assert_positive(ids),  # id 0 is the padding's
        ]
        with tf.control_dependencies(checks):
            starts = tf.cumsum(lengths, exclusive=True)
        where = tf.stack([rows, tf.range(tf.size(ids)) - tf.gather(starts, rows)], axis=1)
        ids, values = tf.scatter_nd(where, ids, shape), tf.scatter_nd(where, values, shape)
    width = [None, schema.field_size]
    return check(labels, tf.ensure_shape(ids, width), tf.ensure_shape(values, width), schema)


def decode_lines(lines, id_offset=0, known_ascii=False):
    """Decodes a batch of LibSVM lines of any length, as they are; n is the batch's pairs.

    Args:
        lines: string [B], none of them blank or only a comment (see `drop_blank`).
        id_offset: added to each id.
        known_ascii: the caller has made sure of it. Otherwise it is checked, for a tenth of the
            time: the decoder quotes the line that it refuses, and session.run crashes (a
            segmentation fault) on a message that is not UTF-8.

    Returns:
        (labels float32 [B] as written, rows int32 [n], ids int64 [n], values float32 [n]); pair i
        belongs to line rows[i], in the order of the line.

    Raises:
        tf.errors.InvalidArgumentError: when run, for a batch with a line that is not LibSVM.
    """
    from tensorflow.contrib import libsvm  # only LibSVM's readers pay for loading contrib

    if not known_ascii:
        ascii_only = tf.reduce_all(tf.strings.regex_full_match(lines, "[[:ascii:]]*"))
        with tf.control_dependencies([tf.debugging.Assert(ascii_only, ["not ASCII"])]):
            lines = tf.identity(lines)
    # num_features only sets the dense shape, which is not used.
    pairs, labels = libsvm.decode_libsvm(lines, num_features=1, label_dtype=tf.float32)
    rows = tf.cast(pairs.indices[:, 0], tf.int32)
    return labels, rows, pairs.indices[:, 1] + id_offset, pairs.values


def drop_blank(lines):
    """Strips comments (`# ...`) and drops the lines that hold nothing else. string [N] -> [B]."""
    lines = tf.strings.regex_replace(lines, r"#\C*", "")  # \C: any byte, also where not UTF-8
    return tf.boolean_mask(lines, tf.logical_not(tf.strings.regex_full_match(lines, r"[\s\v]*")))


def explain_line(line: bytes, schema: Schema) -> Optional[str]:
    """What is wrong with a LibSVM line, against what; None where nothing is."""
    if schema.hash_buckets and HASH_IN_ID.search(line):
        return f"'#' begins a comment, after a blank and before one, and is in no id: {_text(line)}"
    label, *pairs = line.partition(b"#")[0].split()
    if number_of(label) not in (-1, 0, 1):
        return f"label {_text(label)} is not 0, 1, -1 or +1: {_text(line)}"
    positional = not (schema.named_fields or schema.field_ids)
    fields = set()
    for pair in pairs:
        field, rest = None, pair
        if schema.named_fields:
            field, _, rest = pair.partition(b":")
            if not _FIELD.fullmatch(field):
                return f"{_text(pair)} is not field:id:value: {_text(line)}"
            field = int(field)
        feature_id, colon, value = rest.partition(b":")
        known = feature_id if schema.hash_buckets else _ID.fullmatch(feature_id)
        if not colon or not known or not value:
            form = "field:id:value" if schema.named_fields else "id:value"
            return f"{_text(pair)} is not {form}: {_text(line)}"
        if positional and value.count(b":") == 1:
            hint = "like LibFFM, which data_tools.libsvm_to_tfrecord converts"
            return f"{_text(pair)} is not id:value ({hint}): {_text(line)}"
        number = 1 if schema.hash_buckets else _integer(feature_id)
        if number > _INT64_MAX:
            return f"feature id {_text(feature_id)} is not below 2^63: {_text(line)}"
        if len(value) > _NUMBER_CHARACTERS:
            limit = f"longer than {_NUMBER_CHARACTERS} characters"
            return f"value {_text(value)} is {limit}: {_text(line)}"
        if not np.isfinite(number_of(value)):
            return f"value {_text(value)} is not a finite number: {_text(line)}"
        # The decoder refuses a negative id before the offset could lift it.
        reason = explain_id(number + (schema.id_offset if number >= 0 else 0), schema)
        if schema.field_ids and not reason:
            found = [i for i, (a, b) in enumerate(schema.field_ids) if a <= number < b]
            field = found[0] if found else None
            reason = None if found else f"feature id {number} is of no field of the map"
        reason = reason or _explain_field(field, fields, schema)
        if reason:
            return f"{reason}: {_text(line)}"
        fields.add(field)
    if not positional:
        return None
    return explain_width(len(pairs), schema, "id:value pairs", _text(line))


def _explain_field(field, before, schema):
    if field is not None and field >= schema.field_size:
        return f"field {field} does not fit --field_size={schema.field_size} (fields start at 0)"
    if field is not None and field in before and not schema.multi_valued:
        return f"field {field} has two values (--multi_valued keeps them)"
    return None


def _integer(text):
    """An id as a number; of a longer one, the first 20 digits, which are beyond any id."""
    number = int(text.lstrip(b"-0")[:20] or b"0")
    return -number if text.startswith(b"-") else number


def number_of(text: bytes) -> np.float32:
    """The number that TensorFlow's decoder reads; NaN where it reads none."""
    if len(text) > _NUMBER_CHARACTERS:
        return np.float32("nan")
    with np.errstate(over="ignore"):
        if _HEXADECIMAL.fullmatch(text):
            return np.float32(int(text, 16))
        return normal(np.float32(_double(text))) if _NUMBER.fullmatch(text) else np.float32("nan")


def _double(text):
    """A number that rounds to the float32 which the text is nearest to."""
    number = np.float64(text)
    if number.view(np.int64) & (1 << 29) - 1 == 1 << 28:  # half-way between two float32
        exact = fractions.Fraction(text.decode())
        if exact != number:
            return np.nextafter(number, np.inf if exact > number else -np.inf)
    return number


def _text(raw, limit=60):
    text = raw.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= limit else text[: limit - 4] + " ...")
