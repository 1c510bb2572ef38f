"""What executors do to shuffle: read records, give each its file and key, write sorted ones."""

import os

import numpy as np
import pyarrow as pa
import pyspark

from data_tools.libsvm.pieces import compressed
from data_tools.rebalancing import selecting
from deepfm.errors import BadInput, naming
from deepfm.records.bad_record import BadRecord
from deepfm.records.storage import places

_SIGN = np.uint64(1 << 63)
# The columns of a record on its way to its file, and of what is said of a file.
WRITTEN = "part int, path string, rows long, positives long, bytes long"
RECORDS = "part int, key long, positive boolean, record binary"


def scatter(batches, work, cuts, part_values):
    """The records of some tasks, each with its part and key, for mapInArrow."""
    ready = []

    def put(block, index, keys):
        parts = np.searchsorted(cuts, keys, side="right")
        columns = {
            "part": pa.array(part_values[parts]),
            "key": pa.array((keys ^ _SIGN).view(np.int64)),
            "positive": pa.array(block.positive[index]),
            "record": _binary(block, index),
        }
        ready.append(pa.RecordBatch.from_arrays(list(columns.values()), list(columns)))

    for task in (task for batch in batches for task in batch.column(0).to_pylist()):
        for event in selecting.read(task, work, put):
            if isinstance(event, BadRecord) and not work.skip:
                raise BadInput(str(event))
            yield from ready
            ready.clear()


def _binary(block, index):
    """The records of a block that an index chooses, as an Arrow array."""
    places = np.stack([block.starts, block.ends], axis=1).astype(np.int32).ravel()
    buffers = [None, pa.py_buffer(places), pa.py_buffer(block.data)]
    every = pa.Array.from_buffers(pa.binary(), len(places) - 1, buffers)  # and what is in between
    return every.take(pa.array(np.arange(0, len(places), 2)[index]))


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


def _bytes_of(records):
    """The bytes of a binary array, concatenated."""
    _, places, data = records.buffers()
    places = np.frombuffer(places, np.int32)
    first, last = places[records.offset], places[records.offset + len(records)]
    return memoryview(data)[first:last]
