"""The formats of record files, an entry each: how one is recognized, read, parsed and explained.

Whoever reads records asks the entry and names no format. Another format is another entry of
FORMATS, and a file beside `libsvm` with the functions of that entry.
"""

import gzip
import struct
import zlib
from typing import Callable, Iterator, NamedTuple, Optional, Tuple

import numpy as np
import tensorflow as tf

from deepfm.data import libsvm, records
from deepfm.data.plain import data_file, decoder, libsvm_decoder, libsvm_text, wire
from deepfm.data.plain.frames import LONGEST_RECORD, TRUNCATED, header_starts, too_long
from deepfm.data.plain.schema import FRAME, Shape
from deepfm.kernels.ops import CHUNK, TENSORFLOW


class Format(NamedTuple):
    """How a format stores records in files, and how to read them.

    Attributes:
        name: the value of --data_format.
        title: name of the format in messages.
        suffixes: suffixes of its files; the first is the one that we write.
        numbered: path -> (place, payload or None, reason) of each record, read slowly, past damage.
        shape: payload -> Shape.
        explain: (payload, schema) -> what is wrong with the record; None if nothing is.
        unexplained: the reason to give for a refused record in which `explain` finds no fault.
        accepts: (payloads, schema) -> whether numpy's decoder soon finds all of them good.
        read: (path string [], DataFiles of the data set, bytes to read at once, Ops) -> dataset of
            the raw records of a file, in chunks.
        parse_chunk: (chunk of Ops, schema, Ops) -> labels, ids, values, perhaps counts, and weights
            if the schema gives them.
        begins: the first 12 bytes of a file -> whether the file may have this format.
        faster: the format that reads faster, as advice; None if there is none.
        chunks_by_buffer: whether the chunks of `read` depend on the bytes to read at once.
        count: path -> its records, without reading more of them than it must.
        in_pipe: what SageMaker's PipeModeDataset calls it.
        clean: what that reads -> the records in it. string [n] -> [at most n].
    """

    name: str
    title: str
    suffixes: Tuple[str, ...]
    numbered: Callable
    shape: Callable
    explain: Callable
    unexplained: str
    accepts: Callable
    read: Callable
    parse_chunk: Callable
    count: Callable
    begins: Callable = lambda head: True
    faster: Optional[str] = None
    chunks_by_buffer: bool = False
    in_pipe: str = "TFRecord"
    clean: Callable = tf.identity

    def first_record(self, path: str) -> Shape:
        """The Shape of a file's first record."""
        payload = next((payload for _, payload, _ in self.numbered(path)), None)
        return Shape() if payload is None else self.shape(payload)

    def parse(self, raw, schema, ops=TENSORFLOW):
        """Parses and checks a batch of raw records.

        Args:
            raw: a chunk of `ops`.
            schema: Schema.
            ops: Ops.

        Returns:
            ({"feat_ids": int64 [B, F], "feat_vals": float32 [B, F]}, labels float32 [B]); if fields
            may hold several values, int64 and float32 [B, M], and "feat_counts" int32 [B, F]. With
            weights also "example_weights" float32 [B].

        Raises:
            The errors of `libsvm.parse_lines` and `records.parse`.
        """
        labels, *found = self.parse_chunk(raw, schema, ops)
        weights = {"example_weights": found.pop()} if schema.with_weights else {}
        features = dict(zip(["feat_ids", "feat_vals", "feat_counts"], found))
        return {**features, **weights}, labels


# TFRecord.


def read_frames(path: str) -> Iterator[Tuple[int, Optional[bytes], str]]:
    """Yields (byte offset, payload, reason) of the records of a TFRecord file.

    A record with a wrong checksum yields payload None and a reason, and reading continues with the
    next record; if the length itself is damaged, with the next valid header. The bytes in between
    count as one bad record. A gzip file is read up to its first damage.
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
        truncated = False
        try:
            while lengths.at(offset) <= LONGEST_RECORD:
                reader.GetNext()
                payload = reader.record()
                yield offset, payload, ""
                offset += FRAME + len(payload)
            reason = too_long(lengths.at(offset))
        except tf.errors.OutOfRangeError:
            if not compressed and offset < size:
                yield offset, None, TRUNCATED
            return
        except tf.errors.DataLossError as error:
            truncated = "truncated" in error.message
            reason = f"corrupt ({error.message.split(' at ')[0]})"
        finally:
            reader.Close()
        after = None if compressed else _next_frame(path, offset, size)
        yield offset, None, TRUNCATED if truncated and after is None else reason
        if after is None:
            return
        offset = after


class _Lengths:
    """The lengths of a TFRecord file's records, as their headers give them."""

    def __init__(self, path):
        raw = tf.io.gfile.GFile(path, "rb")
        self._stream = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
        self._start, self._data = 0, b""

    def at(self, offset):
        """The length of the record at an offset, 0 if unreadable; call in ascending order."""
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


