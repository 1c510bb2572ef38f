"""Reads raw rows from Parquet files: columns by name, whose cells are what a text file would hold.

An integer is its digits; a number without a fraction as well, because a column of integers of which
some are missing often becomes one of floats. True is 1, False 0; null and NaN are empty cells. So a
Parquet file made from a CSV gives the same ids and values. The place of a row is its number in the
file, from 0.

Nothing here needs more than pyarrow and numpy, and pyarrow only once there is a Parquet file.
B: rows of a block. F: fields.
"""

import sys
from typing import Iterator, List, NamedTuple, Sequence, Tuple, Union

import numpy as np

from data_tools.click_logs import column_kinds, row_parser
from data_tools.click_logs.column_kinds import DATASETS, LABEL
from data_tools.click_logs.row_parser import BadBlock, Layout, Rows
from deepfm.errors import BadInput
from deepfm.records.bad_record import BadRecord, marked
from deepfm.records.storage import places

SUFFIXES, MAGIC = (".parquet", ".pq"), b"PAR1"
VERSION = "12.0.1"  # the last for Python 3.7
BATCH = 1 << 14  # rows read at once


class RowGroups(NamedTuple):
    """Consecutive row groups of a file.

    Attributes:
        path: the file.
        groups: their indices.
        first_row: the number of their first row in the file.
        rows: how many rows they have.
        bytes: how many bytes of the file they take.
        names: the columns to read: the label's, if there is one, then one for each field.
    """

    path: str
    groups: Tuple[int, ...]
    first_row: int
    rows: int
    bytes: int
    names: Tuple[str, ...] = ()


