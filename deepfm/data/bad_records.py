"""Which record is wrong, and why: a slow, plain reader beside the native one of `records`.

The native ops parse a batch at a time and name no record when they refuse it. Here the same rules
are applied to one record at a time, and files are read past their damage.
"""

import fractions
import functools
import gzip
import itertools
import re
import struct
import warnings
import zlib
from typing import Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import google.protobuf.message
import numpy as np
import tensorflow as tf

from deepfm.data import records, text_lines
from deepfm.data.records import FRAME, Schema

CHUNK = 4096  # records that are checked at once
_PIECE = 64  # of a chunk that is refused: the first bad record is found soon
LONGEST_RECORD = 1 << 30  # bytes; for a longer one TensorFlow's reader may end the whole program
UNEXPLAINED = "refused by TensorFlow's decoder"  # though the plain reader finds nothing wrong
_MANGLED = "not as a tf.train.Example is written: a feature that is there twice, or in parts"
_INT64_MAX = np.iinfo(np.int64).max
_SMALLEST_NORMAL = np.finfo(np.float32).tiny


class BadRecord(NamedTuple):
    """A record that breaks the schema: its file, place (line, or record and byte) and reason."""

    path: str
    place: str
    reason: str

    def __str__(self):
        return f"{self.path}{self.place}: {self.reason}"


_ID = re.compile(rb"-?[0-9]+")
_FIELD = re.compile(rb"[0-9]{1,6}")
HASH_IN_ID = re.compile(rb"[^\s]#|[ \t]#\S")  # which begins a comment, or was meant to be an id's
_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_HEXADECIMAL = re.compile(rb"[+-]?0[xX][0-9a-fA-F]+")
_NUMBER_CHARACTERS = 31  # what TensorFlow's decoder reads of a number at most


def explain_line(line: bytes, schema: Schema) -> Optional[str]:
    """What is wrong with a LibSVM line, against what; None where nothing is."""
    if schema.hash_buckets and HASH_IN_ID.search(line):
        return f"'#' begins a comment, after a blank and before one, and is in no id: {_text(line)}"
    label, *pairs = line.partition(b"#")[0].split()
    if number_of(label) not in (-1, 0, 1):
        return f"label {_text(label)} is none of 0, 1, -1 and +1: {_text(line)}"
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
        reason = _explain_id(number + (schema.id_offset if number >= 0 else 0), schema)
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
    return _explain_width(len(pairs), schema, "id:value pairs", _text(line))


def _explain_field(field, before, schema):
    if field is not None and field >= schema.field_size:
        return f"field {field} is not below field_size {schema.field_size}"
    if field is not None and field in before and not schema.multi_valued:
        return f"field {field} has two values (--multi_valued keeps them)"
    return None


def explain_example(serialized: bytes, schema: Schema, with_labels=True) -> Optional[str]:
    """What is wrong with a serialized Example, against what; None where nothing is."""
    try:
        features = _features(serialized)
    except ValueError as error:
        return f"not a tf.train.Example ({error})"
    ids, values = features["ids"].int64_list.value, features["values"].float_list.value
    schema = schema._replace(pad=False)
    counts = list(features["counts"].int64_list.value) or [1] * schema.field_size
    reason = _explain_counts(counts, schema)
    width = schema._replace(field_size=sum(counts))
    for name, found in (("ids", ids), ("values", values)):
        reason = reason or _explain_width(len(found), width, name, list(found)[:5])
    if reason:
        return reason
    if with_labels:
        label = list(features["label"].float_list.value)
        if len(label) != 1 or _normal(label[0]) not in (-1, 0, 1):
            return f"label {label} is none of [0], [1], [-1]"
    for value in values:
        if not np.isfinite(value):
            return f"value {value} is not a finite number"
    for feature_id in ids:
        reason = _explain_id(feature_id, schema)
        if reason:
            return reason
    return None


