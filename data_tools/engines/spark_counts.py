"""What executors do to count the categories of rows, and to add the counts up."""

import zlib
from typing import Iterable, Iterator, NamedTuple, Sequence, Tuple

import numpy as np

from data_tools.click_logs import slices, vocabulary
from data_tools.click_logs.column_kinds import RANGED, Column
from data_tools.click_logs.vocabulary import Counts
from data_tools.common import splitmix64
from data_tools.engines import spark_events

EVENT, COUNTS = range(2)  # a bad row or file; the counts of a part of the keys


class Vocabulary(NamedTuple):
    """What counting needs to know.

    Attributes:
        columns: the Column of each field.
        min_count: a category that occurs less often is dropped.
        parts: into how many parts the keys are divided, to add them up side by side.
    """

    columns: Sequence[Column]
    min_count: int
    parts: int


def count(pairs: Iterable[Tuple[int, slices.RawSlice]], about: Vocabulary) -> Iterator:
    """Counts the categories of some slices.

    Yields:
        (part of the keys, (COUNTS, the fields' Counts in it)), and (0, (EVENT, event)) for each of
        spark_events.events that is no result.
    """
    other = []

    def counted():
        for event in spark_events.events(pairs, slices.count_rows):
            if event[1] == spark_events.GOOD:
                yield event[2][1]
            else:
                other.append(event)

    found = vocabulary.add_up(about.columns, counted())
    yield from ((0, (EVENT, event)) for event in other)
    divided = [_divided(field, about.parts) for field in found]
    for part in range(about.parts):
        yield part, (COUNTS, [field[part] for field in divided])


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


def add_up(pairs: Iterable, about: Vocabulary) -> Iterator:
    """Adds the counts of a part of the keys up.

    Yields:
        (EVENT, event) as they come, and (COUNTS, (categories found, the fields' Counts of those
        that are not rare)).
    """
    other = []

    def counted():
        for _, (kind, content) in pairs:
            if kind == COUNTS:
                yield content
            else:
                other.append((EVENT, content))

    counts = vocabulary.add_up(about.columns, counted())
    yield from other
    seen = sum(field.distinct() for field in counts)
    kept = [
        field if column.kind in RANGED else field.frequent(about.min_count)
        for column, field in zip(about.columns, counts)
    ]
    yield COUNTS, (seen, kept)