def open_file(path: str):
    """A file as pyarrow's ParquetFile; BadInput if it is none, or pyarrow is missing."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise BadInput(
            f"{path}: reading Parquet needs pyarrow, which is not installed; run "
            f"'{sys.executable} -m pip install pyarrow=={VERSION}'."
        ) from error
    if places.by_tensorflow(path):
        raise BadInput(f"{path}: Parquet is read from local files; copy it here first.")
    try:
        remote = places.is_remote(path)
        return parquet.ParquetFile(places.of(path).open_file(path) if remote else path)
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).splitlines()[0][:200].rstrip(".")
        raise BadInput(f"{path}: is not a Parquet file ({reason}).") from error


def is_parquet(path: str) -> bool:
    """Whether a file is Parquet, by its name or else by its first bytes."""
    if path.endswith(SUFFIXES):
        return True
    with places.of(path).open_file(path) as f:
        return f.read(len(MAGIC)) == MAGIC


def cut(path: str, size: int) -> List[RowGroups]:
    """The tasks of a file: a row group each, or several small ones of `size` bytes together."""
    metadata, tasks, row = open_file(path).metadata, [], 0
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        columns = (group.column(j) for j in range(group.num_columns))
        taken = sum(column.total_compressed_size for column in columns)
        if tasks and tasks[-1].bytes + taken <= size:
            last = tasks.pop()
            groups, rows = (*last.groups, i), last.rows + group.num_rows
            tasks.append(last._replace(groups=groups, rows=rows, bytes=last.bytes + taken))
        else:
            tasks.append(RowGroups(path, (i,), row, group.num_rows, taken))
        row += group.num_rows
    return tasks


def read_layout(path: str, labels: bool, options) -> Tuple[Layout, Tuple[str, ...]]:
    """The Layout of a file's rows and the names of the columns to read, label first.

    Args:
        path: the file.
        labels: whether the file must have labels.
        options: prepare_criteo.Options.

    Raises:
        BadInput: a column is missing, or its type has no text.
    """
    schema = open_file(path).schema_arrow
    columns = options.table or DATASETS[options.dataset]
    fields = column_kinds.fields(columns, options.integers)
    (label,) = (column.name for column in columns if column.kind == LABEL)
    names = []
    for name in (label, *(field.name for field in fields)):
        alike = [x for x in schema.names if x == name]
        alike = alike or [x for x in schema.names if x.lower() == name.lower()]
        if not alike and name == label and not labels:
            continue
        if len(alike) != 1:
            there = ", ".join(schema.names[:20])
            more = " (only --test_input may lack the label)" if name == label else ""
            what = "has no column" if not alike else "has several columns"
            raise BadInput(
                f"{path}: {what} {name} (see --dataset, --columns){more}; its columns are {there}."
            )
        _check_type(path, alike[0], schema.field(alike[0]).type)
        names.append(alike[0])
    labelled = len(names) > len(fields)
    places = tuple(range(labelled, len(names)))
    layout = Layout(b"", len(names), 0 if labelled else None, labels, fields, places, False)
    return layout, tuple(names)


def _check_type(path, name, kind):
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    texts = pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.null(), pa.bool_()
    numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if kind not in texts and not numbers or kind == pa.float16():
        raise BadInput(
            f"{path}: column {name} is of type {kind}, which has no one text; cast it to string or "
            "int64."
        )


def read(groups: RowGroups, layout: Layout) -> Iterator[Tuple[int, Union[Rows, BadRecord]]]:
    """Yields (bytes of the file read, Rows or a BadRecord) for some row groups, block by block."""
    row = groups.first_row
    for batch in batches(groups):
        size = groups.bytes * batch.num_rows // groups.rows
        columns = [batch.column(batch.schema.get_field_index(name)) for name in groups.names]
        for block in parse_columns(groups.path, row, columns, layout):
            yield 0 if isinstance(block, BadRecord) else size, block
        row += batch.num_rows


def batches(groups: RowGroups) -> Iterator:
    """Yields pyarrow RecordBatches with the rows of some row groups and the columns `names`."""
    row = groups.first_row
    iterator = open_file(groups.path).iter_batches(
        BATCH, groups.groups, list(groups.names), use_threads=False
    )
    while True:
        try:
            batch = next(iterator, None)
        except (OSError, ValueError) as error:  # pyarrow's own are one of these
            reason = str(error).splitlines()[0][:200].rstrip(".")
            raise BadInput(f"{groups.path}: damaged after row {row} ({reason}).") from error
        if batch is None:
            return
        yield batch
        row += batch.num_rows


def parse_columns(
    path: str, first_row: int, columns: Sequence, layout: Layout
) -> Iterator[Union[Rows, BadRecord]]:
    """Yields a BadRecord for each bad row of a block, then the Rows of its others, if any.

    Args:
        path: the file, for sentences.
        first_row: the number of the first row in the file.
        columns: pyarrow Arrays of B cells: the label's, if layout.label is 0, then the fields'.
        layout: from `read_layout`.
    """
    columns = [_texts(column) for column in columns]
    places = first_row + np.arange(len(columns[0]))
    try:
        yield _parse(columns, places, layout)
        return
    except BadBlock:
        pass
    rows = list(zip(*(column.to_pylist() for column in columns)))
    reasons = [row_parser.explain_cells(row, layout) for row in rows]
    told = zip(places.tolist(), reasons)
    bad = (BadRecord(path, f": row {place}", reason) for place, reason in told if reason)
    yield from marked(bad, len(rows))
    good = np.flatnonzero([not reason for reason in reasons])
    if len(good):
        yield _parse([column.take(good) for column in columns], places[good], layout)


def _parse(columns, places, layout):
    """The Rows of columns of texts; raises BadBlock if a cell is bad."""
    parts, starts, end = [], [], 0
    for column in columns:
        _, offsets, data = column.buffers()
        ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
        parts.append(bytes(data[ends[0] : ends[-1]]) if data else b"")
        starts.append(ends - ends[0] + end)
        end += len(parts[-1])
    starts, text = np.array(starts), b"".join(parts)
    return row_parser.rows_of_cells(text, starts[:, :-1], starts[:, 1:], places, layout)


def _texts(column):
    """A column as pyarrow's large_binary, without nulls."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    if pa.types.is_floating(column.type):
        column = _texts_of_floats(column)
    if pa.types.is_binary(column.type):
        column = column.cast(pa.large_binary())
    elif not pa.types.is_large_binary(column.type):
        column = column.cast(pa.large_string()).cast(pa.large_binary())
    return pc.fill_null(column, b"")


def _texts_of_floats(column):
    """Floats as texts; those without a fraction as integers, NaN as null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    x = column.to_numpy(zero_copy_only=False)  # NaN for null
    with np.errstate(invalid="ignore"):
        whole = (x == np.floor(x)) & (np.abs(x) < 1e18)
    integers = pa.array(np.where(whole, x, 0).astype(np.int64)).cast(pa.large_string())
    others = pa.array(x, mask=np.isnan(x)).cast(pa.large_string())
    return pc.if_else(pa.array(whole), integers, others)