def _explain_counts(counts, schema):
    reason = _explain_width(len(counts), schema, "counts", counts[:5])
    if not reason and min(counts) < 0:
        reason = f"counts hold {min(counts)}, which is negative"
    if not reason and not schema.multi_valued and set(counts) != {1}:
        other = next(n for n in counts if n != 1)
        reason = f"field {counts.index(other)} has {other} values (--multi_valued reads them)"
    return reason


def _features(serialized):
    """The features of a serialized Example by name; ValueError where it is none."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            example = tf.train.Example.FromString(serialized)
        except (google.protobuf.message.DecodeError, RuntimeError) as error:
            raise ValueError(" ".join(str(error).split())) from error
    if warned:  # that what follows an end-group tag was not read
        raise ValueError(str(warned[0].message))
    return example.features.feature


def _integer(text):
    """An id as a number; of a longer one, the first 20 digits, which are beyond any id."""
    number = int(text.lstrip(b"-0")[:20] or b"0")
    return -number if text.startswith(b"-") else number


def _explain_id(feature_id, schema):
    if feature_id < 0:
        return f"feature id {feature_id} is negative"
    if schema.pad and feature_id == 0:
        return "feature id 0 is reserved for padding (--id_offset=1 shifts 0-based ids)"
    if schema.feature_size is not None and feature_id >= schema.feature_size:
        return f"feature id {feature_id} is not below feature_size {schema.feature_size}"
    if feature_id >= schema.limit:
        return f"feature id {feature_id} is not below {schema.limit}: no table has more rows"
    return None


def _explain_width(found, schema, what, sample):
    if found == schema.field_size or (schema.pad and found < schema.field_size):
        return None
    at_most = "at most " if schema.pad else ""
    hint = (
        " (libsvm_to_tfrecord --pad fills short rows)"
        if found < schema.field_size and "pairs" in what
        else ""
    )
    return f"expected {at_most}{schema.field_size} {what}, found {found}{hint}: {sample}"


def number_of(text: bytes) -> np.float32:
    """The number that TensorFlow's decoder reads; NaN where it reads none."""
    if len(text) > _NUMBER_CHARACTERS:
        return np.float32("nan")
    with np.errstate(over="ignore"):
        if _HEXADECIMAL.fullmatch(text):
            return np.float32(int(text, 16))
        return _normal(np.float32(_double(text))) if _NUMBER.fullmatch(text) else np.float32("nan")


def _normal(number):
    """The float32 that TensorFlow's threads take it for: 0 below the normal numbers."""
    return np.float32(0 if abs(number) < _SMALLEST_NORMAL else number)


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


# Reading files record by record, past damage.


def read_frames(path: str) -> Iterator[Tuple[int, Optional[bytes], str]]:
    """Yields (byte offset, payload, reason) of the records of a TFRecord file.

    After a record whose checksum is wrong (payload None, reason says so) it goes on with the next;
    where the length itself is damaged, with the next place that has a right header. The bytes in
    between count as one bad record. A gzip file is read up to its first damage.
    """
    from tensorflow.python import pywrap_tensorflow  # tf_record_iterator cannot start at an offset

    compressed = path.endswith(".gz")
    size = tf.io.gfile.stat(path).length
    lengths = _Lengths(path)
    offset = 0
    while compressed or offset < size:
        kind = b"GZIP" if compressed else b""
        with tf.errors.raise_exception_on_not_ok_status() as status:
            reader = pywrap_tensorflow.PyRecordReader_New(path.encode(), offset, kind, status)
        try:
            while lengths.at(offset) <= LONGEST_RECORD:
                reader.GetNext()
                payload = reader.record()
                yield offset, payload, ""
                offset += FRAME + len(payload)
            yield offset, None, f"corrupt (its length is said to be {lengths.at(offset)} bytes)"
            after = None if compressed else _next_frame(path, offset, size)
        except tf.errors.OutOfRangeError:
            if compressed or offset >= size:
                return
            yield offset, None, "the file ends inside this record (truncated)"
            return
        except tf.errors.DataLossError as error:
            after = None if compressed else _next_frame(path, offset, size)
            truncated = "truncated" in error.message
            yield (
                offset,
                None,
                (
                    "the file ends inside this record (truncated)"
                    if truncated and after is None
                    else f"corrupt ({error.message.split(' at ')[0]})"
                ),
            )
        finally:
            reader.Close()
        if after is None:
            return
        offset = after


