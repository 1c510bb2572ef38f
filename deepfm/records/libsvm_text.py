"""LibSVM text: blocks of whole lines, what is wrong with a line, and what number a text in it is.

A line is `label id:value id:value ...`; only the converter also reads LibFFM's `label
field:id:value ...`. In weighted data `label:weight` may stand in place of the label, as XGBoost
reads it (https://xgboost.readthedocs.io/en/stable/tutorials/input_format.html). A `#` begins a
comment. A line holds a record if it has anything but blanks before its first `#`; others are
skipped.
"""

import codecs
import fractions
import gzip
import re
import zlib
from typing import Iterator, Optional, Tuple

import numpy as np

from deepfm.errors import BadInput
from deepfm.records import library
from deepfm.records.schema import (
    LARGER,
    NO_WEIGHT,
    Schema,
    Shape,
    explain_id,
    explain_width,
    is_weight,
    normal,
)
from deepfm.records.storage import places

UNEXPLAINED = "refused by the decoder"  # though `explain_line` finds no fault
HASH_IN_ID = re.compile(rb"[^\s]#|[ \t]#\S")  # a '#' that may begin a comment or belong to an id
_CONTROL = re.compile(rb"[^\x20-\xff\t\n\r\v\f]")  # a character that is neither blank nor text
_NO_LABELS = "lines without labels need one before each (for inference sed 's/^/0 /')"
_A_TABLE = (
    "is it a table? data_tools.prepare_criteo --columns reads raw cells, libsvm_to_tfrecord "
    "--input_format=csv encoded ids"
)
_ID = re.compile(rb"-?[0-9]+")
_FIELD = re.compile(rb"[0-9]{1,6}")
_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_HEXADECIMAL = re.compile(rb"[+-]?0[xX][0-9a-fA-F]+")
_NUMBER_CHARACTERS = 31  # longest number that TensorFlow's decoder reads
_INT64_MAX = np.iinfo(np.int64).max
_WEIGHT = re.compile(rb"(?m)^([^\S\n]*[^\s:#]+)(?::([^\s#]*))?")  # a label, and perhaps its weight
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
        words_of = (without_comment(line).split() for line in text.split(b"\n"))
        return max(sum(word.count(b":") for word in words[1:]) for words in words_of)
    if b"#" in text:
        return max(without_comment(line).count(b":") for line in text.split(b"\n"))
    colons = np.flatnonzero(np.frombuffer(text, np.uint8) == _COLON)
    return int(np.diff(np.searchsorted(colons, np.append(starts, len(text)))).max())


def weights_as_pairs_of(text: bytes) -> bytes:
    """LibFFM text whose weights, 1 by default, are first pairs: `label 0:0:weight ...`."""
    return _WEIGHT.sub(
        lambda found: b"%s 0:0:%s" % (found[1], b"1" if found[2] is None else found[2]), text
    )


def shape(line: bytes) -> Shape:
    """The Shape of a line."""
    words = line.split()
    return Shape(len(words) - 1, weighted=b":" in words[0])


def first_shape(path: str) -> Shape:
    """The Shape of a file's first line with a record."""
    return next((shape(line) for _, line in lines(path)), Shape())


def check_labelled(data):
    """Refuses (BadInput) a DataSet whose lines all begin with the same `label:weight`.

    They have no labels, it seems: an id:value pair was taken for one. Reads on only while that may
    be so.
    """
    every = (line for file in data.files for _, line in lines(file.path))
    firsts = (line.split(None, 1)[0].partition(b":") for line in every)
    label, colon, _ = next(firsts, (b"", b"", b""))
    if colon and all(other == label and given for other, given, _ in firsts):
        raise BadInput(
            f"{data.name}: every line begins {_text(label + colon)}, so labels seem to be missing; "
            f"{_NO_LABELS}; if these are weights, give --example_weights."
        )


def explain_line(line: bytes, schema: Schema) -> Optional[str]:
    """What is wrong with a LibSVM line, and what was expected; None if nothing is."""
    if schema.hash_buckets and HASH_IN_ID.search(line):
        return f"'#' begins a comment and cannot be in an id; put spaces around it: {_text(line)}"
    first, *pairs = line.partition(b"#")[0].split()
    if pairs and pairs[0].startswith(b"qid:"):
        return f"query groups are not supported; leave {_text(pairs[0])} out: {_text(line)}"
    label, colon, weight = first.partition(b":")
    if number_of(label) not in (-1, 0, 1):
        hint = f" ({_NO_LABELS})" if colon and _ID.fullmatch(label) else ""
        hint = f" ({_A_TABLE})" if b"," in line and b":" not in line else hint
        return f"label {_text(first)} is not 0, 1, -1 or +1{hint}: {_text(line)}"
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
        if schema.hash_buckets and _CONTROL.search(feature_id):
            return f"id {_text(feature_id)} has a control character: {_text(line)}"
        if positional and value.count(b":") == 1:
            hint = "like LibFFM, which data_tools.libsvm_to_tfrecord converts"
            return f"{_text(pair)} is not id:value ({hint}): {_text(line)}"
        number = 1 if schema.hash_buckets else _integer(feature_id)
        if number > _INT64_MAX:
            return f"feature id {_text(feature_id)} is not below 2^63{LARGER}: {_text(line)}"
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


def numbers(line: bytes, schema: Schema) -> Optional[tuple]:
    """(label, ids, values, counts, weight) of a line with a record; None if `explain_line` finds a
    fault. What one string hashes to only the compiled codec knows."""
    if explain_line(line, schema):
        return None
    if schema.hash_buckets:
        raise BadInput(f"--hash_buckets needs the compiled codec; {library.ADVICE}.")
    first, *pairs = line.partition(b"#")[0].split()
    label, _, weight = first.partition(b":")
    row = [[] for _ in range(schema.field_size)]
    for place, pair in enumerate(pairs):
        *named, name, value = pair.split(b":")
        ranges = enumerate(schema.field_ids or ())
        place = next((i for i, (a, b) in ranges if a <= int(name) < b), place)
        row[int(named[0]) if named else place].append((int(name) + schema.id_offset, value))
    cells = row if schema.multi_valued else [cell or [(0, b"0")] for cell in row]
    ids, values = zip(*sum(cells, [])) if any(cells) else ((), ())
    counts = [len(cell) for cell in row]
    values = [number_of(value) for value in values]
    if schema.pad and not (schema.named_fields or schema.field_ids or schema.multi_valued):
        values = [value + 0 for value in values]  # no -0, as if added to the zeros that fill a row
    return number_of(label) > 0, list(ids), values, counts, number_of(weight or b"1")


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
