"""LibSVM text: parses its lines, a batch at a time, and explains what is wrong with a line.

A line is `label id:value id:value ...`; only the converter also reads LibFFM's `label
field:id:value ...`. In weighted data `label:weight` may stand in place of the label, as XGBoost
reads it (https://xgboost.readthedocs.io/en/stable/tutorials/input_format.html). A `#` begins a
comment. Lines without a record are skipped.
"""

import codecs
import fractions
import gzip
import re
import zlib
from typing import Iterator, Optional, Tuple

import numpy as np
import tensorflow as tf

from deepfm.data.records import (
    NO_WEIGHT,
    Schema,
    Shape,
    check,
    explain_id,
    explain_width,
    is_weight,
    normal,
)
from deepfm.errors import BadInput

LONGEST_LINE = 64 << 20  # bytes; a file with a longer line is not text
UNEXPLAINED = "refused by TensorFlow's decoder"  # though `explain_line` finds no fault
HASH_IN_ID = re.compile(rb"[^\s]#|[ \t]#\S")  # a '#' that may begin a comment or belong to an id
_ID = re.compile(rb"-?[0-9]+")
_FIELD = re.compile(rb"[0-9]{1,6}")
_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_HEXADECIMAL = re.compile(rb"[+-]?0[xX][0-9a-fA-F]+")
_NUMBER_CHARACTERS = 31  # longest number that TensorFlow's decoder reads
_INT64_MAX = np.iinfo(np.int64).max
_WEIGHT = re.compile(rb"(?m)^([^\S\n]*[^\s:#]+)(?::([^\s#]*))?")  # a label, and perhaps its weight


def without_mark(text: bytes, path: str) -> bytes:
    """The first bytes of a text file without the byte order mark that some editors put there.

    Raises:
        BadInput: it is the mark of UTF-16, followed by a character with a NUL byte.
    """
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and b"\0" in text[2:4]:
        raise BadInput(f"{path}: its byte order mark says UTF-16; save it as UTF-8.")
    return text[len(codecs.BOM_UTF8) :] if text.startswith(codecs.BOM_UTF8) else text


def open_file(path: str):
    """Opens a local or s3:// file to read bytes."""
    return tf.io.gfile.GFile(path, "rb") if "://" in path else open(path, "rb")


def read_blocks(
    path: str, size: int = 1 << 20, start: int = 0, end: Optional[int] = None
) -> Iterator[Tuple[int, bytes, int]]:
    """Yields blocks of whole lines of a text file: (offset, text, bytes read for it).

    The offset is in bytes of the uncompressed text, and 0 for a text after a byte order mark; the
    bytes read are those of the file on disk. Every line, the file's last too, ends in a newline.

    Args:
        path: a local or s3:// file, plain or (by its name) gzip.
        size: bytes to read at once.
        start: offset of the beginning of a line, in uncompressed bytes; 0 for a gzip file.
        end: offset at which to stop, the beginning of a line; None: the end of the file.

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


def read_lines(path: str) -> Iterator[Tuple[int, bytes]]:
    """Yields (line number from 1, text without comment) for each line that holds a record.

    Raises:
        BadInput: see `read_blocks`.
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
    """The lines of a file that hold a record, in chunks; for the arguments see Format.read."""

    # TextLineDataset drops every carriage return, and so turns "3:1\r5" into 3:15.
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
        known_ascii: whether the caller has checked that lines are ASCII (see `decode_lines`).

    Returns:
        (labels float32 [B], ids int64 [B, F], values float32 [B, F]); with weights also these,
        float32 [B].

    Raises:
        tf.errors.InvalidArgumentError: when run on a batch with a bad line (see `explain_line`).
    """
    lines = weights_as_pairs(lines) if schema.weighted else lines
    labels, rows, ids, values = decode_lines(lines, schema.id_offset, known_ascii)
    weights = []
    if schema.weighted:
        found, pairs = take_weights(rows, values)
        rows, ids, values = (tf.gather(x, pairs) for x in (rows, ids, values))
        weights = [found]
    n = tf.size(labels)
    lengths = tf.math.bincount(rows, minlength=n)
    shape = tf.stack([n, schema.field_size])
    if not schema.pad:
        with tf.control_dependencies([tf.debugging.assert_equal(lengths, schema.field_size)]):
            ids, values = tf.reshape(ids, shape), tf.reshape(values, shape)
    else:
        checks = [
            tf.debugging.assert_less_equal(lengths, schema.field_size),
            tf.debugging.assert_positive(ids),  # id 0 is reserved for padding
        ]
        with tf.control_dependencies(checks):
            starts = tf.cumsum(lengths, exclusive=True)
        where = tf.stack([rows, tf.range(tf.size(ids)) - tf.gather(starts, rows)], axis=1)
        ids, values = tf.scatter_nd(where, ids, shape), tf.scatter_nd(where, values, shape)
    width = [None, schema.field_size]
    ids, values = tf.ensure_shape(ids, width), tf.ensure_shape(values, width)
    found = check(labels, ids, values, schema, *weights)
    return found if schema.with_labels else found[:3]


def weights_as_pairs(lines):
    """Turns `label:weight` into `label 0:weight`, which TensorFlow's decoder reads.

    A line without a weight gets 1. string [B] -> string [B]; `take_weights` takes the pair out.
    """
    given = tf.strings.regex_replace(
        lines, r"^([\s\v]*[^\s\v:]+)([\s\v]|$)", r"\1:1\2", replace_global=False
    )
    return tf.strings.regex_replace(given, r"^([\s\v]*[^\s\v:]+):", r"\1 0:", replace_global=False)


def weights_as_pairs_of(text: bytes, pair: bytes = b"0:") -> bytes:
    """As weights_as_pairs, for a block of lines, whose pairs begin with `pair` (LibFFM: 0:0:)."""
    return _WEIGHT.sub(
        lambda found: b"%s %s%s" % (found[1], pair, b"1" if found[2] is None else found[2]), text
    )


def take_weights(rows, values):
    """Takes the first pair of each line for its weight.

    Args:
        rows: int32 [n], the line of each pair, ascending, each line with a pair.
        values: float32 [n].

    Returns:
        (weights float32 [B], the other pairs int64 [n - B]).
    """
    first = tf.not_equal(rows, tf.concat([[-1], rows[:-1]], 0))
    return tf.gather(values, tf.where(first)[:, 0]), tf.where(~first)[:, 0]


def decode_lines(lines, id_offset=0, known_ascii=False):
    """Decodes a batch of LibSVM lines of any length; n is the number of pairs in the batch.

    Args:
        lines: string [B], none of them blank or only a comment (see `drop_blank`).
        id_offset: added to each id.
        known_ascii: whether the caller has checked that lines are ASCII. If not, this checks it,
            which takes a tenth of the time: the decoder quotes a line that it refuses, and
            session.run crashes (a segmentation fault) on a message that is not UTF-8.

    Returns:
        (labels float32 [B] as written, rows int32 [n], ids int64 [n], values float32 [n]); pair i
        belongs to line rows[i], in the order of the line.

    Raises:
        tf.errors.InvalidArgumentError: when run on a batch with a line that is not LibSVM.
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
    """Strips comments (`# ...`) and drops lines that hold nothing else. string [N] -> [B]."""
    lines = tf.strings.regex_replace(lines, r"#\C*", "")  # \C: any byte, even if not UTF-8
    return tf.boolean_mask(lines, tf.logical_not(tf.strings.regex_full_match(lines, r"[\s\v]*")))