class _Lengths:
    """What the headers of a TFRecord file say of the lengths of its records."""

    def __init__(self, path):
        raw = tf.io.gfile.GFile(path, "rb")
        self._stream = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
        self._start, self._data = 0, b""

    def at(self, offset):
        """The bytes of the record at an offset (ascending), 0 where no header can be read."""
        if not self._start <= offset <= self._start + len(self._data) - 8:
            self._start = offset
            try:
                self._stream.seek(offset)
                self._data = self._stream.read(1 << 20)
            except (OSError, EOFError, zlib.error):  # TensorFlow's reader says it better
                self._data = b""
        if len(self._data) < 8:
            return 0
        return struct.unpack_from("<Q", self._data, offset - self._start)[0]


def _next_frame(path, offset, size):
    """The offset of the next record header with a right checksum after a bad record, or None."""
    with tf.io.gfile.GFile(path, "rb") as f:
        f.seek(offset)
        data = f.read(12)
        if len(data) == 12 and _header_starts(data)[0]:
            after = offset + FRAME + struct.unpack("<Q", data[:8])[0]
            return after if after < size else None
        start = offset + 1
        while start + 12 <= size:
            f.seek(start)
            data = f.read(1 << 20)
            hits = np.flatnonzero(_header_starts(data)) if len(data) >= 12 else []
            if len(hits):
                return start + int(hits[0])
            start += max(len(data) - 11, 1)
    return None


def _crc32c_table():
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    return table.astype(np.uint32)


_CRC32C = _crc32c_table()


def _header_starts(data):
    """bool [len(data) - 11]: where a TFRecord header (length, masked CRC-32C of it) may start."""
    raw = np.frombuffer(data, np.uint8)
    n = len(raw) - 11
    crc = np.full(n, 0xFFFFFFFF, np.uint32)
    for i in range(8):
        crc = _CRC32C[(crc ^ raw[i : n + i]) & 0xFF] ^ (crc >> np.uint32(8))
    crc = ~crc
    masked = ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)
    found = np.zeros(n, np.uint32)
    for i in range(4):
        found |= raw[8 + i : n + 8 + i].astype(np.uint32) << np.uint32(8 * i)
    return masked == found


def looks_like_tfrecord(head: bytes) -> bool:
    """Whether the first 12 bytes of a file are a TFRecord header."""
    return len(head) >= 12 and bool(_header_starts(head[:12])[0])


def numbered(path, data_format):
    """Yields (place, payload or None, reason) for each record of a file."""
    if data_format == "libsvm":
        for number, line in text_lines.read_lines(path):
            yield f":{number}", line, ""
    else:
        for number, (offset, payload, reason) in enumerate(read_frames(path)):
            yield f": record {number} at byte {offset}", payload, reason


def first_record(path: str, data_format: str) -> Tuple[Optional[int], bool]:
    """(number of fields of a file's first record, None where it cannot be read; whether these may
    hold several values)."""
    payload = next((payload for _, payload, _ in numbered(path, data_format)), None)
    if payload is None:
        return None, False
    if data_format == "libsvm":
        return len(payload.split()) - 1, False
    try:
        features = _features(payload)
    except ValueError:
        return None, False
    counts = features["counts"].int64_list.value
    return len(counts or features["ids"].int64_list.value), bool(counts)


