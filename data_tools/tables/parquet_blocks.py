"""Rows of Parquet files. The place of a row is its number in the file, from 0.

Cells are read as they are, or as the texts that a CSV would hold: an integer is its digits; a
number without a fraction as well, because a column of integers of which some are missing often
becomes one of floats. True is 1, False 0; null and NaN are empty. So a Parquet file made from a CSV
gives the same ids and values.
"""

from typing import Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from data_tools.tables.blocks import BadRows, fault, need_arrow, quoted
from deepfm.errors import BadInput
from deepfm.records.storage import places

BATCH = 1 << 14  # rows read at once
_NEWLINE = " or a newline"  # which no cell may hold


class RowPart(NamedTuple):
    """Consecutive rows of some row groups of a file.

    Attributes:
        path: the file.
        groups: the indices of the row groups.
        first_row: the number of their first row in the file.
        rows: how many rows they have.
        bytes: how many bytes of the file they take.
        begin, end: which of their rows, counted from the first.
        names: the columns that are read.
        there: what the file calls them.
        texts: whether cells become texts.
    """

    path: str
    groups: Tuple[int, ...]
    first_row: int
    rows: int
    bytes: int
    begin: int
    end: int
    names: Tuple[str, ...] = ()
    there: Tuple[str, ...] = ()
    texts: bool = False


def open_file(path: str):
    """A file as pyarrow's ParquetFile; BadInput if it is none, or pyarrow is missing."""
    need_arrow(path)
    import pyarrow
    from pyarrow import parquet

    if places.by_tensorflow(path):
        raise BadInput(f"{path}: Parquet is read from local files; copy it here first.")
    try:
        remote = places.is_remote(path)
        return parquet.ParquetFile(places.of(path).open_file(path) if remote else path)
    except (OSError, pyarrow.ArrowException) as error:
        raise BadInput(f"{path}: is not a Parquet file ({_reason(error)}).") from error


def _reason(error):
    return str(error).splitlines()[0][:200].rstrip(".")


def cut(path: str, size: int) -> List[RowPart]:
    """The tasks of a file: a row group each, or several small ones of `size` bytes together."""
    metadata, tasks, row = open_file(path).metadata, [], 0
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        columns = (group.column(j) for j in range(group.num_columns))
        taken = sum(column.total_compressed_size for column in columns)
        new = RowPart(path, (i,), row, group.num_rows, taken, 0, group.num_rows)
        if tasks and tasks[-1].bytes + taken <= size:
            last = tasks.pop()
            rows = last.rows + new.rows
            new = last._replace(
                groups=(*last.groups, i), rows=rows, bytes=last.bytes + taken, end=rows
            )
        tasks.append(new)
        row += group.num_rows
    return tasks


def check_text(path: str, column):
    """Refuses (BadInput) a column, a pyarrow Field, whose cells have no one text."""
    import pyarrow as pa

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    texts = pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.null(), pa.bool_()
    numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if kind not in texts and not numbers or kind == pa.float16():
        raise BadInput(
            f"{path}: column {column.name} is of type {kind}, which has no one text; cast it to "
            "string or int64."
        )


class RowBlock:
    """Some rows; see blocks.

    Args:
        path: the file.
        starts: int64 [B], their numbers.
        names: of the columns.
        columns: a pyarrow Array of B cells each.
        texts: whether the cells are texts.
    """

    def __init__(self, path, starts, names, columns, texts):
        self.path, self.starts = path, starts
        self._names, self._columns, self._texts = names, columns, texts

    def __len__(self):
        return len(self.starts)

    def take(self, index: Sequence[int]):
        index = np.array(index, np.int64)
        columns = [column.take(index) for column in self._columns]
        return RowBlock(self.path, self.starts[index], self._names, columns, self._texts)

    def texts(self):
        parts, starts, end = [], [], 0
        for column in self._columns:
            _, offsets, data = column.buffers()
            ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
            parts.append(bytes(data[ends[0] : ends[-1]]) if data else b"")
            starts.append(ends - ends[0] + end)
            end += len(parts[-1])
        starts, text = np.array(starts), b"".join(parts)
        if fault(text, _NEWLINE):
            raise BadRows
        return text, starts[:, :-1], starts[:, 1:]

    def _column(self, name):
        return self._columns[self._names.index(name)]

    def numbers(self, name: str) -> np.ndarray:
        return _numbers(self._column(name))

    integers = numbers

    def lists(self, name: str) -> Tuple[np.ndarray, np.ndarray]:
        import pyarrow.compute as pc

        lengths = _numbers(pc.list_value_length(self._column(name)))
        return _numbers(self._column(name).flatten()), lengths.astype(np.int64)

    def longest(self, name: str) -> int:
        """The length of the longest list in a column, 0 if there is none."""
        import pyarrow.compute as pc

        return pc.max(pc.list_value_length(self._column(name))).as_py() or 0

    def row(self, i: int):
        cells = [column[i].as_py() for column in self._columns]
        line = b",".join(cells) if self._texts else b""
        reason = fault(line, _NEWLINE)
        return (None, f"{reason}: {quoted(line)}") if reason else (cells, quoted(line))

    def place(self, i: int) -> str:
        return f": row {self.starts[i]}"


def _numbers(column):
    """A column as numpy's numbers; raises BadRows if a cell is null."""
    if column.null_count:
        raise BadRows
    return column.to_numpy(zero_copy_only=False)


def read(part: RowPart) -> Iterator[Tuple[int, RowBlock]]:
    """Yields (bytes of the file read, a block) for the rows of a part."""
    batches = open_file(part.path).iter_batches(
        BATCH, part.groups, list(dict.fromkeys(part.there)), use_threads=False
    )
    first = 0
    while first < part.end:
        try:
            batch = next(batches, None)
        except (OSError, ValueError) as error:  # pyarrow's own are one of these
            row = part.first_row + first
            raise BadInput(f"{part.path}: damaged after row {row} ({_reason(error)}).") from error
        if batch is None:
            return
        begin, end = max(part.begin - first, 0), min(part.end - first, batch.num_rows)
        if begin < end:
            rows = part.first_row + first + np.arange(begin, end)
            some = batch.slice(begin, end - begin)
            columns = [some.column(some.schema.get_field_index(name)) for name in part.there]
            columns = [_texts(column) for column in columns] if part.texts else columns
            size = part.bytes * len(rows) // part.rows
            yield size, RowBlock(part.path, rows, part.names, columns, part.texts)
        first += batch.num_rows


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
