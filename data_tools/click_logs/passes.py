"""The two passes over raw rows, in several processes: count categories, then write ids."""

import functools
import os
from typing import Dict, List, Optional, Sequence, Tuple

import tensorflow as tf

from data_tools.click_logs import vocabulary
from data_tools.click_logs.column_kinds import Column
from data_tools.click_logs.feature_map import STEPS
from data_tools.click_logs.field_tables import FieldTable
from data_tools.click_logs.slices import RawSlice, count_rows, encode_rows, size
from data_tools.click_logs.splitting import SPLITS
from data_tools.click_logs.vocabulary import Counts, Room
from data_tools.common import record_files, workers
from data_tools.common.skipping import Skipping
from data_tools.libsvm.line_format import line_writer
from data_tools.libsvm.pieces import NO_ROWS, BlockFacts, together
from deepfm.data import formats, records


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
        count_rows, slices, num_workers, "Counting", sum(size(task.lines) for task in slices), bad
    ) as results:
        return vocabulary.add_up(columns, (counts for _, counts in results), room)


def encode(
    slices: Sequence[RawSlice],
    tables: Sequence[FieldTable],
    output_format: str,
    folder: str,
    num_workers: int,
    bad: Skipping,
) -> Dict[Tuple[int, str], BlockFacts]:
    """Writes the rows of some slices as records.

    Args:
        slices: which rows.
        tables: the ids of each field.
        output_format: a key of WRITERS.
        folder: where to make a folder for each of SPLITS.
        num_workers: number of processes.
        bad: counts the bad rows.

    Returns:
        {(index of the split, name of the file): BlockFacts}.

    Raises:
        BadInput: one bad row too many.
        OSError: a file cannot be written, or a process was killed.
    """
    for name in SPLITS:
        os.mkdir(os.path.join(folder, name))
    written: Dict[Tuple[int, str], BlockFacts] = {}
    work = functools.partial(
        _encode_slice, tables=tables, output_format=output_format, folder=folder
    )
    with workers.results(
        work, slices, num_workers, "Encoding", sum(size(task.lines) for task in slices), bad
    ) as results:
        for _, (split, name, found) in results:
            written[split, name] = together(written.get((split, name), NO_ROWS), found)
    return written


def _encode_slice(task, tables, output_format, folder):
    append = _writer(output_format, len(tables), tables[-1].end)
    suffix = formats.FORMATS[output_format].suffixes[0]
    return encode_rows(task, tables, append, folder, suffix)


def _write_tfrecords(field_size, feature_size):
    width = [None, field_size]
    encode = lambda labels, ids, values: (records.encode(labels, ids, values), ())
    inputs = (tf.float32, [None]), (tf.int64, width), (tf.float32, width)
    return record_files.appender(encode, *inputs)


def _write_libsvm(field_size, feature_size):
    to_lines = line_writer(feature_size, STEPS)

    def append(path, labels, ids, values):
        with open(path, "ab") as f:
            f.write(to_lines(ids, values, labels > 0))

    return append


WRITERS = {formats.TFRECORD.name: _write_tfrecords, formats.LIBSVM.name: _write_libsvm}


@functools.lru_cache(maxsize=1)  # built once per process
def _writer(output_format: str, field_size: int, feature_size: int):
    """A function that appends rows to a file; it raises OSError if it cannot write.

    Args:
        output_format: a key of WRITERS.
        field_size: F.
        feature_size: ids are below this.

    Returns:
        A function (path, labels float32 [B], ids int64 [B, F], values float32 [B, F]) -> None.
    """
    return WRITERS[output_format](field_size, feature_size)
