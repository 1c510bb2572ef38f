"""The two passes of rebalance: records into buckets, and buckets into the output files."""

import functools
import math
import os
from typing import NamedTuple, Optional

import numpy as np

from data_tools.common import record_files, workers
from data_tools.common.skipping import Skipping
from data_tools.rebalancing import record_blocks, sampling, shuffling
from deepfm.data import datasets, records
from deepfm.data.dataset_json import SamplingRates
from deepfm.records.bad_record import BadRecord

BUCKET = 16 << 20  # bytes of records to aim for in a bucket
MOST_BITS = 10  # at most 1,024 buckets at once
BUFFER = 64 << 20  # most bytes of records to hold before writing them to their buckets
COPIES = 1 << 16  # records to sample at once
GZIP_RATIO = 4  # approximate bytes of records per byte of a compressed file
_ORDER, _SAMPLE = 0, 1  # what a key is for


class Work(NamedTuple):
    """What every process needs to know.

    Attributes:
        scratch: the folder to write to.
        schema: the Schema of TFRecords; None for LibSVM text.
        rates: the SamplingRates to apply.
        options: options.Options.
        bits: how many bits of a key choose the bucket.
    """

    scratch: str
    schema: Optional[records.Schema]
    rates: SamplingRates
    options: tuple
    bits: int

    @property
    def memory(self):
        """Bytes of records that a process may hold."""
        return (self.options.memory_mb << 20) // self.options.num_workers


def bits(data, rates, num_workers):
    """How many bits choose the bucket: for about BUCKET bytes each, and at least 8 per worker."""
    size = sum(f.bytes * (GZIP_RATIO if f.path.endswith(".gz") else 1) for f in data.files)
    size *= max(*rates, 1)
    few = math.ceil(math.log2(8 * num_workers))
    return min(max(math.ceil(math.log2(size / BUCKET)), few), MOST_BITS)


# Before both, for --positive_share.


def count_labels(data, tasks, schema, options):
    """(negatives, positives) of the input, from dataset.json, else by reading all of it."""
    if data.rows is not None:
        return sampling.labels_of(data)
    size = sum(file.bytes for file in data.files)
    count = functools.partial(_labels_of, schema=schema, max_bad_records=options.max_bad_records)
    with workers.results(count, tasks, options.num_workers, "Counting", size) as results:
        return sum((found for _, found in results), np.zeros(2, np.int64)).tolist()


def _labels_of(task, schema, max_bad_records):
    for block in record_blocks.read(task, schema, max_bad_records):
        if isinstance(block, record_blocks.RecordBlock):
            yield block.read, sampling.by_label(block.positive)


# The first pass.


def scatter_all(data, tasks, work):
    """Puts all records into buckets; returns ((negatives, positives) found, kept, largest id)."""
    options = work.options
    size = sum(file.bytes for file in data.files)
    before, kept, max_id = np.zeros(2, np.int64), np.zeros(2, np.int64), -1
    bad = Skipping(options.max_bad_records)
    scatter = functools.partial(_scatter, work=work)
    with workers.results(scatter, tasks, options.num_workers, "Reading", size, bad) as results:
        for _, (largest, block_found, block_kept) in results:
            before, kept = before + block_found, kept + block_kept
            max_id = max(max_id, largest)
    bad.log_total()
    sampling.check_rows(data, sum(before), sum(kept), bad.count)
    return before.tolist(), kept.tolist(), max_id