def _count_frames(path):
    """The records of a TFRecord file, by its headers unless they make no sense."""
    size, lengths, offset, count = tf.io.gfile.stat(path).length, _Lengths(path), 0, 0
    while offset < size and not path.endswith(".gz"):
        offset += FRAME + lengths.at(offset)
        count += 1
    return count if offset == size else sum(1 for _ in read_frames(path))


def _next_frame(path, offset, size):
    """The offset of the next valid record header after a bad record, or None."""
    with tf.io.gfile.GFile(path, "rb") as f:
        f.seek(offset)
        data = f.read(12)
        if len(data) == 12 and header_starts(data)[0]:
            after = offset + FRAME + struct.unpack("<Q", data[:8])[0]
            return after if after < size else None
        start = offset + 1
        while start + 12 <= size:
            f.seek(start)
            data = f.read(1 << 20)
            hits = np.flatnonzero(header_starts(data)) if len(data) >= 12 else []
            if len(hits):
                return start + int(hits[0])
            start += max(len(data) - 11, 1)
    return None


def _numbered_frames(path):
    for number, (offset, payload, reason) in enumerate(read_frames(path)):
        yield f": record {number} at byte {offset}", payload, reason


def _read_frames(path, files, buffer_bytes, ops):
    """The records of a TFRecord file in chunks."""
    size = _size(path, files)

    def plain():
        gzip = tf.strings.regex_full_match(path, r".*\.gz")
        compression = tf.where(gzip, "GZIP", "")
        chunks = tf.data.TFRecordDataset(path, compression, buffer_bytes)
        return _to_the_end(chunks.batch(CHUNK), size)

    if any(file.path.endswith(".gz") for file in files):
        return ops.pack(plain())
    return ops.read(path, buffer_bytes, size, plain)


def _to_the_end(chunks, size):
    """Chunks of a TFRecord file; fails at the end if a plain file holds more than was read.

    TFRecordDataset treats a file that is cut inside a record's header as one that ends there.
    """

    def count(read, chunk):
        """Passes a chunk on and counts the bytes read; an empty chunk follows the last one."""
        lengths = tf.cast(tf.strings.length(chunk), tf.int64) + FRAME
        whole = (tf.size(chunk) > 0) | tf.equal(read, size) | (size < 0)
        with tf.control_dependencies([tf.debugging.Assert(whole, ["bytes outside any record"])]):
            return read + tf.reduce_sum(lengths), tf.identity(chunk)

    counted = tf.data.experimental.scan(tf.zeros([], tf.int64), count)
    nothing = tf.data.Dataset.from_tensors(tf.zeros([0], tf.string))
    return chunks.concatenate(nothing).apply(counted)


def _size(path, files):
    """The bytes of an uncompressed file, -1 for a compressed one. string [] -> int64 []."""
    plain = [("", -1), *((x.path, x.bytes) for x in files if not x.path.endswith(".gz"))]
    paths, sizes = zip(*plain)
    return tf.reduce_max(tf.where(tf.equal(paths, path), np.int64(sizes), np.full(len(plain), -1)))


def _accepts_examples(payloads, schema):
    sizes = np.array([len(payload) for payload in payloads], np.int64)
    ends = np.cumsum(sizes)
    data = b"".join(payloads)
    return decoder.decode(data, ends - sizes, ends, schema, most_others=100) is not None


def _accepts_lines(lines, schema):
    return libsvm_decoder.decode(b"".join(b"%s\n" % line for line in lines), schema) is not None


TFRECORD = Format(
    name="tfrecord",
    title="TFRecord",
    suffixes=data_file.TFRECORD,
    numbered=_numbered_frames,
    shape=wire.shape,
    explain=wire.explain,
    unexplained=wire.UNEXPLAINED,
    accepts=_accepts_examples,
    read=_read_frames,
    parse_chunk=lambda raw, schema, ops: ops.parse(raw, schema, records.parse),
    count=_count_frames,
    begins=data_file.KINDS["tfrecord"].begins,
)
LIBSVM = Format(
    name="libsvm",
    title="LibSVM",
    suffixes=data_file.LIBSVM,
    numbered=libsvm.numbered,
    shape=libsvm_text.shape,
    explain=libsvm_text.explain_line,
    unexplained=libsvm_text.UNEXPLAINED,
    accepts=_accepts_lines,
    read=libsvm.read,
    count=libsvm.count,
    in_pipe="TextLine",
    clean=libsvm.drop_blank,
    parse_chunk=lambda chunk, schema, ops: ops.parse_lines(chunk, schema, libsvm.parse_lines),
    faster="TFRecord files (python -m data_tools.libsvm_to_tfrecord)",
    chunks_by_buffer=True,
)
FORMATS = {each.name: each for each in (TFRECORD, LIBSVM)}  # the last takes what no other does
SUFFIXES = sum((each.suffixes for each in FORMATS.values()), ())
