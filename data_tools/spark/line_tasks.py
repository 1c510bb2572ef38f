"""What executors do for convert: count the rows of ranges, write them, join the pieces."""

import os
import shutil
from typing import Callable

import pyspark

from data_tools.libsvm import pieces
from data_tools.libsvm.pieces import Piece
from data_tools.spark import record_tasks
from deepfm.errors import naming
from deepfm.records.bad_record import BadRecord
from deepfm.records.schema import Schema
from deepfm.records.storage import places

COPY = 1 << 20  # bytes copied at once, as data_tools.common.record_files does


def count(task, count_range: Callable):
    """Yields (rows, most fields in a row) of a range; count_range: InputRows.count."""
    found = [block for _, block in count_range(task)]
    yield sum(rows for rows, _ in found), max((most for _, most in found), default=0)


def write(task, write_range: Callable, schema, scratch: str):
    """Writes the rows of a range to its pieces, in a folder of this attempt's.

    Args:
        task: (a range, its Pieces), whose paths are names.
        write_range: InputRows.write.
        schema: Schema of the rows, as a tuple.
        scratch: where to make the folder.

    Yields:
        BadRecords, and (index of the output file, path, BlockFacts as a tuple) of each piece that
        was written.
    """
    rows, planned = task
    folder = _own_folder(scratch)
    planned = [Piece(os.path.join(folder, name), *rest) for name, *rest in planned]
    written = {}
    with naming(folder), places.appending(1) as put:
        for event in write_range((rows, planned), Schema(*schema), put):
            if isinstance(event, BadRecord):
                yield event
            else:
                _, (piece, facts) = event
                written[piece] = pieces.together(written.get(piece, pieces.NO_ROWS), facts)
    yield from ((piece.output, piece.path, tuple(facts)) for piece, facts in written.items())


def _own_folder(scratch):
    """Makes the folder of this attempt to run a task."""
    folder = os.path.join(scratch, f"attempt-{pyspark.TaskContext.get().taskAttemptId()}")
    places.of(folder).make_inner(folder)
    return folder


def join(task, compress: bool, scratch: str):
    """Joins pieces in order; yields the path of the whole.

    Args:
        task: (the name of the output file, paths of its pieces), which stay as they are: the task
            may be tried again.
        compress: whether to compress it, as one gzip member.
        scratch: where to make a folder for this attempt.
    """
    name, paths = task
    whole = os.path.join(_own_folder(scratch), name)
    files = places.of(whole)
    with naming(whole), files.create(whole) as raw, record_tasks.compressed(raw, compress) as f:
        for path in paths:
            with files.open_file(path) as piece:
                shutil.copyfileobj(piece, f, COPY)
    yield whole
