"""Shuffles more records than fit into memory, in two passes over the disk.

Every record has a random 64-bit key (see selecting), and records are sorted by key. The first pass
scatters them into buckets by the upper bits of their keys; the second sorts one bucket after
another in memory. A bucket that is too large for memory is scattered again, by the next bits. So
the order depends on the keys alone, not on the number of buckets or on who filled them.
(Random buckets, shuffled one by one: Rao, Sankhya A 23 (1961); Sandelius, JRSS B 24 (1962).)

n: records of a block.
"""

import functools
import math
import os
import pathlib
from typing import Iterator, List, NamedTuple, Tuple

import numpy as np

from data_tools.libsvm import pieces
from data_tools.rebalancing import sampling, selecting

BUCKET = 16 << 20  # bytes of records to aim for in a bucket
MOST_BITS = 10  # at most 1,024 buckets at once
BUFFER = 64 << 20  # most bytes of records to hold before writing them to their buckets
GZIP_RATIO = 4  # approximate bytes of records per byte of a compressed file
_ENTRY = np.dtype([("key", "<u8"), ("bytes", "<u4"), ("positive", "?")])  # per record, on disk
_FEW = 64  # records to copy at once
_ROWS = 1024  # records to gather, or to read from an unsorted bucket, at once


def shuffle(engine, data, work, names):
    """Processes.shuffle."""
    memory = engine.memory // engine.number  # bytes of records that a process may hold
    first_bits = bits(data, work.rates, engine.number)
    scatter = functools.partial(_scatter, bits=first_bits, memory=memory)
    before, kept, _, max_id = sampling.read_all(engine, data, work, "Reading", scatter)
    folders = dict.fromkeys(_bucket_folder(task, work) for task in range(len(work.inputs)))
    buckets = [bucket for folder in folders for bucket in buckets_of(folder, first_bits)]
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
    wholes = pieces.join(engine, parts, work.compress, work.scratch, size)
    counts = zip(rows.tolist(), positives.tolist())
    return before, kept, max_id, {name: (wholes[name], x) for name, x in zip(names, counts)}


def bits(data, rates, num_workers):
    """How many bits choose the bucket: for about BUCKET bytes each, and at least 8 per worker."""
    size = sum(f.bytes * (GZIP_RATIO if f.path.endswith(".gz") else 1) for f in data.files)
    size *= max(*rates, 1)
    few = math.ceil(math.log2(8 * num_workers))
    return min(max(math.ceil(math.log2(size / BUCKET)), few), MOST_BITS)


