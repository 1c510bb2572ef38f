"""The formats of record files, an entry each: how one is recognized, read, parsed and explained.

Whoever reads records asks the entry and names no format. Another format is another entry of
FORMATS, and a file beside `libsvm` with the functions of that entry.
"""

import functools
import struct
from typing import Callable, Iterator, NamedTuple, Optional, Tuple

import numpy as np

from deepfm.data import libsvm, records
from deepfm.kernels.ops import TENSORFLOW
from deepfm.kernels.reading import CHUNK
from deepfm.records import codec, data_file, frames, library, libsvm_text, wire
from deepfm.records.schema import BadRecord, find_refused
from deepfm.records.tfrecord import FRAME
from deepfm.runtime.tf import tf


class Format(NamedTuple):
    """How a format stores records in files, and how to read them.

    Attributes:
        name, title, suffixes, begins, first_shape: as of a data_file.Kind; `name` is the value of
            --data_format.
        numbered: path -> (place, payload or None, reason) of each record, read slowly, past damage.
        explain: (payload, schema) -> what is wrong with the record; None if nothing is.
        unexplained: the reason to give for a refused record in which `explain` finds no fault.
        decodes: (payloads, schema) -> whether the compiled codec finds all of them good.
        read: (path string [], DataFiles of the data set, bytes to read at once, Ops) -> dataset of
            the raw records of a file, in chunks.
        parse_chunk: (chunk of Ops, schema, Ops) -> labels, ids, values, perhaps counts, and weights
            if the schema gives them.
        keys: path -> lists of the keys of its records, in order; None: its records have none.
        faster: the format that reads faster, as advice; None if there is none.
        chunks_by_buffer: whether the chunks of `read` depend on the bytes to read at once.
        count: path -> its records, without reading more of them than it must.
        in_pipe: what SageMaker's PipeModeDataset calls it.
        clean: what that reads -> the records in it. string [n] -> [at most n].
    """

    name: str
    title: str
    suffixes: Tuple[str, ...]
    begins: Callable
    first_shape: Callable
    numbered: Callable
    explain: Callable
    unexplained: str
    decodes: Callable
    read: Callable
    parse_chunk: Callable
    count: Callable
    keys: Optional[Callable] = None
    faster: Optional[str] = None
    chunks_by_buffer: bool = False
    in_pipe: str = "TFRecord"
    clean: Callable = tf.identity

    def refused(self, payloads, schema) -> Iterator[Tuple[int, str]]:
        """Yields (index, reason) of each bad payload; slowly without the compiled codec."""
        explain = functools.partial(self.explain, schema=schema)
        if library.load():
            accepts = functools.partial(self.decodes, schema=schema)
        else:
            accepts = lambda some: not any(map(explain, some))
        return find_refused(accepts, payloads, explain, self.unexplained)

    def parse(self, raw, schema, ops=TENSORFLOW):
        """Parses and checks a batch of raw records, a chunk of `ops`.

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


def _numbered_frames(path):
    for block in frames.frames_of_file(path):
        if isinstance(block, BadRecord):
            yield block.place, None, block.reason
        else:
            yield from ((block.place(i), block.payload(i), "") for i in range(len(block)))


def _keys_of_frames(path):
    """Yields lists of keys, empty for a record without one and for one that cannot be read."""
    for block in frames.frames_of_file(path):
        if isinstance(block, BadRecord):
            yield [b""]
        else:
            yield codec.keys(block.data, block.starts + frames.HEADER, block.ends - 4)


def _count_frames(path):
    """The records of a TFRecord file, by its headers unless they make no sense."""
    data, at, count = b"", 0, 0
    if not path.endswith(".gz"):
        with tf.io.gfile.GFile(path, "rb") as f:
            for block in iter(lambda: f.read(1 << 20), b""):
                data, at = data[at:] + block, max(at - len(data), 0)
                while at + 8 <= len(data):
                    at += FRAME + struct.unpack_from("<Q", data, at)[0]
                    count += 1
        if at == len(data):
            return count
    return sum(1 for _ in _numbered_frames(path))


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


def _decodes_lines(lines, schema):
    return codec.decode_lines(b"".join(b"%s\n" % line for line in lines), schema) is not None


TFRECORD = Format(
    *data_file.KINDS["tfrecord"],
    numbered=_numbered_frames,
    explain=wire.explain,
    unexplained=wire.UNEXPLAINED,
    decodes=codec.accepts,
    read=_read_frames,
    parse_chunk=lambda raw, schema, ops: ops.parse(raw, schema, records.parse),
    count=_count_frames,
    keys=_keys_of_frames,
)
LIBSVM = Format(
    *data_file.KINDS["libsvm"],
    numbered=libsvm.numbered,
    explain=libsvm_text.explain_line,
    unexplained=libsvm_text.UNEXPLAINED,
    decodes=_decodes_lines,
    read=libsvm.line_chunks,
    count=libsvm.count,
    in_pipe="TextLine",
    clean=libsvm.drop_blank,
    parse_chunk=lambda chunk, schema, ops: ops.parse_lines(chunk, schema, libsvm.parse_lines),
    faster="TFRecord files (python -m data_tools.libsvm_to_tfrecord)",
    chunks_by_buffer=True,
)
FORMATS = {each.name: each for each in (TFRECORD, LIBSVM)}  # the last takes what no other does
