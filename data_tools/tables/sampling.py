"""Reads rows at evenly spaced places of tables, to see what their columns are."""

import contextlib
from typing import Any, Collection, Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from data_tools.tables import blocks, csv_blocks, parquet_blocks, reading
from data_tools.tables.csv_blocks import CsvFile, LinePart
from deepfm.errors import BadInput
from deepfm.records import data_file, text_blocks
from deepfm.records.raw import cells as rules
from deepfm.records.schema import BadRecord

ROWS = 100000  # of the sample, at least
PLACES = 40  # of the files, from which it is drawn
FILES = 40  # of many, at most


class Cells(NamedTuple):
    """The different texts of a column in the sample that are not missing, the most frequent first.

    Attributes:
        texts: n of them, a pyarrow Array.
        counts: int64 [n].
        rows: how many rows the sample has.
    """

    texts: Any
    counts: np.ndarray
    rows: int

    def share(self, which: np.ndarray) -> float:
        """The share of cells whose texts `which`, bool [n], says."""
        return float(self.counts[which].sum() / max(self.counts.sum(), 1))

    def match(self, pattern: str) -> np.ndarray:
        """Whether a whole text matches. bool [n]"""
        import pyarrow.compute as pc

        return np.array(pc.match_substring_regex(self.texts, f"^(?:{pattern})$"))


class Head(NamedTuple):
    """How a file lies: the separator, whether there is a header, and the names of its columns."""

    separator: Optional[str]
    header: Optional[bool]
    names: Tuple[str, ...]


def sample(
    files: Sequence, options, labels: Collection[str], missing: Sequence[str]
) -> Tuple[Head, Dict[str, Cells], int]:
    """Reads at least ROWS rows, or all.

    Args:
        files: DataFiles.
        options: click_logs.options.Options; `delimiter`, `header` and `label` are asked.
        labels: names by which a first line is a header.
        missing: texts of missing cells.

    Returns:
        (the Head of the first file, None where others differ; {column: Cells}, none if there are no
        rows; about how many rows the files have).
    """
    chosen = _some(files, FILES)
    heads = {f.path: _head(f.path, options, labels) for f in chosen}
    names = heads[files[0].path].names
    columns, rows, total = _sample(chosen, heads, names)
    total = int(total * sum(f.bytes for f in files) / sum(f.bytes for f in chosen))
    separator, header, _ = (x[0] if len(set(x)) == 1 else None for x in zip(*heads.values()))
    found = {name: _cells(x, rows, missing) for name, x in zip(names, columns) if rows}
    return Head(separator, header, names), found, total


def _some(items, most):
    """At most so many of some items, evenly spaced."""
    return [items[i * len(items) // most] for i in range(most)] if len(items) > most else items


def _head(path, options, labels) -> Head:
    if data_file.is_parquet(path):
        columns = parquet_blocks.open_file(path).schema_arrow
        for column in columns:
            parquet_blocks.check_text(path, column)
        return Head(None, None, tuple(columns.names))
    cells, separator = csv_blocks.first_cells(path, options.delimiter)
    twice = next((x for x in cells if x and cells.count(x) > 1), None)
    named = [x for x in cells if x and not csv_blocks.is_number(x) and x not in rules.MISSING]
    header = len(named) >= len(cells) - 1
    if options.header != "auto":
        header = options.header == "yes"
    elif header and not (options.label in cells or {x.lower() for x in cells} & labels):
        header = not _repeats(path, separator, cells)
    if header and twice:
        raise BadInput(f"{path}: two columns are called {twice}; give each a name of its own.")
    names = [x or f"Unnamed: {i}" for i, x in enumerate(cells)]
    names = names if header else [f"column_{i}" for i in range(1, len(cells) + 1)]
    return Head(separator.decode(), header, tuple(names))


def _repeats(path, separator, cells):
    """Whether a cell of the first line is in its column once more, as that of a row is."""
    with contextlib.closing(text_blocks.blocks(path)) as found:
        lines = next(found, (0, b"", 0))[1].split(b"\n")[1:]
    rows = [csv_blocks.split_line(line.rstrip(b"\r"), separator)[0] for line in lines]
    return any(
        cell.encode() == row[i].strip()
        for row in rows
        if len(row) == len(cells)
        for i, cell in enumerate(cells)
    )


def _sample(files, heads, names):
    """(the cells of each column as pyarrow's Arrays, rows, about how many rows there are)."""
    columns, rows, read = [[] for _ in names], 0, 0
    total = sum(file.bytes for file in files)
    for part, most in _parts(files, heads, names, total):
        left = most
        for size, block in reading.read(part):
            read += size
            for some in blocks.sifted(block, lambda x: x.texts(), _explain):
                if isinstance(some, BadRecord):
                    continue
                text, starts, ends = some
                for column, begin, end in zip(columns, starts, ends):
                    column.append(blocks.distinct(text, begin, end))
                rows, left = rows + starts.shape[1], left - starts.shape[1]
            if left <= 0:
                break
    return columns, rows, int(rows * max(total / max(read, 1), 1))


def _explain(block, row):
    cells, reason = block.row(row)
    return reason if cells is None else None


def _parts(files, heads, names, total):
    """Yields (Part, rows of it to read): all, or those at evenly spaced places of all files."""
    per_place = -(-ROWS // PLACES)
    if data_file.is_parquet(files[0].path):
        parts = [x for f in files for x in parquet_blocks.cut(f.path, 1)]
        all_rows = sum(x.rows for x in parts)
        for part in parts:
            there = tuple(_places(part.path, heads, names, lambda own, i: own[i]))
            share = part.rows if all_rows <= ROWS else -(-part.rows * ROWS // all_rows)
            yield part._replace(names=names, there=there, texts=True), share
        return
    few = total <= PLACES * text_blocks.BLOCK
    for f in files:
        head, places_of = heads[f.path], tuple(_places(f.path, heads, names, lambda own, i: i))
        about = head.separator.encode(), len(head.names), names, places_of, head.header, True
        file = CsvFile(*about)
        if few or f.path.endswith(".gz"):
            yield LinePart(f.path, text_blocks.LineRange(f.path), file), _all(f, few, total)
            continue
        count = max(1, round(PLACES * f.bytes / total))
        for lines in filter(None, text_blocks.cut([f], -(-f.bytes // count))):
            yield LinePart(f.path, lines, file), per_place


def _places(path, heads, names, what):
    """`what` (the file's own names, a place among them) of each of the names."""
    own = heads[path].names
    for name in names:
        yield what(own, blocks.find(path, name, own, "as the first file has"))


def _all(file, few, total):
    return 1 << 62 if few else -(-ROWS * file.bytes // total)


def _cells(parts, rows, missing) -> Cells:
    import pyarrow as pa
    import pyarrow.compute as pc

    counts = {}
    texts = pa.concat_arrays([texts for texts, _ in parts])
    numbers = np.concatenate([np.bincount(x, minlength=len(texts)) for texts, x in parts])
    texts = texts.dictionary_encode()
    counts = np.bincount(
        blocks.numpy_of(texts.indices, np.int32), numbers, len(texts.dictionary)
    ).astype(np.int64)
    texts = texts.dictionary
    there = np.array(pc.invert(pc.is_in(texts, pa.array(["", *missing], texts.type))))
    texts, counts = texts.filter(pa.array(there)), counts[there]
    by_text = np.array(pc.sort_indices(texts))
    order = by_text[np.argsort(-counts[by_text], kind="stable")]
    return Cells(texts.take(pa.array(order)), counts[order], rows)
