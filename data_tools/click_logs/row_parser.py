"""Parses raw rows to one number per cell, a block at a time and without looping over rows.

A cell's number is its key: equal cells of a field have equal keys. The key of a text of up to 8
bytes is its bytes as a big-endian number, so keys sort like texts; LONG stands for any longer text,
which is kept beside it. MISSING is an empty cell. The key of an integer or a bucket is its two's
complement with the sign bit flipped, so these sort like numbers.

B: rows of a block. F: fields.
"""

import contextlib
import functools
import itertools
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from data_tools.click_logs import column_kinds, feature_map, quoted_cells
from data_tools.click_logs.column_kinds import BUCKETS, CATEGORY, DATASETS, HOUR, LABEL, Column
from data_tools.tables import cell_text
from deepfm.errors import BadInput
from deepfm.records.bad_record import BadRecord, marked

MISSING, LONG = 0, 2**64 - 1  # UTF-8 text never has the byte 255
DELIMITERS = {"tab": b"\t", "comma": b","}
_NEWLINE, _RETURN, _MINUS = b"\n\r-"
_SIGN = np.uint64(1 << 63)
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)  # the first n bytes of a cell


class Layout(NamedTuple):
    """The layout of the rows of a file.

    Attributes:
        delimiter: the byte between two cells.
        width: cells per row.
        label: index of the label's cell; None if the file has no labels.
        labels: whether the file must have labels.
        columns: the Column of each field.
        fields: index of each field's cell.
        header: whether the first line is a header.
    """

    delimiter: bytes
    width: int
    label: Optional[int]
    labels: bool
    columns: Tuple[Column, ...]
    fields: Tuple[int, ...]
    header: bool


class Rows(NamedTuple):
    """The rows of a block.

    Attributes:
        starts: int64 [B], the byte of the file where each begins; in Parquet its number.
        labels: float32 [B], 0 or 1; 0 if the file has no labels.
        keys: uint64 [F, B].
        long: {field: (int64 [n] rows, n texts)} for the cells that are LONG.
    """

    starts: np.ndarray
    labels: np.ndarray
    keys: np.ndarray
    long: Dict[int, Tuple[np.ndarray, List[bytes]]]


class BadBlock(Exception):
    """A block holds a line that is bad, blank or quoted so that it must be parsed alone."""


def layout_of(text: bytes, labels: bool, options, path: str = "") -> Layout:
    """Finds the layout from the first line that is not blank; does not check that row.

    If it is a header, it gives the places of the fields; otherwise a file has the columns of the
    data set, in their order.

    Args:
        text: the first lines of the file.
        labels: whether the file must have labels.
        options: prepare_criteo.Options.
        path: the file, for the sentence.

    Raises:
        BadInput: the line names some of the columns that are needed, but not all.
    """
    cells, delimiter = first_cells(text, options.delimiter)
    columns = options.table or DATASETS[options.dataset]
    (label,) = (column.name.lower() for column in columns if column.kind == LABEL)
    fields = column_kinds.fields(columns, options.integers)
    names = [cell.lower() for cell in cells]
    wanted = [field.name.lower() for field in fields] + [label] * labels
    there = [name for name in wanted if name in names]
    named = options.header != "no" and len(there) == len(wanted)
    if options.header != "no" and not named and not all(map(is_number, there)):
        lacking = ", ".join(name for name in wanted if name not in names)
        raise BadInput(
            f"{path}: its first line names column {there[0]}, so it is a header, but not {lacking} "
            "(see --dataset, --columns); name all columns alike, or give --header=no if it is a "
            "row."
        )
    if not named:
        less_label = not labels and len(cells) == len(columns) - 1
        names = [c.name.lower() for c in columns if not (less_label and c.kind == LABEL)]
    place = {name: i for i, name in enumerate(names)}
    of_fields = tuple(place[field.name.lower()] for field in fields)
    header = named or options.header == "yes"
    return Layout(delimiter, len(names), place.get(label), labels, fields, of_fields, header)


def first_cells(text: bytes, delimiter: str = "auto") -> Tuple[List[str], bytes]:
    """(the cells of the first line that is not blank, the byte between two)."""
    line = _without_return(text.lstrip(b"\r\n").partition(b"\n")[0])
    by_look = "tab" if b"\t" in line else "comma"
    found = DELIMITERS[by_look if delimiter == "auto" else delimiter]
    line, _ = quoted_cells.unquote_line(line, found)
    return [cell.decode("utf-8", "replace").strip() for cell in line.split(found)], found


def is_number(text: str) -> bool:
    """Whether a text is a number, which NaN is not."""
    with contextlib.suppress(ValueError):
        return float(text) == float(text)
    return False


