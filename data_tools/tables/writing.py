"""Writes the rows of tables with encoded ids to the pieces of output files.

Needs neither TensorFlow nor absl, which Spark's executors lack.
"""

from typing import Any, Callable, Iterator, List, Sequence, Tuple

import numpy as np

from data_tools.libsvm.pieces import NO_ROWS, Piece, facts_of, mixed
from data_tools.tables import row_checks
from data_tools.tables.layouts import Layout
from data_tools.tables.parts import Part, reader
from deepfm.errors import BadInput, naming
from deepfm.records import codec
from deepfm.records.bad_record import BadRecord
from deepfm.records.schema import Schema


def count(part: Part, lists: str = "") -> Iterator:
    """Yields (bytes read, None, (rows, most fields in a row)) for each block of a part.

    Args:
        lists: the column of lists whose lengths are the rows' fields; empty: fields do not matter.
    """
    if hasattr(part, "groups") and not lists:  # the file says it
        rows = part.end - part.begin
        yield part.bytes * rows // part.rows, None, (rows, 0)
        return
    for size, block in reader(part).read(part):
        yield size, None, (len(block), block.longest(lists) if lists else 0)


def write(
    task: Tuple[Part, List[Piece]],
    schema: Schema,
    put: Callable[[str, bytes], Any],
    *,
    layout: Layout,
) -> Iterator:
    """Writes the rows of a part to its pieces, in order; yields what libsvm.pieces.write does.

    Args:
        put: appends bytes to a path.
    """
    part, pieces = task
    for piece, block, size in _cut(reader(part).read(part), pieces):
        for rows in row_checks.records(block, layout, schema):
            if isinstance(rows, BadRecord):
                yield rows
                continue
            data = codec.encode(*_stored(rows))[0]
            with naming(piece.path):
                put(piece.path, data)
            zero = bool((rows.labels == 0).any())
            facts = facts_of(rows, bool((rows.labels < 0).any()), zero, len(data))
            yield 0, (piece.output, piece.path), facts
        yield size, (piece.output, piece.path), NO_ROWS


def _stored(batch):
    """A Batch with labels 0 and 1."""
    return batch._replace(labels=(batch.labels > 0).astype(np.float32))


def _cut(blocks, pieces):
    """Yields (piece, block, bytes read) for each block, cut where a piece ends."""
    pieces = iter(pieces)
    piece = next(pieces)
    left = piece.rows
    for size, block in blocks:
        first = 0
        while left is not None and first + left <= len(block):
            yield piece, block.take(range(first, first + left)), size
            first, size = first + left, 0
            piece = next(pieces, None)
            if piece is None:  # no rows are left
                return
            left = piece.rows
        if first < len(block):
            yield piece, block.take(range(first, len(block))) if first else block, size
            left = None if left is None else left - (len(block) - first)


def first_length(parts: Sequence[Part], layout: Layout, schema: Schema, skip: int) -> int:
    """The number of fields in the first good row of columns of lists; 0: there is no row.

    Raises BadInput, which names it, if more than `skip` bad rows come first.
    """
    for bad, (block, row) in enumerate(_rows(parts), 1):
        cells = row_checks.cells_of(block, row, layout)
        length = 0 if isinstance(cells, str) else len(cells[layout.counts or layout.ids] or ())
        about = schema._replace(field_size=max(length, 1), feature_size=None)
        reason = row_checks.explain(block, row, layout, about)
        if not reason:
            return length
        if bad > skip:
            raise BadInput(f"{block.path}{block.place(row)}: {reason}")
    return 0


def _rows(parts):
    for part in parts:
        for _, block in reader(part).read(part):
            yield from ((block, row) for row in range(len(block)))


def mixed_labels(parts: Sequence[Part], layout: Layout, schema: Schema) -> str:
    """The error message for tables with both labels 0 and -1, where 0 is ambiguous."""
    label = lambda block, row: row_checks.cells_of(block, row, layout)[layout.label]
    return mixed(
        (f"{block.path}{block.place(row)}", b"%d" % int(row_checks.number(label(block, row))))
        for block, row in _rows(parts)
        if not row_checks.explain(block, row, layout, schema)  # others were skipped
    )
