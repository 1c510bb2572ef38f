"""Rows of Parquet files with encoded ids. The place of a row is its number in the file, from 0."""

from typing import Iterator, List, NamedTuple, Tuple

import numpy as np

from data_tools.click_logs import parquet_rows
from data_tools.click_logs.parquet_rows import RowGroups
from data_tools.common import line_blocks
from data_tools.tables import layouts
from data_tools.tables.layouts import COUNTS, ID, IDS, LISTS, VALUES, Layout
from data_tools.tables.row_checks import BadRows
from deepfm.errors import BadInput

ROWS = 1 << 18  # rows of a task: to reach them, those before in their row group are decoded, too
_ADVICE = {
    IDS: "a list of integers, as list<int64>",
    COUNTS: "a list of integers, as list<int64>",
    VALUES: "a list of numbers, as list<float>",
    ID: "an integer, as int64",
}


class RowPart(NamedTuple):
    """Consecutive rows of some row groups.

    Attributes:
        path: the file.
        groups: the RowGroups.
        begin, end: which of their rows, counted from the first.
        names: the columns that are read, under the names of the Layout.
    """

    path: str
    groups: RowGroups
    begin: int
    end: int
    names: Tuple[str, ...]


def named(path: str) -> Layout:
    """The Layout that a file's names say."""
    return layouts.named(parquet_rows.open_file(path).schema_arrow.names)


def cut(path: str, size: int, layout: Layout) -> List[RowPart]:
    """The tasks of a file of `size` bytes; raises BadInput if a column is missing or unfit."""
    schema = parquet_rows.open_file(path).schema_arrow
    wanted = layouts.columns(layout)
    places = layouts.find(path, layout, schema.names)
    for (_, kind), place in zip(wanted, places):
        _check_type(path, schema.field(place), kind)
    there = tuple(schema.names[place] for place in places)
    tasks = []
    for groups in parquet_rows.cut(path, line_blocks.TASK):
        groups = groups._replace(names=there)
        number = max(-(-groups.rows // ROWS), 1)
        ends = [groups.rows * i // number for i in range(number + 1)]
        names = tuple(name for name, _ in wanted)
        tasks += [RowPart(path, groups, a, b, names) for a, b in zip(ends, ends[1:]) if a < b]
    return tasks


def _check_type(path, column, kind):
    import pyarrow.types as types

    found, advice = column.type, _ADVICE.get(kind, "a number, as int64 or double")
    inner = found
    if kind in LISTS:
        is_list = types.is_list(found) or types.is_large_list(found)
        inner = found.value_type if is_list or types.is_fixed_size_list(found) else None
    fits = inner is not None and types.is_integer(inner)
    if kind not in (ID, IDS, COUNTS):
        fits = fits or inner is not None and types.is_floating(inner)
        fits = fits or kind not in LISTS and types.is_boolean(inner)
    if not fits:
        raise BadInput(
            f"{path}: column {column.name} is of type {found}, but must be {advice}; cast it, or "
            "say by --columns what each column is."
        )


class ParquetBlock:
    """Some rows; see row_checks.

    Args:
        path: the file.
        rows: int64 [B], their numbers.
        columns: {name in the Layout: pyarrow Array of B cells}.
    """

    def __init__(self, path, rows, columns):
        self.path, self._rows, self._columns = path, rows, columns

    def __len__(self):
        return len(self._rows)

    def part(self, first: int, last: int):
        columns = {name: x.slice(first, last - first) for name, x in self._columns.items()}
        return ParquetBlock(self.path, self._rows[first:last], columns)

    def take(self, index: List[int]):
        index = np.array(index, np.int64)
        columns = {name: x.take(index) for name, x in self._columns.items()}
        return ParquetBlock(self.path, self._rows[index], columns)

    def integers(self, name: str) -> np.ndarray:
        return _numbers(self._columns[name])

    def numbers(self, name: str) -> np.ndarray:
        with np.errstate(over="ignore"):
            return _numbers(self._columns[name]).astype(np.float32)

    def lists(self, name: str) -> Tuple[np.ndarray, np.ndarray]:
        import pyarrow.compute as pc

        lengths = _numbers(pc.list_value_length(self._columns[name]))
        return _numbers(self._columns[name].flatten()), lengths.astype(np.int64)

    def longest(self, name: str) -> int:
        """The length of the longest list in a column, 0 if there is none."""
        import pyarrow.compute as pc

        return pc.max(pc.list_value_length(self._columns[name])).as_py() or 0

    def cells(self, row: int):
        return {name: column[row].as_py() for name, column in self._columns.items()}

    def place(self, row: int) -> str:
        return f": row {self._rows[row]}"


def _numbers(column):
    """A column as numpy's numbers; raises BadRows if a cell is null."""
    if column.null_count:
        raise BadRows
    return column.to_numpy(zero_copy_only=False)


def read(part: RowPart) -> Iterator[Tuple[int, ParquetBlock]]:
    """Yields (bytes of the file read, a block) for the rows of a task."""
    first = 0
    for batch in parquet_rows.batches(part.groups):
        begin, end = max(part.begin - first, 0), min(part.end - first, batch.num_rows)
        if begin < end:
            there = [batch.schema.get_field_index(name) for name in part.groups.names]
            columns = {n: batch.column(i) for n, i in zip(part.names, there)}
            rows = part.groups.first_row + first + np.arange(batch.num_rows)
            block = ParquetBlock(part.path, rows, columns).part(begin, end)
            yield part.groups.bytes * len(block) // part.groups.rows, block
        first += batch.num_rows
        if first >= part.end:
            return


def count_rows(part: RowPart) -> Iterator[Tuple[int, int]]:
    """Yields (bytes of the file, rows): the file says how many."""
    rows = part.end - part.begin
    yield part.groups.bytes * rows // part.groups.rows, rows
