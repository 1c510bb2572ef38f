"""What executors do for rebalance: read records, give each its file and key, write sorted ones."""

import contextlib
import gzip
import os
from typing import NamedTuple, Optional

import numpy as np
import pyarrow as pa
import pyspark

from data_tools.rebalancing import plain_blocks, sampling, shuffling
from data_tools.spark import order
from deepfm.errors import BadInput, naming
from deepfm.records.bad_record import BadRecord
from deepfm.records.data_file import SamplingRates
from deepfm.records.schema import Schema
from deepfm.records.storage import places

GZIP_LEVEL = 4  # as data_tools.common.record_files
COPIES = 1 << 14  # records to sample at once
_SIGN = np.uint64(1 << 63)
# The columns of a record on its way to its file, and of what is said of a file.
WRITTEN = "part int, path string, rows long, positives long, bytes long"
RECORDS = "part int, key long, positive boolean, record binary"


class Work(NamedTuple):
    """What executors need to know.

    Attributes:
        inputs: LineRanges of text, or whole TFRecord files; a task is the index of one.
        described: of each, whether dataset.json describes its file.
        schema: the Schema of TFRecords; None for LibSVM text.
        weighted: whether the labels of text may have a weight.
        skip: bad records to pass over in a file; one more ends its reading.
        rates: SamplingRates.
        order: the Order of the records.
        compress: whether to write .gz files.
        scratch: the folder to write to.
    """

    inputs: list
    described: list
    schema: Optional[Schema]
    weighted: bool
    skip: int
    rates: SamplingRates
    order: order.Order
    compress: bool
    scratch: str


def count(task, work):
    """Yields BadRecords, then (int64 [2] records of each label, records to write, largest id)."""
    before, kept, max_id = np.zeros(2, np.int64), 0, -1
    for block, chosen in _chosen(task, work):
        if isinstance(block, BadRecord):
            yield block
            continue
        before += sampling.by_label(block.positive)
        kept += len(block.positive[chosen])
        max_id = max(max_id, block.max_id)
    yield before, kept, max_id


def _chosen(task, work):
    """Yields (a block of records, index of those to write) of a file; (BadRecord, None)."""
    step = max(int(COPIES / max(*work.rates, 1)), 1)
    salt, seen = shuffling.salt(work.order.seed, 0, order.SAMPLE), 0
    for block in _blocks(work.inputs[task], work.described[task], work):
        if isinstance(block, BadRecord):
            yield block, None
            continue
        for first in range(0, len(block.starts), step):
            some = slice(first, first + step)
            part = block._replace(
                starts=block.starts[some], ends=block.ends[some], positive=block.positive[some]
            )
            key = shuffling.keys(salt, task, seen, len(part.starts))
            seen += len(part.starts)
            yield part, sampling.choose(part.positive, key, work.rates)


def _blocks(lines, described, work):
    if work.schema is None:
        return plain_blocks.read_lines(lines, work.weighted)
    return plain_blocks.read(lines.path, Schema(*work.schema), described, work.skip)


def scatter(batches, work, cuts, part_values):
    """The records of some tasks, each with its part and key, for mapInArrow."""
    for batch in batches:
        for task in batch.column(0).to_pylist():
            put = 0
            for block, chosen in _chosen(task, work):
                if isinstance(block, BadRecord):
                    if not work.skip:
                        raise BadInput(str(block))
                    continue
                positive = block.positive[chosen]
                keys = work.order.keys(task, put, len(positive))
                put += len(positive)
                parts = np.searchsorted(cuts, keys, side="right")
                yield pa.RecordBatch.from_arrays(
                    [
                        pa.array(part_values[parts]),
                        pa.array((keys ^ _SIGN).view(np.int64)),
                        pa.array(positive),
                        _binary(block, chosen),
                    ],
                    ["part", "key", "positive", "record"],
                )


def _binary(block, chosen):
    """The chosen records of a block as an Arrow array."""
    if (block.starts[1:] != block.ends[:-1]).any():  # bad records are in between
        records = [block.data[a:b] for a, b in zip(block.starts.tolist(), block.ends.tolist())]
        whole = pa.array(records, pa.binary())
        return whole if isinstance(chosen, slice) else whole.take(pa.array(chosen))
    places = np.append(block.starts, block.ends[-1:]).astype(np.int32)
    buffers = [None, pa.py_buffer(places), pa.py_buffer(block.data)]
    whole = pa.Array.from_buffers(pa.binary(), len(block.starts), buffers)
    return whole if isinstance(chosen, slice) else whole.take(pa.array(chosen))


def write_part(batches, work):
    """Writes a file of a partition's sorted records; yields what it wrote, for mapInArrow."""
    context = pyspark.TaskContext.get()
    path = os.path.join(work.scratch, f"attempt-{context.taskAttemptId()}")
    files, value, rows, ones = places.of(path), None, 0, 0
    with naming(path), files.create(path) as raw, compressed(raw, work.compress) as f:
        for batch in batches:
            if batch.num_rows:
                value = batch.column(0)[0].as_py()
                f.write(_bytes_of(batch.column(3)))
                rows += batch.num_rows
                ones += np.count_nonzero(batch.column(2).to_numpy(zero_copy_only=False))
    if value is None:
        files.remove(path)
        return
    size = files.size(path)
    yield pa.RecordBatch.from_pydict(
        {
            "part": pa.array([value], pa.int32()),
            "path": [path],
            "rows": [rows],
            "positives": [ones],
            "bytes": [size],
        }
    )


def compressed(raw, compress):
    """A file that writes to an open one, with or without compression."""
    if not compress:
        return contextlib.nullcontext(raw)
    return gzip.GzipFile("", "wb", GZIP_LEVEL, raw, mtime=0)


def _bytes_of(records):
    """The bytes of a binary array, concatenated."""
    _, places, data = records.buffers()
    places = np.frombuffer(places, np.int32)
    first, last = places[records.offset], places[records.offset + len(records)]
    return memoryview(data)[first:last]