def parse_block(
    path: str, start: int, text: bytes, layout: Layout, number: Callable[[], int]
) -> Iterator[Union[Rows, BadRecord]]:
    """Yields a BadRecord for each bad line of a block, then the Rows of its others, if any.

    Args:
        path: the file, for sentences.
        start: the byte of the file where the block begins; 0 for the block with the file's header.
        text: whole lines, each with its newline.
        layout: the file's Layout.
        number: returns the number, from 1, of the block's first line; called for a bad line.
    """
    header = text.index(b"\n") + 1 if start == 0 and layout.header else 0  # bytes
    start, text = start + header, text[header:]
    try:
        yield _parse_lines(text, start, layout)
        return
    except BadBlock:
        pass
    good, starts = [], []

    def bad(start):
        for i, line in enumerate(text.split(b"\n")[:-1], header > 0):
            content = _without_return(line)
            plain, reason = quoted_cells.unquote_line(content, layout.delimiter)
            if reason:
                reason = f"{reason}: {quoted(content)}"
            elif content:
                reason = explain(plain, layout)
            if reason:
                yield BadRecord(path, f":{number() + i}", reason)
            elif content:
                good.append(plain + b"\n")
                starts.append(start)
            start += len(line) + 1

    yield from marked(bad(start), text.count(b"\n"))
    if good:
        yield parse(b"".join(good), 0, layout)._replace(starts=np.array(starts))


def _parse_lines(text, start, layout):
    """Like `parse`, for lines whose cells may be quoted."""
    plain = quoted_cells.unquote(text, layout.delimiter)
    if plain is None:
        raise BadBlock
    rows = parse(plain, start, layout)
    if plain is text:
        return rows
    newlines = np.flatnonzero(np.frombuffer(text, np.uint8) == _NEWLINE)
    return rows._replace(starts=start + np.concatenate([[0], newlines[:-1] + 1]))


def parse(text: bytes, start: int, layout: Layout) -> Rows:
    """Parses whole lines; raises BadBlock if one is bad or blank.

    Args:
        text: the lines, without quotes around cells.
        start: the byte of the file where they begin.
        layout: their Layout.
    """
    if layout.labels and layout.label is None or b"\0" in text or not _is_utf8(text):
        raise BadBlock
    starts, ends = cell_places(text, layout.delimiter, layout.width)
    padded = np.frombuffer(text + bytes(8), np.uint8)
    return _rows(text, padded, starts.T, ends.T, start + starts[:, 0], layout)


def cell_places(text: bytes, delimiter: bytes, width: int) -> Tuple[np.ndarray, np.ndarray]:
    """Where the cells of whole lines begin and end, int64 [B, width] each.

    Raises BadBlock if a line has not `width` cells.
    """
    characters = np.frombuffer(text, np.uint8)
    newlines = characters == _NEWLINE
    cuts = np.flatnonzero(newlines | (characters == delimiter[0]))
    rows = np.count_nonzero(newlines)
    if len(cuts) != rows * width or not newlines[cuts[width - 1 :: width]].all():
        raise BadBlock
    ends = cuts.reshape(rows, width)
    starts = np.concatenate([[0], cuts + 1])[:-1].reshape(rows, width)
    ends[:, -1] -= characters[ends[:, -1] - 1] == _RETURN
    return starts, ends


def rows_of_cells(
    text: bytes, starts: np.ndarray, ends: np.ndarray, places: np.ndarray, layout: Layout
) -> Rows:
    """Parses cells that lie anywhere in a text; raises BadBlock if one is bad.

    Args:
        text: the content of all cells.
        starts: int64 [layout.width, B], where each cell begins.
        ends: int64 [layout.width, B], one past its last byte.
        places: int64 [B], the place of each row in its file.
        layout: the Layout of the rows.
    """
    if b"\0" in text or b"\n" in text or not _is_utf8(text):
        raise BadBlock
    padded = np.frombuffer(text + bytes(8), np.uint8)
    return _rows(text, padded, starts, ends, places, layout)


def _rows(text, padded, starts, ends, places, layout):
    """The Rows of cells from starts to ends, [width, B] each; `padded` is text and 8 zeros."""
    labels = np.zeros(len(places), np.float32)
    if layout.label is not None:
        labels = _labels(padded, starts[layout.label], ends[layout.label])
    fields = list(layout.fields)
    starts = np.ascontiguousarray(starts[fields])
    lengths = np.ascontiguousarray(ends[fields]) - starts
    # A view of every 8 bytes of the text as a number; only indexing it makes a copy.
    words = np.ndarray([len(text) + 1], "<u8", padded, 0, [1])
    keys = words[starts]  # [F, B]
    keys &= _MASKS[np.minimum(lengths, 8)]
    kind_of = lambda field: layout.columns[field].kind
    for kind, which in itertools.groupby(range(len(fields)), kind_of):  # consecutive fields
        run = list(which)
        cells = slice(run[0], run[-1] + 1)
        integers = functools.partial(_integers, text, words, starts[cells], lengths[cells])
        keys[cells] = _keys(kind, keys[cells], lengths[cells], integers)
    return Rows(places, labels, keys, _long(text, starts, lengths, layout.columns))


def _without_return(line):
    return line[:-1] if line.endswith(b"\r") else line


def _is_utf8(text):
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _labels(characters, starts, ends):
    labels = characters[starts] - np.uint8(ord("0"))
    if (ends - starts != 1).any() or (labels > 1).any():
        raise BadBlock
    return labels.astype(np.float32)


