"""The two passes over raw rows, each in several processes: count the categories, write the ids."""

import contextlib
import functools
import os
from typing import Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import tensorflow as tf

from data_tools.click_logs import field_tables, raw_rows, row_writers, vocabulary
from data_tools.click_logs.field_tables import FieldTable
from data_tools.click_logs.raw_columns import Column
from data_tools.click_logs.raw_parts import Task
from data_tools.click_logs.splitting import SPLITS, split_of
from data_tools.click_logs.vocabulary import Counts
from data_tools.common import workers
from data_tools.common.progress import Progress
from data_tools.common.skipping import Skipping
from deepfm.data import bad_records

COUNT_ROWS = 1 << 17  # rows that a process counts before it passes the counts on


class Running(NamedTuple):
    """How a pass is made.

    Attributes:
        num_workers: processes.
        max_bad_records: bad rows to skip; one more ends the run.
        log: whether each that is skipped is logged.
    """

    num_workers: int = 1
    max_bad_records: int = 0
    log: bool = True


class Written(NamedTuple):
    """What became of the rows of a block that belong to one split.

    Attributes:
        split: index of SPLITS.
        name: the file, without suffix.
        read: bytes of the input that were read for it.
        rows: how many they are.
        positives: those with label 1.
    """

    split: int
    name: str
    read: int
    rows: int
    positives: int


def count(tasks: Sequence[Task], columns: Sequence[Column], running: Running) -> List[Counts]:
    """The Counts of each field in the training rows of some tasks.

    Raises:
        BadInput: one bad row too many.
        OSError: a process was killed.
    """
    tallies = [vocabulary.Tally(column.kind) for column in columns]
    progress = Progress("Counting", _megabytes(tasks), "MB")
    bad = Skipping(running.max_bad_records, running.log)
    work = functools.partial(_count_part, columns=columns)
    with contextlib.closing(workers.run(work, tasks, running.num_workers)) as events:
        for _, event in events:
            if isinstance(event, bad_records.BadRecord):
                bad.add(event)
                continue
            read, counts = event
            for tally, counted in zip(tallies, counts):
                tally.add(counted)
            progress.add(read / 1e6)
    progress.finish()
    return [tally.result() for tally in tallies]


def _count_part(task, columns):
    """Yields (bytes read, [Counts] of the fields since the last time, or ()), and the bad rows."""
    waiting, texts, rows = [], [[] for _ in columns], 0
    for read, block in raw_rows.read(task.part, columns, task.labels):
        if isinstance(block, bad_records.BadRecord):
            yield block
            continue
        train = split_of(task.split, task.part.path, block.starts) == 0
        waiting.append(block.keys[:, train])
        for field, (places, found) in block.long.items():
            texts[field] += [text for place, text in zip(places, found) if train[place]]
        rows += len(train)
        if rows < COUNT_ROWS:
            yield read, ()
        else:
            yield read, _counts(waiting, texts)
            waiting, texts, rows = [], [[] for _ in columns], 0
    if waiting:
        yield 0, _counts(waiting, texts)


def _counts(blocks, texts):
    """[Counts] of each field in some blocks of keys, [F, B], and the texts of each field."""
    return [vocabulary.count(*cells) for cells in zip(np.concatenate(blocks, axis=1), texts)]


def encode(
    tasks: Sequence[Task],
    tables: Sequence[FieldTable],
    output_format: str,
    folder: str,
    running: Running,
) -> Dict[Tuple[int, str], Tuple[int, int]]:
    """Writes the rows of some tasks as records.

    Args:
        tasks: which rows.
        tables: the ids of each field.
        output_format: a key of row_writers.SUFFIXES.
        folder: where a folder is made for each of SPLITS.
        running: how the pass is made.

    Returns:
        {(index of the split, name of the file): (rows, positives)}.

    Raises:
        BadInput: one bad row too many.
        OSError: a file cannot be written, or a process was killed.
    """
    for name in SPLITS:
        os.mkdir(os.path.join(folder, name))
    written: Dict[Tuple[int, str], Tuple[int, int]] = {}
    progress = Progress("Encoding", _megabytes(tasks), "MB")
    bad = Skipping(running.max_bad_records, running.log)
    work = functools.partial(
        _encode_part, tables=tables, output_format=output_format, folder=folder
    )
    with contextlib.closing(workers.run(work, tasks, running.num_workers)) as events:
        for _, event in events:
            if isinstance(event, bad_records.BadRecord):
                bad.add(event)
                continue
            rows, positives = written.get((event.split, event.name), (0, 0))
            written[event.split, event.name] = rows + event.rows, positives + event.positives
            progress.add(event.read / 1e6)
    progress.finish()
    return written


def _encode_part(task, tables, output_format, folder):
    """Writes the rows of a part; yields what was Written, and the bad rows."""
    writer = row_writers.writer(output_format, len(tables), tables[-1].end)
    columns = [table.column for table in tables]
    name = task.name + row_writers.SUFFIXES[output_format]
    for read, block in raw_rows.read(task.part, columns, task.labels):
        if isinstance(block, bad_records.BadRecord):
            yield block
            continue
        ids, values = field_tables.encode(block, tables)
        splits = split_of(task.split, task.part.path, block.starts)
        for split in np.unique(splits).tolist():
            mine = splits == split
            labels = block.labels[mine]
            path = os.path.join(folder, SPLITS[split], name)
            writer.append(path, labels, ids[mine], values[mine])
            yield Written(split, name, read, len(labels), int(labels.sum()))
            read = 0


def _megabytes(tasks):
    ends = (task.part.end or tf.io.gfile.stat(task.part.path).length for task in tasks)
    return sum(end - task.part.start for end, task in zip(ends, tasks)) / 1e6
