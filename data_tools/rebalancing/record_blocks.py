"""Records as raw bytes, a block at a time, checked: frames of TFRecord files, lines of LibSVM text.

TensorFlow's native reader checks and parses a block and tells how long its records are. The bytes
themselves are read beside it, so that they can be copied as they are, checksums and all. Where it
refuses a block, the slow reader of `bad_records` names the bad records and passes on the good ones.
"""

import contextlib
import functools
import gzip
import itertools
import tempfile
import zlib
from typing import Iterator, NamedTuple, Optional, Union

import numpy as np
import tensorflow as tf

from data_tools.common import line_blocks, workers
from data_tools.common.line_blocks import LineRange
from deepfm.data import bad_records, datasets, example_bytes, formats, libsvm, records
from deepfm.data.bad_records import BadRecord
from deepfm.errors import BadInput
from deepfm.runtime import memory

BATCH = 4096  # TFRecords of a block
_CHECKSUM = 4  # bytes of a frame after its payload
REFUSED = (tf.errors.InvalidArgumentError, tf.errors.DataLossError)


class FileSlice(NamedTuple):
    """What is one task: of LibSVM text some lines, of a TFRecord file all of it.

    Attributes:
        lines: the LineRange; of a TFRecord file nothing but its path counts.
        data_format: tfrecord or libsvm.
        number: of the task, from which the keys of its records are made.
        described: whether dataset.json describes the file. Then TFRecords that look as our own
            writer makes them are taken for such, and not parsed, which would take twice as long.
    """

    lines: LineRange
    data_format: str
    number: int
    described: bool


class RecordBlock(NamedTuple):
    """Some records of a file, in order. n: how many.

    Attributes:
        data: bytes, the records and perhaps others between them.
        starts, ends: int64 [n], where in `data` each record begins and ends.
        positive: bool [n], whether the label is 1.
        max_id: the largest feature id of what was parsed, negative where there is none.
        read: bytes of the file, as it lies on the disk, that were read for it.
    """

    data: bytes
    starts: np.ndarray
    ends: np.ndarray
    positive: np.ndarray
    max_id: int
    read: int


def read(
    part: FileSlice, schema: Optional[records.Schema], max_bad_records: int
) -> Iterator[Union[RecordBlock, BadRecord]]:
    """Yields the records of a part of a file, good ones in RecordBlocks, bad ones as BadRecords.

    Ends after max_bad_records + 1 bad ones.

    Args:
        part: what to read.
        schema: of TFRecords; rows of LibSVM text may differ.
        max_bad_records: that are wanted.

    Raises:
        BadInput: a gzip file is not whole, or is several in one.
    """
    if part.data_format == "libsvm":
        return _read_lines(part.lines)
    return _read_frames(part.lines.path, schema, max_bad_records, part.described)


# TFRecord.


class _FrameReader:
    """The graph that reads, checks and parses the records of a TFRecord file."""

    def __init__(self, schema):
        graph = tf.Graph()
        with graph.as_default():
            self._path = tf.compat.v1.placeholder(tf.string, [])
            self._compression = tf.compat.v1.placeholder(tf.string, [])
            self._described = tf.compat.v1.placeholder(tf.bool, [])
            dataset = tf.data.TFRecordDataset(self._path, self._compression, 1 << 20).batch(BATCH)
            iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
            serialized = iterator.get_next()

            def parse():
                features, labels = formats.TFRECORD.parse(serialized, schema)
                with tf.control_dependencies(features.values()):
                    return labels > 0, tf.reduce_max(features["feat_ids"])

            known = self._described & (not schema.multi_valued)
            known &= example_bytes.are_as_encoded(serialized, schema.field_size)
            nothing = lambda: (tf.zeros([0], tf.bool), tf.constant(-1, tf.int64))
            self._next = tf.strings.length(serialized), known, *tf.cond(known, nothing, parse)
            self._initializer = iterator.initializer
        self._session = workers.one_thread_session(graph)

    def batches(self, path, described):
        """Yields (payload bytes int32 [n], known, positive bool [n], largest id) of BATCH records.

        Of records that are known to be as our own writer makes them the last two are not told.
        """
        compression = "GZIP" if path.endswith(".gz") else ""
        self._session.run(self._initializer, {self._path: path, self._compression: compression})
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while True:
                yield self._session.run(self._next, {self._described: described})


_frame_reader = functools.lru_cache(maxsize=1)(_FrameReader)  # a process makes one, and keeps it


