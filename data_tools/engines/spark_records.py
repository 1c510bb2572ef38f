"""What executors do to shuffle: read records, give each its file and key, write sorted ones."""

import os

import numpy as np
import pyarrow as pa
import pyspark

from data_tools.common.record_files import compressed
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
    for batch in batches:
        for task in batch.column(0).to_pylist():
            put = 0
            for block, chosen in selecting.chosen(task, work):
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


def _bytes_of(records):
    """The bytes of a binary array, concatenated."""
    _, places, data = records.buffers()
    places = np.frombuffer(places, np.int32)
    first, last = places[records.offset], places[records.offset + len(records)]
    return memoryview(data)[first:last]
