"""Reads records as raw bytes, in checked blocks: frames of TFRecord files, lines of LibSVM text.

TensorFlow's native reader checks and parses a block and gives the length of each record. The bytes
are read separately, so that they can be copied unchanged, with their checksums. If it refuses a
block, `plain_blocks` names the bad records and passes on the good ones.
"""

import contextlib
import functools
import gzip
import zlib
from typing import Iterator, NamedTuple, Optional, Union

import numpy as np
import tensorflow as tf

from data_tools.common import line_decoding, workers
from data_tools.common.line_blocks import LineRange
from data_tools.rebalancing import plain_blocks
from data_tools.rebalancing.plain_blocks import RecordBlock
from deepfm.data import formats, records
from deepfm.errors import BadInput
from deepfm.records import file_bytes
from deepfm.records.bad_record import BadRecord
from deepfm.records.schema import FRAME
from deepfm.records.storage import places

BATCH = 4096  # TFRecords in a block
REFUSED = (tf.errors.InvalidArgumentError, tf.errors.DataLossError)


class FileSlice(NamedTuple):
    """One task: some lines of LibSVM text, or a whole TFRecord file.

    Attributes:
        lines: the LineRange; only its path counts for a TFRecord file.
        number: the number of the task, from which the keys of its records are made.
        described: whether dataset.json describes the file.
        weighted: whether LibSVM labels may have a weight.
    """

    lines: LineRange
    number: int
    described: bool
    weighted: bool = False


# TFRecord.


class _FrameReader:
    """The graph that reads, checks and parses the records of a TFRecord file."""

    def __init__(self, schema):
        graph = tf.Graph()
        with graph.as_default():
            self._path = tf.compat.v1.placeholder(tf.string, [])
            self._compression = tf.compat.v1.placeholder(tf.string, [])
            dataset = tf.data.TFRecordDataset(self._path, self._compression, 1 << 20).batch(BATCH)
            iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
            serialized = iterator.get_next()

            features, labels = formats.TFRECORD.parse(serialized, schema)
            with tf.control_dependencies(features.values()):
                parsed = labels > 0, tf.reduce_max(features["feat_ids"])
            self._next = tf.strings.length(serialized), *parsed
            self._initializer = iterator.initializer
        self._session = workers.one_thread_session(graph)

    def batches(self, path):
        """Yields (payload bytes int32 [n], positive bool [n], largest id) of BATCH records."""
        compression = "GZIP" if path.endswith(".gz") else ""
        self._session.run(self._initializer, {self._path: path, self._compression: compression})
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while True:
                yield self._session.run(self._next)


_frame_reader = functools.lru_cache(maxsize=1)(_FrameReader)  # built once per process


def _read_frames(part, schema, max_bad_records):
    path, good, told = part.lines.path, 0, 0
    with places.of(path).open_file(path) as raw:
        stream = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
        try:
            batches = _frame_reader(schema).batches(path)
            for lengths, positive, max_id in batches:
                ends = np.cumsum(lengths + np.int64(FRAME))
                data = stream.read(int(ends[-1]))
                if len(data) < ends[-1]:
                    raise OSError(f"{path}: changed while it was read")
                starts = np.concatenate([[0], ends[:-1]])
                yield RecordBlock(data, starts, ends, positive, int(max_id), raw.tell() - told)
                good, told = good + len(ends), raw.tell()
            left = stream.read(1)
        except REFUSED as error:
            refused = error
        except (OSError, EOFError, zlib.error) as error:
            if path.endswith(".gz") and not getattr(error, "filename", None):
                raise BadInput(f"{path}: is a truncated or damaged gzip file ({error}).") from error
            raise
        else:
            if left and path.endswith(".gz"):
                raise BadInput(f"{path}: {file_bytes.SEVERAL}")
            if not left:
                return
            refused = None  # TensorFlow ignores a truncated header
    bad = 0
    for block in plain_blocks.read(path, schema, False, max_bad_records):
        if isinstance(block, BadRecord):
            bad += 1
            yield block
            continue
        rest = slice(good, None)
        good = max(good - len(block.starts), 0)
        parts = (x[rest] for x in (block.starts, block.ends, block.positive))
        yield RecordBlock(block.data, *parts, block.max_id)
    if not bad:
        raise refused or OSError(f"{path}: changed while it was read")


# LibSVM.


def _read_lines(part):
    for block in line_decoding.decoded(part.lines, weighted=part.weighted):
        if isinstance(block, BadRecord):
            yield block
            continue
        text, starts, ends, (labels, _, ids, *_), read_bytes = block
        yield RecordBlock(text, starts, ends, labels > 0, int(ids.max(initial=-1)), read_bytes)


def read(
    part: FileSlice, schema: Optional[records.Schema], max_bad_records: int
) -> Iterator[Union[RecordBlock, BadRecord]]:
    """Yields the good records of a part of a file in RecordBlocks, the bad ones as BadRecords.

    Ends after max_bad_records + 1 bad ones.

    Args:
        part: what to read.
        schema: the Schema of TFRecords; None: LibSVM text, whose rows may differ in length.
        max_bad_records: the limit on bad records.

    Raises:
        BadInput: a gzip file is damaged, or has several members.
    """
    return _read_frames(part, schema, max_bad_records) if schema else _read_lines(part)
