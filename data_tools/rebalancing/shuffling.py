"""Shuffles more records than fit into memory, in two passes over the disk.

Every record gets a random 64-bit key, and records are sorted by key. The first pass scatters them
into buckets by the upper bits of their keys; the second sorts one bucket after another in memory. A
bucket that is too large for memory is scattered again, by the next bits. So the order depends on
the keys alone, not on the number of buckets or on who filled them.
(Random buckets, shuffled one by one: Rao, Sankhya A 23 (1961); Sandelius, JRSS B 24 (1962).)

A key is the number of the record, scrambled by SplitMix64. That is a bijection, so no two records
have the same key.

n: records of a block.
"""

import os
import pathlib
from typing import Iterator, List, NamedTuple, Tuple

import numpy as np

from data_tools.common import splitmix64

_ENTRY = np.dtype([("key", "<u8"), ("bytes", "<u4"), ("positive", "?")])  # per record, on disk
_FEW = 64  # records to copy at once
_ROWS = 1024  # records to gather, or to read from an unsorted bucket, at once
_TASK_BITS = 40  # the lower bits of a record's number: its place within its task


def salt(*numbers: int) -> np.ndarray:
    """Two numbers to scramble keys with, uint64 [2], from a seed and other numbers."""
    mixed = np.uint64([0, 1])
    for number in numbers:
        mixed = _scramble(mixed ^ np.uint64(number))
    return mixed


def keys(salt: np.ndarray, task: int, first: int, n: int) -> np.ndarray:
    """The keys, uint64 [n], of records first ... first + n - 1 of a task."""
    return _scramble(_scramble(numbers(task, first, n) ^ salt[0]) ^ salt[1])


def numbers(task: int, first: int, n: int) -> np.ndarray:
    """The numbers, uint64 [n], of records first ... first + n - 1 of a task, in reading order."""
    return np.arange(first, first + n, dtype=np.uint64) | np.uint64(task << _TASK_BITS)


def _scramble(x):
    return splitmix64.finalize(x + splitmix64.GAMMA)


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


def buckets(folder: str, used: int) -> List[Bucket]:
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
        for smaller in buckets(folder, bucket.bits + bits):
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
