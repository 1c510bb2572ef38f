"""Shuffles more records than fit into memory, in two passes over the disk.

Every record has a 64-bit key of its own (see selecting), and records are sorted by key. The first
pass scatters them into buckets, each for a range of keys in one output file; the second sorts one
bucket after another in memory, and writes it to its place in the file. A bucket that is too large
for memory is scattered again. So the order depends on the keys alone, not on the number of buckets
or on who filled them.
(Random buckets, shuffled one by one: Rao, Sankhya A 23 (1961); Sandelius, JRSS B 24 (1962).)

n: records of a block.
"""

import functools
import os
import pathlib
from typing import Dict, Iterator, List, NamedTuple, Tuple

import numpy as np

from data_tools.libsvm import pieces
from data_tools.rebalancing import sampling, selecting

BUCKET = 16 << 20  # bytes of records to aim for in a bucket
MOST = 1024  # buckets, unless there are more output files
AGAIN = 16  # buckets for one that is too large
BUFFER = 64 << 20  # most bytes of records to hold before writing them to their buckets
GZIP_RATIO = 4  # approximate bytes of records per byte of a compressed file
_ENTRY = np.dtype([("key", "<u8"), ("bytes", "<u4"), ("positive", "?")])  # per record, on disk
_FEW = 64  # records to copy at once
_ROWS = 1024  # records to gather, or to read from an unsorted bucket, at once