def count(path: str, data_format: str) -> int:
    """The records of a file, bad ones included, each of which its reader counts as one."""
    return sum(1 for _ in numbered(path, data_format))


def find_bad(
    path: str,
    data_format: str,
    schema: Schema,
    with_labels: bool = True,
    first: Optional[int] = None,
) -> Iterator[BadRecord]:
    """Yields the bad records of a file, in order.

    Whole chunks go through the native parser; only a chunk that it refuses is looked at slowly.

    Args:
        path: a local or s3:// file, its name ending in .gz where it is compressed.
        data_format: "tfrecord" or "libsvm".
        schema: what its records must look like.
        with_labels: whether TFRecord records must hold a label.
        first: look at this many records only.
    """
    accepts = _parser(data_format, schema, with_labels)
    if data_format == "libsvm":
        explain, unexplained = lambda line: explain_line(line, schema), UNEXPLAINED
    else:
        explain = lambda payload: explain_example(payload, schema, with_labels)
        unexplained = _MANGLED
    for chunk in _chunks(itertools.islice(numbered(path, data_format), first)):
        for unread, group in itertools.groupby(chunk, key=lambda item: item[1] is None):
            group = list(group)
            if unread:
                yield from (BadRecord(path, place, reason) for place, _, reason in group)
                continue
            payloads = [payload for _, payload, _ in group]
            for i, reason in find_refused(accepts, payloads, explain, unexplained):
                yield BadRecord(path, group[i][0], reason)


@functools.lru_cache(maxsize=2)  # for all files of a data set: to make one takes 0.2 s
def _parser(data_format, schema, with_labels):
    """A function that says whether the native parser accepts a batch."""
    with tf.Graph().as_default() as graph:
        raw = tf.compat.v1.placeholder(tf.string, [None])
        features, labels = records.parse(raw, data_format, schema, with_labels)
    session = tf.compat.v1.Session(graph=graph)
    checked = [t.op for t in (*features.values(), labels)]

    def accepts(payloads):
        try:
            session.run(checked, {raw: payloads})
        except (tf.errors.InvalidArgumentError, tf.errors.DataLossError):
            return False
        return True

    return accepts


def find_refused(
    accepts: Callable[[Sequence[bytes]], bool],
    payloads: Sequence[bytes],
    explain: Callable[[bytes], Optional[str]],
    unexplained: str = UNEXPLAINED,
) -> Iterator[Tuple[int, str]]:
    """Yields (index, reason) of each payload that a batch parser refuses, in order.

    The parser alone decides. But what the plain reader finds bad is put to it one by one, and the
    rest at once: where many are bad that is much faster than to look for each by halving.

    Args:
        accepts: whether the parser accepts a batch; it must refuse one that holds a bad payload.
        payloads: the batch.
        explain: what is wrong with a payload; None where nothing is.
        unexplained: the reason where `explain` has none.
    """
    if not payloads or accepts(payloads):
        return
    for start in range(0, len(payloads), _PIECE):
        piece = payloads[start : start + _PIECE]
        if accepts(piece):
            continue
        reasons = [explain(payload) for payload in piece]
        bad = [i for i, reason in enumerate(reasons) if reason and not accepts([piece[i]])]
        rest = [i for i, reason in enumerate(reasons) if not reason]
        bad += [rest[i] for i in _halve(accepts, [piece[i] for i in rest], 0)]
        yield from ((start + i, reasons[i] or unexplained) for i in sorted(bad))


def _halve(accepts, payloads, first):
    """Yields the index, plus `first`, of each payload that is refused."""
    if not payloads or accepts(payloads):
        return
    if len(payloads) == 1:
        yield first
        return
    half = len(payloads) // 2
    yield from _halve(accepts, payloads[:half], first)
    yield from _halve(accepts, payloads[half:], first + half)


def _chunks(items) -> Iterator[List]:
    chunk = []
    for item in items:
        chunk.append(item)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
