"""Rows of CSV files. The place of a row is its line, from 1, and the byte where that begins.

A cell that begins with a quote ends at the next one; two quotes in a row stand for one (RFC 4180,
section 2). In other cells a quote is an ordinary character. Every row is one line: a cell that
holds a newline is refused.
"""

import contextlib
import re
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from data_tools.tables.blocks import (
    BadRows,
    fault,
    find,
    integers,
    need_arrow,
    numbers,
    quoted,
)
from deepfm.errors import BadInput
from deepfm.records import text_blocks
from deepfm.records.raw import cells as rules
from deepfm.records.text_blocks import LineRange, Lines

DELIMITERS = {"tab": b"\t", "comma": b",", "semicolon": b";", "pipe": b"|", "ctrl-a": b"\1"}
_LINES = 100  # of a file, by which its delimiter is found
_NEWLINE, _RETURN = b"\n\r"
_BETWEEN = b"\0"  # between cells that may hold the delimiter
_CELL = re.compile(rb'"([^"]*(?:""[^"]*)*)"')


class CsvFile(NamedTuple):
    """How the cells of a file lie.

    Attributes:
        delimiter: the byte between two cells.
        width: cells of a row.
        names: the columns that are read.
        places: where the cell of each is in a row.
        header: whether the first line is a header.
        texts: whether the cells must be UTF-8 without NUL.
        hints: what a sentence about the number of cells adds to the right one; and behind it, where
            one is missing.
    """

    delimiter: bytes
    width: int
    names: Tuple[str, ...]
    places: Tuple[int, ...]
    header: bool
    texts: bool = False
    hints: Tuple[str, str] = ("", "")


class LinePart(NamedTuple):
    """Some lines of a file: their path, LineRange and CsvFile."""

    path: str
    lines: LineRange
    file: CsvFile


def first_rows(path: str, delimiter: str = "auto") -> Tuple[Iterator[List[str]], bytes]:
    """(the cells of a file's first lines that are not blank, at least one; the byte between two).

    Args:
        path: the file.
        delimiter: a key of DELIMITERS, the character itself, or auto: that of DELIMITERS by which
            the first lines have the most cells, all as many; else a tab, if the first has one, or a
            comma.
    """
    need_arrow(path)
    with contextlib.closing(text_blocks.blocks(path)) as blocks:
        lines = next(blocks, (0, b"", 0))[1].splitlines()
    lines = list(filter(None, lines)) or [b""]
    found = DELIMITERS.get(delimiter, delimiter.encode())
    if delimiter == "auto":
        widths = lambda between: {len(split_line(x, between)[0]) for x in lines[:_LINES]}
        each = [(widths(x), x) for x in DELIMITERS.values()]
        even = [(max(of), x) for of, x in each if len(of) == 1 and max(of) > 1]
        found = max(even)[1] if even else b"\t" if b"\t" in lines[0] else b","
    texts = lambda line: [x.decode("utf-8", "replace").strip() for x in split_line(line, found)[0]]
    return map(texts, lines), found


def describe(
    path: str,
    wanted: Sequence[str],
    orders: Sequence[Sequence[str]],
    delimiter: str = "auto",
    header: str = "auto",
) -> CsvFile:
    """How a file lies, all of whose columns are read.

    Its first line is a header if it names all columns that are wanted, or one of them that is no
    number.

    Args:
        path: the file.
        wanted: names of columns.
        orders: the columns of files without a header, by their number; (): there is one.
        delimiter: as for `first_rows`.
        header: auto, or yes or no.
    """
    rows, between = first_rows(path, delimiter)
    cells = next(rows)
    there = [name for name in wanted if name.lower() in {cell.lower() for cell in cells}]
    named = len(there) == len(wanted) or any(rules.number(name) is None for name in there)
    named = not orders or (named and header != "no")
    columns = cells if named else next((x for x in orders if len(x) == len(cells)), orders[0])
    places = tuple(range(len(columns)))
    return CsvFile(between, len(columns), tuple(columns), places, named or header == "yes")


def select(path: str, file: CsvFile, names: Sequence[str], about: str = "") -> CsvFile:
    """A file of which only some columns are read; BadInput, with what `about` says, without one."""
    places = tuple(find(path, name, file.names, about) for name in names)
    return file._replace(names=tuple(names), places=places)