def shuffle(engine, data, work, rows, names):
    """Processes.shuffle."""
    memory = engine.memory // engine.number  # bytes of records that a process may hold
    each = buckets_of_file(data, work.rates, engine.number, sum(rows), len(names))
    folder = os.path.join(work.scratch, "buckets")
    cuts = work.order.cuts(rows, each * len(names))
    scatter = functools.partial(_scatter, folder=folder, cuts=cuts, memory=memory)
    sampling.read_all(engine, data, work, "Reading", scatter, log=False)
    end = ".plain" if work.compress else ""
    paths = {name: os.path.join(work.scratch, name + end) for name in names}
    tasks, sizes = [], dict.fromkeys(names, 0)
    for number, bucket in buckets_of(folder).items():
        name = names[number // each]
        tasks.append((bucket, name, paths[name], sizes[name]))
        sizes[name] += bucket.bytes
    counts = {name: np.zeros(2, np.int64) for name in names}
    write, size = functools.partial(_write_bucket, memory=memory), sum(sizes.values())
    with engine.map(write, tasks, "Writing", size, np.add) as results:
        for _, name, found in results:
            counts[name] += found
    parts = {name: [path] for name, path in paths.items()}
    wholes = pieces.join(engine, parts, work.compress, work.scratch, size)
    return {name: (wholes[name], tuple(counts[name].tolist())) for name in names}


def buckets_of_file(data, rates, num_workers, rows, num_files):
    """How many buckets an output file has: of about BUCKET bytes, and in all 8 per worker."""
    size = sum(f.bytes * (GZIP_RATIO if f.path.endswith(".gz") else 1) for f in data.files)
    all_files = min(max(int(size * max(*rates, 1)) // BUCKET, 8 * num_workers), MOST)
    return min(-(-all_files // num_files), rows // num_files)


def _scatter(task, work, folder, cuts, memory):
    """Puts the records of a task into buckets; yields what selecting.read does."""
    scatter = Scatter(folder, cuts, min(memory // 2, BUFFER))
    put = lambda block, index, keys: scatter.add(
        block.data, block.starts[index], block.ends[index], keys, block.positive[index]
    )
    yield from selecting.read(task, work, put)
    scatter.flush()


def _write_bucket(task, memory):
    """Writes the records of a bucket to their place in a file; yields (bytes, name of the file,
    int64 [2]: records and positives)."""
    bucket, name, path, begin = task
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as f:
        f.seek(begin)
        for data, entries in ordered(bucket, memory):
            f.write(data)
            found = np.array([len(entries), np.count_nonzero(entries["positive"])])
            yield len(data), name, found


class Bucket(NamedTuple):
    """The content of a bucket, written by one or more processes.

    Attributes:
        paths: the files of records; each has an index file beside it.
        rows, bytes: the records in it, and their size.
    """

    paths: List[str]
    rows: int
    bytes: int


class Scatter:
    """Writes records into the buckets of a folder, by their keys.

    Args:
        folder: several processes may write to it.
        cuts: the smallest key of each bucket but the first, uint64, ascending.
        memory: bytes of records to keep in memory before writing them.
    """

    def __init__(self, folder: str, cuts: np.ndarray, memory: int):
        os.makedirs(folder, exist_ok=True)
        self._folder, self._cuts, self._memory = folder, cuts, memory
        self._waiting, self._kept = {}, 0

    def add(self, data: bytes, starts, ends, keys, positive):
        """Adds the records data[start:end]; the other arguments are arrays [n]."""
        entries = np.empty(len(starts), _ENTRY)
        entries["key"], entries["bytes"], entries["positive"] = keys, ends - starts, positive
        bucket = np.searchsorted(self._cuts, keys, side="right")
        order = np.argsort(bucket, kind="stable")
        data, entries = _gather(data, starts[order], ends[order]), entries[order]
        cuts = np.searchsorted(bucket[order], np.arange(len(self._cuts) + 2))
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
            path = os.path.join(self._folder, f"{i}-{os.getpid()}")
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


def buckets_of(folder: str) -> Dict[int, Bucket]:
    """{number of a bucket: it} of those in a folder that hold records, in key order."""
    paths = {}
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".index"):
            paths.setdefault(int(name.split("-")[0]), []).append(os.path.join(folder, name))
    size = lambda paths: sum(map(os.path.getsize, paths))
    return {
        number: Bucket(found, size(map(_index, found)) // _ENTRY.itemsize, size(found))
        for number, found in sorted(paths.items())
    }


def memory_of(rows: int, size: int) -> int:
    """Bytes of memory that sorting a bucket of `rows` records in `size` bytes takes."""
    return 2 * size + rows * (_ENTRY.itemsize + 4 * 8)


def ordered(bucket: Bucket, memory: int) -> Iterator[Tuple[bytes, np.ndarray]]:
    """Yields a bucket's records by ascending keys, and deletes it: (n records, concatenated; their
    index [n], with bytes and positive of each).

    A bucket whose sorting would take more than `memory` bytes is scattered again.
    """
    entries = np.concatenate([np.fromfile(_index(path), _ENTRY) for path in bucket.paths])
    order = np.argsort(entries["key"])
    if memory_of(bucket.rows, bucket.bytes) > memory and bucket.rows > 1:
        folder, cuts = f"{bucket.paths[0]}-again", order[:: -(-bucket.rows // AGAIN)][1:]
        _scatter_again(bucket, Scatter(folder, entries["key"][cuts], memory // 4))
        for smaller in buckets_of(folder).values():
            yield from ordered(smaller, memory)
        return
    data = b"".join([pathlib.Path(path).read_bytes() for path in bucket.paths])
    _delete(bucket)
    starts, ends = _places(entries)
    for first in range(0, len(order), _ROWS):
        part = order[first : first + _ROWS]
        yield _gather(data, starts[part], ends[part]), entries[part]


def _scatter_again(bucket, scatter):
    """Puts the records of a bucket into smaller ones, and deletes it."""
    for path in bucket.paths:
        with open(path, "rb") as f, open(_index(path), "rb") as index:
            for raw in iter(lambda index=index: index.read(_ROWS * _ENTRY.itemsize), b""):
                entries = np.frombuffer(raw, _ENTRY)
                starts, ends = _places(entries)
                scatter.add(
                    f.read(int(ends[-1])), starts, ends, entries["key"], entries["positive"]
                )
    _delete(bucket)
    scatter.flush()


def _places(entries):
    """(starts, ends) of records that lie one after the other."""
    ends = np.cumsum(entries["bytes"], dtype=np.int64)
    return ends - entries["bytes"], ends


def _delete(bucket):
    for path in bucket.paths:
        os.remove(path)
        os.remove(_index(path))