def _scatter(task, work):
    """Puts the records of a task into buckets.

    Yields:
        BadRecords, and for each block (bytes of the file read, (largest id, found, kept)): int64
        [2] records per label, in the file and put into buckets.
    """
    seed, folder = work.options.seed, _bucket_folder(task, work)
    order, sample = (shuffling.salt(seed, 0, use) for use in (_ORDER, _SAMPLE))
    bits = work.bits if work.options.shuffle else 0
    scatter = shuffling.Scatter(folder, bits, 0, min(work.memory // 2, BUFFER))
    step = max(int(COPIES / max(*work.rates, 1)), 1)
    seen = put = 0
    for block in record_blocks.read(task, work.schema, work.options.max_bad_records):
        if isinstance(block, BadRecord):
            yield block
            continue
        kept = np.zeros(2, np.int64)
        for first in range(0, len(block.starts), step):
            starts, ends, positive = (
                x[first : first + step] for x in (block.starts, block.ends, block.positive)
            )
            key = shuffling.keys(sample, task.number, seen, len(starts))
            seen += len(starts)
            chosen = sampling.choose(positive, key, work.rates)
            key = shuffling.keys(order, task.number, put, len(positive[chosen]))
            put += len(key)
            scatter.add(block.data, starts[chosen], ends[chosen], key, positive[chosen])
            kept += sampling.by_label(positive[chosen])
        yield block.read, (block.max_id, sampling.by_label(block.positive), kept)
    scatter.flush()


def _bucket_folder(task, work):
    """The folder for a task's records: shared by all tasks if records are shuffled."""
    return os.path.join(work.scratch, "buckets" if work.options.shuffle else f"task-{task.number}")


# The second pass.


def write_all(tasks, names, work):
    """Writes the records of all buckets, in order, to the output files; returns the DataFiles."""
    options = work.options
    folders = dict.fromkeys(_bucket_folder(task, work) for task in tasks)  # in order
    buckets = [bucket for folder in folders for bucket in shuffling.buckets(folder, work.bits)]
    total = sum(bucket.rows for bucket in buckets)
    sampling.check_files(names, total)
    paths = [os.path.join(work.scratch, name) for name in names]
    jobs = list(zip(buckets, _segments(buckets, total, len(names), options.shuffle)))
    size = sum(bucket.bytes for bucket in buckets)
    rows, positives = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
    parts = [f"{path}.plain" for path in paths] if options.compress else paths
    write = functools.partial(_write_bucket, paths=parts, work=work)
    with workers.results(write, jobs, options.num_workers, "Writing", size) as results:
        for _, (output, n, ones) in results:
            rows[output] += n
            positives[output] += ones
    if rows.sum() != total:
        raise OSError(f"{work.scratch}: only {rows.sum()} of {total} records could be read back")
    if options.compress:
        record_files.join([([p], path) for p, path in zip(parts, paths)], True, options.num_workers)
    return [
        datasets.DataFile(os.path.join(options.output_dir, name), os.path.getsize(path), n, ones)
        for name, path, n, ones in zip(names, paths, rows.tolist(), positives.tolist())
    ]


def _segments(buckets, total, num_outputs, in_order):
    """Yields the segments of each bucket, which cut the rows of all buckets into even files.

    A segment is a run of records in an output file: (index of the file, its first byte, rows).
    """
    ends = [total * (i + 1) // num_outputs for i in range(num_outputs)]
    output = position = first = 0
    for bucket in buckets:
        cuts = [end - first for end in ends if first < end < first + bucket.rows]
        sizes = shuffling.sizes_of_first(bucket, cuts, in_order) if cuts else []
        segments, row, size = [], 0, 0
        for next_row, next_size in zip([*cuts, bucket.rows], [*sizes, bucket.bytes]):
            segments.append((output, position, next_row - row))
            position += next_size - size
            row, size = next_row, next_size
            if first + row == ends[output]:
                output, position = output + 1, 0
        first += row
        yield segments


def _write_bucket(job, paths, work):
    """Writes the records of a bucket to its segments; yields (bytes, (output, rows, positives))."""
    bucket, segments = job
    if work.options.shuffle:
        blocks = shuffling.ordered(bucket, work.memory)
    else:
        blocks = shuffling.stored(bucket)
    rest = None  # the rest of a block that two segments share
    for output, begin, rows in segments:
        left, ones = rows, 0
        with open(os.open(paths[output], os.O_WRONLY | os.O_CREAT, 0o666), "wb") as f:
            f.seek(begin)
            while left:
                data, entries = rest or next(blocks)
                written = entries[:left]
                size = int(written["bytes"].sum(dtype=np.int64))
                f.write(data[:size])
                rest = (data[size:], entries[left:]) if left < len(entries) else None
                left, ones = left - len(written), ones + int(written["positive"].sum())
            yield f.tell() - begin, (output, rows, ones)
    next(blocks, None)  # deletes the bucket