def _read_frames(path, schema, max_bad_records, described=False):
    good = told = 0
    with libsvm.open_file(path) as raw, _naming_gzip_damage(path):
        stream = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
        try:
            for lengths, known, positive, max_id in _frame_reader(schema).batches(path, described):
                ends = np.cumsum(lengths + np.int64(records.FRAME))
                data = stream.read(int(ends[-1]))
                if len(data) < ends[-1]:
                    raise OSError(f"{path}: changed while it was read")
                starts = np.concatenate([[0], ends[:-1]])
                if known:
                    positive = _labels(data, ends, schema.field_size)
                yield RecordBlock(data, starts, ends, positive, int(max_id), raw.tell() - told)
                good, told = good + len(ends), raw.tell()
            left = stream.read(1)
        except REFUSED as error:
            refused = error
        else:
            if left and path.endswith(".gz"):
                raise datasets.several_members(path)
            if not left:
                return
            refused = None  # a file that ends inside a record's header is whole to TensorFlow
    found = bad_records.find_bad(path, formats.TFRECORD, schema)
    bad = {record.place: record for record in itertools.islice(found, max_bad_records + 1)}
    if not bad:
        raise refused or OSError(f"{path}: changed while it was read")
    yield from bad.values()
    if len(bad) <= max_bad_records:
        payloads = (x for place, x, _ in formats.TFRECORD.numbered(path) if place not in bad)
        yield from _framed(itertools.islice(payloads, good, None), schema)


def _labels(data, ends, field_size):
    """Whether the label is 1, of frames that `records.encode` wrote: the last byte of the float."""
    expected = example_bytes.layout(field_size)
    label = ends - _CHECKSUM - expected.after_ids + len(expected.before_label)
    list_bytes = len(tf.train.FloatList(value=[1]).SerializeToString())
    return np.frombuffer(data, np.uint8)[label + list_bytes - 1] != 0


def _framed(payloads, schema):
    """Yields RecordBlocks of good records of which only the payloads are known."""
    for chunk in iter(lambda: list(itertools.islice(payloads, BATCH)), []):
        with tempfile.NamedTemporaryFile(suffix=".tfrecords") as f:
            with tf.io.TFRecordWriter(f.name) as writer:
                for payload in chunk:
                    writer.write(payload)
            for block in _read_frames(f.name, schema, 0):
                yield block._replace(read=0)


@contextlib.contextmanager
def _naming_gzip_damage(path):
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        if path.endswith(".gz") and not getattr(error, "filename", None):
            raise BadInput(f"{path}: is not whole as a gzip file ({error}).") from error
        raise


# LibSVM.


class _LineReader:
    """The graph that checks and parses LibSVM lines of any length."""

    def __init__(self):
        graph = tf.Graph()
        with graph.as_default():
            self._text = tf.compat.v1.placeholder(tf.string, [])
            lines = libsvm.drop_blank(tf.compat.v1.string_split([self._text], "\n").values)
            labels, _, ids, values = libsvm.decode_lines(lines, known_ascii=True)
            good = [
                tf.reduce_all(tf.equal(labels, 0) | tf.equal(tf.abs(labels), 1)),
                tf.reduce_all(tf.math.is_finite(values)),
                tf.reduce_all((ids >= 0) & (ids < memory.MAX_NUMBER)),
            ]
            with tf.control_dependencies([tf.debugging.Assert(x, ["bad line"]) for x in good]):
                self._parsed = labels > 0, tf.reduce_max(ids)
        self._session = workers.one_thread_session(graph)

    def parse(self, text):
        """(positive bool [n], largest id) of the lines of a text; InvalidArgumentError."""
        if not text.isascii():
            raise tf.errors.InvalidArgumentError(None, None, "not ASCII")
        return self._session.run(self._parsed, {self._text: text})

    def accepts(self, lines):
        """Whether none of the lines is bad."""
        try:
            self.parse(b"\n".join(lines))
        except tf.errors.InvalidArgumentError:
            return False
        return True


_line_reader = functools.lru_cache(maxsize=1)(_LineReader)


def _read_lines(lines):
    reader = _line_reader()
    first_line = None  # its number costs a look at the file up to there; only bad lines need it
    lines_before = 0
    for _, text, read_bytes in line_blocks.read_blocks(*lines):
        starts = line_blocks.record_starts(text)
        newlines = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
        line = np.searchsorted(newlines, starts)  # which lines hold the records
        try:
            positive, max_id = reader.parse(text)
        except tf.errors.InvalidArgumentError:
            if first_line is None:
                first_line = line_blocks.line_number(lines.path, lines.start)
            texts = [text[i:j].partition(b"#")[0] for i, j in zip(starts, newlines[line])]
            bad = list(bad_records.find_refused(reader.accepts, texts, _explain))
            for i, reason in bad:
                place = f":{first_line + lines_before + line[i]}"
                yield BadRecord(lines.path, place, reason)
            chosen = np.delete(np.arange(len(texts)), [i for i, _ in bad])
            starts, line = starts[chosen], line[chosen]
            positive, max_id = reader.parse(b"\n".join(texts[i] for i in chosen))
        yield RecordBlock(text, starts, newlines[line] + 1, positive, int(max_id), read_bytes)
        lines_before += len(newlines)


def _explain(line):
    return libsvm.explain_line(line, records.Schema(len(line.split()) - 1))