def _keys(kind, keys, lengths, integers):
    """The keys of cells of a kind.

    Args:
        kind: a kind from column_kinds except INTEGER, which has become BUCKETS or SCALED.
        keys: uint64, the first 8 bytes of each cell, little-endian.
        lengths: bytes in each cell.
        integers: () -> int64, the integers in the cells; raises BadBlock if a cell is not one.
    """
    if kind == CATEGORY:
        keys = keys.byteswap()
        keys[lengths > 8] = LONG
        return keys
    x = integers()
    if kind == HOUR:
        if ((lengths != 0) & (lengths != 8)).any() or ((keys & np.uint64(0xFF)) == _MINUS).any():
            raise BadBlock
        return (keys.byteswap() & np.uint64(0xFFFF)) << np.uint64(48)
    if kind == BUCKETS:  # as feature_map.bucket
        logs = np.log(np.maximum(x, 3))
        x = np.where(x > 2, np.floor(logs * logs).astype(np.int64), x - 3)
    keys = x.view(np.uint64) ^ _SIGN
    keys[lengths == 0] = MISSING
    return keys


def _integers(text, words, starts, lengths):
    """The integers in cells, 0 for an empty one. int64, with the shape of starts."""
    negative = (words[starts] & np.uint64(0xFF)) == _MINUS
    negative &= lengths > 0
    size = lengths - negative  # digits
    empty = lengths == 0
    simple = (size > 0) & (size <= 8)
    shift = ((8 - np.clip(size, 1, 8)) * 8).astype(np.uint64)
    x, good = cell_text.eight(words[starts + negative] << shift, shift)
    if not good[simple].all():
        raise BadBlock
    x[empty] = 0
    x[negative] *= -1
    for place in zip(*np.nonzero(~simple & ~empty)):
        cell = text[starts[place] : starts[place] + lengths[place]].decode()
        if not feature_map.INTEGER.fullmatch(cell):
            raise BadBlock
        x[place] = int(cell)
    return x


def integers_of(keys: np.ndarray) -> np.ndarray:
    """The integers of a scaled field, or the codes of buckets, that keys stand for. int64."""
    return (keys ^ _SIGN).view(np.int64)


def key_of(kind: str, text: bytes) -> int:
    """The key of a text in a vocabulary; LONG for a long one."""
    if kind == BUCKETS:
        return feature_map.bucket_code(text.decode()) + (1 << 63)
    return LONG if len(text) > 8 else int.from_bytes(text.ljust(8, b"\0"), "big")


def texts_of(kind: str, keys: np.ndarray) -> List[str]:
    """The texts in a vocabulary for keys uint64 [n] that are not LONG."""
    if kind == BUCKETS:
        return [feature_map.bucket_text(code) for code in integers_of(keys).tolist()]
    return [text.decode() for text in keys.astype(">u8").view("S8").tolist()]


def _long(text, starts, lengths, columns):
    texts = {}
    for field in np.flatnonzero((lengths > 8).any(axis=1)):
        if columns[field].kind == CATEGORY:
            rows = np.flatnonzero(lengths[field] > 8)
            first, size = starts[field][rows], lengths[field][rows]
            texts[int(field)] = rows, [text[a : a + n] for a, n in zip(first, size)]
    return texts


def explain(line: bytes, layout: Layout) -> Optional[str]:
    """What is wrong with a line that is not blank, and what was expected; None if it is good."""
    sample = quoted(line)
    if b"\0" in line:
        return f"holds a NUL character: {sample}"
    if not _is_utf8(line):
        return f"is not UTF-8: {sample}"
    cells = line.split(layout.delimiter)
    if len(cells) != layout.width:
        reason = f"expected {layout.width} columns (see --dataset, --columns, --delimiter), found "
        reason += str(len(cells))
        if len(cells) == layout.width - 1 and layout.labels:
            reason += " (only --test_input may lack the label)"
        return f"{reason}: {sample}"
    if layout.labels and layout.label is None:
        return f"has no label column (only --test_input may lack it): {sample}"
    return _explain(cells, layout, sample)


def explain_cells(cells: Sequence[bytes], layout: Layout) -> Optional[str]:
    """What is wrong with the cells of a row; None if they are good."""
    sample = quoted(b",".join(cells))
    if any(b"\0" in cell or b"\n" in cell for cell in cells):
        return f"holds a NUL character or a newline: {sample}"
    if not all(map(_is_utf8, cells)):
        return f"is not UTF-8: {sample}"
    return _explain(cells, layout, sample)


def _explain(cells, layout, sample):
    if layout.label is not None and cells[layout.label] not in (b"0", b"1"):
        return f"label {quoted(cells[layout.label])} is not 0 or 1: {sample}"
    for column, place in zip(layout.columns, layout.fields):
        cell = cells[place].decode()
        reason = feature_map.explain_cell(column.kind, cell) if cell else None
        if reason:
            return f"{column.name} {reason}: {sample}"
    return None


def quoted(raw: bytes, limit: int = 60) -> str:
    """A text in a sentence."""
    text = raw.decode("utf-8", "replace")
    return repr(text if len(text) <= limit else text[: limit - 4] + " ...")
