"""Rows of CSV files with encoded ids. The place of a row is its line, from 1.

A tab or comma separates cells. The first line names the columns, in any order, unless --columns
gives their order. Cells may be quoted, but hold no newline and no delimiter.
"""

from typing import Callable, Iterator, List, NamedTuple, Tuple

import numpy as np

from data_tools.click_logs import quoted_cells, row_parser
from data_tools.common import line_blocks
from data_tools.common.line_blocks import LineRange
from data_tools.tables import layouts
from data_tools.tables.cell_text import BadText, Text
from data_tools.tables.layouts import LISTS, Layout
from data_tools.tables.row_checks import BadRows
from deepfm.errors import BadInput

SUFFIXES = tuple(x + y for x in (".csv", ".tsv") for y in ("", ".gz"))
_NEWLINE, _RETURN, _MINUS = b"\n\r-"


class CsvFile(NamedTuple):
    """How the cells of a file lie.

    Attributes:
        delimiter: the byte between two cells.
        width: cells of a row.
        names: the columns that are read, under the names of the Layout.
        places: where the cell of each is in a row.
        header: whether the first line is a header.
    """

    delimiter: bytes
    width: int
    names: Tuple[str, ...]
    places: Tuple[int, ...]
    header: bool


class LinePart(NamedTuple):
    """Some lines of a file: their path, LineRange and CsvFile."""

    path: str
    lines: LineRange
    file: CsvFile


def named(path: str) -> Layout:
    """The Layout that a file's first line says."""
    layout = layouts.named(row_parser.first_cells(line_blocks.first_text(path))[0])
    if layout.ids:
        raise BadInput(
            f"{path}: has a column {layout.ids}, for a list, but a cell of a CSV is one number; "
            "give each field a column, or write Parquet."
        )
    return layout


def cut(path: str, size: int, layout: Layout) -> List[LinePart]:
    """The tasks of a file of `size` bytes; raises BadInput if a column is missing."""
    wanted = layouts.columns(layout)
    lists = [name for name, kind in wanted if kind in LISTS]
    if lists:
        raise BadInput(
            f"{path}: column {lists[0]} would hold lists, but a cell of a CSV is one number; give "
            "each field a column, or write Parquet."
        )
    file = _file(path, layout, tuple(name for name, _ in wanted))
    return [LinePart(path, lines, file) for lines in line_blocks.cut(path, size)]


def _file(path, layout, names):
    cells, delimiter = row_parser.first_cells(line_blocks.first_text(path))
    known, there = {name.lower() for name in names}, {cell.lower() for cell in cells}
    if layout.order and not any(name in there and not row_parser.is_number(name) for name in known):
        order = [name.lower() for name in layout.order]
        places = tuple(order.index(name.lower()) for name in names)
        return CsvFile(delimiter, len(order), names, places, False)
    hint = (
        ""
        if layout.order
        else "; prepare_criteo reads raw cells; LibSVM text needs --input_format=libsvm"
    )
    places = tuple(layouts.find(path, layout, cells, hint))
    return CsvFile(delimiter, len(cells), names, places, True)


class CsvBlock:
    """Some lines; see row_checks.

    Args:
        path: the file.
        text: the lines, each with its newline.
        lines: int64 [B], where in the block they were read in each row's line is, from 0.
        number: returns the number of that block's first line.
        file: the CsvFile.
        plain: whether the cells have no quotes around them any more.
    """

    def __init__(self, path, text, lines, number, file, plain=False):
        self.path, self._text, self._lines = path, text, lines
        self._number, self._file, self._plain = number, file, plain
        self._parsed = self._split = None

    def __len__(self):
        return len(self._lines)

    def part(self, first: int, last: int):
        ends = np.flatnonzero(np.frombuffer(self._text, np.uint8) == _NEWLINE) + 1
        starts = np.append(0, ends)
        text = self._text[starts[first] : starts[last]]
        return CsvBlock(self.path, text, self._lines[first:last], self._number, self._file)

    def take(self, index: List[int]):
        lines = self._text.split(b"\n")
        unquoted = [self._unquoted(lines[i]) for i in index]
        text = b"".join(line + b"\n" for line, _ in unquoted)
        block = CsvBlock(self.path, text, self._lines[index], self._number, self._file, True)
        if any(reason for _, reason in unquoted):
            block._text = None
        return block

    def _unquoted(self, line):
        if line.endswith(b"\r"):
            line = line[:-1]
        return (
            (line, None) if self._plain else quoted_cells.unquote_line(line, self._file.delimiter)
        )

    def _cells_of(self, name):
        """(Text, where the cells of a column begin, where they end)."""
        if self._parsed is None:
            self._parsed = self._parse()
        text, starts, ends = self._parsed
        place = self._file.places[self._file.names.index(name)]
        return text, starts[:, place], ends[:, place]

    def _parse(self):
        text = self._text
        if text is not None and not self._plain:
            text = quoted_cells.unquote(text, self._file.delimiter)
        if text is None:
            raise BadRows
        try:
            places = row_parser.cell_places(text, self._file.delimiter, self._file.width)
        except row_parser.BadBlock:
            raise BadRows from None
        return (Text(text), *places)

    def integers(self, name: str) -> np.ndarray:
        text, starts, ends = self._cells_of(name)
        minus = text.padded[starts] == _MINUS
        try:
            found = text.integers(starts + minus, ends)
        except BadText:
            raise BadRows from None
        return np.where(minus, -found, found)

    def numbers(self, name: str) -> np.ndarray:
        return self._cells_of(name)[0].numbers(*self._cells_of(name)[1:])

    def cells(self, row: int):
        self._split = self._split or self._text.split(b"\n")
        raw = self._split[row]
        line, reason = self._unquoted(raw)
        shown = row_parser.quoted(raw.rstrip(b"\r"))
        if reason:
            return f"{reason}: {shown}"
        cells = line.split(self._file.delimiter)
        if len(cells) != self._file.width:
            return f"expected {self._file.width} columns, found {len(cells)}: {shown}"
        return dict(zip(self._file.names, (cells[place] for place in self._file.places)))

    def place(self, row: int) -> str:
        return f":{self._number() + self._lines[row]}"


def read(part: LinePart) -> Iterator[Tuple[int, CsvBlock]]:
    """Yields (bytes of the file read, a block) for the lines of a task."""
    first, before = line_blocks.numbering(part.lines), 0
    for start, text, read in line_blocks.read_blocks(part.lines):
        number: Callable[[], int] = lambda before=before: first() + before
        before += text.count(b"\n")
        skip = 1 if start == 0 and part.file.header else 0
        yield read, _without_blank(part, text, skip, number)


def _without_blank(part, text, skip, number):
    """The CsvBlock of a text without the lines that are blank, and then the first `skip`."""
    lines = np.arange(text.count(b"\n"))
    if skip or b"\n\n" in text or b"\n\r\n" in text or text.startswith((b"\n", b"\r\n")):
        whole = text.split(b"\n")[:-1]
        kept = [i for i, line in enumerate(whole) if line not in (b"", b"\r")][skip:]
        lines, text = np.array(kept, np.int64), b"".join(whole[i] + b"\n" for i in kept)
    return CsvBlock(part.path, text, lines, number, part.file)


def count_rows(part: LinePart) -> Iterator[Tuple[int, int]]:
    """Yields (bytes of the file read, rows) for each block of a task."""
    return ((read, len(block)) for read, block in read(part))
