"""What executors do for convert: count the rows of ranges, write them, join the pieces."""

import os
import re
import shutil
from typing import Any, Callable

import numpy as np
import pyspark

from data_tools.libsvm import pieces
from data_tools.libsvm.pieces import BlockFacts, Piece
from data_tools.spark import record_tasks
from deepfm.data.plain import encoder, libsvm_decoder, text_blocks
from deepfm.data.plain.bad_record import BadRecord
from deepfm.data.plain.schema import Schema
from deepfm.errors import naming
from deepfm.runtime.storage import places

COPY = 1 << 20  # bytes copied at once, as data_tools.common.record_files does
_BLANK, _MINUS = b" -"
_NEGATIVE = re.compile(rb"\s*-")


def count(task, count_range: Callable):
    """Yields (rows, most fields in a row) of a range; count_range: Source.count."""
    found = [block for _, block in count_range(task)]
    yield sum(rows for rows, _ in found), max((most for _, most in found), default=0)


def write(task, write_range: Callable, schema, scratch: str):
    """Writes the rows of a range to its pieces, in a folder of this attempt's.

    Args:
        task: (a range, its Pieces), whose paths are names.
        write_range: Source.write.
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


def write_lines(task, schema: Schema, put: Callable[[str, bytes], Any]):
    """Writes the lines of a range to its pieces with `put`; yields what pieces.write does."""
    append = lambda path, text: _append(path, text, schema, put)
    accepts = lambda text: libsvm_decoder.decode(text, schema) is not None
    return pieces.write(task, append, accepts, schema)


def _own_folder(scratch):
    """Makes the folder of this attempt to run a task."""
    folder = os.path.join(scratch, f"attempt-{pyspark.TaskContext.get().taskAttemptId()}")
    places.of(folder).make_inner(folder)
    return folder


def _append(path, text, schema, put):
    """Appends the records of a text to a file; returns BlockFacts, or None if a line is bad."""
    batch = libsvm_decoder.decode(text, schema)
    if batch is None:
        return None
    rows = len(batch.labels)
    frames, _ = encoder.encode(*batch)
    put(path, frames)
    negative = _negative(text)
    return BlockFacts(
        rows,
        int(np.count_nonzero(batch.labels)),
        int(batch.ids.max(initial=0 if rows else -1)),
        bool(negative.any()),
        bool((~negative & (batch.labels == 0)).any()),
    )


def _negative(text):
    """Whether the label of each record of a text has a minus sign. bool [B]."""
    starts = text_blocks.record_starts(text)
    first = np.frombuffer(text, np.uint8)[starts]
    negative = first == _MINUS
    for i in np.flatnonzero(first <= _BLANK).tolist():
        negative[i] = bool(_NEGATIVE.match(text, starts[i]))
    return negative


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
