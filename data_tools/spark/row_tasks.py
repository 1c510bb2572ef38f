"""What executors do for prepare: count the categories of rows, add the counts up, encode rows."""

import os
import zlib
from typing import Iterable, Iterator, NamedTuple, Sequence, Tuple

import numpy as np
import pyspark

from data_tools.click_logs import slices, vocabulary
from data_tools.click_logs.column_kinds import SCALED, Column
from data_tools.click_logs.feature_map import STEPS
from data_tools.click_logs.splitting import SPLITS
from data_tools.click_logs.vocabulary import Counts
from data_tools.common import splitmix64
from data_tools.libsvm import pieces
from data_tools.libsvm.line_format import line_writer
from data_tools.spark import events
from deepfm.errors import naming
from deepfm.records import codec, data_file
from deepfm.records.bad_record import BadRecord
from deepfm.records.storage import places

SUFFIXES = {"tfrecord": data_file.TFRECORD[0], "libsvm": data_file.LIBSVM[0]}
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
        (part of the keys, (COUNTS, the fields' counts in it, as tuples)), and (0, (EVENT, event))
        for each of events.events that is no result.
    """
    other = []

    def counted():
        for event in events.events(pairs, slices.count_rows):
            if event[1] == events.GOOD:
                yield event[2][1]
            else:
                other.append(event)

    found = vocabulary.add_up(about.columns, counted())
    yield from ((0, (EVENT, event)) for event in other)
    divided = [_divided(field, about.parts) for field in found]
    for part in range(about.parts):
        yield part, (COUNTS, [field[part] for field in divided])


def _divided(field, parts):
    """Counts as one tuple (keys, counts, long) for each part of the keys."""
    part_of = (splitmix64.finalize(field.keys) % np.uint64(parts)).astype(np.int64)
    order = np.argsort(part_of, kind="stable")
    cuts = np.searchsorted(part_of[order], np.arange(1, parts))
    long = [{} for _ in range(parts)]
    for text, number in field.long.items():
        long[zlib.crc32(text) % parts][text] = number
    return list(zip(np.split(field.keys[order], cuts), np.split(field.counts[order], cuts), long))


def add_up(pairs: Iterable, about: Vocabulary) -> Iterator:
    """Adds the counts of a part of the keys up.

    Yields:
        (EVENT, event) as they come, and (COUNTS, (categories found, the fields' counts of those
        that are not rare, as tuples)).
    """
    other = []

    def counted():
        for _, (kind, content) in pairs:
            if kind == COUNTS:
                yield [_by_key(*field) for field in content]
            else:
                other.append((EVENT, content))

    counts = vocabulary.add_up(about.columns, counted())
    yield from other
    seen = sum(len(field.keys) + len(field.long) for field in counts)
    kept = [_frequent(*pair, about.min_count) for pair in zip(counts, about.columns)]
    yield COUNTS, (seen, kept)


def _by_key(keys, counts, long):
    order = np.argsort(keys)
    return Counts(keys[order], counts[order], long)


def _frequent(field, column, min_count):
    """Counts as a tuple, without rare categories; all of a scaled field."""
    if column.kind == SCALED:
        return tuple(field)
    often = field.counts >= min_count
    long = {text: n for text, n in field.long.items() if n >= min_count}
    return field.keys[often], field.counts[often], long


def encode(task, tables, output_format: str, scratch: str) -> Iterator:
    """Writes the rows of a slice into a folder of this attempt's.

    Yields:
        BadRecords, and (index in SPLITS, name of the file, BlockFacts as a tuple, the folder) of
        each file.
    """
    folder = os.path.join(scratch, f"attempt-{pyspark.TaskContext.get().taskAttemptId()}")
    for made in (folder, *(os.path.join(folder, split) for split in SPLITS)):
        places.of(made).make_inner(made)
    to_bytes = _records if output_format == "tfrecord" else _lines(tables[-1].end)
    suffix, written = SUFFIXES[output_format], {}
    with naming(folder), places.appending(len(SPLITS)) as put:
        append = lambda path, *rows: put(path, to_bytes(*rows))
        for event in slices.encode_rows(task, tables, append, folder, suffix):
            if isinstance(event, BadRecord):
                yield event
            else:
                _, (split, name, found) = event
                before = written.get((split, name), pieces.NO_ROWS)
                written[split, name] = pieces.together(before, found)
    yield from ((*file, tuple(found), folder) for file, found in written.items())


def _records(labels, ids, values):
    return codec.encode(labels, ids, values)[0]


def _lines(feature_size):
    to_lines = line_writer(feature_size, STEPS)
    return lambda labels, ids, values: to_lines(ids, values, labels > 0)