def _scatter(task, work, bits, memory):
    """Puts the records of a task into buckets; yields what selecting.read does."""
    folder, bits = _bucket_folder(task, work), bits if work.order.shuffle else 0
    scatter = Scatter(folder, bits, 0, min(memory // 2, BUFFER))
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
        sizes = sizes_of_first(bucket, cuts, in_order) if cuts else []
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
    blocks = ordered(bucket, memory) if work.order.shuffle else stored(bucket)
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


class Bucket(NamedTuple):
    """The content of a bucket, written by one or more processes.

    Attributes:
        paths: the files of records; each has an index file beside it.
        bits: how many upper bits of the keys are the same in the bucket.
        rows, bytes: the records in it, and their size.
    """

    paths: List[str]
    bits: int
    rows: int
    bytes: int


class Scatter:
    """Writes records into 2^bits buckets of a folder, by their keys.

    Args:
        folder: several processes may write to it.
        bits: how many bits of a key, after the first `used` ones, choose the bucket.
        used: how many upper bits are the same in all keys.
        memory: bytes of records to keep in memory before writing them.
    """

    def __init__(self, folder: str, bits: int, used: int, memory: int):
        os.makedirs(folder, exist_ok=True)
        self._folder, self._bits, self._used, self._memory = folder, bits, used, memory
        self._waiting, self._kept = {}, 0

    def add(self, data: bytes, starts, ends, keys, positive):
        """Adds the records data[start:end]; the other arguments are arrays [n]."""
        entries = np.empty(len(starts), _ENTRY)
        entries["key"], entries["bytes"], entries["positive"] = keys, ends - starts, positive
        bucket = np.zeros(len(entries), np.uint16)
        if self._bits:
            bucket = keys << np.uint64(self._used) >> np.uint64(64 - self._bits)
        order = np.argsort(bucket.astype(np.uint16), kind="stable")
        data, entries = _gather(data, starts[order], ends[order]), entries[order]
        cuts = np.searchsorted(bucket[order], np.arange(2**self._bits + 1))
        places = np.cumsum(np.append(0, entries["bytes"].astype(np.int64)))[cuts].tolist()
        for i in np.flatnonzero(np.diff(cuts)).tolist():
            waiting = self._waiting.setdefault(i, ([], []))
            waiting[0].append(data[places[i] : places[i + 1]])
            waiting[1].append(entries[cuts[i] : cuts[i + 1]].tobytes())
        self._kept += memory_of(len(entries), len(data))
        if self._kept >= self._memory:
            self.flush()

    def flush(self):
        """Writes the records that are still in memory."""
        for i, (data, entries) in sorted(self._waiting.items()):
            path = os.path.join(self._folder, f"{i:04x}-{os.getpid()}")
            for name, parts in ((path, data), (_index(path), entries)):
                with open(name, "ab") as f:
                    f.write(b"".join(parts))
        self._waiting, self._kept = {}, 0


def _gather(data, starts, ends):
    """The records data[start:end], concatenated.

    It copies a few at a time, which fit into the processor's cache: that halves the time.
    """
    starts, ends = starts.tolist(), ends.tolist()
    groups = ((starts[i : i + _FEW], ends[i : i + _FEW]) for i in range(0, len(starts), _FEW))
    return b"".join([b"".join([data[i:j] for i, j in zip(*group)]) for group in groups])


def _index(path):
    return f"{path}.index"


def buckets_of(folder: str, used: int) -> List[Bucket]:
    """The buckets of a folder, chosen by the first `used` bits of the keys, in key order."""
    paths = {}
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".index"):
            paths.setdefault(name.split("-")[0], []).append(os.path.join(folder, name))
    return [
        Bucket(
            pieces,
            used,
            sum(os.path.getsize(_index(path)) for path in pieces) // _ENTRY.itemsize,
            sum(map(os.path.getsize, pieces)),
        )
        for _, pieces in sorted(paths.items())
    ]


def memory_of(rows: int, size: int) -> int:
    """Bytes of memory that sorting a bucket of `rows` records in `size` bytes takes."""
    return 2 * size + rows * (_ENTRY.itemsize + 4 * 8)


def sizes_of_first(bucket: Bucket, rows: List[int], in_order: bool) -> List[int]:
    """For each number n in `rows`, the bytes of the first n records of a bucket.

    Args:
        bucket: the bucket.
        rows: numbers from 1 to bucket.rows.
        in_order: whether the first records are those with the smallest keys, or those put in first.
    """
    entries = _entries(bucket)
    sizes = entries["bytes"].astype(np.int64)
    if in_order:
        sizes = sizes[np.argsort(entries["key"])]
    return np.cumsum(sizes)[np.array(rows) - 1].tolist()


def ordered(bucket: Bucket, memory: int) -> Iterator[Tuple[bytes, np.ndarray]]:
    """Yields a bucket's records by ascending keys, and deletes it.

    Args:
        bucket: what to sort.
        memory: bytes that sorting may take; a larger bucket is scattered again.

    Yields:
        (n records, concatenated; their index [n], with bytes and positive of each).
    """
    if memory_of(bucket.rows, bucket.bytes) > memory and bucket.bits < 64:
        folder, bits = f"{bucket.paths[0]}-again", min(4, 64 - bucket.bits)
        scatter = Scatter(folder, bits, bucket.bits, memory // 4)
        for data, entries in stored(bucket):
            ends = np.cumsum(entries["bytes"], dtype=np.int64)
            starts = ends - entries["bytes"]
            scatter.add(data, starts, ends, entries["key"], entries["positive"])
        scatter.flush()
        for smaller in buckets_of(folder, bucket.bits + bits):
            yield from ordered(smaller, memory)
        return
    entries = _entries(bucket)
    data = b"".join([pathlib.Path(path).read_bytes() for path in bucket.paths])
    _delete(bucket)
    ends = np.cumsum(entries["bytes"], dtype=np.int64)
    starts = ends - entries["bytes"]
    order = np.argsort(entries["key"])
    for first in range(0, len(order), _ROWS):
        part = order[first : first + _ROWS]
        yield _gather(data, starts[part], ends[part]), entries[part]


def stored(bucket: Bucket) -> Iterator[Tuple[bytes, np.ndarray]]:
    """Like `ordered`, but yields a bucket's records in the order in which they were put in."""
    for path in bucket.paths:
        with open(path, "rb") as f, open(_index(path), "rb") as index:
            for raw in iter(lambda index=index: index.read(_ROWS * _ENTRY.itemsize), b""):
                entries = np.frombuffer(raw, _ENTRY)
                yield f.read(int(entries["bytes"].sum(dtype=np.int64))), entries
    _delete(bucket)


def _entries(bucket):
    return np.concatenate([np.fromfile(_index(path), _ENTRY) for path in bucket.paths])


def _delete(bucket):
    for path in bucket.paths:
        os.remove(path)
        os.remove(_index(path))
