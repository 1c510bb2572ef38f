"""Which records are written, in which order; and counting them.

Records are written by ascending keys. A key is the number of the record, scrambled by SplitMix64:
a function of its place and the seed, so that every engine gives it the same one, and a bijection,
so that no two records have the same. Needs neither TensorFlow nor absl, which Spark's executors
lack.
"""

import dataclasses
from typing import Any, Callable, Iterator, NamedTuple, Optional, Sequence

import numpy as np

from data_tools.common import splitmix64
from data_tools.rebalancing import record_blocks
from data_tools.rebalancing.record_blocks import RecordBlock
from deepfm.records.data_file import SamplingRates
from deepfm.records.schema import BadRecord, Schema

COPIES = 1 << 14  # records to sample at once
CELL_BITS = 16  # upper bits of a key that choose its cell
CHUNK = 1 << 16  # keys made at once
ALL = SamplingRates(1.0, 1.0)  # every record once
_ORDER, _SAMPLE = 0, 1  # what a key is for
_TASK_BITS = 40  # the lower bits of a record's number: its place within its task


@dataclasses.dataclass(frozen=True)  # pyspark strips named tuples of their methods
class Order:
    """In which order the records are written.

    Attributes:
        seed: --seed.
        shuffle: whether by random keys, or in the order of tasks and records.
    """

    seed: int
    shuffle: bool

    def keys(self, task: int, first: int, n: int) -> np.ndarray:
        """The keys, uint64 [n], of records first ... first + n - 1 to write of a task."""
        return self._random(_ORDER, task, first, n) if self.shuffle else numbers(task, first, n)

    def draws(self, task: int, first: int, n: int) -> np.ndarray:
        """The keys, uint64 [n], that decide which of a task's records first ... are written."""
        return self._random(_SAMPLE, task, first, n)

    def cuts(self, rows: Sequence[int], num_files: int) -> np.ndarray:
        """The smallest key of each output file but the first. uint64 [num_files - 1], ascending.

        File i holds the records of the ranks from total * i // num_files on, by ascending keys. A
        histogram of the upper bits of all keys finds the cells in which the cuts lie, and the keys
        in these cells, sorted, are counted to the exact ones. Takes 0.07 s for 1,000,000 records.
        In reading order, ranks are places.

        Args:
            rows: the number of records to write of each task.
            num_files: at most the sum of `rows`.
        """
        ranks = np.array([sum(rows) * i // num_files for i in range(1, num_files)], np.int64)
        if not self.shuffle:
            firsts = np.cumsum([0, *rows])
            task = np.searchsorted(firsts, ranks, side="right") - 1
            return (task << _TASK_BITS | ranks - firsts[task]).astype(np.uint64)
        if not len(ranks):
            return np.zeros(0, np.uint64)
        chunks = [
            (i, at, min(CHUNK, n - at)) for i, n in enumerate(rows) for at in range(0, n, CHUNK)
        ]
        cell_of = lambda keys: (keys >> np.uint64(64 - CELL_BITS)).astype(np.int64)
        counts = np.zeros(1 << CELL_BITS, np.int64)
        for chunk in chunks:
            counts += np.bincount(cell_of(self.keys(*chunk)), minlength=len(counts))
        cells = np.searchsorted(np.cumsum(counts), ranks, side="right")
        wanted = np.zeros(len(counts), bool)
        wanted[cells] = True
        inside = ((keys, wanted[cell_of(keys)]) for keys in (self.keys(*x) for x in chunks))
        found = np.sort(np.concatenate([keys[mask] for keys, mask in inside]))
        # The keys before a cell, of all of them and of those in wanted cells:
        before, kept = (np.cumsum(x) - x for x in (counts, np.where(wanted, counts, 0)))
        return found[ranks - before[cells] + kept[cells]]

    def _random(self, purpose, task, first, n):
        salt = np.uint64([0, 1])
        for number in (self.seed, 0, purpose):
            salt = _scramble(salt ^ np.uint64(number))
        return _scramble(_scramble(numbers(task, first, n) ^ salt[0]) ^ salt[1])


def numbers(task: int, first: int, n: int) -> np.ndarray:
    """The numbers, uint64 [n], of records first ... first + n - 1 of a task, in reading order."""
    return np.arange(first, first + n, dtype=np.uint64) | np.uint64(task << _TASK_BITS)


def _scramble(x):
    return splitmix64.finalize(x + splitmix64.GAMMA)


class Work(NamedTuple):
    """What every task needs to know.

    Attributes:
        inputs: LineRanges of text, or whole TFRecord files; a task is the index of one.
        schema: the Schema of TFRecords; None for LibSVM text.
        weighted: whether the labels of text may have a weight.
        skip: bad records to pass over in a file; one more ends its reading.
        rates: SamplingRates.
        order: the Order of the records.
        compress: whether to write .gz files.
        scratch: the folder to write to.
    """

    inputs: list
    schema: Optional[Schema]
    weighted: bool
    skip: int
    rates: SamplingRates
    order: Order
    compress: bool
    scratch: str


class Facts(NamedTuple):
    """The negatives and positives in the input, int64 [2]; the records to write; the largest id
    seen."""

    before: Any
    kept: int
    max_id: int


def together(one: Facts, other: Facts) -> Facts:
    """The Facts of two blocks as one."""
    return Facts(one.before + other.before, one.kept + other.kept, max(one.max_id, other.max_id))


def choose(positive, key, rates):
    """The records to keep, each `rate` times, rounded up or down at random, as an index into arrays
    [n]; copies repeat.

    positive: bool [n]. key: uint64 [n], from Order.draws.
    """
    rate = np.where(positive, rates.positive, rates.negative)
    whole = np.floor(rate)
    copies = whole + (splitmix64.uniform(key) < rate - whole)
    return np.repeat(np.arange(len(positive)), copies.astype(np.int64))


def _blocks(lines, work):
    if work.schema is None:
        return record_blocks.read_lines(lines, work.weighted)
    # On Spark, named tuples keep their fields, not their methods.
    return record_blocks.read(lines.path, Schema(*work.schema), work.skip)


def read(
    task: int, work: Work, put: Optional[Callable[[RecordBlock, Any, np.ndarray], None]] = None
) -> Iterator:
    """The events of an engine's task, the index of an input: BadRecords, and Facts of each block.

    `put` takes blocks of records, the index of those to write, and their keys.
    """
    step, seen, written = max(int(COPIES / max(*work.rates, 1)), 1), 0, 0
    for block in _blocks(work.inputs[task], work):
        if isinstance(block, BadRecord):
            yield block
            continue
        max_id = int(block.batch.ids.max(initial=-1))
        for first in range(0, len(block.starts), step):
            index = np.arange(first, min(first + step, len(block.starts)))
            positive = block.positive[index]
            if work.rates != ALL:
                draws = work.order.draws(task, seen, len(index))
                index = index[choose(positive, draws, work.rates)]
            if put:
                put(block, index, work.order.keys(task, written, len(index)))
            seen, written = seen + len(positive), written + len(index)
            before = np.bincount(positive, minlength=2)
            yield 0 if first else block.read, None, Facts(before, len(index), max_id)
