"""Rows of CSV files. The place of a row is its line, from 1, and the byte where that begins.

A cell that begins with a quote ends at the next one; two quotes in a row stand for one (RFC 4180,
section 2). In other cells a quote is an ordinary character. Every row is one line: a cell that
holds a newline or the delimiter is refused.
"""

import contextlib
import re
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from data_tools.tables.blocks import BadRows, fault, integers, need_arrow, numbers, quoted
from deepfm.errors import BadInput
from deepfm.records import text_blocks
from deepfm.records.text_blocks import LineRange

DELIMITERS = {"tab": b"\t", "comma": b","}
_NEWLINE, _RETURN = b"\n\r"
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


def first_cells(path: str, delimiter: str = "auto") -> Tuple[List[str], bytes]:
    """(the cells of a file's first line that is not blank, the byte between two)."""
    need_arrow(path)
    text = text_blocks.first_text(path).lstrip(b"\r\n").partition(b"\n")[0]
    by_look = "tab" if b"\t" in text else "comma"
    found = DELIMITERS[by_look if delimiter == "auto" else delimiter]
    line, _ = unquote_line(_without_return(text), found)
    return [cell.decode("utf-8", "replace").strip() for cell in line.split(found)], found


def is_number(text: str) -> bool:
    """Whether a text is a number, which NaN is not."""
    with contextlib.suppress(ValueError):
        return float(text) == float(text)
    return False


class LineBlock:
    """Some lines; see blocks.

    Args:
        path: the file.
        text: the lines, each with its newline.
        starts: int64 [B], the byte of the file where each begins.
        numbers: int64 [B], how many lines of the part come before each.
        first: returns the number of the part's first line; called for a bad line.
        file: the CsvFile.
    """

    def __init__(self, path, text, starts, numbers, first, file):
        self.path, self._text, self.starts = path, text, starts
        self._numbers, self._first, self._file = numbers, first, file
        self._split = self._texts = None

    def __len__(self):
        return len(self.starts)

    def _lines(self):
        self._split = self._split or self._text.split(b"\n")[:-1]
        return self._split

    def take(self, index: Sequence[int]):
        lines, at = self._lines(), np.array(index, np.int64)
        text = b"".join(lines[i] + b"\n" for i in index)
        return LineBlock(
            self.path, text, self.starts[at], self._numbers[at], self._first, self._file
        )

    def texts(self):
        self._texts = self._texts or self._read()
        return self._texts

    def _read(self):
        file = self._file
        text = unquote(self._text, file.delimiter) or self._unquoted()
        if file.texts and fault(text):
            raise BadRows
        characters = np.frombuffer(text, np.uint8)
        newlines = characters == _NEWLINE
        cuts = np.flatnonzero(newlines | (characters == file.delimiter[0]))
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
        lines = [unquote_line(_without_return(x), self._file.delimiter) for x in self._lines()]
        if any(reason for _, reason in lines):
            raise BadRows
        return b"\n".join([*(line for line, _ in lines), b""])

    def _column(self, name):
        text, starts, ends = self.texts()
        place = self._file.names.index(name)
        return text, starts[place], ends[place]

    def integers(self, name: str) -> np.ndarray:
        return integers(*self._column(name))

    def numbers(self, name: str) -> np.ndarray:
        return numbers(*self._column(name))

    def row(self, i: int):
        file, line = self._file, _without_return(self._lines()[i])
        plain, reason = unquote_line(line, file.delimiter)
        shown = quoted(plain if file.texts else line)
        cells = plain.split(file.delimiter)
        if not reason and file.texts:
            reason = fault(plain)
        if not reason and len(cells) != file.width:
            about, less = file.hints
            less = less if len(cells) == file.width - 1 else ""
            reason = f"expected {file.width} columns{about}, found {len(cells)}{less}"
        if reason:
            return None, f"{reason}: {shown}"
        return [cells[place] for place in file.places], shown

    def place(self, i: int) -> str:
        return f":{self._first() + self._numbers[i]}"


def _without_return(line):
    return line[:-1] if line.endswith(b"\r") else line


def unquote(text: bytes, delimiter: bytes) -> Optional[bytes]:
    """Whole lines without the quotes around cells; None if `unquote_line` is needed for one."""
    if b'"' not in text:
        return text
    begin = b'"(?<![^\n%s]")' % delimiter
    text = re.sub(b'%s([^"\n%s]*)"(?=%s|\r?\n)' % (begin, delimiter, delimiter), rb"\1", text)
    return None if re.search(begin, text) else text


def unquote_line(line: bytes, delimiter: bytes) -> Tuple[bytes, Optional[str]]:
    """(the line without the quotes around its cells, what is wrong with these or None)."""
    if b'"' not in line:
        return line, None
    cells, at = [], 0
    while at <= len(line):
        if line[at : at + 1] != b'"':
            end = line.find(delimiter, at)
            end = len(line) if end < 0 else end
            cells.append(line[at:end])
        else:
            quoted_cell = _CELL.match(line, at)
            if not quoted_cell:
                return line, "a quoted cell does not end in its line (it must not hold a newline)"
            cells.append(quoted_cell[1].replace(b'""', b'"'))
            end = quoted_cell.end()
            if delimiter in cells[-1]:
                return line, "a quoted cell holds the delimiter, which is not supported"
            if line[end : end + 1] not in (b"", delimiter):
                return line, "a quoted cell goes on after its closing quote"
        at = end + 1
    return delimiter.join(cells), None


def read(part: LinePart) -> Iterator[Tuple[int, LineBlock]]:
    """Yields (bytes of the file read, a block) for the lines of a part that are not blank."""
    first, before, file = text_blocks.numbering(part.lines), 0, part.file
    try:
        for start, text, size in text_blocks.blocks(*part.lines):
            characters = np.frombuffer(text, np.uint8)
            ends = np.flatnonzero(characters == _NEWLINE)
            begins = np.append(0, ends[:-1] + 1)
            blank = (begins == ends) | (begins + 1 == ends) & (characters[begins] == _RETURN)
            rows = np.flatnonzero(~blank)[int(start == 0 and file.header) :]
            numbers = before + np.arange(len(ends))
            block = LineBlock(part.path, text, start + begins, numbers, first, file)
            yield size, block if len(rows) == len(ends) else block.take(rows)
            before += len(ends)
    except BadInput as error:
        raise BadInput(f"{str(error).rstrip('.')} after line {before}.") from error
