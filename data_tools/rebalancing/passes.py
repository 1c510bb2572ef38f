"""Shuffles records on one machine in two passes: into buckets, and from them into the files."""

import functools
import math
import os

import numpy as np

from data_tools.common import record_files
from data_tools.rebalancing import counting, sampling, selecting, shuffling
from deepfm.records.data_file import DataFile

BUCKET = 16 << 20  # bytes of records to aim for in a bucket
MOST_BITS = 10  # at most 1,024 buckets at once
BUFFER = 64 << 20  # most bytes of records to hold before writing them to their buckets
GZIP_RATIO = 4  # approximate bytes of records per byte of a compressed file


def shuffle(engine, data, work, names, output_dir):
    """Processes.shuffle."""
    memory = engine.memory // engine.number  # bytes of records that a process may hold
    first_bits = bits(data, work.rates, engine.number)
    scatter = functools.partial(_scatter, bits=first_bits, memory=memory)
    before, kept, _, max_id = counting.read_all(engine, data, work, "Reading", scatter)
    folders = dict.fromkeys(_bucket_folder(task, work) for task in range(len(work.inputs)))
    buckets = [bucket for folder in folders for bucket in shuffling.buckets(folder, first_bits)]
    total = sum(bucket.rows for bucket in buckets)
    sampling.check_files(names, total)
    tasks = list(zip(buckets, _segments(buckets, total, len(names), work.order.shuffle)))
    size = sum(bucket.bytes for bucket in buckets)
    rows, positives = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
    end = ".plain" if work.compress else ""
    paths = [os.path.join(work.scratch, name + end) for name in names]
    write = functools.partial(_write_bucket, paths=paths, work=work, memory=memory)
    with engine.map(write, tasks, "Writing", size, np.add) as results:
        for _, output, (n, ones) in results:
            rows[output] += n
            positives[output] += ones
    if rows.sum() != total:
        raise OSError(f"{work.scratch}: only {rows.sum()} of {total} records could be read back")
    parts = {name: [path] for name, path in zip(names, paths)}
    wholes = record_files.join(engine, parts, work.compress, work.scratch, size)
    files = [
        DataFile(os.path.join(output_dir, name), os.path.getsize(wholes[name]), n, ones)
        for name, n, ones in zip(names, rows.tolist(), positives.tolist())
    ]
    return before, kept, max_id, files, wholes


def bits(data, rates, num_workers):
    """How many bits choose the bucket: for about BUCKET bytes each, and at least 8 per worker."""
    size = sum(f.bytes * (GZIP_RATIO if f.path.endswith(".gz") else 1) for f in data.files)
    size *= max(*rates, 1)
    few = math.ceil(math.log2(8 * num_workers))
    return min(max(math.ceil(math.log2(size / BUCKET)), few), MOST_BITS)


def _scatter(task, work, bits, memory):
    """Puts the records of a task into buckets; yields what selecting.read does."""
    folder, bits = _bucket_folder(task, work), bits if work.order.shuffle else 0
    scatter = shuffling.Scatter(folder, bits, 0, min(memory // 2, BUFFER))
    put = lambda block, index, keys: scatter.add(
        block.data, block.starts[index], block.ends[index], keys, block.positive[index]
    )
    yield from selecting.read(task, work, put)
    scatter.flush()


def _bucket_folder(task, work):
    """The folder for a task's records: shared by all tasks if records are shuffled."""
    return os.path.join(work.scratch, "buckets" if work.order.shuffle else f"task-{task}")


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


def _write_bucket(task, paths, work, memory):
    """Writes the records of a bucket to its segments; yields (bytes, output, [rows, positives])."""
    bucket, segments = task
    blocks = shuffling.ordered(bucket, memory) if work.order.shuffle else shuffling.stored(bucket)
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
            yield f.tell() - begin, output, (rows, ones)
    next(blocks, None)  # deletes the bucket
