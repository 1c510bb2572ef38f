"""What Spark's executors do: call functions on tasks, count categories, and shuffle records.

What is wrong with the input, they return as results: a task that raises is tried again, which helps
against a lost disk, not against a bad record. On Python 3.7, pyspark strips named tuples of their
class, so a BadRecord travels as a plain tuple.
"""

import os
import zlib
from typing import Any, Callable, Iterable, Iterator, Sequence, Tuple

import numpy as np
import pyarrow as pa
import pyspark

from data_tools.click_logs import slices, vocabulary
from data_tools.click_logs.vocabulary import Counts
from data_tools.common import splitmix64
from data_tools.libsvm.pieces import compressed
from data_tools.rebalancing import selecting
from deepfm.errors import BadInput, naming
from deepfm.records.raw.column_kinds import COUNTED, Column
from deepfm.records.schema import BadRecord
from deepfm.records.storage import places

GOOD, BAD, REFUSED = range(3)  # a result, a BadRecord, the sentence of a BadInput
_SIGN = np.uint64(1 << 63)
# The columns of a record on its way to its file, and of what is said of a file.
WRITTEN = "part int, path string, rows long, positives long"
RECORDS = "part int, key long, positive boolean, record binary"


def own_folder(scratch: str) -> str:
    """Makes the folder of this attempt to run a task."""
    folder = os.path.join(scratch, f"attempt-{pyspark.TaskContext.get().taskAttemptId()}")
    places.of(folder).make_inner(folder)
    return folder


def events(
    pairs: Iterable[Tuple[int, Any]], work: Callable[[Any], Iterable[Any]]
) -> Iterator[Tuple[int, int, Any]]:
    """Yields (index, kind of event, event) of all that `work` yields for each (index, task)."""
    for index, task in pairs:
        try:
            for event in work(task):
                if isinstance(event, BadRecord):
                    yield index, BAD, tuple(event)
                else:
                    yield index, GOOD, event
        except BadInput as error:
            yield index, REFUSED, str(error)


def _good(triples, other):
    """Yields (index, result) of `events`, and puts those that are no results into a list."""
    for index, kind, event in triples:
        if kind == GOOD:
            yield index, event
        else:
            other.append((index, kind, event))


def joined(
    pairs: Iterable[Tuple[int, Any]],
    work: Callable[[Any], Iterable[Any]],
    together: Callable[[Any, Any], Any],
) -> Iterator[Tuple[int, int, Any]]:
    """`events` of what Processes.map takes; a result is a key and the joined values of a task."""
    values, other = {}, []
    for index, (_, key, value) in _good(events(pairs, work), other):
        place = index, key
        values[place] = together(values[place], value) if place in values else value
    yield from other
    yield from ((index, GOOD, (key, value)) for (index, key), value in values.items())


def count(
    pairs: Iterable[Tuple[int, slices.RawSlice]], columns: Sequence[Column], parts: int
) -> Iterator:
    """Counts the categories of some slices, whose keys are divided into parts, to add them up side
    by side.

    Yields:
        (part of the keys, one of `events`), whose results are the fields' Counts in the part.
    """
    other = []
    counted = (found for _, (_, _, found) in _good(events(pairs, slices.count_rows), other))
    divided = [_divided(field, parts) for field in vocabulary.add_up(columns, counted)]
    yield from ((0, event) for event in other)
    for part in range(parts):
        yield part, (0, GOOD, [field[part] for field in divided])


def _divided(field, parts):
    """Counts as one for each part of the keys."""
    part_of = (splitmix64.finalize(field.keys) % np.uint64(parts)).astype(np.int64)
    order = np.argsort(part_of, kind="stable")  # which keeps the keys of a part ascending
    cuts = np.searchsorted(part_of[order], np.arange(1, parts))
    long = [{} for _ in range(parts)]
    for text, number in field.long.items():
        long[zlib.crc32(text) % parts][text] = number
    return list(
        map(Counts, np.split(field.keys[order], cuts), np.split(field.counts[order], cuts), long)
    )


def add_up(pairs: Iterable, columns: Sequence[Column], min_count: int) -> Iterator:
    """Adds the counts of a part of the keys up; yields `events`, whose result is (categories found,
    the fields' Counts of those that are not rare)."""
    other = []
    parts = (part for _, part in _good((event for _, event in pairs), other))
    counts = vocabulary.add_up(columns, parts)
    yield from other
    seen = sum(field.distinct() for field in counts)
    kept = [
        field.frequent(column.min_count or min_count) if column.kind in COUNTED else field
        for column, field in zip(columns, counts)
    ]
    yield 0, GOOD, (seen, kept)


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
    columns = {"path": [path], "rows": [rows], "positives": [ones]}
    yield pa.RecordBatch.from_pydict({"part": pa.array([value], pa.int32()), **columns})


def _bytes_of(records):
    """The bytes of a binary array, concatenated."""
    _, places, data = records.buffers()
    places = np.frombuffer(places, np.int32)
    first, last = places[records.offset], places[records.offset + len(records)]
    return memoryview(data)[first:last]