def shape(line: bytes) -> Shape:
    """The Shape of a line."""
    words = line.split()
    return Shape(len(words) - 1, weighted=b":" in words[0])


def explain_line(line: bytes, schema: Schema) -> Optional[str]:
    """What is wrong with a LibSVM line, and what was expected; None if nothing is."""
    if schema.hash_buckets and HASH_IN_ID.search(line):
        return f"'#' begins a comment and cannot be in an id; put spaces around it: {_text(line)}"
    first, *pairs = line.partition(b"#")[0].split()
    label, colon, weight = first.partition(b":")
    if number_of(label) not in (-1, 0, 1):
        return f"label {_text(first)} is not 0, 1, -1 or +1: {_text(line)}"
    if colon and not schema.weighted:
        return (
            f"label {_text(first)} has a weight, but the first record has none; write that one as "
            f"label:1 (or give train.py --example_weights): {_text(line)}"
        )
    if colon and not is_weight(number_of(weight)):
        return f"weight {_text(weight)} {NO_WEIGHT}: {_text(line)}"
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
            reason = None if found else f"feature id {number} belongs to no field of the map"
        reason = reason or _explain_field(field, fields, schema)
        if reason:
            return f"{reason}: {_text(line)}"
        fields.add(field)
    if not positional:
        return None
    return explain_width(len(pairs), schema, "id:value pairs", _text(line))


def _explain_field(field, before, schema):
    if field is not None and field >= schema.field_size:
        found = f"field {field} (counted from 0) is beyond --field_size={schema.field_size}"
        return f"{found}; try --field_size={field + 1}"
    if field is not None and field in before and not schema.multi_valued:
        return f"field {field} has two values; try --multi_valued, which keeps both"
    return None


def _integer(text):
    """An id as a number; only the first 20 digits of a longer one, which exceed any id."""
    number = int(text.lstrip(b"-0")[:20] or b"0")
    return -number if text.startswith(b"-") else number


def number_of(text: bytes) -> np.float32:
    """The number that TensorFlow's decoder reads; NaN if it reads none."""
    if len(text) > _NUMBER_CHARACTERS:
        return np.float32("nan")
    with np.errstate(over="ignore"):
        if _HEXADECIMAL.fullmatch(text):
            return np.float32(int(text, 16))
        return normal(np.float32(_double(text))) if _NUMBER.fullmatch(text) else np.float32("nan")


def _double(text):
    """A float64 that rounds to the float32 nearest to the text."""
    number = np.float64(text)
    if number.view(np.int64) & (1 << 29) - 1 == 1 << 28:  # half-way between two float32
        exact = fractions.Fraction(text.decode())
        if exact != number:
            return np.nextafter(number, np.inf if exact > number else -np.inf)
    return number


def _text(raw, limit=60):
    text = raw.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= limit else text[: limit - 4] + " ...")
