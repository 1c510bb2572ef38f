"""Which records are written, in which order; and counting them.

A record's key is a function of its place and the seed, so every engine gives it the same one. Needs
neither TensorFlow nor absl, which Spark's executors lack.
"""

import dataclasses
from typing import Any, Callable, Iterator, NamedTuple, Optional, Tuple

import numpy as np

from data_tools.rebalancing import record_blocks, sampling, shuffling
from data_tools.rebalancing.record_blocks import RecordBlock
from deepfm.records.bad_record import BadRecord
from deepfm.records.data_file import SamplingRates
from deepfm.records.schema import Schema

COPIES = 1 << 14  # records to sample at once
_ORDER, _SAMPLE = 0, 1  # what a key is for


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
        if self.shuffle:
            return shuffling.keys(shuffling.salt(self.seed, 0, _ORDER), task, first, n)
        return shuffling.numbers(task, first, n)

    def draws(self, task: int, first: int, n: int) -> np.ndarray:
        """The keys, uint64 [n], that decide which of a task's records first ... are written."""
        return shuffling.keys(shuffling.salt(self.seed, 0, _SAMPLE), task, first, n)


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
    """The records of each label, int64 [2], in the input and to be written; the largest id seen."""

    before: Any
    kept: Any
    max_id: int


def together(one: Facts, other: Facts) -> Facts:
    """The Facts of two blocks as one."""
    return Facts(one.before + other.before, one.kept + other.kept, max(one.max_id, other.max_id))


def chosen(task: int, work: Work) -> Iterator[Tuple]:
    """Yields (a block of records, index of those to write); (BadRecord, None)."""
    step, seen = max(int(COPIES / max(*work.rates, 1)), 1), 0
    for block in _blocks(work.inputs[task], work):
        if isinstance(block, BadRecord):
            yield block, None
            continue
        for first in range(0, len(block.starts), step):
            some = slice(first, first + step)
            part = RecordBlock(
                block.data, block.starts[some], block.ends[some], block.positive[some],
                block.batch, 0 if first else block.read,
            )  # fmt: skip
            draws = work.order.draws(task, seen, len(part.starts))
            seen += len(part.starts)
            yield part, sampling.choose(part.positive, draws, work.rates)


def _blocks(lines, work):
    if work.schema is None:
        return record_blocks.read_lines(lines, work.weighted)
    # On Spark, named tuples keep their fields, not their methods.
    return record_blocks.read(lines.path, Schema(*work.schema), work.skip)


def read(
    task: int,
    work: Work,
    put: Optional[Callable[[RecordBlock, Any, np.ndarray], None]] = None,
) -> Iterator:
    """The events of an engine's task that reads records: BadRecords, and Facts of each block.

    Args:
        task: the index of an input.
        work: Work.
        put: takes each block, the index of those to write, and their keys.
    """
    written = 0
    for block, index in chosen(task, work):
        if isinstance(block, BadRecord):
            yield block
            continue
        positive = block.positive[index]
        if put:
            put(block, index, work.order.keys(task, written, len(positive)))
        written += len(positive)
        kept, max_id = sampling.by_label(positive), int(block.batch.ids.max(initial=-1))
        yield block.read, None, Facts(sampling.by_label(block.positive), kept, max_id)