class LineBlock(Lines):
    """Some lines that are not blank; see blocks.

    Args:
        file: the CsvFile.
    """

    def __init__(self, path, text, offset, before, first, file):
        super().__init__(path, text, offset, before, first)
        self._file, self._texts = file, None

    def _records(self, newlines):
        characters, begins = np.frombuffer(self.text, np.uint8), np.append(0, newlines[:-1] + 1)
        blank = (begins == newlines) | (begins + 1 == newlines) & (characters[begins] == _RETURN)
        lines = np.flatnonzero(~blank)
        return begins[lines], lines

    def take(self, index: Sequence[int]):
        taken = super().take(index)
        taken._texts = None
        return taken

    def texts(self):
        self._texts = self._texts or self._read()
        return self._texts

    def _read(self):
        file = self._file
        if file.texts and fault(self.text):
            raise BadRows
        text, between = unquote(self.text, file.delimiter), file.delimiter
        if text is None:
            text, between = self._unquoted(), _BETWEEN
        characters = np.frombuffer(text, np.uint8)
        newlines = characters == _NEWLINE
        cuts = np.flatnonzero(newlines | (characters == between[0]))
        if len(cuts) != len(self) * file.width:
            raise BadRows
        ends = cuts.reshape(-1, file.width)
        if not newlines[ends[:, -1]].all():
            raise BadRows
        starts = np.append(0, cuts + 1)[:-1].reshape(ends.shape)
        ends[:, -1] -= characters[ends[:, -1] - 1] == _RETURN
        places = list(file.places)
        return (text, *(np.ascontiguousarray(x.T[places]) for x in (starts, ends)))

    def _unquoted(self):
        lines = (_without_return(self.line(i)) for i in range(len(self)))
        lines = [split_line(line, self._file.delimiter) for line in lines]
        if any(reason for _, reason in lines):
            raise BadRows
        return b"\n".join([*(_BETWEEN.join(cells) for cells, _ in lines), b""])

    def _column(self, name):
        text, starts, ends = self.texts()
        place = self._file.names.index(name)
        return text, starts[place], ends[place]

    def integers(self, name: str) -> np.ndarray:
        return integers(*self._column(name))

    def numbers(self, name: str) -> np.ndarray:
        return numbers(*self._column(name))

    def row(self, i: int):
        file, line = self._file, _without_return(self.line(i))
        cells, reason = split_line(line, file.delimiter)
        shown = quoted(file.delimiter.join(cells) if file.texts else line)
        if not reason and file.texts:
            reason = fault(line)
        if not reason and len(cells) != file.width:
            about, less = file.hints
            less = less if len(cells) == file.width - 1 else ""
            reason = f"expected {file.width} columns{about}, found {len(cells)}{less}"
        if reason:
            return None, f"{reason}: {shown}"
        return [cells[place] for place in file.places], shown


def _without_return(line):
    return line[:-1] if line.endswith(b"\r") else line


def unquote(text: bytes, delimiter: bytes) -> Optional[bytes]:
    """Whole lines without the quotes around cells; None if `split_line` is needed for one."""
    if b'"' not in text:
        return text
    begin = b'"(?<![^\n%s]")' % delimiter
    text = re.sub(b'%s([^"\n%s]*)"(?=%s|\r?\n)' % (begin, delimiter, delimiter), rb"\1", text)
    return None if re.search(begin, text) else text


def split_line(line: bytes, delimiter: bytes) -> Tuple[List[bytes], Optional[str]]:
    """(the cells of a line without the quotes around them, what is wrong with these or None)."""
    if b'"' not in line:
        return line.split(delimiter), None
    cells, at = [], 0
    while at <= len(line):
        if line[at : at + 1] != b'"':
            end = line.find(delimiter, at)
            end = len(line) if end < 0 else end
            cells.append(line[at:end])
        else:
            quoted_cell = _CELL.match(line, at)
            if not quoted_cell:
                return line.split(
                    delimiter
                ), "a quoted cell does not end in its line (it must not hold a newline)"
            cells.append(quoted_cell[1].replace(b'""', b'"'))
            end = quoted_cell.end()
            if line[end : end + 1] not in (b"", delimiter):
                return line.split(delimiter), "a quoted cell goes on after its closing quote"
        at = end + 1
    return cells, None


def read(part: LinePart) -> Iterator[Tuple[int, LineBlock]]:
    """Yields (bytes of the file read, a block) for the lines of a part that are not blank."""
    first, before, file = text_blocks.numbering(part.lines), 0, part.file
    try:
        for start, text, size in text_blocks.blocks(*part.lines):
            block = LineBlock(part.path, text, start, before, first, file)
            lines = text_blocks.newlines(text)
            rows = range(int(start == 0 and file.header), len(block))
            if rows:
                yield size, block if len(rows) == lines else block.take(rows)
            before += lines
    except BadInput as error:
        raise BadInput(f"{str(error).rstrip('.')} after line {before}.") from error
