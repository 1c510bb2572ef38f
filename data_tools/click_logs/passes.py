"""The two passes over raw rows, in several processes: count categories, then write ids."""

import functools
import os
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from data_tools.click_logs import field_tables, row_writers, vocabulary
from data_tools.click_logs.column_kinds import Column
from data_tools.click_logs.field_tables import FieldTable
from data_tools.click_logs.slices import RawSlice, read_rows, size
from data_tools.click_logs.splitting import SPLITS, split_of
from data_tools.click_logs.vocabulary import Counts, Room
from data_tools.common import workers
from data_tools.common.skipping import Skipping
from deepfm.data import formats
from deepfm.data.plain.bad_record import BadRecord

COUNT_ROWS = 1 << 17  # rows to count before passing on the counts


def count(
    slices: Sequence[RawSlice],
    columns: Sequence[Column],
    num_workers: int,
    bad: Skipping,
    room: Optional[Room] = None,
) -> List[Counts]:
    """The Counts of each field in the training rows of some slices.

    Raises:
        BadInput: one bad row too many, or the categories take more than the room.
        OSError: a process was killed.
    """
    with workers.results(
        _count_slice, slices, num_workers, "Counting", sum(size(task.lines) for task in slices), bad
    ) as results:
        return vocabulary.add_up(columns, (counts for _, counts in results), room)


def _count_slice(task):
    """Yields bad rows and (bytes read, the fields' [Counts] since the last ones, or ())."""
    waiting, texts, rows = [], [[] for _ in task.layout.columns], 0
    for read, block in read_rows(task.lines, task.layout):
        if isinstance(block, BadRecord):
            yield block
            continue
        train = split_of(task.split, task.lines.path, block.starts) == 0
        waiting.append(block.keys[:, train])
        for field, (places, found) in block.long.items():
            texts[field] += [text for place, text in zip(places, found) if train[place]]
        rows += len(train)
        if rows < COUNT_ROWS:
            yield read, ()
        else:
            yield read, _counts(waiting, texts)
            waiting, texts, rows = [], [[] for _ in task.layout.columns], 0
    if waiting:
        yield 0, _counts(waiting, texts)


def _counts(blocks, texts):
    """[Counts] of the fields, from blocks of keys [F, B] and the long texts of each field."""
    return [vocabulary.count(*cells) for cells in zip(np.concatenate(blocks, axis=1), texts)]


def encode(
    slices: Sequence[RawSlice],
    tables: Sequence[FieldTable],
    output_format: str,
    folder: str,
    num_workers: int,
    bad: Skipping,
) -> Dict[Tuple[int, str], Tuple[int, int]]:
    """Writes the rows of some slices as records.

    Args:
        slices: which rows.
        tables: the ids of each field.
        output_format: a key of row_writers.WRITERS.
        folder: where to make a folder for each of SPLITS.
        num_workers: number of processes.
        bad: counts the bad rows.

    Returns:
        {(index of the split, name of the file): (rows, positives)}.

    Raises:
        BadInput: one bad row too many.
        OSError: a file cannot be written, or a process was killed.
    """
    for name in SPLITS:
        os.mkdir(os.path.join(folder, name))
    written: Dict[Tuple[int, str], Tuple[int, int]] = {}
    work = functools.partial(
        _encode_slice, tables=tables, output_format=output_format, folder=folder
    )
    with workers.results(
        work, slices, num_workers, "Encoding", sum(size(task.lines) for task in slices), bad
    ) as results:
        for _, (split, name, rows, positives) in results:
            before = written.get((split, name), (0, 0))
            written[split, name] = before[0] + rows, before[1] + positives
    return written


def _encode_slice(task, tables, output_format, folder):
    """Writes the rows of a slice; yields bad rows, and for each split in a block (bytes of the
    input read, (index in SPLITS, name of the file, rows, positives))."""
    append = row_writers.writer(output_format, len(tables), tables[-1].end)
    name = task.name + formats.FORMATS[output_format].suffixes[0]
    for read, block in read_rows(task.lines, task.layout):
        if isinstance(block, BadRecord):
            yield block
            continue
        ids, values = field_tables.encode(block, tables)
        splits = split_of(task.split, task.lines.path, block.starts)
        for split in np.unique(splits).tolist():
            mine = splits == split
            labels = block.labels[mine]
            path = os.path.join(folder, SPLITS[split], name)
            append(path, labels, ids[mine], values[mine])
            yield read, (split, name, len(labels), int(labels.sum()))
            read = 0
